"""A server meets kinds of task its router never saw, over HTTP, and heals without a hand: ``suffice bench healing``.

A router is fitted on the built-in tasks without some families; a server of its own serves with it, its monitor, checks,
retraining and rollouts running as always, only at a quicker beat. First come tasks of the known families, then the
unknown ones among them. Noted are, stretch by stretch, what was right, what it cost, which tiers answered, which router
served, and what the server reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from backends.builtin.tasks.answer_checker import check
from backends.builtin.tasks.task_generator import FAMILIES, generate
from backends.builtin.tasks.types import Task
from gateway.bench.child_server import ready_server
from gateway.bench.machine_card import card
from gateway.outcomes.task_split import FITTING_SPLIT, HOLDOUT_SPLIT, split_of

# Its words are those of other families, so nothing tells the router that it never saw them.
UNSEEN = ("arithmetic",)
_UNSEEN_SHARE = 0.4
_TOP_SAMPLE = 300
_MAX_TOKENS = 512

# A month's beat in minutes: rules, confidence and the share that checks may cost are as shipped; the waiting between
# them is not, nor are the counts that only keep a small sample from being taken for a large one.
_BEAT = """
[verification]
overdue_s = 60.0
poll_s = 0.05
max_age_s = 3600.0
allowance_usd = 0.000005

[control]
rollout_every_s = 1.0
rollout_min_stage_s = 1.0
rollout_min_shadow_decisions = 30
rollout_min_checked = 15
rollout_max_stage_s = 3600.0
shadow_share = 1.0

[monitor]
every_s = 2.0

