"""Compiling: what cannot be enforced is named, what is too large is refused in bounded time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import GrammarError, GrammarTooLarge, InvalidGrammar, UnsupportedGrammar
from engine.grammar import GrammarCompiler, GrammarSpec
from engine.grammar_cursor import GrammarCursor
from engine.request import Constraint
from engine.tokenizer import Tokenizer
from tests.engine import texts
from tests.engine.grammars import compiled, compiler, constraint, tokenizer


def schema(given: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(given))


def allowed(cursor: GrammarCursor, *before: int) -> set[int]:
    masks = np.zeros((1, cursor.num_words), dtype=np.int32)
    cursor.fill(masks, before)
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")[: tokenizer().vocab_size]
    return set(np.nonzero(bits)[0].tolist())


def ids(text: str) -> list[int]:
    return tokenizer().encode_plain(text)


@pytest.mark.parametrize(
    ("given", "keyword"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"oneOf": [{"type": "string"}, {"minLength": 3}]}, "oneOf"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"if": {"type": "string"}, "then": {"minLength": 1}}}}, "if"),
        ({"type": "string", "format": "postcode"}, "format: postcode"),
        ({"$ref": "https://example.com/schema"}, "$ref to another document"),
        ({"$ref": "file:///etc/passwd"}, "$ref to another document"),
    ],
)
def test_what_cannot_be_enforced_is_named(given: Any, keyword: str) -> None:
    with pytest.raises(UnsupportedGrammar) as refused:
        compiler().compile(schema(given))
    assert refused.value.keyword == keyword
    assert repr(keyword) in str(refused.value)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("json_schema", "{"),
        GrammarSpec("json_schema", "5"),
        GrammarSpec("json_schema", '{"type": "nope"}'),
        GrammarSpec("json_schema", '{"minLength": "x"}'),
        GrammarSpec("json_schema", '{"$ref": "#/definitions/missing"}'),
        GrammarSpec("json_schema", '{"type": "integer", "minimum": 2, "maximum": 1}'),
        GrammarSpec("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
        GrammarSpec("json_schema", '{"$ref": "#"}'),
        GrammarSpec("json_schema", "true"),
        GrammarSpec("json_schema", '{"const": "\\ud83d"}'),
        GrammarSpec("regex", "\ud83d"),
        GrammarSpec("choice", '["\\ud83d"]'),
        GrammarSpec("regex", "("),
        GrammarSpec("regex", "(?=a)b"),
        GrammarSpec("regex", r"(a)\1"),
        GrammarSpec("choice", "[]"),
        GrammarSpec("choice", '["a", 5]'),
        GrammarSpec("choice", '["a", ""]'),
        GrammarSpec("lark", "start: missing"),
        GrammarSpec("lark", "not a grammar"),
        GrammarSpec("lark", ""),
    ],
)
def test_what_is_malformed_or_unsatisfiable_is_invalid(spec: GrammarSpec) -> None:
    with pytest.raises(InvalidGrammar) as refused:
        compiler().compile(spec)
    assert str(refused.value).endswith(".")
    assert "non-verbose" not in str(refused.value)


def nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


BOMBS = {
    "keywords": schema({"properties": {f"k{i}": {"type": "integer"} for i in range(10_000)}}),
    "length": GrammarSpec("json_schema", json.dumps({"description": "x" * 300_000})),
    "depth": GrammarSpec("json_schema", nested(5_000)),
    "brackets": GrammarSpec("json_schema", "[" * 200_000),
    "alternatives": schema(
        {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {"type": "integer"}}} for j in range(4)]} for i in range(9)]}
    ),
    "multiple": schema({"type": "integer", "multipleOf": 10**9 + 7}),
    "repetition": GrammarSpec("regex", "(a{1000}){1000}"),
    "choices": GrammarSpec("choice", json.dumps([f"choice {i}" for i in range(6_000)])),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_is_too_large_is_refused(name: str) -> None:
    with pytest.raises(GrammarTooLarge):
        compiler().compile(BOMBS[name])


@pytest.mark.parametrize(
    "given",
    [
        {"type": "string", "maxLength": 10**9},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 10**6},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}}, "$ref": "#/$defs/a"},
        # 2**20 paths through twenty definitions.
        {
            "$defs": {
                **{f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(20)},
                "a20": {"type": "object"},
            },
            "$ref": "#/$defs/a0",
        },
        {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(1_000)}},
    ],
)
def test_what_only_looks_large_is_compiled(given: Any) -> None:
    compiler().compile(schema(given))


def test_compiling_lets_other_threads_run() -> None:
    """What takes long to compile is done without the interpreter's lock."""
    import threading

    given = schema({"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(1_500)}})
    worker = threading.Thread(target=compiler().compile, args=(given,))
    began_s, gaps, last = time.perf_counter(), [], time.perf_counter()
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    took_s = last - began_s
    # Held throughout, this thread would have had no turn before the end.
    assert len(gaps) > 3
    assert sorted(gaps)[len(gaps) // 2] < took_s / 3


def test_a_compiled_grammar_is_kept_for_its_salt_alone() -> None:
    own = GrammarCompiler(tokenizer(), tokenizer().vocab_size, tokenizer().eos_token_ids)
    spec = GrammarSpec("regex", "ab?")
    assert own.kept(spec, "a") is None
    first = own.compile(spec, "a")
    assert own.compile(spec, "a") is first
    assert own.kept(spec, "b") is None
    assert own.compile(spec, "b") is not first
    for i in range(40):
        own.compile(GrammarSpec("regex", f"x{i}"), "a")
    assert own.kept(spec, "a") is None


def test_a_tokenizer_without_bytes_is_refused(tmp_path: Path) -> None:
    for name, raw in texts.without_bytes().items():
        folder = texts.save(raw, tmp_path / name)
        with pytest.raises(ValueError, match="tokenizer"):
            GrammarCompiler(Tokenizer(folder), 50, (0,))
    with pytest.raises(ValueError, match="ends an answer"):
        GrammarCompiler(tokenizer(), tokenizer().vocab_size, ())


@pytest.mark.parametrize("kind", ["metaspace", "byte_fallback_alone"])
def test_other_tokenizers_spell_what_the_grammar_says(kind: str, tmp_path: Path) -> None:
    raw = getattr(texts, kind)()
    raw.add_special_tokens(["</s>"])
    own = Tokenizer(texts.save(raw, tmp_path, template=None, eos="</s>"))
    spec = GrammarSpec("regex", "[ab ]{4,9}é")
    grammar = GrammarCompiler(own, own.vocab_size + 13, own.eos_token_ids).compile(spec)
    cursor = GrammarCursor(Constraint(grammar))
    written: list[int] = []
    for turn in range(60):
        masks = np.zeros((1, cursor.num_words), dtype=np.int32)
        cursor.fill(masks)
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
        assert not bits[own.vocab_size :].any(), "ids beyond the tokenizer's stand for nothing"
        choices = np.nonzero(bits)[0].tolist()
        written.append(choices[(7 * turn) % len(choices)])
        if cursor.push(written[-1]):
            break
    text = b"".join(own.bytes.of(token) for token in written).decode()
    assert text.endswith("é")
    assert 5 <= len(text) <= 10


def test_a_schema_cannot_loosen_what_is_enforced() -> None:
    for options in ({"lenient": True}, {"coerce_one_of": True}):
        with pytest.raises(UnsupportedGrammar):
            compiler().compile(schema({"x-guidance": options, "not": {}, "oneOf": [{"type": "string"}, {}]}))


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"a":1,"b":[1,2]}', True),
        ('{"a": 1, "b": [1, 2]}', True),
        ('{\n  "a": 1,\n  "b": [\n    1\n  ]\n}', True),
        ('{ "a" : 1 }', True),
        ('{  "a":1}', False),
        ('{\n\n"a":1}', False),
        (' {"a":1}', False),
        ('{"a":1} ', False),
    ],
)
def test_json_is_written_with_few_blanks(text: str, is_allowed: bool) -> None:
    items = {"type": "array", "items": {"type": "integer"}}
    cursor = GrammarCursor(constraint("json_schema", {"type": "object", "properties": {"a": {}, "b": items}}))
    assert (cursor.num_allowed(ids(text)) == len(ids(text))) == is_allowed


