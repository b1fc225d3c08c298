"""Holds one admitted request on its way through the engine: its tokens, its blocks, its books. Pure Python."""

from __future__ import annotations

from typing import Any

from engine.blocks import hash_block, hash_salt
from engine.grammar_cursor import GrammarCursor
from engine.prediction import PredictionCursor
from engine.request import Priority, Request, TokenLogprob


class Sequence:
    """Holds the mutable state of one request.

    The one rule of progress: tokens ``[0, num_computed)`` have keys and values in the cache, the rest have not. A
    decode is the case of one token left, a fresh or preempted request the case of all of them, and a new token is
    drawn exactly when none would be left. Whoever appends tokens (a draw, an accepted draft, a forced end of
    thinking) merely makes more to compute.

    A step in flight was launched and its results are not here yet. What it will add is counted apart, so that the next
    step can be planned on top of it: ``num_ahead`` positions it computes, and ``num_due`` (0 or 1) tokens it draws,
    whose ids only the device knows.

    Attributes
    ----------
    token_ids : prompt, then output
    order : place in the order of arrival; kept through preemption
    block_table : ids of the blocks that hold positions ``[0, len(block_table) * block_size)``
    draft_ids : tokens proposed for the step at hand, never part of ``token_ids``
    prediction : the answer's place in what was predicted of it, if anything was
    grammar : the answer's place in its grammar, if it has one
    max_output : most tokens this request may produce
    seed : keys every draw, together with the position
    sampler_state, drafter_state : owned by the sampler and the drafter, released with the sequence
    """

    __slots__ = (
        "acceptance",
        "accepted",
        "arrival_s",
        "block_hashes",
        "block_table",
        "compute_s",
        "draft_ids",
        "draft_limit",
        "draft_probs",
        "drafted",
        "drafter_state",
        "first_token_s",
        "grammar",
        "last_token_s",
        "max_output",
        "num_ahead",
        "num_cached",
        "num_computed",
        "num_due",
        "num_hashed",
        "num_preemptions",
        "num_prompt",
        "num_thinking",
        "order",
        "pooled_done",
        "pooled_sum",
        "prediction",
        "priority",
        "request",
        "sampler_state",
        "scheduled_s",
        "scores",
        "seed",
        "sink",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        *,
        order: int,
        arrival_s: float,
        max_output: int,
        seed: int,
        stop_ids: frozenset[int] = frozenset(),
        sink: Any = None,
    ) -> None:
        self.request = request
        self.order = order
        self.arrival_s = arrival_s
        self.max_output = max_output
        self.seed = seed
        self.stop_ids = stop_ids
        self.sink = sink
        self.priority: Priority = request.priority
        self.token_ids: list[int] = list(request.prompt_ids)
        self.num_prompt = len(self.token_ids)
        self.num_computed = 0
        self.num_ahead = 0
        self.num_due = 0
        self.num_cached = 0
        self.num_preemptions = 0
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_hashed = 0
        self.draft_ids: list[int] = []
        self.draft_limit = 0
        self.draft_probs: Any = None
        self.drafted = 0
        self.accepted = 0
        self.acceptance: float | None = None
        predicted = request.prediction
        self.prediction: PredictionCursor | None = None if predicted is None else PredictionCursor(predicted)
        self.grammar: GrammarCursor | None = None
        if request.constraint is not None:
            self.grammar = GrammarCursor(request.constraint, ignores_eos=request.sampling.ignore_eos)
        self.scores: list[TokenLogprob] = []
        self.pooled_sum: Any = None
        self.pooled_done = not request.pooled
        self.num_thinking = 0 if request.thinking is not None else -1
        self.compute_s = 0.0
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.sampler_state: Any = None
        self.drafter_state: Any = None

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_tokens(self) -> int:
        """Return the length once the step in flight has landed."""
        return len(self.token_ids) + self.num_due

    @property
    def num_left(self) -> int:
        """Count the tokens whose keys and values no step launched so far computes."""
        return len(self.token_ids) + self.num_due - self.num_computed - self.num_ahead

    @property
    def is_full(self) -> bool:
        """Tell whether the output has its full length once the step in flight has landed."""
        return len(self.token_ids) + self.num_due - self.num_prompt >= self.max_output

    @property
    def num_reserved(self) -> int:
        """Count positions an admission must have room for: every present token, and the next if there will be one."""
        return len(self.token_ids) + (self.num_output < self.max_output)

    @property
    def is_decoding(self) -> bool:
        """Tell whether one token is left that is not the prompt's last: the next step draws and does little else."""
        num_tokens = len(self.token_ids) + self.num_due
        return num_tokens - self.num_computed - self.num_ahead == 1 and num_tokens > self.num_prompt

    @property
    def num_to_score(self) -> int:
        """Count the prompt tokens whose log-probability is still owed."""
        start = self.request.score_from
        return 0 if start is None else self.num_prompt - start - len(self.scores)

    @property
    def rank(self) -> tuple[int, int]:
        """Return the place in the order: smaller goes first, larger is preempted first."""
        return (self.priority, self.order)

    def cacheable_tokens(self) -> int:
        """Count the most leading tokens that may come from the cache instead of being computed.

        The last token always runs, because the next one is drawn from it. A pooled request needs every hidden state;
        a scored one those from the token before the first scored one.
        """
        if not self.pooled_done:
            return 0
        if self.num_to_score:
            assert self.request.score_from is not None
            return self.request.score_from - 1
        return len(self.token_ids) - 1

    def hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Names of the first ``num_blocks`` full blocks; computed once, extended as tokens arrive."""
        names = self.block_hashes
        while len(names) < num_blocks:
            parent = names[-1] if names else hash_salt(self.request.cache_salt)
            start = len(names) * block_size
            names.append(hash_block(parent, self.token_ids[start : start + block_size]))
        return names[:num_blocks]

    def restart(self) -> None:
        """Forget what was computed, keep what was produced (a token due is); the blocks were released by the caller."""
        self.block_table = []
        self.num_computed = 0
        self.num_ahead = 0
        self.num_hashed = 0
        self.draft_ids = []
        if self.num_to_score:
            self.scores.clear()
        if not self.pooled_done:
            self.pooled_sum = None
