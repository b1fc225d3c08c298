"""Between text and token ids: errors, prompts, one generation's events and shared engines, without an engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.builtin.paths import model_dir
from backends.config import LocalModelConfig, SpeculationConfig
from backends.errors import (
    BackendError,
    BackendFailure,
    BackendOverloaded,
    BackendUnavailable,
    ContextLengthExceeded,
    RequestRejected,
    UnsupportedByBackend,
)
from backends.local_engine.engine_call import EngineCall
from backends.local_engine.engine_groups import engine_groups
from backends.local_engine.errors import translate
from backends.local_engine.prompt_builder import PromptBuilder
from backends.local_engine.shared_resources import SharedResources
from backends.protocol import (
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Message,
    Priority,
    SamplingParams,
    TokenDelta,
    Usage,
)
from engine import errors as engine_errors
from engine import request as engine_request
from engine.sink import AsyncSink
from engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer(model_dir(1))
CONTEXT = 200

# --- errors ----------------------------------------------------------------------------------------------------------

TRANSLATED: dict[type[Exception], tuple[Exception, type[BackendError]]] = {
    type(error): (error, ours)
    for error, ours in (
        (engine_errors.InvalidRequest("top_p", "top_p is 7"), RequestRejected),
        (engine_errors.RequestTooLong(90, 20, 100, "the context"), ContextLengthExceeded),
        (engine_errors.EngineOverloaded(5, 5, 0.2), BackendOverloaded),
        (engine_errors.EngineClosed("closed"), BackendUnavailable),
        (engine_errors.DeviceLost("cuda:0", "fault"), BackendUnavailable),
        (engine_errors.KernelBuildFailed("nvrtc"), BackendFailure),
        (engine_errors.StepFailed("step"), BackendFailure),
        (engine_errors.RankLost("rank 1"), BackendFailure),
        (engine_errors.NonFiniteLogits("nan"), BackendFailure),
        (engine_errors.NothingAllowed("nothing"), RequestRejected),
        (engine_errors.InvalidGrammar("no rule"), RequestRejected),
        (engine_errors.UnsupportedGrammar("not"), RequestRejected),
        (engine_errors.GrammarTooLarge("too large"), RequestRejected),
        (engine_errors.InvalidText("surrogate"), RequestRejected),
        (engine_errors.TextTooLong(90, 80), ContextLengthExceeded),
        (engine_errors.NoChatTemplate("none"), UnsupportedByBackend),
        (engine_errors.ChatTemplateError("roles must alternate"), RequestRejected),
    )
}


def leaves(kind: type[Exception]) -> set[type[Exception]]:
    below = {leaf for child in kind.__subclasses__() for leaf in leaves(child)}
    return below | {kind}


def test_every_error_of_the_engine_has_its_row_or_belongs_to_loading() -> None:
    loading = leaves(engine_errors.LoadError)
    bases = {engine_errors.EngineError, engine_errors.GrammarError, engine_errors.TokenizerError}
    engines = {kind for kind in leaves(engine_errors.EngineError) if kind.__module__ == engine_errors.__name__}
    assert engines - loading - bases == set(TRANSLATED)


@pytest.mark.parametrize("kind", TRANSLATED, ids=lambda kind: kind.__name__)
def test_an_error_of_the_engine_becomes_ours(kind: type[Exception]) -> None:
    error, ours = TRANSLATED[kind]
    found = translate(error, "small", param="input")
    assert type(found) is ours
    # The caller mends a request; the engine's own troubles may go better elsewhere.
    assert found.retryable == (ours not in (RequestRejected, ContextLengthExceeded, UnsupportedByBackend))
    if found.retryable:
        assert str(found).startswith("small: ")


def test_the_fields_of_an_error_come_along() -> None:
    long = translate(engine_errors.RequestTooLong(90, 20, 100, "the context"), "small")
    assert isinstance(long, ContextLengthExceeded)
    assert (long.num_prompt_tokens, long.max_tokens, long.context_length) == (90, 20, 100)
    busy = translate(engine_errors.EngineOverloaded(5, 5, 0.2), "small")
    assert isinstance(busy, BackendOverloaded)
    # Less than a second is more often a guess than a promise.
    assert busy.retry_after_s == 1.0
    for error, param in (
        (engine_errors.InvalidRequest("top_p", "x"), "top_p"),
        (engine_errors.InvalidText("x"), "input"),
        (engine_errors.NothingAllowed("x"), "logit_bias"),
    ):
        found = translate(error, "small", param="input")
        assert isinstance(found, RequestRejected)
        assert (found.status, found.param) == (400, param)
    assert isinstance(translate(ZeroDivisionError("bug"), "small"), BackendFailure)


# --- prompts ---------------------------------------------------------------------------------------------------------


def builder(thinking: bool = False) -> PromptBuilder:
    return PromptBuilder("small", TOKENIZER, thinking=thinking)


def chat(text: str = "What is 2 + 2?", **changes: Any) -> GenerateRequest:
    return replace(GenerateRequest("r", messages=(Message("user", text),)), **changes)


async def test_prompts_of_each_kind_are_encoded() -> None:
    prompts = builder()
    assert await prompts.encode(GenerateRequest("r", prompt_token_ids=(5, 6))) == (5, 6)
    assert await prompts.encode(GenerateRequest("r", prompt="2 + 2")) == tuple(TOKENIZER.encode("2 + 2"))
    text = TOKENIZER.decode(await prompts.encode(chat()))
    assert text.endswith("<think>\n\n</think>\n\n")
    with pytest.raises(RequestRejected) as caught:
        await prompts.encode(GenerateRequest("r"))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("asked", [True, False, None])
async def test_thinking_is_the_requests_else_the_models(default: bool, asked: bool | None) -> None:
    ids = await builder(default).encode(chat(thinking=asked))
    assert TOKENIZER.is_thinking_open(ids) == (default if asked is None else asked)


async def test_the_newer_name_of_the_system_role_is_written_as_the_older() -> None:
    prompts = builder()
    old, new = (chat(messages=(Message(role, "Be brief."), Message("user", "q"))) for role in ("system", "developer"))
    assert await prompts.encode(old) == await prompts.encode(new)


async def test_an_encoding_is_kept_and_never_taken_for_anothers() -> None:
    prompts = builder()
    requests = [chat(str(number)) for number in range(100)]
    requests += [chat("7", thinking=True), GenerateRequest("r", prompt="7"), chat(messages=(Message("system", "7"),))]
    first = [await prompts.encode(request) for request in requests]
    assert [await prompts.encode(request) for request in reversed(requests)] == first[::-1]
    assert len(set(first)) == len(first)
    assert await prompts.encode(requests[-1]) is await prompts.encode(requests[-1])


async def test_an_encoding_is_kept_for_its_own_tenant() -> None:
    """Encoding takes a millisecond, so that a kept one would tell what another has sent (security review H3)."""
    prompts = builder()
    first, second = (chat("secret", extra={"cache_salt": salt}) for salt in ("a", "b"))
    ids = await prompts.encode(first)
    assert await prompts.encode(first) is ids
    assert await prompts.encode(second) is not ids
    assert await prompts.encode(second) == ids


async def test_a_long_prompt_is_encoded_beside_the_loop_to_the_same_ids() -> None:
    long = "12 apples and 7 pears. " * 1000
    assert await builder().encode(GenerateRequest("r", prompt=long)) == tuple(TOKENIZER.encode(long))


@pytest.mark.parametrize(
    "changes", [{"prompt": "\ud800", "messages": None}, {"messages": (Message("user", "\ud800"),)}]
)
async def test_text_that_is_none_is_refused_where_it_stands(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestRejected) as caught:
        await builder().encode(chat(**changes))
    assert caught.value.param == ("prompt" if "prompt" in changes else "messages")


def engine_form(request: GenerateRequest, prompt_ids: tuple[int, ...] = (1, 2), thinking: bool = False) -> Any:
    return builder(thinking).to_engine(request, prompt_ids, context_length=CONTEXT, stop_check=None)


def test_every_sampling_option_reaches_the_engine() -> None:
    """The engine's options are those of the protocol, by name; stop strings are looked for in the text."""
    theirs = {each.name for each in fields(engine_request.SamplingParams)}
    assert set(SamplingParams.__struct_fields__) - theirs == {"stop"}
    assert theirs <= set(SamplingParams.__struct_fields__)
    sampling = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=4, max_tokens=9, min_tokens=2, stop=("x",), logprobs=1
    )
    made = engine_form(chat(sampling=sampling)).sampling
    assert all(getattr(made, name) == getattr(sampling, name) for name in theirs)
    for each in Priority:
        assert engine_form(chat(priority=each)).priority.name == each.name


