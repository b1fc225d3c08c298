"""The bench of random-weight shapes, run whole on a CPU with a tiny shape: it must not fail first on a rented GPU."""

from __future__ import annotations

import json
import threading
import time
from itertools import product
from pathlib import Path

import pytest
import torch

from engine.bench.__main__ import main
from engine.bench.ladder import RUNS, _warm_checks, judge, starts
from engine.bench.measured_engines import OurEngine
from engine.bench.permutation_model import RESIDUAL_SCALE, successors, walk
from engine.bench.profile import by_kind
from engine.bench.roofline import DeviceCeilings, ModelCosts, decode_floor_s, prefill_floor_s
from engine.bench.shapes import SHAPES
from engine.config import EngineConfig
from engine.device.draw_kinds import DrawKind
from engine.device.runner import DeviceRunner
from engine.drafter import ModelDrafter
from engine.engine import Engine
from engine.errors import EngineError
from engine.kv_cache import KVCache
from engine.load.model import dummy_model
from engine.models.decoder import DecoderModel
from engine.request import Request, SamplingParams
from engine.runner import Flight
from engine.speculator import Speculator
from tests.engine.answers import answer_of

TINY = SHAPES["tiny-bf16"]


def walker(agreement: float) -> DecoderModel:
    model = dummy_model(TINY, seed=3, residual_scale=RESIDUAL_SCALE)
    walk(model, successors(TINY.vocab_size, agreement=agreement, seed=5))
    return model


@pytest.mark.slow
def test_every_figure_and_the_ladder_come_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lines.jsonl"
    shape = "tiny-int4"
    main(
        f"--device cpu --shapes {shape} --batches 1 2 --prompt-lengths 32 --at-once 4 --repeats 1 --profile --ladder "
        f"--ladder-shapes tiny-bf16 {shape} {shape} --ladder-seconds 0.5 --ladder-start-rate 16 --ladder-loads 2 "
        f"--ladder-limits tight --out {out}".split()
    )
    card, row, *loads, ladder = (json.loads(line) for line in out.read_text().splitlines())
    assert card["card"]["ceilings"]["read_bytes_per_s"] > 0
    assert set(row["ours"]) == {"itl_ms_b1", "itl_ms_b2", "ttft_ms_32", "prefill_tok_s", "output_tok_s_n4"}
    assert not any("error" in found for found in row["ours"].values())
    assert [found["step"] for found in row["profile"]] == ["decode", "decode", "prefill", "prefill"]
    assert not any("error" in found for found in row["profile"])
    (tight,) = ladder["limits"]
    assert tight["name"] == "tight"
    assert list(tight["runs"]) == list(RUNS)
    assert len(loads) == sum(len(run["loads"]) for run in tight["runs"].values())
    mixed, top_only = tight["runs"]["ladder"]["loads"], tight["runs"]["all_on_tier_3"]["loads"]
    assert not any(load.get("errors") for load in loads)
    assert set(mixed[0]["tiers"]) >= {"tier_1", "tier_2", "tier_3"}
    assert set(top_only[0]["tiers"]) == {"tier_3"}
    assert all(each["host_cpu_ms"] > 0 for each in mixed[0]["host"]["engines"])
    assert shape in capsys.readouterr().out


@pytest.mark.slow
def test_each_pair_of_limits_may_start_at_a_rate_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    main(
        "--device cpu --ladder --ladder-shapes tiny-bf16 tiny-bf16 tiny-int4 --ladder-seconds 0.5 --ladder-loads 1 "
        "--ladder-limits tight wide --ladder-start-rate 8 24 --ladder-runs all_on_tier_4 ladder "
        f"--out {out}".split()
    )
    _, *loads, ladder = (json.loads(line) for line in out.read_text().splitlines())
    assert [(load["run"], load["limits"]) for load in loads] == [
        (run, limits) for limits in ("tight", "wide") for run in ("all_on_tier_4", "ladder")
    ]
    assert [load["rate"] for load in loads] == [2.0, 8.0, 4.0, 24.0]
    assert not any(load.get("errors") for load in loads)
    assert all(list(found["runs"]) == ["all_on_tier_4", "ladder"] for found in ladder["limits"])


