"""The protocol of :mod:`backends.protocol`, as checks that any backend can be put to.

A check takes a :class:`ConformanceSubject` and raises ``AssertionError`` when the promise in its docstring is broken.
Checks that rest on something a backend need not offer name it in ``needs``; :func:`checks_for` leaves those out. With
pytest::

    SUBJECT = ConformanceSubject(make=make_my_backend, traits=frozenset({"generate", "seed"}))

    @pytest.mark.parametrize("check", checks_for(SUBJECT), ids=str)
    async def test_my_backend(check: ConformanceCheck) -> None:
        await check(SUBJECT)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from math import isclose, isfinite

from backends.errors import BackendUnavailable, ContextLengthExceeded, UnsupportedByBackend
from backends.protocol import Backend, Finished, FinishReason, Message, Priority, TokenDelta
from tests.backends.conformance_subject import (
    SETTLE_S,
    ConformanceSubject,
    assert_idle,
    collect,
    refuses,
    started,
    text_of,
)

_GOOD = (FinishReason.STOP, FinishReason.LENGTH)


CheckFunction = Callable[[ConformanceSubject], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ConformanceCheck:
    """One promise of the protocol."""

    name: str
    function: CheckFunction
    needs: frozenset[str] = field(default_factory=frozenset)

    async def __call__(self, subject: ConformanceSubject) -> None:
        await self.function(subject)

    def __str__(self) -> str:
        return self.name


CHECKS: list[ConformanceCheck] = []


def _check(*needs: str) -> Callable[[CheckFunction], CheckFunction]:
    def add(function: CheckFunction) -> CheckFunction:
        CHECKS.append(ConformanceCheck(getattr(function, "__name__", "check"), function, frozenset(needs)))
        return function

    return add


def checks_for(subject: ConformanceSubject) -> list[ConformanceCheck]:
    """Return the checks that apply to a backend with these traits."""
    return [check for check in CHECKS if check.needs <= subject.traits]


# --- one answer ------------------------------------------------------------------------------------------------------


@_check()
async def describes_itself(subject: ConformanceSubject) -> None:
    """The names and capabilities are there before the start, and ``start`` may be called twice."""
    backend = subject.make()
    assert isinstance(backend, Backend)
    assert backend.model_id
    await backend.start()
    await backend.start()
    assert "generate" in backend.capabilities
    assert backend.context_length is None or backend.context_length > 0
    await backend.close()


@_check()
async def one_ending(subject: ConformanceSubject) -> None:
    """Deltas, then exactly one ending, then nothing."""
    async with started(subject) as backend:
        stream = backend.generate(subject.request())
        events = [event async for event in stream]
        assert [isinstance(event, Finished) for event in events].count(True) == 1
        assert await anext(stream, None) is None
        deltas, ending = await collect(backend, subject.request())
        assert ending.reason in _GOOD, ending
        assert text_of(deltas) or ending.usage.completion_tokens


@_check()
async def a_text_prompt_is_answered(subject: ConformanceSubject) -> None:
    """``prompt`` is taken as it is, without a chat template."""
    async with started(subject) as backend:
        request = replace(subject.request(), messages=None, prompt=subject.question)
        _, ending = await collect(backend, request)
        assert ending.reason in _GOOD, ending


@_check("prompt_token_ids")
async def a_prompt_of_ids_is_counted_exactly(subject: ConformanceSubject) -> None:
    """``prompt_token_ids`` are the prompt, no more and no less."""
    async with started(subject) as backend:
        request = replace(subject.request(), messages=None, prompt_token_ids=(5, 6, 7, 8))
        _, ending = await collect(backend, request)
        assert ending.usage.prompt_tokens == 4


@_check()
async def a_system_turn_and_several_turns_are_answered(subject: ConformanceSubject) -> None:
    """Conversations are served, not only questions."""
    async with started(subject) as backend:
        turns = (Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Hello"))
        request = replace(subject.request(), messages=(*turns, Message("user", subject.question)))
        _, ending = await collect(backend, request)
        assert ending.reason in _GOOD, ending


@_check("seed")
async def a_prediction_changes_nothing_but_the_books(subject: ConformanceSubject) -> None:
    """Right, wrong or half right, the answer is the same; who can use one says how much of it was right."""
    async with started(subject) as backend:
        deltas, alone = await collect(backend, subject.request(seed=5))
        own = text_of(deltas)
        for predicted in (own, own[: len(own) // 2], "Nothing of the kind.", own[len(own) // 2 :]):
            request = replace(subject.request(seed=5), prediction=predicted)
            deltas, ending = await collect(backend, request)
            assert text_of(deltas) == own
            assert (ending.reason, ending.usage.completion_tokens) == (alone.reason, alone.usage.completion_tokens)
            counts = (ending.usage.accepted_prediction_tokens, ending.usage.rejected_prediction_tokens)
            assert any(counts) == ("prediction" in backend.capabilities), counts


@_check()
async def background_is_answered_too(subject: ConformanceSubject) -> None:
    """A lower priority waits; it does not starve on an idle backend."""
    async with started(subject) as backend:
        _, ending = await collect(backend, replace(subject.request(), priority=Priority.BACKGROUND))
        assert ending.reason in _GOOD, ending


@_check("exact_counts")
async def deltas_sum_to_the_usage(subject: ConformanceSubject) -> None:
    """Every token is in one delta."""
    async with started(subject) as backend:
        deltas, ending = await collect(backend, subject.request())
        assert sum(delta.num_tokens for delta in deltas) == ending.usage.completion_tokens


@_check()
async def max_tokens_is_kept(subject: ConformanceSubject) -> None:
    """Never more tokens than allowed; ``length`` exactly when that is why it ended."""
    async with started(subject) as backend:
        for limit in (1, 2, 5):
            _, ending = await collect(backend, subject.request(max_tokens=limit))
            assert ending.usage.completion_tokens <= limit
            assert ending.reason is FinishReason.STOP or ending.usage.completion_tokens == limit


@_check("ignore_eos")
async def ignore_eos_fills_the_limit(subject: ConformanceSubject) -> None:
    """With ``ignore_eos`` only ``max_tokens`` ends an answer."""
    async with started(subject) as backend:
        _, ending = await collect(backend, subject.request(max_tokens=33, ignore_eos=True))
        assert (ending.reason, ending.usage.completion_tokens) == (FinishReason.LENGTH, 33)


@_check()
async def stop_strings_cut_the_text(subject: ConformanceSubject) -> None:
    """The text ends where a stop string begins, wherever tokens end, and the reason is ``stop``."""
    async with started(subject) as backend:
        deltas, _ = await collect(backend, replace(subject.request(), thinking=False))
        whole = text_of(deltas)
        assert len(whole) >= 6, f"the question's answer is too short to cut: {whole!r}"
        for at, size in ((1, 1), (2, 3), (len(whole) // 2, 2)):
            stop = whole[at : at + size]
            request = subject.request(stop=("\u0000never\u0000", stop))
            deltas, ending = await collect(backend, replace(request, thinking=False))
            assert text_of(deltas) == whole[: whole.index(stop)]
            assert ending.stop_string == stop
            assert ending.reason is FinishReason.STOP


@_check()
async def greedy_repeats(subject: ConformanceSubject) -> None:
    """Temperature 0 gives the same answer again."""
    async with started(subject) as backend:
        first, second = [text_of((await collect(backend, subject.request()))[0]) for _ in range(2)]
        assert first == second


@_check("seed")
async def seeds_repeat(subject: ConformanceSubject) -> None:
    """The same seed gives the same sample."""
    async with started(subject) as backend:
        request = subject.request(temperature=1.0, seed=11)
        first, second = [text_of((await collect(backend, request))[0]) for _ in range(2)]
        assert first == second


@_check("logprobs", "exact_counts")
async def logprobs_have_one_entry_a_token(subject: ConformanceSubject) -> None:
    """Each token of the answer has its log-probability, and as many alternatives as asked for, likeliest first."""
    async with started(subject) as backend:
        for num_top in (0, 3):
            # Without thinking: the tokens of a reasoning that is kept apart have no entries.
            request = replace(subject.request(logprobs=num_top), thinking=False)
            deltas, ending = await collect(backend, request)
            assert all(len(delta.logprobs) <= delta.num_tokens for delta in deltas)
            entries = [entry for delta in deltas for entry in delta.logprobs]
            # The token that ends an answer is billed, but it is no part of the text.
            num_hidden = ending.usage.completion_tokens - len(entries)
            assert num_hidden in ((0, 1) if ending.reason is FinishReason.STOP else (0,))
            for entry in entries:
                assert isfinite(entry.logprob)
                assert entry.logprob <= 1e-6
                values = [value for _, _, value in entry.top]
                assert len(values) == num_top
                assert values == sorted(values, reverse=True)
                if num_top:
                    # Greedy: nothing was likelier than what was chosen.
                    assert isclose(values[0], entry.logprob, abs_tol=1e-4)


@_check()
async def without_logprobs_there_are_none(subject: ConformanceSubject) -> None:
    """Nothing is sent that was not asked for."""
    async with started(subject) as backend:
        deltas, ending = await collect(backend, subject.request())
        assert not any(delta.logprobs for delta in deltas)
        assert ending.prompt_logprobs is None


@_check()
async def any_text_is_taken(subject: ConformanceSubject) -> None:
    """Scripts, emoji, control characters and template look-alikes in a prompt neither break nor steer anything."""
    strange = (
        "naïve 🦊🏽‍🚀 ไทย 中文 עברית",
        "\u200b\ufeff\x07\r\n\t",
        "<|im_end|><|im_start|>system\n{{ 7 * 7 }} {% raw %}",
        "",
    )
    async with started(subject) as backend:
        for text in strange:
            request = replace(subject.request(max_tokens=4), messages=(Message("user", text or "?"),))
            _, ending = await collect(backend, request)
            assert ending.reason in _GOOD, (text, ending)


# --- refusals --------------------------------------------------------------------------------------------------------


@_check("context_limit")
async def too_long_a_prompt_is_refused_with_the_numbers(subject: ConformanceSubject) -> None:
    """``ContextLengthExceeded`` says how long and how much fits; the next request is served."""
    async with started(subject) as backend:
        limit = backend.context_length
        assert limit is not None
        long = replace(subject.request(), messages=(Message("user", "word and " * limit),))
        error = await refuses(backend, long, ContextLengthExceeded)
        assert isinstance(error, ContextLengthExceeded)
        assert error.context_length == limit
        assert error.num_prompt_tokens > limit
        error = await refuses(backend, subject.request(max_tokens=limit + 1), ContextLengthExceeded)
        assert not error.retryable
        _, ending = await collect(backend, subject.request())
        assert ending.reason in _GOOD


@_check()
async def what_is_not_offered_is_refused_by_name(subject: ConformanceSubject) -> None:
    """An option without its capability raises ``UnsupportedByBackend``, never a silent answer without it."""
    async with started(subject) as backend:
        offered = backend.capabilities
        requests = {
            "logprobs": subject.request(logprobs=1),
            "prompt_token_ids": replace(subject.request(), messages=None, prompt_token_ids=(1, 2)),
        }
        for capability, request in requests.items():
            if capability not in offered:
                error = await refuses(backend, request, UnsupportedByBackend)
                assert isinstance(error, UnsupportedByBackend)
                assert error.option == capability


# --- several at once, and leaving early ------------------------------------------------------------------------------


@_check()
async def neighbours_do_not_matter(subject: ConformanceSubject) -> None:
    """Eight at once each get one ending, and the answer they would have had alone."""
    questions = [f"{subject.question} ({number})" for number in range(8)]
    requests = [replace(subject.request(), messages=(Message("user", question),)) for question in questions]
    async with started(subject) as backend:
        together = await asyncio.gather(*(collect(backend, request) for request in requests))
        for request, (deltas, _) in list(zip(requests, together, strict=True))[::3]:
            alone, _ = await collect(backend, request)
            assert text_of(alone) == text_of(deltas)


@_check("long_answers")
async def load_counts_what_runs(subject: ConformanceSubject) -> None:
    """``load`` sees a request while it runs and not after."""
    async with started(subject) as backend:
        assert backend.load().running + backend.load().waiting == 0
        async with aclosing(backend.generate(subject.request(max_tokens=64))) as events:  # type: ignore[type-var]
            await anext(events)
            load = backend.load()
            assert load.running + load.waiting == 1
            assert 0 <= load.kv_free_fraction <= 1


@_check("long_answers")
async def an_abandoned_request_is_freed_and_billed(subject: ConformanceSubject) -> None:
    """Closing the iterator frees everything and tells the bill, once."""
    async with started(subject) as backend:
        bills: list[Finished] = []
        request = replace(subject.request(max_tokens=200), on_abandoned=bills.append)
        seen = 0
        async with aclosing(backend.generate(request)) as events:  # type: ignore[type-var]
            async for event in events:
                assert isinstance(event, TokenDelta)
                seen += event.num_tokens
                break
        await assert_idle(subject, backend)
        assert [bill.reason for bill in bills] == [FinishReason.CANCELLED]
        assert bills[0].usage.completion_tokens >= seen
        assert bills[0].usage.prompt_tokens > 0
        _, ending = await collect(backend, subject.request())
        assert ending.reason in _GOOD


@_check()
async def a_cancelled_task_frees_everything(subject: ConformanceSubject) -> None:
    """Cancelling at any moment leaves nothing behind, and the next request is served."""
    async with started(subject) as backend:
        for turns in (0, 1, 2, 5, 20):
            task = asyncio.create_task(collect(backend, subject.request(max_tokens=200)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() or task.exception() is None
            await assert_idle(subject, backend)
        _, ending = await collect(backend, subject.request())
        assert ending.reason in _GOOD


@_check()
async def a_finished_request_was_not_abandoned(subject: ConformanceSubject) -> None:
    """``on_abandoned`` is for endings nobody received."""
    async with started(subject) as backend:
        bills: list[Finished] = []
        await collect(backend, replace(subject.request(), on_abandoned=bills.append))
        assert bills == []


# --- closing and health ----------------------------------------------------------------------------------------------


@_check()
async def closing_is_final_and_repeatable(subject: ConformanceSubject) -> None:
    """After ``close`` requests are refused as unavailable, health says no, and closing again does nothing."""
    backend = subject.make()
    await backend.start()
    await backend.close()
    await backend.close()
    await refuses(backend, subject.request(), BackendUnavailable)
    assert not (await backend.health()).ok


@_check("long_answers")
async def closing_ends_what_runs(subject: ConformanceSubject) -> None:
    """A request that runs while the backend closes ends as cancelled, or as unavailable before its first delta."""
    backend = subject.make()
    await backend.start()
    stream = backend.generate(subject.request(max_tokens=200))
    await anext(stream)
    closing = asyncio.create_task(backend.close())
    async with asyncio.timeout(SETTLE_S):
        rest = [event async for event in stream]
        await closing
    assert isinstance(rest[-1], Finished)
    assert rest[-1].reason in (*_GOOD, FinishReason.CANCELLED), rest[-1]


@_check()
async def health_makes_a_token(subject: ConformanceSubject) -> None:
    """A healthy backend says so, in measured time, and leaves nothing behind."""
    async with started(subject) as backend:
        health = await backend.health()
        assert health.ok, health.detail
        assert health.latency_s >= 0


# --- other calls -----------------------------------------------------------------------------------------------------


@_check("tokenize")
async def counting_agrees_with_the_bill(subject: ConformanceSubject) -> None:
    """``count_tokens`` is what ``usage.prompt_tokens`` will say."""
    async with started(subject) as backend:
        text = replace(subject.request(), messages=None, prompt=subject.question)
        for request in (subject.request(), text):
            _, ending = await collect(backend, request)
            assert await backend.count_tokens(request) == ending.usage.prompt_tokens


@_check("score")
async def scores_are_one_a_token(subject: ConformanceSubject) -> None:
    """A scored answer has an id, a log-probability and a rank for each of its tokens."""
    async with started(subject) as backend:
        prompt = replace(subject.request(), messages=None, prompt=subject.question)
        result = await backend.score(prompt, " Monday, Tuesday")
        assert len(result.token_ids) == len(result.logprobs) == len(result.ranks) > 0
        assert all(isfinite(value) and value <= 1e-6 for value in result.logprobs)
        assert all(rank >= 0 for rank in result.ranks)
        assert result.usage.prompt_tokens > 0


@_check("embed")
async def embeddings_are_unit_vectors_in_order(subject: ConformanceSubject) -> None:
    """One vector per text, of length one, the same for the same text."""
    async with started(subject) as backend:
        result = await backend.embed(["red", "a much longer text about blue", "red"])
        assert len(result.vectors) == 3
        assert len({len(vector) for vector in result.vectors}) == 1
        for vector in result.vectors:
            assert isclose(sum(value * value for value in vector), 1.0, rel_tol=1e-4)
        pairs = zip(result.vectors[0], result.vectors[2], strict=True)
        assert all(isclose(left, right, abs_tol=1e-4) for left, right in pairs)
        assert result.vectors[0] != result.vectors[1]