# Following an answer


def test_the_end_is_allowed_exactly_where_the_grammar_accepts() -> None:
    eos = set(tokenizer().eos_token_ids)
    assert len(eos) == 2
    cursor = GrammarCursor(constraint("regex", "ab*"))
    assert not allowed(cursor) & eos
    assert not cursor.push(ids("a")[0])
    assert eos <= allowed(cursor)
    ignoring = GrammarCursor(constraint("regex", "ab*"), ignores_eos=True)
    ignoring.push(ids("a")[0])
    assert allowed(ignoring) == allowed(cursor) - eos


def test_an_answer_that_nothing_can_be_added_to_is_complete() -> None:
    cursor = GrammarCursor(constraint("choice", ["yes", "no", "nob"]))
    taken = [cursor.push(token) for token in ids("n") + ids("o")]
    assert taken == [False, False]
    assert cursor.push(ids("b")[0])


def test_looking_ahead_changes_nothing() -> None:
    cursor = GrammarCursor(constraint("regex", "abcd[0-9]+"))
    a, b, c, x = (ids(each)[0] for each in "abcx")
    masks = np.zeros((3, cursor.num_words), dtype=np.int32)
    cursor.fill(masks, [a, b])
    assert allowed(cursor) == {*np.nonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))[0].tolist()}
    assert c in {*np.nonzero(np.unpackbits(masks[2].view(np.uint8), bitorder="little"))[0].tolist()}
    assert cursor.num_allowed([a, b, x, c]) == 2
    # Only rows after what may follow mean anything.
    cursor.fill(masks, [x, b])
    assert not (masks[0] == -1).all()
    assert (masks[1:] == -1).all()
    # Two rows, the first of them after a token that is due.
    cursor.fill(masks[:2], [a, b])
    assert c in {*np.nonzero(np.unpackbits(masks[1].view(np.uint8), bitorder="little"))[0].tolist()}
    assert [cursor.push(token) for token in (a, b, c)] == [False] * 3


