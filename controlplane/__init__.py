"""The control plane: decisions, record, contract on the wire, coordinator, rollout client, command line.

Its rooms know each other one way only, and so do the files in each (`pyproject.toml` has the contracts of imports). The
modules beside the rooms are about processes, hosts and files in general, and know of no fleet. The base install is
enough for all of it: only `collectives` and what stands behind `device_memory`'s port need torch.
"""