def test_one_comparison_alone_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    main(
        "--device cpu --ladder --ladder-shapes tiny-bf16 tiny-bf16 tiny-bf16 --ladder-seconds 0.5 --ladder-loads 1 "
        f"--ladder-limits wide --ladder-start-rate 20 --ladder-runs all_on_tier_3 --out {out}".split()
    )
    ladder = json.loads(out.read_text().splitlines()[-1])
    assert list(ladder["limits"][0]["runs"]) == ["all_on_tier_3"]
    assert ladder["limits"][0]["ladder_to"] == {}


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ("--ladder-limits tight wide --ladder-start-rate 1 2 3", "got 3 rates for 2 pairs of limits"),
        ("--ladder-start-rate 1 2", "got 2 rates for 3 pairs of limits"),
        ("--ladder-limits wide --ladder-start-rate 0", "got a rate of 0 requests a second"),
        ("--ladder-limits tight wide --ladder-start-rate 5 -1", "got a rate of -1 requests a second"),
        ("--ladder-runs all_on_tier_2", "invalid choice: 'all_on_tier_2'"),
    ],
)
def test_a_ladder_that_cannot_be_driven_is_refused(
    arguments: str, refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--ladder", *arguments.split()])
    assert refusal in capsys.readouterr().err


def test_later_limits_go_on_from_the_ones_before_or_begin_anew() -> None:
    assert starts([15.0], ["interactive", "wide"]) == [15.0, None]
    assert starts([15.0, 30.0], ["interactive", "wide"]) == [15.0, 30.0]


def test_checks_of_drafts_are_warm_before_a_load() -> None:
    model = walker(1.0)
    config = EngineConfig(num_blocks=8, max_num_seqs=32, max_batch_tokens=64, max_draft_tokens=4, runner="device")
    engine = Engine(model, config)
    try:
        _warm_checks(engine)
        assert isinstance(engine.core.runner, DeviceRunner)
        warm = {(shape.num_sequences, shape.num_tokens // shape.num_sequences) for shape in engine.core.runner._views}
        assert warm == set(product((1, 2, 4, 8, 16, 24, 32), (2, 3, 4, 6)))
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("case", "why"),
    [("closed", "left undone"), ("closed meanwhile", "left undone"), ("no memory", "left undone"), ("slow", "0.2 s")],
)
def test_checks_of_drafts_that_are_not_warm_are_said_to_be(case: str, why: str) -> None:
    engine = Engine(walker(1.0), EngineConfig(num_blocks=8, max_num_seqs=4, max_batch_tokens=64, runner="device"))
    runner = engine.core.runner
    assert isinstance(runner, DeviceRunner)
    pad, begun = runner.launch_padding, threading.Event()

    def launch_padding(size: int, draws: DrawKind, query_len: int = 1) -> Flight:
        begun.set()
        if case == "no memory":
            raise torch.OutOfMemoryError("out of memory (simulated)")
        time.sleep(0.25)
        return pad(size, draws, query_len)

    runner.launch_padding = launch_padding  # type: ignore[method-assign]
    closing = threading.Thread(target=lambda: (begun.wait(60), engine.close()))
    try:
        if case == "closed":
            engine.close()
        if case == "closed meanwhile":
            closing.start()
        with pytest.raises(EngineError, match=why):
            _warm_checks(engine, 0.2 if case == "slow" else 60.0)
    finally:
        if closing.ident is not None:
            closing.join(60)
        engine.close()


def test_a_load_is_judged_whole_and_tier_by_tier() -> None:
    def latencies(ttft_ms: float, itl_ms: float) -> dict[str, float]:
        return {"ttft_p90_ms": ttft_ms, "itl_p90_ms": itl_ms}

    load = latencies(400, 30) | {"tiers": {"tier_1": latencies(20, 10), "tier_3": latencies(900, 30)}}
    assert (judge(load, 0.5, 0.05)["holds"], judge(load, 0.5, 0.05)["holds_in_every_tier"]) == (True, False)
    assert (judge(load, 1.0, 0.05)["holds"], judge(load, 1.0, 0.05)["holds_in_every_tier"]) == (True, True)
    assert (judge(load, 1.0, 0.02)["holds"], judge(load, 1.0, 0.02)["holds_in_every_tier"]) == (False, False)
    assert not judge({"errors": ["out of memory"]}, 1.0, 1.0)["holds"]


@pytest.mark.slow
def test_a_shape_cut_over_two_devices_is_measured_too(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    options = "--batches 1 --prompt-lengths 16 --at-once 2 --repeats 1 --profile --tensor-parallel 2"
    main(f"--device cpu --shapes tiny-bf16 {options} --out {out}".split())
    row = json.loads(out.read_text().splitlines()[1])
    assert not any("error" in found for found in (*row["ours"].values(), *row["profile"]))


def test_published_sizes_of_the_shapes() -> None:
    """Parameter counts of the public checkpoints: 2.82 + 0.39, 6.98 + 0.53 and 68.45 + 1.05 billion."""
    found = {name: ModelCosts.of(SHAPES[name]) for name in ("3b-int4", "8b-bf16", "70b-int4")}
    billions = {name: (round(c.linear_params / 1e9, 2), round(c.head_params / 1e9, 2)) for name, c in found.items()}
    assert billions == {"3b-int4": (2.82, 0.39), "8b-bf16": (6.98, 0.53), "70b-int4": (68.45, 1.05)}
    assert [c.kv_bytes_per_token for c in found.values()] == [114_688, 131_072, 327_680]


def test_floors_are_the_larger_of_bytes_and_operations() -> None:
    costs, ceilings = ModelCosts.of(SHAPES["70b-int4"]), DeviceCeilings(4.34e12, 782e12)
    one, many = (decode_floor_s(costs, ceilings, b, 576) for b in (1, 128))
    assert one == pytest.approx(costs.weight_bytes / 4.34e12, rel=0.01)
    assert many == pytest.approx(2 * 69.5e9 * 128 / 782e12, rel=0.3)
    assert prefill_floor_s(costs, ceilings, 512) == pytest.approx(0.09, rel=0.1)


@pytest.mark.parametrize("agreement", [1.0, 0.6, 0.0])
def test_a_drafter_is_right_as_often_as_was_set(agreement: float) -> None:
    target, draft = walker(1.0), walker(agreement)
    kv = KVCache(draft.config, 64, 16, dtype=draft.dtype)
    speculator = Speculator(ModelDrafter(draft, kv, vocab_size=TINY.vocab_size), max_draft_tokens=1, adaptive=False)
    engine = Engine(target, EngineConfig(num_blocks=64), speculator=speculator)
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
        result = answer_of(engine, Request("walk", (7,), sampling), timeout_s=120)
    finally:
        engine.close()
    following = successors(TINY.vocab_size, seed=5)
    expected = [7]
    for _ in result.token_ids:
        expected.append(int(following[expected[-1]]))
    assert list(result.token_ids) == expected[1:]
    ending = result.ending
    assert ending.num_accepted_tokens / ending.num_draft_tokens == pytest.approx(agreement, abs=0.1)


def test_successors_are_a_permutation() -> None:
    for agreement in (1.0, 0.5, 0.0):
        assert torch.equal(successors(97, agreement=agreement).sort().values, torch.arange(97))


def test_a_pass_that_fails_says_so() -> None:
    with OurEngine(walker(1.0), max_num_seqs=2, kv_tokens=64) as ours, pytest.raises(EngineError):
        ours.serve([[1] * 300], 8)


def test_the_peer_needs_folders_to_read() -> None:
    with pytest.raises(SystemExit):
        main(["--peer", "vllm"])


def test_overlapping_kernels_and_what_lies_idle_add_up_to_the_whole() -> None:
    spans = [
        ("int4_many", 0.0, 500.0),
        ("_rms_norm", 400.0, 700.0),
        ("attention_many", 900.0, 1000.0),
        ("copy", 1000.0, 1200.0),
    ]
    found = by_kind(spans, 2, {"products": 1e-4})
    kinds = found["kinds"]
    assert isinstance(kinds, dict)
    assert {kind: each["ms"] for kind, each in kinds.items()} == {
        "products": 0.25,
        "norms": 0.1,
        "attention": 0.05,
        "others": 0.1,
    }
    assert kinds["products"]["floor_ms"] == 0.1
    assert found["idle_ms"] == 0.1
    assert found["launches"] == 2
