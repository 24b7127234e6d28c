"""A channel that proves who we are, with what lies on the disk when a call begins.

Certificates of a gRPC channel are fixed when it is made. So calls go over a new one once the files changed, and streams
that stand stay on the older one, which is kept for as long as two renewals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from controlplane.core.errors import TlsFailed
from controlplane.rpc.addresses import is_loopback, split_address
from controlplane.rpc.security.certificates import Pems, channel_credentials, reread_pems
from controlplane.rpc.security.files import Reread
from controlplane.rpc.security.settings import TlsSettings
from controlplane.rpc.security.tokens import read_token

OLDER_KEPT = 2
"""Channels with earlier certificates that stay open for the streams on them."""

Options = Sequence[tuple[str, Any]]


class SecuredChannel(grpc.aio.Channel):
    """As grpc's own. It connects on first use; a call raises TlsFailed where its files cannot be used."""

    def __init__(self, target: str, tls: TlsSettings, options: Options) -> None:
        self._target = target
        self._tls = tls
        self._options = _named(options, tls.server_name)
        self._pems: Reread[Pems] | None = None
        self._token: Reread[str] | None = None
        self._reads = 0
        self._channels: list[grpc.aio.Channel] = []

    def _open(self) -> None:
        """With the first call. Raises TlsFailed: files cannot be read, or a token would go in clear to another host."""
        try:
            self._pems = reread_pems(self._tls) if self._tls.ca is not None else None
            if (path := self._tls.token) is not None:
                self._token = Reread([path], lambda: read_token(path))
        except (OSError, ValueError) as error:
            raise TlsFailed(peer=self._target, cause=str(error)) from error
        if self._pems is not None:
            return
        if not is_loopback(_host(self._target)):
            raise TlsFailed(peer=self._target, cause="a token goes only over TLS, or to this host: set tls.ca")
        self._channels.append(grpc.aio.insecure_channel(self._target, options=self._options))

    def _now(self) -> grpc.aio.Channel:
        if not self._channels:
            self._open()
        if self._pems is None:
            return self._channels[-1]
        pems = self._pems.get()
        if self._reads != self._pems.reads:
            self._reads = self._pems.reads
            credentials = channel_credentials(pems)
            self._channels.append(grpc.aio.secure_channel(self._target, credentials, options=self._options))
            del self._channels[: -OLDER_KEPT - 1]
        return self._channels[-1]

    def _calls(self, kind: str, *arguments: Any, **options: Any) -> Any:
        """A multi-callable that is made anew where the channel was."""
        channel: grpc.aio.Channel | None = None
        made: Callable[..., Any] | None = None

        def call(*request: Any, metadata: Any = None, **settings: Any) -> Any:
            nonlocal channel, made
            now = self._now()
            if made is None or channel is not now:
                channel, made = now, getattr(now, kind)(*arguments, **options)
            return made(*request, metadata=self._with_token(metadata), **settings)

        return call

    def _with_token(self, metadata: Any) -> Any:
        if self._token is None:
            return metadata
        return (*(metadata or ()), ("authorization", f"Bearer {self._token.get()}"))

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._calls("unary_unary", *arguments, **options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._calls("unary_stream", *arguments, **options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._calls("stream_unary", *arguments, **options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._calls("stream_stream", *arguments, **options)

    async def __aenter__(self) -> SecuredChannel:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for channel in self._channels:
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._now().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._now().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._now().channel_ready()


def _named(options: Options, server_name: str) -> Options:
    return [*options, ("grpc.ssl_target_name_override", server_name)] if server_name else list(options)


def _host(target: str) -> str:
    try:
        return split_address(target)[0]
    except ValueError:
        return target
