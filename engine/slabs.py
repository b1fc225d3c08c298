"""Shares memory between several block pools in slabs: who holds which, and who may have one more. Pure Python.

Every pool lays blocks of its own size over the whole memory, end to end, and uses those that lie wholly inside slabs
it holds; so a block's number tells its address, whichever slabs a pool has:

    memory    |     slab 0     |     slab 1     |     slab 2     |
    pool A    | 0 | 1 | 2 | 3  | 4 | 5 | 6 | 7  | ...            |     4 blocks a slab
    pool B    |   0   |   1    |   2   |   3    |   4   |   5    |     2 blocks a slab

A pool that needs blocks takes a free slab, else, if its own cached blocks are not enough, one that another pool has
nothing but cached blocks in. A slab without any content goes back at once. Each pool is guaranteed a number of slabs:
what others hold beyond their own guarantee can always be had back by whoever falls short of it, once nobody owns a
block there, and nobody may take what is guaranteed to another. So ``free >= owed`` holds whenever nobody waits in
:meth:`Slabs.join`, ``owed`` being what pools lack of their guarantees.

Slabs with owned blocks do not move. Blocks are given out from the lowest number on, so that the others run empty.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import gcd
from typing import Protocol

from engine.blocks import BlockPool
from engine.errors import OutOfMemoryPlan

# Blocks of 16 tokens in 16 bits of Llama 3's 3B, 8B and 70B are 7, 8 and 20 times 2**18 bytes; this is their least
# common multiple, of which 40, 35 or 14 blocks leave nothing over.
SLAB_BYTES = 280 << 18
# Small memory is cut into smaller slabs, of the same odd factors, so that there is something to move.
_WANTED_SLABS = 64
_SMALLEST_SLAB = 280 << 10

# A pool that joins while others have all the memory in use waits this long for requests to end.
JOIN_TIMEOUT_S = 60.0


def slab_bytes_for(num_bytes: int) -> int:
    """Return the size of the slabs that memory of this size is cut into."""
    size = SLAB_BYTES
    while size > _SMALLEST_SLAB and num_bytes // size < _WANTED_SLABS:
        size //= 2
    return size


class SlabHandover(Protocol):
    """Does what has to happen where the memory is when a slab changes hands; called with the lock held."""

    def leave(self) -> object:
        """Mark the end of all that this pool's owner has asked of its device so far."""

    def enter(self, slab: int, mark: object, *, is_foreign: bool) -> None:
        """Let the new owner begin after ``mark``; a foreign slab holds what another pool wrote."""


def blocks_per_slab(slab_bytes: int, block_bytes: int) -> int:
    """Count whole blocks that every slab holds at least, wherever it lies: where the sizes do not match, one fewer."""
    return max(slab_bytes - block_bytes + gcd(slab_bytes, block_bytes), 0) // block_bytes


