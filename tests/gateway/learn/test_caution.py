"""After a drift a candidate asks more of every answer below the top, and only what came after it is judged on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from classifier.artifact import RouterArtifact
from classifier.router import ArtifactRouter
from gateway.config.settings import Settings
from gateway.control.router_set import downward_sampling_share, recovering_since
from gateway.learn.candidate import Candidate, fit_candidate
from gateway.learn.candidate_evaluation import RouterComparison, RouterContender
from gateway.learn.decision_replay import Estimates
from gateway.learn.drift_caution import CHAINS, cautious, confidence_per_chain, inherited_prices, least_cautious
from gateway.learn.table_reader import read_table
from gateway.models.loader import complete_policies
from gateway.store.store import Store
from policies.policy import Policy
from policies.promotion import Judgement, PromotionVerdict
from tests.gateway.learn.test_table import spec_of
from tests.gateway.learn.world import ON_SQLITE, base_artifact, draw_prompts, write_log

NOW = datetime.now(UTC)


def test_caution_asks_more_and_invents_nothing() -> None:
    derived = {
        "confidence": 0.95,
        "floors": [
            {"floor": 0.97, "thresholds": {"1": 0.9, "2": 0.6}, "quality_value_usd": "0.05"},
            {"floor": 0.99, "expected": {}},
        ],
    }
    first, second = cautious(derived, 4.0)["floors"]
    assert first == {"floor": 0.97, "thresholds": {"1": 0.975, "2": 0.9}, "quality_value_usd": "0.200"}
    assert second == {"floor": 0.99, "expected": {}}
    assert cautious(derived, 1.0)["floors"][0]["thresholds"] == {"1": 0.9, "2": 0.6}


def test_less_than_one_asks_less_and_never_below_nothing() -> None:
    (found,) = cautious({"floors": [{"floor": 0.97, "thresholds": {"1": 0.9, "2": 0.3}}]}, 0.5)["floors"]
    assert found["thresholds"] == {"1": 0.8, "2": 0.0}


def carrying(**metadata: object) -> RouterArtifact:
    return base_artifact().with_metadata(**metadata)


def test_the_price_of_quality_stays_what_it_was_before_caution() -> None:
    derived = {"floors": [{"floor": 0.9, "quality_value_usd": "0.01"}, {"floor": 0.95, "quality_value_usd": "0.02"}]}
    plain = {"floors": [{"floor": 0.9, "quality_value_usd": "0.5", "thresholds": {"1": 0.8}}]}
    first, second = inherited_prices(derived, carrying(decision=plain))["floors"]
    assert (first["quality_value_usd"], first["thresholds"]) == ("0.5", {"1": 0.8})
    assert (second["quality_value_usd"], second["inherited"]) == ("0.02", [])
    careful = carrying(decision=cautious(plain, 2.8), prices=plain, caution=2.8)
    assert inherited_prices(derived, careful)["floors"][0]["quality_value_usd"] == "0.5"


def tried_with(passing: Sequence[float]) -> tuple[float, list[float]]:
    """The caution that comes out where these pass, and all that were tried."""
    prices = {"confidence": 0.95, "exploration_share": 0.02, "floors": [{"floor": 0.9, "quality_value_usd": "1"}]}
    none = np.empty((0, 2))
    candidate, asked = Candidate(base_artifact(), "linear"), []

    def complete(router: ArtifactRouter) -> dict[str, Policy]:
        return complete_policies({"default": Policy(quality_floor=0.9)}, router)

    def judged(ours: RouterContender) -> RouterComparison:
        asked.append(float(ours.policies["default"].quality_value_usd or 0))
        verdict = PromotionVerdict.PROMOTE if asked[-1] in passing else PromotionVerdict.INSUFFICIENT
        return RouterComparison(Judgement(verdict, "", 0, 0, 0, 0, 0, 0, 0), {})

    found = least_cautious(
        candidate, RouterContender(Estimates(none, none, np.empty(0)), {}), judged, complete, prices, NOW
    )
    metadata = found.candidate.artifact.metadata
    assert (metadata["drift_at"], metadata["prices"]) == (NOW.isoformat(), prices)
    assert metadata["decision"] == cautious(prices, metadata["caution"])
    return metadata["caution"], asked


def test_of_each_chain_the_last_before_the_first_that_fails_counts() -> None:
    most = CHAINS[0][0]
    assert tried_with(()) == (most, [chain[0] for chain in CHAINS])
    every = [factor for chain in CHAINS for factor in chain]
    assert tried_with(every) == (0.5, every)
    assert tried_with((2.8, 2.0, 1.0)) == (2.0, [most, 2.8, 2.0, 1.4])
    assert tried_with((8.0, 5.6)) == (5.6, [8.0, 5.6, 4.0, 2.8])


def test_the_chains_share_the_error() -> None:
    assert len(CHAINS) * (1.0 - confidence_per_chain(0.95)) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("caution", "days", "doubt"), [(2.8, 40, 1 - 1 / 2.8), (1.4, 3, 0.5), (1.0, 3, 0.5), (1.0, 29, 0.0)]
)
def test_a_router_that_came_of_a_drift_is_doubted_for_a_while(caution: float, days: int, doubt: float) -> None:
    drift_at = NOW - timedelta(days=days)
    router = ArtifactRouter(carrying(caution=caution, drift_at=drift_at.isoformat()))
    assert downward_sampling_share(router, NOW) == pytest.approx(doubt)
    assert recovering_since(router, NOW) == (drift_at if doubt else None)
    assert downward_sampling_share(ArtifactRouter(base_artifact()), NOW) == 0.0


@ON_SQLITE
async def test_a_candidate_forgets_which_drift_the_serving_router_came_of(
    world_settings: Callable[..., Settings],
) -> None:
    settings = world_settings()
    serving = ArtifactRouter(carrying(caution=2.8, prices={"floors": []}, drift_at=NOW.isoformat()))
    async with Store(settings.database) as store:
        await write_log(store, settings, serving, draw_prompts(random.Random(1), 200, ("easy", "new")))
        table = await read_table(store, spec_of(versions=(serving.version,)))
    fitted = fit_candidate(
        table, table, serving, settings.ladder, seed=0, window="", step=lambda stage, done: None
    ).artifact
    assert {"decision", "adjustment"} <= set(fitted.metadata)
    assert not {"caution", "prices", "drift_at"} & set(fitted.metadata)
    assert recovering_since(ArtifactRouter(fitted), NOW) is None
