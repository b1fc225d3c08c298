"""Answers under a grammar: valid whatever else is asked for, and the same whatever the engine does meanwhile."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from engine.config import EngineConfig
from engine.drafter import Drafter, ModelDrafter, NGramDrafter
from engine.engine import Engine, Result, collect
from engine.errors import GrammarTooLarge, InvalidRequest, UnsupportedGrammar
from engine.grammar import GrammarCompiler, GrammarSpec
from engine.kv_cache import KVCache
from engine.request import Constraint, FinishReason, Prediction, Request, SamplingParams, ThinkingBudget
from engine.sink import QueueSink
from engine.speculator import Speculator
from engine.stop_strings import StopAutomaton
from engine.text_stream import TextStream
from tests.engine.grammars import compiler, constraint, tokenizer, toy
from tests.engine.toy import ToyModel

CONFIG = EngineConfig(block_size=4, num_blocks=400, max_num_seqs=6, max_batch_tokens=64)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}


def serve(
    model: ToyModel,
    requests: Seq[Request],
    config: EngineConfig = CONFIG,
    drafter: Drafter | None = None,
    k: int = 4,
) -> list[Result]:
    speculator = None if drafter is None else Speculator(drafter, max_draft_tokens=k, adaptive=False)
    engine = Engine(model, config, start=False, speculator=speculator, eos_token_ids=tokenizer().eos_token_ids)
    sinks = [QueueSink() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        engine.submit(request, sink)
    while engine.has_work():
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_owned == 0
    return [collect(sink, 1.0) for sink in sinks]


def request(
    of: Constraint | None, sampling: SamplingParams | None = None, prompt: Seq[int] = (5, 6), **options: Any
) -> Request:
    return Request("r", tuple(prompt), sampling or greedy(), constraint=of, **options)


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 160, **options})


def drawn(seed: int | None, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 160, **options})


def text_of(result: Result) -> str:
    return tokenizer().decode(result.token_ids)


def is_whole(result: Result) -> bool:
    return result.ending.reason is FinishReason.STOP


# Valid

scalars = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -20, "maximum": 300},
        {"type": "string", "maxLength": 9},
        {"type": "string", "pattern": "^[a-c]{2,5}$"},
        {"enum": ["x", 1, None, "two words", 2.5]},
        {"const": {"a": [1]}},
        {"type": "string", "format": "date"},
    ]
)
names = st.text('abcdefgh "\\é', min_size=1, max_size=6)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(names, inner, max_size=4).flatmap(
        lambda properties: (
            st.lists(st.sampled_from(sorted(properties)), unique=True).map(
                lambda required: {
                    "type": "object",
                    "properties": properties,
                    "required": required,
                    "additionalProperties": False,
                }
            )
            if properties
            else st.just({"type": "object", "additionalProperties": False})
        )
    )


schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(lambda choices: {"anyOf": choices}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


@given(schemas, st.integers(0, 50))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_whole_answer_satisfies_its_schema(schema: Any, seed: int) -> None:
    result = serve(toy(seed), [request(constraint("json_schema", schema), drawn(seed))])[0]
    # Some models would count, or write blanks, until there is no more room.
    assume(is_whole(result))
    jsonschema.Draft202012Validator(schema).validate(json.loads(text_of(result)))


@given(
    st.sampled_from(["(ab|c)+[0-9]{3}", "[^x]{5,9}", "[0-9]{4}-[0-9]{2}", "é?日本(語)*", "(foo|bar|baz qux)!"]),
    st.integers(0, 50),
)
@settings(max_examples=30, deadline=None)
def test_every_whole_answer_matches_its_expression(pattern: str, seed: int) -> None:
    result = serve(toy(seed), [request(constraint("regex", pattern), drawn(seed))])[0]
    assume(is_whole(result))
    assert re.fullmatch(pattern, text_of(result))


@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=6), st.integers(0, 50))
@settings(max_examples=30, deadline=None)
def test_every_answer_is_one_of_its_choices(choices: list[str], seed: int) -> None:
    result = serve(toy(seed), [request(constraint("choice", choices), drawn(seed))])[0]
    assert is_whole(result)
    assert text_of(result) in choices


def test_every_answer_is_of_its_grammar() -> None:
    lark = 'start: expr\nexpr: term (("+" | "-") term)*\nterm: NUMBER | "(" expr ")"\nNUMBER: /[0-9]{1,3}/'
    whole = 0
    for seed in range(12):
        result = serve(toy(seed), [request(constraint("lark", lark), drawn(seed))])[0]
        if is_whole(result):
            whole += 1
            text = text_of(result)
            assert re.fullmatch(r"[0-9+()\-]+", text)
            ast.parse(re.sub(r"\b0+(?=\d)", "", text), mode="eval")
    assert whole


def test_any_object_will_do_where_only_that_is_asked_for() -> None:
    whole = [
        text_of(result)
        for seed in range(12)
        if is_whole(
            result := serve(toy(seed), [request(constraint("json_schema", {"type": "object"}), drawn(seed))])[0]
        )
    ]
    assert whole
    assert all(isinstance(json.loads(text), dict) for text in whole)


# The same whatever happens


def variants() -> list[Request]:
    """Requests with and without grammars, drawn in every way, of prompts that share a beginning."""
    person, choice = constraint("json_schema", PERSON), constraint("choice", ["yes", "no", "perhaps not"])
    shared = tuple(range(5, 25))
    return [
        request(person, greedy(logprobs=3), shared),
        request(None, greedy(max_tokens=40, ignore_eos=True), shared),
        request(person, drawn(3, top_p=0.9, top_k=40), (*shared, 7)),
        request(choice, drawn(4, logprobs=0), (*shared, 8)),
        request(None, drawn(5, max_tokens=40), (*shared, 9)),
        request(person, drawn(6, repetition_penalty=1.3, presence_penalty=0.5, min_p=0.01), (9, 8, 7)),
        request(person, greedy(logit_bias={40: 3.0}, min_tokens=9), (4, 4, 4)),
        request(constraint("regex", "[a-f]{30,60}"), greedy(max_tokens=25), (1, 2)),
    ]


def same(results: Seq[Result], others: Seq[Result]) -> None:
    for result, other in zip(results, others, strict=True):
        assert result.token_ids == other.token_ids
        assert result.ending.reason == other.ending.reason
        assert [each.token_id for each in result.logprobs] == [each.token_id for each in other.logprobs]
        for mine, theirs in zip(result.logprobs, other.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        EngineConfig(block_size=4, num_blocks=400, max_num_seqs=6, max_batch_tokens=7),
        EngineConfig(block_size=4, num_blocks=47, max_num_seqs=6, max_batch_tokens=64),
        EngineConfig(block_size=4, num_blocks=400, max_num_seqs=6, max_batch_tokens=64, asynchronous=True),
        EngineConfig(block_size=4, num_blocks=47, max_num_seqs=6, max_batch_tokens=9, asynchronous=True),
    ],
    ids=["crowd", "chunked", "preempted", "asynchronous", "all"],
)
def test_a_crowd_changes_nothing(config: EngineConfig, seed: int) -> None:
    model = toy(seed)
    alone = [serve(model, [each])[0] for each in variants()]
    crowd = serve(model, variants(), config)
    same(crowd, alone)
    if config.num_blocks == 47:
        assert sum(result.ending.num_preemptions for result in crowd)


def test_a_prefix_hit_changes_nothing() -> None:
    engine = Engine(toy(), CONFIG, start=False, eos_token_ids=tokenizer().eos_token_ids)
    results = []
    for _ in range(2):
        sink = QueueSink()
        engine.submit(request(constraint("json_schema", PERSON), prompt=range(5, 25)), sink)
        while engine.has_work():
            engine.step()
        results.append(collect(sink, 1.0))
    assert results[0].token_ids == results[1].token_ids
    assert (results[0].ending.num_cached_tokens, results[1].ending.num_cached_tokens) == (0, 16)


def drafter(kind: str, seed: int) -> Drafter:
    if kind == "ngram":
        return NGramDrafter(longest=3, shortest=1)
    model = toy(seed, blur={"twin": 0.0, "blurred": 2.0}[kind])
    cache = KVCache(model.config, 400, 4)
    return ModelDrafter(model, cache, vocab_size=tokenizer().vocab_size, max_batch_tokens=64)


@pytest.mark.parametrize("kind", ["twin", "blurred", "ngram"])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_change_nothing(kind: str, seed: int) -> None:
    model = toy(seed)
    for k in (1, 4):
        drafted = serve(model, variants(), drafter=drafter(kind, seed), k=k)
        same(drafted, serve(model, variants()))
        assert sum(result.ending.num_accepted_tokens for result in drafted)


class OneDraft:
    """Proposes the same tokens always, as if drawn from a distribution."""

    def __init__(self, token_ids: list[int], probs: Any = None) -> None:
        self.token_ids, self.probs = token_ids, probs

    def propose(self, sequences: list[Any], counts: list[int]) -> int:
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.draft_ids, sequence.draft_probs = self.token_ids[:count], None
        return 0

    def release(self, sequence: Any) -> None:
        pass


def test_drafts_that_the_grammar_does_not_allow_are_not_checked() -> None:
    yes, x = tokenizer().encode_plain("y"), tokenizer().encode_plain("x")
    of = constraint("regex", "z[xy]{20}")
    result = serve(toy(), [request(of)], drafter=OneDraft([*yes, *x, *tokenizer().eos_token_ids, *yes]))[0]
    assert is_whole(result)
    # Of each draft "xy" at most was ever checked.
    assert result.ending.num_draft_tokens <= 2 * len(result.token_ids)
    same([result], serve(toy(), [request(of)]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["twin", "blurred", "unconstrained"])
def test_drafts_leave_the_distribution_as_it_is(kind: str) -> None:
    """Without a seed, drafts are judged by rejection; a drafter on a GPU does not know the grammar."""
    of, count = constraint("regex", "[a-e]{3}"), 3000
    sampling = SamplingParams(temperature=1.5, max_tokens=10)
    config = EngineConfig(block_size=4, num_blocks=4000, max_num_seqs=100, max_batch_tokens=2000, max_waiting=4000)
    requests = [request(of, sampling, (3, 1, 4)) for _ in range(count)]
    chosen = drafter("blurred" if kind == "unconstrained" else kind, 1)
    if kind == "unconstrained":
        assert isinstance(chosen, ModelDrafter)
        _forget_grammars(chosen)
    plain, drafted = (
        Counter(text_of(result) for result in serve(toy(1), requests, config, each)) for each in (None, chosen)
    )
    often = [text for text, seen in (plain + drafted).items() if seen >= 20]
    rest = [text for text in plain + drafted if text not in often]
    table = [[*(each[text] for text in often), sum(each[text] for text in rest)] for each in (plain, drafted)]
    columns = [i for i in range(len(table[0])) if table[0][i] + table[1][i]]
    assert len(columns) > 3
    assert stats.chi2_contingency([[row[i] for i in columns] for row in table]).pvalue > 1e-3


def _forget_grammars(drafter: ModelDrafter) -> None:
    propose = drafter.propose

    def without(sequences: list[Any], counts: list[int]) -> int:
        held = [sequence.grammar for sequence in sequences]
        for sequence in sequences:
            sequence.grammar = None
        passes = propose(sequences, counts)
        for sequence, grammar in zip(sequences, held, strict=True):
            sequence.grammar = grammar
        return passes

    drafter.propose = without  # type: ignore[method-assign]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_prediction_changes_nothing_but_the_speed(share: float) -> None:
    model, of = toy(), constraint("json_schema", PERSON)
    plain = serve(model, [request(of)])[0]
    right = plain.token_ids[: int(share * len(plain.token_ids))]
    predicted = (*right, *tokenizer().encode_plain("]]]] no JSON ]]]]"))
    result = serve(model, [request(of, prediction=Prediction(tuple(predicted)))])[0]
    same([result], [plain])
    assert result.ending.num_accepted_predicted_tokens >= len(right)


# Beside the other options


def test_log_probabilities_are_of_what_the_grammar_leaves() -> None:
    result = serve(toy(), [request(constraint("choice", ["a", "b", "c"]), greedy(logprobs=20))])[0]
    first = result.logprobs[0]
    assert len(first.top) == 3
    assert sum(2.718281828**logprob for _, logprob in first.top) == pytest.approx(1.0)
    assert first.rank == 0


def test_running_out_of_room_is_an_ending_by_length() -> None:
    result = serve(toy(), [request(constraint("regex", "[ab]{50}"), greedy(max_tokens=7))])[0]
    assert result.ending.reason is FinishReason.LENGTH
    assert len(result.token_ids) == 7


def test_a_whole_answer_goes_before_the_least_length_and_without_an_end_token() -> None:
    for options in ({"min_tokens": 50}, {"ignore_eos": True}, {"min_tokens": 50, "ignore_eos": True}):
        result = serve(toy(), [request(constraint("choice", ["yes"]), greedy(**options))])[0]
        assert text_of(result) == "yes"
        assert is_whole(result)
        assert not set(result.token_ids) & set(tokenizer().eos_token_ids)


def test_the_least_length_holds_where_the_grammar_lets_it() -> None:
    for seed in range(5):
        sampling = drawn(seed, min_tokens=15, max_tokens=40)
        result = serve(toy(seed), [request(constraint("regex", "[a-z ]*"), sampling)])[0]
        assert len(result.token_ids) > 15
        result = serve(
            toy(seed), [request(constraint("regex", "[a-z ]*"), drawn(seed, ignore_eos=True, max_tokens=40))]
        )[0]
        assert len(result.token_ids) == 40


def test_stop_strings_end_an_answer_before_its_grammar_does() -> None:
    of = constraint("regex", "ab[cd]{30}")
    stop = TextStream(tokenizer().bytes, stop=StopAutomaton(("b",)))
    result = serve(toy(), [request(of, stop_check=stop)])[0]
    assert is_whole(result)
    assert "b" in text_of(result)[:4]
    assert len(text_of(result)) < 8


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [None, "blurred"])
def test_the_grammar_begins_after_the_reasoning(kind: str | None, seed: int) -> None:
    tags = tokenizer().think_tags
    assert tags is not None
    budget = ThinkingBudget(tags.close_id, tuple(tokenizer().encode("\n</think>\n\n", add_special_tokens=False)), 20)
    of = constraint("json_schema", PERSON, close_id=tags.close_id, in_reasoning=True)
    asked = request(of, drawn(seed, max_tokens=400), (*range(5, 10), tags.open_id), thinking=budget)
    result = serve(toy(seed), [asked], drafter=None if kind is None else drafter(kind, seed))[0]
    text = TextStream(tokenizer().bytes, tags=tags, thinking=True, stop_ids=frozenset(tokenizer().eos_token_ids))
    for token in result.token_ids:
        text.push(token)
    text.finish()
    reasoning, answer = text.take()
    assert reasoning
    assert is_whole(result)
    jsonschema.validate(json.loads(answer), PERSON)


# What goes wrong


def test_a_grammar_of_another_model_is_refused() -> None:
    other = GrammarCompiler(tokenizer(), tokenizer().vocab_size + 1, tokenizer().eos_token_ids)
    of = Constraint(other.compile(GrammarSpec("regex", "a")))
    with pytest.raises(InvalidRequest, match="compiled for"):
        Engine(toy(), CONFIG, start=False).submit(request(of), QueueSink())


def test_a_grammar_that_grows_too_complex_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.grammar_cursor._MOST_EXCESS_S", -1.0)
    engine = Engine(toy(), CONFIG, start=False, eos_token_ids=tokenizer().eos_token_ids)
    bad, good = QueueSink(), QueueSink()
    engine.submit(request(constraint("regex", "[ab]{9}")), bad)
    engine.submit(request(None, greedy(max_tokens=9, ignore_eos=True)), good)
    while engine.has_work():
        engine.step()
    with pytest.raises(GrammarTooLarge):
        collect(bad, 1.0)
    assert len(collect(good, 1.0).token_ids) == 9
    assert engine.scheduler.pool.num_owned == 0


async def test_leaving_in_the_middle_frees_everything() -> None:
    engine = Engine(toy(), CONFIG, eos_token_ids=tokenizer().eos_token_ids)
    try:
        stream = engine.stream(request(constraint("regex", "[ab]{400}"), greedy(max_tokens=800)))
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(10):
            while engine.scheduler.pool.num_owned or engine.has_work():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert not engine.core.live
    finally:
        engine.close()


def test_nothing_of_a_refused_grammar_is_kept() -> None:
    spec = GrammarSpec("json_schema", '{"not": {}}')
    for _ in range(2):
        with pytest.raises(UnsupportedGrammar):
            compiler().compile(spec)
    assert compiler().kept(spec) is None
