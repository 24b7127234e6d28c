"""Weight sources for trainers that are not Megatron: any module, any iterator, a model with its draft.

Each yields what its `metadata()` states, on every rank and to the end. What gathers is a collective: no rank may leave
it early.
"""
