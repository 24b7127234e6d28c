"""How we connect: channel and server options, written down once, each with its reason.

Names were checked against behaviour: a misspelt option is ignored in silence, so
`tests/integration/test_channels.py` pins what they do.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from controlplane.rpc.security.channel import SecuredChannel
from controlplane.rpc.security.settings import PLAIN, TlsSettings

KEEPALIVE_SECONDS = 10
PING_TIMEOUT_SECONDS = 5
"""A peer that is stopped or cut off is noticed after at most KEEPALIVE + PING_TIMEOUT seconds."""
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""gRPC's own default, kept: a limit is a feature. Bulk bytes go in chunks of 1 MiB or by shared memory."""
MAX_RECONNECT_BACKOFF_MS = 2_000
CONNECT_SECONDS = 5
"""As long as for the answer to a ping. Every call that waits for a connection fails with the attempt: half a second was
too short on a busy machine, and a TLS handshake takes longer yet."""

_BOTH = [
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_SECONDS * 1000),
    # The documented timeout alone finds a dead peer after 60 s; this internal name does it.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_SECONDS * 1000),
    # Pings go on while a stream is silent, and while no call is open.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
CHANNEL_OPTIONS = [
    *_BOTH,
    # The default backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    # It ends an attempt to connect, whatever its name says.
    ("grpc.min_reconnect_backoff_ms", CONNECT_SECONDS * 1000),
    ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
    # A proxy of the environment must not carry in-cluster calls.
    ("grpc.enable_http_proxy", 0),
    # Agents restart on the same port: a channel must not share a dead subchannel with an older one.
    ("grpc.use_local_subchannel_pool", 1),
]
HANDSHAKE_SECONDS = 10
HANDSHAKE_OPTION = "grpc.server_handshake_timeout_ms"
SERVER_OPTIONS = [
    *_BOTH,
    # On by default, and then a second coordinator binds the same port without an error.
    ("grpc.so_reuseport", 0),
    # Else clients that ping as above are sent away with too_many_pings.
    ("grpc.http2.min_ping_interval_without_data_ms", PING_TIMEOUT_SECONDS * 1000),
    # Who connects and says nothing holds a socket for two minutes otherwise.
    (HANDSHAKE_OPTION, HANDSHAKE_SECONDS * 1000),
]
SMALL_WINDOWS = (
    # Else a stream's window grows to megabytes, which lie here while whoever they are for reads nothing.
    ("grpc.http2.bdp_probe", 0),
)
"""For who hands messages on: what it holds of a stream stays at HTTP/2's 64 KiB."""


def open_channel(target: str, tls: TlsSettings = PLAIN, more: Sequence[tuple[str, int]] = ()) -> grpc.aio.Channel:
    """A channel to `host:port` (IPv6 hosts in brackets). It connects on first use and reconnects by itself. `more`:
    options beside the common ones.

    With `tls` a call raises TlsFailed where its files cannot be used.
    """
    if tls.ca is None and tls.token is None:
        return grpc.aio.insecure_channel(target, options=[*CHANNEL_OPTIONS, *more])
    return SecuredChannel(target, tls, [*CHANNEL_OPTIONS, *more])
