"""Runs scenarios and says what became of quality and cost: ``suffice simulate``."""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.commands.result_printer import print_json, print_table
from gateway.failure_report import USAGE_STATUS, CommandError

if TYPE_CHECKING:
    from gateway.config.settings import Settings

# What a server's own tasks would do is done by the simulation, in its own time.
_NO_TASKS: Mapping[str, Any] = {
    "monitor.enabled": False,
    "verification.worker": False,
    "verification.poll_s": 0.01,
    # The worker comes by the hour; a check is behind when it has waited for longer than that.
    "verification.overdue_s": 7200.0,
    "learning.enabled": False,
    "control.rollout_every_s": 1e9,
    "redis.url": None,
    "log.level": "error",
}


def simulation_settings(settings: Settings, folder: Path) -> Settings:
    """Return the given settings on a database of their own in ``folder``, with nothing moving by itself."""
    from gateway.config.settings import load_settings

    told = {path: settings.values[path] for path, source in settings.sources.items() if source == "command line"}
    still = {"data_dir": str(folder), "database.url": f"sqlite:///{folder / 'simulation.db'}"}
    return load_settings(settings.config_file, overrides={**told, **_NO_TASKS, **still}, need_secrets=False)


def simulate(
    config: Path | None,
    scenarios: tuple[str, ...],
    *,
    weeks: int,
    requests_per_week: int,
    seed: int,
    plot_folder: Path | None,
    as_json: bool,
) -> None:
    """Run scenarios one after another and print what was found.

    Raises
    ------
    CommandError
        Options out of range, or nothing routes in these settings.
    """
    from gateway.config.settings import load_settings
    from gateway.simulate.cost_bounds import lowest_costs
    from gateway.simulate.scenario import SCENARIOS
    from gateway.simulate.simulation import SimulationPlan, summary
    from gateway.simulate.simulation import simulate as run

    settings = load_settings(config, need_secrets=False)
    if unknown := set(scenarios) - set(SCENARIOS):
        known = ", ".join(SCENARIOS)
        raise CommandError(f"--scenario {sorted(unknown)[0]!r} is unknown; there are {known}.", status=USAGE_STATUS)
    if weeks < 1 or requests_per_week < 100:
        raise CommandError("--weeks must be at least 1, --requests-per-week at least 100.", status=USAGE_STATUS)
    if len(settings.ladder) != 4 or settings.router.source is None:
        raise CommandError("Generated traffic is of the built-in ladder's tasks: four tiers and a router are needed.")
    logging.disable(logging.WARNING)
    plan = SimulationPlan(weeks=weeks, requests_per_week=requests_per_week, seed=seed)
    rows = []
    for name in scenarios or tuple(SCENARIOS):
        started_s = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="suffice-simulate-") as folder:
            still = simulation_settings(settings, Path(folder))
            stretches = asyncio.run(run(still, SCENARIOS[name], plan, _progress(name)))
        found = summary(SCENARIOS[name], plan, stretches, settings.policy.quality_floor)
        after = SCENARIOS[name].after
        prices = [
            float(tier.price_per_request_usd * after.price_factors.get(tier.index, 1)) for tier in settings.ladder
        ]
        found |= lowest_costs(after, prices, settings.policy.quality_floor, seed)
        found["duration_s"] = round(time.perf_counter() - started_s, 1)
        rows.append(found)
        if plot_folder is not None:
            from gateway.simulate.plot import plot

            plot_folder.mkdir(parents=True, exist_ok=True)
            plot(stretches, found, plot_folder / f"simulate-{name}.png", width=plan.looks_per_week // 4)
        if not as_json:
            _print_events(name, stretches)
        print_json(found)
    if not as_json:
        _print(rows)


def _progress(name: str) -> Callable[[str, float], None]:
    def report(text: str, done: float) -> None:
        if sys.stderr.isatty():
            print(f"\r{name}: {text} ({done:.0%})   ", end="\n" if done >= 1 else "", file=sys.stderr)

    return report


def _print_events(name: str, stretches: Any) -> None:
    for stretch in stretches:
        for event in stretch.events:
            print(f"{name}, week {stretch.week:.2f}: {event}")


def _print(rows: list[dict[str, Any]]) -> None:
    shown = [
        (
            row["scenario"],
            f"{row['quality_before']:.3f}",
            f"{row['lowest_rolling_quality']:.3f}",
            f"{row['quality_last_week']:.3f}",
            f"{row['cost_before']:.0%}",
            f"{row['cost_last_week']:.0%}",
            f"{row['cost_chances_known']:.0%}",
            "–" if row["first_alarm_after_weeks"] is None else f"{row['first_alarm_after_weeks']:.2f}",
            "–" if row["healed_after_weeks"] is None else f"{row['healed_after_weeks']:.2f}",
            f"{row['checks_share_of_cost']:.1%}",
        )
        for row in rows
    ]
    columns = (
        "scenario",
        "before",
        "lowest",
        "last week",
        "cost before",
        "cost last",
        "possible",
        "alarm wk",
        "healed wk",
        "checks",
    )
    print_table(columns, shown, title="quality of the top tier's, cost of all on the top tier")
