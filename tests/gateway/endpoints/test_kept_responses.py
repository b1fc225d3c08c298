"""Responses that are kept: read back, gone on from, deleted and erased, as the official Python package asks for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from openai.types.responses import Response
from sqlalchemy import func, select, update

from backends.protocol import ToolCall
from backends.testing import Script
from gateway.control.retention_keeper import RetentionKeeper
from gateway.store.erasure import Eraser, ErasureTarget
from gateway.store.pruning import LogPruner
from gateway.store.responses import MAX_CHAINED
from gateway.store.tables import api_keys, responses
from tests.gateway.access.test_authenticator import add_key, bearer
from tests.gateway.harness import Gateway, assert_error, echo_backends, make_settings, running
from tests.gateway.store.test_erasure import CANARY, LEASE, dump, read_files

EXPERT: dict[str, Any] = {"model": "expert", "store": True}
TOOLS: list[Any] = [
    {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}},
    {"type": "custom", "name": "patch"},
]
SEALED: dict[str, Any] = {"model": "expert", "store": False, "include": ["reasoning.encrypted_content"]}


def client_of(gateway: Gateway, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


@asynccontextmanager
async def opened(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[Gateway, openai.AsyncOpenAI]]:
    """A gateway and the package's client; ``large`` is the script of the model that answers."""
    backends = echo_backends(large=options.pop("large", Script()))
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running(make_settings(tmp_path, **options), backends))
        yield gateway, await stack.enter_async_context(client_of(gateway))


async def num_kept(gateway: Gateway) -> int:
    async with gateway.parts.store.transaction() as connection:
        return int((await connection.execute(select(func.count()).select_from(responses))).scalar())


async def change_rows(gateway: Gateway, **values: Any) -> None:
    async with gateway.parts.store.transaction() as connection:
        await connection.execute(update(responses).values(**values))


def said(gateway: Gateway) -> list[tuple[str, str]]:
    """What the model was told last."""
    return [(each.role, each.content) for each in gateway.backends["large"].requests[-1].messages]


async def test_a_response_lives_and_ends(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database__url=database_url) as (gateway, client):
        answer = await client.responses.create(**EXPERT, input="one two", metadata={"page": "search"})
        assert answer.store
        again = await client.responses.retrieve(answer.id)
        assert again.model_dump() == answer.model_dump()
        assert again.metadata == {"page": "search"}
        listed = await client.responses.input_items.list(answer.id)
        (item,) = listed.data
        assert (item.type, item.content[0].text) == ("message", "one two")
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            await client.responses.cancel(answer.id)
        shown = await gateway.client.delete(f"/v1/responses/{answer.id}")
        assert shown.json() == {"id": answer.id, "object": "response", "deleted": True}
        for gone in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError) as error:
                await gone(answer.id)
            assert error.value.code == "response_not_found"
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_items.list(answer.id)
        # What was done remains: the row says nothing of the text.
        assert f"resp_{(await gateway.row()).request_id}" == answer.id
        gateway.assert_idle()


async def test_a_stream_is_kept_as_it_ended(tmp_path: Path, database_url: str) -> None:
    script = Script(text="a b", reasoning="hm", tool_calls=(ToolCall("call_1", "now", "{}"),))
    async with opened(tmp_path, database__url=database_url, large=script) as (_, client):
        stream = await client.responses.create(**EXPERT, input="hi", tools=TOOLS, stream=True)
        events = [event async for event in stream]
        (completed,) = [event.response for event in events if event.type == "response.completed"]
        kept = await client.responses.retrieve(completed.id)
        assert kept.model_dump() == completed.model_dump()
        assert [item.type for item in kept.output] == ["reasoning", "message", "function_call"]
        named = {event.item_id for event in events if hasattr(event, "item_id")}
        assert named == {item.id for item in kept.output}
        assert {event.response.id for event in events if hasattr(event, "response")} == {kept.id}


