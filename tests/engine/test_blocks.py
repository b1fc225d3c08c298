"""The block pool against a naive model: a dict of owners and a dict of what each block holds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.blocks import BlockPool, hash_block, hash_salt

SIZE = 4
NUM_BLOCKS = 7


class PoolMachine(RuleBasedStateMachine):
    """Tables are allocated, shared, published and released in any order; a naive model says what may be found."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, SIZE)
        self.owners: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # what was last published into a block

    @rule(target=tables, count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> list[int]:
        if count > self.pool.num_available:
            count = 0
        owned = {block for table in self.owners for block in table}
        table = self.pool.allocate(count)
        assert len(set(table)) == count
        assert not owned & set(table), "an owned block was given out"
        for block in table:
            self.content.pop(block, None)
        self.owners.append(table)
        return table

    @rule(table=tables, tokens=st.lists(st.integers(0, 2), min_size=0, max_size=6))
    def publish(self, table: list[int], tokens: list[int]) -> None:
        name = hash_salt("")
        for block, token in zip(table, tokens, strict=False):
            name = hash_block(name, [token] * SIZE)
            if name not in self.content.values() and block not in self.content:
                self.content[block] = name
            self.pool.register(block, name)

    @rule(target=tables, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def share(self, tokens: list[int]) -> list[int]:
        names = [hash_salt("")]
        for token in tokens:
            names.append(hash_block(names[-1], [token] * SIZE))
        found = self.pool.lookup(names[1:])
        assert [self.content[block] for block in found] == names[1 : len(found) + 1]
        self.pool.acquire(found)
        self.owners.append(found)
        return found

    @rule(table=consumes(tables))
    def release(self, table: list[int]) -> None:
        for index, owner in enumerate(self.owners):
            if owner is table:
                del self.owners[index]
                break
        self.pool.release(table)

    @rule(table=tables)
    def forget(self, table: list[int]) -> None:
        self.pool.forget(table)
        for block in table:
            self.content.pop(block, None)

    @invariant()
    def books_sum(self) -> None:
        self.pool.check_integrity(self.owners)
        owned = {block for table in self.owners for block in table}
        assert self.pool.num_owned == len(owned)
        assert self.pool.num_available == NUM_BLOCKS - len(owned)
        for block in range(NUM_BLOCKS):
            assert self.pool.is_shared(block) is (sum(block in table for table in self.owners) > 1)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_least_recently_used_block_is_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(4, SIZE)
    chains = {}
    for salt in ("old", "new"):
        table = pool.allocate(2)
        first = hash_block(hash_salt(salt), [1] * SIZE)
        chains[salt] = [first, hash_block(first, [2] * SIZE)]
        for block, name in zip(table, chains[salt], strict=True):
            pool.register(block, name)
        pool.release(table)
    assert pool.num_cached == 4
    pool.allocate(1)
    assert [len(pool.lookup(chains[salt])) for salt in ("old", "new")] == [1, 2]
    pool.allocate(1)
    assert [len(pool.lookup(chains[salt])) for salt in ("old", "new")] == [0, 2]


def test_hash_depends_on_every_earlier_token_and_on_the_salt() -> None:
    def chain(salt: str, *blocks: list[int]) -> bytes:
        name = hash_salt(salt)
        for tokens in blocks:
            name = hash_block(name, tokens)
        return name

    same = [3] * SIZE
    names = {chain("", [1] * SIZE, same), chain("", [2] * SIZE, same), chain("a", [1] * SIZE, same), chain("", same)}
    assert len(names) == 4
    assert chain("a", same) == chain("a", list(same))
    assert {len(name) for name in names} == {16}, "128 bits, as the module says"


def test_forgotten_blocks_are_not_found_again() -> None:
    pool = BlockPool(2, SIZE)
    table = pool.allocate(1)
    name = hash_block(hash_salt(""), [1] * SIZE)
    pool.register(table[0], name)
    pool.forget(table)
    assert pool.lookup([name]) == []
    pool.release(table)
    assert pool.num_cached == 0
    pool.check_integrity([])
