"""Plans which tokens of which sequences run in the next step. Pure Python, no clock, no torch.

There are no phases: a plan is a list of (sequence, number of tokens). A decode is a prefill of one token, a speculation
check a prefill of k + 1, scoring a prefill whose log-probabilities are kept (Orca, Yu et al. 2022, section 4.1, for
iteration-level scheduling; Sarathi-Serve, Agrawal et al. 2024, section 4.2, for the token budget).

Who waits for whom:

- The order is (priority, arrival). Nobody is passed by someone behind them, so the head of the queue is served next.
- A request whose prefix another is computing in this step waits for it, to read it from the cache in the next.
- Background work that has waited ``aging_s`` counts as live from then on.
- A sequence is admitted when blocks for all its present tokens and one more are there, and gets them at once; only
  growth by decoding can therefore run short. Then the last in the order gives its blocks back and is recomputed later.
- The first in the order is never preempted and fits the pool alone (checked at submission): there is always progress.

A step may be planned while the one before it is in flight: every sequence in it is taken to get the token it is due.
Blocks that are freed meanwhile may be given out at once, because a device runs what is launched in order: whoever gets
them writes after the step in flight has.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.blocks import BlockPool
from engine.prediction import MOST_CHECKED
from engine.request import Priority
from engine.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """Plans ``num_tokens`` tokens from position ``start`` on; ``num_drafts`` further ones may be checked.

    Attributes
    ----------
    is_predicted : what is checked comes from the request's prediction, not from a drafter
    draws : the sequence's last token is among them, so that the next is drawn; withdrawn when it turns out unwanted
    epoch : the sequence's ``num_preemptions`` when this was planned; what was computed before a preemption is gone
    """

    sequence: Sequence
    num_tokens: int
    num_drafts: int = 0
    start: int = 0
    draws: bool = True
    epoch: int = 0
    is_predicted: bool = False

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        """Plan the next ``num_tokens`` tokens of a sequence."""
        return cls(
            sequence,
            num_tokens,
            start=sequence.num_computed + sequence.num_ahead,
            draws=num_tokens == sequence.num_left and not sequence.is_full,
            epoch=sequence.num_preemptions,
        )


@dataclass(frozen=True, slots=True)
class ChunkBounds:
    """Bounds how much of the waiting prompts a step takes up that also decodes.

    Attributes
    ----------
    most_tokens : of the whole step, decodes included
    least_chunk : prompt tokens that it may have anyhow
    """

    most_tokens: int
    least_chunk: int = 0


@dataclass(slots=True)
class StepPlan:
    """Holds the plan of one step. ``preempted`` lost their blocks while it was made."""

    items: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


class Scheduler:
    """Batches continuously over one block pool.

    Parameters
    ----------
    pool : owns the blocks; nobody else allocates from it
    max_num_seqs : most sequences that hold blocks
    max_batch_tokens : most tokens in one step
    aging_s : after this long, waiting background work counts as live
    chunk_bounds : says how prompts are cut beside decodes; asked once a step, of steps that have both. None: not at all
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_batch_tokens: int,
        aging_s: float = 10.0,
        chunk_bounds: Callable[[], ChunkBounds] | None = None,
    ) -> None:
        assert max_batch_tokens >= max_num_seqs > 0, (max_batch_tokens, max_num_seqs)
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.aging_s = aging_s
        self.chunk_bounds = chunk_bounds or (lambda: ChunkBounds(max_batch_tokens))
        self._bounds: ChunkBounds | None = None  # of the step being planned, once it was asked for
        self.running: list[Sequence] = []  # sorted by rank
        self.waiting: list[Sequence] = []  # sorted by rank
        self.flying: list[ScheduledSequence] = []  # of the step launched last, if its results are not here yet

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those of its class that came before it."""
        insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, finished or cancelled, and free its blocks at once."""
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
        self._release(sequence)

    def decoding(self) -> list[Sequence]:
        """Return the running sequences that have nothing to compute but their last output token."""
        return [sequence for sequence in self.running if sequence.is_decoding]

    def num_to_prefill(self) -> int:
        """Count the prompt tokens that the next step would take up, at most."""
        left = sum(s.num_left for s in self.running if s.num_left > 1)
        if len(self.running) < self.max_num_seqs:
            left += sum(s.num_left for s in self.waiting[:1])
        return min(left, self.max_batch_tokens)

    def schedule(self, now_s: float) -> StepPlan:
        """Choose the next step and reserve its blocks.

        Every decode runs, then prefills already begun, then new ones, each in order, as the budget lasts; what is left
        goes to drafts, of which each decode may have ``draft_limit``, and to checking predicted answers.
        """
        plan = StepPlan()
        self._bounds = None
        if self.waiting:
            self._age(now_s)
        with self.pool.lock:  # what is found in the cache must still be there when it is taken
            self._schedule_decodes(plan)
            self._schedule_prefills(plan)
            if self.waiting:
                self._admit(plan, now_s)
            self._schedule_drafts(plan)
        assert plan.items or self.flying or not self.has_work, "work is waiting and none of it can run"
        return plan

    def launch(self, plan: StepPlan) -> None:
        """Record that a plan is in flight; the one before it may be still."""
        for item in plan.items:
            item.sequence.num_ahead += item.num_tokens
            item.sequence.num_due += item.draws
        self.flying = plan.items

    def land(self, items: list[ScheduledSequence]) -> None:
        """Record that the results of a launched plan's items are here; the caller commits them."""
        for item in items:
            sequence = item.sequence
            sequence.num_due -= item.draws
            if item.epoch == sequence.num_preemptions:
                sequence.num_ahead -= item.num_tokens
        if items is self.flying:
            self.flying = []

    def commit(self, sequence: Sequence, num_computed: int) -> None:
        """Record that ``num_computed`` leading tokens are in the cache; publish full blocks, drop unused ones.

        Blocks reserved for rejected drafts go back here, so rejections do not hold memory.
        """
        size = self.pool.block_size
        sequence.num_computed = num_computed
        full = min(num_computed, len(sequence.token_ids)) // size
        if full > sequence.num_hashed:
            names = sequence.hashes(full, size)
            for index in range(sequence.num_hashed, full):
                self.pool.register(sequence.block_table[index], names[index])
            sequence.num_hashed = full
        needed = self.pool.blocks_for(len(sequence.token_ids))
        # One block more is left to it: the next tokens or drafts are likely to take it again.
        if len(sequence.block_table) > needed + 1:
            self.pool.release(sequence.block_table[needed:])
            del sequence.block_table[needed:]

    def check_integrity(self) -> None:
        """Sum the pool's books against the block tables of everyone known here."""
        assert not any(sequence.block_table for sequence in self.waiting), "a waiting sequence holds blocks"
        self.pool.check_integrity([sequence.block_table for sequence in self.running])

    # Decodes and prefills of those already running

    def _schedule_decodes(self, plan: StepPlan) -> None:
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            # Whoever gets its last token from the step in flight has nothing more to compute.
            is_ready = sequence.num_left == 1 and not (sequence.num_due and sequence.is_full)
            if is_ready and self._grow(sequence, sequence.num_tokens, plan):
                plan.items.append(ScheduledSequence.of(sequence, 1))
                plan.num_tokens += 1
            # A sequence that preempted itself was the last in the list, so the index is past the end either way.
            index += 1

    def _schedule_prefills(self, plan: StepPlan) -> None:
        for sequence in list(self.running):
            left = sequence.num_left
            if left <= 1 or sequence not in self.running:
                continue
            room = self._prefill_room(plan)
            if room <= 0:
                return
            count = min(left, room)
            if self._grow(sequence, sequence.num_tokens, plan):
                plan.items.append(ScheduledSequence.of(sequence, count))
                plan.num_tokens += count

    def _prefill_room(self, plan: StepPlan) -> int:
        """Count prompt tokens that the step may still take: fewer beside decodes, whose next tokens wait for it."""
        room = self.max_batch_tokens - plan.num_tokens
        num_decodes = sum(1 for item in plan.items if item.num_tokens == 1)
        if not num_decodes:
            return room
        if self._bounds is None:
            self._bounds = self.chunk_bounds()
        chunk = max(self._bounds.most_tokens - num_decodes, self._bounds.least_chunk)
        return min(room, chunk - (plan.num_tokens - num_decodes))

    def _grow(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Own blocks for ``num_tokens`` positions, preempting from the end of the order; False if that was oneself."""
        needed = self.pool.blocks_for(num_tokens) - len(sequence.block_table)
        if needed <= 0:
            return True
        while needed > self.pool.room_for(needed):
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        sequence.block_table.extend(self.pool.allocate(needed))
        return True

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        self.running.remove(victim)
        self._release(victim)
        victim.restart()
        victim.num_preemptions += 1
        insort(self.waiting, victim, key=_rank)
        plan.preempted.append(victim)
        for item in plan.items:
            if item.sequence is victim:
                plan.items.remove(item)
                plan.num_tokens -= item.num_tokens
                break

    def put_back(self, plan: StepPlan) -> Sequence:
        """Take the item with the most tokens (of several the last) out of a plan; its sequence starts anew later."""
        largest = max(reversed(plan.items), key=lambda item: item.num_tokens + item.num_drafts)
        plan.num_tokens -= largest.num_drafts  # the rest of it is taken off with the item
        self._preempt(largest.sequence, plan)
        return largest.sequence

    def _release(self, sequence: Sequence) -> None:
        if sequence.block_table:
            self.pool.release(sequence.block_table)
            sequence.block_table = []

    # Admission

    def _age(self, now_s: float) -> None:
        grown = [s for s in self.waiting if s.priority > Priority.LIVE and now_s - s.arrival_s >= self.aging_s]
        for sequence in grown:
            self.waiting.remove(sequence)
            sequence.priority = Priority.LIVE
            insort(self.waiting, sequence, key=_rank)

    def _admit(self, plan: StepPlan, now_s: float) -> None:
        preempted = set(map(id, plan.preempted))
        while self.waiting and self._prefill_room(plan) > 0:
            # Where the head cannot be admitted nobody behind it is: small requests would keep a large one out for good.
            sequence = self.waiting[0]
            # Whoever just made room must not take it back in the same step.
            if id(sequence) in preempted or self._is_on_its_way(sequence, plan):
                return
            if not self._make_place(sequence, plan, preempted):
                return
            self.waiting.pop(0)
            count = min(sequence.num_left, self._prefill_room(plan))
            insort(self.running, sequence, key=_rank)
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now_s
            plan.items.append(ScheduledSequence.of(sequence, count))
            plan.num_tokens += count

    def _is_on_its_way(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Tell whether this step or the one in flight computes the next block that the sequence could read.

        Several answers to one prompt arrive together; waiting a step for the first one's prefill saves all the others'.
        """
        size = self.pool.block_size
        names = sequence.hashes(sequence.cacheable_tokens() // size, size)
        held = len(self.pool.lookup(names))
        if held == len(names):
            return False
        for item in (*plan.items, *self.flying):
            leader, end = item.sequence, min(item.start + item.num_tokens, len(item.sequence.token_ids)) // size
            if leader not in self.running:
                continue
            if leader.num_hashed <= held < end and leader.hashes(end, size)[held] == names[held]:
                return True
        return False

    def _make_place(self, sequence: Sequence, plan: StepPlan, preempted: set[int]) -> bool:
        """Give a waiting sequence its blocks, at the cost of lower classes if that is enough; False if it is not."""
        if self._take_blocks(sequence):
            return True
        lower = [other for other in self.running if other.priority > sequence.priority]
        if not lower or not self._would_fit(sequence, lower):
            return False
        for victim in reversed(lower):
            self._preempt(victim, plan)
            preempted.add(id(victim))
            if self._take_blocks(sequence):
                return True
        return False

    def _would_fit(self, sequence: Sequence, lower: Seq[Sequence]) -> bool:
        freeable = sum(len(victim.block_table) for victim in lower)
        needed = self.pool.blocks_for(sequence.num_reserved) + len(self.running) - len(lower)
        return needed <= self.pool.num_available + freeable

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Reserve all blocks of the present tokens, reading what the cache has of them."""
        if len(self.running) >= self.max_num_seqs:
            return False
        pool, size = self.pool, self.pool.block_size
        hits = pool.lookup(sequence.hashes(sequence.cacheable_tokens() // size, size))
        fresh = pool.blocks_for(sequence.num_reserved) - len(hits)
        # One block per running sequence is kept back: each may need one soon, and preempting for it costs a recompute.
        needed = fresh + pool.num_idle(hits) + len(self.running)
        if needed > pool.room_for(needed):
            return False
        pool.acquire(hits)
        sequence.block_table = [*hits, *pool.allocate(fresh)]
        sequence.num_computed, sequence.num_hashed = len(hits) * size, len(hits)
        if not sequence.num_preemptions:
            sequence.num_cached = sequence.num_computed
        return True

    # Drafts

    def _schedule_drafts(self, plan: StepPlan) -> None:
        """Spend what is left of budget and pool on drafts; never preempt for a guess."""
        for item in plan.items:
            sequence = item.sequence
            predicted = self._num_predicted(item, plan)
            wanted = predicted or min(sequence.draft_limit, self.max_batch_tokens - plan.num_tokens)
            if wanted <= 0 or not (predicted or sequence.is_decoding):
                continue
            have = len(sequence.block_table)
            more = self.pool.blocks_for(len(sequence.token_ids) + wanted) - have
            spare = self.pool.room_for(max(more, 0) + len(self.running)) - len(self.running)
            reach = (have + max(spare, 0)) * self.pool.block_size
            wanted = min(wanted, reach - len(sequence.token_ids))
            if wanted <= 0:
                continue
            needed = self.pool.blocks_for(len(sequence.token_ids) + wanted) - have
            if needed > 0:
                sequence.block_table.extend(self.pool.allocate(needed))
            item.num_drafts = wanted
            plan.num_tokens += wanted
            if predicted:
                assert sequence.prediction is not None
                sequence.draft_ids, sequence.draft_probs = sequence.prediction.propose(wanted), None
                item.is_predicted = True

    def _num_predicted(self, item: ScheduledSequence, plan: StepPlan) -> int:
        """Count predicted tokens to check after the item's own: they delay others as a prompt's do, bounded alike."""
        sequence = item.sequence
        if sequence.prediction is None or not item.draws or sequence.num_due:
            return 0
        checked = sum(other.num_drafts for other in plan.items if other.is_predicted)
        room = min(sequence.max_output - sequence.num_output - 1, self._prefill_room(plan), MOST_CHECKED - checked)
        return max(min(sequence.prediction.num_wanted, room), 0)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting
