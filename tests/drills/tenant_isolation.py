"""Measures whether one tenant can find out what another has sent.

``python -m tests.drills.tenant_isolation --probes 10000 --seed 1`` asks the built-in ladder over HTTP in this process;
``--url``, ``--key-a`` and ``--key-b`` ask a running server with keys of two tenants. Before each probe tenant A sends
the probe's text, or, by the toss of a coin, another of the same shape; then tenant B sends it. The counters that B is
shown must not depend on the toss. Of the times that B can take, the AUC says how well they tell the toss: 0.5 is not at
all. ``--shared`` lets tenants share the prefix cache, to show that the probes would find it. The status is 1 when
something was found.

This finds nothing about the load: how busy a server is, and how soon entries are evicted, everybody can notice.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from gateway.access.authenticator import hash_key, make_key, shown_prefix
from gateway.config.settings import load_settings
from gateway.ids import uuid7
from gateway.models.loader import make_backends
from gateway.store.records import ApiKey
from tests.gateway.harness import Gateway, running

_Z_95, _Z_POWER = 1.959964, 1.281552  # two-sided 5 %, and a chance of 90 %
_WARM_UP = 30
_NUM_WORDS = 40
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Probe:
    """What tenant B saw of one text; ``was_sent`` is what it would like to know."""

    was_sent: bool
    counters: tuple[tuple[str, int], ...]
    elapsed_s: float
    overhead_ms: float


@dataclass(frozen=True, slots=True)
class Auc:
    """How well a number tells two classes apart, with a 95 % interval; 0.5 is not at all."""

    value: float
    low: float
    high: float

    @property
    def is_chance(self) -> bool:
        return self.low <= 0.5 <= self.high


def make_text(rng: random.Random) -> str:
    """A text that nobody has sent: words of eight random letters."""
    return " ".join("".join(rng.choices(_LETTERS, k=8)) for _ in range(_NUM_WORDS))


class Prober:
    """Sends texts as two tenants; ``headers`` are A's and B's."""

    def __init__(self, client: httpx.AsyncClient, headers: Sequence[dict[str, str]], model: str) -> None:
        self._client = client
        self._headers = headers
        self._model = model

    async def probe(self, rng: random.Random) -> Probe:
        """Let A send a text or its like, then B the text."""
        text, other, was_sent = make_text(rng), make_text(rng), rng.random() < 0.5
        await self._ask(text if was_sent else other, 0)
        began_s = time.perf_counter()
        answer = await self._ask(text, 1)
        elapsed_s = time.perf_counter() - began_s
        return Probe(was_sent, _counters(answer.json()["usage"]), elapsed_s, _overhead_ms(answer))

    async def _ask(self, text: str, tenant: int) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        body = {"model": self._model, "messages": messages, "max_tokens": 1, "temperature": 0}
        answer = await self._client.post("/v1/chat/completions", json=body, headers=self._headers[tenant])
        answer.raise_for_status()
        return answer


def _counters(usage: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    """Every count but those of the text and of what the model writes to it, which are B's own."""
    flat = dict(usage.items()) | usage["prompt_tokens_details"] | usage["completion_tokens_details"]
    known = {"prompt_tokens", "total_tokens", "prompt_tokens_details", "completion_tokens_details", "reasoning_tokens"}
    return tuple(sorted((name, value) for name, value in flat.items() if name not in known))


def _overhead_ms(answer: httpx.Response) -> float:
    return float(answer.headers.get("x-suffice-overhead-ms", 0.0))


def auc(values: NDArray[np.float64], is_sent: NDArray[np.bool_]) -> Auc:
    """Area under the curve of "smaller means sent", by ranks; interval of Hanley and McNeil 1982."""
    sent, fresh = values[is_sent], np.sort(values[~is_sent])
    below = np.searchsorted(fresh, sent, side="left")
    equal = np.searchsorted(fresh, sent, side="right") - below
    area = 1.0 - float((below + equal / 2).sum()) / (len(sent) * len(fresh))
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (len(sent) - 1) * (q1 - area**2) + (len(fresh) - 1) * (q2 - area**2)
    error = math.sqrt(max(spread, 0.0) / (len(sent) * len(fresh)))
    return Auc(area, area - _Z_95 * error, area + _Z_95 * error)