async def test_a_chain_goes_on(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database__url=database_url) as (gateway, client):
        first = await client.responses.create(**EXPERT, input="one", instructions="Be brief.")
        assert said(gateway) == [("system", "Be brief."), ("user", "one")]
        second = await client.responses.create(**EXPERT, input="two", previous_response_id=first.id)
        third = await client.responses.create(
            model="expert", store=False, input="three", instructions="Sing.", previous_response_id=second.id
        )
        turns = [("user", "one"), ("assistant", "one"), ("user", "two"), ("assistant", "two"), ("user", "three")]
        assert said(gateway) == [("system", "Sing."), *turns]
        assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
        # The answer that was not to be kept is not there, and nobody goes on from it.
        with pytest.raises(openai.BadRequestError) as error:
            await client.responses.create(**EXPERT, input="four", previous_response_id=third.id)
        assert (error.value.code, error.value.param) == ("previous_response_not_found", "previous_response_id")
        rows = await gateway.rows()
        assert len({row.conversation for row in rows}) == 1
        assert [(row.turn, row.step) for row in rows] == [(3, 0), (2, 0), (1, 0)]
        # One that ends elsewhere is another branch of the same conversation.
        branch = await client.responses.create(**EXPERT, input="other", previous_response_id=first.id)
        assert said(gateway) == [*turns[:2], ("user", "other")]
        assert branch.previous_response_id == first.id


