"""The coordinator's daemon: calls and sessions in, the core's decisions, effects out.

`hub` is the one place where an event meets `FleetCore` and its effects leave, in order, the ledger before anyone is
told (INV-9); `services` decode and encode; `views` are all that people are shown, whichever way.

To be changed here: how something is carried, shown or measured. Not here: what is decided (`controlplane.core`), what
survives (`controlplane.ledger`), and nothing may touch a tensor's bytes.
"""
