"""Keeps the books of KV blocks: who owns which, and which full blocks may be read again. Pure Python.

Every block is in exactly one state:

    free      no owner, content worthless            (a stack)
    cached    no owner, content known by its hash    (least recently used first; evicted when ``free`` is empty)
    owned     one or more owners, perhaps hashed     (a count)

A full block's hash covers its tokens, the hash of the block before it and a salt, so equal hashes mean equal prefixes
under equal weights. Hashes are 128-bit BLAKE2b: a collision would show one user's prompt to another, and Python's own
``hash`` can be made to collide.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name a full block: 16 bytes over the prefix's name (or the salt, for the first block) and its tokens."""
    return blake2b(array("q", token_ids).tobytes(), key=parent, digest_size=16).digest()


def hash_salt(salt: str) -> bytes:
    """Return the parent of a first block: requests with different salts never share."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class BlockPool:
    """Gives out a fixed number of KV blocks, with reference counts and a prefix cache.

    Parameters
    ----------
    num_blocks : blocks 0 .. num_blocks - 1
    block_size : tokens per block

    Attributes
    ----------
    lock : held by whoever looks and then acts, so that what was seen still holds; nothing here where nobody else acts
    """

    lock: AbstractContextManager[object] = nullcontext()

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, num_blocks
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.reset()

    def reset(self) -> None:
        """Begin new books: nobody owns anything, and nothing is known of what the blocks hold."""
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # insertion order is age: the first is evicted first
        self._refs = [0] * self.num_blocks
        self._hash_of: list[bytes | None] = [None] * self.num_blocks
        self._block_of: dict[bytes, int] = {}

    def close(self) -> None:
        """Give up every block."""
        self.reset()

    @property
    def num_available(self) -> int:
        """Count the blocks that ``allocate`` can give: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Count the blocks that are here now: all there are, unless pools share them."""
        return self.num_blocks

    @property
    def num_owned(self) -> int:
        return self.num_held - self.num_available

    @property
    def free_fraction(self) -> float:
        """Return the share of the blocks this pool could have now that nobody owns."""
        return self.num_available / self.num_blocks

    def room_for(self, count: int) -> int:
        """Have ``count`` blocks available if there is a way; the number that are, which may be fewer or more."""
        return self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """Count the blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the longest run of leading hashes whose blocks are held; nothing changes owner."""
        found: list[int] = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, blocks: Sequence[int]) -> int:
        """Count those of these that are cached, so that acquiring them takes from ``num_available``."""
        return sum(1 for block in blocks if not self._refs[block])

    def is_shared(self, block: int) -> bool:
        """Tell whether more than one table holds it."""
        return self._refs[block] > 1

    def acquire(self, blocks: Sequence[int]) -> None:
        """Become one more owner of blocks that ``lookup`` found."""
        for block in blocks:
            if not self._refs[block]:
                del self._cached[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Own ``count`` blocks nobody else owns, evicting the least recently used cached ones if need be."""
        assert count <= self.num_available, (count, self.num_available)
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._pop_free()
        else:
            block = next(iter(self._cached))
            del self._cached[block]
            self._forget(block)
        self._refs[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one ownership of each block of a table.

        The tail goes first, so that the tail of a prefix is evicted before its head: a head without its tail is
        still useful, a tail without its head is not.
        """
        for block in reversed(blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, block
            if self._refs[block]:
                continue
            if self._hash_of[block] is None:
                self._push_free(block)
            else:
                self._cached[block] = None

    def register(self, block: int, name: bytes) -> None:
        """Publish an owned, full and computed block. A second block of the same content stays private."""
        assert self._refs[block], block
        if self._hash_of[block] is None and name not in self._block_of:
            self._hash_of[block] = name
            self._block_of[name] = block

    def forget(self, blocks: Iterable[int]) -> None:
        """Withdraw owned blocks from the cache, because their content proved bad; they are free once released."""
        for block in blocks:
            assert self._refs[block], block
            self._forget(block)

    def _pop_free(self) -> int:
        return self._free.pop()

    def _push_free(self, block: int) -> None:
        self._free.append(block)

    def _forget(self, block: int) -> None:
        name = self._hash_of[block]
        if name is not None:
            self._hash_of[block] = None
            del self._block_of[name]

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Sum the books: free + cached + owned blocks equal all blocks, and owners match the given block tables."""
        owners = [0] * self.num_blocks
        for table in tables:
            for block in table:
                owners[block] += 1
        assert owners == self._refs, "reference counts differ from the block tables"
        idle = [*self._free, *self._cached]
        assert len(set(idle)) == len(idle), "a block is free twice"
        assert all(not self._refs[block] for block in idle), "an owned block is free"
        assert len(idle) + sum(1 for count in owners if count) == self.num_held, "a block is lost"
        assert all(self._hash_of[block] is None for block in self._free), "a free block is still cached"
        assert all(self._hash_of[block] is not None for block in self._cached), "a cached block has no hash"
        assert all(self._hash_of[block] == name for name, block in self._block_of.items()), "the cache's index is off"
