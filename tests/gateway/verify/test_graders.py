"""Each grader on pairs made by hand, and what must hold for any texts."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.protocol import Finished, FinishReason, GenerateRequest, Message, Priority, SamplingParams
from backends.testing import EchoBackend, Script
from gateway.answering.request_router import domain_of
from gateway.api.request import InferenceRequest, Prompt, TextPart, Turn, is_text
from gateway.store.verifications import NOTHING, Spent
from gateway.verify.answer_checker import SpendMeter
from gateway.verify.answer_pair import AnswerPair, Grade, TierParty
from gateway.verify.check_costs import priced, priced_ending
from gateway.verify.errors import CombinationUnusable
from gateway.verify.fitting import fit
from gateway.verify.graded_pairs import GradedPair, read_graded, write_graded
from gateway.verify.grader_combination import EvidenceModel, GraderCombination, feature, flat_scores
from gateway.verify.graders import final_answer, overlap
from gateway.verify.graders.embedding import EmbeddingGrader
from gateway.verify.graders.judge import JudgeGrader, expected_points
from gateway.verify.graders.likelihood import LikelihoodGrader, contrast
from gateway.verify.request_codec import pack_prompt, pack_sampling, question_of, unpack_request
from policies.types import Tier

ASKED = Message("user", "How many legs has a spider?")
QUESTION = GenerateRequest("q", messages=(ASKED,), priority=Priority.BACKGROUND)
SMALL = Tier(1, "simple", "small", price_per_input_token_usd=Decimal("0.001"), price_per_compute_hour_usd=Decimal(36))
LARGE = Tier(2, "expert", "large", price_per_request_usd=Decimal("0.5"))


def request_of(prompt: Prompt) -> InferenceRequest:
    return InferenceRequest(model="auto", prompts=(prompt,), sampling=SamplingParams())


words = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=12)
texts = st.text(max_size=60)


def pair(cheap: str, top: str | None, *, small: Any = None, large: Any = None) -> AnswerPair:
    parties = TierParty(SMALL, small or EchoBackend("small")), TierParty(LARGE, large or EchoBackend("large"))
    return AnswerPair(QUESTION, cheap, *parties, top)


@pytest.mark.parametrize(
    ("cheap", "top", "score"),
    [
        ("8", "A spider has 8 legs.", 1.0),
        ("The answer is 8.", "<think>6? no</think>The answer is **8**", 1.0),
        ("6", "A spider has 8 legs.", 0.0),
        ("(B)", "B. because it is so", 1.0),
        ("July 19", "It is August 19.", 0.0),
        ("July 19", "It is July 19.", 1.0),
        ("19", "It is July 19.", 1.0),
        ('{"sum": 129, "max": 60}', '```json\n{"max": 60, "sum": 129}\n```', 1.0),
        ('{"sum": 129, "max": 60}', '{"sum": 131, "max": 60}', 0.0),
        ("", "8", 0.0),
        ("", "<think>never ends", 1.0),
        ("1" * 400, "1" * 400, 1.0),
        (
            "It began in 1998. They wrote on spiders, and later, as all know who read them, on ants too.",
            "8",
            None,
        ),
        ("Spiders are arachnids and those walk on eight legs in four pairs as everyone can see.", "8", None),
    ],
)
def test_final_answers(cheap: str, top: str, score: float | None) -> None:
    grade = final_answer.compare(cheap, top)
    assert (None if grade is None else grade.score) == score


@given(texts, texts)
def test_final_answers_are_symmetric(one: str, other: str) -> None:
    assert final_answer.compare(one, other) == final_answer.compare(other, one)
    same = final_answer.compare(one, one)
    assert same is None or same.score == 1.0


@given(words, words)
def test_the_subsequence_is_as_long_as_the_textbooks(one: list[str], other: list[str]) -> None:
    rows = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            rows[i + 1][j + 1] = rows[i][j] + 1 if a == b else max(rows[i][j + 1], rows[i + 1][j])
    assert overlap.lcs_length(one, other) == rows[-1][-1]


@given(texts, texts)
def test_overlap_is_symmetric_bounded_and_1_for_itself(one: str, other: str) -> None:
    ahead, behind = overlap.compare(one, other), overlap.compare(other, one)
    assert ahead.score == pytest.approx(behind.score)
    assert ahead.details["log_length_ratio"] == pytest.approx(-behind.details["log_length_ratio"])
    assert 0.0 <= ahead.score <= 1.0
    assert overlap.compare(one, one).score == 1.0


async def test_embedding_shows_the_cosine_and_the_seeds_threshold() -> None:
    grader, meter = EmbeddingGrader(), SpendMeter()
    same = await grader.grade(pair("eight legs", "eight legs"), meter)
    other = await grader.grade(pair("eight legs", "no idea at all"), meter)
    assert same is not None
    assert other is not None
    assert same.score == pytest.approx(1.0)
    assert (same.details["above_threshold"], other.details["above_threshold"]) == (1.0, 0.0)
    assert meter.spent.cost_usd > 0
    assert await grader.grade(pair("eight legs", None), meter) is None
    assert await grader.grade(pair("", "x"), meter) is None
    unable = EchoBackend(capabilities=frozenset({"generate"}))
    assert await grader.grade(pair("a", "b", small=unable), meter) is not None
    assert await grader.grade(pair("a", "b", small=unable, large=unable), meter) is None


async def test_likelihood_reads_with_both_tiers_and_writes_with_none() -> None:
    small, large, meter = EchoBackend("small"), EchoBackend("large"), SpendMeter()
    grade = await LikelihoodGrader().grade(pair("eight legs", None, small=small, large=large), meter)
    assert grade is not None
    # Both fakes give a text the same probabilities.
    assert grade.score == 0.0
    assert grade.details["log_num_tokens"] == math.log(2)
    assert small.requests == large.requests == []
    assert meter.spent.cost_usd > Decimal("0.5")
    unable = EchoBackend("large", capabilities=frozenset({"generate"}))
    assert await LikelihoodGrader().grade(pair("eight", None, large=unable), meter) is None
    assert await LikelihoodGrader().grade(pair("", None), meter) is None


def test_the_contrast_is_high_where_only_the_cheap_tier_doubts() -> None:
    doubted = contrast([-0.1, -0.1], [0, 0], [-2.0, -3.0])
    suspect = contrast([-4.0, -0.1], [7, 0], [-0.2, -0.1])
    assert doubted.score > 0 > suspect.score
    assert (suspect.details["agreed"], suspect.details["top_least"]) == (0.5, -4.0)
    assert contrast([-1.0], [0], None).score == -1.0
    assert contrast([-math.inf], [9], [-0.5]).score == pytest.approx(-19.5)


@pytest.mark.parametrize(
    ("says", "score", "gap"),
    [
        (lambda request: "5" if "A:\ncheap" in str(request.messages[0].content) else "1", 1.0, 0.0),
        (lambda request: "1" if "A:\ncheap" in str(request.messages[0].content) else "5", 0.0, 0.0),
        (lambda request: "5", 0.5, 1.0),
    ],
    ids=["prefers the cheap one", "prefers the top one", "prefers the first one"],
)
async def test_the_judge_is_asked_in_both_orders(says: Any, score: float, gap: float) -> None:
    large = EchoBackend("large", lambda request: Script(text=says(request)))
    meter = SpendMeter()
    grade = await JudgeGrader().grade(pair("cheap", "top", large=large), meter)
    assert grade is not None
    assert (grade.score, grade.details["order_gap"]) == (score, gap)
    assert len(large.requests) == 2
    assert {(each.priority, each.sampling.max_tokens) for each in large.requests} == {(Priority.BACKGROUND, 1)}
    assert meter.spent.cost_usd == 1


async def test_the_judge_grades_alone_and_may_have_no_opinion() -> None:
    alone = await JudgeGrader().grade(pair("cheap", None, large=EchoBackend("large", Script(text="4"))), SpendMeter())
    assert alone is not None
    assert alone.score == 0.75
    chatty = EchoBackend("large", Script(text="well"))
    assert await JudgeGrader().grade(pair("cheap", "top", large=chatty), SpendMeter()) is None
    silent = EchoBackend("large", capabilities=frozenset({"generate"}))
    assert await JudgeGrader().grade(pair("cheap", "top", large=silent), SpendMeter()) is None


@given(st.dictionaries(st.sampled_from([*"12345", " 3", "x"]), st.floats(-30, 0), max_size=7))
def test_expected_points_weigh_the_digits(logprobs: dict[str, float]) -> None:
    points = expected_points([(text, 0, logprob) for text, logprob in logprobs.items()])
    assert (points is None) == (not any(text.strip().isdigit() for text in logprobs))
    assert points is None or 0.0 <= points <= 1.0


def test_a_pass_costs_its_device_time_or_its_price() -> None:
    from backends.protocol import Usage

    usage = Usage(prompt_tokens=10, completion_tokens=2)
    cut_off = Finished(FinishReason.CANCELLED, usage, compute_measured=True)
    assert priced_ending(SMALL, cut_off) == Spent(Decimal(0), 0.0)
    assert priced_ending(SMALL, replace(cut_off, compute_measured=False)) == priced(SMALL, usage, 0.0)
    assert priced_ending(LARGE, replace(cut_off, compute_s=5.0)) == priced(LARGE, usage, 5.0)
    assert priced(SMALL, usage, 100.0) == Spent(Decimal(1), 100.0)
    assert priced(SMALL, usage, 0.0) == Spent(Decimal("0.01"), 0.0)
    assert priced(LARGE, usage, 5.0) == Spent(Decimal("0.5"), 5.0)


# ---- together


def grades(equal: float | None, similar: float = 0.5) -> dict[str, Grade]:
    found = {"overlap": Grade(similar, {"log_length_ratio": 0.0})}
    return found if equal is None else found | {"final_answer": Grade(equal)}


def test_the_shipped_combination_believes_final_answers() -> None:
    combination = GraderCombination.load("builtin", portable_only=True)
    said = {equal: combination.combine(grades(equal)) for equal in (1.0, None, 0.0)}
    assert all(each is not None and each[1] == "compare" for each in said.values())
    p_equal, p_open, p_different = (each[0] for each in said.values() if each is not None)
    assert p_equal > 0.9
    assert p_open == p_different < 0.5
    assert combination.combine({}) is None
    assert combination.combine({"embedding": Grade(1.0)}) is None


def test_what_rests_on_other_models_probabilities_is_left_out_elsewhere() -> None:
    assert all(model.is_portable for model in GraderCombination.load("builtin", portable_only=True).models)
    assert not any(
        "likelihood" in model.requires for model in GraderCombination.load("builtin", portable_only=True).models
    )


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": 2, "models": [], "version": "1"}',
        '{"format": 1, "version": "1", "models": [{"name": "x"}]}',
        '{"format": 1, "version": "1", "models": [{"name": "x", "requires": [], "is_portable": true, "bias": 0, '
        '"features": ["overlap"], "weights": []}]}',
        '{"format": 1, "version": "1", "models": [{"name": "x", "requires": [], "is_portable": true, "bias": 0, '
        '"features": [], "weights": [], "x": [1, 1], "y": [0, 1]}]}',
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "c.json"
    with pytest.raises(CombinationUnusable, match=r"c\.json"):
        GraderCombination.load(file)
    file.write_text(content)
    with pytest.raises(CombinationUnusable, match=r"c\.json"):
        GraderCombination.load(file)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 1)), min_size=1, max_size=6), st.floats(-50, 50))
def test_calibrated_probabilities_stay_between_the_knots(knots: list[tuple[float, float]], bias: float) -> None:
    by_place = dict(sorted(knots))
    model = EvidenceModel("m", (), True, (), (), bias, x=tuple(by_place), y=tuple(by_place.values()))
    assert min(model.y) - 1e-9 <= model.probability({}) <= max(model.y) + 1e-9


def test_features_are_read_by_name() -> None:
    known = grades(0.0, 0.25)
    assert feature(known, "final_answer.different") == 1.0
    assert feature(known, "final_answer.equal") == feature(known, "likelihood") == feature({}, "overlap") == 0.0
    assert feature(known, "overlap") == 0.25
    assert feature(known, "open.overlap") == 0.0
    assert feature(grades(None, 0.25), "open.overlap") == 0.25
    assert flat_scores(known) == {"overlap": 0.25, "overlap.log_length_ratio": 0.0, "final_answer": 0.0}


def graded_pairs(num: int) -> list[GradedPair]:
    """Equal final answers are good in 19 of 20 cases, different ones in 1 of 5."""
    pairs = []
    for place in range(num):
        equal = place % 3 != 0
        is_good = place % 20 != 1 if equal else place % 5 == 0
        likely = {"likelihood": Grade(0.1 if is_good else -0.4, {"agreed": 0.9 if is_good else 0.4})}
        pairs.append(GradedPair("ladder", f"g{place // 2}", "simple", "expert", is_good, grades(float(equal)) | likely))
    return pairs


def test_fitting_is_repeatable_and_measures_itself(tmp_path: Path) -> None:
    pairs = graded_pairs(400)
    write_graded(tmp_path / "pairs.jsonl", pairs)
    assert read_graded(tmp_path / "pairs.jsonl") == pairs
    fitted = fit(pairs, seed=3)
    assert fitted == fit(pairs, seed=3)
    by_name = {model["name"]: model for model in fitted["models"]}
    assert list(by_name) == ["compare_and_read", "compare", "read"]
    assert by_name["compare"]["measured"]["ladder"]["auc"] > 0.8
    assert by_name["read"]["measured"]["ladder"]["auc"] == 1.0
    assert by_name["compare"]["measured"]["ladder"]["calibration_error"] < 0.1
    with pytest.raises(ValueError, match="both kinds"):
        fit([pair for pair in pairs if pair.is_good])


# ---- texts


@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), texts), min_size=1, max_size=4),
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        stop=st.lists(texts, max_size=3).map(tuple),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        max_tokens=st.none() | st.integers(1, 9),
        logit_bias=st.just({7: 1.0}),
        logprobs=st.just(5),
    ),
    st.none() | st.booleans(),
)
def test_a_request_comes_back_as_another_tier_can_take_it(
    turns: list[tuple[str, str]], sampling: SamplingParams, thinking: bool | None
) -> None:
    messages = tuple(Message(role, content) for role, content in turns)
    conversation = tuple(Turn(role, (TextPart(content),)) for role, content in turns)
    found = unpack_request("v", pack_prompt(request_of(conversation)), pack_sampling(sampling, thinking))
    assert (found.messages, found.thinking, found.priority) == (messages, thinking, Priority.BACKGROUND)
    assert (found.sampling.temperature, found.sampling.stop) == (sampling.temperature, sampling.stop)
    assert (found.sampling.seed, found.sampling.max_tokens) == (sampling.seed, sampling.max_tokens)
    assert (found.sampling.logit_bias, found.sampling.logprobs) == ({}, None)


def test_texts_of_every_form() -> None:
    plain = unpack_request("v", pack_prompt(request_of("Once upon\ud800")), {})
    assert plain.prompt == "Once upon\N{REPLACEMENT CHARACTER}"
    assert question_of(plain) == plain.prompt
    assert question_of(QUESTION) == ASKED.content
    assert is_text("x")
    assert not is_text((1, 2))
    for broken in ("", "{}", "[1]", "nonsense"):
        with pytest.raises(ValueError):
            unpack_request("v", broken, {})


def test_domains_are_read_off_the_features() -> None:
    assert domain_of({}) == ""
    assert domain_of({"group_reasoning": 9.0}) == ""
    assert domain_of({"group_code": 0.5, "group_math": 1.5}) == "math"
    assert NOTHING + NOTHING == NOTHING
