"""Searches for what ``suffice bench kills`` must not find: lost, doubled or open checks, half promoted routers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from sqlalchemy import text

from gateway.config.store_section import StoreConfig
from gateway.control.control_state import ControlState
from gateway.control.router_loader import read_router
from gateway.store.control import ControlStore
from gateway.store.control_records import RolloutRow
from gateway.store.store import Store


async def search(database_url: str, finished: Sequence[str]) -> dict[str, Any]:
    """Read the database at the end; ``finished`` are requests whose answers were seen whole."""
    async with Store(StoreConfig(url=database_url)) as store:
        lost = [each for each in finished if await store.get_request(each) is None]
        async with store.transaction() as connection:

            async def number(statement: str) -> int:
                return int((await connection.execute(text(statement))).scalar() or 0)

            checks = {
                "drawn": await number("SELECT count(*) FROM verifications"),
                "done": await number("SELECT count(*) FROM verifications WHERE status = 'done'"),
                "open": await number("SELECT count(*) FROM verifications WHERE status IN ('queued', 'running')"),
                "failed": await number("SELECT count(*) FROM verifications WHERE status IN ('failed', 'expired')"),
                # Every answer below the top tier was to be drawn, with its row or not at all.
                "missing": await number(
                    "SELECT count(*) FROM requests r WHERE r.error_code IS NULL AND r.finish_reason = 'stop' "
                    "AND r.final_tier < 4 AND r.verify_probability >= 1 AND NOT EXISTS "
                    "(SELECT 1 FROM verifications v WHERE v.request_id = r.request_id)"
                ),
                "doubled": await number(
                    "SELECT count(*) FROM (SELECT request_id FROM verifications GROUP BY request_id, direction "
                    "HAVING count(*) > 1) AS twice"
                ),
                "without_result": await number(
                    "SELECT count(*) FROM verifications WHERE status = 'done' AND (p_good IS NULL OR verdict IS NULL)"
                ),
            }
            running = await number("SELECT count(*) FROM retrain_runs WHERE status = 'running'")
            runs = await connection.execute(text("SELECT status, count(*) FROM retrain_runs GROUP BY status"))
            by_status = {str(status): int(count) for status, count in runs.all()}
            num_told = await number("SELECT count(*) FROM admin_audit WHERE action = 'shadow_router' AND status = 202")
            num_unknown = await number(
                "SELECT count(*) FROM requests WHERE router_version <> 'none' AND router_version NOT IN "
                "(SELECT version FROM router_versions)"
            )
        control = ControlStore(store)
        routers = await _routers(control) | {"rows_of_unknown_routers": num_unknown}
        rollouts = await _rollouts(control, num_told)
    return {
        "num_finished": len(finished),
        "num_lost": len(lost),
        "checks": checks,
        "retrain_runs": by_status | {"still_running": running},
        "routers": routers,
        "rollouts": rollouts,
    }


async def _routers(control: ControlStore) -> dict[str, Any]:
    """Return whether what is active can be loaded, and rows and state agree."""
    state = ControlState.decode(await control.rows())
    known = {each.version: each for each in await control.list_routers(limit=10_000)}
    unreadable = []
    for version in known:
        content = await control.router_bytes(version)
        try:
            read_router(version, content or b"")
        except Exception as error:  # whatever makes it unusable is what is looked for
            unreadable.append(f"{version}: {type(error).__name__}")
    canary = state.router.canary
    serving = {version for version, each in known.items() if each.status == "serving"}
    on_the_way = {version for version, each in known.items() if each.status in ("shadow", "canary")}
    return {
        "stored": len(known),
        "unreadable": unreadable,
        "active_is_stored": state.router.active is None or state.router.active in known,
        "half_promoted": sorted(on_the_way ^ ({canary.version} if canary else set())),
        "half_serving": sorted(serving ^ ({state.router.active} if state.router.active else set())),
    }


async def _rollouts(control: ControlStore, num_told: int) -> dict[str, Any]:
    """Return whether the rollouts' rows, the active state and the audit log agree."""
    rows = await control.list_rollouts(limit=100_000)
    canary = ControlState.decode(await control.rows()).router.canary
    running = {row.rollout_id for row in rows if row.status == "running"}
    by_hand = [row for row in rows if row.history[0]["by"] == "anonymous"]
    return {
        "begun": len(rows),
        "ended": dict(Counter(row.status for row in rows if row.ended_at is not None)),
        "steps": sum(len(row.history) for row in rows),
        "half_begun": sorted(running ^ ({canary.rollout_id} if canary else set())),
        "begun_less_told": len(by_hand) - num_told,
        "out_of_order": [row.rollout_id for row in rows if not _is_in_order(row)],
    }


def _is_in_order(row: RolloutRow) -> bool:
    """Return every step once, each further than the one before, and an end where one is said."""
    steps = [(step["stage"], step["share"]) for step in row.history]
    shares = [share for stage, share in steps if stage in ("shadow", "partial")]
    ends = [stage for stage, _ in steps if stage not in ("shadow", "partial")]
    is_ended = row.status != "running"
    is_rising = shares[0] == 0.0 and all(low < high for low, high in pairwise(shares))
    return is_rising and len(ends) == is_ended == (row.ended_at is not None) and (steps[-1][0] in ends) == is_ended


def is_sound(found: dict[str, Any]) -> bool:
    """Nothing lost, doubled, left open or half made."""
    checks, routers, rollouts = found["checks"], found["routers"], found["rollouts"]
    nothing = ("open", "failed", "missing", "doubled", "without_result")
    return (
        found["num_finished"] > 0
        and found["num_lost"] == 0
        and checks["done"] == checks["drawn"] > 0
        and not any(checks[name] for name in nothing)
        and found["retrain_runs"]["still_running"] == 0
        and not routers["unreadable"]
        and not routers["half_promoted"]
        and not routers["half_serving"]
        and routers["rows_of_unknown_routers"] == 0
        and rollouts["begun_less_told"] == 0
        and not rollouts["half_begun"]
        and not rollouts["out_of_order"]
        and routers["active_is_stored"]
    )
