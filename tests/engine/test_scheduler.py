"""The scheduler against what it promises: nobody starves, no slot is written twice, the books sum."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockPool
from engine.request import Priority, Request, SamplingParams
from engine.scheduler import ChunkBounds, Scheduler, StepPlan
from engine.sequence import Sequence
from engine.slabs import Slabs
from engine.step_costs import ChunkCosts

SIZE = 4


class World:
    """A scheduler, a clock, and a cache in which every slot remembers which token of which prefix was written to it."""

    def __init__(
        self,
        *,
        num_blocks: int = 12,
        max_num_seqs: int = 4,
        max_batch_tokens: int = 10,
        scheduler: type[Scheduler] = Scheduler,
        pool: BlockPool | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, SIZE) if pool is None else pool
        self.scheduler = scheduler(
            self.pool, max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens, aging_s=50.0
        )
        self.slots: dict[int, tuple[int, ...]] = {}
        self.now = 0.0
        self.count = 0
        self.finished: list[Sequence] = []

    def add(
        self, prompt: list[int], max_output: int, priority: Priority = Priority.LIVE, draft_limit: int = 0
    ) -> Sequence:
        self.count += 1
        request = Request(str(self.count), tuple(prompt), SamplingParams(), priority)
        sequence = Sequence(request, order=self.count, arrival_s=self.now, max_output=max_output, seed=0)
        sequence.draft_limit = draft_limit
        self.scheduler.add(sequence)
        return sequence

    def step(self, accept: int = 0) -> StepPlan:
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        assert plan.num_tokens <= self.scheduler.max_batch_tokens
        assert plan.num_tokens == sum(item.num_tokens + item.num_drafts for item in plan.items)
        assert len({id(item.sequence) for item in plan.items}) == len(plan.items)
        written: set[int] = set()
        for item in plan.items:
            self._write(item.sequence, item.num_tokens + item.num_drafts, written)
        for item in plan.items:
            self._after(item.sequence, item.num_tokens, min(accept, item.num_drafts))
        return plan

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.block_table[position // SIZE] * SIZE + position % SIZE

    def _write(self, sequence: Sequence, count: int, written: set[int]) -> None:
        """Write what the step computes, having checked that everything before it is what it should be."""
        drafted = [*sequence.token_ids, *([-1] * count)]
        for position in range(sequence.num_computed):
            assert self.slots[self._slot(sequence, position)] == tuple(sequence.token_ids[: position + 1])
        for position in range(sequence.num_computed, sequence.num_computed + count):
            slot = self._slot(sequence, position)
            assert slot not in written, "a slot was written twice in one step"
            assert self.pool._refs[slot // SIZE] == 1, "a shared block was written"
            written.add(slot)
            self.slots[slot] = tuple(drafted[: position + 1])

    def _after(self, sequence: Sequence, count: int, accepted: int) -> None:
        computed = sequence.num_computed + count
        if computed < len(sequence.token_ids):
            self.scheduler.commit(sequence, computed)
            return
        room = sequence.max_output - sequence.num_output
        for _ in range(min(1 + accepted, room)):
            sequence.token_ids.append(7)
        # The slots of accepted drafts now hold real tokens.
        for position in range(computed, len(sequence.token_ids) - 1):
            self.slots[self._slot(sequence, position)] = tuple(sequence.token_ids[: position + 1])
        self.scheduler.commit(sequence, len(sequence.token_ids) - 1 if room else computed)
        if sequence.num_output >= sequence.max_output:
            self.scheduler.remove(sequence)
            self.finished.append(sequence)


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=24)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, cancellations and steps in any order on a pool that is too small for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.alive: list[Sequence] = []

    @rule(prompt=prompts, output=st.integers(0, 20), priority=st.sampled_from(Priority), drafts=st.integers(0, 3))
    def arrive(self, prompt: list[int], output: int, priority: Priority, drafts: int) -> None:
        self.alive.append(self.world.add(prompt, output, priority, drafts))

    @precondition(lambda self: self.world.scheduler.has_work)
    @rule(accept=st.integers(0, 3))
    def step(self, accept: int) -> None:
        first = min(self.world.scheduler, key=lambda s: s.rank)
        plan = self.world.step(accept)
        assert first not in plan.preempted, "the first in the order was preempted"
        self.alive = [s for s in self.alive if s not in self.world.finished]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(self.alive))
        self.world.scheduler.remove(victim)
        self.alive.remove(victim)
        assert not victim.block_table

    @invariant()
    def books_sum(self) -> None:
        self.world.scheduler.check_integrity()
        assert sorted(map(id, self.world.scheduler)) == sorted(map(id, self.alive))

    def teardown(self) -> None:
        """Everything admitted ends, and then every block is free or cached."""
        bound = sum(len(s.token_ids) + s.max_output + 1 for s in self.alive) * (len(self.alive) + 2) + 10
        for _ in range(bound):
            if not self.world.scheduler.has_work:
                break
            self.world.step()
        assert not self.world.scheduler.has_work, "somebody starved"
        assert self.world.pool.num_owned == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(prompts, st.integers(1, 10)), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_requests_of_one_class_start_in_order(arrivals: list[tuple[list[int], int]]) -> None:
    world = World()
    sequences = [world.add(prompt, output) for prompt, output in arrivals]
    while world.scheduler.has_work:
        world.step()
    starts = [s.scheduled_s for s in sequences]
    assert all(start is not None for start in starts)
    assert starts == sorted(starts)  # type: ignore[type-var]


def test_live_work_goes_before_background_and_preempts_it_for_room() -> None:
    world = World(num_blocks=6)
    background = world.add([1] * 16, 8, Priority.BACKGROUND)
    while not background.num_output:
        world.step()
    live = world.add([2] * 12, 4)
    plan = world.step()
    assert plan.preempted == [background]
    assert live.block_table
    while world.scheduler.has_work:
        world.step()
    assert world.finished == [live, background]
    assert background.num_preemptions == 1
    assert background.num_output == 8


def test_background_work_ages_into_live() -> None:
    world = World(max_num_seqs=1)
    background = world.add([1] * 4, 2, Priority.BACKGROUND)
    live_after = 0
    for _ in range(200):
        if background in world.finished:
            break
        # Live work never lets up: without aging the single place would never be free.
        if len([s for s in world.scheduler if s.request.priority is Priority.LIVE]) < 2:
            world.add([2, 3], 3)
            live_after += 1
        world.step()
    assert background in world.finished
    assert live_after > 5


def test_a_second_request_reads_the_first_ones_prefix() -> None:
    world = World()
    first = world.add([1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    while world.scheduler.has_work:
        world.step()
    second = world.add([1, 2, 3, 4, 5, 6, 7, 8, 1], 1)
    third = world.add([1, 2, 3, 4, 5, 6, 7, 8], 1)
    plan = world.step()
    assert first in world.finished
    assert [item.num_tokens for item in plan.items] == [1, 4]
    assert (second.num_cached, third.num_cached) == (8, 4)


def test_a_history_that_grows_reads_all_that_the_request_before_it_computed() -> None:
    world = World(num_blocks=40)
    history = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for step in range(5):
        known, grown = len(history), world.add(history, 1)
        while world.scheduler.has_work:
            world.step()
        assert grown.num_cached == (0 if not step else (known - 5) // 4 * 4)
        history = [*history, *range(10 + 5 * step, 15 + 5 * step)]


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    world = World(num_blocks=40, max_num_seqs=8, max_batch_tokens=16)
    twins = [world.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], 3) for _ in range(4)]
    other = world.add([9, 9, 9], 3)
    plans = [world.step(), world.step()]
    assert [item.sequence for item in plans[0].items] == twins[:1]
    assert [(item.sequence, item.num_tokens) for item in plans[1].items] == [(s, 1) for s in twins] + [(other, 3)]
    assert [s.num_cached for s in twins] == [0, 12, 12, 12]
    long = [world.add([7] * 40, 1) for _ in range(2)]
    while world.scheduler.has_work:
        world.step()
    assert [s.num_cached for s in long] == [0, 36]


def test_long_prompts_are_computed_in_chunks_beside_decodes() -> None:
    world = World(num_blocks=24, max_batch_tokens=6)
    world.add([1], 30)
    world.step()
    long = world.add([2] * 20, 1)
    counts = []
    while long not in world.finished:
        plan = world.step()
        counts.append([item.num_tokens for item in plan.items])
    assert counts == [[1, 5]] * 4


def test_prefills_are_bounded_beside_decodes_only() -> None:
    world = World(num_blocks=40, max_batch_tokens=16)
    world.scheduler.chunk_bounds = lambda: ChunkBounds(6)
    first = world.add([1] * 16, 9)
    assert [item.num_tokens for item in world.step().items] == [16]
    second, third = world.add([2] * 7, 9), world.add([3] * 7, 9)
    plans = [[(item.sequence, item.num_tokens) for item in world.step().items] for _ in range(3)]
    assert plans == [
        [(first, 1), (second, 5)],
        [(first, 1), (second, 2), (third, 3)],
        [(first, 1), (second, 1), (third, 4)],
    ]


def test_a_prompt_gets_on_beside_however_many_decodes() -> None:
    world = World(num_blocks=40, max_batch_tokens=16)
    world.scheduler.chunk_bounds = lambda: ChunkBounds(4, 2)
    for token in range(3):
        world.add([token], 30)
    world.step()
    last = world.add([9] * 6, 1)
    counts = [[item.num_tokens for item in world.step().items] for _ in range(3)]
    assert counts == [[1] * 3 + [2]] * 3
    assert world.finished == [last]


def test_without_a_least_chunk_decodes_may_take_the_whole_step() -> None:
    world = World(num_blocks=40, max_batch_tokens=16)
    world.scheduler.chunk_bounds = lambda: ChunkBounds(3)
    for token in range(3):
        world.add([token], 3)
    world.step()
    last = world.add([9] * 6, 1)
    assert [item.num_tokens for item in world.step().items] == [1] * 3
    while last not in world.finished:
        world.step()


class StoringScheduler(Scheduler):
    """Keeps the bounds that somebody worked out after the step before, whether or not this one needs them."""

    stored: ChunkBounds

    def _prefill_room(self, plan: StepPlan) -> int:
        room = self.max_batch_tokens - plan.num_tokens
        num_decodes = sum(1 for item in plan.items if item.num_tokens == 1)
        if not num_decodes:
            return room
        chunk = max(self.stored.most_tokens - num_decodes, self.stored.least_chunk)
        return min(room, chunk - (plan.num_tokens - num_decodes))


@given(
    arrivals=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=8),
    milliseconds=st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=12),
    target_ms=st.integers(1, 80),
)
@settings(deadline=None)
def test_bounds_worked_out_where_they_matter_cut_as_those_of_every_step(
    arrivals: list[tuple[int, int, int]], milliseconds: list[tuple[int, bool]], target_ms: int
) -> None:
    """Two schedulers under equal loads and costs, of which one is given its bounds after every step."""
    costs = ChunkCosts()

    def bounds() -> ChunkBounds:
        return ChunkBounds(costs.chunk(target_ms / 1e3) or 24, costs.least_worthwhile())

    storing, asking = (
        World(num_blocks=80, max_num_seqs=8, max_batch_tokens=24, scheduler=kind)
        for kind in (StoringScheduler, Scheduler)
    )
    assert isinstance(storing.scheduler, StoringScheduler)
    asking.scheduler.chunk_bounds = bounds
    starts = list(accumulate(pause for _, _, pause in arrivals))
    turn = 0
    while turn <= starts[-1] or storing.scheduler.has_work:
        for (length, output, _), start in zip(arrivals, starts, strict=True):
            if start == turn:
                for world in (storing, asking):
                    world.add([start] * length, output)
        storing.scheduler.stored = bounds()
        plan, same = storing.step(), asking.step()
        assert [(item.sequence.order, item.num_tokens) for item in plan.items] == [
            (item.sequence.order, item.num_tokens) for item in same.items
        ]
        took_ms, alone = milliseconds[turn % len(milliseconds)]
        if plan.items:
            costs.observe(plan.num_tokens, took_ms / 1e3, alone=alone)
        turn += 1


def test_bounds_are_not_asked_for_where_nobody_waits() -> None:
    world = World(num_blocks=40, max_batch_tokens=16)
    asked: list[int] = []

    def bounds() -> ChunkBounds:
        asked.append(len(world.scheduler.running))
        return ChunkBounds(6)

    world.scheduler.chunk_bounds = bounds
    for token in range(3):
        world.add([token] * 3, 12)
    for _ in range(5):
        world.step()
    assert not asked
    world.add([9] * 9, 2)
    counts = [[item.num_tokens for item in world.step().items] for _ in range(4)]
    assert counts == [[1] * 3 + [3]] * 3 + [[1] * 4]
    assert len(asked) == 3


def test_rejected_drafts_give_their_blocks_back() -> None:
    world = World(num_blocks=12)
    sequence = world.add([1] * 7, 16, draft_limit=9)
    world.step()
    for _ in range(4):
        plan = world.step(accept=0)
        assert plan.items[0].num_drafts == 9
        assert len(sequence.block_table) <= world.pool.blocks_for(len(sequence.token_ids)) + 1


def test_drafts_never_preempt_and_never_starve_a_prefill() -> None:
    world = World(num_blocks=6, max_batch_tokens=10)
    first = world.add([1] * 7, 16, draft_limit=9)
    world.step()
    second = world.add([2] * 9, 1)
    plan = world.step()
    assert not plan.preempted
    assert [(item.sequence, item.num_tokens) for item in plan.items] == [(first, 1), (second, 9)]
    assert plan.items[0].num_drafts == 0


class CountedSlabs:
    """Hands over nothing, and counts."""

    def __init__(self) -> None:
        self.num_taken = 0

    def leave(self) -> object:
        return None

    def enter(self, slab: int, mark: object, *, is_foreign: bool) -> None:
        self.num_taken += 1


@pytest.mark.parametrize(
    ("num_slabs", "num_prompt", "draft_limit", "num_drafts", "num_taken"),
    [
        # Of a slab's four blocks the prompt has two; the drafts reach into a fifth, and one block is kept back.
        (3, 7, 9, 9, 2),
        (1, 7, 9, 4, 1),
        # They fit what is there: nothing is taken that others could use.
        (3, 7, 3, 3, 1),
        (3, 8, 3, 3, 1),
    ],
)
def test_drafts_take_a_free_slab_of_a_shared_memory_where_they_need_it(
    num_slabs: int, num_prompt: int, draft_limit: int, num_drafts: int, num_taken: int
) -> None:
    counted = CountedSlabs()
    pool = Slabs(num_slabs, 4 * 16).join("m", block_bytes=16, block_size=SIZE, min_blocks=4, handover=counted)
    world = World(pool=pool)
    world.add([1] * num_prompt, 16, draft_limit=draft_limit)
    world.step()
    assert counted.num_taken == 1
    assert world.step().items[0].num_drafts == num_drafts
    assert counted.num_taken == num_taken


def test_what_waits_first_counts_as_prefill_while_there_is_a_place_for_it() -> None:
    world = World(num_blocks=40, max_num_seqs=2, max_batch_tokens=30)
    assert world.scheduler.num_to_prefill() == 0
    for length in (5, 6, 7):
        world.add([length] * length, 16)
    assert world.scheduler.num_to_prefill() == 5, "the first that waits"
    world.step()
    assert len(world.scheduler.running) == 2
    assert world.scheduler.num_to_prefill() == 0, "nobody may join"
