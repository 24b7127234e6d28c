"""The rollout client: where to ask, the tokens, and which version made each of them.

`client` is what users call; `asking` and `choosing` carry one request over as many engines as it takes; `routing`,
`policies`, `sample` and `lag_guard` are pure. `adapters` are other projects' shapes over it.

To be changed here: how an engine is chosen, waited for and given up. Not here: which engine is routable, which is the
coordinator's to say (INV-10); and no sample leaves whose spans do not cover its tokens (INV-11).
"""
