"""Kill server, worker and retraining at random moments; see that no check was lost or doubled, no router half made.

A server of echoing models with the shipped router is kept under load, every answer below the top tier is drawn to be
checked, a worker apart does the checks, a retrain runs now and then, and one router after another is rolled out. Each
round one of the three gets ``SIGKILL`` and is started again; half of the rounds kill the server while a rollout begins,
moves on or ends. At the end everything is let run dry, and the database is searched::

    suffice bench kills --kills 50 [--database-url postgresql+asyncpg://...]

What it does not show: loss of power, as for ``suffice bench durability``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gateway.bench.durability import ServerProcess, check_integrity
from gateway.bench.kills_rollout import RolloutScenario
from gateway.bench.kills_search import is_sound, search
from gateway.bench.machine_card import card
from gateway.config.store_section import StoreConfig
from gateway.store.control import ControlStore
from gateway.store.store import Store
from gateway.store.urls import parse_database_url

_CLIENTS = 4
# Between two requests of a client: one worker that is killed again and again must be able to keep up.
_PAUSE_S = 0.25
_FAMILIAR = "What is {a} plus {b}?"
_DRY_S = 900.0
_TARGETS = ("server", "worker", "retrain", "rollout", "rollout", "rollout")
# A killed worker's job is somebody else's after this.
_LEASE_S = 1

_CONFIG = """
[[tiers]]
name = "simple"
model = "echo-1"
price_per_request_usd = 0.0001
[[tiers]]
name = "medium"
model = "echo-2"
price_per_request_usd = 0.0005
[[tiers]]
name = "complex"
model = "echo-3"
price_per_request_usd = 0.003
[[tiers]]
name = "expert"
model = "echo-4"
price_per_request_usd = 0.01

[models.echo-1]
kind = "echo"
[models.echo-2]
kind = "echo"
[models.echo-3]
kind = "echo"
[models.echo-4]
kind = "echo"

[router]
artifact = "builtin"

[policy]
mode = "benefit"
quality_floor = 0.95
sampling_share = 1.0
exploration_share = 0.3

[verification]
worker = false
graders = ["final_answer", "overlap"]
max_cost_share = 10.0
allowance_usd = 1000000.0
lease_s = {lease_s}
max_attempts = 1000
overdue_s = 3600.0

[control]
lease_s = 1.0
rollout_every_s = 0.1
rollout_min_stage_s = 0.0
rollout_min_shadow_decisions = 2
rollout_min_checked = 2

[learning]
enabled = false
min_labels = 60
lease_s = 1.0

[log]
level = "error"

