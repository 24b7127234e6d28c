"""The command `weightplane`: what people type, and what they read.

A command asks; a `…_table` or `…_text` file makes of the answer what is shown. Those are pure, and their output has
golden files (`tests/golden`), reviewed like code. JSON stays as it is: keys are only ever added. Nothing is decided
here, nothing heavy is imported before a command needs it, and an expected error is one line and an exit code
(`ending`).
"""
