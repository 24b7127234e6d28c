"""Several parts over real gRPC, real processes, or one real engine or trainer.

What a real engine or Megatron is needed for says so by its mark (`real`, `slow`). They run one after the other; what is
waited for is a fact (`tests.support.eventually`), never a time.
"""
