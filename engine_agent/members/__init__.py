"""Engines that span nodes: the agent beside the engine's front end, and a member process on each further node."""
