"""Answers that their own tier doubts: who answers instead, what it costs, and that nothing sent is ever taken back.

The scripted tiers give each token a probability that depends on its text alone, so one word stands for an answer its
tier is sure of, another for one it doubts.
"""

from __future__ import annotations

import asyncio
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from backends.errors import BackendFailure, BackendUnavailable
from backends.protocol import Backend, FinishReason, GenerateRequest
from backends.testing import EchoBackend, Script, token_id
from classifier.confidence import SIGNALS, AnswerConfidence, TierConfidence
from classifier.types import TierSufficiency
from gateway.ids import uuid7
from gateway.store.records import RequestRecord
from tests.gateway.endpoints.test_pages import FixedRouter
from tests.gateway.harness import Gateway, assert_error, events, make_settings, running
from tests.gateway.raw import RawClient, eventually

LADDER = """
[[tiers]]
name = "low"
model = "low"
price_per_request_usd = 0.001
price_per_compute_hour_usd = 3.6

[[tiers]]
name = "mid"
model = "mid"
price_per_request_usd = 0.01
price_per_compute_hour_usd = 7.2

[[tiers]]
name = "top"
model = "top"
price_per_request_usd = 0.1
price_per_compute_hour_usd = 36

[models.low]
kind = "echo"
[models.mid]
kind = "echo"
[models.top]
kind = "echo"

[verification]
enabled = false

[policy]
exploration_share = 0.0
quality_floor = 0.5
"""
SURE, UNSURE = "west", "right"
HALF_SURE = 0.6


class ThreeTierRouter(FixedRouter):
    num_tiers = 3

    def __init__(self) -> None:
        super().__init__(0.9, 0.95)
        self._tiers = (*self._tiers[:1], TierSufficiency(2, 0.95, 0.97), TierSufficiency(3, 0.99, 1.0))


ROUTER = ThreeTierRouter()


def probability(token: str) -> float:
    return math.exp(-0.01 * (1 + token_id(token) % 100))


def test_the_words_stand_for_what_they_should() -> None:
    assert min(probability(SURE), probability(f" {SURE}")) > HALF_SURE + 0.05
    assert max(probability(UNSURE), probability(f" {UNSURE}")) < HALF_SURE - 0.05


def toml(**options: Any) -> str:
    chosen = {"mode": "next", "least_confidence": {"low": HALF_SURE, "mid": HALF_SURE}} | options
    least = chosen.pop("least_confidence")
    lines = [f"{key} = {json.dumps(value)}" for key, value in chosen.items()]
    lines += ["[policy.escalation.least_confidence]", *(f"{tier} = {value}" for tier, value in least.items())]
    return LADDER + "\n[policy.escalation]\n" + "\n".join(lines)


def ladder(low: Any = UNSURE, mid: Any = SURE, top: Any = SURE, **options: Any) -> dict[str, Backend]:
    """Three tiers that say one thing each, or play a script."""
    made: dict[str, Backend] = {}
    for name, said, compute_s in (("low", low, 1.0), ("mid", mid, 2.0), ("top", top, 3.0)):
        script = Script(text=said, compute_s=compute_s, token_delay_s=None) if isinstance(said, str) else said
        made[name] = EchoBackend(name, script, **options)
    return made


def asked(gateway: Gateway, name: str) -> list[GenerateRequest]:
    backend = gateway.backends[name]
    assert isinstance(backend, EchoBackend)
    return backend.requests


def tries(row: RequestRecord) -> list[tuple[int, str | None]]:
    return [(each.tier, each.error) for each in row.attempts]


