"""Answers that break off after their first token, through the whole gateway: who goes on, what is sent, what it costs.

The tiers are remote models behind a real server, whose paths say after how many tokens they break off; the last one may
be a model in this process.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.protocol import Backend, FinishReason, ToolCall
from backends.testing import EchoBackend, Script, split_tokens
from gateway.access.rate_windows import Meter
from gateway.ids import uuid7
from gateway.models.loader import make_backends
from gateway.store.records import BROKEN, RequestRecord
from policies.pricing import to_nano_usd
from tests.backends.provider.behaviours import Behaviour
from tests.backends.provider.call import ProviderCall
from tests.backends.provider.server import ProviderServer
from tests.gateway.access.test_limits_http import limited
from tests.gateway.endpoints.test_pages import FixedRouter
from tests.gateway.harness import Gateway, assert_error, make_settings, running
from tests.gateway.raw import RawClient, eventually

# 220 words of text with characters of one to four bytes, none of them alike.
WORDS = tuple(f"{'wörd' if place % 3 else '字🦊'}{place}" for place in range(220))
TEXT = " ".join(WORDS)
NUM_TOKENS = len(split_tokens(TEXT))
CHAT = {"model": "auto", "messages": [{"role": "user", "content": "say it all"}]}
PROMPT_TOKENS = 3
CAN = 'capabilities = ["generate", "logprobs", "tools", "structured_output", "thinking", "continue"]'
TOML = """
[[tiers]]
name = "low"
model = "first"
price_per_request_usd = 0.001
price_per_input_token_usd = 0.00001
price_per_output_token_usd = 0.0001
[[tiers]]
name = "high"
model = "second"
price_per_request_usd = 0.01
price_per_input_token_usd = 0.0002
price_per_output_token_usd = 0.003

[models.first]
urls = {first}
model = "provider-model"
retry.max_attempts = 1
breaker.failure_threshold = 100000
{can}
[models.second]
urls = ["{second}"]
model = "provider-model"
retry.max_attempts = 1
breaker.failure_threshold = 100000
{can_second}

[policy]
exploration_share = 0.0
[router]
artifact = "none"
[verification]
enabled = true
[learning]
enabled = false
"""
LOW = FixedRouter(0.97, 0.98)


def dies_after(num_tokens: int, *, in_order: bool = False, with_usage: bool = False) -> Behaviour:
    """Send so many tokens of the answer, and drop the connection."""

    async def answer(call: ProviderCall) -> None:
        await call.stream(num_tokens)
        if in_order:
            await call.end()
            return
        # What was written before must reach the client before the reset does.
        await asyncio.sleep(0.02)
        call.reset()

    return answer


async def says_usage(call: ProviderCall) -> None:
    """Count its tokens along with the answer, and die after five."""
    await call.start()
    for number, chunk in enumerate(call.chunks()[:6]):
        await call.event(chunk | {"usage": {"prompt_tokens": 1000, "completion_tokens": 2 * number}})
    await call.end()


MORE: dict[str, Behaviour] = {f"dies_after_{num}": dies_after(num, in_order=num % 4 > 0) for num in range(1, 221)}
MORE["says_usage"] = says_usage


@pytest.fixture(scope="module")
def server() -> Iterator[ProviderServer]:
    with ProviderServer(Script(text=TEXT), more=MORE) as up:
        yield up
        assert up.errors == []


@asynccontextmanager
async def gateway_of(
    directory: Path,
    server: ProviderServer,
    *first: str,
    second: str = "ok",
    can: str = CAN,
    can_second: str = CAN,
    backends: Mapping[str, Backend] | None = None,
    **overrides: Any,
) -> AsyncIterator[Gateway]:
    urls = json.dumps([server.url(each) for each in first])
    toml = TOML.format(first=urls, second=server.url(second), can=can, can_second=can_second)
    configured = make_settings(directory, toml, **overrides)
    async with running(configured, {**make_backends(configured), **(backends or {})}, router=LOW) as gateway:
        yield gateway


def tries(row: RequestRecord) -> list[tuple[int, str | None]]:
    return [(each.tier, each.error) for each in row.attempts]


def text_of(response: httpx.Response) -> str:
    """What the caller reads of an answer of any protocol."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        body = response.json()
        if "choices" in body:
            return str(body["choices"][0]["message"]["content"])
        parts = body["content"] if "content" in body else [p for item in body["output"] for p in item["content"]]
        return "".join(part["text"] for part in parts)
    found = ""
    for event in map(json.loads, (each for each in data_of(response.text) if each != "[DONE]")):
        for choice in event.get("choices", ()):
            found += choice["delta"].get("content") or ""
        if event.get("type") == "content_block_delta":
            found += event["delta"]["text"]
        if event.get("type") == "response.output_text.delta":
            found += event["delta"]
    return found


