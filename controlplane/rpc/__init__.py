"""How we speak gRPC: channels, servers, codecs, errors, limits, logs and metrics. Shared by all daemons and clients.

Protobuf's messages end in the codecs; the core never sees one. To be changed here: how something is said or bounded.
Not here: what it means, who may say it (`controlplane.core.access`), and nothing that one daemon alone needs.
"""
