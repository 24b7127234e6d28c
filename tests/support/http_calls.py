"""Calls to HTTP ports, with tokens and certificates, and how they are answered."""

from __future__ import annotations

import ssl
from typing import Any

import aiohttp

from controlplane.rpc.security import TlsSettings

RUN = "run-a"
LIMIT = aiohttp.ClientTimeout(total=20)


def context_of(tls: TlsSettings, *, shows: bool = True) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca)
    if shows and tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def status(url: str, method: str = "GET", **more: Any) -> tuple[int, str]:
    body: dict[str, Any] = {"json": {"prompt": [1, 2, 3]}} if method == "POST" else {}
    async with (
        aiohttp.ClientSession(timeout=LIMIT) as client,
        client.request(method, url, **body, **more) as answer,
    ):
        if answer.status != 200 or "event-stream" not in answer.content_type:
            await answer.read()
        return answer.status, answer.headers.get("x-weightplane-reason", "")
