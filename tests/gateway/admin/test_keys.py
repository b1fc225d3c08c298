"""Keys over HTTP: a secret once, limits in force at once, rotation, revocation."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.access.key_limits import KeyLimits
from tests.gateway.admin.kit import administered
from tests.gateway.harness import assert_error

CHAT = {"model": "simple", "messages": [{"role": "user", "content": "hi"}]}


async def test_a_keys_life(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url) as admin:
        client = admin.gateway.client
        made = (
            await admin(
                "POST", "/keys", json={"name": "batch", "tenant": "acme", "limits": {"requests_per_minute": 100}}
            )
        ).json()
        old = {"authorization": f"Bearer {made['key']}"}
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=old)).status_code == 200
        assert (await admin.gateway.rows())[0].tenant == "acme"
        shown = await admin.get(f"/keys/{made['id']}")
        assert (shown["limits"], shown["scope"], "key" in shown) == ({"requests_per_minute": 100}, "use", False)
        rotated = (await admin("POST", f"/keys/{made['id']}/rotate")).json()
        new = {"authorization": f"Bearer {rotated['key']}"}
        assert_error(await client.post("/v1/chat/completions", json=CHAT, headers=old), 401, "invalid_api_key")
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=new)).status_code == 200
        limits = {"limits": {"budget_usd_per_day": "0.00000001", "requests_per_minute": None}}
        changed = (await admin("PUT", f"/keys/{made['id']}/limits", json=limits)).json()
        assert changed["limits"] == {"budget_usd_per_day": "0.00000001"}
        assert_error(await client.post("/v1/chat/completions", json=CHAT, headers=new), 429, "insufficient_quota")
        assert (await admin("DELETE", f"/keys/{made['id']}")).json()["revoked_at"] is not None
        assert_error(await client.post("/v1/chat/completions", json=CHAT, headers=new), 401, "invalid_api_key")
        for method, path in (("POST", "rotate"), ("PUT", "limits")):
            await admin.error(
                method, f"/keys/{made['id']}/{path}", 409, "conflict", json={} if method == "PUT" else None
            )
        await admin.error("DELETE", f"/keys/{made['id']}", 409, "conflict")
        listed = (await admin.get("/keys"))["data"]
        assert [each["id"] for each in listed] == [made["id"]]
        audit = str((await admin.get("/audit"))["data"])
        assert made["key"] not in audit
        assert rotated["key"] not in audit


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"scope": "root"}, "scope"),
        ({"name": ""}, "name"),
        ({"tenant": 7}, "tenant"),
        ({"colour": 1}, "colour"),
        ({"limits": []}, "limits"),
        ({"limits": {"rpm": 1}}, "limits.rpm"),
        ({"limits": {"requests_per_minute": 0}}, "limits.requests_per_minute"),
        ({"limits": {"tokens_per_minute": 1.5}}, "limits.tokens_per_minute"),
        ({"limits": {"budget_usd_per_day": -1}}, "limits.budget_usd_per_day"),
        ({"limits": {"budget_usd_per_day": "1e-12"}}, "limits.budget_usd_per_day"),
        ({"limits": {"budget_usd_per_month": "much"}}, "limits.budget_usd_per_month"),
        ({"limits": {"budget_usd_per_month": True}}, "limits.budget_usd_per_month"),
        ({"limits": {"max_concurrency": 0}}, "limits.max_concurrency"),
        ({"limits": {"max_tenant_concurrency": "4"}}, "limits.max_tenant_concurrency"),
    ],
    ids=str,
)
async def test_a_wrong_key_is_not_made(tmp_path: Path, body: dict[str, object], param: str) -> None:
    async with administered(tmp_path) as admin:
        refused = await admin("POST", "/keys", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert (await admin.get("/keys"))["data"] == []
        for method, path in (("GET", ""), ("PUT", "/limits"), ("POST", "/rotate"), ("DELETE", "")):
            await admin.error(method, f"/keys/none{path}", 404, "not_found", json={} if method == "PUT" else None)


def test_the_page_names_every_limit() -> None:
    page = (Path(__file__).parents[3] / "docs" / "admin.md").read_text()
    assert [name for name in KeyLimits.__struct_fields__ if f"`{name}`" not in page] == []
