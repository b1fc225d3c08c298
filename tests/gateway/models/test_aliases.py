"""Further names of what is served, over real HTTP: on every endpoint, and never past a key's permissions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.testing import EchoBackend
from tests.gateway.admin.kit import administered
from tests.gateway.harness import LADDER_TOML, assert_error, make_settings, running

ALIASES = """
[models.vectors]
kind = "echo"

[aliases]
"claude-*" = "auto"
"claude-opus*" = "expert"
"claude-opus-4-1" = "careful"
"small-2" = "tier-1"
"ex*" = "simple"
"text-*" = "vectors"
"""
TOML = LADDER_TOML + ALIASES
SAID = {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 20}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": SAID,
    "/v1/completions": {"prompt": "one two"},
    "/v1/messages": SAID,
    "/v1/responses": {"input": "one two"},
}


def backends() -> dict[str, Any]:
    return {name: EchoBackend(name) for name in ("small", "large", "vectors")}


@pytest.mark.parametrize(
    ("name", "policy", "model"),
    [
        ("claude-haiku-4", "default", "large"),
        ("claude-opus-4", "default", "large"),
        ("claude-opus-4-1", "careful", "large"),
        ("small-2", "default", "small"),
        # Its own name counts before the alias that it fits.
        ("expert", "default", "large"),
        ("exotic", "default", "small"),
    ],
)
async def test_the_longest_match_counts_after_the_names_that_are_served(
    tmp_path: Path, name: str, policy: str, model: str
) -> None:
    async with running(make_settings(tmp_path, TOML), backends()) as gateway:
        for path, body in BODIES.items():
            answered = await gateway.client.post(path, json=body | {"model": name})
            assert (answered.status_code, answered.json()["model"]) == (200, model)
            row = (await gateway.rows())[0]
            assert (row.model_requested, row.policy_name, row.endpoint) == (name, policy, path)
        listed = [each["id"] for each in (await gateway.client.get("/v1/models")).json()["data"]]
        assert [each for each in listed if "*" in each or "claude" in each] == []


async def test_vectors_go_by_further_names_too(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, TOML), backends()) as gateway:
        for name, model in {"text-embedding-3": "vectors", "claude-opus": "large", "claude-x": "small"}.items():
            answered = await gateway.client.post("/v1/embeddings", json={"model": name, "input": "a b"})
            assert (answered.status_code, answered.json()["model"]) == (200, model)
        refused = await gateway.client.post("/v1/embeddings", json={"model": "claude-opus-4-1", "input": "a b"})
        assert "'claude-opus-4-1'" in assert_error(refused, 404, "model_not_found", "model")["message"]
        # It makes vectors and answers nobody.
        assert_error(await gateway.chat(model="text-embedding-3"), 404, "model_not_found", "model")


async def test_a_key_may_use_what_a_name_stands_for_or_not(tmp_path: Path) -> None:
    async with administered(tmp_path, backends=backends(), toml=TOML) as admin:
        made = await admin("POST", "/keys", json={"permissions": {"allowed_policies": ["default"]}})
        key = {"authorization": f"Bearer {made.json()['key']}"}
        post = admin.gateway.client.post
        answered = await post("/v1/chat/completions", json=SAID | {"model": "claude-x"}, headers=key)
        assert answered.status_code == 200
        refused = await post("/v1/chat/completions", json=SAID | {"model": "claude-opus-4-1"}, headers=key)
        assert_error(refused, 403, "policy_not_permitted", "model")
        made = await admin("POST", "/keys", json={"permissions": {"allowed_tiers": ["simple"]}})
        key = {"authorization": f"Bearer {made.json()['key']}"}
        refused = await post("/v1/chat/completions", json=SAID | {"model": "claude-opus"}, headers=key)
        assert_error(refused, 403, "tier_not_permitted", "suffice.tier")
        refused = await post("/v1/embeddings", json={"model": "claude-opus", "input": "x"}, headers=key)
        assert_error(refused, 403, "tier_not_permitted", "model")
        assert len(admin.gateway.backends["large"].requests) == 1