def text_of(streamed: str) -> str:
    """The visible text of a stream's events."""
    chunks = [json.loads(event) for event in events(streamed) if event != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


# Whole answers


async def test_a_doubted_answer_is_answered_by_the_next_tier(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, toml()), ladder(), router=ROUTER) as gateway:
        response = await gateway.chat("well?")
        assert response.json()["choices"][0]["message"]["content"] == SURE
        assert response.json()["choices"][0]["logprobs"] is None
        assert response.headers["x-suffice-tier"] == "2"
        assert response.headers["x-suffice-reason"] == "escalated"
        (request,) = asked(gateway, "mid")
        assert request.prediction == UNSURE
        assert not asked(gateway, "top")

        row = await gateway.row()
        assert (row.decided_tier, row.final_tier, row.model_served) == (1, 2, "mid")
        assert tries(row) == [(1, "doubted"), (2, None)]
        low = row.attempts[0]
        assert low.confidence == pytest.approx(probability(UNSURE))
        assert low.cost_nano_usd == 1_000_000
        # Both tiers worked, so both are on the bill; the tokens are the answer's own.
        assert row.cost_usd == Decimal("0.011")
        assert response.headers["x-suffice-cost"] == "0.011"
        assert row.compute_s == 3.0
        assert row.measured_cost_usd == Decimal("0.005")
        assert row.completion_tokens == response.json()["usage"]["completion_tokens"] == 1
        assert row.reason == "sufficient"

        told = (await gateway.client.get(f"/v1/requests/{row.request_id}")).json()
        assert [each["error"] for each in told["attempts"]] == ["doubted", None]
        assert told["attempts"][0]["cost_usd"] == "0.001"
        metrics = (await gateway.client.get("/metrics")).text
        assert 'suffice_failed_attempts_total{error="doubted",tier="1"} 1.0' in metrics
        gateway.assert_idle()


async def test_a_sure_answer_is_sent_as_it_is(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, toml()), ladder(low=SURE), router=ROUTER) as gateway:
        response = await gateway.chat("well?")
        assert response.headers["x-suffice-reason"] == "sufficient"
        assert response.json()["choices"][0]["logprobs"] is None
        assert not asked(gateway, "mid")
        row = await gateway.row()
        assert tries(row) == [(1, None)]
        assert row.attempts[0].confidence == pytest.approx(probability(SURE))
        assert row.cost_usd == Decimal("0.001")


async def test_off_nothing_is_held_and_nothing_is_asked_for(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, toml(mode="off")), ladder(), router=ROUTER) as gateway:
        assert (await gateway.chat("well?")).headers["x-suffice-reason"] == "sufficient"
        (request,) = asked(gateway, "low")
        assert request.sampling.logprobs is None
        assert (await gateway.row()).attempts[0].confidence is None


async def test_modes_and_the_number_of_steps(tmp_path: Path) -> None:
    unsure = ladder(mid=UNSURE)
    async with running(make_settings(tmp_path, toml(max_escalations=2)), unsure, router=ROUTER) as gateway:
        response = await gateway.chat("well?")
        assert response.headers["x-suffice-tier"] == "3"
        row = await gateway.row()
        assert tries(row) == [(1, "doubted"), (2, "doubted"), (3, None)]
        assert row.cost_usd == Decimal("0.111")
    for options, tier in (({"max_escalations": 1}, "2"), ({"mode": "top"}, "3")):
        folder = tmp_path / tier
        folder.mkdir()
        async with running(make_settings(folder, toml(**options)), ladder(mid=UNSURE), router=ROUTER) as gateway:
            assert (await gateway.chat("well?")).headers["x-suffice-tier"] == tier


async def test_a_request_that_names_or_bounds_its_tiers_is_obeyed(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, toml(mode="top")), ladder(), router=ROUTER) as gateway:
        assert (await gateway.chat("well?", model="low")).headers["x-suffice-reason"] == "pinned"
        response = await gateway.chat("well?", suffice={"max_tier": 2})
        assert response.headers["x-suffice-tier"] == "2"
        assert not asked(gateway, "top")


async def test_the_routers_calibration_says_what_the_numbers_are_worth(tmp_path: Path) -> None:
    class Calibrated(ThreeTierRouter):
        # Whatever this tier says is right one time in four.
        confidence = AnswerConfidence({1: TierConfidence((0.0,) * len(SIGNALS), -math.log(3.0), 100, 0.5, 0.25)})

    async with running(make_settings(tmp_path, toml()), ladder(low=SURE), router=Calibrated()) as gateway:
        assert (await gateway.chat("well?")).headers["x-suffice-reason"] == "escalated"
        assert (await gateway.row()).attempts[0].confidence == pytest.approx(0.25)


