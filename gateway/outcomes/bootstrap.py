"""The first router: run prompts through every tier, grade, fit, derive, freeze. ``suffice bootstrap``.

Answers are kept as they come, so a killed run goes on where it was; a second run over the same answers only fits. What
is promised to policies (thresholds, price of quality) rests on estimates for rows the estimators had not seen.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from backends.protocol import Backend, Message
from classifier.artifact import RouterArtifact
from classifier.card import render_card
from classifier.confidence import AnswerConfidence, AnswerSignals, fit_confidence
from classifier.embedding import Embedder, SentenceTransformerEmbedder
from classifier.errors import ClassifierError
from classifier.evaluation import JudgedRows, evaluate
from classifier.novelty import novelty_bound
from classifier.options import FitOptions
from classifier.router import BUILTIN
from classifier.training import FittedRouter, fit_router
from gateway.config.settings import Settings, load_settings
from gateway.outcomes.answer_collection import CollectOptions, Progress, collect
from gateway.outcomes.answer_log import AnswerLog
from gateway.outcomes.collection_progress import show_progress
from gateway.outcomes.errors import OutcomeError
from gateway.outcomes.ladder_description import describe_ladder
from gateway.outcomes.outcome_table import Outcomes, grade
from gateway.outcomes.prompt_file import PromptRow, make_row, read_prompts, unique_rows
from gateway.outcomes.task_split import FITTING_SPLIT, draw_split
from policies.derived_numbers import derive_for_floors
from policies.labelled_traffic import LabelledTraffic

SMALL_TALK_SHARE = 16
"""One drawn greeting or question about the ladder itself for so many tasks."""


@dataclass(frozen=True, slots=True)
class FitRequest:
    """Says what to fit besides the outcomes.

    Parameters
    ----------
    seed : of folds, estimators and intervals
    embedding : sentence-transformers model to add as features, None for none
    foreign : name -> prompts of other kinds, to report how many of them the novelty bound notices
    note : a closing paragraph for the card
    """

    seed: int = 0
    embedding: str | None = None
    foreign: Mapping[str, Sequence[str]] | None = None
    note: str = ""


def fit_outcomes(outcomes: Outcomes, request: FitRequest) -> RouterArtifact:
    """Fit a router to graded answers, judge it, and derive what policies need.

    Raises
    ------
    TrainingError, EmbeddingError
        The outcomes cannot carry a fit, or the embedding model cannot be had.
    """
    embedder: Embedder | None = SentenceTransformerEmbedder(request.embedding) if request.embedding else None
    fitted = fit_router(outcomes.table, seed=request.seed, options=FitOptions(), embedder=embedder)
    judged = _judged(outcomes, fitted)
    traffic = LabelledTraffic(judged.p_right, judged.p_as_good, judged.scores, judged.costs)
    artifact = fitted.artifact.with_metadata(
        metrics=evaluate(judged, seed=request.seed),
        decision=derive_for_floors(traffic, max_novelty=novelty_bound(len(outcomes.rows))),
        confidence=answer_confidence(outcomes, seed=request.seed).to_json(),
        graded_by=dict(outcomes.graded_by),
        measured=_measured(outcomes),
        note=request.note,
    )
    return _with_foreign_shares(artifact, request.foreign or {}, embedder)


def _judged(outcomes: Outcomes, fitted: FittedRouter) -> JudgedRows:
    """Left-out estimates beside outcomes, of the rows that count."""
    counts = np.array([row.is_judged for row in outcomes.rows])
    lengths = np.array([len(row.prompt) for row in outcomes.rows], dtype=np.float64)
    return JudgedRows(
        p_right=fitted.p_right[counts],
        p_as_good=fitted.p_as_good[counts],
        scores=outcomes.table.scores[counts],
        costs=outcomes.cost_usd[counts],
        lengths=lengths[counts],
        groups=outcomes.table.groups[counts],
        folds=fitted.folds[counts],
    )


def answer_confidence(outcomes: Outcomes, *, seed: int) -> AnswerConfidence:
    """Fit what each tier's own log-probabilities say about its answer being right, on the rows that count."""
    signals: dict[int, list[AnswerSignals]] = {}
    right: dict[int, list[float]] = {}
    for tier, found in outcomes.signals.items():
        known = [i for i, each in enumerate(found) if each.num_tokens and outcomes.rows[i].is_judged]
        signals[tier] = [found[i] for i in known]
        right[tier] = [float(outcomes.table.scores[i, tier - 1]) for i in known]
    return fit_confidence(signals, right, seed=seed)


def _measured(outcomes: Outcomes) -> dict[str, Any]:
    """Return mean device seconds and cost a request and tier; None where not every answer was measured."""
    seconds, cost = outcomes.compute_s.mean(axis=0), outcomes.measured_cost_usd.mean(axis=0)
    return {
        "compute_s": [None if np.isnan(s) else float(s) for s in seconds],
        "measured_cost_usd": [None if np.isnan(c) else float(c) for c in cost],
    }


def _with_foreign_shares(
    artifact: RouterArtifact, foreign: Mapping[str, Sequence[str]], embedder: Embedder | None
) -> RouterArtifact:
    from classifier.router import ArtifactRouter
    from classifier.types import RouterRequest

    if not foreign:
        return artifact
    router = ArtifactRouter(artifact, embedder=embedder)
    shares, bound = {}, artifact.metadata["decision"]["max_novelty"]
    for name, prompts in foreign.items():
        found = router.predict([RouterRequest(turns=(("user", prompt),)) for prompt in prompts])
        above = sum(each.novelty > bound for each in found)
        shares[name] = {"n": len(found), "share": above / max(len(found), 1)}
    return artifact.with_metadata(novelty={**artifact.metadata["novelty"], "foreign": shares})


