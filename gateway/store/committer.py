"""Group commit: rows that arrive while one commit is under way share the next one.

Idle, a row is written at once; nothing waits for company. The queue is bounded, one bad row fails alone, and a lost
connection is tried once more before the waiting requests are told.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gateway.store.errors import RecordRejected, StoreClosed, StoreError, StoreOverloaded, StoreUnavailable
from gateway.store.rows import EncodedRecord
from gateway.store.sinks import BatchSink
from gateway.store.translate import RowFault, translate

# While the log is down it is tried this often, however many ask.
_PROBE_EVERY_S = 1.0


@dataclass(slots=True)
class _Waiting:
    entry: EncodedRecord
    committed: asyncio.Future[None]


class GroupCommitter:
    """Owns the queue and the one task that empties it into a :class:`BatchSink`.

    Counters (``num_rows``, ``num_commits``, ``num_failed``, ``num_probes``) only grow; ``last_error`` is None while
    writes succeed. ``clock`` is in seconds.
    """

    def __init__(
        self,
        sink: BatchSink,
        *,
        shown: str,
        max_pending: int,
        max_batch: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        # The sink takes one write at a time, a batch or a probe.
        self._writing = asyncio.Lock()
        self._probe: asyncio.Task[None] | None = None
        self._probed_s = float("-inf")
        self.num_probes = 0
        self._sink = sink
        self._shown = shown
        self._max_pending = max_pending
        self._max_batch = max_batch
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self.num_rows = 0
        self.num_commits = 0
        self.num_failed = 0
        self.last_error: StoreError | None = None

    @property
    def num_pending(self) -> int:
        return len(self._queue)

    @property
    def is_well(self) -> bool:
        """Return whether the last write succeeded and nothing is known of a lost connection."""
        return self.last_error is None and self._sink.is_connected

    async def check(self) -> None:
        """Return where a row can be written, as far as known; to be asked where ``is_well`` is not.

        What is known is a second old at most: the first who asks then writes a probe, and the others wait for it.

        Raises
        ------
        StoreUnavailable and its kinds : before anything was spent on an answer that could not be kept
        """
        if self.is_well:
            return
        if self._probe is None or self._probe.done():
            if self.last_error is not None and self._clock() - self._probed_s < _PROBE_EVERY_S:
                raise _copy(self.last_error)
            self._probe = asyncio.create_task(self._try_out(), name="suffice-log-probe")
        # A database that hangs is not waited for: the probe goes on, and who asks later learns of its end.
        await asyncio.wait([self._probe], timeout=_PROBE_EVERY_S)
        if not self._probe.done():
            raise StoreUnavailable(f"{self._shown} does not answer.", database=self._shown)
        if self.last_error is not None:
            raise _copy(self.last_error)

    async def _try_out(self) -> None:
        self.num_probes += 1
        try:
            async with self._writing:
                try:
                    await self._sink.probe()
                except Exception as error:
                    await self._sink.drop()
                    problem = translate(error, self._shown)
                    if isinstance(problem, RowFault):
                        # Nobody's row: what the database refuses here it refuses of all.
                        problem = StoreUnavailable(str(problem), database=self._shown)
                    self.last_error = problem
                else:
                    self.last_error = None
        finally:
            self._probed_s = self._clock()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="suffice-log-writer")

    async def commit(self, entry: EncodedRecord) -> None:
        """Return once the entry is durable. A cancelled caller stops waiting; the row is written all the same.

        Raises
        ------
        StoreOverloaded, StoreClosed, StoreUnavailable, StoreFull, RecordRejected
        """
        if self._closing:
            raise StoreClosed(f"{self._shown} is being closed; the service is stopping.", database=self._shown)
        if len(self._queue) >= self._max_pending:
            raise StoreOverloaded(
                f"{len(self._queue)} rows wait for {self._shown} to commit them; more are not taken.",
                database=self._shown,
            )
        waiting = _Waiting(entry, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._arrived.set()
        await waiting.committed

    async def close(self, timeout_s: float) -> None:
        """Write what waits, then stop; what is not written after ``timeout_s`` fails. New rows are refused at once."""
        self._closing = True
        self._arrived.set()
        if self._task is not None:
            # A database that hangs must not hang the shutdown: batch after batch could each wait for its timeout.
            await asyncio.wait([self._task], timeout=timeout_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        self._fail(self._queue, StoreClosed(f"{self._shown} did not take the last rows in time.", database=self._shown))
        self._queue.clear()

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            if not self._queue:
                if self._closing:
                    return
                self._arrived.clear()
                continue
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._max_batch))]
            await self._commit(batch)

    async def _commit(self, batch: Sequence[_Waiting]) -> None:
        try:
            async with self._writing:
                await self._write(batch)
        except RowFault as fault:
            await self._isolate(batch, fault)
        except StoreError as error:
            self._fail(batch, error)
        except BaseException as error:
            # Our own bug, or the loop going down: nobody may be left waiting.
            self._fail(batch, StoreClosed(f"The writer of {self._shown} stopped: {error!r}", database=self._shown))
            raise
        else:
            self._succeed(batch)

    async def _write(self, batch: Sequence[_Waiting]) -> None:
        entries = [waiting.entry for waiting in batch]
        try:
            await self._sink.write(entries, again=False)
        except Exception as error:
            problem = translate(error, self._shown)
            if isinstance(problem, RowFault):
                raise problem from error
            lost = self._sink.is_lost(error)
            await self._sink.drop()
            if not lost:
                raise problem from error
            await self._write_again(entries)

    async def _write_again(self, entries: Sequence[EncodedRecord]) -> None:
        """A second try on a fresh connection; the first may have died after its commit."""
        try:
            await self._sink.write(entries, again=True)
        except Exception as error:
            await self._sink.drop()
            raise translate(error, self._shown) from error

    async def _isolate(self, batch: Sequence[_Waiting], fault: RowFault) -> None:
        """Halve until the row at fault is alone: log2(n) extra commits for one bad row, not n."""
        if len(batch) == 1:
            self._settle(batch[0], RecordRejected(batch[0].entry.request_id, str(fault)))
            self.num_failed += 1
            return
        middle = len(batch) // 2
        await self._commit(batch[:middle])
        await self._commit(batch[middle:])

    def _succeed(self, batch: Sequence[_Waiting]) -> None:
        self.last_error = None
        self.num_commits += 1
        self.num_rows += len(batch)
        for waiting in batch:
            self._settle(waiting, None)

    def _fail(self, batch: Collection[_Waiting], error: StoreError) -> None:
        if not batch:
            return
        self.last_error = error
        self.num_failed += len(batch)
        for waiting in batch:
            self._settle(waiting, _copy(error))

    @staticmethod
    def _settle(waiting: _Waiting, error: StoreError | None) -> None:
        if waiting.committed.done():
            return
        if error is None:
            waiting.committed.set_result(None)
        else:
            waiting.committed.set_exception(error)


def _copy(error: StoreError) -> StoreError:
    """Each waiter raises its own object: tracebacks of one shared exception would grow together."""
    twin = error.__class__.__new__(error.__class__)
    twin.args = error.args
    twin.__dict__.update(error.__dict__)
    twin.__cause__ = error.__cause__
    return twin
