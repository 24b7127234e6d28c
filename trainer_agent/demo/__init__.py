"""The demo's training: a small model made on this machine, a task that anyone can check, GRPO over `TrainerRank`.

The examples, the benchmark and the tests train with its parts. It uses the product as any trainer would: nothing of the
product may know of it, but the commands that start it.
"""