def data_of(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def cost(num_first: int) -> Decimal:
    """What both parts cost: the first as we estimate it, the second by its server, which reads what was sent too."""
    first = Decimal("0.001") + PROMPT_TOKENS * Decimal("0.00001") + num_first * Decimal("0.0001")
    second = Decimal("0.01") + (PROMPT_TOKENS + num_first) * Decimal("0.0002")
    return first + second + (NUM_TOKENS - num_first) * Decimal("0.003")


async def assert_resumed(gateway: Gateway, response: httpx.Response, num_first: int) -> None:
    """The answer is whole, marked, and paid to both tiers."""
    assert response.status_code == 200, response.text
    assert text_of(response) == TEXT
    row = (await gateway.rows())[0]
    assert tries(row) == [(1, BROKEN), (2, None)]
    assert (row.decided_tier, row.final_tier, row.model_served, row.error_code) == (1, 2, "second", None)
    assert row.finish_reason is FinishReason.STOP
    assert row.cost_usd == cost(num_first)
    assert row.completion_tokens == NUM_TOKENS
    assert row.attempts[0].cost_nano_usd is not None
    assert row.verify_probability == 0.0
    assert row.reason == "sufficient"


def note_of(text: str) -> dict[str, Any]:
    (line,) = [each for each in text.splitlines() if each.startswith(": suffice ")]
    note: dict[str, Any] = json.loads(line.removeprefix(": suffice "))
    return note


# Every place to break


async def break_everywhere(gateway_url: str, directory: Path, server: ProviderServer, places: range) -> None:
    """One gateway, whose first tier breaks off after another number of tokens each time."""
    which = {"place": 0}

    async def dies(call: ProviderCall) -> None:
        await MORE[f"dies_after_{which['place']}"](call)

    server.behaviours["dies_somewhere"] = dies
    async with gateway_of(directory, server, "dies_somewhere", database__url=gateway_url) as gateway:
        header = await limited(gateway, budget_usd_per_day=100000)
        total = Decimal(0)
        for place in places:
            which["place"] = place
            streamed = place % 2 == 0
            response = await gateway.client.post(
                "/v1/chat/completions", json=CHAT | {"stream": streamed}, headers=header
            )
            await assert_resumed(gateway, response, place)
            total += cost(place)
            if streamed:
                assert note_of(response.text)["reason"] == "resumed"
                assert Decimal(note_of(response.text)["cost_usd"]) == cost(place)
            else:
                assert response.headers["x-suffice-reason"] == "resumed"
                assert response.json()["usage"]["completion_tokens"] == NUM_TOKENS
                assert response.json()["usage"]["prompt_tokens"] == PROMPT_TOKENS
        rows = await gateway.rows()
        assert sum(row.cost_usd for row in rows) == total
        books = gateway.parts.rates._local._books
        spent = {account.meter: book.spent for account, book in books.items() if account.owner == rows[0].key_id}
        assert spent[Meter.DAY] == to_nano_usd(total)
        told = (await gateway.client.get("/metrics")).text
        assert f'suffice_resumed_answers_total{{broken_tier="1",tier="2"}} {float(len(places))}' in told
        assert f'suffice_failed_attempts_total{{error="broken",tier="1"}} {float(len(places))}' in told
        await eventually(lambda: gateway.parts.lease.held_nano_usd == 0)
        gateway.assert_idle()


async def test_a_broken_answer_is_whole_marked_and_paid(
    tmp_path: Path, server: ProviderServer, sqlite_url: str
) -> None:
    await break_everywhere(sqlite_url, tmp_path, server, range(1, 9))


@pytest.mark.slow
async def test_an_upstream_killed_after_each_of_the_first_200_tokens(
    tmp_path: Path, server: ProviderServer, database_url: str
) -> None:
    await break_everywhere(database_url, tmp_path, server, range(1, 201))


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_other_protocols(tmp_path: Path, server: ProviderServer, path: str, streamed: bool) -> None:
    asked: dict[str, Any] = {"model": "auto", "stream": streamed}
    if path == "/v1/messages":
        asked |= {"messages": CHAT["messages"], "max_tokens": 4000}
    else:
        asked |= {"input": "say it all"}
    async with gateway_of(tmp_path, server, "dies_after_7") as gateway:
        response = await gateway.client.post(path, json=asked)
        await assert_resumed(gateway, response, 7)
        assert '"reason":"resumed"' in response.text
        assert '"tier":2' in response.text


async def test_a_plain_prompt_goes_on_as_one_text(tmp_path: Path, server: ProviderServer) -> None:
    async with gateway_of(tmp_path, server, "dies_after_7") as gateway:
        asked = {"model": "auto", "prompt": "say it all"}
        response = await gateway.client.post("/v1/completions", json=asked)
        assert response.headers["x-suffice-reason"] == "resumed"
        begun = "".join(split_tokens(TEXT)[:7])
        assert server.requests[-1].body["prompt"] == "say it all" + begun
        assert response.json()["choices"][0]["text"].startswith(begun)


@pytest.mark.slow
@given(first=st.integers(1, 40), second=st.integers(1, 40), streamed=st.booleans())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_what_was_sent_begins_what_is_sent(
    tmp_path: Path, server: ProviderServer, first: int, second: int, streamed: bool
) -> None:
    """Breaks twice, wherever: what the caller has is a beginning of the text, every token of it paid once."""
    database = f"sqlite:///{tmp_path / uuid7()}.db"
    names = (f"dies_after_{first}", f"dies_after_{second}")
    async with gateway_of(tmp_path, server, names[0], second=names[1], database__url=database) as gateway:
        response = await gateway.chat("say it all", stream=streamed)
        row = await gateway.row()
        # The second tier is asked once more, and then it is enough.
        assert tries(row) == [(1, BROKEN), (2, BROKEN), (2, None)]
        assert (row.error_code, row.final_tier) == ("answer_failed", 2)
        assert row.completion_tokens == first + 2 * second
        if streamed:
            sent = text_of(response)
            assert TEXT.startswith(sent)
            assert sent == "".join(split_tokens(TEXT)[: first + 2 * second])
            assert '"code":"answer_failed"' in response.text
        else:
            assert_error(response, 502, "answer_failed")
        assert row.cost_usd > Decimal("0.001") + 2 * Decimal("0.01")
        gateway.assert_idle()


async def test_device_seconds_are_those_of_both(tmp_path: Path, server: ProviderServer) -> None:
    able: Any = frozenset({"generate", "continue", "logprobs"})
    backends: dict[str, Backend] = {
        "first": EchoBackend("first", Script(text=TEXT, fail_after=4, compute_s=1.0), capabilities=able),
        "second": EchoBackend("second", Script(text=TEXT, compute_s=2.0), capabilities=able),
    }
    async with gateway_of(tmp_path, server, "unused", backends=backends) as gateway:
        response = await gateway.chat("say it all")
        await assert_resumed(gateway, response, 4)
        assert (await gateway.row()).compute_s == 3.0


# Who goes on


class Dying:
    """Dies after five tokens for as long as it is told to, and answers then; the test may hold its death back."""

    def __init__(self, num_deaths: int = 1) -> None:
        self.num_deaths = num_deaths
        self.may_die = threading.Event()
        self.may_die.set()

    async def __call__(self, call: ProviderCall) -> None:
        self.num_deaths -= 1
        if self.num_deaths < 0:
            await call.stream()
            await call.done()
            return
        await call.stream(5)
        while not self.may_die.is_set():  # noqa: ASYNC110 - set from the thread of the test
            await asyncio.sleep(0.005)
        await call.end()


@pytest.fixture
def dying(server: ProviderServer) -> Dying:
    behaviour = Dying()
    for name in ("dying", "dying_too"):
        server.behaviours[name] = behaviour
    return behaviour


async def test_a_named_tier_goes_on_itself_or_nobody_does(tmp_path: Path, server: ProviderServer, dying: Dying) -> None:
    async with gateway_of(tmp_path, server, "dying") as gateway:
        num_second = server.count("ok")
        response = await gateway.chat("say it all", model="low")
        assert text_of(response) == TEXT
        assert response.headers["x-suffice-reason"] == "resumed"
        row = await gateway.row()
        assert tries(row) == [(1, BROKEN), (1, None)]
        dying.num_deaths = 2
        assert_error(await gateway.chat("say it all", model="low"), 502, "answer_failed")
        assert tries((await gateway.rows())[0]) == [(1, BROKEN), (1, None)]
        assert server.count("ok") == num_second


async def test_another_server_of_the_same_tier_goes_on_first(
    tmp_path: Path, server: ProviderServer, dying: Dying
) -> None:
    async with gateway_of(tmp_path, server, "dying", "slow") as gateway:
        for _ in range(2):
            assert text_of(await gateway.chat("say it all")) == TEXT
        assert {each.final_tier for each in await gateway.rows()} == {1}
        assert [(1, BROKEN), (1, None)] in [tries(each) for each in await gateway.rows()]


@pytest.mark.parametrize("change", ["kill switch", "outage", "quarantine"])
async def test_what_was_switched_off_meanwhile_does_not_go_on(
    tmp_path: Path, server: ProviderServer, dying: Dying, change: str
) -> None:
    """With two servers it would go on itself."""
    dying.may_die.clear()
    async with gateway_of(tmp_path, server, "dying", "dying_too") as gateway:
        router = gateway.parts.request_router
        dying.num_deaths = 2
        asking = asyncio.create_task(gateway.chat("say it all"))
        await eventually(lambda: server.num_active > 0)
        if change == "kill switch":
            router.kill_switch = True
        elif change == "outage":
            router.unavailable = frozenset({1})
        else:
            router.quarantine = {("default", "fixed-1"): {1: 2.0}}
        dying.may_die.set()
        assert text_of(await asking) == TEXT
        row = await gateway.row()
        assert tries(row) == [(1, BROKEN), (2, None)]
        assert row.reason == "sufficient"


async def test_a_tier_that_may_not_answer_does_not_go_on(tmp_path: Path, server: ProviderServer) -> None:
    """Policy, request and cost bound it as any fallback."""
    async with gateway_of(tmp_path, server, "dies_after_5") as gateway:
        for bound in ({"max_tier": 1}, {"max_cost_usd": 0.5}):
            response = await gateway.chat("say it all", suffice=bound, max_tokens=1000)
            assert_error(response, 502, "answer_failed")
            assert 2 not in [each.tier for each in (await gateway.rows())[0].attempts]
        # There is room for an answer of the second, and none for that beside the first's.
        row = (await gateway.rows())[0]
        assert tries(row)[0] == (1, BROKEN)


@pytest.mark.parametrize(
    ("options", "attempts"),
    [
        ({"policy__on_break": "error"}, [(1, None)]),
        ({"can": "", "can_second": ""}, [(1, None)]),
        ({"policy__fallback": "none", "can": ""}, [(1, None)]),
        ({"second": "503"}, [(1, BROKEN), (2, "model_unavailable"), (1, None)]),
    ],
    ids=["policy", "unable", "no fallback", "down"],
)
@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
async def test_where_nobody_goes_on_the_error_is_told(
    tmp_path: Path, server: ProviderServer, options: dict[str, Any], attempts: list[Any], streamed: bool
) -> None:
    async with gateway_of(tmp_path, server, "dies_after_5", **options) as gateway:
        response = await gateway.chat("say it all", stream=streamed)
        row = await gateway.row()
        assert (row.error_code, row.final_tier) == ("answer_failed", 1)
        assert tries(row) == attempts
        assert row.cost_usd < Decimal("0.01"), "the dear tier was not paid"
        if streamed:
            assert '"code":"answer_failed"' in response.text
            assert TEXT.startswith(text_of(response))
        else:
            assert_error(response, 502, "answer_failed")
        gateway.assert_idle()


@pytest.mark.parametrize(
    "asked",
    [{"n": 2}, {"logprobs": True}, {"response_format": {"type": "json_object"}}],
    ids=["choices", "logprobs", "format"],
)
async def test_what_cannot_be_gone_on_with_ends(tmp_path: Path, server: ProviderServer, asked: dict[str, Any]) -> None:
    async with gateway_of(tmp_path, server, "dies_after_5") as gateway:
        assert_error(await gateway.chat("say it all", **asked), 502, "answer_failed")
        assert (await gateway.row()).final_tier == 1


async def test_reasoning_that_broke_off_is_not_gone_on_with(tmp_path: Path) -> None:
    script = Script(text=TEXT, reasoning="let me think about all of it")
    with ProviderServer(script, more=MORE) as thinking:
        async with gateway_of(tmp_path, thinking, "dies_after_3") as gateway:
            assert_error(await gateway.chat("say it all"), 502, "answer_failed")
    with ProviderServer(script, more=MORE) as thinking:
        async with gateway_of(
            tmp_path, thinking, "dies_after_9", database__url=f"sqlite:///{tmp_path}/b.db"
        ) as gateway:
            response = await gateway.chat("say it all")
            assert text_of(response) == TEXT
            assert response.json()["choices"][0]["message"]["reasoning_content"] == script.reasoning
            last = thinking.requests[-1].body
            assert last["messages"][-1]["reasoning_content"] == script.reasoning
            assert last["chat_template_kwargs"] == {"enable_thinking": False}


async def test_limits_count_what_was_sent(tmp_path: Path, server: ProviderServer) -> None:
    async with gateway_of(tmp_path, server, "dies_after_5") as gateway:
        response = await gateway.chat("say it all", max_tokens=12)
        assert text_of(response) == "".join(split_tokens(TEXT)[:12])
        assert response.json()["choices"][0]["finish_reason"] == "length"
        assert server.requests[-1].body["max_tokens"] == 7
        # What breaks off with its last token is whole, and nobody is asked.
        response = await gateway.chat("say it all", max_tokens=5)
        assert text_of(response) == "".join(split_tokens(TEXT)[:5])
        assert response.json()["choices"][0]["finish_reason"] == "length"
        assert tries((await gateway.rows())[0]) == [(1, None)]
        stop = "".join(split_tokens(TEXT)[4:7])
        response = await gateway.chat("say it all", stop=stop)
        assert text_of(response) == TEXT[: TEXT.index(stop)]


async def test_a_servers_own_counts_are_billed(tmp_path: Path, server: ProviderServer) -> None:
    async with gateway_of(tmp_path, server, "says_usage") as gateway:
        response = await gateway.chat("say it all", max_tokens=500)
        assert text_of(response) == TEXT
        row = await gateway.row()
        # Ten tokens, as it says, for the five that came.
        assert server.requests[-1].body["max_tokens"] == 490
        assert row.completion_tokens == 10 + NUM_TOKENS - 5
        assert response.json()["usage"]["prompt_tokens"] == 1000
        assert row.attempts[0].cost_nano_usd == to_nano_usd(Decimal("0.012"))


# Endings in between


async def test_a_client_that_leaves_the_second_part_pays_for_both(tmp_path: Path, server: ProviderServer) -> None:
    async with gateway_of(tmp_path, server, "dies_after_5", second="slow_tokens") as gateway:
        async with RawClient(gateway.url) as client:
            await client.post("/v1/chat/completions", CHAT | {"stream": True})
            await client.read_until(b'"content":"6"')
            client.reset()
            await eventually(lambda: gateway.parts.admission.num_running == 0)
        row = await gateway.row()
        assert row.finish_reason is FinishReason.CANCELLED
        assert (row.error_code, row.final_tier) == ("client_closed", 2)
        assert tries(row) == [(1, BROKEN), (2, None)]
        assert row.completion_tokens < NUM_TOKENS
        second = row.cost_usd - Decimal("0.001") - 3 * Decimal("0.00001") - 5 * Decimal("0.0001")
        assert second >= Decimal("0.01") + 2 * Decimal("0.003")
        gateway.assert_idle()


@pytest.mark.parametrize("second", ["hang", "stall_after_3_tokens"])
async def test_a_deadline_ends_the_second_part(tmp_path: Path, server: ProviderServer, second: str) -> None:
    async with gateway_of(
        tmp_path, server, "dies_after_5", second=second, can="", server__request_timeout_s=1.5
    ) as gateway:
        response = await gateway.chat("say it all", stream=True)
        assert '"code":"deadline_exceeded"' in response.text
        row = await gateway.row()
        assert row.error_code == "deadline_exceeded"
        assert tries(row)[0] == (1, BROKEN)
        assert row.final_tier == 2
        assert row.cost_usd > Decimal("0.00153") + Decimal("0.01")
        assert TEXT.startswith(text_of(response))
        await eventually(lambda: gateway.parts.admission.num_running == 0)
        gateway.assert_idle()


async def test_an_answer_that_breaks_off_while_it_is_held_goes_on(tmp_path: Path, server: ProviderServer) -> None:
    held: dict[str, Any] = {"policy__escalation__mode": "next", "policy__escalation__hold_back_tokens": 20}
    held["policy__escalation__least_confidence__low"] = 0.0001
    async with gateway_of(tmp_path, server, "dies_after_5", **held) as gateway:
        for streamed in (False, True):
            await assert_resumed(gateway, await gateway.chat("say it all", stream=streamed), 5)


async def test_a_turn_goes_on_with_the_tier_that_finished_its_step(tmp_path: Path, server: ProviderServer) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    script = Script(text="let me look now", tool_calls=(ToolCall("c1", "look", "{}"),))
    with ProviderServer(script, more=MORE) as calling:
        async with gateway_of(tmp_path, calling, "dies_after_2") as gateway:
            first = await gateway.chat("say it all", tools=[tool])
            assert first.headers["x-suffice-reason"] == "resumed"
            message = first.json()["choices"][0]["message"]
            assert (message["content"], message["tool_calls"][0]["function"]["name"]) == ("let me look now", "look")
            messages = [*CHAT["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]
            messages.append({"role": "tool", "tool_call_id": "c1", "content": "nothing"})
            step = await gateway.client.post(
                "/v1/chat/completions", json={"model": "auto", "messages": messages, "tools": [tool]}
            )
            assert (step.headers["x-suffice-reason"], step.headers["x-suffice-tier"]) == ("locked", "2")


# A model in this process goes on


LOCAL = """
[models.second]
kind = "local"
path = "builtin:tier1"
device = "cpu"
"""


@asynccontextmanager
async def before_a_local_tier(directory: Path, server: ProviderServer, name: str) -> AsyncIterator[Gateway]:
    toml = TOML.format(first=json.dumps([server.url(name)]), second="unused", can=CAN, can_second=CAN)
    begin, end = toml.index("[models.second]"), toml.index("[policy]")
    configured = make_settings(directory, toml[:begin] + LOCAL + toml[end:])
    async with running(configured, make_backends(configured), router=LOW) as gateway:
        yield gateway


@pytest.mark.slow
async def test_a_model_in_this_process_goes_on_from_every_place(tmp_path: Path, server: ProviderServer) -> None:
    which = {"place": 1}

    async def dies(call: ProviderCall) -> None:
        await MORE[f"dies_after_{which['place']}"](call)

    server.behaviours["dies_somewhere"] = dies
    async with before_a_local_tier(tmp_path, server, "dies_somewhere") as gateway:
        for place in range(1, 200, 9):
            which["place"] = place
            response = await gateway.chat("say it all", stream=True, temperature=0, max_tokens=place + 12)
            sent, text = "".join(split_tokens(TEXT)[:place]), text_of(response)
            assert text.startswith(sent)
            row = (await gateway.rows())[0]
            assert tries(row) == [(1, BROKEN), (2, None)]
            assert row.error_code is None
            ours = row.completion_tokens - place
            assert 0 < ours <= 12
            prompt = row.prompt_tokens - 3
            assert prompt > place
            second = Decimal("0.01") + prompt * Decimal("0.0002") + ours * Decimal("0.003")
            assert row.cost_usd == Decimal("0.00103") + place * Decimal("0.0001") + second
            assert note_of(response.text)["reason"] == "resumed"
        gateway.assert_idle()


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
async def test_a_call_half_sent_is_finished_by_its_grammar(tmp_path: Path, streamed: bool) -> None:
    function = {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    }
    asked: dict[str, Any] = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    asked["parallel_tool_calls"] = False
    arguments = '{"city": "Oslo", "days": 3}'
    script = Script(text="", tool_calls=(ToolCall("call_1", "get_weather", arguments),))

    async def dies_in_call(call: ProviderCall) -> None:
        await call.start()
        for chunk in call.chunks()[: 2 + 5]:
            await call.event(chunk)
        await call.end()

    with ProviderServer(script, more={"dies_in_call": dies_in_call}) as calling:
        async with before_a_local_tier(tmp_path, calling, "dies_in_call") as gateway:
            response = await gateway.chat("weather?", stream=streamed, temperature=0, max_tokens=200, **asked)
            row = await gateway.row()
            assert tries(row) == [(1, BROKEN), (2, None)]
            assert row.finish_reason is FinishReason.TOOL_CALLS
            if streamed:
                found = [json.loads(each) for each in data_of(response.text) if each != "[DONE]"]
                pieces = [p for c in found for choice in c["choices"] for p in choice["delta"].get("tool_calls", ())]
                assert [piece["id"] for piece in pieces if "id" in piece] == ["call_1"]
                text = "".join(piece["function"]["arguments"] for piece in pieces)
            else:
                (call,) = response.json()["choices"][0]["message"]["tool_calls"]
                text = call["function"]["arguments"]
            assert text.startswith("".join(split_tokens(arguments)[:4]))
            value = json.loads(text)
            assert value["city"] == "Oslo"
            assert value["days"] in (1, 2, 3)
