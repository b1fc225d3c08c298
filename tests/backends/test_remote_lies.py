"""Servers that send more than was asked for, packed or plain, and count it wrongly (fault review S5, S6)."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.errors import BackendFailure
from backends.protocol import FinishReason, GenerateRequest, SamplingParams, Usage
from backends.remote.answer_accumulator import AnswerAccumulator
from backends.remote.answer_limit import AnswerLimit
from backends.remote.body_decoder import MAX_PIECE_BYTES, BodyDecoder, BodyUndecodable
from backends.remote.chunk_decoder import read_chunk
from backends.testing import Script
from tests.backends.provider.behaviours import BEHAVIOURS
from tests.backends.provider.call import ProviderCall
from tests.backends.provider.server import ProviderServer
from tests.backends.remote_kit import ANSWER, ONCE, chat, collect, make, text_of, until
from tests.gateway.harness import assert_error, echo_backends, make_settings, running

BOMB_BYTES = 64 * 1024 * 1024

# --- packed ----------------------------------------------------------------------------------------------------------


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


PACKERS = {"gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress, "raw": raw_deflate}


def decode(encoding: str, pieces: list[bytes]) -> bytes:
    decoder = BodyDecoder(encoding)
    return b"".join(part for piece in pieces for part in decoder.feed(piece))


@given(st.binary(max_size=4000), st.sampled_from(sorted(PACKERS)), st.integers(1, 100))
def test_what_was_packed_comes_out_however_it_is_torn(data: bytes, packer: str, size: int) -> None:
    packed = PACKERS[packer](data)
    pieces = [packed[at : at + size] for at in range(0, len(packed), size)]
    assert decode("deflate" if packer == "raw" else packer, pieces) == data


@pytest.mark.parametrize("size", [1000, 10**9], ids=["in pieces", "at once"])
@pytest.mark.parametrize("packer", sorted(PACKERS))
def test_a_bomb_is_unpacked_only_up_to_its_bound(packer: str, size: int) -> None:
    packed = PACKERS[packer](b" " * BOMB_BYTES)
    assert len(packed) < 100_000
    decoder = BodyDecoder("deflate" if packer == "raw" else packer)

    def unpack() -> None:
        for at in range(0, len(packed), size):
            for piece in decoder.feed(packed[at : at + size]):
                assert len(piece) <= MAX_PIECE_BYTES

    with pytest.raises(BodyUndecodable, match="unpack to more than"):
        unpack()
    assert decoder.num_out <= 8 * 1024 * 1024


@pytest.mark.parametrize(
    "encoding", ["br", "zstd", "compress", "gzip, gzip", "gzip, deflate", "identity, gzip", "x" * 999]
)
def test_an_encoding_nobody_asked_for_is_refused_by_name(encoding: str) -> None:
    with pytest.raises(BodyUndecodable, match="not asked for") as caught:
        BodyDecoder(encoding)
    assert len(str(caught.value)) < 200


@given(st.binary(min_size=1, max_size=200), st.sampled_from(["gzip", "deflate"]))
def test_damaged_bytes_are_refused_or_nothing(data: bytes, encoding: str) -> None:
    with suppress(BodyUndecodable):
        decode(encoding, [data])


def packed_answer(encoding: str, pack: Any) -> Any:
    """Return a behaviour that answers well, packed."""

    async def behave(call: ProviderCall) -> None:
        body = pack(call.stream_bytes())
        await call.start(headers={"content-type": "text/event-stream", "content-encoding": encoding})
        for at in range(0, len(body), 10):
            await call.write(body[at : at + 10])
        await call.end()

    return behave


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the provider a behaviour of the test's own, named ``own``."""
    return lambda behaviour: monkeypatch.setitem(BEHAVIOURS, "own", behaviour)


