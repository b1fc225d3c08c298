"""Plain completions and embeddings over real HTTP."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path

import pytest

from backends.protocol import Capability
from backends.testing import EchoBackend, Script
from tests.gateway.harness import Gateway, assert_error, echo_backends, events, make_settings, running

NO_EMBED: frozenset[Capability] = frozenset({"generate"})


async def complete(gateway: Gateway, prompt: object, **body: object) -> dict[str, object]:
    response = await gateway.client.post("/v1/completions", json={"model": "expert", "prompt": prompt} | body)
    assert response.status_code == 200, response.text
    found: dict[str, object] = response.json()
    return found


async def test_prompts_and_n_are_answered_in_openais_order(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        found = await complete(gateway, ["a b", "c"], n=2, seed=5, max_tokens=10)
        assert [(c["index"], c["text"]) for c in found["choices"]] == [(0, "a b"), (1, "a b"), (2, "c"), (3, "c")]  # type: ignore[attr-defined]
        large = gateway.backends["large"]
        assert [each.sampling.seed for each in large.requests] == [5, 6, 5, 6]
        # A prompt counts once for the caller, however many answers it got; the bill counts every generation.
        assert found["usage"]["prompt_tokens"] == 3  # type: ignore[index]
        row = await gateway.row()
        assert (row.prompt_tokens, row.completion_tokens, row.num_choices) == (6, 6, 4)


async def test_a_prompt_may_be_token_ids_where_the_model_takes_them(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        for prompt in ([1, 2, 3], [[1, 2], [3]]):
            await complete(gateway, prompt)
    capabilities: frozenset[Capability] = frozenset({"generate"})
    async with running(make_settings(tmp_path), echo_backends(capabilities=capabilities)) as gateway:
        body = {"model": "expert", "prompt": [1, 2, 3]}
        assert_error(await gateway.client.post("/v1/completions", json=body), 400, "unsupported_parameter", "prompt")
        body = {"model": "auto", "prompt": "x", "logprobs": 1}  # type: ignore[dict-item]
        assert_error(await gateway.client.post("/v1/completions", json=body), 400, "unsupported_parameter", "logprobs")


async def test_the_default_length_is_openais(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path), echo_backends(large=Script(text="w " * 100))) as gateway:
        found = await complete(gateway, "x")
        assert found["usage"]["completion_tokens"] == 16  # type: ignore[index]
        assert found["choices"][0]["finish_reason"] == "length"  # type: ignore[index]


async def test_logprobs_come_in_the_older_form_with_offsets(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        found = await complete(gateway, "one two three", logprobs=2, max_tokens=10)
        logprobs = found["choices"][0]["logprobs"]  # type: ignore[index]
        assert logprobs["tokens"] == ["one", " two", " three"]
        assert logprobs["text_offset"] == [0, 3, 7]
        assert [len(each) for each in logprobs["top_logprobs"]] == [2, 2, 2]
        assert all(value < 0 for value in logprobs["token_logprobs"])
        body = {"model": "expert", "prompt": "one two three", "logprobs": 2, "stream": True}
        response = await gateway.client.post("/v1/completions", json=body)
        chunks = [json.loads(each) for each in events(response.text)[:-1]]
        offsets = [o for c in chunks if c["choices"][0]["logprobs"] for o in c["choices"][0]["logprobs"]["text_offset"]]
        assert offsets == [0, 3, 7]


async def test_echo_with_logprobs_covers_the_prompt(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        found = await complete(gateway, "one two", echo=True, logprobs=0, max_tokens=1)
        choice = found["choices"][0]  # type: ignore[index]
        assert choice["text"] == "one twoone"
        assert len(choice["logprobs"]["tokens"]) == 3
        assert choice["logprobs"]["token_logprobs"][0] is None


async def test_a_prompt_can_be_scored_without_an_answer(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        found = await complete(gateway, "one two", echo=True, logprobs=0, max_tokens=0)
        choice = found["choices"][0]  # type: ignore[index]
        assert (choice["text"], choice["finish_reason"]) == ("one two", "length")
        assert len(choice["logprobs"]["tokens"]) == 2
        assert found["usage"]["completion_tokens"] == 0  # type: ignore[index]
        assert (await complete(gateway, "one two", max_tokens=0))["choices"][0]["text"] == ""  # type: ignore[index]
        assert_error(await gateway.chat("hi", max_tokens=0), 400, "invalid_value", "max_tokens")


async def test_an_echoed_prompt_with_probabilities_comes_in_one_piece_and_in_order(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        asked = {"echo": True, "logprobs": 1, "max_tokens": 1, "n": 2}
        whole = await complete(gateway, "one two", **asked)
        body = {"model": "expert", "prompt": "one two", "stream": True} | asked
        response = await gateway.client.post("/v1/completions", json=body)
        chunks = [json.loads(each) for each in events(response.text) if each != "[DONE]"]
        for choice in whole["choices"]:  # type: ignore[attr-defined]
            own = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == choice["index"]]
            assert "".join(each["text"] for each in own) == choice["text"]
            assert [each["logprobs"] for each in own if each["logprobs"]] == [choice["logprobs"]]
            assert own[-1]["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": ["x"] * 200}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 16}, "n"),
        ({"echo": "yes"}, "echo"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 50}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
    ],
    ids=str,
)
async def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, object], param: str) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        body = {"model": "auto", "prompt": "x"} | change
        response = await gateway.client.post("/v1/completions", json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


async def test_embeddings_come_as_floats_or_base64(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        body = {"model": "small", "input": ["x y", "z"]}
        plain = (await gateway.client.post("/v1/embeddings", json=body)).json()
        packed = (await gateway.client.post("/v1/embeddings", json=body | {"encoding_format": "base64"})).json()
        assert plain["usage"]["prompt_tokens"] == 3
        for one, other in zip(plain["data"], packed["data"], strict=True):
            numbers = struct.unpack(f"<{len(one['embedding'])}f", base64.b64decode(other["embedding"]))
            assert numbers == pytest.approx(one["embedding"], rel=1e-6)
        row = (await gateway.rows())[0]
        assert (row.endpoint, row.model_served, row.decided_tier, row.final_tier) == (
            "/v1/embeddings",
            "small",
            None,
            None,
        )
        assert (row.prompt_tokens, row.completion_tokens, row.status_code) == (plain["usage"]["prompt_tokens"], 0, 200)
        same = await gateway.client.post("/v1/embeddings", json=body | {"dimensions": 16})
        assert same.status_code == 200
        cut = await gateway.client.post("/v1/embeddings", json=body | {"dimensions": 8})
        assert_error(cut, 400, "unsupported_parameter", "dimensions")
        gateway.assert_idle()


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"input": []}, "invalid_value", "input"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": ["x", ""]}, "invalid_value", "input[1]"),
        ({"input": 5}, "invalid_type", "input"),
        ({"input": [1, 2]}, "unsupported_parameter", "input"),
        ({"input": ["x", 1]}, "invalid_type", "input[1]"),
        ({"input": ["x"] * 3000}, "invalid_value", "input"),
        ({"encoding_format": "hex"}, "invalid_value", "encoding_format"),
        ({"dimensions": 0}, "invalid_value", "dimensions"),
        ({"model": None}, "invalid_value", "model"),
    ],
    ids=str,
)
async def test_a_wrong_embedding_request_is_named(
    tmp_path: Path, change: dict[str, object], code: str, param: str
) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        response = await gateway.client.post("/v1/embeddings", json={"model": "auto", "input": "x"} | change)
        assert_error(response, 400, code, param)


async def test_a_model_without_embeddings_is_not_found(tmp_path: Path) -> None:
    backends = {"small": EchoBackend("small", capabilities=NO_EMBED), "large": EchoBackend("large")}
    async with running(make_settings(tmp_path), backends) as gateway:
        body = {"model": "small", "input": "x"}
        assert_error(await gateway.client.post("/v1/embeddings", json=body), 404, "model_not_found", "model")
        found = (await gateway.client.post("/v1/embeddings", json=body | {"model": "auto"})).json()
        assert found["model"] == "large"
