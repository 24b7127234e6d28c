"""The whole: real vLLM, real training, through the same commands and library that users have.

Few, and each is dear: what can be claimed of a part is claimed elsewhere. Nothing here has a fake in it.
"""