def write_router(artifact: RouterArtifact, path: Path) -> tuple[Path, Path]:
    """Write the artifact, and its card beside it under the same name with ``.md``."""
    card = path.with_suffix(".md")
    artifact.save(path)
    card.write_text(render_card(artifact), encoding="utf-8")
    return path, card


async def collect_outcomes(
    rows: Sequence[PromptRow],
    settings: Settings,
    backends: Mapping[str, Backend],
    work: Path,
    options: CollectOptions,
    progress: Progress | None = None,
    *,
    window: str,
) -> Outcomes:
    """Answers of all tiers, from the file or from the backends, graded.

    Raises
    ------
    CollectionError
        The file is of another ladder, or a tier does not answer.
    BackendError
        A backend cannot be started.
    """
    ladder = settings.ladder
    with AnswerLog(work, describe_ladder(ladder, settings.models, options)) as log:
        missing = any((row.key, tier.index) not in log.answers for row in rows for tier in ladder)
        if missing:
            for name in dict.fromkeys(tier.model for tier in ladder):
                await backends[name].start()
            await collect(rows, {tier.index: backends[tier.model] for tier in ladder}, log, options, progress)
        return grade(rows, log.answers, ladder, window)


def builtin_rows(num_tasks: int, seed: int) -> list[PromptRow]:
    """Tasks of the natural mix that no tier was trained on, and small talk beside them; each as one user message.

    A tier does a little better on problems it was trained on, and a router fitted on those would promise too much: so
    the tasks come from the test split, from the half that the ladder bench leaves alone. Small talk teaches the router
    that a greeting needs no thought; it counts for no metric and no threshold.
    """
    from backends.builtin.tasks.small_talk import draw_chat

    tasks = draw_split(FITTING_SPLIT, seed, num_tasks)
    rows = [make_row((Message("user", task.prompt),), task.answer, "builtin") for task in tasks]
    rng = random.Random(seed)
    talk = [draw_chat(rng) for _ in range(num_tasks // SMALL_TALK_SHARE)]
    chat = [replace(make_row((Message("user", said),), reply, "exact"), is_judged=False) for said, reply in talk]
    return unique_rows([*rows, *chat])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="suffice bootstrap",
        description="Run prompts through every tier, grade the answers, and fit the first router.",
        epilog='A line of the prompt file: {"prompt": "...", "reference": "..."} or {"messages": [...]}; the reference '
        "(the right answer) is optional, and without it the top tier's answer is taken for right. See docs/router.md.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=Path, metavar="FILE", help="JSON Lines, one prompt a line")
    source.add_argument("--builtin", action="store_true", help="tasks of the built-in family, for the shipped router")
    parser.add_argument("--config", "-c", type=Path, metavar="FILE", help="the ladder; by default the built-in one")
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="the artifact; by default in the data folder")
    parser.add_argument("--work", type=Path, metavar="FILE", help="answers so far; by default beside the artifact")
    parser.add_argument("--tasks", type=int, default=4000, help="how many tasks --builtin draws")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=16, help="requests at a tier at once")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer, thinking included")
    parser.add_argument("--embedding", metavar="MODEL", help="add a sentence-transformers model as features")
    parser.add_argument(
        "--foreign",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="prompts of another kind, to report how many the router notices as foreign; repeatable",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress display")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. 0 when a router was written, 1 when it could not be, 2 for a wrong call."""
    given = _parser().parse_args(arguments)
    if given.tasks < 1 or given.concurrency < 1 or given.max_tokens < 1:
        print("suffice bootstrap: --tasks, --concurrency and --max-tokens must be at least 1.", file=sys.stderr)
        return 2
    try:
        artifact, path, card = asyncio.run(_run(given))
    except (OutcomeError, ClassifierError) as error:
        print(f"suffice bootstrap: {error}", file=sys.stderr)
        return 1
    print(render_card(artifact))
    print(f"Router {artifact.version} written to {path}, its card to {card}.")
    if not given.builtin:
        print(f'Serve with it: set [router] artifact = "{path}".')
    return 0


async def _run(given: argparse.Namespace) -> tuple[RouterArtifact, Path, Path]:
    settings = load_settings(given.config)
    rows = builtin_rows(given.tasks, given.seed) if given.builtin else read_prompts(given.prompts)
    output = given.output or (BUILTIN if given.builtin else settings.data_dir / "router.npz")
    answers = f"{'builtin' if given.builtin else output.stem}.answers.jsonl"
    work = given.work or settings.data_dir / answers
    options = CollectOptions(max_tokens=given.max_tokens, concurrency=given.concurrency, seed=given.seed)
    outcomes = await _collected(rows, settings, work, options, _window(given), quiet=given.quiet)
    foreign = {path.stem: [row.prompt for row in read_prompts(path)] for path in given.foreign}
    artifact = fit_outcomes(outcomes, FitRequest(seed=given.seed, embedding=given.embedding, foreign=foreign))
    return artifact, *write_router(artifact, output)


async def _collected(
    rows: Sequence[PromptRow], settings: Settings, work: Path, options: CollectOptions, window: str, *, quiet: bool
) -> Outcomes:
    from gateway.models.loader import close_backends, make_backends

    backends = make_backends(settings)
    try:
        with show_progress(settings.ladder, quiet=quiet) as progress:
            return await collect_outcomes(rows, settings, backends, work, options, progress, window=window)
    finally:
        await close_backends(list(backends.values()))


def _window(given: argparse.Namespace) -> str:
    if given.builtin:
        return f"{given.tasks} built-in tasks no tier was trained on (natural mix, seed {given.seed}) and small talk"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return f"{given.prompts.name}, answered {today}"


if __name__ == "__main__":
    sys.exit(main())
