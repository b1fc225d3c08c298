"""Learns a router from the log now, and lets it serve if it is better: ``suffice retrain``."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gateway.commands.result_printer import print_json, print_table
from gateway.config.settings import load_settings
from gateway.learn.retrain import Report, RetrainOutcome, RetrainRequest
from gateway.learn.retrain import retrain as run


def retrain(config: Path | None, *, reason: str, dry_run: bool, seed: int, quiet: bool, as_json: bool) -> None:
    """Retrain in this process and say what came of it."""
    settings = load_settings(config, need_secrets=False)
    wish = RetrainRequest(trigger="cli", reason=reason, dry_run=dry_run, seed=seed)
    with _progress(quiet=quiet or as_json) as report:
        outcome = asyncio.run(run(settings, wish, report))
    if as_json:
        print_json(outcome.as_dict())
        return
    _print(outcome, dry_run=dry_run)


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Report]:
    """Show progress on standard error: a bar on a terminal, a line a stage elsewhere."""
    if quiet:
        yield lambda stage, done: None
    elif sys.stderr.isatty():
        with _bar() as report:
            yield report
    else:
        yield _lines()


@contextlib.contextmanager
def _bar() -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task("start", total=1.0)
        yield lambda stage, done: shown.update(task, description=stage, completed=done)


def _lines() -> Callable[[str, float], None]:
    last = ""

    def report(stage: str, done: float) -> None:
        nonlocal last
        if stage != last:
            last = stage
            print(f"{stage} ({done:.0%})", file=sys.stderr, flush=True)

    return report


def _print(outcome: RetrainOutcome, *, dry_run: bool) -> None:
    verdict = {"promoted": "better than the serving router", "kept": "the serving router stays"}[outcome.status]
    would = "would be: " if dry_run else ""
    if outcome.evaluation is not None and "candidate" in outcome.evaluation:
        print_table(("router", "quality", "95 %", "USD a request", "shares by tier"), _rows(outcome.evaluation))
    print(f"{would}{verdict}. {outcome.reason}")
    if outcome.router_version is not None and not dry_run:
        print(f"Router {outcome.router_version}, run {outcome.run_id}.")


def _rows(found: Any) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name in ("candidate", "serving"):
        each = found[name]
        quality, cost = each["quality"]["doubly_robust"], each["cost_usd"]
        shares = " ".join(f"{share:.0%}" for share in each["shares"])
        interval = f"[{quality['low']:.3f}, {quality['high']:.3f}]"
        rows.append((name, f"{quality['value']:.3f}", interval, f"{cost['value']:.6f}", shares))
    return rows
