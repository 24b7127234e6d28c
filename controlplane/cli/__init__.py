"""The command `weightplane`. One file a command, one for what it prints; what is printed is pure and has golden files.

To be changed here: words, tables, exit codes, how a process is started. Not here: what is true of the fleet. Commands
show the coordinator's view and the agents' own answers, and conclude nothing that those do not say.
"""