@pytest.mark.parametrize(
    ("extra", "speculate", "salt"),
    [
        ({}, True, ""),
        ({"speculate": False}, False, ""),
        ({"speculate": None}, True, ""),
        ({"cache_salt": 7}, True, "7"),
    ],
)
def test_extras_of_the_local_engine(extra: dict[str, Any], speculate: bool, salt: str) -> None:
    made = engine_form(chat(extra=extra))
    assert (made.speculate, made.cache_salt) == (speculate, salt)


@given(st.integers(0, 150), st.none() | st.integers(1, 300), st.none() | st.integers(0, 300))
def test_reasoning_leaves_room_for_an_answer(num_prompt: int, max_tokens: int | None, budget: int | None) -> None:
    opened = asyncio.run(builder(thinking=True).encode(chat()))
    prompt_ids = (*([1] * num_prompt), *opened)
    extra = {} if budget is None else {"thinking_budget": budget}
    request = chat(sampling=SamplingParams(max_tokens=max_tokens), extra=extra)
    limit = engine_form(request, prompt_ids, thinking=True).thinking
    assert limit.close_ids[-1] != limit.close_id
    room = min(CONTEXT - len(prompt_ids), max_tokens or CONTEXT)
    assert limit.max_tokens == (max(budget, 1) if budget is not None else max(int(0.75 * room), 1))
    # A prompt that closes the reasoning itself needs no bound.
    assert engine_form(request, (1, 2)).thinking is None


