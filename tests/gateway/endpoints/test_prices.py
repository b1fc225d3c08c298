"""What fresh, cached and embedded tokens cost: in the bill, the budgets and the sums of the log."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from backends.testing import Script
from gateway.config.errors import SettingsError
from tests.gateway.access.test_limits_http import limited
from tests.gateway.admin.kit import administered
from tests.gateway.harness import Gateway, assert_error, echo_backends, events, make_settings, running

TOML = """
[[tiers]]
name = "simple"
model = "small"
price_per_input_token_usd = 0.001
price_per_cached_token_usd = 0.0001
price_per_output_token_usd = 0.002

[[tiers]]
name = "expert"
model = "large"
price_per_request_usd = 0.01
price_per_input_token_usd = 0.003

[models.small]
kind = "echo"

[models.large]
kind = "echo"

[verification]
enabled = false
"""
VECTORS = {"model": "small", "input": ["one two", "three"]}
# Ten tokens of a prompt, of which six were cached, and three of the answer.
CACHED = Script(text="a b c", prompt_tokens=10, cached_tokens=6)
BILL = 4 * Decimal("0.001") + 6 * Decimal("0.0001") + 3 * Decimal("0.002")


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_have_their_price_and_their_name(tmp_path: Path, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    async with running(make_settings(tmp_path, TOML), echo_backends(small=CACHED)) as gateway:
        answer = await gateway.chat(model="simple", stream=stream, **options)
        row = await gateway.row()
        assert (row.prompt_tokens, row.cached_tokens, row.cost_usd) == (10, 6, BILL)
        body = events(answer.text)[-2] if stream else answer.text
        assert '"prompt_tokens_details":{"cached_tokens":6}' in body
        assert f'"cost_usd":"{BILL}"' in body
        explained = (await gateway.client.get(f"/v1/requests/{row.request_id}")).json()
        assert [Decimal(each["cost_usd"]) for each in explained["tiers"]] == [BILL, Decimal("0.04")]


async def test_every_answer_of_several_counts_its_own_cached_tokens(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, TOML), echo_backends(small=CACHED)) as gateway:
        answer = await gateway.chat(model="simple", n=2)
        assert Decimal(answer.headers["x-suffice-cost"]) == 2 * BILL
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 6


async def test_budgets_and_sums_count_what_cached_tokens_cost(tmp_path: Path, database_url: str) -> None:
    settings: dict[str, Any] = {"database__url": database_url}
    async with administered(tmp_path, toml=TOML, backends=echo_backends(small=CACHED), **settings) as admin:
        headers = await limited(admin.gateway, budget_usd_per_day=str(2 * BILL))
        asked = {"model": "simple", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        for _ in range(2):
            answer = await admin.gateway.client.post("/v1/chat/completions", json=asked, headers=headers)
            assert answer.status_code == 200, answer.text
        spent = await admin.get("/usage?group_by=tier")
        assert spent["total"]["cached_tokens"] > 0
        assert Decimal(spent["total"]["cost_usd"]) == sum(row.cost_usd for row in await admin.gateway.rows())
        # The top tier has no price for cached tokens, and takes all of them as fresh ones.
        top = 2 * (Decimal("0.01") + 10 * Decimal("0.003"))
        assert Decimal(spent["total"]["all_top_tier_usd"]) == top


async def embed(gateway: Gateway, headers: dict[str, str] | None = None, **change: Any) -> Any:
    return await gateway.client.post("/v1/embeddings", json=VECTORS | change, headers=headers)


async def test_vectors_cost_their_tokens_and_count_against_budgets(tmp_path: Path, database_url: str) -> None:
    """A key without a cent gets none (security review M16)."""
    async with running(make_settings(tmp_path, TOML, database__url=database_url)) as gateway:
        headers = await limited(gateway, budget_usd_per_day="0.004")
        answer = await embed(gateway, headers)
        num_tokens = answer.json()["usage"]["prompt_tokens"]
        cost = num_tokens * Decimal("0.001")
        assert Decimal(answer.headers["x-suffice-cost"]) == cost == Decimal("0.003")
        row = await gateway.row()
        assert (row.endpoint, row.cost_usd, row.prompt_tokens) == ("/v1/embeddings", cost, num_tokens)
        error = assert_error(await embed(gateway, headers), 429, "insufficient_quota")
        assert "$0.004 a day" in error["message"]
        # Vectors and answers share the budget.
        chat = {"model": "expert", "messages": [{"role": "user", "content": "x"}]}
        assert_error(
            await gateway.client.post("/v1/chat/completions", json=chat, headers=headers), 429, "insufficient_quota"
        )
        none = await limited(gateway, budget_usd_per_day="0")
        assert_error(await embed(gateway, none), 429, "insufficient_quota")
        assert len(await gateway.rows()) == 1
        gateway.assert_idle()


async def test_a_refused_vector_gives_back_what_was_held(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, TOML)) as gateway:
        headers = await limited(gateway, budget_usd_per_day="0.004")
        for _ in range(3):
            assert_error(await embed(gateway, headers, dimensions=7), 400, "unsupported_parameter", "dimensions")
        assert (await embed(gateway, headers)).status_code == 200


async def test_a_table_of_its_own_prices_a_models_vectors(tmp_path: Path) -> None:
    own = TOML + "\n[embeddings.small]\nprice_per_token_usd = 0.5\n"
    async with running(make_settings(tmp_path, own)) as gateway:
        assert Decimal((await embed(gateway)).headers["x-suffice-cost"]) == Decimal("1.5")
        assert Decimal((await embed(gateway, model="large")).headers["x-suffice-cost"]) == Decimal("0.009")
    for wrong, said in (
        ("[embeddings.gone]\nprice_per_token_usd = 1", "no served model; known: 'small', 'large'"),
        ("[embeddings.small]\nprice_per_token_usd = -1", "expected at least 0"),
        ("[embeddings.small]\nprice = 1", "known here: price_per_token_usd"),
    ):
        with pytest.raises(SettingsError, match=said):
            make_settings(tmp_path, TOML + wrong)
