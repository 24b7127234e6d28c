"""Every way in which a number of ranks can split a model, on real Megatron ranks: each must yield the checkpoint.

`topology` has the ways and the models, `job` is one rank, `pushes` and `receiving` take what it yields to engines by
each transport. A family or a transport is added there; what is compared is bits, never a tolerance.
"""
