"""Engines of one device: who waits for whom, how long, and that nobody waits for nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Batch
from engine.config import EngineConfig
from engine.device.device_share import DevicePlace, DeviceShare
from engine.engine import Engine, collect
from engine.kv_cache import KVCache
from engine.request import Request, SamplingParams
from engine.sink import QueueSink
from engine.step_costs import ChunkCosts
from tests.engine.toy import ToyModel

PACE_S = 1 / 32  # and times in 1024ths, so that sums are exact


def places(*weights: int) -> list[DevicePlace]:
    share = DeviceShare()
    return [share.join(weight_bytes=weight, pace_s=PACE_S, wake=lambda: None) for weight in weights]


moves = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["begin", "rest", "press", "ease"]), st.integers(0, 100)), max_size=40
)


@given(weights=st.tuples(*[st.integers(1, 3)] * 3), moves=moves)
def test_a_wait_has_a_reason_and_an_end(weights: tuple[int, int, int], moves: list[tuple[int, str, int]]) -> None:
    every, now = places(*weights), 0.0
    began: dict[int, float] = {}
    pressed = {0: False, 1: False, 2: False}
    for who, what, passed in moves:
        now += passed / 1024
        if what == "begin":
            every[who].begin(now)
            began[who] = now
        elif what == "rest":
            every[who].rest(now)
        else:
            pressed[who] = what == "press"
            every[who].press(pressed[who])
        for index, place in enumerate(every):
            wait_s = place.wait_s(now)
            assert 0.0 <= wait_s <= PACE_S
            reason = any(pressed[i] and weights[i] > weights[index] for i in range(3))
            due_s = began.get(index, float("-inf")) + PACE_S
            assert (wait_s > 0.0) == (reason and now < due_s)
            assert every[weights.index(max(weights))].wait_s(now) == 0.0
            assert place.wait_s(now + wait_s) == 0.0
        assert any(place.wait_s(now) == 0.0 for place in every)


def test_an_engine_alone_or_left_alone_never_waits() -> None:
    light, heavy = places(1, 9)
    light.begin(0.0)
    assert light.wait_s(0.001) == 0.0
    heavy.press(True)
    assert light.wait_s(0.001) == pytest.approx(PACE_S - 0.001)
    heavy.leave()
    assert light.wait_s(0.001) == 0.0


def test_who_eases_wakes_those_that_wait() -> None:
    share, woken = DeviceShare(), []
    share.join(weight_bytes=1, pace_s=PACE_S, wake=lambda: woken.append("light"))
    heavy = share.join(weight_bytes=2, pace_s=PACE_S, wake=lambda: woken.append("heavy"))
    heavy.press(True)
    heavy.press(True)
    assert not woken
    heavy.press(False)
    heavy.press(False)
    assert woken == ["light"]


def test_alone_means_that_nobody_else_had_anything_running() -> None:
    one, other = places(1, 2)
    assert one.was_alone(0.0)
    other.begin(1.0)
    assert not one.was_alone(0.0)
    assert not one.was_alone(5.0)
    other.rest(6.0)
    assert not one.was_alone(5.0)
    assert one.was_alone(6.0)
    assert other.was_alone(0.0)


# What chunks cost


@given(
    fixed=st.floats(0.0, 50.0),
    each=st.floats(0.01, 1.0),
    sizes=st.lists(st.integers(1, 4096), min_size=1, max_size=12),
    limit=st.floats(1.0, 500.0),
)
def test_a_chunk_ends_in_time_whatever_sizes_were_seen(
    fixed: float, each: float, sizes: list[int], limit: float
) -> None:
    costs = ChunkCosts(weight=1.0)
    assert costs.most_tokens(limit) is None
    for size in sizes:
        costs.observe(size, fixed + each * size, alone=True)
    most = costs.most_tokens(limit)
    assert most is not None
    # Sizes of one class are told apart by a fifth, and below the smallest seen the fixed part is not known.
    if most >= min(sizes):
        assert fixed + each * most <= limit * 1.2 + each


def test_what_others_add_to_a_step_does_not_shrink_the_chunks() -> None:
    costs = ChunkCosts()
    for _ in range(20):
        for size, seconds in ((1, 12.0), (64, 30.0), (256, 90.0)):
            costs.observe(size, seconds, alone=True)
    before = costs.most_tokens(50.0)
    assert before == pytest.approx(128, abs=2)
    for _ in range(50):
        costs.observe(128, 170.0, alone=False)
        costs.observe(64, 80.0, alone=False)
    assert costs.most_tokens(50.0) == pytest.approx(64 + 64 * 20 / 140, abs=2)
    costs.observe(128, 52.0, alone=False)
    assert costs.most_tokens(50.0) == pytest.approx(122, abs=2)
    assert costs.least_worthwhile() == pytest.approx(42, abs=2)


def test_beside_others_chunks_shrink_as_far_as_tokens_stay_cheap() -> None:
    costs = ChunkCosts()
    assert costs.chunk(50.0) is None
    for _ in range(20):
        for size, seconds in ((1, 12.0), (64, 24.0), (96, 27.0), (128, 34.0), (192, 49.0), (256, 62.0)):
            costs.observe(size, seconds, alone=True)
    alone = costs.chunk(50.0)
    assert alone == costs.most_tokens(50.0) == pytest.approx(196, abs=2)
    for _ in range(50):
        costs.observe(192, 49.0 * 1.4, alone=False)
    assert costs.chunk(50.0) == costs.most_tokens(50.0 / 1.4) == pytest.approx(135, abs=2)
    for _ in range(50):
        costs.observe(192, 49.0 * 9, alone=False)
    assert costs.chunk(50.0) == 96  # a token of 64 costs half as much again
    for _ in range(50):
        costs.observe(192, 49.0, alone=True)
    assert costs.chunk(50.0) == alone


# Engines that share


class Slow(ToyModel):
    """Moves a clock on by the same time in every step, as one does that is bound by reading its weights."""

    def __init__(self, now: list[float], step_s: float, weight_bytes: int) -> None:
        super().__init__()
        self.now, self.step_s, self.weight_bytes = now, step_s, weight_bytes
        self.began_s: list[float] = []

    def forward(self, batch: Batch, kv: KVCache) -> torch.Tensor:
        self.began_s.append(self.now[0])
        self.now[0] += self.step_s
        return super().forward(batch, kv)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_light_engine_keeps_its_pace_while_a_heavy_one_reads_prompts(asynchronous: bool) -> None:
    now, share = [0.0], DeviceShare()
    config = EngineConfig(
        block_size=4,
        num_blocks=500,
        max_num_seqs=4,
        max_batch_tokens=8,
        itl_target_s=PACE_S / 0.75,
        asynchronous=asynchronous,
    )
    models = Slow(now, 1 / 1024, 1), Slow(now, 20 / 1024, 2)
    light, heavy = (Engine(model, config, share=share, start=False, clock=lambda: now[0], name="e") for model in models)
    sinks = [QueueSink(), QueueSink()]
    heavy.submit(Request("long", tuple([1] * 200), SamplingParams(max_tokens=1)), sinks[0])
    light.submit(Request("live", (1, 2), SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)), sinks[1])
    while heavy.has_work():
        heavy.step()
        while heavy.has_work() and not light.step():
            pass
        # A step's tokens are out before the engine waits for the next.
        assert not heavy.has_work() or light.stats().num_output_tokens == models[0].num_forwards
    waited = models[0].began_s
    assert len(waited) >= 10
    assert all(later - earlier >= PACE_S for earlier, later in pairwise(waited))
    while light.has_work():
        assert light.step() == 0.0
    assert len(models[0].began_s) >= 200
    assert len(collect(sinks[1], 1).token_ids) == 200
    for engine in (light, heavy):
        engine.close()
