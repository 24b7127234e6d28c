"""What `make bench` runs: each file with a `measure` is a row, or a few, of docs/benchmarks.md."""
