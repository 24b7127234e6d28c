"""What `make bench` runs: each file with a `measure` is a row, or a few, of docs/benchmarks.md.

A row is added as a file of its own; `harness` says what it is made of and how contenders take turns, `processes` and
`coordinator` start what it measures, `fleets`, `wire_fleet` and `real` are the fleets that there are. Nothing in the
product may know that it is measured, and no test asserts a figure.
"""
