"""From prompts to a router that routes: over real backends that echo on script, killed half-way, with bad files."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.builtin.tasks.task_generator import generate
from backends.errors import BackendFailure, BackendOverloaded, ContextLengthExceeded
from backends.protocol import Backend, Event, GenerateRequest
from backends.testing import EchoBackend, Script
from classifier.errors import TrainingError
from classifier.router import ArtifactRouter
from gateway.config.settings import Settings, load_settings
from gateway.outcomes import bootstrap
from gateway.outcomes.answer_collection import CollectOptions
from gateway.outcomes.answer_grading import CHECKERS, agreement, final_answer, word_overlap
from gateway.outcomes.bootstrap import FitRequest, builtin_rows, collect_outcomes, fit_outcomes, write_router
from gateway.outcomes.errors import CollectionError, PromptFileError
from gateway.outcomes.prompt_file import PromptRow, read_prompts
from gateway.outcomes.task_split import FITTING_SPLIT, HOLDOUT_SPLIT, draw_split, split_of
from policies.derived_numbers import apply_derived
from policies.routing_decision import decide
from policies.types import RequestFacts, TierEstimate

OPTIONS = CollectOptions(max_tokens=64, concurrency=8)
ABILITY = (1, 2, 3, 5)
"""The hardest grade each scripted tier answers rightly."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = str(tmp_path_factory.mktemp("data"))
    return load_settings(environ={}, overrides={"data_dir": folder})


def scripted_ladder(settings: Settings, num_tasks: int = 400, seed: int = 1) -> dict[str, EchoBackend]:
    """Tiers that know the answers up to a grade and else say nothing of use."""
    tasks = {task.prompt: task for task in draw_split(FITTING_SPLIT, seed, num_tasks)}

    def script_of(ability: int) -> Callable[[GenerateRequest], Script]:
        def script(request: GenerateRequest) -> Script:
            assert request.messages is not None
            task = tasks[request.messages[-1].content]
            text = task.answer if task.grade <= ability else "I do not know"
            return Script(text=text, token_delay_s=None, compute_s=0.001 * ability)

        return script

    return {
        tier.model: EchoBackend(tier.model, script_of(ability))
        for tier, ability in zip(settings.ladder, ABILITY, strict=True)
    }


def task_rows(num_tasks: int) -> list[PromptRow]:
    """The graded tasks alone: the scripted tiers know no small talk."""
    return [row for row in builtin_rows(num_tasks, seed=1) if row.is_judged]


def num_asked(backends: Mapping[str, EchoBackend]) -> int:
    return sum(len(backend.requests) for backend in backends.values())


async def run(
    rows: list[PromptRow], settings: Settings, backends: Mapping[str, Backend], work: Path
) -> bootstrap.Outcomes:
    return await collect_outcomes(rows, settings, backends, work, OPTIONS, window="test")


@pytest.mark.slow
async def test_prompts_become_a_router_that_holds_its_floor(settings: Settings, tmp_path: Path) -> None:
    rows = task_rows(400)
    outcomes = await run(rows, settings, scripted_ladder(settings), tmp_path / "answers.jsonl")
    grades = {task.prompt: task.grade for task in draw_split(FITTING_SPLIT, 1, 400)}
    expected = [[float(grades[row.prompt] <= ability) for ability in ABILITY] for row in outcomes.rows]
    assert outcomes.table.scores.tolist() == expected
    assert outcomes.cost_usd[0].tolist() == [0.0001, 0.0005, 0.003, 0.01]

    artifact = fit_outcomes(outcomes, FitRequest(seed=0))
    path, card = write_router(artifact, tmp_path / "router.npz")
    router = ArtifactRouter.load(path)
    text = card.read_text()
    assert router.version in text
    assert "prompt length alone" in text
    assert artifact.metadata["graded_by"] == {"reference (builtin)": 4 * len(rows)}
    # The scripted tiers' log-probabilities are kept with their answers; those that are never wrong teach nothing.
    assert all(each.num_tokens for found in outcomes.signals.values() for each in found)
    assert router.confidence.tiers
    assert 4 not in router.confidence.tiers
    assert "| tier | answers | AUC |" in text

    # The policy that serves takes its numbers from the artifact; fresh tasks then hold the floor at half the cost.
    wanted = {"policy.exploration_share": 0.0, "policy.quality_floor": 0.95}
    policy = apply_derived(load_settings(environ={}, overrides=wanted).policy, router.decision)
    assert policy.quality_value_usd is not None
    fresh = draw_split(HOLDOUT_SPLIT, 99, 600)
    right, cost = [], []
    for task, found in zip(fresh, router.predict([_request(task.prompt) for task in fresh]), strict=True):
        estimates = tuple(TierEstimate(t.tier, t.p_right, t.p_as_good) for t in found.tiers)
        decision = decide(
            RequestFacts(num_prompt_tokens=20, max_tokens=64, estimates=estimates), policy, settings.ladder, _rng()
        )
        right.append(task.grade <= ABILITY[decision.tier - 1])
        cost.append(float(settings.ladder[decision.tier - 1].price_per_request_usd))
    assert np.mean(right) >= 0.94
    assert np.mean(cost) < 0.5 * 0.01


