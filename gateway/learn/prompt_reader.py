"""Prompts that retention kept, read back as the router saw them when it decided.

A prompt is stored as one text, ``role: content`` a message. A message whose own lines look like that could be read as
several, so what comes out is held against the log row: number of turns and length of the last user turn must agree.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs

from classifier.features import TEXT_FEATURES
from classifier.types import RouterRequest
from gateway.learn.learning_table import LearningTable
from gateway.learn.table_reader import read_texts
from gateway.store.store import Store

MAX_TEXTS = 20_000
"""Texts beyond the newest so many are left out: what they hold in memory is then bounded by some 100 MB."""

_ROLE = re.compile(r"^(system|developer|user|assistant|tool): ", re.MULTILINE)
# What a model called stands on lines of its own, which are no part of the turn's text.
_CALLS = re.compile(r"^assistant calls [A-Za-z0-9_.-]+: .*\n?", re.MULTILINE)
_NUM_CHARS, _NUM_TURNS = TEXT_FEATURES.index("num_chars"), TEXT_FEATURES.index("num_turns")
_TOLERANCE = 1e-5


def request_of(text: str) -> RouterRequest:
    """Return a stored prompt as turns; a text that begins with no role is one user turn."""
    text = _CALLS.sub("", text)
    starts = list(_ROLE.finditer(text))
    if not starts or starts[0].start():
        return RouterRequest((("user", text),))
    ends = [each.start() - 1 for each in starts[1:]] + [len(text)]
    return RouterRequest(tuple((each.group(1), text[each.end() : end]) for each, end in zip(starts, ends, strict=True)))


async def with_requests(store: Store, table: LearningTable) -> LearningTable:
    """The table with the kept prompts of its newest rows; None where none was kept or it is not what the row says.

    Raises
    ------
    StoreUnavailable and its kinds
    """
    newest = range(max(len(table) - MAX_TEXTS, 0), len(table))
    texts = await read_texts(store, [table.request_ids[row] for row in newest])
    found: list[RouterRequest | None] = [None] * len(table)
    for row in newest:
        text = texts.get(table.request_ids[row])
        request = None if text is None else request_of(text)
        if request is not None and _agrees(request, table.views.dense[row]):
            found[row] = structs.replace(request, tools=table.tools[row])
    return replace(table, requests=tuple(found))


def _agrees(request: RouterRequest, dense: Sequence[float] | np.ndarray) -> bool:
    seen = np.log1p([len(request.text), len(request.turns)])
    return bool(np.allclose(seen, [dense[_NUM_CHARS], dense[_NUM_TURNS]], rtol=_TOLERANCE))
