"""The instruments beside the backends: the public fake's plan, the bench's table, comparisons, servers to start."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.builtin.evaluate import summarise
from backends.builtin.tasks.task_generator import generate
from backends.protocol import FinishReason, GenerateRequest, Message, SamplingParams
from backends.remote.bench import TransportCost, report
from backends.remote.chunk_decoder import AnswerChunk, read_chunk
from backends.testing import Script, count_prompt_tokens, script_answer, split_tokens, token_id
from tests.backends.peer_servers import PeerStartError, free_port, llama_cpp_server
from tests.backends.provider.openai_codec import answer_chunks, parse_request, whole_answer
from tests.backends.remote_kit import chat

WORDS = st.text("ab .", max_size=20)


# --- the fake --------------------------------------------------------------------------------------------------------


@given(WORDS, WORDS, st.none() | st.integers(0, 12), st.integers(1, 4), st.booleans(), st.none() | st.booleans())
def test_a_scripted_answer_keeps_every_option(
    text: str, reasoning: str, max_tokens: int | None, size: int, ignore_eos: bool, thinking: bool | None
) -> None:
    script = Script(text=text, reasoning=reasoning, tokens_per_delta=size)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, logprobs=1)
    planned = script_answer(replace(chat(), sampling=sampling, thinking=thinking), script)
    num_tokens = sum(delta.num_tokens for delta in planned.deltas)
    reasoning = "" if thinking is False else reasoning
    said = "".join(delta.reasoning for delta in planned.deltas)
    assert reasoning.startswith(said)
    assert planned.num_reasoning == len(split_tokens(said))
    assert all(1 <= delta.num_tokens <= size and len(delta.logprobs) == delta.num_tokens for delta in planned.deltas)
    if max_tokens is not None:
        assert num_tokens <= max_tokens
    if ignore_eos and max_tokens is not None and text:
        assert num_tokens == max_tokens
    if not ignore_eos:
        assert text.startswith(planned.text)
        whole = num_tokens == len(split_tokens(text)) + len(split_tokens(reasoning))
        assert planned.reason is (FinishReason.STOP if whole else FinishReason.LENGTH)


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_a_stop_string_cuts_the_script_at_the_earliest(text: str, stops: list[str]) -> None:
    planned = script_answer(chat(stop=tuple(stops)), Script(text=text))
    ends = [text.index(stop) for stop in stops if stop in text]
    assert planned.text == text[: min(ends, default=len(text))]


@given(st.text("abc ", max_size=20), st.booleans())
def test_the_provider_says_the_same_streamed_and_whole(text: str, is_chat: bool) -> None:
    """What its codec writes, ours reads: chunk by chunk, at once, and with the counts that the script has."""
    body = {"model": "m", "logprobs": True if is_chat else 2, "top_logprobs": 2, "max_tokens": 6}
    body |= {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    request, script = parse_request(body), Script(reasoning="so" if is_chat else "")
    read = [
        read_chunk(orjson.dumps(chunk))
        for chunk in answer_chunks(request, script, body, is_chat=is_chat, with_usage=True)
    ]
    whole = read_chunk(orjson.dumps(whole_answer(request, script, body, is_chat=is_chat)))

    def joined(chunks: list[AnswerChunk]) -> tuple[object, ...]:
        (reason,) = [chunk.reason for chunk in chunks if chunk.reason]
        (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
        entries = sum((chunk.logprobs for chunk in chunks), ())
        return "".join(c.text for c in chunks), "".join(c.reasoning for c in chunks), entries, reason, usage

    assert joined(read) == joined([whole])
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == count_prompt_tokens(request)
    assert whole.usage.completion_tokens == len(whole.logprobs)


def test_ids_of_the_fakes_tokens_do_not_change() -> None:
    """Recorded answers and routers' features rest on them."""
    assert [token_id(token) for token in ("hello", " b", "🦊")] == [0xA686, 0x3629, 0x4727]
    assert count_prompt_tokens(GenerateRequest("r", messages=(Message("user", ""),))) == 1


# --- comparisons -----------------------------------------------------------------------------------------------------


def test_accuracy_is_summed_by_every_cell() -> None:
    tasks = list(generate(3, 60, split="test"))
    graded = [(place % 3 > 0, place, "text") for place in range(60)]
    found = summarise(tasks, graded)
    assert found["mean_tokens"] == 29.5
    assert found["accuracy"]["all"] == [pytest.approx(2 / 3, abs=1e-4), 60]
    for prefix in ("grade ", ""):
        cells = [
            (share, count)
            for name, (share, count) in found["accuracy"].items()
            if (name.startswith(prefix) if prefix else name in {task.family for task in tasks})
        ]
        assert sum(count for _, count in cells) == 60
        assert sum(round(share * count) for share, count in cells) == 40


def test_the_benchs_table_subtracts_short_streams_from_long(capsys: pytest.CaptureFixture[str]) -> None:
    costs = [TransportCost("x", 1, 1, 0.5), TransportCost("x", 1, 50, 2.95), TransportCost("y", 32, 1, 1.0)]
    report([*costs, TransportCost("y", 32, 50, 1.0)])
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["x", "1", "0.500", "2.950", "50.0"]
    assert second.split() == ["y", "32", "1.000", "1.000", "0.0"]


# --- servers that are not ours ---------------------------------------------------------------------------------------


def test_a_port_that_is_free_can_be_taken() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert free_port() != port


def test_a_server_that_does_not_come_up_shows_the_end_of_its_output(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('x' * 5000 + ' no model: ' + sys.argv[4])\n")
    broken.chmod(0o755)
    with (
        pytest.raises(PeerStartError, match=r"no model: tier9\.gguf") as caught,
        llama_cpp_server(Path("tier9.gguf"), python=str(broken)),
    ):
        raise AssertionError("it came up")
    assert len(str(caught.value)) < 4000
