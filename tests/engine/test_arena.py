"""Memory shared in slabs: against a naive model of who wrote what where, and under engines with random load."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.arena import Arena
from engine.blocks import hash_block, hash_salt
from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine, Result, collect
from engine.errors import OutOfMemoryPlan
from engine.kv_cache import KVCache, kv_bytes_per_token
from engine.request import FinishReason, Request, SamplingParams
from engine.sink import QueueSink
from engine.slabs import SLAB_BYTES, SharedPool, blocks_per_slab, slab_bytes_for
from tests.engine.toy import ToyModel, toy_config

SIZE = 4
# A block of the toy with one layer takes 256 bytes: four a slab. The uneven slab holds five, or two and a half of two
# layers, or one and two thirds of three.
SLAB = 1024
UNEVEN = 1280
SHAPES = (toy_config(), replace(toy_config(), num_layers=2), replace(toy_config(), num_layers=3))


def test_slabs_fit_the_blocks_of_the_reference_ladder() -> None:
    shapes = {"3b": (28, 40), "8b": (32, 35), "70b": (80, 14)}
    for num_layers, blocks in shapes.values():
        shape = replace(toy_config(), num_layers=num_layers, num_kv_heads=8, head_dim=128)
        block_bytes = 16 * kv_bytes_per_token(shape, torch.bfloat16)
        assert (SLAB_BYTES % block_bytes, SLAB_BYTES // block_bytes) == (0, blocks)
        assert blocks_per_slab(SLAB_BYTES, block_bytes) == blocks
    assert slab_bytes_for(85 * 10**9) == SLAB_BYTES
    assert slab_bytes_for(10**8) * 64 <= 10**8


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 100))
def test_every_slab_holds_as_many_blocks_as_is_said(slab_bytes: int, block_bytes: int, slab: int) -> None:
    inside = range(-(-slab * slab_bytes // block_bytes), (slab + 1) * slab_bytes // block_bytes)
    assert len(inside) >= blocks_per_slab(slab_bytes, block_bytes)
    if slab_bytes % block_bytes == 0:
        assert len(inside) == slab_bytes // block_bytes


class User:
    """One pool, the tables it owns, and what it wrote into the memory."""

    def __init__(self, arena: Arena, shape: ModelConfig, min_tokens: int, tag: int) -> None:
        self.kv = arena.lay_out(shape, SIZE, torch.float32)
        self.pool = arena.join(f"user {tag}", self.kv, min_tokens=min_tokens)
        self.min_blocks = -(-min_tokens // SIZE)
        self.tables: list[list[int]] = []
        self.content: dict[int, float] = {}  # block → what it must hold

    def write(self, table: list[int], value: float) -> None:
        for block in table:
            for layer in self.kv.layers:
                layer[block] = value
            self.content[block] = value

    def check(self, blocks: Seq[int]) -> None:
        for block in blocks:
            for layer in self.kv.layers:
                assert (layer[block] == self.content[block]).all(), "somebody wrote into another's block"

    @property
    def num_owned(self) -> int:
        return len({block for table in self.tables for block in table})


class ArenaMachine(RuleBasedStateMachine):
    """Pools of unlike blocks allocate, publish, share, release, leave and join; every block is written whole."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(12 * UNEVEN, "cpu", slab_bytes=UNEVEN)
        self.stamp = 0.0
        self.users = [User(self.arena, shape, 8, index) for index, shape in enumerate(SHAPES)]

    def next_stamp(self) -> float:
        self.stamp += 1.0
        return self.stamp

    @rule(data=st.data(), count=st.integers(1, 30))
    def allocate(self, data: st.DataObject, count: int) -> None:
        user = data.draw(st.sampled_from(self.users))
        room = user.pool.room_for(count)
        assert room >= min(count, user.min_blocks - user.num_owned), "a guarantee was not kept"
        table = user.pool.allocate(min(count, room))
        owned = {block for each in user.tables for block in each}
        assert not owned & set(table)
        user.tables.append(table)
        user.write(table, self.next_stamp())

    @precondition(lambda self: any(user.tables for user in self.users))
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def publish(self, data: st.DataObject, tokens: list[int]) -> None:
        user = data.draw(st.sampled_from([user for user in self.users if user.tables]))
        name = hash_salt("")
        for block, token in zip(data.draw(st.sampled_from(user.tables)), tokens, strict=False):
            name = hash_block(name, [token] * SIZE)
            user.pool.register(block, name)

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def share(self, data: st.DataObject, tokens: list[int]) -> None:
        user = data.draw(st.sampled_from(self.users))
        names = [hash_salt("")]
        for token in tokens:
            names.append(hash_block(names[-1], [token] * SIZE))
        found = user.pool.lookup(names[1:])
        user.check(found)
        user.pool.acquire(found)
        user.tables.append(found)

    @precondition(lambda self: any(user.tables for user in self.users))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        user = data.draw(st.sampled_from([user for user in self.users if user.tables]))
        user.pool.release(user.tables.pop(data.draw(st.integers(0, len(user.tables) - 1))))

    @precondition(lambda self: any(user.tables for user in self.users))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        user = data.draw(st.sampled_from([user for user in self.users if user.tables]))
        user.pool.forget(data.draw(st.sampled_from(user.tables)))

    @rule(data=st.data())
    def begin_anew(self, data: st.DataObject) -> None:
        user = data.draw(st.sampled_from(self.users))
        user.pool.reset()
        user.tables.clear()
        assert user.pool.num_slabs == 0

    @precondition(lambda self: len(self.users) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        user = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        user.pool.close()
        user.pool.close()

    @rule(data=st.data(), shape=st.sampled_from(SHAPES), min_tokens=st.integers(0, 16))
    def join(self, data: st.DataObject, shape: ModelConfig, min_tokens: int) -> None:
        slabs = self.arena.slabs
        wanted = ceil(ceil(min_tokens / SIZE) / blocks_per_slab(UNEVEN, 256 * shape.num_layers))
        reachable = slabs.num_free + sum(user.pool.num_spare_slabs for user in self.users) - slabs.num_owed
        if wanted <= reachable and len(self.users) < 5:
            self.users.append(User(self.arena, shape, min_tokens, len(self.users)))

    @invariant()
    def books_sum(self) -> None:
        self.arena.slabs.check_integrity()
        spans: list[tuple[int, int]] = []
        for user in self.users:
            user.pool.check_integrity(user.tables)
            assert user.pool.num_owned == user.num_owned
            assert 0.0 <= user.pool.free_fraction <= 1.0
            size = user.kv.block_bytes
            spans += [(block * size, (block + 1) * size) for block in {b for table in user.tables for b in table}]
            for table in user.tables:
                user.check(table)
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "blocks overlap"


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_slab_from_another_model_holds_zeros() -> None:
    arena = Arena(2 * SLAB, "cpu", slab_bytes=SLAB)
    first, second = (User(arena, shape, 0, index) for index, shape in enumerate(SHAPES[:2]))
    table = first.pool.allocate(first.pool.room_for(8))
    first.write(table, float("nan"))
    first.pool.release(table)
    mine = second.pool.allocate(second.pool.room_for(4))
    assert len(mine) == 4
    assert not any(layer[mine].any() for layer in second.kv.layers)


# Engines


def engine_in(arena: Arena | None, model: ToyModel, name: str, **sizes: object) -> Engine:
    config = {"block_size": SIZE, "context_length": 48, "max_num_seqs": 6, "max_batch_tokens": 16} | sizes
    if arena is None:
        config["num_blocks"] = 64
    return Engine(model, EngineConfig(**config), start=False, arena=arena, name=name)  # type: ignore[arg-type]


def submit(engine: Engine, prompt: Seq[int], max_tokens: int = 8) -> QueueSink:
    sink = QueueSink()
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine.submit(Request("r", tuple(prompt), sampling), sink)
    return sink


def drain(*engines: Engine) -> None:
    while any(engine.has_work() for engine in engines):
        for engine in engines:
            engine.step()
    for engine in engines:
        engine.scheduler.check_integrity()
        assert engine.scheduler.pool.num_owned == 0
        assert engine.stats().num_failed_steps == 0


def slabs_of(engine: Engine) -> int:
    pool = engine.scheduler.pool
    assert isinstance(pool, SharedPool)
    return pool.num_slabs


prompts = st.lists(st.integers(1, 22), min_size=1, max_size=38)


@given(
    load=st.lists(st.tuples(st.integers(0, 2), prompts, st.integers(0, 6)), min_size=1, max_size=20),
    num_slabs=st.sampled_from([9, 12, 40]),
    asynchronous=st.booleans(),
    cancelled=st.sets(st.integers(0, 19), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_engines_in_one_arena_say_what_they_would_alone(
    load: list[tuple[int, list[int], int]], num_slabs: int, asynchronous: bool, cancelled: set[int]
) -> None:
    arena = Arena(num_slabs * SLAB, "cpu", slab_bytes=SLAB)
    models = [ToyModel(seed) for seed in range(3)]
    engines = [engine_in(arena, model, str(i), asynchronous=asynchronous) for i, model in enumerate(models)]
    sinks = []
    for index, (which, prompt, pause) in enumerate(load):
        for _ in range(pause):
            for engine in engines:
                engine.step()
            arena.slabs.check_integrity()
        sinks.append(submit(engines[which], prompt))
        if index in cancelled:
            handle = engines[which]._inbox[-1][0]
            engines[which].cancel(handle)
    drain(*engines)
    arena.slabs.check_integrity()
    for index, (sink, (which, prompt, _)) in enumerate(zip(sinks, load, strict=True)):
        result = collect(sink, 1.0)
        expected = models[which].greedy(prompt, 8, eos=False)
        if index in cancelled:
            assert result.ending.reason is FinishReason.CANCELLED
            expected = expected[: len(result.token_ids)]
        assert list(result.token_ids) == expected


def test_memory_follows_demand() -> None:
    arena = Arena(24 * SLAB, "cpu", slab_bytes=SLAB)
    first, second = (engine_in(arena, ToyModel(seed), str(seed)) for seed in range(2))
    most = [0, 0]
    for turn in range(4):
        busy = (first, second)[turn % 2]
        sinks = [submit(busy, [turn + 1, i + 1] + [5] * 30, 12) for i in range(6)]
        while busy.has_work():
            busy.step()
            most[turn % 2] = max(most[turn % 2], slabs_of(busy))
        # Six sequences of 44 tokens want up to 66 blocks, 17 slabs; half of the memory would not hold them.
        assert busy.core.num_preemptions == 0
        assert all(collect(sink, 1.0).ending.num_output_tokens == 12 for sink in sinks)
        arena.slabs.check_integrity()
    assert min(most) > 12


def test_one_that_takes_all_it_can_leaves_others_their_guarantee() -> None:
    arena = Arena(9 * SLAB, "cpu", slab_bytes=SLAB)  # three slabs are a whole context
    greedy, modest = (engine_in(arena, ToyModel(seed), str(seed)) for seed in range(2))
    hogs = [submit(greedy, [i + 1] * 6, 40) for i in range(6)]
    for _ in range(30):
        greedy.step()
    assert arena.slabs.num_free == 3, "two thirds are for who wants them, one is another's"
    assert greedy.core.num_preemptions > 0
    sink = submit(modest, range(1, 23), 26)
    drain(modest)
    assert list(collect(sink, 1.0).token_ids) == ToyModel(1).greedy(list(range(1, 23)), 26, eos=False)
    drain(greedy)
    for i, hog in enumerate(hogs):
        assert list(collect(hog, 1.0).token_ids) == ToyModel(0).greedy([i + 1] * 6, 40, eos=False)


def test_a_prefix_stays_cached_until_its_memory_is_wanted() -> None:
    arena = Arena(12 * SLAB, "cpu", slab_bytes=SLAB)
    first, second = (engine_in(arena, ToyModel(seed), str(seed)) for seed in range(2))
    prompt = list(range(1, 22)) * 2
    cached: list[int] = []
    for _ in range(2):
        sink = submit(first, prompt, 2)
        drain(first)
        cached.append(collect(sink, 1.0).ending.num_cached_tokens)
    assert cached == [0, 40]
    sinks = [submit(second, [i + 1] * 36, 10) for i in range(6)]
    drain(second)
    assert all(collect(sink, 1.0).ending.num_output_tokens == 10 for sink in sinks)
    assert slabs_of(first) == 3, "what is guaranteed to an engine is not taken from its cache"


def test_threads_share_an_arena() -> None:
    """Each engine on a thread of its own, all of them always short of memory."""
    arena = Arena(10 * SLAB, "cpu", slab_bytes=SLAB)
    models = [ToyModel(seed) for seed in range(3)]
    config = EngineConfig(block_size=SIZE, context_length=48, max_num_seqs=6, max_batch_tokens=16)
    engines = [Engine(model, config, arena=arena, name=str(i)) for i, model in enumerate(models)]
    requests = [(i % 3, [i % 22 + 1, i % 7 + 1] + [3] * (i % 31), 6 + i % 9) for i in range(120)]
    sinks = [submit(engines[which], prompt, count) for which, prompt, count in requests]
    results: list[Result] = [collect(sink, 60.0) for sink in sinks]
    for (which, prompt, count), result in zip(requests, results, strict=True):
        assert list(result.token_ids) == models[which].greedy(prompt, count, eos=False)
    for engine in engines:
        assert engine.stats().num_failed_steps == 0
        engine.close()
    assert arena.slabs.num_free == arena.slabs.num_slabs
    arena.slabs.check_integrity()


def test_a_failed_step_gives_its_memory_back() -> None:
    arena = Arena(9 * SLAB, "cpu", slab_bytes=SLAB)
    engine = engine_in(arena, ToyModel(fail_on=22), "failing")
    sink = submit(engine, [4, 22, 5])
    while engine.has_work():
        engine.step()
    with pytest.raises(Exception, match="failed"):
        collect(sink, 1.0)
    assert arena.slabs.num_free == 9
    sink = submit(engine, [1, 2], 3)
    while engine.has_work():
        engine.step()
    assert list(collect(sink, 1.0).token_ids) == ToyModel().greedy([1, 2], 3, eos=False)


def test_books_that_cannot_be_trusted_are_begun_anew(caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena(9 * SLAB, "cpu", slab_bytes=SLAB)
    engine = engine_in(arena, ToyModel(), "broken")
    sink = submit(engine, [1, 2, 3])
    engine.step()
    engine.scheduler.running[0].block_table.append(10**6)  # no such block
    while engine.has_work():
        engine.step()
    with pytest.raises(Exception, match="failed"):
        collect(sink, 1.0)
    arena.slabs.check_integrity()
    sink = submit(engine, [1, 2, 3])
    while engine.has_work():
        engine.step()
    assert list(collect(sink, 1.0).token_ids) == ToyModel().greedy([1, 2, 3], 8, eos=False)


# Refusals


def test_guarantees_beyond_the_memory_are_refused_with_the_arithmetic() -> None:
    arena = Arena(8 * SLAB, "cpu", slab_bytes=SLAB)
    engines = [engine_in(arena, ToyModel(seed), str(seed)) for seed in range(2)]
    with pytest.raises(OutOfMemoryPlan, match=r"third needs 3 slabs .* of the 8 slabs of 1,024 bytes .* 6 are guar"):
        engine_in(arena, ToyModel(), "third")
    engines[0].close()
    engine_in(arena, ToyModel(), "third")


def test_memory_that_is_too_small_is_refused() -> None:
    with pytest.raises(OutOfMemoryPlan, match="less than one slab"):
        Arena(SLAB - 1, "cpu", slab_bytes=SLAB)
    with pytest.raises(OutOfMemoryPlan, match="4,096 bytes, which a slab of cpu"):
        Arena(9 * SLAB, "cpu", slab_bytes=SLAB).lay_out(toy_config(), 64, torch.float32)
    with pytest.raises(OutOfMemoryPlan, match=r"no .* bytes left for keys and values"):
        Arena(1 << 60, "cpu")


def test_who_joins_late_waits_for_requests_to_end_and_is_then_guaranteed_its_share() -> None:
    arena = Arena(8 * SLAB, "cpu", slab_bytes=SLAB)
    early = engine_in(arena, ToyModel(0), "early")
    sinks = [submit(early, [i + 1] * 30, 18) for i in range(3)]
    for _ in range(20):
        early.step()
    assert arena.slabs.num_free == 0
    joined: list[Engine] = []
    thread = threading.Thread(target=lambda: joined.append(engine_in(arena, ToyModel(1), "late")))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "nothing was free to guarantee"
    drain(early)
    thread.join(10.0)
    assert [collect(sink, 1.0).ending.num_output_tokens for sink in sinks] == [18] * 3
    late = submit(joined[0], range(1, 23), 26)
    drain(joined[0])
    assert list(collect(late, 1.0).token_ids) == ToyModel(1).greedy(list(range(1, 23)), 26, eos=False)


def test_who_joins_in_vain_is_refused_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(6 * SLAB, "cpu", slab_bytes=SLAB)
    holder = User(arena, SHAPES[0], 8, 0)
    holder.tables.append(holder.pool.allocate(holder.pool.room_for(24)))
    newcomer: KVCache = arena.lay_out(SHAPES[0], SIZE, torch.float32)
    with pytest.raises(OutOfMemoryPlan, match="others had all but 0 in use"):
        arena.slabs.join(
            "late", block_bytes=256, block_size=SIZE, min_blocks=4, handover=holder.pool._handover, timeout_s=0.01
        )
    assert newcomer.num_blocks == 24
    assert arena.slabs.pools == [holder.pool]
    arena.slabs.check_integrity()
