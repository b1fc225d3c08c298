"""Tool formats: what a model writes is parsed alike wherever it is cut, and its grammar permits just that."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from backends.local_engine.tool_formats.call_parser import CallParser, Piece
from backends.local_engine.tool_formats.grammar_writer import GrammarWriter, without_notes
from backends.local_engine.tool_formats.registry import FORMATS
from backends.local_engine.tool_formats.tool_format import ToolFormat
from backends.protocol import Tool, ToolCall, ToolCallDelta, join_calls
from tests.engine import texts
from tests.shared_data import shared_data

BY_NAME = {each.name: each for each in FORMATS}
NAMES = sorted(BY_NAME)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "places": {"type": "array", "items": {"type": "number"}},
        "more": {"type": "object"},
        "none": {"type": ["null", "integer"]},
    },
    "required": ["city"],
}
TOOLS = (Tool("forecast", "Weather.", SCHEMA), Tool("now"))
# A format's own tags inside a value would end it; nobody could tell.
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda text: not any(tag in text for tag in ("<", ">", "[TOOL", "|"))
)
arguments = st.fixed_dictionaries(
    {"city": words},
    optional={
        "days": st.integers(-5, 10**9),
        "exact": st.booleans(),
        "places": st.lists(st.floats(-9, 9), max_size=3),
        "more": st.dictionaries(words, words, max_size=2),
        "none": st.none() | st.integers(0, 3),
    },
)
calls = st.lists(
    st.builds(lambda given: ToolCall("", "forecast", json.dumps(given, ensure_ascii=False)), arguments)
    | st.just(ToolCall("", "now", "{}")),
    min_size=1,
    max_size=3,
)
spoken = words.map(lambda text: text.replace("{", "").strip())


def events(pieces: Sequence[Piece]) -> tuple[str, list[tuple[str, str]]]:
    text = "".join([each for each in pieces if isinstance(each, str)])
    made = join_calls([each for each in pieces if isinstance(each, ToolCallDelta)])
    return text, [(each.name, each.arguments) for each in made]


def parse(parser: CallParser, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    for piece in pieces:
        parser.text(piece)
    parser.finish()
    return events(parser.take())


def by_bytes(text: str) -> list[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    return [decoder.decode(bytes([byte])) for byte in text.encode()]


def assert_cuts_do_not_matter(form: ToolFormat, tools: Sequence[Tool], text: str, whole: Any) -> int:
    """Feed the text byte by byte, and cut in two at every byte; return how many cuts there were."""
    before = form.parser(tools, ())
    pieces = by_bytes(text)
    for place, piece in enumerate(pieces):
        after = form.parser(tools, ())
        assert parse(after, ["".join(pieces[:place]), "".join(pieces[place:])]) == whole, (text, place)
        before.text(piece)
    before.finish()
    assert events(before.take()) == whole
    return len(pieces)


@pytest.mark.parametrize("name", NAMES)
@given(before=spoken, made=calls)
@settings(max_examples=15, deadline=None)
def test_what_is_written_is_read_wherever_it_is_cut(name: str, before: str, made: list[ToolCall]) -> None:
    form = BY_NAME[name]
    # Llama 3 either speaks or calls.
    before = "" if name == "llama3_json" else before
    text = f"{before}\n{form.write(made)}" if before else form.write(made)
    whole = parse(form.parser(TOOLS, ()), [text])
    assert whole[0] == before
    assert [(called, json.loads(given)) for called, given in whole[1]] == [
        (c.name, json.loads(c.arguments)) for c in made
    ]
    assert_cuts_do_not_matter(form, TOOLS, text, whole)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_damaged_calls_are_read_alike_and_raise_nothing(name: str, data: Any) -> None:
    form = BY_NAME[name]
    text = form.write(data.draw(calls))
    place = data.draw(st.integers(0, len(text)))
    text = (
        text[:place]
        + data.draw(st.sampled_from(["", "}", '"', "<", "x", "[", "\n", ",", "</tool_call>"]))
        + text[place + 1 :]
    )
    assert_cuts_do_not_matter(form, TOOLS, text, parse(form.parser(TOOLS, ()), [text]))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>\nno call\n</tool_call>"),
        ("hermes", 'see <tool_call>{"name": 5}</tool_call>'),
        ("hermes", 'a <tool_call>\n{"name": "now", '),
        ("llama3_json", '{"name": "unknown", "parameters": {}}'),
        ("llama3_json", '{"city": "Kiel"}'),
        ("mistral", '[TOOL_CALLS] [{"nam": 1}]'),
        ("mistral", "[TOOL_CALLS]what is this"),
        ("qwen3_coder", "<tool_call>\n<func=now>\n</tool_call>"),
    ],
)
def test_what_is_no_call_is_given_as_text(name: str, text: str) -> None:
    assert parse(BY_NAME[name].parser(TOOLS, ()), [text]) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "made"),
    [
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [("now", "{}")]),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [("now", "{}")]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', [("now", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}', [("now", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "</tool_call>', [("now", '{"a": "</tool_call>')]),
        (
            "mistral",
            '[TOOL_CALLS]now[ARGS]{"a": 1}[TOOL_CALLS]now[CALL_ID]x9[ARGS]{}',
            [("now", '{"a": 1}'), ("now", "{}")],
        ),
        ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', [("now", "{}")]),
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [("now", "{}")]),
        (
            "qwen3_coder",
            "<tool_call><function=forecast><parameter=city>\n\na\n\n</parameter><parameter=exact>True</parameter></tool_call>",
            [("forecast", '{"city": "\\na\\n", "exact": true}')],
        ),
    ],
)
def test_forms_that_models_are_fond_of(name: str, text: str, made: list[tuple[str, str]]) -> None:
    form = BY_NAME[name]
    whole = parse(form.parser(TOOLS, ()), [text])
    assert whole == ("", made)
    assert_cuts_do_not_matter(form, TOOLS, text, whole)


def test_a_call_that_is_cut_off_stays_so() -> None:
    made = parse(BY_NAME["hermes"].parser(TOOLS, ()), ['<tool_call>{"name": "forecast", "arguments": {"city": "Ki'])
    assert made == ("", [("forecast", '{"city": "Ki')])


def test_markers_are_told_by_their_ids() -> None:
    parser = BY_NAME["hermes"].parser(TOOLS, ("<tool_call>", "</tool_call>"))
    parser.text("the tag <tool_call> is a word ")
    parser.marker("<tool_call>")
    parser.text('{"name": "forecast", "arguments": {"city": "</tool_call>"}}\n')
    parser.marker("</tool_call>")
    parser.finish()
    assert events(parser.take()) == ("the tag <tool_call> is a word", [("forecast", '{"city": "</tool_call>"}')])


KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def is_readable(answer: str) -> bool:
    try:
        said = [text for call in json.loads(answer) for text in call.values()]
        return bool(said) and all(isinstance(json.loads(text), dict) for text in said)
    except (TypeError, ValueError):
        return False


@pytest.mark.parametrize("every", [100, pytest.param(1, marks=pytest.mark.slow)])
def test_recorded_calls_are_read_as_they_were_written(every: int) -> None:
    """XML tells no types, so tools have those of the values."""
    rows = pq.read_table(shared_data("bfcl") / "answers.parquet").to_pylist()
    for row in [each for each in rows if each["mode"] == "calls"][::every]:
        # Three of them are empty, or their arguments are no JSON.
        if not is_readable(row["answer"]):
            continue
        made = [(name, json.loads(said)) for call in json.loads(row["answer"]) for name, said in call.items()]
        types: dict[str, dict[str, set[str]]] = {name: {} for name, _ in made}
        for name, values in made:
            for key, value in values.items():
                types[name].setdefault(key, set()).add(KINDS.get(type(value), "null"))
        tools = [
            Tool(name, "", {"properties": {key: {"type": sorted(kinds)} for key, kinds in found.items()}})
            for name, found in types.items()
        ]
        for form in FORMATS:
            text = form.write([ToolCall("", name, json.dumps(given, ensure_ascii=False)) for name, given in made])
            whole = parse(form.parser(tools, ()), [text])
            assert whole[0] == ""
            assert [(name, json.loads(given)) for name, given in whole[1]] == made
            assert parse(form.parser(tools, ()), by_bytes(text)) == whole


# Grammars


def tokenizer(markers: Sequence[str]) -> Any:
    raw = texts.byte_level(600)
    raw.add_tokens([AddedToken(each, special=False, normalized=False) for each in markers])
    return raw


def permits(raw: Any, grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer(raw.to_str(), eos_token=[raw.token_to_id("<|im_end|>")]), grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = raw.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def both() -> list[Any]:
    kinds = {"tokens": True, "text": False}
    return [pytest.param(name, own, id=f"{name}-{kind}") for name in NAMES for kind, own in kinds.items()]


@pytest.mark.parametrize(("name", "has_tokens"), both())
def test_a_grammar_permits_calls_that_satisfy_the_schema_and_no_others(name: str, has_tokens: bool) -> None:
    form = BY_NAME[name]
    raw = tokenizer(form.markers if has_tokens else ())
    ids = {marker: raw.token_to_id(marker) for marker in form.markers} if has_tokens else {}

    def grammar(*, parallel: bool = True, **options: Any) -> str:
        return form.grammar(TOOLS, GrammarWriter(ids, **options), parallel=parallel)

    def written(*made: ToolCall) -> str:
        if name == "mistral" and has_tokens:
            return "".join([f"[TOOL_CALLS]{call.name}[ARGS]{call.arguments}" for call in made])
        return form.write(made)

    good = ToolCall("", "forecast", '{"city": "Kiel", "days": 3}')
    other = ToolCall("", "now", "{}")
    assert permits(raw, grammar(), written(good))
    assert permits(raw, grammar(), written(good, other))
    assert not permits(raw, grammar(parallel=False), written(good, other))
    assert permits(raw, grammar(), "Some words, and no call.")
    assert not permits(raw, grammar(required=True), "Some words, and no call.")
    assert permits(raw, grammar(required=True), written(other))
    for wrong in (("nowhere", "{}"), ("forecast", '{"days": 3}'), ("forecast", '{"city": "Kiel", "days": "x"}')):
        assert not permits(raw, grammar(), written(ToolCall("", *wrong)))
    if name != "qwen3_coder":
        assert permits(raw, grammar(with_schemas=False), written(ToolCall("", "forecast", '{"city": 1}')))


def test_notes_are_left_out_of_a_schema_and_parameters_are_not() -> None:
    schema = {"description": "x", "properties": {"title": {"type": "string", "title": "T"}}, "enum": [{"title": 1}]}
    assert without_notes(schema) == {"properties": {"title": {"type": "string"}}, "enum": [{"title": 1}]}
