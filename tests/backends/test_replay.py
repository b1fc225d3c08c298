"""Recordings come back as they were made, and a bad file says where it is bad."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.errors import BackendUnavailable, ModelLoadError, RequestRejected, UnsupportedByBackend
from backends.protocol import (
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Message,
    SamplingParams,
    Timings,
    TokenDelta,
    Usage,
)
from backends.replay import AnswerRecord, ReplayBackend, read_records
from backends.testing import EchoBackend, Script

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def chat(text: str, seed: int | None = None) -> GenerateRequest:
    return GenerateRequest("r", messages=(Message("user", text),), sampling=SamplingParams(seed=seed))


async def events_of(backend: EchoBackend | ReplayBackend, request: GenerateRequest) -> list[Event]:
    return [event async for event in backend.generate(request)]


@given(TEXTS, TEXTS, TEXTS, st.sampled_from(FinishReason), st.integers(0, 2**40), st.floats(0, 1e6))
def test_a_record_survives_its_line(
    question: str, answer: str, reasoning: str, reason: FinishReason, count: int, seconds: float
) -> None:
    record = AnswerRecord(
        messages=(Message("user", question),),
        answer=answer,
        reasoning=reasoning,
        finish_reason=reason,
        usage=Usage(count, 1),
        timings=Timings(ttft_s=seconds),
        compute_s=seconds,
    )
    assert AnswerRecord.from_json(record.to_json()) == record


async def test_what_a_backend_said_is_said_again(tmp_path: Path) -> None:
    live = EchoBackend(script=Script(text="4, of course.", reasoning="2 and 2", compute_s=0.25))
    request = chat("2 + 2?")
    said = await events_of(live, request)
    assert isinstance(said[-1], Finished)
    record = AnswerRecord.of(request, [event for event in said if isinstance(event, TokenDelta)], said[-1])
    path = tmp_path / "answers.jsonl"
    path.write_bytes(record.to_json() + b"\n")

    tape = ReplayBackend("tape", path)
    await tape.start()
    assert await events_of(tape, request) == said
    assert await tape.count_tokens(request) == said[-1].usage.prompt_tokens
    assert (await tape.health()).ok
    with pytest.raises(RequestRejected) as caught:
        await events_of(tape, chat("3 + 3?"))
    assert caught.value.code == "not_recorded"
    await tape.close()
    with pytest.raises(BackendUnavailable, match="closed"):
        await events_of(tape, request)


async def test_several_answers_to_one_question() -> None:
    messages = (Message("user", "q"),)
    tape = ReplayBackend("tape", [AnswerRecord(messages=messages, answer=answer) for answer in "abc"])
    await tape.start()

    async def say(seed: int | None) -> str:
        return "".join(e.text for e in await events_of(tape, chat("q", seed)) if isinstance(e, TokenDelta))

    assert [await say(seed) for seed in (1, 1, 5, None, None, None, None)] == list("bbcabca")


async def test_an_abandoned_replay_still_bills_the_recording() -> None:
    tape = ReplayBackend("tape", [AnswerRecord(prompt="q", answer="a b c", usage=Usage(1, 3))])
    await tape.start()
    bills: list[Finished] = []
    request = replace(GenerateRequest("r", prompt="q"), on_abandoned=bills.append)
    async with aclosing(tape.generate(request)) as events:
        await anext(events)
    assert [bill.usage for bill in bills] == [Usage(1, 3)]
    assert tape.load().running == 0


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{", "line 2"),
        (b"[]", "expected a JSON object"),
        (b"{}", "exactly one of messages and prompt"),
        (b'{"prompt": "q", "anser": "a"}', "unknown key 'anser'"),
        (b'{"prompt": "q", "answer": 4}', "answer is not a string"),
        (b'{"prompt": "q", "finish_reason": "bored"}', "bored"),
        (b'{"prompt": "q", "usage": {"prompt_tokens": "3"}}', "at `$.prompt_tokens`"),
        (b'{"prompt": "q", "usage": {"tokens": 3}}', "unknown key 'tokens' in usage"),
        (b'{"messages": ["q"]}', "expected an object for message"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, complaint: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(AnswerRecord(prompt="q").to_json() + line + b"\n")
    with pytest.raises(ModelLoadError) as caught:
        read_records(path)
    assert complaint in str(caught.value)
    assert f"{path}, line 2" in str(caught.value)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_records(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    with pytest.raises(ModelLoadError, match="no records"):
        read_records(tmp_path / "empty.jsonl")


def keyed(text: str, **changes: object) -> AnswerRecord:
    return AnswerRecord(**{"messages": (Message("user", text),), "answer": text.upper(), **changes})  # type: ignore[arg-type]


async def test_a_question_is_known_by_its_turns_and_not_by_its_options() -> None:
    """Role and content decide; a name, sampling and what else a request carries do not."""
    tape = ReplayBackend("tape", [keyed("q"), AnswerRecord(prompt="q", answer="text")])
    await tape.start()
    await tape.start()
    same = [
        chat("q"),
        replace(chat("q"), messages=(Message("user", "q", name="ann"),)),
        replace(chat("q"), thinking=True, extra={"user": "u"}, sampling=SamplingParams(temperature=0.3, max_tokens=1)),
    ]
    for request in same:
        assert [each.text for each in await events_of(tape, request) if isinstance(each, TokenDelta)] == ["Q"]
    (delta, _) = await events_of(tape, GenerateRequest("r", prompt="q"))
    assert delta == TokenDelta("text", num_tokens=1)
    for other in (
        chat("q "),
        replace(chat("q"), messages=(Message("system", "q"),)),
        replace(chat("q"), messages=(Message("user", "q"), Message("assistant", ""))),
        GenerateRequest("r", prompt="Q"),
    ):
        with pytest.raises(RequestRejected) as caught:
            await events_of(tape, other)
        assert caught.value.status == 404
        assert await tape.count_tokens(other) is None


@given(TEXTS, TEXTS)
async def test_words_join_to_the_answer_and_the_ending_is_the_recorded_one(answer: str, reasoning: str) -> None:
    usage, timings = Usage(5, 7, reasoning_tokens=2), Timings(0.1, 0.2, 0.3, 4.0)
    record = keyed("q", answer=answer, reasoning=reasoning, usage=usage, timings=timings, compute_s=0.5)
    tape = ReplayBackend("tape", [record], context_length=64)
    await tape.start()
    *deltas, ending = await events_of(tape, chat("q"))
    assert "".join(each.text for each in deltas if isinstance(each, TokenDelta)) == answer
    assert "".join(each.reasoning for each in deltas if isinstance(each, TokenDelta)) == reasoning
    assert ending == Finished(FinishReason.STOP, usage, timings, 0.5)
    assert (tape.context_length, tape.capabilities, tape.load().running) == (64, {"generate"}, 0)
    # What a backend said can be recorded from the replay again.
    said = [each for each in deltas if isinstance(each, TokenDelta)]
    assert isinstance(ending, Finished)
    assert AnswerRecord.of(chat("q"), said, ending) == record


async def test_a_recorded_failure_ends_as_one() -> None:
    tape = ReplayBackend("tape", [keyed("q", answer="half", finish_reason=FinishReason.ERROR)])
    await tape.start()
    *_, ending = await events_of(tape, chat("q"))
    assert isinstance(ending, Finished)
    assert (ending.reason, ending.error) == (FinishReason.ERROR, "recorded failure")


async def test_what_was_not_recorded_cannot_be_replayed() -> None:
    tape = ReplayBackend("tape", [keyed("q")])
    with pytest.raises(BackendUnavailable, match="not started"):
        await events_of(tape, chat("q"))
    assert not (await tape.health()).ok
    assert await tape.count_tokens(chat("q")) is None
    await tape.start()
    with pytest.raises(UnsupportedByBackend, match="score"):
        await tape.score(chat("q"), "a")
    with pytest.raises(UnsupportedByBackend, match="embed"):
        await tape.embed(["a"])
    # Without its count, a prompt's length is not known to be nothing.
    assert await tape.count_tokens(chat("q")) is None


@given(st.integers(0, 10**6), st.integers(1, 5))
async def test_a_seed_names_its_answer_and_moves_nobody_elses_turn(seed: int, count: int) -> None:
    tape = ReplayBackend("tape", [keyed("q", answer=str(number)) for number in range(count)])
    await tape.start()

    async def say(seed: int | None) -> str:
        first, *_ = await events_of(tape, chat("q", seed))
        assert isinstance(first, TokenDelta)
        return first.text

    in_turn = []
    for _ in range(count + 1):
        in_turn.append(await say(None))
        assert await say(seed) == str(seed % count)
    assert in_turn == [*map(str, range(count)), "0"]