@pytest.fixture(scope="module")
def server() -> Iterator[ProviderServer]:
    with ProviderServer(Script(text=ANSWER)) as started:
        yield started


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_a_packed_answer_is_served(
    server: ProviderServer, transport: str, behave: Any, encoding: str, pack: Any
) -> None:
    behave(packed_answer(encoding, pack))
    backend = make(server, "own", transport=transport)
    deltas, ending = await collect(backend, chat())
    assert text_of(deltas) == ANSWER
    assert ending.reason is FinishReason.STOP
    await backend.close()


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
@pytest.mark.parametrize(
    ("encoding", "pack", "times"),
    [("gzip", gzip.compress, 1), ("deflate", zlib.compress, 1), ("gzip, gzip", gzip.compress, 2), ("br", bytes, 1)],
)
async def test_a_bomb_is_a_failure_of_its_server_and_memory_stays_flat(
    server: ProviderServer, transport: str, behave: Any, kind: str, encoding: str, pack: Any, times: int
) -> None:
    num_blanks = BOMB_BYTES if encoding != "br" else 100
    packed = pack(b" " * num_blanks)
    packed = pack(packed) if times == 2 else packed

    async def bomb(call: ProviderCall) -> None:
        await call.start(headers={"content-type": kind, "content-encoding": encoding})
        for at in range(0, len(packed), 4096):
            await call.write(packed[at : at + 4096])
        await call.end()

    behave(bomb)
    backend = make(server, "own", transport=transport, retry=ONCE)
    tracemalloc.start()
    try:
        with pytest.raises(BackendFailure, match=r"unpack to more than|not asked for"):
            await collect(backend, chat())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < BOMB_BYTES / 2
    await backend.close()


async def test_a_packed_refusal_is_read_within_the_same_bound(server: ProviderServer, behave: Any) -> None:
    packed = gzip.compress(b" " * BOMB_BYTES)

    async def refuse(call: ProviderCall) -> None:
        await call.whole(500, packed, {"content-type": "application/json", "content-encoding": "gzip"})

    behave(refuse)
    backend = make(server, "own", retry=ONCE)
    with pytest.raises(BackendFailure, match=r"answered 500$"):
        await collect(backend, chat())
    await backend.close()


# --- too long --------------------------------------------------------------------------------------------------------


def endless(text: str = "word ", delay_s: float = 0.0, **fields: Any) -> Any:
    """Return a behaviour that never ends."""

    async def behave(call: ProviderCall) -> None:
        await call.start()
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": None} | fields.pop("choice", {})
        body = {"object": "chat.completion.chunk", "choices": [choice]} | fields
        await call.repeat(b"data: " + orjson.dumps(body) + b"\n\n", delay_s=delay_s)

    return behave


ENDLESS: dict[str, dict[str, Any]] = {
    "chunks": {},
    "large chunks": {"text": "word " * 100},
    "thought": {"choice": {"delta": {"reasoning_content": "hm "}}},
    "log-probabilities": {"choice": {"logprobs": {"content": [{"token": "word ", "logprob": -0.1}]}}},
    "running counts": {"usage": {"prompt_tokens": 3, "completion_tokens": 9}},
    "counts that deny it": {"usage": {"prompt_tokens": 3, "completion_tokens": 1}},
}


@pytest.mark.parametrize("how", sorted(ENDLESS))
async def test_an_answer_that_never_ends_is_cut_and_its_server_told(
    server: ProviderServer, transport: str, behave: Any, how: str
) -> None:
    behave(endless(**ENDLESS[how]))
    backend = make(server, "own", transport=transport)
    deltas, ending = await collect(backend, chat(max_tokens=8))
    limit = AnswerLimit(chat(max_tokens=8))
    assert ending.reason is FinishReason.LENGTH
    assert limit.max_chars is not None
    assert limit.max_chunks is not None
    # A count that is beyond the limit with the first chunk leaves nothing to show.
    assert bool(deltas) == (how != "running counts")
    assert sum(len(each.text + each.reasoning) for each in deltas) <= limit.max_chars
    assert 0 < ending.usage.completion_tokens <= limit.max_chunks
    if how == "log-probabilities":
        assert ending.usage.completion_tokens == 8
    assert backend.load().num_cut == 1
    # The server learns that nobody listens.
    await until(lambda: server.num_active == 0)
    await backend.close()


async def test_a_whole_answer_that_is_too_long_is_cut(server: ProviderServer, behave: Any) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "x" * 100_000}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 8}
    body = {"object": "chat.completion", "choices": [choice], "usage": usage}
    behave(lambda call: call.json(200, body))
    backend = make(server, "own")
    deltas, ending = await collect(backend, chat(max_tokens=8))
    assert (len(text_of(deltas)), ending.reason) == (AnswerLimit(chat(max_tokens=8)).max_chars, FinishReason.LENGTH)
    await backend.close()


async def test_without_max_tokens_the_models_context_is_the_limit(server: ProviderServer, behave: Any) -> None:
    behave(endless("word " * 50))
    backend = make(server, "own", context_length=64)
    _, ending = await collect(backend, chat())
    assert ending.reason is FinishReason.LENGTH
    await backend.close()