async def test_every_choice_must_be_sure(tmp_path: Path) -> None:
    def low(request: GenerateRequest) -> Script:
        return Script(text=UNSURE if request.request_id.endswith("-1") else SURE, compute_s=1.0)

    async with running(make_settings(tmp_path, toml()), ladder(low=low), router=ROUTER) as gateway:
        response = await gateway.chat("well?", n=3)
        assert response.headers["x-suffice-reason"] == "escalated"
        assert [request.prediction for request in asked(gateway, "mid")] == [SURE, UNSURE, SURE]
        row = await gateway.row()
        assert row.cost_usd == 3 * Decimal("0.011")
        assert row.num_choices == 3


async def test_plain_completions_and_their_echo(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, toml()), ladder(), router=ROUTER) as gateway:
        body = {"model": "auto", "prompt": ["One:", "Two:"], "echo": True}
        response = await gateway.client.post("/v1/completions", json=body)
        assert [choice["text"] for choice in response.json()["choices"]] == [f"One:{SURE}", f"Two:{SURE}"]
        assert [request.prediction for request in asked(gateway, "mid")] == [UNSURE, UNSURE]


async def test_log_probabilities_that_were_asked_for_are_the_answering_tiers(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, toml()), ladder(), router=ROUTER) as gateway:
        response = await gateway.chat("well?", logprobs=True, top_logprobs=2)
        content = response.json()["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [SURE]
        assert len(content[0]["top_logprobs"]) == 2


async def test_a_tier_without_log_probabilities_is_believed(tmp_path: Path) -> None:
    backends = ladder()
    backends["low"] = EchoBackend("low", Script(text=UNSURE), capabilities=frozenset({"generate"}))
    async with running(make_settings(tmp_path, toml()), backends, router=ROUTER) as gateway:
        assert (await gateway.chat("well?")).headers["x-suffice-reason"] == "sufficient"
        assert (await gateway.row()).attempts[0].confidence is None


async def test_an_empty_answer_is_doubted(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, toml()), ladder(low=""), router=ROUTER) as gateway:
        assert (await gateway.chat("well?")).json()["choices"][0]["message"]["content"] == SURE


@pytest.mark.parametrize(
    "broken",
    [
        Script(text=SURE, fail_before=BackendUnavailable("down")),
        Script(text=SURE, fail_after=0),
        Script(text=f"{SURE} {SURE} {SURE}", fail_after=2),
    ],
    ids=["before", "at once", "midway"],
)
async def test_when_the_higher_tier_fails_the_doubted_answer_is_sent(tmp_path: Path, broken: Script) -> None:
    async with running(make_settings(tmp_path, toml()), ladder(mid=broken), router=ROUTER) as gateway:
        response = await gateway.chat("well?")
        assert response.json()["choices"][0]["message"]["content"] == UNSURE
        assert (response.headers["x-suffice-tier"], response.headers["x-suffice-reason"]) == ("1", "sufficient")
        row = await gateway.row()
        assert (row.final_tier, row.error_code) == (1, None)
        assert row.attempts[0].error is None
        # What broke off midway was work done, and is paid for; what failed before its first token was not.
        assert row.cost_usd == Decimal("0.011" if broken.fail_after == 2 else "0.001")
        gateway.assert_idle()


async def test_falling_back_and_going_up_in_one_request(tmp_path: Path) -> None:
    backends = ladder(low=Script(fail_before=BackendFailure("no")), mid=UNSURE)
    async with running(make_settings(tmp_path, toml()), backends, router=ROUTER) as gateway:
        response = await gateway.chat("well?")
        assert (response.headers["x-suffice-tier"], response.headers["x-suffice-reason"]) == ("3", "escalated")
        assert tries(await gateway.row()) == [(1, "model_failed"), (2, "doubted"), (3, None)]


async def test_a_conversation_stays_with_the_tier_that_answered(tmp_path: Path) -> None:
    text = toml().replace("[policy]\n", '[policy]\nsticky = "always"\n')
    async with running(make_settings(tmp_path, text), ladder(), router=ROUTER) as gateway:
        await gateway.chat("well?", suffice={"session_id": "talk"})
        response = await gateway.chat("and?", suffice={"session_id": "talk"})
        assert (response.headers["x-suffice-tier"], response.headers["x-suffice-reason"]) == ("2", "sticky")


