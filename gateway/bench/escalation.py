"""Measures escalation on the built-in ladder: accuracy and cost with it and without, and what predictions save.

``suffice bench escalation``. Fresh tasks that nothing was fitted on go through the HTTP endpoint, greedily:
at each tier alone, routed without escalation, routed with it, and as a cascade that begins every task at the lowest
tier. An escalated answer is compared, as text, with what its tier says when it is asked itself. Then, without the
server and one request at a time, higher tiers answer with and without a lower tier's answer as their prediction.

Prices and accuracies are the same on every run. Seconds are CPU seconds of the engines' threads and depend on the
machine and on what else it does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.builtin.tasks.types import Task
from backends.local import LocalBackend
from classifier.artifact import RouterArtifact
from classifier.confidence import AnswerConfidence, AnswerSignals, fit_confidence
from classifier.router import BUILTIN, ArtifactRouter
from gateway.bench.escalation_pairs import PAIRS, compare, compare_long, doubted, summarise
from gateway.bench.ladder_client import LadderReply, ask_all, own_server
from gateway.bench.machine_card import card, print_card
from gateway.config.settings import load_settings
from gateway.models.loader import close_backends, make_backends
from gateway.outcomes.answer_collection import CollectOptions, collect
from gateway.outcomes.answer_grading import CHECKERS
from gateway.outcomes.answer_log import AnswerLog
from gateway.outcomes.bootstrap import builtin_rows
from gateway.outcomes.prompt_file import PromptRow
from gateway.outcomes.task_split import HOLDOUT_SPLIT, draw_split
from policies.intervals import binomial_lower, binomial_upper

POLICIES = """
[policies.routed]

[policies.next.escalation]
mode = "next"

[policies.cascade]
mode = "floor"
thresholds = { simple = 0.0, medium = 0.0, complex = 0.0 }
[policies.cascade.escalation]
mode = "next"
max_escalations = 3
"""
NAMES = ("routed", "next", "cascade")
_NUM_CALIBRATION_TASKS = 1500


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. 0 when every escalated answer was its tier's own, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="suffice bench escalation", description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=1000, help="through the endpoint")
    parser.add_argument("--pair-tasks", type=int, default=60, help="for each pair of tiers, of each kind")
    parser.add_argument("--seed", type=int, default=2, help="of the tasks")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--only", choices=("endpoint", "predictions"), help="one part; the other is kept from --output")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON here, indented")
    given = parser.parse_args(arguments)
    found = asyncio.run(_run(given))
    print_tables(found)
    if given.output:
        given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))
    return int(not all(_is_own(part) for part in found.values() if isinstance(part, dict)))


def _is_own(part: Mapping[str, Any]) -> bool:
    """Return whether every answer with a prediction was the tier's own."""
    rows = [row for pair in part.get("pairs", ()) for row in (pair["any"], pair.get("doubted", pair["any"]))]
    same = all(row["equal"] == row["tasks"] for row in [*rows, *part.get("long", {}).values()])
    return same and all(row["escalated"] == row["escalated_equal"] for row in part.get("policies", {}).values())


async def _run(given: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"bench": "escalation"}
    if given.only and given.output and given.output.exists():
        found = json.loads(given.output.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="suffice-bench-") as name:
        folder = Path(name)
        router, calibrated = await _calibrated_router(folder)
        facts = {**card(), "seed": given.seed, "max_tokens": given.max_tokens, "calibrated": calibrated}
        if given.only != "predictions":
            facts |= {"tasks": given.tasks, "concurrency": given.concurrency}
            found["endpoint"] = {"card": facts, **await _measure_endpoint(folder, router, given)}
        if given.only != "endpoint":
            confidence = ArtifactRouter.load(router).confidence
            found["predictions"] = {"card": facts, **await _measure_predictions(confidence, given)}
    return found


