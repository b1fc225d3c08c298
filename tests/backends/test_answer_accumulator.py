"""Chunks become deltas that keep their order and their counts, and one ending that says what is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.errors import BackendFailure
from backends.protocol import (
    FinishReason,
    GenerateRequest,
    Message,
    SamplingParams,
    Thought,
    Timings,
    TokenDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
    join_calls,
)
from backends.remote.answer_accumulator import AnswerAccumulator, estimate_prompt_tokens
from backends.remote.chunk_decoder import AnswerChunk


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make(clock: Clock | None = None, **sampling: Any) -> AnswerAccumulator:
    request = GenerateRequest("r", messages=(Message("user", "12345678"),), sampling=SamplingParams(**sampling))
    return AnswerAccumulator(request, clock or Clock())


STOP = AnswerChunk(reason=FinishReason.STOP)
ENTRY = TokenLogprob("a", -1, -0.5)

CHUNKS = st.lists(
    st.builds(
        AnswerChunk,
        text=st.sampled_from(["", "a", "bc"]),
        reasoning=st.sampled_from(["", "x", "yz"]),
        logprobs=st.sampled_from([(), (ENTRY,), (ENTRY, ENTRY)]),
    ),
    max_size=6,
)


@given(st.lists(CHUNKS, max_size=5))
def test_nothing_is_lost_added_or_reordered(reads: list[list[AnswerChunk]]) -> None:
    answer = make()
    deltas = [answer.take(read) for read in reads]
    given_chunks = [chunk for read in reads for chunk in read if chunk.has_content]
    every = [delta for read in deltas for delta in read]
    assert "".join(delta.text for delta in every) == "".join(chunk.text for chunk in given_chunks)
    assert "".join(delta.reasoning for delta in every) == "".join(chunk.reasoning for chunk in given_chunks)
    assert sum((delta.logprobs for delta in every), ()) == sum((chunk.logprobs for chunk in given_chunks), ())
    num_tokens = sum(len(chunk.logprobs) or 1 for chunk in given_chunks)
    assert sum(delta.num_tokens for delta in every) == answer.num_tokens == num_tokens
    assert answer.has_begun == bool(given_chunks)
    for read, made in zip(reads, deltas, strict=True):
        # Reasoning that follows text needs a delta of its own; nothing else does.
        assert len(made) <= 1 + sum(bool(chunk.reasoning) for chunk in read)


def test_chunks_that_arrive_together_are_one_delta() -> None:
    answer = make()
    read = [AnswerChunk(reasoning="w"), AnswerChunk(reasoning="hy"), AnswerChunk("4"), AnswerChunk("2"), STOP]
    assert answer.take(read) == [TokenDelta("42", "why", 4)]
    assert (answer.num_tokens, answer.num_reasoning_tokens, answer.is_complete) == (4, 2, True)
    # Text before reasoning would change places in one delta.
    answer = make()
    read = [AnswerChunk("a"), AnswerChunk(reasoning="b"), AnswerChunk("c")]
    assert answer.take(read) == [TokenDelta("a", "", 1), TokenDelta("c", "b", 2)]


def test_the_first_reason_and_the_last_count_hold() -> None:
    answer = make()
    answer.take([AnswerChunk("a"), STOP, AnswerChunk(reason=FinishReason.LENGTH, usage=Usage(3, 1))])
    assert not answer.take([AnswerChunk(usage=Usage(3, 2))])
    ending = answer.whole("far")
    assert (ending.reason, ending.usage, ending.usage_estimated, ending.error) == (
        FinishReason.STOP,
        Usage(3, 2),
        False,
        None,
    )


def test_a_server_that_does_not_count_is_counted_for() -> None:
    answer = make()
    answer.take([AnswerChunk(reasoning="think"), AnswerChunk("a", logprobs=(ENTRY, ENTRY, ENTRY)), STOP])
    ending = answer.whole("far")
    assert ending.usage == Usage(prompt_tokens=2, completion_tokens=4, reasoning_tokens=1)
    assert ending.usage_estimated
    assert not answer.has_usage


def test_timings_are_by_the_clock_and_the_servers_count() -> None:
    clock = Clock()
    answer = make(clock)
    clock.now_s += 2.0
    answer.take([AnswerChunk("a")])
    clock.now_s += 3.0
    answer.take([AnswerChunk("b"), STOP])
    assert answer.ending().timings == Timings(ttft_s=2.0, itl_s=3.0, total_s=5.0)
    answer.take([AnswerChunk(usage=Usage(1, 7))])
    assert answer.ending().timings.itl_s == 0.5
    # Time runs on over attempts, everything else begins anew.
    again = answer.restarted()
    clock.now_s += 1.0
    assert (again.has_begun, again.is_complete, again.has_usage, again.num_tokens) == (False, False, False, 0)
    assert again.ending(FinishReason.ERROR, "gone").timings == Timings(total_s=6.0)


def test_one_token_has_no_gap() -> None:
    clock = Clock()
    answer = make(clock)
    answer.take([AnswerChunk("a")])
    clock.now_s += 9.0
    assert answer.ending(FinishReason.LENGTH).timings == Timings(ttft_s=0.0, itl_s=0.0, total_s=9.0)


def test_a_stop_string_ends_the_answer_before_the_server_does() -> None:
    answer = make(stop=("END",))
    assert answer.take([AnswerChunk("one E"), AnswerChunk("ND two")]) == [TokenDelta("one ", "", 2)]
    assert (answer.is_stopped, answer.is_complete) == (True, True)
    assert answer.take([AnswerChunk("three", reason=FinishReason.LENGTH)]) == []
    assert answer.rest() == []
    # The reason a server gives for text that nobody wanted is not the answer's.
    ending = answer.whole("far")
    assert (ending.reason, ending.stop_string) == (FinishReason.STOP, "END")


@pytest.mark.parametrize(
    ("said", "found"),
    [("END", "END"), ("</s>", None), (None, None)],
)
def test_a_stop_string_that_the_server_names_is_one_that_it_was_told(said: str | None, found: str | None) -> None:
    answer = make(stop=("STOP", "END"))
    answer.take([AnswerChunk("one"), AnswerChunk(reason=FinishReason.STOP, stop_string=said)])
    assert answer.whole("far").stop_string == found


def test_what_is_signed_keeps_its_place() -> None:
    sign, redacted = (Thought("", "s"),), (Thought("", "x", is_redacted=True),)
    answer = make()
    chunks = [AnswerChunk(reasoning="a"), AnswerChunk(signed=sign), AnswerChunk(signed=redacted), AnswerChunk("b")]
    assert answer.take([*chunks, AnswerChunk(reasoning="c"), STOP]) == [
        TokenDelta("", "a", 2, signed=sign),
        TokenDelta("b", "", 2, signed=redacted),
        TokenDelta("", "c", 1),
    ]


def test_the_beginning_of_a_stop_string_is_given_when_nothing_follows() -> None:
    answer = make(stop=("END",))
    assert answer.take([AnswerChunk("one EN"), STOP]) == [TokenDelta("one ", "", 1)]
    assert answer.rest() == [TokenDelta("EN")]
    assert answer.rest() == []
    # A token whose text is wholly held back is counted all the same.
    answer = make(stop=("END",))
    assert answer.take([AnswerChunk("E")]) == [TokenDelta("", "", 1)]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "far ended the stream without an answer."),
        ([AnswerChunk("a")], "far ended the stream in the middle of the answer."),
        (
            [AnswerChunk("a", reason=FinishReason.ERROR, unknown_reason="abort")],
            "far ended the answer with finish_reason 'abort'.",
        ),
    ],
)
def test_an_answer_without_its_ending_is_a_failure(chunks: list[AnswerChunk], message: str) -> None:
    answer = make()
    answer.take(chunks)
    with pytest.raises(BackendFailure) as caught:
        answer.whole("far")
    assert str(caught.value) == message


def test_an_unknown_reason_does_not_spoil_an_answer_that_was_stopped_here() -> None:
    answer = make(stop=("b",))
    answer.take([AnswerChunk("ab"), AnswerChunk(reason=FinishReason.ERROR, unknown_reason="abort")])
    assert not answer.is_unreadable
    assert answer.whole("far").reason is FinishReason.STOP


def test_prompt_logprobs_reach_the_ending() -> None:
    answer = make()
    answer.take([AnswerChunk("a", prompt_logprobs=(None, ENTRY)), STOP])
    assert answer.ending().prompt_logprobs == (None, ENTRY)


@pytest.mark.parametrize(
    ("request_", "num_tokens"),
    [
        (GenerateRequest("r", prompt_token_ids=(1, 2, 3)), 3),
        (GenerateRequest("r", prompt_token_ids=()), 0),
        (GenerateRequest("r", prompt=""), 1),
        (GenerateRequest("r", prompt="x" * 9), 3),
        (GenerateRequest("r", prompt="不是"), 2),
        (GenerateRequest("r", messages=(Message("system", "x"), Message("user", "x" * 5))), 3),
        (GenerateRequest("r", messages=()), 1),
    ],
)
def test_a_prompt_is_estimated_at_four_bytes_a_token(request_: GenerateRequest, num_tokens: int) -> None:
    assert estimate_prompt_tokens(request_) == num_tokens


def test_the_estimate_takes_text_that_is_no_utf_8() -> None:
    assert estimate_prompt_tokens(replace(GenerateRequest("r"), prompt="\ud800" * 8)) > 0


@pytest.mark.parametrize(
    ("reason", "arguments"),
    [(FinishReason.STOP, "{}"), (FinishReason.TOOL_CALLS, "{}"), (FinishReason.LENGTH, ""), (None, "")],
)
def test_only_a_call_that_came_whole_wanted_no_arguments(reason: FinishReason | None, arguments: str) -> None:
    answer = make()
    call = AnswerChunk(tool_calls=(ToolCallDelta(0, "call_1", "now"),))
    deltas = [*answer.take([call, AnswerChunk(reason=reason)]), *answer.rest()]
    assert join_calls(piece for delta in deltas for piece in delta.tool_calls) == (
        ToolCall("call_1", "now", arguments),
    )