# Streams


async def stream(gateway: Gateway, **body: Any) -> tuple[str, dict[str, str]]:
    ask = {"model": "auto", "stream": True, "messages": [{"role": "user", "content": "well?"}]} | body
    response = await gateway.client.post("/v1/chat/completions", json=ask)
    assert response.status_code == 200, response.text
    return response.text, dict(response.headers)


async def test_streams_are_left_alone_unless_the_policy_holds_them(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, toml()), ladder(), router=ROUTER) as gateway:
        text, headers = await stream(gateway)
        assert (text_of(text), headers["x-suffice-reason"]) == (UNSURE, "sufficient")
        assert asked(gateway, "low")[0].sampling.logprobs is None


@pytest.mark.parametrize(
    ("low", "is_doubted"),
    [
        (" ".join([UNSURE] * 20), True),
        (" ".join([SURE] * 20), False),
        # Doubts that come after the stream was let go come too late.
        (" ".join([SURE] * 4 + [UNSURE] * 16), False),
        (f"{UNSURE} {UNSURE}", True),
        (f"{SURE} {SURE}", False),
    ],
    ids=["unsure", "sure", "sure at first", "short and unsure", "short and sure"],
)
async def test_a_stream_goes_up_while_it_is_held_and_never_after(tmp_path: Path, low: str, is_doubted: bool) -> None:
    backends = ladder(low=low, mid=f"{SURE} {SURE} {SURE}")
    async with running(make_settings(tmp_path, toml(hold_back_tokens=4)), backends, router=ROUTER) as gateway:
        text, headers = await stream(gateway, stream_options={"include_usage": True})
        assert text_of(text) == (f"{SURE} {SURE} {SURE}" if is_doubted else low)
        assert headers["x-suffice-tier"] == ("2" if is_doubted else "1")
        row = await gateway.row()
        assert row.finish_reason is FinishReason.STOP
        assert row.ttft_s is not None
        assert row.itl_s is not None
        assert row.itl_s >= 0
        if is_doubted:
            # A long answer was stopped where it was judged; what had been written by then is on the bill.
            is_long = len(low.split()) > 4
            assert gateway.backends["low"].num_cancelled == is_long
            assert tries(row) == [(1, "doubted"), (2, None)]
            assert row.cost_usd == Decimal("0.011")
            assert asked(gateway, "mid")[0].prediction == " ".join(low.split()[:4])
        gateway.assert_idle()


async def test_held_tokens_are_sent_together_once_they_are_trusted(tmp_path: Path) -> None:
    slow = Script(text=" ".join([SURE] * 8), token_delay_s=0.02)
    made = make_settings(tmp_path, toml(hold_back_tokens=5))
    async with running(made, ladder(low=slow), router=ROUTER) as gateway, RawClient(gateway.url) as client:
        body = {"model": "auto", "stream": True, "messages": [{"role": "user", "content": "well?"}]}
        await client.post("/v1/chat/completions", body)
        first = await client.read_until(f'"{SURE}"'.encode())
        assert b"x-suffice-tier: 1" in first
        low = gateway.backends["low"]
        assert low.num_running == 1
        await eventually(lambda: low.num_finished == 1)


@pytest.mark.parametrize("hold_back", [3, 100])
async def test_a_stream_goes_on_where_it_was_when_the_higher_tier_fails(tmp_path: Path, hold_back: int) -> None:
    low, down = " ".join([UNSURE] * 12), Script(fail_before=BackendUnavailable("down"))
    backends = ladder(low=Script(text=low, token_delay_s=0.001), mid=down)
    async with running(make_settings(tmp_path, toml(hold_back_tokens=hold_back)), backends, router=ROUTER) as gateway:
        text, headers = await stream(gateway)
        assert text_of(text) == low
        assert headers["x-suffice-tier"] == "1"
        row = await gateway.row()
        assert tries(row) == [(1, None), (2, "model_unavailable")]
        assert row.cost_usd == Decimal("0.001")
        gateway.assert_idle()


