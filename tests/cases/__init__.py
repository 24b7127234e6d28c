"""docs/cases.md, row by row: each test here is named after the failure that it would have caught.

A row is attacked by its idea, on real gRPC servers with in-memory engines in this process, and on real training
processes where the trainer's own words are the point. `fleet.py` is the fleet under test, `engines.py` puts a hand on
its engines, `samples.py` notes tokens as they come. A transport or an RPC that the contract gains is met by V1 and L7
without a line of them being changed, or fails them until somebody says here how it is called.
"""
