"""Tables of ``suffice admin`` fit a line of 100 columns and show first what is looked for."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from gateway.commands.admin_tables import show
from gateway.ids import uuid7
from tests.gateway.admin.test_documented_errors import operations
from tests.gateway.harness import make_settings, running
from tests.gateway.verify.jobs import draw_jobs


def shown(value: object) -> str:
    with redirect_stdout(io.StringIO()) as told:
        show(value)
    return told.getvalue()


async def test_rows_of_the_log_show_tier_reason_cost_and_verdict(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        for model in ("auto", "simple", "expert"):
            await gateway.chat("hi", model=model)
        (job,) = await draw_jobs(gateway.parts.store, 1)
        listed = (await gateway.client.get("/admin/v1/requests")).json()
        assert {each["verdict"] for each in listed["data"]} == {None, "queued"}
        told = shown(listed)
        assert job.request_id in told
        head = next(line for line in told.splitlines() if line.split())
        for name in ("id", "tier", "reason", "cost $", "verdict", "status"):
            assert f" {name} " in f" {head} ", head


@pytest.mark.parametrize("operation", [each for each in operations() if each.name.startswith("list_")])
async def test_every_listing_fits(tmp_path: Path, operation: object) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        await gateway.chat("hi")
        answer = await gateway.client.get(f"/admin/v1{operation.path}".replace("{name}", "default"))  # type: ignore[attr-defined]
        if answer.status_code != 200:
            assert answer.status_code in (401, 404)
            return
        assert max(len(line.rstrip()) for line in shown(answer.json()).splitlines()) <= 100


def test_a_wide_row_leaves_out_what_has_no_room() -> None:
    row = {"id": uuid7(), "created_at": "2026-01-01T00:00:00.000000+00:00", "note": "n" * 90, "final_tier": 3}
    row |= {"reason": "none_suffices", "cost_usd": "0.000123456", "verdict": "not_good", "status": 200}
    told = shown({"object": "list", "data": [row]})
    assert "not_good" in told
    assert "nnn" not in told
    assert all(len(line.rstrip()) <= 100 for line in told.splitlines())
