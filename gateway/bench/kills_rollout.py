"""New routers for ``suffice bench kills``: brought over HTTP, with the server killed at the moments that matter.

Some moments are of a request for a change (begin a rollout, promote, roll back), which is killed while it is under way;
the others are of the leader's own steps, from shadow to every share and to the end, and the kill falls around them.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx

from classifier.artifact import RouterArtifact
from classifier.router import BUILTIN
from gateway.control.control_state import Canary, ControlState
from gateway.store.control import ControlStore

REQUESTS = ("begin", "promote", "roll_back")
STAGES = ("shadow 0%", "partial 10%", "partial 50%", "partial 100%")
# A request for a change takes about so long; a step of the leader comes about so soon after its stage was seen.
_REQUEST_S = 0.15
_STEP_S = 0.4
_PATIENCE_S = 20.0
_LOOK_S = 0.01


class RolloutScenario:
    """Brings about the moments at which the server is to be killed.

    Parameters
    ----------
    url : of the server
    folder : for the artifacts
    rng : which moment, and how long after it

    Attributes
    ----------
    moments : moment -> kills meant for it
    found : what was active after each of them, ``none`` without a rollout
    """

    def __init__(self, url: str, folder: Path, rng: random.Random) -> None:
        # No connection outlives its request: the server is another one after each kill.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=f"{url}/admin/v1", timeout=30.0, limits=limits)
        self._folder = folder
        self._rng = rng
        self._num_made = 0
        self._left: list[asyncio.Task[httpx.Response]] = []
        self.moments: Counter[str] = Counter()
        self.found: Counter[str] = Counter()

    async def come_to_a_moment(self, control: ControlStore) -> None:
        """Return at the moment of the kill; a request that is under way then is left to die with the server."""
        moment = self._rng.choice((*REQUESTS, *REQUESTS, *STAGES))
        self.moments[moment] += 1
        canary = await _canary(control)
        if moment == "begin" and canary is not None:
            await self._client.post("/routers/rollback", json={})
        if moment == "begin" or canary is None:
            begin = self._client.post(f"/routers/{await self._upload()}/shadow", json={})
            if moment == "begin":
                await self._amid(begin)
                return
            (await begin).raise_for_status()
            canary = await _canary(control)
        if moment in STAGES:
            await self._wait_for(moment, control)
            await asyncio.sleep(self._rng.uniform(0.0, _STEP_S))
            return
        # A retrain may have ended the rollout meanwhile; then the serving router is the one to go back from.
        promote = f"/routers/{canary.version}/promote" if canary is not None else "/routers/rollback"
        path = promote if moment == "promote" else "/routers/rollback"
        await self._amid(self._client.post(path, json={}))

    async def note(self, control: ControlStore) -> None:
        """Count what is active after the kill."""
        self.found[_name(await _canary(control))] += 1

    async def end(self, control: ControlStore) -> None:
        """Wait until no rollout is under way."""
        for _ in range(int(6 * _PATIENCE_S / _LOOK_S)):
            if await _canary(control) is None:
                return
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """Forget requests that were left to die."""
        for task in self._left:
            task.cancel()
        await asyncio.gather(*self._left, return_exceptions=True)
        await self._client.aclose()

    async def _upload(self) -> str:
        """Keep another router. Returns its version."""
        self._num_made += 1
        artifact = RouterArtifact.load(BUILTIN).with_metadata(note=f"kills {self._num_made} {self._rng.random()}")
        content = artifact.save(self._folder / f"router-{self._num_made}.npz").read_bytes()
        answer = await self._client.post("/routers", content=content)
        answer.raise_for_status()
        return artifact.version

    async def _amid(self, request: Coroutine[Any, Any, httpx.Response]) -> None:
        """Send a request, and return while it is under way, or about when it ends."""
        task = asyncio.create_task(request)
        self._left.append(task)
        await asyncio.wait([task], timeout=self._rng.uniform(0.0, _REQUEST_S))

    async def _wait_for(self, stage: str, control: ControlStore) -> None:
        for _ in range(int(_PATIENCE_S / _LOOK_S)):
            if _name(await _canary(control)) in (stage, "none"):
                return
            await asyncio.sleep(_LOOK_S)


async def _canary(control: ControlStore) -> Canary | None:
    return ControlState.decode(await control.rows()).router.canary


def _name(canary: Canary | None) -> str:
    return "none" if canary is None else f"{canary.stage} {canary.share:.0%}"