@given(st.integers(1, 50), st.lists(st.integers(1, 20), min_size=1, max_size=60), st.booleans())
def test_an_honest_answer_is_never_cut(max_tokens: int, sizes: list[int], is_by_character: bool) -> None:
    """Tokens up to the limit, one a chunk, several a chunk, or split into characters."""
    tokens = [("x" * size) for size in sizes[:max_tokens]]
    texts = list("".join(tokens)[: 6 * len(tokens)]) if is_by_character else tokens
    answer = AnswerAccumulator(chat(max_tokens=max_tokens), lambda: 0.0)
    shown = ""
    for text in texts:
        chunk = read_chunk(orjson.dumps({"choices": [{"delta": {"content": text}}]}))
        shown += text_of(answer.take([chunk]))
    assert shown == "".join(texts)
    assert not answer.is_cut


async def test_a_stop_string_comes_before_the_limit(server: ProviderServer, behave: Any) -> None:
    behave(endless("one two "))
    backend = make(server, "own")
    deltas, ending = await collect(backend, chat(max_tokens=8, stop=("two",)))
    assert (text_of(deltas), ending.reason) == ("one ", FinishReason.STOP)
    await backend.close()


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
async def test_a_server_that_drips_is_bounded_by_the_requests_life(
    tmp_path: Path, behave: Any, is_streamed: bool
) -> None:
    behave(endless(delay_s=0.02))
    with ProviderServer() as server:
        large = make(server, "own", capabilities=("generate",))
        settings = make_settings(tmp_path, server__request_timeout_s=0.5)
        async with running(settings, echo_backends() | {"large": large}) as gateway:
            response = await gateway.chat("hi", model="expert", stream=is_streamed)
            if is_streamed:
                assert '"deadline_exceeded"' in response.text
            else:
                assert_error(response, 504, "deadline_exceeded")
            await until(lambda: server.num_active == 0)
            row = await gateway.row()
            assert 0 < row.completion_tokens < 5000


# --- wrong counts ----------------------------------------------------------------------------------------------------

COUNT = st.integers(0, 2**31 - 1)
BAD = [-1, "7", 2.5, True, 2**31, 10**30, [], {}]


@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens"])
@pytest.mark.parametrize("value", BAD, ids=repr)
async def test_counts_that_are_none_are_ignored_and_the_answer_served(
    server: ProviderServer, behave: Any, tmp_path: Path, field: str, value: Any
) -> None:
    """(security review L8, at the border)"""

    async def answer(call: ProviderCall) -> None:
        await call.start()
        for chunk in call.chunks():
            if chunk.get("usage"):
                chunk["usage"][field] = value
            await call.write(b"data: " + _dumps(chunk) + b"\n\n")
        await call.done()

    behave(answer)
    backend = make(server, "own", capabilities=("generate",))
    deltas, ending = await collect(backend, chat())
    assert text_of(deltas) == ANSWER
    assert ending.reason is FinishReason.STOP
    assert ending.usage_estimated
    assert 0 < ending.usage.prompt_tokens < 1000
    assert 0 < ending.usage.completion_tokens < 1000
    assert backend.load().num_bad_usage == 1
    await backend.close()


def _dumps(body: Any) -> bytes:
    # orjson has no integers beyond 64 bits.
    return json.dumps(body).encode()


@given(
    COUNT,
    COUNT,
    COUNT,
    st.integers(1, 4096),
    st.integers(0, 9000),
)
def test_counts_that_cannot_be_are_cut(
    prompt: int, completion: int, part: int, max_tokens: int, num_chars: int
) -> None:
    request = GenerateRequest("r", prompt="hello", sampling=SamplingParams(max_tokens=max_tokens))
    usage = Usage(prompt, completion, cached_tokens=min(part, prompt), reasoning_tokens=min(part, completion))
    found = AnswerLimit(request).plausible(usage, num_chars)
    assert found.prompt_tokens <= 5 + 16_384
    assert found.completion_tokens <= max(max_tokens, num_chars)
    assert found.cached_tokens <= found.prompt_tokens
    assert found.reasoning_tokens <= found.completion_tokens
    if prompt <= 5 and completion <= max_tokens:
        assert found is usage


async def test_oddities_are_counted(tmp_path: Path, behave: Any) -> None:
    behave(endless(usage={"prompt_tokens": -1}))
    with ProviderServer() as server:
        large = make(server, "own", capabilities=("generate",))
        async with running(make_settings(tmp_path), echo_backends() | {"large": large}) as gateway:
            response = await gateway.chat("hi", model="expert", max_tokens=3)
            assert response.json()["choices"][0]["finish_reason"] == "length"
            metrics = (await gateway.client.get("/metrics")).text
    for kind in ("too_long", "bad_usage"):
        assert f'suffice_remote_oddities_total{{kind="{kind}",model_name="large",tier="2"}} 1.0' in metrics