async def _measure_endpoint(folder: Path, router: Path, given: argparse.Namespace) -> dict[str, Any]:
    tasks = draw_split(HOLDOUT_SPLIT, given.seed, given.tasks)
    config = folder / "suffice.toml"
    config.write_text(f'[router]\nartifact = "{router}"\n{POLICIES}', encoding="utf-8")
    async with own_server(folder, config) as url:
        replies = await _ask_everything(url, tasks, given)
    tiers = {name: replies[name] for name in replies if name.startswith("tier-")}
    policies = {name: describe_outcome(replies[name]) | describe_escalations(replies[name], tiers) for name in NAMES}
    return {"tiers": {name: describe_outcome(each) for name, each in tiers.items()}, "policies": policies}


async def _calibrated_router(folder: Path) -> tuple[Path, str]:
    """Return the shipped router; where it does not say what tiers' confidences are worth, with that measured here."""
    artifact = RouterArtifact.load(BUILTIN)
    if artifact.metadata.get("confidence"):
        return BUILTIN, "by the shipped router"
    settings = load_settings(None, environ={}, overrides={"data_dir": str(folder)})
    made = make_backends(settings)
    backends = {tier.index: made[tier.model] for tier in settings.ladder[:-1]}
    rows = [row for row in builtin_rows(_NUM_CALIBRATION_TASKS, seed=1) if row.is_judged]
    try:
        for backend in backends.values():
            await backend.start()
        with AnswerLog(folder / "answers.jsonl", {}) as log:
            await collect(rows, backends, log, CollectOptions(max_tokens=400))
    finally:
        await close_backends(list(made.values()))
    path = artifact.with_metadata(confidence=_calibrate(rows, log, list(backends)).to_json()).save(
        folder / "router.npz"
    )
    return path, f"on {len(rows)} tasks of the fitting half"


def _calibrate(rows: Sequence[PromptRow], log: AnswerLog, tiers: Sequence[int]) -> AnswerConfidence:
    signals: dict[int, list[AnswerSignals]] = {}
    right: dict[int, list[float]] = {}
    for tier in tiers:
        answers = [(row, log.answers[row.key, tier]) for row in rows]
        signals[tier] = [AnswerSignals(a.num_scored, a.total_logprob, a.least_logprob) for _, a in answers]
        right[tier] = [
            float(CHECKERS[row.checker](row.prompt, row.reference or "", answer.text)) for row, answer in answers
        ]
    return fit_confidence(signals, right)


async def _ask_everything(url: str, tasks: Sequence[Task], given: argparse.Namespace) -> dict[str, list[LadderReply]]:
    names = (*(f"tier-{number}" for number in range(1, 5)), *NAMES)
    replies = {}
    for name in names:
        print(f"{name}: {len(tasks)} tasks", file=sys.stderr, flush=True)
        replies[name] = await ask_all(url, name, tasks, concurrency=given.concurrency, max_tokens=given.max_tokens)
    return replies


async def _measure_predictions(confidence: AnswerConfidence, given: argparse.Namespace) -> dict[str, Any]:
    """Pairs of tiers on any tasks and on those the lower one doubts; then long texts, predicted well and badly."""
    settings = load_settings(None, environ={})
    made = make_backends(settings)
    tasks = draw_split(HOLDOUT_SPLIT, given.seed, 20 * given.pair_tasks)
    pairs = []
    try:
        for tier in settings.ladder:
            await made[tier.model].start()
        backends = {t.index: each for t in settings.ladder if isinstance(each := made[t.model], LocalBackend)}
        for pair in PAIRS:
            doubts = await doubted(tasks, backends[pair[0]], pair[0], confidence, given.pair_tasks)
            both = {
                kind: await compare(some, backends, pair, given.max_tokens)
                for kind, some in (("any", tasks[: given.pair_tasks]), ("doubted", doubts))
            }
            pairs.append({"low": pair[0], "high": pair[1]} | {k: summarise(each) for k, each in both.items() if each})
            print(pairs[-1], file=sys.stderr, flush=True)
        long = {name: summarise(each) for name, each in (await compare_long(tasks[:20], backends[3])).items()}
    finally:
        await close_backends(list(made.values()))
    return {"pairs": pairs, "long": long}


