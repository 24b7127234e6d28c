"""What needs an NVIDIA GPU: `make test-gpu` runs it, in a virtual environment with CUDA builds, and skips it elsewhere.

Here only, since no other test reaches it: everything that can be claimed without a GPU is claimed where all tests run.
"""
