"""The pages say what the code does: codes, headers, overrides, settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.api.routing_preferences import RoutingOptions
from gateway.config.sections import ServerConfig
from gateway.edge.error_table import TABLE
from policies.types import ReasonCode
from tests.gateway.harness import make_settings, running

DOCS = Path(__file__).parents[2] / "docs"
# Codes that single exceptions bring with them, beside those of the table.
OWN_CODES = {"invalid_type", "unknown_policy", "model_refused"}


@pytest.fixture(scope="module")
def errors_page() -> str:
    return (DOCS / "errors.md").read_text()


def test_every_code_is_documented_with_its_status(errors_page: str) -> None:
    for row in TABLE.values():
        if row.status not in (499, 500):
            lines = [line for line in errors_page.splitlines() if f"`{row.code}`" in line and line.startswith("|")]
            assert len(lines) == 1, row.code
            assert lines[0].startswith(f"| {row.status} |"), row.code
            assert f"`{row.type}` | {'yes' if row.retryable else 'no'} |" in lines[0], row.code
        else:
            assert f"`{row.code}`" in errors_page


def test_no_documented_code_is_made_up(errors_page: str) -> None:
    known = {row.code for row in TABLE.values()} | OWN_CODES
    named = {
        code
        for line in errors_page.splitlines()
        if line.startswith("| ") and line[2:5].isdigit()
        for code in re.findall(r"`(\w+)`", line.split("|")[2])
    }
    assert named <= known


def test_every_reason_and_override_is_documented() -> None:
    page = (DOCS / "api.md").read_text()
    assert [reason.value for reason in ReasonCode if f"`{reason.value}`" not in page] == []
    options = RoutingOptions.__struct_fields__
    assert [name for name in options if f"`x-suffice-{name.replace('_', '-')}`" not in page] == []


def test_every_setting_named_exists() -> None:
    named = {
        name
        for page in ("api.md", "behaviour.md", "errors.md")
        for name in re.findall(r"`server\.(\w+)", (DOCS / page).read_text())
    }
    assert named
    assert named <= set(ServerConfig.__dataclass_fields__)


async def test_every_header_sent_is_documented(tmp_path: Path) -> None:
    page = (DOCS / "api.md").read_text()
    async with running(make_settings(tmp_path)) as gateway:
        headers = (await gateway.chat("hi")).headers
        assert [name for name in headers if name.startswith("x-") and f"`{name}`" not in page] == []
        for path in [route.path for route in gateway.app.routes]:
            if path.startswith("/admin/"):
                assert f"{path}`" in (DOCS / "admin.md").read_text()
            else:
                assert f"{path}`".replace("{model:path}", "{name}").replace("{request_id}", "{id}") in page