def findable_auc(num_sent: int, num_fresh: int) -> float:
    """The smallest AUC that so many probes find with a chance of 90 %."""
    error = math.sqrt((num_sent + num_fresh + 1) / (12 * num_sent * num_fresh))
    return 0.5 + (_Z_95 + _Z_POWER) * error


def classify(probes: Sequence[Probe]) -> Auc:
    """AUC, over the second half, of a logistic regression on all times that was fitted to the first."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import QuantileTransformer

    times = np.array([[each.elapsed_s, each.overhead_ms] for each in probes])
    labels = np.array([each.was_sent for each in probes])
    half = len(probes) // 2
    ranks = QuantileTransformer(n_quantiles=min(1000, half), random_state=0).fit(times[:half])
    model = LogisticRegression().fit(ranks.transform(times[:half]), labels[:half])
    return auc(-model.decision_function(ranks.transform(times[half:])), labels[half:])


def report(probes: Sequence[Probe]) -> tuple[str, bool]:
    """What was found, in words, and whether the tenants are apart."""
    labels = np.array([each.was_sent for each in probes])
    num_sent = int(labels.sum())
    seen = {sent: {each.counters for each in probes if each.was_sent == sent} for sent in (True, False)}
    are_equal = seen[True] == seen[False] and len(seen[True]) == 1
    found = {
        "elapsed": auc(np.array([each.elapsed_s for each in probes]), labels),
        "overhead header": auc(np.array([each.overhead_ms for each in probes]), labels),
        "both, held out": classify(probes),
    }
    lines = [f"{len(probes)} probes, {num_sent} of texts that tenant A had sent"]
    lines.append(f"counters: {'equal in all' if are_equal else f'differ: {seen}'}")
    lines += [f"{name}: AUC {each.value:.4f}, 95 % [{each.low:.4f}, {each.high:.4f}]" for name, each in found.items()]
    lines.append(f"an AUC of {findable_auc(num_sent, len(probes) - num_sent):.4f} would be found with a chance of 90 %")
    return "\n".join(lines), are_equal and found["both, held out"].is_chance


async def add_key(gateway: Gateway, tenant: str) -> dict[str, str]:
    """The header of a new key of a tenant."""
    secret = make_key()
    key = ApiKey(
        key_id=uuid7(),
        name=tenant,
        key_hash=hash_key(secret),
        prefix=shown_prefix(secret),
        created_at=datetime.now(UTC),
        tenant=tenant,
    )
    await gateway.parts.store.insert_key(key)
    return {"authorization": f"Bearer {secret}"}


@asynccontextmanager
async def builtin_prober(directory: Path, model: str, *, shared: bool) -> AsyncIterator[Prober]:
    """The built-in ladder over HTTP, and a key of each tenant."""
    overrides = {
        "verification.enabled": False,
        "monitor.enabled": False,
        "server.share_prefix_cache": shared,
        "log.level": "error",
    }
    settings = load_settings(environ={"HOME": str(directory)}, overrides=overrides)
    async with running(settings, make_backends(settings)) as gateway:
        yield Prober(gateway.client, [await add_key(gateway, name) for name in ("a", "b")], model)


async def measure(prober: Prober, num_probes: int, seed: int) -> list[Probe]:
    """Probe, after some probes that fill the caches with what all prompts have in common."""
    rng = random.Random(seed)
    for _ in range(_WARM_UP):
        await prober.probe(rng)
    return [await prober.probe(rng) for _ in range(num_probes)]


async def _main(options: argparse.Namespace) -> int:
    if options.url:
        headers = [{"authorization": f"Bearer {key}"} for key in (options.key_a, options.key_b)]
        async with httpx.AsyncClient(base_url=options.url, timeout=60) as client:
            probes = await measure(Prober(client, headers, options.model), options.probes, options.seed)
    else:
        with tempfile.TemporaryDirectory() as directory:
            async with builtin_prober(Path(directory), options.model, shared=options.shared) as prober:
                probes = await measure(prober, options.probes, options.seed)
    text, are_apart = report(probes)
    print(text)
    return 0 if are_apart else 1


def main() -> int:
    """Run the drill as the command line says."""
    parser = argparse.ArgumentParser(description="Measures whether one tenant can find out what another has sent.")
    parser.add_argument("--probes", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="tier-1")
    parser.add_argument("--shared", action="store_true", help="let tenants share the prefix cache")
    parser.add_argument("--url", help="a running server, without /v1; needs both keys")
    parser.add_argument("--key-a", default="")
    parser.add_argument("--key-b", default="")
    return asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
