"""How all of Weightplane's processes speak gRPC: channels, servers, errors, validation, metrics, logs, security.

Shared by the coordinator and both agents, so it knows none of them. Protobuf messages end in the codecs: what goes on
from there is the core's types. An error gets its status and reason in `errors`, once; options of channels and servers
stand in `channels`, each with its reason; rules for fields are in the protos, and `validation` only reads them.
"""
