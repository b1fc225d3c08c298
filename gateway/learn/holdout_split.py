"""Splits the rows into those a candidate is fitted on and those it is judged on.

By the week the newest part is held out: the future is what a router is for. After an alarm that would leave nothing of
what has just changed to learn from, so the newest half is dealt out in alternating runs, each long enough that
neighbours in time are mostly on one side. Rows outside the frame stand for no traffic: nothing is judged on them, and
where they are all that came before the alarm, all of the others are dealt out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gateway.learn.learning_table import Ints, LearningTable

_RECENT_RUNS = 20


@dataclass(frozen=True, slots=True)
class HoldoutSplit:
    """Row numbers of both parts, and the protocol in words."""

    train: Ints
    judge: Ints
    protocol: str


def split_rows(table: LearningTable, judge_share: float, *, is_urgent: bool, is_cut: bool = False) -> HoldoutSplit:
    """Cut by time, so that the newest ``judge_share`` of the checked rows are judged on; by runs when urgent.

    Rows of one wording stay on one side, that of the oldest. ``is_cut``: the frame begins with what is urgent.
    """
    checked = np.flatnonzero(table.is_checked & (table.sampling_weight > 0))
    rank = np.searchsorted(checked, np.arange(len(table)), side="right") / max(len(checked), 1)
    if is_urgent:
        begin = 0.0 if is_cut else 0.5
        run = np.floor((rank - begin) / (1.0 - begin) * _RECENT_RUNS).astype(np.int64)
        is_judged = (rank > begin) & (run % 2 == 1)
        dealt = "checked requests since the doubt" if is_cut else "newest half of the checked requests"
        protocol = f"{dealt} dealt out in alternating runs"
    else:
        is_judged = rank > 1.0 - judge_share
        protocol = f"newest {judge_share:.0%} of the checked requests held out"
    first = np.full(int(table.groups.max()) + 1 if len(table) else 0, -1, dtype=np.int64)
    for row in range(len(table) - 1, -1, -1):
        first[table.groups[row]] = row
    is_judged = is_judged[first[table.groups]] & (table.sampling_weight > 0) if len(table) else is_judged
    return HoldoutSplit(np.flatnonzero(~is_judged), np.flatnonzero(is_judged), protocol)