[learning]
every_days = 0.0
look_every_s = 1.0
min_effective_rows = 40.0
"""


@dataclass(slots=True)
class HealingInterval:
    """Some hundred requests in a row."""

    kind: str
    num_requests: int = 0
    num_right: int = 0
    num_unseen: int = 0
    num_unseen_right: int = 0
    cost_usd: float = 0.0
    tiers: Counter[int] = field(default_factory=Counter)
    router: str = ""
    seconds: float = 0.0
    server: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For the line of JSON."""
        return {
            "kind": self.kind,
            "requests": self.num_requests,
            "accuracy": round(self.num_right / self.num_requests, 4),
            "unseen": self.num_unseen,
            "unseen_accuracy": round(self.num_unseen_right / self.num_unseen, 4) if self.num_unseen else None,
            "cost_usd": round(self.cost_usd / self.num_requests, 6),
            "tiers": {str(tier): count for tier, count in sorted(self.tiers.items())},
            "router": self.router[:12],
            "seconds": round(self.seconds, 1),
            **self.server,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the last line printed is JSON."""
    given = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="suffice-healing-") as folder:
        found = asyncio.run(_run(given, Path(folder)))
    line = json.dumps(found)
    if given.output is not None:
        given.output.write_text(line + "\n")
    if given.plot is not None:
        draw(found, given.plot)
    print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="suffice bench healing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fit-tasks", type=int, default=2500, help="tasks that the first router is fitted on")
    parser.add_argument("--before", type=int, default=800, help="requests of known families")
    parser.add_argument("--after", type=int, default=5000, help="requests with unknown ones among them")
    parser.add_argument("--unseen", nargs="+", default=list(UNSEEN), choices=sorted(FAMILIES))
    parser.add_argument("--stretch", type=int, default=200, help="requests between two looks")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--pause", type=float, default=6.0, help="seconds without requests after each stretch")
    parser.add_argument("--sampling-share", type=float, default=0.15, help="of answers below the top tier, checked")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--router", type=Path, help="a router so fitted before, instead of fitting one")
    parser.add_argument("--output", type=Path, help="write the line of JSON here as well")
    parser.add_argument("--plot", type=Path, help="draw it, as PNG")
    return parser


async def _run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    seen = tuple(sorted(set(FAMILIES) - set(given.unseen)))
    router = given.router or await _fit(given, folder, seen)
    config = folder / "suffice.toml"
    config.write_text(_configuration(router, given.sampling_share))
    environ = {"SUFFICE_DATA_DIR": str(folder / "data"), "SUFFICE_LOG__LEVEL": "warning"}
    server = ready_server(*_suffice("serve", "--config", str(config)), environ=environ)
    async with server as url, httpx.AsyncClient(base_url=url, timeout=300.0) as client:
        tasks = _tasks(given, seen)
        stretches = []
        for kind, count in (("before", given.before), ("after", given.after)):
            for start in range(0, count, given.stretch):
                batch = list(islice(tasks[kind], min(given.stretch, count - start)))
                stretches.append(await _stretch(client, kind, batch, given))
                print(json.dumps(stretches[-1].as_dict()), file=sys.stderr)
        usage = (await _get(client, "usage"))["total"]
        top = await _top_accuracy(client, list(islice(tasks["after"], _TOP_SAMPLE)), given)
        floor = await _get(client, "reports/floor")
    return {
        "bench": "healing",
        "card": card(),
        "seed": given.seed,
        "unseen": given.unseen,
        "top_accuracy": top,
        "sampling_share": given.sampling_share,
        "stretches": [each.as_dict() for each in stretches],
        "usage": usage,
        "checks_share_of_cost": round(float(usage["verification_cost_usd"]) / float(usage["measured_cost_usd"]), 4),
        "floor": floor,
    }


# ---- the first router


async def _fit(given: argparse.Namespace, folder: Path, seen: tuple[str, ...]) -> Path:
    """Fit on tasks of the known families, as an operator would on prompts of their own."""
    prompts, router = folder / "prompts.jsonl", folder / "router.npz"
    tasks = islice(_half(FITTING_SPLIT, given.seed, seen), given.fit_tasks)
    prompts.write_text("".join(json.dumps({"prompt": task.prompt, "reference": task.answer}) + "\n" for task in tasks))
    command = ["bootstrap", "--prompts", str(prompts), "--output", str(router), "--quiet"]
    options = ["--concurrency", "32", "--max-tokens", str(_MAX_TOKENS), "--seed", str(given.seed)]
    process = await asyncio.create_subprocess_exec(*_suffice(*command, *options), stdout=asyncio.subprocess.DEVNULL)
    if await process.wait():
        raise SystemExit("The first router could not be fitted.")
    return router


def _half(half: int, seed: int, families: tuple[str, ...]) -> Iterator[Task]:
    """Endless fresh tasks of some families, of one half of the problems."""
    for round_ in range(1_000_000):
        drawn = generate(seed * 1_000_003 + round_, 2000, split="test", families=families)
        yield from (task for task in drawn if split_of(task) == half)


def _tasks(given: argparse.Namespace, seen: tuple[str, ...]) -> dict[str, Iterator[Task]]:
    """Endless tasks of each phase."""
    known = _half(HOLDOUT_SPLIT, given.seed + 1, seen)
    unknown = _half(HOLDOUT_SPLIT, given.seed + 2, tuple(given.unseen))

    def mixed() -> Iterator[Task]:
        # Evenly spread, so that each stretch has the same share.
        owed = 0.0
        while True:
            owed += _UNSEEN_SHARE
            is_unknown = owed >= 1.0
            owed -= is_unknown
            yield next(unknown if is_unknown else known)

    return {"before": known, "after": mixed()}


# ---- the server


def _configuration(router: Path, sampling_share: float) -> str:
    """Return the built-in ladder with this router, at a quick beat."""
    shipped = files("gateway.config").joinpath("builtin.toml").read_text()
    assert 'artifact = "builtin"' in shipped, "the shipped ladder names its router"
    own = shipped.replace('artifact = "builtin"', f"artifact = {json.dumps(str(router))}")
    own = own.replace("[policy]\n", f"[policy]\nsampling_share = {sampling_share}\n")
    return own + _BEAT


def _suffice(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-c", "from gateway.cli import main; main()", *arguments]


# ---- the requests


async def _stretch(
    client: httpx.AsyncClient, kind: str, tasks: list[Task], given: argparse.Namespace
) -> HealingInterval:
    """Ask a batch as ordinary callers do, then look at the server."""
    stretch, begun_s = HealingInterval(kind), time.perf_counter()
    for task, (text, headers) in zip(tasks, await _ask_all(client, "auto", tasks, given.concurrency), strict=True):
        is_right, is_unseen = check(task, text), task.family in given.unseen
        stretch.num_requests += 1
        stretch.num_right += is_right
        stretch.num_unseen += is_unseen
        stretch.num_unseen_right += is_right and is_unseen
        stretch.cost_usd += float(headers["x-suffice-cost"])
        stretch.tiers[int(headers["x-suffice-tier"])] += 1
        stretch.router = headers["x-suffice-router-version"]
    stretch.seconds = time.perf_counter() - begun_s
    # Traffic has its lulls: what runs beside it, checks and retraining, gets its turn there.
    await asyncio.sleep(given.pause)
    stretch.server = await _state(client)
    return stretch


async def _ask_all(
    client: httpx.AsyncClient, model: str, tasks: list[Task], concurrency: int
) -> list[tuple[str, httpx.Headers]]:
    places = asyncio.Semaphore(concurrency)

    async def ask(task: Task) -> tuple[str, httpx.Headers]:
        body = {"model": model, "messages": [{"role": "user", "content": task.prompt}], "max_tokens": _MAX_TOKENS}
        async with places:
            answer = await client.post("/v1/chat/completions", json=body | {"temperature": 0})
        answer.raise_for_status()
        return answer.json()["choices"][0]["message"]["content"] or "", answer.headers

    return list(await asyncio.gather(*(ask(task) for task in tasks)))


async def _top_accuracy(client: httpx.AsyncClient, tasks: list[Task], given: argparse.Namespace) -> float:
    answers = await _ask_all(client, "expert", tasks, given.concurrency)
    return round(sum(check(task, text) for task, (text, _) in zip(tasks, answers, strict=True)) / len(tasks), 4)


async def _state(client: httpx.AsyncClient) -> dict[str, Any]:
    """Return the server's own report, in few words."""
    alerts, rollouts = await _get(client, "alerts"), await _get(client, "rollouts")
    runs, policy = await _get(client, "retrain-runs"), await _get(client, "policies/default")
    checks = await _get(client, "reports/verification")
    return {
        "alerts": [f"{each['kind']} {each['subject'][:40]}" for each in alerts["data"]],
        "rollouts": [f"{each['router_version'][:8]} {each['status']} {each['share']}" for each in rollouts["data"]],
        "retrains": [f"{each['trigger']} {each['status']}" for each in runs["data"]],
        "tightened": policy["tightened"],
        "checks": checks["checks"],
    }


async def _get(client: httpx.AsyncClient, path: str) -> Any:
    answer = await client.get(f"/admin/v1/{path}")
    answer.raise_for_status()
    return answer.json()


def draw(found: dict[str, Any], path: Path) -> None:
    """Accuracy, cost and tier shares, stretch by stretch. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    stretches = found["stretches"]
    ends = [sum(each["requests"] for each in stretches[: i + 1]) for i in range(len(stretches))]
    changed = sum(each["requests"] for each in stretches if each["kind"] == "before")
    figure, (above, middle, below) = plt.subplots(3, 1, figsize=(9, 8), sharex=True)
    above.plot(ends, [each["accuracy"] / found["top_accuracy"] for each in stretches], label="quality, of tier 4's")
    after = [(end, each["unseen_accuracy"]) for end, each in zip(ends, stretches, strict=True) if each["unseen"]]
    above.plot(*zip(*after, strict=True), label="right on the unseen families", linestyle=":")
    middle.plot(ends, [each["cost_usd"] for each in stretches], label="USD a request")
    tiers = ("1", "2", "3", "4")
    shares = [[each["tiers"].get(tier, 0) / each["requests"] for each in stretches] for tier in tiers]
    below.stackplot(ends, shares, labels=[f"tier {tier}" for tier in tiers])
    marks = _marks(stretches, ends)
    for axis in (above, middle, below):
        axis.axvline(changed, color="red", linewidth=0.8)
        for end, color in marks:
            axis.axvline(end, color=color, linewidth=0.8, linestyle="--")
        axis.legend(loc="lower left", fontsize=8)
    above.set_title("red: unseen families begin; black: alert; orange: retrain ended; green: rollout moved on")
    below.set_xlabel("requests")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _marks(stretches: Sequence[dict[str, Any]], ends: Sequence[int]) -> list[tuple[int, str]]:
    """After how many requests something was new, and the colour of what it was."""
    found = []
    for before, each, end in zip(stretches, stretches[1:], ends[1:], strict=False):
        for name, color in (("alerts", "black"), ("retrains", "orange"), ("rollouts", "green")):
            if each[name] != before[name]:
                found.append((end, color))
    return found


if __name__ == "__main__":
    sys.exit(main())
