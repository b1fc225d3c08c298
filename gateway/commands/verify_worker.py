"""Verifies sampled answers in a process of its own, against the servers' database: ``suffice verify-worker``."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

from gateway.access.spending_lease import make_spending_lease
from gateway.commands.result_printer import print_json
from gateway.config.settings import Settings, load_settings
from gateway.failure_report import CommandError
from gateway.models import loader
from gateway.models.catalog import Catalog
from gateway.observe.telemetry import configure_logging
from gateway.store.store import Store
from gateway.verify.worker import VerificationWorker
from gateway.verify.worker_factory import make_worker

_log = logging.getLogger("suffice.verify")


def verify_worker(config: Path | None, *, once: bool) -> None:
    """Work until a signal comes; with ``once`` until nothing is left that may be done now.

    Raises
    ------
    CommandError
        The settings sample nothing.
    """
    settings = load_settings(config)
    if not settings.verification.enabled:
        raise CommandError("verification.enabled is false, so there is nothing to check.")
    configure_logging(settings.log)
    # Its own log goes where the server's goes; only the result is printed.
    print_json(asyncio.run(_run(settings, once=once)))


async def _run(settings: Settings, *, once: bool) -> dict[str, int]:
    """Work, and return how many checks ended in which way, by the worker's own counters."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with Store(settings.database) as store:
        backends = loader.make_backends(settings)
        await loader.start_backends(backends, lambda model, state: _log.info("%s: %s", model, state))
        try:
            ladder = loader.fit_ladder(settings.ladder, backends)
            catalog = Catalog(
                ladder,
                settings.policy,
                settings.policies,
                backends,
                shares_prefix_cache=settings.server.share_prefix_cache,
            )
            lease = make_spending_lease(settings, ladder, store, "verify-worker")
            if lease is not None:
                lease.start()
            worker = make_worker(settings, catalog, store, lease=lease)
            if once:
                await _empty(worker, stopped)
            else:
                worker.start(works=True)
                await stopped.wait()
            await worker.close()
            if lease is not None:
                await lease.close()
        finally:
            await loader.close_backends(list(backends.values()))
    return {name: count for name, count in sorted(worker.metrics.endings.items()) if count}


async def _empty(worker: VerificationWorker, stopped: asyncio.Event) -> None:
    """Do what may be done now, one after another."""
    await worker.look()
    while not stopped.is_set() and await worker.work_once():
        await worker.look()
