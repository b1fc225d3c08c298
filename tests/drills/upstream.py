"""Four remote tiers on one server that counts what it is asked and can be told to behave badly, tier by tier."""

from __future__ import annotations

from backends.testing import Script
from tests.backends.provider.behaviours import BEHAVIOURS, Behaviour
from tests.backends.provider.call import ProviderCall
from tests.backends.provider.server import ProviderServer

TIERS = (1, 2, 3, 4)
PRICES = ("0.0001", "0.0005", "0.003", "0.01")
LIES = (
    "html", "json_error_200", "empty_body", "malformed_json", "wrong_types", "cut_after_3_tokens", "no_usage",
    "error_after_3_tokens", "two_endings", "401", "429_for_an_hour", "reset_after_3_tokens", "unknown_reason",
)  # fmt: skip

_TIER = """
[[tiers]]
name = "t{tier}"
model = "m{tier}"
price_per_request_usd = {price}
[models.m{tier}]
kind = "remote"
urls = ["{url}"]
model = "provider-model"
retry.max_attempts = 1
breaker.failure_threshold = 3
breaker.open_s = 0.5
breaker.max_open_s = 1.0
timeouts.first_token_s = 5.0
timeouts.gap_s = 5.0
"""
_RULES = """
[router]
artifact = "builtin"
[policy]
quality_floor = 0.95
thresholds = { t1 = 0.95, t2 = 0.95, t3 = 0.95 }
exploration_share = 0.0
sampling_share = 0.0
[verification]
enabled = false
[learning]
enabled = false
"""


class Upstream(ProviderServer):
    """Serves every tier; ``behave`` changes what a tier does from now on."""

    def __init__(self) -> None:
        super().__init__(Script(text="one two three four five six seven eight"))
        self._now = dict.fromkeys(TIERS, "ok")
        for tier in TIERS:
            BEHAVIOURS[f"tier{tier}"] = self._behaviour_of(tier)

    def behave(self, behaviour: str, *tiers: int) -> None:
        """Let these tiers, or all, behave so."""
        assert behaviour in BEHAVIOURS, behaviour
        for tier in tiers or TIERS:
            self._now[tier] = behaviour

    def num_asked(self) -> int:
        """Return how many answers were asked for, and so paid."""
        return sum(seen.path.endswith("completions") for seen in list(self.requests))

    def toml(self) -> str:
        """Return a ladder of these tiers with the shipped router and a floor."""
        tiers = [
            _TIER.format(tier=tier, price=price, url=self.url(f"tier{tier}"))
            for tier, price in zip(TIERS, PRICES, strict=True)
        ]
        return "".join(tiers) + _RULES

    def _behaviour_of(self, tier: int) -> Behaviour:
        async def answer(call: ProviderCall) -> None:
            await BEHAVIOURS[self._now[tier]](call)

        return answer
