"""Megatron models: made from a checkpoint, and their tensors under the checkpoint's names.

`build`, `loading`, `layer_spec` and `cpu_shim` make a model; `source` exports one, with `families` (names and shapes,
one file a family), `holdings` (who has what) and `collectives` (gathered with deadlines). A family is added in
`families`. What was loaded is exported bit for bit: nothing here may cast, scale or leave out what a checkpoint has.
"""
