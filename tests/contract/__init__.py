"""One suite for every implementation of a port: engines, transports, ledgers.

A new implementation is a line in its suite's table, and obeys it as it stands; what a port promises anew is a test for
all of them. Nothing here may know which one it has in hand.
"""