async def test_items_are_listed_by_pages(tmp_path: Path) -> None:
    async with opened(tmp_path) as (gateway, client):
        first = await client.responses.create(**EXPERT, input="one")
        items: list[Any] = [
            {"role": "user", "content": "two"},
            {"id": "mine", "role": "assistant", "content": "three"},
            {"id": "mine", "role": "user", "content": [{"type": "input_text", "text": "four"}]},
            {"id": first.output[0].id, "role": "user", "content": "five"},
        ]
        second = await client.responses.create(**EXPERT, input=items, previous_response_id=first.id)
        found = [each async for each in client.responses.input_items.list(second.id, order="asc", limit=2)]
        assert [each.content[0].text for each in found] == ["one", "one", "two", "three", "four", "five"]
        ids = [each.id for each in found]
        assert len(set(ids)) == 6, "no page ends with an id that stands before it"
        assert ids[1] == first.output[0].id
        newest = await client.responses.input_items.list(second.id, limit=1)
        assert (newest.first_id, newest.has_more) == (ids[-1], True)
        path = f"/v1/responses/{second.id}/input_items"
        for query, param in (
            ("limit=0", "limit"),
            ("limit=many", "limit"),
            ("order=up", "order"),
            ("after=x", "after"),
        ):
            answer = await gateway.client.get(f"{path}?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_tool_loop_runs_on_a_chain(tmp_path: Path) -> None:
    calls = (ToolCall("call_1", "now", "{}"), ToolCall("call_2", "patch", '{"input":"+a"}'))
    scripts = [Script(text="I look.", reasoning="hm", tool_calls=calls), Script(text="noon")]
    async with opened(tmp_path, large=scripts) as (gateway, client):
        first = await client.responses.create(**EXPERT, input="time?", tools=TOOLS)
        results: list[Any] = [
            {"type": "function_call_output", "call_id": "call_1", "output": "12:00"},
            {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"},
        ]
        with pytest.raises(openai.BadRequestError, match="call_2"):
            await client.responses.create(**EXPERT, input=results[:1], tools=TOOLS, previous_response_id=first.id)
        second = await client.responses.create(**EXPERT, input=results, tools=TOOLS, previous_response_id=first.id)
        assert second.output_text == "noon"
        messages = gateway.backends["large"].requests[-1].messages
        assert [message.role for message in messages] == ["user", "assistant", "tool", "tool"]
        assert (messages[1].tool_calls, messages[1].reasoning) == (calls, "hm")


async def test_items_are_named_by_their_ids(tmp_path: Path, database_url: str) -> None:
    """As clients do that take it for granted that answers are kept."""
    calls = (ToolCall("call_1", "now", "{}"),)
    scripts = [Script(reasoning="hm", tool_calls=calls), Script(text="noon"), Script(text="yes")]
    async with opened(tmp_path, database__url=database_url, large=scripts) as (gateway, client):
        first = await client.responses.create(**EXPERT, input="time?", tools=TOOLS)
        named: list[Any] = [{"type": "item_reference", "id": item.id} for item in first.output]
        result = {"type": "function_call_output", "call_id": "call_1", "output": "12:00"}
        whole: list[Any] = [{"role": "user", "content": "time?"}, *named, result]
        second = await client.responses.create(**EXPERT, input=whole, tools=TOOLS)
        messages = gateway.backends["large"].requests[-1].messages
        assert [message.role for message in messages] == ["user", "assistant", "tool"]
        assert (messages[1].tool_calls, messages[1].reasoning) == (calls, "hm")
        # The reference is kept, not what it refers to: a chain reads it anew, and finds nothing once that is deleted.
        on: dict[str, Any] = {"input": "sure?", "previous_response_id": second.id}
        await client.responses.create(**EXPERT, **on)
        assert gateway.backends["large"].requests[-1].messages[1].tool_calls == calls
        await client.responses.delete(first.id)
        for body, param in ((on, "previous_response_id"), ({"input": whole}, "input[1]")):
            with pytest.raises(openai.BadRequestError, match="not found") as error:
                await client.responses.create(**EXPERT, **body)
            assert error.value.param == param


async def test_references_stand_for_no_more_than_a_body(tmp_path: Path) -> None:
    async with opened(tmp_path, server__max_body_bytes=8192) as (gateway, client):
        first = await client.responses.create(**EXPERT, input="x" * 2000)
        item: Any = {"type": "item_reference", "id": first.output[0].id}
        await client.responses.create(**EXPERT, input=[item] * 3)
        with pytest.raises(openai.BadRequestError, match="at most 8192"):
            await client.responses.create(**EXPERT, input=[item] * 4)
        many: Any = [{"type": "item_reference", "id": f"msg_01900000-0000-7000-8000-{n:012}_0"} for n in range(65)]
        with pytest.raises(openai.BadRequestError, match="65 responses"):
            await client.responses.create(**EXPERT, input=many)
        assert gateway.parts.gate.bodies.num_bytes == 0


async def test_a_tool_loop_stays_with_its_tier_on_a_chain(tmp_path: Path, database_url: str) -> None:
    """Also where the instructions, with which a conversation without a name begins, are not said again."""
    calls = (ToolCall("call_1", "now", "{}"),)
    scripts = [Script(tool_calls=calls), Script(text="noon")]
    async with opened(tmp_path, database__url=database_url, large=scripts) as (gateway, client):
        auto: dict[str, Any] = {"model": "auto", "store": True, "tools": TOOLS}
        first = await client.responses.create(**auto, input="time?", instructions="Be brief.")
        result: list[Any] = [{"type": "function_call_output", "call_id": "call_1", "output": "12:00"}]
        await client.responses.create(**auto, input=result, previous_response_id=first.id)
        step, begun = await gateway.rows()
        assert (step.turn_id, step.reason) == (begun.request_id, "locked")
        assert (step.turn, step.step) == (1, 1)


async def test_another_tenants_response_is_not_there(tmp_path: Path, database_url: str) -> None:
    options = {"database__url": database_url, "auth__required": "always"}
    async with opened(tmp_path, **options) as (gateway, _):
        own, _ = await add_key(gateway, "theirs")
        beside, _ = await add_key(gateway, "theirs")
        foreign, _ = await add_key(gateway, "ours")
        async with client_of(gateway, own) as client:
            answer = await client.responses.create(**EXPERT, input=CANARY)
        unknown = "resp_01900000-0000-7000-8000-000000000000"
        body = EXPERT | {"input": "go on"}
        for method, suffix in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            told = []
            for shown in (answer.id, unknown, "resp_x"):
                path = f"/v1/responses/{shown}{suffix}"
                refused = await gateway.client.request(method, path, headers=bearer(foreign))
                assert_error(refused, 404, "response_not_found")
                told.append(refused.text.replace(shown, "ID"))
                assert (await gateway.client.request(method, path)).status_code == 401
            assert told[0] == told[1] == told[2]
        told = []
        for shown in (answer.id, unknown):
            refused = await gateway.client.post(
                "/v1/responses", json=body | {"previous_response_id": shown}, headers=bearer(foreign)
            )
            assert_error(refused, 400, "previous_response_not_found", "previous_response_id")
            told.append(refused.text.replace(shown, "ID"))
        assert told[0] == told[1]
        item = {"type": "item_reference", "id": answer.output[0].id}
        refused = await gateway.client.post("/v1/responses", json=body | {"input": [item]}, headers=bearer(foreign))
        assert_error(refused, 400, "invalid_value", "input[0]")
        async with client_of(gateway, beside) as client:
            assert (await client.responses.retrieve(answer.id)).id == answer.id


@pytest.mark.parametrize(
    ("options", "store", "is_kept"),
    [
        ({}, None, False),
        ({}, True, True),
        ({}, False, False),
        ({"log__responses": "all"}, None, True),
        ({"log__responses": "all"}, False, False),
        ({"log__responses": "off"}, True, False),
        ({"log__prompts": "none"}, True, False),
        ({"log__prompts": "none", "log__responses": "all"}, None, False),
    ],
)
async def test_what_is_kept_is_what_is_permitted_and_wanted(
    tmp_path: Path, options: dict[str, Any], store: bool | None, is_kept: bool
) -> None:
    async with opened(tmp_path, **options) as (gateway, client):
        body = {"model": "expert", "input": CANARY} | ({} if store is None else {"store": store})
        answer = await client.responses.create(**body)
        assert (answer.store, await num_kept(gateway)) == (is_kept, int(is_kept))
        files = "\n".join(read_files(gateway.parts.store._url.path.parent))
        assert (CANARY in files) == is_kept
        if options.get("log__prompts") == "none" or options.get("log__responses") == "off":
            refused = await gateway.client.post("/v1/responses", json=body | {"previous_response_id": answer.id})
            assert_error(refused, 400, "unsupported_parameter", "previous_response_id")


async def test_what_is_old_is_not_read_and_then_not_there(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database__url=database_url, log__texts_days=7) as (gateway, client):
        answer = await client.responses.create(**EXPERT, input="one")
        second = await client.responses.create(**EXPERT, input="two", previous_response_id=answer.id)
        async with gateway.parts.store.transaction() as connection:
            moved = update(responses).where(responses.c.previous_id.is_(None))
            await connection.execute(moved.values(created_at=datetime.now(UTC) - timedelta(days=8)))
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)
        # What rests on it cannot be gone on from, but says what it said.
        with pytest.raises(openai.BadRequestError, match="is gone") as error:
            await client.responses.create(**EXPERT, input="three", previous_response_id=second.id)
        assert error.value.code == "previous_response_not_found"
        assert (await client.responses.retrieve(second.id)).output_text == "two"
        assert await num_kept(gateway) == 2
        await RetentionKeeper(gateway.parts.store, gateway.settings.log, 28).prune(LEASE)
        assert await num_kept(gateway) == 1
        assert await LogPruner(gateway.parts.store).responses(datetime.now(UTC) + timedelta(seconds=5)) == 1
        assert len(await gateway.rows()) == 2


@pytest.mark.parametrize("by", ["request_id", "session_id"])
async def test_an_erased_part_of_a_chain_is_nowhere(tmp_path: Path, database_url: str, by: str) -> None:
    async with opened(tmp_path, database__url=database_url) as (gateway, client):
        store = gateway.parts.store
        first = await client.responses.create(**EXPERT, input=CANARY, prompt_cache_key="talk")
        ids = {"request_id": first.id.removeprefix("resp_"), "session_id": "talk"}
        second = await client.responses.create(**EXPERT, input="on", previous_response_id=first.id)
        async with store.transaction() as connection:
            (row,) = await connection.execute(select(responses).where(responses.c.previous_id.is_not(None)))
        assert CANARY not in repr(row)
        assert (await gateway.rows())[0].session_id == "talk", "the conversation goes on under its name"
        counts = await Eraser(store).erase(ErasureTarget(**{by: ids[by]}))
        assert counts["responses"] == (1 if by == "request_id" else 2)
        assert await store.scrub()
        assert CANARY not in await dump(store, tmp_path)
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(**EXPERT, input="more", previous_response_id=second.id)


async def test_a_deleted_response_leaves_the_files(tmp_path: Path, sqlite_url: str) -> None:
    async with opened(tmp_path, database__url=sqlite_url) as (gateway, client):
        keeper = RetentionKeeper(gateway.parts.store, gateway.settings.log, 28)
        await keeper.scrub(LEASE)
        answer = await client.responses.create(**EXPERT, input=CANARY * 500)
        await client.responses.delete(answer.id)
        assert any(CANARY in each for each in read_files(tmp_path))
        await keeper.scrub(LEASE)
        assert not any(CANARY in each for each in read_files(tmp_path))


async def test_a_chain_is_bounded(tmp_path: Path) -> None:
    async with opened(tmp_path, server__max_body_bytes=4096, server__max_messages=4) as (gateway, client):

        async def refusal(previous_id: str) -> str:
            with pytest.raises(openai.BadRequestError) as error:
                await client.responses.create(**EXPERT, input="on", previous_response_id=previous_id)
            assert error.value.param == "previous_response_id"
            return str(error.value)

        first = await client.responses.create(**EXPERT, input="one")
        second = await client.responses.create(**EXPERT, input="two", previous_response_id=first.id)
        await change_rows(gateway, chained_bytes=100)
        assert "5 messages" in await refusal(second.id)
        await change_rows(gateway, chained_bytes=4096)
        assert "at most 4096" in await refusal(first.id)
        await change_rows(gateway, chained_bytes=100, num_chained=MAX_CHAINED)
        assert f"{MAX_CHAINED + 1} responses" in await refusal(first.id)
        assert gateway.parts.gate.bodies.num_bytes == 0


async def test_what_is_gone_on_from_counts_as_a_body(tmp_path: Path) -> None:
    options = {"server__max_body_bytes": 4096, "server__max_body_bytes_in_flight": 4096}
    async with opened(tmp_path, **options) as (gateway, client):
        bodies = gateway.parts.gate.bodies
        first = await client.responses.create(**EXPERT, input="one")
        await change_rows(gateway, chained_bytes=3000)
        body, items = (
            EXPERT | {"input": "two", "previous_response_id": first.id},
            f"/v1/responses/{first.id}/input_items",
        )
        for num_bytes, status in ((1500, 429), (500, 200)):
            bodies.take("another", num_bytes)
            assert (await gateway.client.post("/v1/responses", json=body)).status_code == status
            assert (await gateway.client.get(items)).status_code == status
            bodies.give_back("another", num_bytes)
        assert bodies.num_bytes == 0


async def test_text_stays_in_its_regions(tmp_path: Path) -> None:
    placed = {"tiers__simple__region": "eu", "tiers__expert__region": "us", "log__responses": "all"}
    async with opened(tmp_path, **placed) as (gateway, client):
        kept = await client.responses.create(model="auto", input="one", extra_body={"suffice": {"regions": ["eu"]}})
        on: dict[str, Any] = {"input": "two", "previous_response_id": kept.id}
        answer = await client.responses.create(model="auto", **on)
        assert answer.model == "small"
        assert (await gateway.rows())[0].overrides["regions"] == ["eu"]
        third = await client.responses.create(model="auto", input="three", previous_response_id=answer.id)
        assert third.model == "small"
        refused = await gateway.client.post("/v1/responses", json={"model": "expert", **on})
        assert_error(refused, 400, "region_not_permitted", "suffice.regions")
        item: Any = {"type": "item_reference", "id": answer.output[0].id}
        named = await client.responses.create(model="auto", input=[item, {"role": "user", "content": "four"}])
        assert named.model == "small"
        elsewhere = {"model": "auto", "suffice": {"regions": ["us"]}, **on}
        refused = await gateway.client.post("/v1/responses", json=elsewhere)
        assert_error(refused, 400, "region_not_permitted", "suffice.regions")


async def test_reading_counts_against_its_key(tmp_path: Path) -> None:
    async with opened(tmp_path, auth__required="always") as (gateway, _):
        secret, key = await add_key(gateway)
        async with gateway.parts.store.transaction() as connection:
            which = update(api_keys).where(api_keys.c.key_id == key.key_id)
            await connection.execute(which.values(limits={"requests_per_minute": 2}))
        path = "/v1/responses/resp_01900000-0000-7000-8000-000000000000"
        for status in (404, 404, 429):
            assert (await gateway.client.get(path, headers=bearer(secret))).status_code == status


async def test_a_kept_response_is_read_whole(tmp_path: Path) -> None:
    async with opened(tmp_path) as (gateway, client):
        answer = await client.responses.create(**EXPERT, input="one")
        refused = await gateway.client.get(f"/v1/responses/{answer.id}?stream=true")
        assert_error(refused, 400, "unsupported_parameter", "stream")
        assert (await gateway.client.get(f"/v1/responses/{answer.id}?stream=false")).status_code == 200
        for method, path in (("PUT", f"/{answer.id}"), ("GET", f"/{answer.id}/cancel")):
            refused = await gateway.client.request(method, f"/v1/responses{path}")
            assert_error(refused, 405, "method_not_allowed")


async def test_sealed_reasoning_comes_back_to_the_model(tmp_path: Path) -> None:
    script = Script(text="noon", reasoning=f"{CANARY} thinks")
    async with opened(tmp_path, large=script) as (gateway, client):
        async with client.responses.stream(**SEALED, input="time?") as stream:
            done = [event.item async for event in stream if event.type == "response.output_item.done"]
            final = await stream.get_final_response()
        item = final.output[0]
        assert item.type == "reasoning"
        assert item.encrypted_content == done[0].encrypted_content
        assert CANARY not in item.encrypted_content
        # What else the item says does not count beside it.
        back = {"type": "reasoning", "id": item.id, "summary": [], "encrypted_content": item.encrypted_content}
        history: list[Any] = [{"role": "user", "content": "time?"}, back, {"role": "assistant", "content": "noon"}]
        await client.responses.create(**SEALED, input=[*history, {"role": "user", "content": "and now?"}])
        assert gateway.backends["large"].requests[-1].messages[1].reasoning == f"{CANARY} thinks"
        assert await num_kept(gateway) == 0
        # Who does not ask for it gets none.
        plain = await client.responses.create(model="expert", input="time?")
        assert plain.output[0].encrypted_content is None


async def test_only_a_whole_seal_of_ones_own_is_opened(tmp_path: Path) -> None:
    async with opened(tmp_path, large=Script(text="a", reasoning="hm"), auth__required="always") as (gateway, _):
        own, _ = await add_key(gateway, "theirs")
        foreign, _ = await add_key(gateway, "ours")
        async with client_of(gateway, own) as client:
            answer = await client.responses.create(**SEALED, input="time?")
        token = answer.output[0].encrypted_content

        async def send(key: str, content: Any) -> Any:
            item = {"type": "reasoning", "summary": [], "encrypted_content": content}
            body = SEALED | {"input": [{"role": "user", "content": "time?"}, item, {"role": "user", "content": "on"}]}
            return await gateway.client.post("/v1/responses", json=body, headers=bearer(key))

        assert (await send(own, token)).status_code == 200
        assert gateway.backends["large"].requests[-1].messages[1].reasoning == "hm"
        altered = token[:-8] + ("A" if token[-8] != "A" else "B") + token[-7:]
        for key, content in ((foreign, token), (own, altered), (own, token[:-4])):
            refused = await send(key, content)
            error = assert_error(refused, 400, "invalid_value", "input[1].encrypted_content")
            assert "hm" not in error["message"]
        # Clients change servers: what others sealed, and what is nothing, is passed over.
        for content in ("gAAAAABo-foreign", "", None, 7):
            assert (await send(own, content)).status_code == 200
            assert [each.reasoning for each in gateway.backends["large"].requests[-1].messages] == ["", ""]


async def test_the_kept_object_is_one_of_openais(tmp_path: Path) -> None:
    async with opened(tmp_path) as (gateway, client):
        answer = await client.responses.create(**EXPERT, input="one")
        raw = (await gateway.client.get(f"/v1/responses/{answer.id}")).content
        Response.model_validate(orjson.loads(raw))