[database]
url = {database_url}
"""


@dataclass(slots=True)
class KillObservation:
    """Counts what the clients and the killer did."""

    finished: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    retrains: Counter[int] = field(default_factory=Counter)


class KillScenario:
    """The processes and who loads them."""

    def __init__(self, config: Path, database_url: str, seed: int) -> None:
        self.seen = KillObservation()
        self._config = config
        self._database_url = database_url
        self._rng = random.Random(seed)
        self._server = ServerProcess(_suffice("serve", "--config", str(config)))
        self.rollouts = RolloutScenario(self._server.url, config.parent, self._rng)
        self._worker: asyncio.subprocess.Process | None = None

    async def run(self, kills: int) -> None:
        """All rounds, then run dry."""
        await self._server.start()
        self._worker = await self._start("verify-worker", "--config", str(self._config))
        clients = [asyncio.create_task(self._ask_forever(place)) for place in range(_CLIENTS)]
        try:
            async with Store(StoreConfig(url=self._database_url)) as store:
                control = ControlStore(store)
                for _ in range(kills):
                    await self._round(self._rng.choice(_TARGETS), control)
                await self.rollouts.end(control)
        finally:
            await self.rollouts.close()
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            await _kill(self._worker)
            await self._server.kill()
        await self._run_dry()

    async def _round(self, target: str, control: ControlStore) -> None:
        """Let it work a little, kill it, start it again."""
        if target == "retrain":
            retrain = await self._start("retrain", "--config", str(self._config), "--quiet")
            with suppress(TimeoutError):
                # Most of the first seconds are imports; some rounds let it come to its end.
                await asyncio.wait_for(retrain.wait(), self._rng.uniform(1.0, 9.0))
            if retrain.returncode is not None:
                self.seen.retrains[retrain.returncode] += 1
            await _kill(retrain)
        elif target == "rollout":
            await self.rollouts.come_to_a_moment(control)
            await self._server.kill()
            await self.rollouts.note(control)
            await self._server.start()
        else:
            await asyncio.sleep(self._rng.uniform(0.2, 2.0))
            if target == "server":
                await self._server.kill()
                await self._server.start()
            else:
                await _kill(self._worker)
                self._worker = await self._start("verify-worker", "--config", str(self._config))
        self.seen.kills[target] += 1

    async def _run_dry(self) -> None:
        """Checks that wait are done, and one retrain comes to its end."""
        await asyncio.sleep(_LEASE_S + 0.5)
        worker = await self._start("verify-worker", "--config", str(self._config), "--once")
        await asyncio.wait_for(worker.wait(), _DRY_S)
        retrain = await self._start("retrain", "--config", str(self._config), "--quiet")
        await asyncio.wait_for(retrain.wait(), _DRY_S)
        self.seen.retrains[retrain.returncode or 0] += 1

    async def _ask_forever(self, place: int) -> None:
        """Ask; a connection that dies with the server is no matter."""
        turn = 0
        async with httpx.AsyncClient(base_url=self._server.url, timeout=30.0) as client:
            while True:
                turn += 1
                prompt = _FAMILIAR.format(a=turn, b=place * 1000 + self._rng.randrange(1000))
                body = {"model": "auto", "messages": [{"role": "user", "content": prompt}]}
                try:
                    answer = await client.post("/v1/chat/completions", json=body)
                except httpx.HTTPError:
                    await asyncio.sleep(0.05)
                    continue
                if answer.is_success:
                    self.seen.finished.append(answer.headers["x-suffice-request-id"])
                await asyncio.sleep(_PAUSE_S)

    async def _start(self, *arguments: str) -> asyncio.subprocess.Process:
        quiet = asyncio.subprocess.DEVNULL
        return await asyncio.create_subprocess_exec(*_suffice(*arguments), stdout=quiet, stderr=quiet)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when nothing was lost, doubled or half made."""
    parser = argparse.ArgumentParser(prog="suffice bench kills", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database-url", help="by default a new SQLite file")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="suffice-kills-") as folder:
        url = given.database_url or f"sqlite:///{Path(folder) / 'log.db'}"
        config = Path(folder) / "suffice.toml"
        config.write_text(_CONFIG.format(lease_s=_LEASE_S, database_url=json.dumps(url)))
        found = asyncio.run(_measure(config, url, given))
    print(json.dumps({"bench": "kills", "seed": given.seed, **found, "card": card()}))
    return 0 if is_sound(found) else 1


async def _measure(config: Path, url: str, given: argparse.Namespace) -> dict[str, Any]:
    scene = KillScenario(config, url, given.seed)
    await scene.run(given.kills)
    found = await search(url, scene.seen.finished)
    return {
        "database": parse_database_url(url).dialect,
        "kills": dict(scene.seen.kills),
        "rollout_moments": dict(scene.rollouts.moments),
        "in_force_after_them": dict(scene.rollouts.found),
        "retrain_exits": {str(status): count for status, count in scene.seen.retrains.items()},
        "integrity": check_integrity(url),
        **found,
    }


def _suffice(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-c", "from gateway.cli import main; main()", *arguments]


async def _kill(process: asyncio.subprocess.Process | None) -> None:
    assert process is not None
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
    await process.wait()


if __name__ == "__main__":
    sys.exit(main())
