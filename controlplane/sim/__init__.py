"""A seeded simulator of a whole fleet around the pure cores.

`runner.run(seeds, events, settings)` gives a `Report`: what was violated, and what was never reached. One seed replays
one history. `world` puts the processes together, `kernel` is time and network, `witness` judges, `scenarios` are fixed.

Each file knows only those before it: `kernel`, `engine` and `disks`; `life`, what one incarnation is; `witness` and
`faults`; `surroundings`, which every process is given; the parts of an agent up to `agent`; `coordinator`; the parts of
a trainer up to `trainer` and `team`; `cast`, and who meets all of it: `clients`, `people`, `rogue`, `troubles`.

To be changed here: faults and troubles, scenarios, rules of the witness. Not here: a decision. What an engine or the
fleet decides is the cores' own, and the witness compares it with what it saw itself, never with what a core says of it.
"""