def describe_outcome(replies: Sequence[LadderReply]) -> dict[str, Any]:
    num_right, n = sum(reply.is_right for reply in replies), len(replies)
    answered = Counter(reply.tier for reply in replies)
    return {
        "accuracy": num_right / n,
        "accuracy_95": [binomial_lower(num_right, n, 0.975), binomial_upper(num_right, n, 0.975)],
        "cost_usd": sum(reply.cost_usd for reply in replies) / n,
        "compute_s": sum(reply.compute_s or 0.0 for reply in replies) / n,
        "shares": {str(tier): answered[tier] / n for tier in sorted(answered)},
    }


def describe_escalations(replies: Sequence[LadderReply], tiers: Mapping[str, Sequence[LadderReply]]) -> dict[str, Any]:
    """Count how often requests escalated, how often rightly, and whether the answer is the higher tier's own."""
    gone_up = [place for place, reply in enumerate(replies) if reply.doubted]
    left = [place for place in gone_up if not tiers[f"tier-{replies[place].doubted[0]}"][place].is_right]
    own = [tiers[f"tier-{replies[place].tier}"][place].text for place in gone_up]
    return {
        "escalated": len(gone_up),
        "escalated_equal": sum(replies[place].text == text for place, text in zip(gone_up, own, strict=True)),
        "rightly_doubted_share": len(left) / len(gone_up) if gone_up else None,
        "mended_share": sum(replies[place].is_right for place in left) / len(left) if left else None,
    }


def print_tables(found: Mapping[str, Any]) -> None:
    """The run for reading."""
    if endpoint := found.get("endpoint"):
        print_card("Through the endpoint", endpoint["card"])
        _print_endpoint(endpoint)
    if predictions := found.get("predictions"):
        print_card("Predictions", predictions["card"])
        _print_predictions(predictions)


def _print_endpoint(part: Mapping[str, Any]) -> None:
    print(f"\n{'':10} {'accuracy':>9} {'95 % interval':>18} {'$/request':>10} {'device ms':>10}  went up  answered by")
    for name, row in (part["tiers"] | part["policies"]).items():
        low, high = row["accuracy_95"]
        shares = ", ".join(f"{tier}: {share:.1%}" for tier, share in row["shares"].items())
        up = f"{row['escalated'] / part['card']['tasks']:7.1%}" if row.get("escalated") else f"{'–':>7}"
        print(
            f"{name:10} {row['accuracy']:9.1%} {f'[{low:.1%}, {high:.1%}]':>18} {row['cost_usd']:10.6f} "
            f"{row['compute_s'] * 1e3:10.1f}  {up}  {shares}"
        )


def _print_predictions(part: Mapping[str, Any]) -> None:
    print(f"\n{'':24}{'tasks':>6}{'equal':>6}{'accepted':>9}{'answer':>7}{'all':>6}{'steps':>12}{'device ms':>16}")
    for pair in part["pairs"]:
        for kind in ("any", "doubted"):
            if kind in pair:
                _print_row(f"{pair['low']} → {pair['high']}, {kind}", pair[kind])
    for name, row in part["long"].items():
        _print_row(f"long, {name}", row)


def _print_row(name: str, row: Mapping[str, Any]) -> None:
    accepted = "–" if row["accepted_share"] is None else f"{row['accepted_share']:.1%}"
    print(
        f"{name:24}{row['tasks']:6}{row['equal']:6}{accepted:>9}{row['answer_tokens']:7.1f}"
        f"{row['completion_tokens']:6.1f}{row['steps_anew']:6.1f}{-row['steps_saved_share']:+6.0%}"
        f"{row['compute_s_anew'] * 1e3:9.1f}{-row['compute_saved_share']:+7.0%}"
    )


if __name__ == "__main__":
    sys.exit(main())