@pytest.mark.parametrize("budget", [-1, 1.5, "9", True])
def test_a_thinking_budget_that_is_none_is_refused(budget: Any) -> None:
    opened = asyncio.run(builder(thinking=True).encode(chat()))
    with pytest.raises(RequestRejected) as caught:
        engine_form(chat(extra={"thinking_budget": budget}), opened, thinking=True)
    assert caught.value.param == "thinking_budget"


async def test_a_prediction_stands_where_the_answer_will() -> None:
    prompts = builder()
    closed, opened = [await prompts.encode(chat(thinking=thinking)) for thinking in (False, True)]
    predicted = chat(prediction="4 apples")
    plain = await prompts.predicted(predicted, closed, CONTEXT)
    assert plain == engine_request.Prediction(tuple(TOKENIZER.encode_plain("4 apples")), None)
    after = await prompts.predicted(predicted, opened, CONTEXT)
    assert after is not None
    assert TOKENIZER.decode(after.token_ids) == "\n\n4 apples"
    assert TOKENIZER.think_tags is not None
    assert after.after_id == TOKENIZER.think_tags.close_id
    assert await prompts.predicted(chat(), closed, CONTEXT) is None
    assert await prompts.predicted(chat(prediction=""), closed, CONTEXT) is None
    # What the context has no room for is not even encoded.
    long = await prompts.predicted(chat(prediction="word " * 100_000), closed, CONTEXT)
    assert long is not None
    assert len(long.token_ids) <= 8 * CONTEXT


def test_a_score_reads_prompt_and_answer_in_one_prefill() -> None:
    made = builder().score_request(chat(extra={"cache_salt": "s"}, priority=Priority.BACKGROUND), (1, 2, 3), (4, 5))
    assert (made.prompt_ids, made.score_from, made.sampling.max_tokens) == ((1, 2, 3, 4, 5), 3, 0)
    assert (made.cache_salt, made.priority) == ("s", engine_request.Priority.BACKGROUND)


# --- one generation --------------------------------------------------------------------------------------------------

EOS = TOKENIZER.eos_token_ids[0]


async def play(
    *events: engine_request.Event, request: GenerateRequest | None = None, prompt_ids: tuple[int, ...] = (1,)
) -> list[Event]:
    """Return what a call makes of the engine's events."""
    request, prompts, sink = request or chat(), builder(), AsyncSink()
    text = prompts.text_stream(request, prompt_ids, TOKENIZER.eos_token_ids)
    inner = prompts.to_engine(request, prompt_ids, context_length=CONTEXT, stop_check=None)
    for event in events:
        sink.put(event)
    return [event async for event in EngineCall("small", inner, sink, text, TOKENIZER.bytes).events()]


def chunk(*token_ids: int) -> engine_request.TokenChunk:
    logprobs = tuple(engine_request.TokenLogprob(token_id, -0.5, 0, ((token_id, -0.5),)) for token_id in token_ids)
    return engine_request.TokenChunk(tuple(token_ids), logprobs)


