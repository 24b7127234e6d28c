"""A server with the routes of vLLM's that an external engine is reached by, which writes down what it was sent.

It has no model: what it promises is the manner of the real one's answers (see tests/contract for that one), and that a
test can make each of them fail, hang or come late.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


def good_config(model: str, backend: str = "weightplane") -> dict[str, Any]:
    """What /server_info says of a server that was started as the documentation says."""
    return {
        "model_config": {
            "model": model,
            "dtype": "torch.float32",
            "quantization": None,
            "max_model_len": 64,
            "max_logprobs": 20,
            "logprobs_mode": "processed_logprobs",
        },
        "parallel_config": {"world_size": 1, "data_parallel_size": 1, "_api_process_count": 1},
        "scheduler_config": {"policy": "priority", "stream_interval": 1, "max_num_seqs": 8},
        "cache_config": {"enable_prefix_caching": True},
        "device_config": {"device": "cpu"},
        "weight_transfer_config": {"backend": backend},
        "speculative_config": None,
        "kv_transfer_config": None,
    }


@dataclass
class RecordingServer:
    """`url` once it runs; see `recording_server`."""

    config: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=dict)
    plugin: bool = True
    device_uuid: str = ""
    url: str = ""
    label: str = "default"
    paused: bool = False
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """Path and body of each POST, in order."""
    refuse: dict[str, int] = field(default_factory=dict)
    """By path: the status that it is answered with, and nothing is done."""
    redirect: dict[str, str] = field(default_factory=dict)
    """By path: where it says that the caller should go instead."""
    hold: dict[str, asyncio.Event] = field(default_factory=dict)
    """By path: the answer comes when it is set; what was asked for is done before."""
    cut: set[str] = field(default_factory=set)
    """Paths whose connection breaks instead of an answer."""
    result: dict[str, Any] = field(default_factory=lambda: {"ok": True, "touched": True, "cause": "", "loaded": 2})
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The worker's, where it is another after a step of this name."""
    out: dict[str, int] = field(default_factory=dict)
    """Tokens that were handed on, by request."""
    streams: dict[str, asyncio.Queue[dict[str, Any] | None]] = field(default_factory=dict)

    def posted(self, path: str) -> list[Any]:
        return [body for called, body in self.calls if called == path]

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    # ---- what a test makes of a running request ----

    def say(self, request_id: str, *tokens: int, **end: Any) -> None:
        """More tokens of a request; `finish_reason` and `weight_versions` end it."""
        choice = {"index": 0, "token_ids": list(tokens), "finish_reason": None, "stop_reason": None, "logprobs": None}
        self.streams[request_id].put_nowait({"choices": [choice | end]})
        self.out[request_id] = self.out.get(request_id, 0) + len(tokens)
        if end:
            self.out.pop(request_id)

    def spans(self, *borders: tuple[str, int, int]) -> list[dict[str, Any]]:
        return [{"version": version, "start": start, "end": end} for version, start, end in borders]

    # ---- the routes ----

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        body = await request.json() if request.can_read_body else None
        if request.method == "POST":
            self.calls.append((path, body))
        if path in self.redirect:
            raise web.HTTPTemporaryRedirect(self.redirect[path])
        if path in self.refuse:
            return web.json_response({"error": {"message": f"{path} was refused"}}, status=self.refuse[path])
        if path == "/inference/v1/generate" and body and "token_ids" in body:
            return await self._generate(request, body)
        answer = self._done(path, request, body)
        if path in self.hold:
            await self.hold[path].wait()
        if path in self.cut:
            assert request.transport is not None
            request.transport.abort()
        status = 404 if answer is None else 400 if path == "/inference/v1/generate" else 200
        return web.json_response(answer, status=status)

    def _done(self, path: str, request: web.Request, body: Any) -> dict[str, Any] | None:
        match path:
            case "/version":
                return {"version": "0"}
            case "/server_info":
                return {"vllm_config": self.config, "vllm_env": self.environment}
            case "/weight_info":
                return {"weight_version": self.label}
            case "/is_paused":
                return {"is_paused": self.paused}
            case "/pause" | "/resume":
                self.paused = path == "/pause"
                if request.query.get("mode") == "abort":
                    self._abort_all()
            case "/abort_requests":
                self._abort_all()
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/finish_weight_update":
                self.label = body.get("weight_version", self.label)
            case "/reset_prefix_cache":
                return {"success": True}
            case "/collective_rpc":
                steps = [b["update_info"].get("step", "") for b in self.posted("/update_weights")]
                done = self.results.get(steps[-1] if steps else "", self.result)
                facts = {"device_uuid": self.device_uuid} if body["method"] == "weightplane_facts" else done
                return {"results": [{"rank": 0, **facts}]}
            case "/weightplane/live":
                return {"tokens": self.out} if self.plugin else None
        return {}

    def _abort_all(self) -> None:
        for request_id in list(self.out):
            self.say(request_id, finish_reason="abort", weight_versions=[])

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        name = body["request_id"]
        said = self.streams.setdefault(name, asyncio.Queue())
        self.out.setdefault(name, 0)
        if not body.get("stream"):
            whole = await said.get()
            return web.json_response(whole)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        while (line := await said.get()) is not None:
            await answer.write(f"data: {json.dumps(line)}\n\n".encode())
            if line.get("choices") and line["choices"][0]["finish_reason"]:
                break
        await answer.write(b"data: [DONE]\n\n")
        return answer


@asynccontextmanager
async def recording_server(server: RecordingServer) -> AsyncIterator[RecordingServer]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with TestServer(app, host="127.0.0.1") as running:
        server.url = str(running.make_url("/")).rstrip("/")
        yield server
