"""Models of one device over one memory for keys and values, as the configuration sets it up."""

from __future__ import annotations

import asyncio

import pytest

from backends.config import DeviceConfig, LocalModelConfig, SpeculationConfig
from backends.errors import ModelLoadError
from backends.local import LocalBackend
from backends.protocol import Finished, GenerateRequest, Message, SamplingParams, TokenDelta
from backends.registry import build_backends
from backends.weights import WeightPool
from engine.slabs import SharedPool

MIB = 1 << 20
TASKS = ("What is 17 + 25?", "Sort: pear, fig, apple", "What is 3 + 4?", "What day comes 3 days after Monday?")


def configs(**changes: object) -> dict[str, LocalModelConfig]:
    sizes = {"device": "cpu", "context_length": 256, "max_num_seqs": 8} | changes
    drafted = SpeculationConfig(mode="draft", max_draft_tokens=3)
    return {
        "small": LocalModelConfig(path="builtin:tier1", **sizes),  # type: ignore[arg-type]
        "large": LocalModelConfig(path="builtin:tier2", drafter="small", speculation=drafted, **sizes),  # type: ignore[arg-type]
        "apart": LocalModelConfig(path="builtin:tier1", kv_cache_bytes=8 * MIB, **sizes),  # type: ignore[arg-type]
    }


async def answers(kv_bytes: int | None) -> tuple[list[str], list[LocalBackend]]:
    devices = {} if kv_bytes is None else {"cpu": DeviceConfig(kv_bytes=kv_bytes)}
    backends = build_backends(configs(), devices=devices)
    local = [backend for backend in backends.values() if isinstance(backend, LocalBackend)]
    for backend in local:
        await backend.start()

    async def ask(backend: LocalBackend, task: str) -> str:
        sampling = SamplingParams(temperature=0.0, max_tokens=40)
        text, ended = "", False
        async for event in backend.generate(GenerateRequest("r", messages=(Message("user", task),), sampling=sampling)):
            text += event.text if isinstance(event, TokenDelta) else ""
            ended |= isinstance(event, Finished)
        assert ended
        return text

    texts = await asyncio.gather(*(ask(backend, task) for backend in local for task in TASKS * 2))
    return list(texts), local


async def test_models_answer_from_shared_memory_as_from_their_own() -> None:
    expected, own = await answers(None)
    found, shared = await answers(6 * MIB)
    assert found == expected
    pools = [backend.engine.scheduler.pool for backend in shared]
    assert isinstance(pools[0], SharedPool)
    assert isinstance(pools[1], SharedPool)
    assert pools[0].lock is pools[1].lock, "one memory"
    assert not isinstance(pools[2], SharedPool), "who has kv_cache_bytes keeps to itself"
    slabs = pools[0]._slabs
    assert [pool.name for pool in slabs.pools] == ["small", "large's drafter", "large"]
    assert slabs.pools[1].min_slabs == 0
    for backend in (*own, *shared):
        assert backend.engine.stats().num_failed_steps == 0
        await backend.close()
    slabs.check_integrity()
    assert slabs.num_free == slabs.num_slabs
    assert [pool.name for pool in slabs.pools if pool.min_slabs] == []


async def test_memory_too_small_for_a_context_of_each_is_refused_at_load() -> None:
    small, large, _ = build_backends(configs(), devices={"cpu": DeviceConfig(kv_bytes=MIB)}).values()
    await small.start()
    with pytest.raises(ModelLoadError, match=r"needs \d+ slabs for one whole context; of the \d+ slabs"):
        await large.start()
    await small.close()
    await large.close()


async def test_more_than_the_device_has_is_refused_at_load() -> None:
    backend = LocalBackend("m", configs()["small"], weights=WeightPool({"cpu": 1 << 60}))
    with pytest.raises(ModelLoadError, match=r"cpu has no [\d,]+ bytes left for keys and values"):
        await backend.start()
    await backend.close()
