"""The device's counts of what was said, against the sequences' own tokens."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.device.token_counts import TokenCounts
from engine.kernels.sampling import Penalties, count_tokens
from engine.request import Request, SamplingParams
from engine.scheduler import ScheduledSequence
from engine.sequence import Sequence
from tests.engine.no_memory import NoMemory

VOCAB = 7


def sequence_of(prompt: list[int]) -> Sequence:
    request = Request("r", tuple(prompt), SamplingParams(presence_penalty=1.0, max_tokens=99))
    return Sequence(request, order=1, arrival_s=0.0, max_output=99, seed=0)


def drawn(seen: TokenCounts, items: list[ScheduledSequence], tokens: list[int], known: dict[int, int]) -> Penalties:
    """Launch a step that draws these tokens; the tables as its penalties found them.

    ``known`` has the tokens that sequences (by ``id``) got from the step in flight.
    """
    lines = torch.tensor(seen.lines_for(items, lambda sequence: torch.tensor([known[id(sequence)]])))
    ones = torch.ones(len(items))
    penalties = seen.penalties(lines, ones, ones, ones)
    before = Penalties(ones, ones, ones, lines, penalties.counts.clone(), penalties.prompts.clone())
    count_tokens(penalties, torch.tensor(tokens))
    return before


@pytest.mark.slow
@given(st.data())
@settings(max_examples=200, deadline=None)
def test_every_step_finds_what_its_sequences_said(data: st.DataObject) -> None:
    """Tokens are drawn ahead, withdrawn for one other, or added by the host; lines are fewer than sequences.

    Some steps find no memory while lines are written, while they count or after that, and are launched again.
    """
    counted = st.integers(0, 1)
    seen = TokenCounts(2, VOCAB, torch.device("cpu"))
    prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)
    sequences = [sequence_of(data.draw(prompts)) for _ in range(4)]
    flying: list[tuple[ScheduledSequence, int]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        for sequence in sequences:
            if not sequence.num_due and data.draw(st.integers(0, 3)) == 0:
                sequence.token_ids.append(data.draw(st.integers(0, VOCAB - 1)))  # the host drew one
        known = {id(item.sequence): token for item, token in flying if item.draws}
        chosen = data.draw(st.lists(st.sampled_from(range(4)), min_size=1, max_size=2, unique=True))
        # Whoever is to be drawn for again without a line of its own has landed: two are in flight, two have lines.
        items = [ScheduledSequence(sequences[index], 1) for index in chosen]
        for item, token in flying:
            if item.draws and not any(each.sequence is item.sequence for each in items):
                item.sequence.num_due, known = 0, {k: v for k, v in known.items() if k != id(item.sequence)}
                item.sequence.token_ids.append(token)
        tokens = [data.draw(st.integers(0, VOCAB - 1)) for _ in items]
        if data.draw(st.integers(0, 3)) == 0:  # there was no memory for it, and it may have counted other tokens
            with contextlib.suppress(torch.OutOfMemoryError), NoMemory(torch.Tensor.index_add_, data.draw(counted)):
                drawn(seen, items, [data.draw(st.integers(0, VOCAB - 1)) for _ in items], known)
            seen.distrust(items)
            items, tokens = items[:1], tokens[:1]  # a second one is put back
        found = drawn(seen, items, tokens, known)
        for row, item in enumerate(items):
            sequence, line = item.sequence, int(found.slots[row])
            due = [known[id(sequence)]] if id(sequence) in known else []
            output = Counter(sequence.token_ids[sequence.num_prompt :] + due)
            assert found.counts[line].tolist() == [output[token] for token in range(VOCAB)]
            said = set(sequence.token_ids[: sequence.num_prompt])
            assert found.prompts[line].tolist() == [token in said for token in range(VOCAB)]
        for item, token in flying:
            if item.draws and id(item.sequence) in known:
                item.sequence.token_ids.append(token)
                item.sequence.num_due -= 1
        flying = list(zip(items, tokens, strict=True))
        for item in items:
            item.sequence.num_due += 1
            if data.draw(st.integers(0, 3)) == 0:  # others come in its place, as when thinking is cut short
                item.draws = False
                item.sequence.num_due -= 1
                item.sequence.token_ids += data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=2))
