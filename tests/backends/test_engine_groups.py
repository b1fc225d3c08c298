"""Models that can share an engine do, and each still is served as its own table says."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from backends.config import EchoModelConfig, LocalModelConfig, ModelConfig, SpeculationConfig
from backends.local import LocalBackend
from backends.local_engine.engine_groups import engine_groups
from backends.local_engine.shared_resources import SharedResources
from backends.protocol import Finished, FinishReason, GenerateRequest, SamplingParams, TokenDelta
from backends.registry import build_backends
from tests.backends.test_local import GREEDY, HELLO, collect, make_folder, text_of

PLAIN = LocalModelConfig(path="m", device="cpu")
DRAFTED = replace(PLAIN, drafter="small", speculation=SpeculationConfig(mode="draft"))


def members(models: dict[str, ModelConfig]) -> set[tuple[str, ...]]:
    return {group.members for group in engine_groups(models).values()}


def test_models_that_differ_only_in_what_a_request_carries_share_an_engine() -> None:
    models = {"a": PLAIN, "b": replace(DRAFTED, thinking=True, max_num_seqs=8), "echo": EchoModelConfig()}
    group = engine_groups(models)["a"]
    assert group.members == ("a", "b")
    assert engine_groups(models)["b"] == group
    assert group.config.max_num_seqs == PLAIN.max_num_seqs + 8
    assert group.config.speculation.mode == "draft"
    assert group.drafter_path == "small"
    assert engine_groups({"small": replace(PLAIN, path="s"), **models})["b"].drafter_path == "s"


@pytest.mark.parametrize(
    "change",
    [
        {"path": "other"},
        {"dtype": "float32"},
        {"cpu_compute": "exact"},
        {"load_format": "dummy"},
        {"device": "cuda"},
        {"tensor_parallel": 2},
        {"threads": 2},
        {"context_length": 64},
        {"max_batch_tokens": 64},
        {"kv_cache_bytes": 1 << 20},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_the_engines_own_must_be_equal(change: dict[str, object]) -> None:
    assert members({"a": PLAIN, "b": replace(PLAIN, **change)}) == {("a",), ("b",)}  # type: ignore[arg-type]


def test_models_on_a_gpu_that_round_activations_have_an_engine_of_their_own() -> None:
    plain = replace(PLAIN, device="cuda")
    assert members({"a": plain, "b": replace(plain, activations="fp8")}) == {("a",), ("b",)}


def test_one_engine_has_one_drafter() -> None:
    ngram = replace(PLAIN, speculation=SpeculationConfig(mode="ngram"))
    longer = replace(DRAFTED, speculation=SpeculationConfig(mode="draft", max_draft_tokens=2))
    models = {"a": DRAFTED, "b": ngram, "c": PLAIN, "d": longer, "e": DRAFTED, "f": ngram}
    assert members(models) == {("a", "c", "e"), ("b", "f"), ("d",)}


def test_memory_that_each_was_given_is_given_to_all() -> None:
    sized = replace(PLAIN, kv_cache_bytes=1 << 20)
    assert (
        engine_groups({"a": sized, "b": replace(sized, kv_cache_bytes=1 << 21)})["a"].config.kv_cache_bytes == 3 << 20
    )


def test_an_engine_is_made_once_and_closed_with_its_last_user() -> None:
    engines: SharedResources[object] = SharedResources()
    closed: list[object] = []

    def fail() -> object:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        engines.acquire("g", fail)
    first = engines.acquire("g", object)
    assert engines.acquire("g", fail) is first
    assert engines.acquire("h", object) is not first
    engines.release("g", closed.append)
    assert not closed
    engines.release("g", closed.append)
    assert closed == [first]
    assert engines.acquire("g", object) is not first


async def test_tiers_of_one_engine_answer_close_and_count_each_for_itself(tmp_path: Path) -> None:
    make_folder(tmp_path)
    plain = LocalModelConfig(path=str(tmp_path), device="cpu")
    drafted = replace(plain, drafter=str(tmp_path), speculation=SpeculationConfig(mode="draft"))
    backends = build_backends({"one": plain, "two": drafted})
    one, two = backends["one"], backends["two"]
    assert isinstance(one, LocalBackend)
    assert isinstance(two, LocalBackend)
    await asyncio.gather(one.start(), two.start())
    assert one.engine is two.engine
    request = GenerateRequest("r", messages=HELLO, sampling=GREEDY)
    (first, ending), (second, drafted_ending) = await asyncio.gather(collect(one, request), collect(two, request))
    assert text_of(first) == text_of(second)
    assert ending.usage.draft_tokens == 0
    assert drafted_ending.usage.draft_tokens > 0
    assert one.load().acceptance_rate is None
    assert two.load().acceptance_rate == 1.0

    endless = GenerateRequest(
        "e", messages=HELLO, sampling=SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    )
    running = [asyncio.create_task(collect(each, endless)) for each in (one, one, two)]
    counted = set()
    while not all(task.done() for task in running):
        counted.add((one.load().running + one.load().waiting, two.load().running + two.load().waiting))
        await asyncio.sleep(0)
    assert max(counts[0] for counts in counted) == 2
    assert max(counts[1] for counts in counted) == 1

    streams = [each.generate(endless) for each in (one, two)]
    for stream in streams:
        assert isinstance(await anext(stream), TokenDelta)
    await one.close()
    rest = [[event async for event in stream][-1] for stream in streams]
    assert [event.reason for event in rest if isinstance(event, Finished)] == [
        FinishReason.CANCELLED,
        FinishReason.LENGTH,
    ]
    await two.close()
