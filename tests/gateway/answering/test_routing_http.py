"""What a request may ask of the routing, and what the log keeps of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from backends.protocol import Capability, Priority
from backends.testing import Script
from classifier.types import RouterRequest, Sufficiency
from gateway.models.predictor import Predictor
from gateway.observe.log_writer import standard_error
from tests.gateway.endpoints.test_pages import FixedRouter
from tests.gateway.harness import LADDER_TOML, assert_error, echo_backends, make_settings, running
from tests.gateway.raw import PATIENCE_S

SURE = FixedRouter(0.99, 0.995)


@pytest.mark.parametrize(
    ("body", "headers", "tier", "reason"),
    [
        ({}, {}, "1", "sufficient"),
        ({"model": "expert"}, {}, "2", "pinned"),
        ({"model": "large"}, {}, "2", "pinned"),
        ({"model": "tier-2"}, {}, "2", "pinned"),
        ({"model": "careful"}, {}, "2", "only_allowed"),
        ({"suffice": {"tier": 2}}, {}, "2", "pinned"),
        ({"suffice": {"tier": "expert"}}, {}, "2", "pinned"),
        ({"suffice": {"min_tier": 2}}, {}, "2", "only_allowed"),
        ({"suffice": {"policy": "careful"}}, {}, "2", "only_allowed"),
        ({}, {"x-suffice-tier": "2"}, "2", "pinned"),
        ({}, {"x-suffice-tier": "expert"}, "2", "pinned"),
        ({}, {"x-suffice-min-tier": "2"}, "2", "only_allowed"),
        ({}, {"x-suffice-policy": "careful"}, "2", "only_allowed"),
        ({"suffice": {"tier": 1}}, {"x-suffice-tier": "2"}, "1", "pinned"),
    ],
    ids=str,
)
async def test_a_request_may_choose(
    tmp_path: Path, body: dict[str, Any], headers: dict[str, str], tier: str, reason: str
) -> None:
    async with running(make_settings(tmp_path), router=SURE) as gateway:
        asked = {"model": "auto", "messages": [{"role": "user", "content": "hi"}]} | body
        response = await gateway.client.post("/v1/chat/completions", json=asked, headers=headers)
        assert response.headers["x-suffice-tier"] == tier
        assert response.headers["x-suffice-reason"] == reason
        row = await gateway.row()
        assert sum(row.propensities.values()) == pytest.approx(1)
        assert row.decided_tier is not None
        assert row.propensities[row.decided_tier] == row.propensity


async def test_explored_requests_carry_their_propensity_and_may_be_declined(tmp_path: Path) -> None:
    toml = LADDER_TOML + "\n[policy]\nexploration_share = 0.5\n"
    async with running(make_settings(tmp_path, toml), router=SURE) as gateway:
        for place in range(40):
            await gateway.chat("hi", suffice={"explore": place % 2 == 0})
        rows = await gateway.rows()
        declined = [row for row in rows if row.overrides == {"explore": False}]
        offered = [row for row in rows if row.overrides == {"explore": True}]
        assert {row.propensity for row in declined} == {1.0}
        assert not any(row.explored for row in declined)
        assert {row.explored for row in offered} == {True, False}
        assert {(row.decided_tier, row.propensity) for row in offered} == {(1, 0.75), (2, 0.25)}


async def test_a_conversation_stays_where_it_is_even_after_a_restart(tmp_path: Path) -> None:
    toml = LADDER_TOML + '\n[policy]\nsticky = "always"\n'
    asked = {"suffice": {"session_id": "talk"}}
    async with running(make_settings(tmp_path, toml), router=SURE) as gateway:
        await gateway.chat("hi", suffice={"session_id": "talk", "tier": 2})
        response = await gateway.chat("hi", **asked)
        assert response.headers["x-suffice-reason"] == "sticky"
        assert response.headers["x-suffice-tier"] == "2"
    async with running(make_settings(tmp_path, toml), router=SURE) as gateway:
        assert (await gateway.chat("hi", **asked)).headers["x-suffice-reason"] == "sticky"
        assert (await gateway.chat("hi")).headers["x-suffice-tier"] == "1"


async def test_the_kill_switch_sends_all_to_the_top(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path), router=SURE) as gateway:
        gateway.parts.request_router.kill_switch = True
        response = await gateway.chat("hi")
        assert response.headers["x-suffice-tier"] == "2"
        assert response.headers["x-suffice-reason"] == "kill_switch"


async def test_a_router_that_fails_or_dawdles_costs_the_estimate_not_the_request(tmp_path: Path) -> None:
    class Broken(FixedRouter):
        def predict(self, requests: Any) -> list[Sufficiency]:
            raise MemoryError("no room for the embedding")

    async with running(make_settings(tmp_path), router=Broken(1, 1)) as gateway:
        response = await gateway.chat("hi")
        assert response.headers["x-suffice-reason"] == "no_estimate"
        assert response.headers["x-suffice-tier"] == "2"
        assert (await gateway.row()).sufficiency == ()


async def test_a_slow_router_is_moved_off_the_event_loop_and_timed() -> None:
    import threading
    import time

    threads: list[str] = []

    class Slow(FixedRouter):
        cpu_s = 0.05

        def predict(self, requests: Sequence[RouterRequest]) -> list[Sufficiency]:
            threads.append(threading.current_thread().name)
            until_s = time.thread_time() + self.cpu_s
            while time.thread_time() < until_s:
                pass
            return super().predict(requests)

    router = Slow(0.5, 0.5)
    predictor = Predictor(router, timeout_s=10)
    turns, here = (("user", "hi"),), threading.current_thread().name
    assert await predictor.predict(turns) is not None
    assert threads == [here]
    await predictor.predict(turns)
    assert threads[-1] != here
    router.cpu_s = 0.0
    for _ in range(100):
        await predictor.predict(turns)
    assert threads[-1] == here, "what has become quick comes back"
    predictor.close()
    router.cpu_s = 0.2
    impatient = Predictor(router, timeout_s=0.005)
    await impatient.warm_up()
    assert await impatient.predict(turns) is None
    impatient.close()


async def test_what_comes_together_is_estimated_together() -> None:
    asked: list[int] = []

    class Picky(FixedRouter):
        def predict(self, requests: Sequence[RouterRequest]) -> list[Sufficiency]:
            asked.append(len(requests))
            if any(request.text == "bad" for request in requests):
                raise ValueError("a text it cannot read")
            # One estimate too few where "few" is among them.
            return super().predict([request for request in requests if request.text != "few"])

    predictor = Predictor(Picky(0.5, 0.5), timeout_s=10)

    async def ask(*texts: str) -> list[bool]:
        found = await asyncio.gather(*(predictor.predict((("user", text),)) for text in texts))
        return [each is not None for each in found]

    assert await ask("one", "two", "three") == [True] * 3
    assert asked == [3]
    assert await ask("one", "bad", "three") == [True, False, True], "one request's fault is its own"
    assert await ask("one", "few", "three") == [True, False, True]
    gone = asyncio.create_task(ask("one"))
    await asyncio.sleep(0)
    gone.cancel()
    assert await ask("two") == [True], "who left is not waited for"
    predictor.close()


async def test_a_model_without_thinking_is_not_told_to_think(tmp_path: Path) -> None:
    capabilities: frozenset[Capability] = frozenset({"generate"})
    for able, expected in ((True, [True, False, False, None]), (False, [None] * 4)):
        backends = echo_backends() if able else echo_backends(capabilities=capabilities)
        async with running(make_settings(tmp_path), backends) as gateway:
            await gateway.chat("hi", model="expert", reasoning_effort="high")
            await gateway.chat("hi", model="expert", reasoning_effort="none")
            await gateway.chat("hi", model="expert", chat_template_kwargs={"enable_thinking": False})
            await gateway.chat("hi", model="expert")
            assert [each.thinking for each in gateway.backends["large"].requests] == expected


async def test_reasoning_is_apart_from_the_answer(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(text="four", reasoning="two and two"))
    async with running(make_settings(tmp_path), backends) as gateway:
        message = (await gateway.chat("hi", model="expert")).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "two and two"
        assert message["content"] == "four"
        response = await gateway.chat("hi", model="expert", stream=True)
        chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "two and two"
        assert "".join(delta.get("content", "") for delta in deltas) == "four"


async def test_background_work_says_so_to_the_model(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        await gateway.chat("hi", model="expert", suffice={"priority": "background"})
        await gateway.chat("hi", model="expert", service_tier="flex")
        await gateway.chat("hi", model="expert")
        priorities = [each.priority for each in gateway.backends["large"].requests]
        assert priorities == [Priority.BACKGROUND, Priority.BACKGROUND, Priority.LIVE]


@pytest.mark.parametrize("prompts", ["none", "digest", "full"])
async def test_the_log_keeps_of_prompts_what_retention_says(tmp_path: Path, prompts: str) -> None:
    async with running(make_settings(tmp_path, log__prompts=prompts)) as gateway:
        await gateway.chat("a secret \x00 question")
        row = await gateway.row()
        kept = [row.prompt_digest, row.answer_digest, row.prompt_text, row.answer_text]
        assert [value is not None for value in kept] == [prompts != "none"] * 2 + [prompts == "full"] * 2
        if prompts == "full":
            assert row.prompt_text is not None
            assert row.prompt_text.startswith("user: a secret ")


async def test_the_log_line_has_figures_and_no_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with running(make_settings(tmp_path)) as gateway:
        body = {"model": "expert", "messages": [{"role": "user", "content": "confidential words"}]}
        await gateway.client.post("/v1/chat/completions", json=body, headers={"traceparent": trace})
        row = await gateway.row()
    assert row.traceparent == trace
    assert standard_error().flush(PATIENCE_S)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if "suffice.request" in line]
    assert len(lines) == 1
    (line,) = lines
    assert line["request_id"] == row.request_id
    assert (line["tier"], line["ending"], line["traceparent"]) == (2, "stop", trace)
    assert "confidential" not in json.dumps(line)


async def test_seeds_differ_between_choices_but_not_between_runs(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        await gateway.chat("hi", model="expert", n=3, seed=7)
        assert [each.sampling.seed for each in gateway.backends["large"].requests] == [7, 8, 9]


async def test_a_prompt_too_long_for_a_small_tier_goes_to_a_larger_one(tmp_path: Path) -> None:
    toml = LADDER_TOML.replace('model = "small"', 'model = "small"\ncontext_length = 50')
    async with running(make_settings(tmp_path, toml), router=SURE) as gateway:
        response = await gateway.chat("word " * 100)
        assert response.headers["x-suffice-reason"] == "context"
        assert response.headers["x-suffice-tier"] == "2"
        assert_error(await gateway.chat("word " * 100, model="simple"), 400, "context_length_exceeded", "messages")
