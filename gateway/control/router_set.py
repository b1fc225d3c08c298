"""Holds the serving, canary and shadow routers."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

from classifier.types import Router, Sufficiency
from gateway.models.predictor import Predictor, make_threads
from policies.policy import Policy
from policies.rollout import takes_new

RECOVERY = timedelta(days=28)
_LEAST_DOUBT = 0.5
_NO_POLICIES: Mapping[str, Policy] = {}
_NOT_SHOWN = ("features", "hashing", "decision", "prices")


class RouterSlot:
    """Holds a router ready to predict, and the policies with what was derived together with it.

    ``came_of_drift`` says that the router was made after one, see :func:`recovering_since`.
    """

    __slots__ = ("came_of_drift", "policies", "predictor", "router", "version")

    def __init__(self, predictor: Predictor, policies: Mapping[str, Policy] = _NO_POLICIES) -> None:
        self.predictor = predictor
        self.policies = policies
        self.router: Router | None = predictor.router
        self.version: str = predictor.version
        self.came_of_drift = "drift_at" in _metadata(self.router)


class RouterSet:
    """Decides which router a request uses. Every request reads it; it is replaced between two requests.

    Parameters
    ----------
    serving : the router of most requests
    timeout_s : a prediction later than this counts as missing
    canary_checks : checks of a canary router, as a multiple of those that all traffic has
    """

    def __init__(
        self,
        serving: Router | None,
        *,
        timeout_s: float,
        canary_checks: float = 1.0,
    ) -> None:
        self._timeout_s = timeout_s
        self._canary_checks = canary_checks
        self._threads: ThreadPoolExecutor = make_threads()
        self.serving = RouterSlot(self.make_predictor(serving))
        self.canary: RouterSlot | None = None
        self.canary_share = 0.0

    def make_predictor(self, router: Router | None) -> Predictor:
        """Return a predictor on the threads that all routers share."""
        return Predictor(router, timeout_s=self._timeout_s, threads=self._threads)

    def replace(self, serving: RouterSlot, canary: RouterSlot | None, canary_share: float) -> None:
        """Use these from now on. Predictions under way end with the router they began with."""
        self.serving, self.canary, self.canary_share = serving, canary, canary_share if canary is not None else 0.0

    @property
    def version(self) -> str:
        """Return the serving router's."""
        return self.serving.version

    def check_factor(self, version: str) -> float:
        """Return the factor on a router's check rate: a canary answers little and must be judged soon."""
        if self.canary is None or version != self.canary.version or self.canary_share <= 0.0:
            return 1.0
        return self._canary_checks / self.canary_share

    def downward_sampling_share(self, version: str, now: datetime) -> float:
        """Of a router in use, see :func:`downward_sampling_share`."""
        for slot in (self.serving, self.canary):
            if slot is not None and slot.version == version:
                return downward_sampling_share(slot.router, now) if slot.came_of_drift else 0.0
        return 0.0

    def pick(self, sticky_key: str) -> RouterSlot:
        """Return the router that decides a request: within a rollout stage always the same for equal keys."""
        if self.canary is None or self.canary_share <= 0.0:
            return self.serving
        return self.canary if takes_new(self.canary.version, sticky_key, self.canary_share) else self.serving

    async def warm_up(self) -> None:
        """Predict once before the first request has to wait for it."""
        await self.serving.predictor.warm_up()

    async def predict(self, turns: tuple[tuple[str, str], ...]) -> Sufficiency | None:
        """Return what the serving router predicts."""
        return await self.serving.predictor.predict(turns)

    def close(self) -> None:
        """Let the threads go; a prediction that runs ends unheard."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def sticky_key(conversation: str | None, key_id: str | None, request_id: str) -> str:
    """Return what a rollout's share is drawn by: the conversation, else the API key, else the request alone."""
    if conversation is not None:
        return f"conversation\0{conversation}"
    if key_id is not None:
        return f"key\0{key_id}"
    return f"request\0{request_id}"


def recovering_since(router: Router | None, now: datetime) -> datetime | None:
    """The drift that a router came of, while it is young or the router withholds cheap tiers still; else None."""
    metadata = _metadata(router)
    if (since := metadata.get("drift_at")) is None:
        return None
    drift_at = datetime.fromisoformat(since)
    return drift_at if metadata["caution"] > 1.0 or now - drift_at < RECOVERY else None


def downward_sampling_share(router: Router | None, now: datetime) -> float:
    """Return the share of a router's top-tier answers that are also sent to a lower tier (downward sampling), 0 to 1.

    After a drift much goes up for want of knowledge: as much as caution withholds, and at least half for as long as the
    log shows little else than the time before.
    """
    if recovering_since(router, now) is None:
        return 0.0
    return max(1.0 - 1.0 / float(_metadata(router)["caution"]), _LEAST_DOUBT)


def describe(router: Router | None) -> dict[str, Any]:
    """Return a router's card for those who look: how many tiers, when and on what it was made."""
    return {name: value for name, value in _metadata(router).items() if name not in _NOT_SHOWN}


def _metadata(router: Router | None) -> Mapping[str, Any]:
    artifact = getattr(router, "artifact", None)
    return {} if artifact is None else artifact.metadata
