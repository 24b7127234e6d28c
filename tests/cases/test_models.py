"""Failures that people met in what models are (docs/cases.md, M1, M5, M6, G8), as far as weight sources decide them.

What the engine does about them is tested where engines are; here it appears as what it expects of a layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from controlplane.core.errors import LayoutInvalid, ManifestIncomplete, ShapeMismatch
from controlplane.core.layout import DType, Expected, Layout, content_digest
from tests.sweep.launch import Facts, make_models, run
from tests.sweep.topology import Topology
from trainer_agent.chunking import plan_segment
from trainer_agent.megatron.families.rules import Place, Vocabulary
from trainer_agent.rank.exporter import ExportedChunk, Exporter, layout_of
from trainer_agent.rank.memory import WholeMemory
from trainer_agent.source import ParamMeta, WeightSource
from trainer_agent.sources.iterable import IterableSource
from trainer_agent.sources.module import ModuleSource

VOCAB, WIDTH = 10, 4
HEAD, EMBEDDING = "lm_head.weight", "embed.weight"
ONLY_THE_EMBEDDING_FIRST = Topology(2, "llama", tied=True, pipeline=2, layout="E|ttttL")
PADDED = Topology(2, "qwen3_moe", tied=False, tensor=2, expert=2)


def tied_module() -> nn.Module:
    module = nn.Module()
    module.embed = nn.Embedding(VOCAB, WIDTH)
    module.layer = nn.Linear(WIDTH, WIDTH)
    module.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
    module.lm_head.weight = module.embed.weight
    return module


def expecting(shapes: Mapping[str, tuple[int, ...]]) -> Expected:
    """An engine whose checkpoint has these float32 tensors."""
    return Expected(shapes, dict.fromkeys(shapes, frozenset({DType.F32})))


def exported(source: WeightSource, chunk_bytes: int = 1 << 20) -> tuple[Layout, list[ExportedChunk], bytes]:
    layout = layout_of(source)
    plan = plan_segment(layout, chunk_bytes)
    exporter = Exporter(layout, plan, WholeMemory(plan, memoryview(bytearray(max(plan.byte_count, 1)))))
    chunks = list(exporter.chunks(iter(source)))
    return layout, chunks, exporter.content_digest


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    directory: Path = tmp_path_factory.mktemp("models")
    topologies = [ONLY_THE_EMBEDDING_FIRST, PADDED]
    make_models(directory / "models", topologies)
    return {t.name: facts for t, facts in run(topologies, directory)}


def test_M1_a_tied_head_is_declared_and_both_names_are_covered_by_one_payload() -> None:
    shapes = {EMBEDDING: (VOCAB, WIDTH), HEAD: (VOCAB, WIDTH), "layer.weight": (WIDTH, WIDTH), "layer.bias": (WIDTH,)}
    source = ModuleSource(tied_module())
    layout, chunks, _ = exported(source)
    expecting(shapes).check(layout)
    assert [t.name for t in layout.tensors].count(EMBEDDING) == 1
    assert sum(r.byte_count for c in chunks for r in c.records) == layout.byte_count
    with pytest.raises(ManifestIncomplete, match=HEAD):
        expecting(shapes).check(Layout(layout.tensors))


def test_M1_training_the_embedding_changes_what_the_tie_means() -> None:
    module = tied_module()
    source = ModuleSource(module)
    _, _, before = exported(source)
    with torch.no_grad():
        module.get_parameter(HEAD).add_(1)
    layout, _, after = exported(source)
    assert before != after
    assert [(t.alias, t.source) for t in layout.ties] == [(HEAD, EMBEDDING)]


@pytest.mark.real
def test_M1_megatrons_last_stage_sends_no_copy_of_its_own(ranks: dict[str, Facts]) -> None:
    for rank in ranks[ONLY_THE_EMBEDDING_FIRST.name]:
        assert rank["failure"] is None
        assert rank["ties"] == [[HEAD, "model.embed_tokens.weight"]]
        assert (rank["wrong"], rank["missing"]) == ([], [])


def test_M5_sizes_are_declared_while_the_memory_is_elsewhere_and_a_large_tensor_is_split() -> None:
    module = tied_module()
    at_home = layout_of(ModuleSource(module))
    source = ModuleSource(module)
    for parameter in module.parameters():
        parameter.untyped_storage().resize_(0)
    for layout in (layout_of(source), layout_of(ModuleSource(module))):
        assert layout.digest == at_home.digest
        assert layout.byte_count == 4 * (VOCAB * WIDTH + WIDTH * WIDTH + WIDTH)
    plan = plan_segment(at_home, 64)
    assert max(c.end - c.start for c in plan.chunks) <= 64
    assert len([c for c in plan.chunks if c.pieces[0].tensor == 0]) == 3


def test_M5_weights_whose_memory_is_elsewhere_are_refused_and_not_read() -> None:
    module = tied_module()
    source = ModuleSource(module)
    module.get_parameter(EMBEDDING).untyped_storage().resize_(0)
    with pytest.raises(LayoutInvalid, match=f"offloaded.*{EMBEDDING}"):
        exported(source)


def test_M6_padding_is_taken_off_and_would_be_refused_by_the_engine() -> None:
    words = torch.arange(float(VOCAB * WIDTH)).view(VOCAB, WIDTH)
    rule, rows = Vocabulary(VOCAB), 3
    shards = [rule.to_megatron([words], Place(rank, 4, (rows, WIDTH))) for rank in range(4)]
    engine = expecting({EMBEDDING: (VOCAB, WIDTH)})
    (whole,) = rule.to_hf(shards)
    engine.check(layout_of(IterableSource(None, lambda: [(EMBEDDING, whole)])))
    assert torch.equal(whole, words)
    with pytest.raises(ShapeMismatch, match=rf"{EMBEDDING}.*\({VOCAB}, {WIDTH}\), got \(12, {WIDTH}\)"):
        engine.check(layout_of(IterableSource(None, lambda: [(EMBEDDING, torch.cat(shards))])))


@pytest.mark.real
def test_M6_a_model_with_a_padded_vocabulary_yields_its_checkpoint(ranks: dict[str, Facts]) -> None:
    """251 words on two ranks: Megatron holds 252."""
    for rank in ranks[PADDED.name]:
        assert rank["failure"] is None
        assert rank["metadata_agrees"]
        assert (rank["wrong"], rank["missing"]) == ([], [])


@pytest.mark.parametrize("shapes", [[(0, 4), (2, 4), (0,), (3,)], [(0, 4), (0,)]])
def test_G8_tensors_without_elements_are_legal_anywhere(shapes: list[tuple[int, ...]]) -> None:
    tensors = [(f"t{i}", torch.ones(shape)) for i, shape in enumerate(shapes)]
    metadata = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
    layout, chunks, digest = exported(IterableSource(metadata, lambda: tensors), chunk_bytes=64)
    records = [r for c in chunks for r in c.records]
    assert {r.tensor for r in records if r.HasField("checksum")} == set(range(len(shapes)))
    assert sum(r.byte_count for r in records) == layout.byte_count
    assert len(digest) == len(content_digest([]))


@pytest.mark.real
def test_G8_a_stage_that_holds_no_layer_takes_part_in_every_gather(ranks: dict[str, Facts]) -> None:
    first, second = ranks[ONLY_THE_EMBEDDING_FIRST.name]
    assert (first["parameters"], first["failure"]) == (1, None)
    assert first["names"] == second["names"] > 30
    assert first["wrong"] == second["wrong"] == []
