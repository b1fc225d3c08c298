"""Shows how far a collection is: bars on a terminal, a line now and then elsewhere. On standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from gateway.outcomes.answer_collection import Progress
from policies.ladder import Ladder

_LINE_EVERY_S = 10.0


@contextlib.contextmanager
def show_progress(ladder: Ladder, *, quiet: bool) -> Iterator[Progress | None]:
    """A progress callback for :func:`gateway.outcomes.answer_collection.collect`; None when quiet."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _bars(ladder) as progress:
            yield progress
    else:
        yield _ProgressLines({tier.index: tier.name for tier in ladder})


@contextlib.contextmanager
def _bars(ladder: Ladder) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        shown = {tier.index: bars.add_task(f"{tier.name} ({tier.model})", total=None) for tier in ladder}

        def progress(tier: int, done: int, total: int) -> None:
            bars.update(shown[tier], completed=done, total=total)

        yield progress


class _ProgressLines:
    """One line at a tier's start and end, and every few seconds between."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        self._last_s = float("-inf")

    def __call__(self, tier: int, done: int, total: int) -> None:
        now_s = time.monotonic()
        if done < total and now_s - self._last_s < _LINE_EVERY_S:
            return
        self._last_s = now_s
        print(f"tier {tier} ({self._names[tier]}): {done} of {total} answered", file=sys.stderr, flush=True)
