"""What several kinds of tests share, one idea a file. Nothing is claimed here, and nothing of the product imports it.

A fake stands in where a hundred of something are needed, and passes the real thing's suite (`tests.contract`).
"""
