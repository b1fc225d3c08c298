"""The point of it all: fresh tasks through the HTTP endpoint, each tier alone and routed. ``suffice bench ladder``.

Tasks are drawn by a seed of the caller's choice from the half of the test split that nothing was fitted on, neither a
model nor a router. Each is asked at every tier (``model`` pinned) and once as ``auto`` without exploration, greedily.
Beside the routed accuracy stands what random routing, prompt length, the best fixed mix and an oracle reach at the same
mean cost.

Measured seconds depend on what else the machine does and on how many requests share a step; prices do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends.builtin.tasks.types import Task
from gateway.bench.ladder_client import LadderReply, ask_all, own_server
from gateway.bench.ladder_report import LadderRun, summarise
from gateway.bench.machine_card import card, print_card
from gateway.config.settings import read_client_key
from gateway.outcomes.task_split import HOLDOUT_SPLIT, draw_split

_PROGRESS_EVERY_S = 15.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. 0 when the run ended, whatever it showed; with ``--check`` 1 when a goal was missed."""
    given = _parser().parse_args(arguments)
    if given.tasks < 20 or given.concurrency < 1:
        print("suffice bench ladder: --tasks must be at least 20 and --concurrency at least 1.", file=sys.stderr)
        return 2
    run, found = asyncio.run(_run(given))
    if given.plot:
        from gateway.bench.ladder_plot import plot_run

        plot_run(run, given.plot)
    if not given.json:
        print_card("Ladder bench", found["card"])
        print_table(found)
    print(json.dumps(found))
    return int(given.check and found["goals"]["met_priced"] is not True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="suffice bench ladder", description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1, help="of the tasks")
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the cost-quality curve (.png, .svg, .pdf)")
    parser.add_argument("--config", "-c", type=Path, metavar="FILE", help="the ladder; by default the built-in one")
    parser.add_argument("--url", help="a running server instead of one started here")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once")
    parser.add_argument("--max-tokens", type=int, default=400, help="longest answer, thinking included")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal was missed")
    return parser


async def _run(given: argparse.Namespace) -> tuple[LadderRun, dict[str, Any]]:
    tasks = draw_split(HOLDOUT_SPLIT, given.seed, given.tasks)
    started = time.perf_counter()
    if given.url:
        run, served = await _ask_everything(given.url, tasks, given)
    else:
        with tempfile.TemporaryDirectory(prefix="suffice-bench-") as folder:
            async with own_server(Path(folder), given.config) as url:
                run, served = await _ask_everything(url, tasks, given)
    asked = {"seed": given.seed, "concurrency": given.concurrency, "max_tokens": given.max_tokens, **served}
    facts = {**card(), **asked, "duration_s": round(time.perf_counter() - started, 1)}
    return run, {"bench": "ladder", "card": facts, **summarise(run, seed=given.seed)}


async def _ask_everything(
    url: str, tasks: Sequence[Task], given: argparse.Namespace
) -> tuple[LadderRun, dict[str, Any]]:
    names = await _tier_names(url)
    progress = None if given.json else _ReportLines()
    replies: dict[str, list[LadderReply]] = {}
    for model in (*(f"tier-{number}" for number in range(1, len(names) + 1)), "auto"):
        replies[model] = await ask_all(
            url,
            model,
            tasks,
            concurrency=given.concurrency,
            max_tokens=given.max_tokens,
            api_key=read_client_key(),
            progress=progress,
        )
    routed = replies.pop("auto")
    return LadderRun.of(tasks, list(replies.values()), routed, names), {"tiers": len(names)}


async def _tier_names(url: str) -> list[str]:
    """Names of the tiers, cheapest first, as ``/v1/models`` lists them."""
    import httpx

    key = read_client_key()
    async with httpx.AsyncClient(timeout=60, headers={"authorization": f"Bearer {key}"} if key else {}) as client:
        answer = await client.get(f"{url}/v1/models")
    answer.raise_for_status()
    served = [each["suffice"] for each in answer.json()["data"]]
    names = {note["tier"]: note["name"] for note in served if note["kind"] == "tier"}
    if not names:
        raise SystemExit(f"{url}/v1/models lists no tiers.")
    return [names[number] for number in sorted(names)]


class _ReportLines:
    """A line on standard error now and then."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def __call__(self, model: str, done: int, total: int) -> None:
        if done == total or time.monotonic() - self._last_s > _PROGRESS_EVERY_S:
            self._last_s = time.monotonic()
            print(f"{model}: {done} of {total} answered", file=sys.stderr, flush=True)


def print_table(found: dict[str, Any]) -> None:
    """The run for reading."""
    print(f"\n{'':12} {'accuracy':>9} {'95 % interval':>18} {'$/request':>10} {'measured $':>11} {'device ms':>10}")
    for tier in found["tiers"]:
        seconds = tier["compute_s"]
        shown_ms = "–" if seconds is None else f"{seconds * 1e3:.1f}"
        _print_row(tier["name"], tier, shown_ms)
    routed, same = found["routed"], found["at_the_same_cost"]
    _print_row("routed", routed, "")
    shares = ", ".join(f"{share:.1%}" for share in routed["shares"])
    print(f"\nshares of the tiers when routed: {shares}")
    for part in found["where_seconds_go"] or ():
        print(
            f"  tier {part['tier']}: {part['share_of_seconds']:.1%} of the seconds, {part['compute_s'] * 1e3:.1f} ms a "
            f"request, {part['compute_s_if_alone'] * 1e3:.1f} with the tier alone, "
            f"{part['completion_tokens']:.0f} tokens"
        )
    for name in ("random_same_shares", "length_only", "best_fixed_mix", "oracle"):
        value = same[name]
        print(f"  {name.replace('_', ' '):20} at the same cost: {'–' if value is None else f'{value:.1%}'}")
    print(f"\naccuracy against the top tier {_shown(routed['accuracy_vs_top'])}, goal at least 97 %")
    print(f"cost by price                 {_shown(routed['cost_vs_top'])}, goal at most 40 %")
    print(f"cost by measured seconds      {_shown(routed['measured_cost_vs_top'])}, goal at most 40 %\n")


def _print_row(name: str, row: dict[str, Any], shown_ms: str) -> None:
    accuracy, measured = row["accuracy"], row["measured_cost_usd"]
    interval = f"[{accuracy['low']:.1%}, {accuracy['high']:.1%}]"
    shown = "–" if measured is None else f"{measured:.3e}"
    print(f"{name:12} {accuracy['value']:9.1%} {interval:>18} {row['cost_usd']:10.6f} {shown:>11} {shown_ms:>10}")


def _shown(interval: dict[str, float] | None) -> str:
    if interval is None:
        return "not measured"
    return f"{interval['value']:.1%} [{interval['low']:.1%}, {interval['high']:.1%}]"


if __name__ == "__main__":
    sys.exit(main())