def _rng() -> Any:
    import random

    return random.Random(0)


def _request(prompt: str) -> Any:
    from classifier.types import RouterRequest

    return RouterRequest(turns=(("user", prompt),))


async def test_a_killed_run_goes_on_where_it_was(settings: Settings, tmp_path: Path) -> None:
    rows, work = task_rows(60), tmp_path / "answers.jsonl"
    backends = scripted_ladder(settings)

    class Killed(Exception):
        pass

    def stop_half_way(tier: int, done: int, total: int) -> None:
        if tier == 3 and done == 25:
            raise Killed

    with pytest.raises(Killed):
        await collect_outcomes(rows, settings, backends, work, OPTIONS, stop_half_way, window="test")
    lines = work.read_bytes().splitlines(keepends=True)
    kept = len(lines) - 1
    assert 60 * 2 + 25 <= kept < 60 * 4
    # The process died while writing: half a line is left, which no reader may trip over or append to.
    work.write_bytes(b"".join(lines) + b'{"key": "half a li')

    again = scripted_ladder(settings)
    outcomes = await run(rows, settings, again, work)
    assert num_asked(again) == 60 * 4 - kept
    assert len(outcomes.rows) == 60
    untouched = scripted_ladder(settings)
    assert (await run(rows, settings, untouched, work)).table.scores.tolist() == outcomes.table.scores.tolist()
    assert num_asked(untouched) == 0
    assert all(json.loads(line) for line in work.read_text().splitlines())


async def test_answers_of_another_ladder_are_not_mixed_in(settings: Settings, tmp_path: Path) -> None:
    rows, work = task_rows(40), tmp_path / "answers.jsonl"
    await run(rows, settings, scripted_ladder(settings), work)
    other = load_settings(environ={}, overrides={"models.builtin-2.path": "builtin:tier1"})
    with pytest.raises(CollectionError, match="another ladder"):
        await run(rows, other, scripted_ladder(settings), work)
    work.write_text("not a record\n")
    with pytest.raises(CollectionError, match="line 1"):
        await run(rows, settings, scripted_ladder(settings), work)


class _Moody(EchoBackend):
    """Fails each prompt in its own way the first time it is asked."""

    def __init__(self, model_id: str, script: Any, moods: Callable[[int], Script | None]) -> None:
        super().__init__(model_id, script)
        self._moods = moods
        self._seen: dict[str, int] = {}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:  # type: ignore[override]
        first = request.request_id not in self._seen
        place = self._seen.setdefault(request.request_id, len(self._seen))
        mood = self._moods(place) if first else None
        source: EchoBackend = EchoBackend(self.model_id, mood) if mood else super()
        async for event in source.generate(request):
            yield event