def test_reasoning_is_free_but_cannot_end_the_answer() -> None:
    tags, eos = tokenizer().think_tags, set(tokenizer().eos_token_ids)
    assert tags is not None
    a, newline = ids("a")[0], ids("\n")[0]
    cursor = GrammarCursor(constraint("regex", "ab", close_id=tags.close_id, in_reasoning=True))
    everything = set(range(tokenizer().vocab_size))
    assert allowed(cursor) == everything - eos
    assert cursor.num_allowed([newline, tags.close_id, newline, a, a]) == 4
    for token in (newline, a, tags.open_id, tags.close_id):
        assert not cursor.push(token)
    assert newline in allowed(cursor)
    assert not cursor.push(newline)
    answer = allowed(cursor)
    assert a in answer
    assert newline not in answer, "one line break, not any number"
    assert tags.open_id not in answer
    cursor.push(newline, is_forced=True)
    assert allowed(cursor) == answer
    assert [cursor.push(token) for token in (a, ids("b")[0])] == [False, True]


def test_a_model_may_open_its_reasoning_itself() -> None:
    tags = tokenizer().think_tags
    assert tags is not None
    cursor = GrammarCursor(constraint("regex", "ab", open_id=tags.open_id, close_id=tags.close_id))
    a, b = ids("a")[0], ids("b")[0]
    assert allowed(cursor) >= {a, tags.open_id}
    assert b in allowed(cursor, tags.open_id)
    assert tags.open_id not in allowed(cursor, a)
    cursor.push(tags.open_id)
    cursor.push(b)
    cursor.push(tags.close_id)
    assert allowed(cursor) >= {a}
    assert tags.open_id not in allowed(cursor)


def test_what_is_not_allowed_cannot_be_taken() -> None:
    cursor = GrammarCursor(constraint("regex", "ab"))
    with pytest.raises(GrammarTooLarge):
        cursor.push(ids("x")[0])


def test_a_marker_token_begins_the_constrained_part() -> None:
    """Free text, then a call from the marker on, as tool calls need it."""
    grammar = compiled(
        "lark",
        'start: TEXT | TEXT call\nTEXT: /(.|\\n)*/\ncall: <|im_start|> %json {"type": "object", "properties": '
        '{"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}',
    )
    cursor = GrammarCursor(Constraint(grammar))
    marker = tokenizer().encode("<|im_start|>", add_special_tokens=False)[0]
    for token in ids("Let me see."):
        assert not cursor.push(token)
    assert marker in allowed(cursor)
    assert set(tokenizer().eos_token_ids) <= allowed(cursor)
    cursor.push(marker)
    assert allowed(cursor) <= {*ids("{"), *ids('{"')}
    taken = [cursor.push(token) for token in ids('{"a":1')]
    assert not any(taken)
    assert cursor.push(ids("}")[0])


def test_every_error_is_one_of_the_tree() -> None:
    assert all(issubclass(each, GrammarError) for each in (InvalidGrammar, UnsupportedGrammar, GrammarTooLarge))
