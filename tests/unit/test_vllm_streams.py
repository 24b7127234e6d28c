"""When nothing is on its way any more: the parts of a quiesce that can be seen without vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controlplane.core.errors import InvalidRequest
from controlplane.core.sampling import SamplingSettings
from engine_agent.vllm.calls import Core
from engine_agent.vllm.canary import DECODED_TOKENS, canary_prompt
from engine_agent.vllm.endings import ending
from engine_agent.vllm.streams import OutputTap, Streams


class FakeCore:
    """The queue between vLLM's socket task and its output handler."""

    def __init__(self) -> None:
        self.outputs_queue: asyncio.Queue[str] = asyncio.Queue()

    async def get_output_async(self) -> str:
        return await self.outputs_queue.get()


class FakeLlm:
    def __init__(self) -> None:
        self.engine_core: Any = FakeCore()
        self.output_handler: asyncio.Task[None] | None = None
        self.may_go_on = asyncio.Event()
        self.handled: list[str] = []

    def start_handler(self) -> None:
        self.output_handler = asyncio.create_task(self._handle())

    async def _handle(self) -> None:
        while True:
            output = await self.engine_core.get_output_async()
            await self.may_go_on.wait()  # vLLM yields between parts of one large output
            self.handled.append(output)


async def step() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_tap_is_idle_only_while_the_handler_has_nothing_in_hand() -> None:
    """INV-11: a token in the handler's hand is on nobody's count yet."""
    llm = FakeLlm()
    tap = OutputTap(llm)
    assert tap.idle, "nothing was ever asked for"
    llm.start_handler()
    await step()
    assert tap.idle
    llm.engine_core.outputs_queue.put_nowait("tokens")
    assert not tap.idle, "in the queue"
    await step()
    assert not tap.idle, "in the handler's hand"
    llm.may_go_on.set()
    await step()
    assert llm.handled == ["tokens"]
    assert tap.idle


async def test_a_handler_that_ended_is_not_idle() -> None:
    llm = FakeLlm()
    tap = OutputTap(llm)
    llm.start_handler()
    await step()
    assert llm.output_handler is not None
    llm.output_handler.cancel()
    await step()
    assert not tap.idle


class RefusingLlm:
    """Some of vLLM's checks of a request raise a plain ValueError."""

    errored = False
    tokenizer = None

    async def add_request(self, *_: Any, **__: Any) -> None:
        raise ValueError("sampling distribution replay requires top_k > 0")


async def test_what_vllm_will_not_take_is_the_requests_fault_and_nobody_waits_for_it() -> None:
    core = Core(RefusingLlm(), "e0", None, lambda _: None)  # type: ignore[arg-type]  # no log is needed
    streams = Streams()
    with pytest.raises(InvalidRequest, match="top_k > 0"):
        await anext(streams.run(core, "r", [1], SamplingSettings(max_tokens=1), ""))
    assert len(streams) == 0
    core.close()


@pytest.mark.parametrize(("vocab_size", "max_model_len"), [(256, 256), (151936, 32768), (8, 6), (2, 512)])
def test_the_canary_fits_every_model(vocab_size: int, max_model_len: int) -> None:
    prompt = canary_prompt(vocab_size, max_model_len)
    assert len(prompt) >= 2
    assert all(0 <= token < vocab_size for token in prompt)
    assert len(prompt) + DECODED_TOKENS <= max_model_len


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ((None, None), (None, "")),
        (("length", None), ("length", "")),
        (("stop", 7), ("stop", "7")),
        (("repetition", None), ("stop", "repetition")),
        (("error", None), ("abort", "error")),
    ],
)
def test_an_end_that_the_port_has_no_word_for_keeps_vllms_as_its_stop_reason(
    said: tuple[str | None, object], meant: tuple[str | None, str]
) -> None:
    assert ending(*said) == meant