async def test_transient_failures_are_asked_again(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.outcomes.answer_collection._FIRST_WAIT_S", 0.001)
    backends: dict[str, Backend] = dict(scripted_ladder(settings))
    name = settings.ladder[0].model
    moods = [
        Script(fail_before=BackendOverloaded("busy", retry_after_s=0.001)),
        Script(text="a b c", fail_after=1),
        Script(fail_before=BackendFailure("crashed")),
        None,
    ]
    backends[name] = _Moody(name, scripted_ladder(settings)[name]._script, lambda place: moods[place % 4])
    rows = task_rows(60)
    outcomes = await run(rows, settings, backends, tmp_path / "moody.jsonl")
    calm = await run(rows, settings, scripted_ladder(settings), tmp_path / "calm.jsonl")
    assert outcomes.table.scores.tolist() == calm.table.scores.tolist()


async def test_a_prompt_a_tier_cannot_take_counts_as_wrong_there(settings: Settings, tmp_path: Path) -> None:
    backends: dict[str, Backend] = dict(scripted_ladder(settings))
    name = settings.ladder[0].model
    backends[name] = EchoBackend(name, Script(fail_before=ContextLengthExceeded(9000, 1024)))
    outcomes = await run(task_rows(40), settings, backends, tmp_path / "answers.jsonl")
    assert outcomes.table.scores[:, 0].max() == 0
    assert len(outcomes.rows) == 40


async def test_a_dead_tier_ends_the_run_and_keeps_what_was_answered(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.outcomes.answer_collection._FIRST_WAIT_S", 0.0)
    backends: dict[str, Backend] = dict(scripted_ladder(settings))
    dead = settings.ladder[1].model
    backends[dead] = EchoBackend(dead, Script(fail_before=BackendFailure("no weights")))
    work = tmp_path / "answers.jsonl"
    with pytest.raises(CollectionError, match=r"Tier 2 .* no weights"):
        await run(task_rows(60), settings, backends, work)
    assert len(work.read_text().splitlines()) == 1 + 60
    assert num_asked({dead: backends[settings.ladder[2].model]}) == 0  # type: ignore[dict-item]


async def test_without_references_the_top_tier_is_taken_for_right(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    tasks = draw_split(FITTING_SPLIT, 1, 120)
    file.write_text("".join(json.dumps({"prompt": task.prompt}) + "\n" for task in tasks))
    rows = read_prompts(file)
    outcomes = await run(rows, settings, scripted_ladder(settings), tmp_path / "answers.jsonl")
    assert outcomes.table.label_source == "agreement with the top tier"
    assert (outcomes.table.scores[:, -1] == 1).all()
    grades = {task.prompt: task.grade for task in tasks}
    for column, ability in enumerate(ABILITY[:3]):
        easy = np.array([grades[row.prompt] <= ability for row in outcomes.rows])
        assert outcomes.table.scores[easy, column].mean() == 1
        assert outcomes.table.scores[~easy, column].mean() < 0.3


async def test_too_few_prompts_are_refused(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="at least 30"):
        await run(task_rows(5), settings, scripted_ladder(settings), tmp_path / "answers.jsonl")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: is not JSON"),
        ("[" * 100_000, "line 2: is not JSON"),
        ('"text"', "not an object"),
        ('{"prompt": "a", "answer": "b"}', "unknown fields \\['answer'\\]"),
        ("{}", "exactly one"),
        ('{"prompt": "a", "messages": []}', "exactly one"),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": 3}', "needs a role and text"),
        ('{"messages": {"role": "user"}}', "list"),
        ('{"messages": [{"role": "user", "content": null}]}', "role and text"),
        ('{"prompt": "a", "reference": ["b"]}', "expected text"),
        ('{"prompt": "a", "checker": "vibes"}', "unknown checker 'vibes'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(PromptFileError, match=problem):
        read_prompts(file)


def test_bad_files_and_calls_end_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in (None, b"", b"\xff\xfe\x00"):
        file = tmp_path / "prompts.jsonl"
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        assert bootstrap.main(["--prompts", str(file)]) == 1
        assert "prompts.jsonl" in capsys.readouterr().err
    assert bootstrap.main(["--builtin", "--tasks", "0"]) == 2
    with pytest.raises(SystemExit) as wrong:
        bootstrap.main([])
    assert wrong.value.code == 2


@pytest.mark.slow
def test_what_fits_a_router_and_what_judges_it_never_meet() -> None:
    fitting, judging = draw_split(FITTING_SPLIT, 1, 3000), draw_split(HOLDOUT_SPLIT, 2, 3000)
    problems = [{task.task_id for task in half} for half in (fitting, judging)]
    assert not problems[0] & problems[1]
    assert {split_of(task) for task in fitting} == {FITTING_SPLIT}
    assert draw_split(FITTING_SPLIT, 1, 500) == fitting[:500]
    trained_on = {task.task_id for task in generate(1, 3000, split="train")}
    assert not trained_on & (problems[0] | problems[1])


def test_small_talk_is_learned_but_not_judged() -> None:
    rows = builtin_rows(320, seed=3)
    talk = [row for row in rows if not row.is_judged]
    assert 5 < len(talk) <= 20
    assert all(row.checker == "exact" and row.reference for row in talk)
    assert builtin_rows(320, seed=3) == rows


def test_repeated_prompts_are_run_once(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": "b", "id": 7}\n{"messages": [{"role": "user", "content": "a"}]}\n')
    assert [row.prompt for row in read_prompts(file)] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42", "42"),
        ("The answer is **1,234.50**.", "1234.5"),
        ("First 3 + 4 = 7, then 7 * 2 = 14.", "14"),
        ("<think>maybe 9</think>It is 8", "8"),
        ("<think>never ends", None),
        ("(B) because of the wind", "b"),
        ("Answer: C", "c"),
        ("#### 72", "72"),
        ("So \\boxed{3.0} it is", "3"),
        ("Paris.", "paris"),
        ("Well, there are many ways to look at this, and each of them has merits of its own.", None),
    ],
)
def test_final_answers_are_found(text: str, expected: str | None) -> None:
    assert final_answer(text) == expected


@given(st.text(max_size=80), st.text(max_size=80))
def test_agreement_is_a_share_and_reflexive(one: str, other: str) -> None:
    assert 0 <= agreement(one, other)[0] <= 1
    assert agreement(one, one)[0] == 1
    assert word_overlap(one, other) == word_overlap(other, one)


def test_checkers_tell_right_from_wrong() -> None:
    cases = {
        "final_answer": ("72", "So she sold 72 clips.", "So she sold 71 clips."),
        "exact": ("ABC", " ABC ", "abc"),
        "contains": ("new delhi", "It is New Delhi, of course.", "It is Mumbai."),
        "json": ('{"a": [1, 2]}', '```json\n{"a": [1,2]}\n```', '{"a": [2, 1]}'),
        "builtin": ("19", "The result is 19.", "The result is 20."),
    }
    assert set(cases) == set(CHECKERS)
    for name, (reference, right, wrong) in cases.items():
        assert CHECKERS[name]("What is it?", reference, right), name
        assert not CHECKERS[name]("What is it?", reference, wrong), name
