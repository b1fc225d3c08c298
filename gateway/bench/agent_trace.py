"""Replays agents whose histories grow, on one server with an engine in its process: what of them is computed again?

``python -m gateway.bench.agent_trace``. Every step sends what was sent before and a little more, as agents do, in token
ids, so that what could be read from the prefix cache is known exactly: the whole blocks of the step before. Steps of
several conversations take turns. The status is 1 where less than 99 % of it was read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from gateway.bench.child_server import ready_server
from gateway.bench.machine_card import card, print_card

BLOCK_TOKENS = 16
LEAST_SHARE = 0.99
_FIRST_TOKENS, _STEP_TOKENS = 200, (20, 60)
# Of the built-in vocabulary, past its special tokens.
_IDS = range(300, 1200)


async def replay(client: httpx.AsyncClient, model: str, num_conversations: int, num_steps: int, seed: int) -> Any:
    """Return the tokens that were sent, that could be read from the cache, and that were."""
    rng = random.Random(seed)
    histories = [rng.choices(_IDS, k=_FIRST_TOKENS) for _ in range(num_conversations)]
    sent = possible = read = 0
    for step in range(num_steps):
        for history in histories:
            known = len(history)
            if step:
                history += rng.choices(_IDS, k=rng.randint(*_STEP_TOKENS))
            body = {"model": model, "prompt": history, "max_tokens": 1, "temperature": 0}
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            usage = answer.json()["usage"]
            sent += usage["prompt_tokens"]
            read += usage["prompt_tokens_details"]["cached_tokens"]
            possible += known // BLOCK_TOKENS * BLOCK_TOKENS if step else 0
    return {"sent": sent, "possible": possible, "read": read, "share": read / possible}


async def _run(given: argparse.Namespace) -> Any:
    with tempfile.TemporaryDirectory(prefix="suffice-bench-") as folder:
        config = Path(folder) / "suffice.toml"
        config.write_text(f'data_dir = "{folder}"\n')
        command = (sys.executable, "-P", "-m", "gateway.cli", "serve", "--config", str(config))
        async with ready_server(*command) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
            return await replay(client, given.model, given.conversations, given.steps, given.seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway.bench.agent_trace", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", default="medium", help="a tier of the built-in ladder")
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    found, facts = asyncio.run(_run(given)), card()
    print_card("Agent trace bench", facts)
    for name, value in found.items():
        print(f"  {name}: {value}")
    print(json.dumps({"bench": "agent_trace", "card": facts, "results": found}))
    return 0 if found["share"] >= LEAST_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
