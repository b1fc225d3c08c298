"""The memory arithmetic: nothing is given twice, shared weights count once, more memory never serves fewer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.config import EchoModelConfig, LocalModelConfig, SpeculationConfig
from backends.errors import ModelLoadError
from backends.footprint import Footprint, footprint, shape_of
from gateway.models.capacity_plan import (
    DEVICES_BYTES,
    GIB,
    REFERENCE_SHAPES,
    CapacityPlan,
    PlannedTier,
    make_plan,
    planned_tiers,
    reference_tiers,
)
from policies.types import Tier

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}

tiers = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.builds(
            Footprint,
            num_params=st.integers(1, 10**11),
            weight_bytes=st.integers(1, 10**11),
            kv_bytes_per_token=st.integers(1, 10**6),
            context_length=st.integers(1, 10**5),
        ),
    ),
    min_size=1,
    max_size=5,
).map(lambda drawn: tuple(PlannedTier(f"t{i}", "m", checkpoint, size) for i, (checkpoint, size) in enumerate(drawn)))


def plan_of(of: tuple[PlannedTier, ...], memory_bytes: int, context: int = 4096) -> CapacityPlan:
    return make_plan(of, device="x", memory_bytes=memory_bytes, context_tokens=context)


def test_reference_ladder_fits_one_h200_and_not_a_40_gb_card() -> None:
    plan = plan_of(reference_tiers(), DEVICES_BYTES["h200"])
    assert plan.fits
    assert plan.weight_bytes == pytest.approx(47.7e9, rel=0.01)
    assert plan.tiers[3].weight_bytes == 0
    assert plan.concurrency > 100
    short = plan_of(reference_tiers(), DEVICES_BYTES["a100-40"])
    assert not short.fits
    assert short.shortfall_bytes == pytest.approx(short.weight_bytes - 0.9 * 40e9, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes_per_token"),
    [("3b-int4", 3.21, 114_688), ("8b-int4", 8.03, 131_072), ("70b-int4", 70.55, 327_680)],
)
def test_reference_shapes_are_the_published_ones(name: str, billions: float, kv_bytes_per_token: int) -> None:
    found = footprint(shape_of(REFERENCE_SHAPES[name], name))
    assert found.num_params / 1e9 == pytest.approx(billions, abs=0.005)
    assert found.kv_bytes_per_token == kv_bytes_per_token


def test_parts_of_a_tiny_model_by_hand() -> None:
    found = footprint(shape_of(TINY, "tiny"))
    attention, feed_forward = 64 * (2 * 64 + 2 * 32), 3 * 64 * 128
    num_params = 2 * (attention + feed_forward) + 2 * 100 * 64 + 5 * 64
    assert found.num_params == num_params
    assert found.weight_bytes == 4 * num_params
    assert found.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    halved = footprint(shape_of(TINY, "tiny"), "bfloat16")
    assert (halved.weight_bytes * 2, halved.kv_bytes_per_token * 2) == (found.weight_bytes, found.kv_bytes_per_token)


@given(tiers, st.integers(GIB, 10**12), st.integers(1, 10**5))
def test_nothing_is_given_twice(of: tuple[PlannedTier, ...], memory_bytes: int, context: int) -> None:
    plan = plan_of(of, memory_bytes, context)
    used = plan.weight_bytes + plan.reserve_bytes + sum(tier.kv_bytes for tier in plan.tiers)
    assert used <= memory_bytes + plan.shortfall_bytes
    assert plan.shortfall_bytes == 0 or plan.concurrency == 0
    assert sum(tier.concurrency for tier in plan.tiers) <= plan.concurrency + 1
    loaded = {tier.checkpoint for tier in of}
    assert sum(tier.weight_bytes > 0 for tier in plan.tiers) == len(loaded)


@given(tiers, st.integers(GIB, 10**12), st.integers(0, 10**12))
def test_more_memory_never_serves_fewer(of: tuple[PlannedTier, ...], memory_bytes: int, more: int) -> None:
    small, large = plan_of(of, memory_bytes), plan_of(of, memory_bytes + more)
    assert small.concurrency <= large.concurrency
    assert large.fits or not small.fits


def shared_plan(kv_bytes: int, context_length: int = 4096) -> CapacityPlan:
    of = tuple(replace(tier, context_length=context_length) for tier in reference_tiers())
    return make_plan(of, device="x", memory_bytes=DEVICES_BYTES["h200"], context_tokens=4096, kv_bytes=kv_bytes)


def test_shared_memory_is_planned_in_slabs_with_a_context_for_each() -> None:
    plan = shared_plan(75 * 10**9)
    assert plan.fits
    assert (plan.slab_bytes, plan.num_slabs) == (280 << 18, 75 * 10**9 // (280 << 18))
    assert plan.kv_bytes == plan.num_slabs * plan.slab_bytes
    # 256 blocks of 16 tokens each, 40, 35 and 14 a slab; the last two tiers are served by one engine.
    assert [tier.guaranteed_slabs for tier in plan.tiers] == [7, 8, 19, 0]
    assert [tier.engine_of for tier in plan.tiers] == [None, None, None, "complex"]


def test_shared_memory_that_does_not_fit_or_holds_no_context_for_each_is_refused() -> None:
    too_much = shared_plan(100 * 10**9)
    assert not too_much.fits
    assert too_much.shortfall_bytes == pytest.approx(47.7e9 + 14.1e9 + 100e9 - 141e9, rel=0.01)
    too_long = shared_plan(75 * 10**9, context_length=131_072)
    assert too_long.shortfall_bytes == 0
    assert too_long.guaranteed_slabs > too_long.num_slabs
    assert not too_long.fits


@pytest.mark.parametrize("shares", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")]])
def test_useless_shares_are_refused(shares: list[float]) -> None:
    with pytest.raises(ValueError, match="expected 2 numbers above 0"):
        make_plan(reference_tiers()[:2], device="x", memory_bytes=GIB, context_tokens=1, shares=shares)


def test_a_configuration_is_planned_from_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    local = LocalModelConfig(path=str(tmp_path))
    drafted = replace(local, drafter="a", speculation=SpeculationConfig(mode="draft"))
    ladder = tuple(Tier(index, name, name) for index, name in enumerate("abc", start=1))
    planned = planned_tiers(ladder, {"a": local, "b": drafted, "c": EchoModelConfig()})
    assert planned[1].kv_bytes_per_token == 2 * planned[0].kv_bytes_per_token
    assert planned[2].footprint is None
    plan = plan_of(planned, GIB, context=128)
    assert plan.fits
    assert [tier.weight_bytes > 0 for tier in plan.tiers] == [True, False, False]
    assert [tier.engine_of for tier in plan.tiers] == [None, "a", None]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"architectures": ["GPT2LMHeadModel"]}', "[" * 100_000])
def test_unreadable_shapes_are_refused_with_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        planned_tiers((Tier(1, "a", "a"),), {"a": LocalModelConfig(path=str(tmp_path))})