class SharedPool(BlockPool):
    """Gives out blocks that come and go with its slabs. Safe from any thread; made by :meth:`Slabs.join`.

    Attributes
    ----------
    num_blocks : block ids are below this; most of them are in slabs of others
    min_slabs : how many slabs are guaranteed to it
    """

    def __init__(
        self, slabs: Slabs, name: str, *, block_bytes: int, block_size: int, min_slabs: int, handover: SlabHandover
    ) -> None:
        self.lock = slabs.lock
        self.name = name
        self.min_slabs = min_slabs
        self.per_slab = blocks_per_slab(slabs.slab_bytes, block_bytes)
        self._slabs = slabs
        self._block_bytes = block_bytes
        self._handover = handover
        self._held: dict[int, range] = {}  # slab → its blocks
        self._num_held = 0  # blocks in them
        self._idle: dict[int, object] = {}  # held slabs without an owned block → mark; longest idle first
        super().__init__(slabs.num_slabs * slabs.slab_bytes // block_bytes, block_size)

    def reset(self) -> None:
        with self.lock:
            mark = self._handover.leave() if self._held else None
            for slab in list(self._held):
                self._slabs.put_back(slab, self._idle.get(slab, mark))
            self._held, self._idle, self._num_held = {}, {}, 0
            super().reset()
            self._free = []

    def close(self) -> None:
        """Give up every slab, and the guarantee of any. Idempotent."""
        with self.lock:
            self.reset()
            self._slabs.leave(self)

    @property
    def num_held(self) -> int:
        return self._num_held

    @property
    def num_owned(self) -> int:
        with self.lock:
            return super().num_owned

    @property
    def num_slabs(self) -> int:
        return len(self._held)

    @property
    def num_spare_slabs(self) -> int:
        """Count the slabs that others may have now."""
        return max(min(len(self._idle), len(self._held) - self.min_slabs), 0)

    @property
    def num_owed_slabs(self) -> int:
        """Count the guaranteed slabs that it does not hold."""
        return max(self.min_slabs - len(self._held), 0)

    @property
    def free_fraction(self) -> float:
        with self.lock:
            within_reach = self._slabs.num_within_reach(self) * self.per_slab
            return (self.num_available + within_reach) / max(self.num_held + within_reach, 1)

    def room_for(self, count: int) -> int:
        with self.lock:
            # A free slab spares what is cached here; what others have cached is taken only if that is not enough.
            while len(self._free) < count and self._slabs.take(self):
                pass
            while self.num_available < count and (self._slabs.take(self) or self._slabs.reclaim(self)):
                pass
            return self.num_available

    # Blocks change owners

    def acquire(self, blocks: Sequence[int]) -> None:
        with self.lock:
            super().acquire(blocks)
            self._wake(blocks)

    def allocate(self, count: int) -> list[int]:
        with self.lock:
            blocks = super().allocate(count)
            self._wake(blocks)
            return blocks

    def release(self, blocks: Sequence[int]) -> None:
        with self.lock:
            super().release(blocks)
            self._settle(blocks)

    def register(self, block: int, name: bytes) -> None:
        with self.lock:
            super().register(block, name)

    def forget(self, blocks: Iterable[int]) -> None:
        with self.lock:
            super().forget(blocks)

    def _wake(self, blocks: Iterable[int]) -> None:
        for slab in self._slabs_of(blocks):
            self._idle.pop(slab, None)

    def _settle(self, blocks: Iterable[int]) -> None:
        """Note slabs that nobody owns a block of any more, and put back those without content."""
        mark: object = None
        for slab in self._slabs_of(blocks):
            inside = self._held[slab]
            if any(self._refs[block] for block in inside):
                continue
            if slab not in self._idle:
                mark = mark or self._handover.leave()
                self._idle[slab] = mark
                self._slabs.note_idle()
            if not any(self._hash_of[block] for block in inside):
                self.give_up(slab)

    def _slabs_of(self, blocks: Iterable[int]) -> set[int]:
        return {block * self._block_bytes // self._slabs.slab_bytes for block in blocks}

    def _pop_free(self) -> int:
        return heappop(self._free)

    def _push_free(self, block: int) -> None:
        heappush(self._free, block)

    # Slabs come and go

    def gain(self, slab: int, mark: object, *, is_foreign: bool) -> None:
        """Hold one more slab."""
        self._handover.enter(slab, mark, is_foreign=is_foreign)
        size = self._slabs.slab_bytes
        inside = range(-(-slab * size // self._block_bytes), (slab + 1) * size // self._block_bytes)
        self._held[slab] = inside
        self._idle[slab] = self._handover.leave()
        self._num_held += len(inside)
        for block in inside:
            heappush(self._free, block)

    def give_up_longest_idle(self) -> None:
        """Put back a slab without owned blocks, forgetting what is cached in it."""
        self.give_up(next(iter(self._idle)))

    def give_up(self, slab: int) -> None:
        """Put back a slab without owned blocks."""
        inside, mark = self._held.pop(slab), self._idle.pop(slab)
        self._num_held -= len(inside)
        for block in inside:
            self._cached.pop(block, None)
            self._forget(block)
        self._free = [block for block in self._free if block not in inside]
        heapify(self._free)
        self._slabs.put_back(slab, mark)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        with self.lock:
            super().check_integrity(tables)
            places = {block for inside in self._held.values() for block in inside}
            assert places.issuperset(self._free), "a block is free in a slab of another"
            assert places.issuperset(self._block_of.values()), "a block is cached in a slab of another"
            assert all(block in places for block, count in enumerate(self._refs) if count), "an owned block was lost"
            for slab, inside in self._held.items():
                owned = any(self._refs[block] for block in inside)
                assert owned == (slab not in self._idle), f"slab {slab} is noted wrongly"


class Slabs:
    """Holds the slabs of one memory, and the pools that share them.

    Parameters
    ----------
    num_slabs : slabs 0 .. num_slabs - 1
    slab_bytes : bytes of each

    Attributes
    ----------
    lock : guards every pool's books too, since any pool may take from another's
    """

    def __init__(self, num_slabs: int, slab_bytes: int) -> None:
        assert num_slabs > 0, num_slabs
        assert slab_bytes > 0, slab_bytes
        self.num_slabs = num_slabs
        self.slab_bytes = slab_bytes
        self.lock = threading.RLock()
        self.pools: list[SharedPool] = []
        self._changed = threading.Condition(self.lock)
        self._free = list(range(num_slabs))  # a heap
        self._marks: list[object] = [None] * num_slabs
        self._writers: list[SharedPool | None] = [None] * num_slabs  # who held it last

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_owed(self) -> int:
        """Count the slabs that pools lack of their guarantees."""
        return sum(pool.num_owed_slabs for pool in self.pools)

    def num_within_reach(self, pool: SharedPool) -> int:
        """Count the slabs that a pool could have more than it holds."""
        spare = sum(other.num_spare_slabs for other in self.pools if other is not pool)
        return max(self.num_free + spare - self.num_owed, 0) + pool.num_owed_slabs

    def join(
        self,
        name: str,
        *,
        block_bytes: int,
        block_size: int,
        min_blocks: int,
        handover: SlabHandover,
        timeout_s: float = JOIN_TIMEOUT_S,
    ) -> SharedPool:
        """Let one more pool share the memory; waits where others must let go of its guarantee first.

        Parameters
        ----------
        name : for messages
        block_bytes : bytes of one block
        min_blocks : how many blocks are guaranteed to it

        Raises
        ------
        OutOfMemoryPlan
            The guarantees exceed the memory, or others have it in use for ``timeout_s``.
        """
        per_slab = blocks_per_slab(self.slab_bytes, block_bytes)
        assert per_slab, "a slab does not hold a block"
        min_slabs = -(-min_blocks // per_slab)
        with self._changed:
            promised = sum(pool.min_slabs for pool in self.pools)
            if promised + min_slabs > self.num_slabs:
                raise self._too_small(name, min_slabs, f"{promised} are guaranteed to others")
            pool = SharedPool(
                self, name, block_bytes=block_bytes, block_size=block_size, min_slabs=min_slabs, handover=handover
            )
            self.pools.append(pool)
            while self.num_free < self.num_owed:
                if not self.reclaim(pool) and not self._changed.wait(timeout_s):
                    self.leave(pool)
                    raise self._too_small(name, min_slabs, f"others had all but {self.num_free} in use")
            return pool

    def _too_small(self, name: str, min_slabs: int, why: str) -> OutOfMemoryPlan:
        return OutOfMemoryPlan(
            f"The KV cache of {name} needs {min_slabs} slabs for one whole context; of the {self.num_slabs} slabs of "
            f"{self.slab_bytes:,} bytes that its device has for keys and values, {why}. "
            "Shorten its context_length, or give the device more kv_bytes.",
            needed_bytes=min_slabs * self.slab_bytes,
            free_bytes=self.num_free * self.slab_bytes,
        )

    def leave(self, pool: SharedPool) -> None:
        """Forget a pool that holds nothing any more."""
        with self._changed:
            assert not pool.num_slabs, pool.num_slabs
            self.pools = [each for each in self.pools if each is not pool]
            self._writers = [None if each is pool else each for each in self._writers]
            self._changed.notify_all()

    def take(self, pool: SharedPool) -> bool:
        """Give a pool one free slab if nobody else is owed it."""
        if not self._free or (not pool.num_owed_slabs and self.num_free <= self.num_owed):
            return False
        slab = heappop(self._free)
        writer, self._writers[slab] = self._writers[slab], pool
        pool.gain(slab, self._marks[slab], is_foreign=writer is not pool)
        self._marks[slab] = None
        return True

    def reclaim(self, pool: SharedPool) -> bool:
        """Have another pool, the one with the most to spare, put back its longest idle slab."""
        others = [other for other in self.pools if other is not pool and other.num_spare_slabs]
        if not others:
            return False
        max(others, key=lambda other: other.num_spare_slabs).give_up_longest_idle()
        return True

    def note_idle(self) -> None:
        """Tell whoever waits that a slab can be had."""
        self._changed.notify_all()

    def put_back(self, slab: int, mark: object) -> None:
        """Take a slab that a pool has let go of."""
        heappush(self._free, slab)
        # What the old holder launched may still write: whoever takes the slab waits for this mark on its own stream.
        self._marks[slab] = mark
        self._changed.notify_all()

    def check_integrity(self) -> None:
        """Assert that every slab is free or held by one pool, and that what is guaranteed can be had."""
        with self.lock:
            held = [slab for pool in self.pools for slab in pool._held]
            assert sorted([*held, *self._free]) == list(range(self.num_slabs)), "a slab is lost or held twice"
            assert self.num_free >= self.num_owed, "a guarantee was given away"
