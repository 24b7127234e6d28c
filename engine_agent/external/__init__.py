"""Engines that others run: an agent beside a `vllm serve` that it did not start, over that server's RL endpoints.

Three things differ from an engine of the agent's own. Its label is read back as a receipt (`receipts`); what the stock
routes cannot tell is told by routes that the package adds to the server where they are let in (`vllm.routes`); and the
server's process stays when the agent goes.
"""
