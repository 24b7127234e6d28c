"""Labels of a server that others may write to as well."""

from __future__ import annotations

import pytest

from controlplane.core.errors import EngineDied
from engine_agent.external.receipts import KEPT, Receipts
from engine_agent.external.server import Server, ServerRefused
from tests.support.recording_server import RecordingServer, good_config, recording_server


def test_inv1_a_receipt_counts_from_the_answer_on_and_an_unknown_one_is_none() -> None:
    receipts = Receipts()
    assert receipts.present is None
    first = receipts.issue("7")
    assert receipts.present is None
    receipts.took(first)
    assert receipts.present == first
    second = receipts.issue("7")
    assert (receipts.present, second != first) == (None, True)


def test_inv11_only_a_receipt_of_this_life_stands_for_a_version() -> None:
    receipts = Receipts()
    issued = receipts.issue("7")
    assert receipts.label_of(issued) == "7"
    for foreign in ("default", "7.000000000000", Receipts().issue("7")):
        assert receipts.label_of(foreign) == foreign
    for number in range(KEPT):
        receipts.issue(str(number))
    assert receipts.label_of(issued) == issued


@pytest.mark.parametrize("path", ["/finish_weight_update", "/update_weight_version"])
async def test_inv1_a_label_that_was_answered_with_500_is_not_this_agent_s_whatever_the_server_shows(path: str) -> None:
    async with recording_server(RecordingServer(good_config("m"))) as recording:
        server = Server(recording.url, "e0", lambda _: None)
        try:
            await server.llm.finish_weight_update("7")
            await server.llm.check_label()
            recording.refuse[path] = 500
            setting = server.llm.finish_weight_update if "finish" in path else server.llm.update_weight_version
            with pytest.raises(ServerRefused, match="500"):
                await setting("8")
            assert server.llm.receipts.present is None
            with pytest.raises(EngineDied, match="this agent set None"):
                await server.llm.check_label()
        finally:
            await server.close()