def ending(reason: str = "stop", **fields_: Any) -> engine_request.RequestEnding:
    return engine_request.RequestEnding(
        engine_request.FinishReason(reason), **{"num_prompt_tokens": 1, "num_output_tokens": 0, **fields_}
    )


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=20), st.integers(1, 5))
def test_no_delta_holds_half_a_character(text: str, size: int) -> None:
    ids = TOKENIZER.encode_plain(text)
    chunks = [chunk(*ids[at : at + size]) for at in range(0, len(ids), size)]
    done = ending(num_prompt_tokens=1, num_output_tokens=len(ids) + 1)
    events = asyncio.run(play(*chunks, chunk(EOS), done))
    assert isinstance(events[-1], Finished)
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    assert "".join(delta.text for delta in deltas) == text
    assert sum(delta.num_tokens for delta in deltas) == len(ids) + 1
    assert events[-1].usage == Usage(1, len(ids) + 1)


async def test_reasoning_comes_apart_and_is_counted() -> None:
    opened = await builder(thinking=True).encode(chat(thinking=True))
    ids = (*TOKENIZER.encode("2 and 2\n</think>\n\n", add_special_tokens=False), *TOKENIZER.encode_plain("4"), EOS)
    events = await play(
        chunk(*ids),
        ending(num_prompt_tokens=9, num_output_tokens=len(ids)),
        request=chat(thinking=True),
        prompt_ids=opened,
    )
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    assert "".join(delta.text for delta in deltas) == "4"
    assert "".join(delta.reasoning for delta in deltas).strip() == "2 and 2"
    assert isinstance(events[-1], Finished)
    assert 0 < events[-1].usage.reasoning_tokens < len(ids)


async def test_an_error_before_anything_was_said_is_raised_and_after_it_told() -> None:
    failed = ending("error", error=engine_errors.StepFailed("no memory"), num_output_tokens=1)
    with pytest.raises(BackendFailure, match="small: no memory"):
        await play(failed)
    *_, last = await play(chunk(*TOKENIZER.encode_plain("so")), failed)
    assert isinstance(last, Finished)
    assert (last.reason, last.error) == (FinishReason.ERROR, "small: no memory")
    # An engine that closes has cancelled what ran: nobody's failure.
    (only,) = await play(ending("error", error=engine_errors.EngineClosed("closed")))
    assert isinstance(only, Finished)
    assert only.reason is FinishReason.CANCELLED


# --- engines that several models use ---------------------------------------------------------------------------------


def test_engines_are_made_once_however_many_ask_at_once() -> None:
    engines: SharedResources[object] = SharedResources()
    made: list[object] = []
    closed: list[object] = []
    barrier = threading.Barrier(8)

    def make() -> object:
        # Long enough that the others ask meanwhile.
        time.sleep(0.05)
        made.append(object())
        return made[-1]

    def use(_: int) -> object:
        barrier.wait()
        return engines.acquire("g", make)

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(use, range(8)))
        assert len(made) == 1
        assert all(each is made[0] for each in got)
        list(pool.map(lambda _: engines.release("g", closed.append), range(8)))
    assert closed == made


PLAIN = LocalModelConfig(path="m", device="cpu")
CHANGES: tuple[Callable[[LocalModelConfig], LocalModelConfig], ...] = (
    lambda config: config,
    lambda config: replace(config, thinking=True),
    lambda config: replace(config, max_num_seqs=8),
    lambda config: replace(config, path="other"),
    lambda config: replace(config, context_length=64),
    lambda config: replace(config, kv_cache_bytes=1 << 20),
    lambda config: replace(config, drafter="d1", speculation=SpeculationConfig(mode="draft")),
    lambda config: replace(config, drafter="d2", speculation=SpeculationConfig(mode="draft")),
    lambda config: replace(config, speculation=SpeculationConfig(mode="ngram")),
)


@given(st.lists(st.sampled_from(range(len(CHANGES))), max_size=7))
def test_groups_are_a_partition_whose_members_could_share_in_any_order(kinds: list[int]) -> None:
    models = {f"m{place}": CHANGES[kind](PLAIN) for place, kind in enumerate(kinds)}
    groups = engine_groups(models)
    assert list(groups) == [name for group in dict.fromkeys(groups.values()) for name in group.members]
    for name, group in groups.items():
        assert name in group.members
        assert group.config.max_num_seqs == sum(models[member].max_num_seqs for member in group.members)
        drafting = {models[member].drafter for member in group.members if models[member].speculation.mode == "draft"}
        assert drafting <= {group.drafter_path}
        assert len({models[member].path for member in group.members}) == 1
        assert len({models[member].context_length for member in group.members}) == 1
