"""Engines that span nodes: the agent beside the engine's front end, and a member process on each further node.

Members hold bytes and processes, and decide nothing: one that is lost ends the engine's life. Their messages are
`weightplane.local.v1`, between the parts of one engine.
"""
