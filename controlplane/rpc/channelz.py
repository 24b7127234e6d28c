"""grpc.channelz.v1.Channelz: what connections and streams there are, for admins. By grpc's own package, an extra.

It shows addresses of peers and counts of calls, never what they carry.
"""

from __future__ import annotations

from importlib.util import find_spec

import grpc

NAME = "grpc.channelz.v1.Channelz"


def check_installed() -> None:
    """Raises ValueError: how to get it."""
    if find_spec("grpc_channelz") is None:
        raise ValueError("channelz needs grpc's own package: pip install 'weightplane[channelz]'")


def add_channelz(server: grpc.aio.Server) -> str:
    """Its name, as `start_server` wants it."""
    from grpc_channelz.v1 import channelz

    channelz.add_channelz_servicer(server)
    return NAME