async def test_a_higher_tier_that_breaks_off_in_a_stream_ends_it_with_one_error(tmp_path: Path) -> None:
    backends = ladder(mid=Script(text=" ".join([SURE] * 9), fail_after=4))
    async with running(make_settings(tmp_path, toml(hold_back_tokens=9)), backends, router=ROUTER) as gateway:
        text, _ = await stream(gateway)
        assert "[DONE]" not in text
        assert json.loads(events(text)[-1])["error"]["code"] == "answer_failed"
        row = await gateway.row()
        assert (row.finish_reason, row.final_tier) == (FinishReason.ERROR, 2)
        assert row.cost_usd == Decimal("0.011")
        gateway.assert_idle()


# Clients that leave


@pytest.mark.slow
@given(
    hang_up_s=st.floats(0, 0.06),
    streamed=st.booleans(),
    hold_back=st.sampled_from([2, 50]),
    fails=st.booleans(),
    num_choices=st.integers(1, 2),
)
@example(hang_up_s=0.0142, streamed=True, hold_back=2, fails=False, num_choices=2)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_whenever_a_client_leaves_every_tier_is_freed_and_billed_once(
    tmp_path: Path, hang_up_s: float, streamed: bool, hold_back: int, fails: bool, num_choices: int
) -> None:
    slow = {"token_delay_s": 0.002, "first_delay_s": 0.005}
    low = Script(text=" ".join([UNSURE] * 6), **slow)  # type: ignore[arg-type]
    mid = Script(text=" ".join([SURE] * 6), fail_after=3 if fails else None, **slow)  # type: ignore[arg-type]
    url = f"sqlite:///{tmp_path / uuid7()}.db"
    made = make_settings(tmp_path, toml(hold_back_tokens=hold_back), database__url=url)
    async with running(made, ladder(low=low, mid=mid), router=ROUTER) as gateway:
        body = {"model": "auto", "n": num_choices, "messages": [{"role": "user", "content": "well?"}]}
        async with RawClient(gateway.url) as client:
            await client.post("/v1/chat/completions", body | {"stream": streamed})
            await asyncio.sleep(hang_up_s)
            client.reset()
        await eventually(lambda: gateway.parts.admission.num_running == 0)
        gateway.assert_idle()
        rows = await gateway.rows()
        assert len(rows) <= 1
        for row in rows:
            # Each answer that began was charged for once, whether it was sent or not.
            begun = {name for name in ("low", "mid") if asked(gateway, name)}
            assert row.cost_usd in {num_choices * Decimal(cost) for cost in ("0", "0.001", "0.011")}
            assert (row.cost_usd > num_choices * Decimal("0.001")) <= ("mid" in begun)


async def test_every_tier_failing_is_one_error_as_ever(tmp_path: Path) -> None:
    down = Script(fail_before=BackendUnavailable("down"))
    async with running(make_settings(tmp_path, toml()), ladder(down, down, down), router=ROUTER) as gateway:
        assert_error(await gateway.chat("well?"), 503, "model_unavailable")


# Predictions of the caller's own


async def test_openais_prediction_reaches_the_tier_and_its_counts_the_caller(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, toml()), ladder(low=f"{SURE} {SURE}"), router=ROUTER) as gateway:
        predicted = {"type": "content", "content": [{"type": "text", "text": f"{SURE} {UNSURE} {UNSURE}"}]}
        response = await gateway.chat("well?", prediction=predicted)
        assert asked(gateway, "low")[0].prediction == f"{SURE} {UNSURE} {UNSURE}"
        details = response.json()["usage"]["completion_tokens_details"]
        assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (1, 2)
        assert response.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("text", "prediction"),
        ({"content": "x"}, "prediction.type"),
        ({"type": "guess", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "text", "text": 3}]}, "prediction.content[0].text"),
    ],
    ids=str,
)
async def test_a_malformed_prediction_is_refused(tmp_path: Path, value: Any, param: str) -> None:
    async with running(make_settings(tmp_path), router=FixedRouter(0.9, 0.99)) as gateway:
        response = await gateway.chat("well?", prediction=value)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
