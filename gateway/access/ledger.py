"""The books of one process: what each account has used, and what is held for requests that run.

An account never holds more than its limit at the moment of a reservation, and nothing is ever negative. What a request
really used replaces what was held for it, also where that is more: the overshoot of running requests is the only way
past a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gateway.access.rate_windows import Account, Want


@dataclass(frozen=True, slots=True)
class Verdict:
    """Holds the result of a reservation.

    Attributes
    ----------
    spent : used and held of each account wanted, after the reservation where it was made
    refused : place of the first account that had no room; None when all was reserved
    unknown : accounts nothing is known of yet; nothing was reserved, ``open`` them and ask again
    """

    spent: tuple[int, ...] = ()
    refused: int | None = None
    unknown: tuple[Account, ...] = ()


@dataclass(slots=True)
class _Book:
    used: int
    held: dict[str, int] = field(default_factory=dict)
    # Own settlements since the book was opened or renewed.
    since: int = 0
    # Own settlements that the log has no row of.
    unlogged: int = 0

    @property
    def spent(self) -> int:
        return self.used + sum(self.held.values())


class LocalLedger:
    """Books in memory. What is held here ends with the process, as the requests it was held for do."""

    def __init__(self, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = clock
        self._books: dict[Account, _Book] = {}
        self._next_sweep = 1024

    def reserve(self, hold_id: str, wants: Sequence[Want]) -> Verdict:
        """Hold all that is wanted, or nothing."""
        unknown = tuple(want.account for want in wants if want.account not in self._books)
        if unknown:
            return Verdict(unknown=unknown)
        books = [self._books[want.account] for want in wants]
        for place, (book, want) in enumerate(zip(books, wants, strict=True)):
            if book.spent + want.amount > want.limit:
                return Verdict(tuple(each.spent for each in books), refused=place)
        for book, want in zip(books, wants, strict=True):
            book.held[hold_id] = want.amount
        return Verdict(tuple(each.spent for each in books))

    def settle(self, hold_id: str, actual: Mapping[Account, int], *, has_row: bool = True) -> None:
        """Replace what was held by what was used; 0 is a release. ``has_row``: the log's sums will hold it too."""
        for account, amount in actual.items():
            book = self._books.get(account)
            if book is not None and book.held.pop(hold_id, None) is not None:
                book.used += amount
                if has_row:
                    book.since += amount
                else:
                    book.unlogged += amount

    def open(self, account: Account, used: int) -> None:
        """Make an account known, with what the log says was used of it."""
        self._sweep()
        book = self._books.setdefault(account, _Book(used))
        book.used = max(book.used, used)

    def mark(self, account: Account) -> int:
        """Return where own settlements stand, to be given to ``renew`` with a sum of the log read after this."""
        book = self._books.get(account)
        return book.since if book is not None else 0

    def renew(self, account: Account, used: int, mark: int) -> None:
        """Take the log's sum over again: other processes may have used the account too.

        What was settled here while the sum was read may be in it, and counts twice until the next renewal.
        """
        book = self._books.get(account)
        if book is not None:
            book.since -= mark
            book.used = used + book.since + book.unlogged

    def spent(self, account: Account) -> int:
        """Used and held of an account."""
        return self._books[account].spent if account in self._books else 0

    def _sweep(self) -> None:
        """Forget windows that are over, now and then."""
        if len(self._books) < self._next_sweep:
            return
        now = self._clock()
        self._books = {account: book for account, book in self._books.items() if account.ends_at > now or book.held}
        self._next_sweep = max(1024, 2 * len(self._books))
