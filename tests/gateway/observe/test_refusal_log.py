"""Whatever is refused without a row leaves a line and a count; floods leave few lines and every count."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gateway.access.authenticator import make_key
from gateway.config.sections import LogConfig
from gateway.observe.log_writer import LogWriter, standard_error
from gateway.observe.refusal_log import Refusal, RefusalLog, clean_path
from tests.gateway.admin.kit import add_key
from tests.gateway.harness import make_settings, running
from tests.gateway.raw import PATIENCE_S, RawClient

Line = dict[str, Any]


def read_lines(told: str) -> list[Line]:
    return [json.loads(line) for line in told.splitlines() if '"suffice.refused"' in line]


async def test_every_kind_of_refusal_leaves_a_line_and_a_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = make_settings(tmp_path, auth__required="always", server__max_body_bytes=2048)
    async with running(settings) as gateway:
        client = gateway.client
        secret = make_key()
        await client.get(f"/v1/modles/{secret}?key=hidden")
        await client.get("/v1/chat/completions")
        await client.delete("/v1/models")
        await client.post("/v1/chat/completions", json={})
        await client.get("/v1/models", headers={"authorization": f"Bearer {secret}"})
        await client.post("/v1/embeddings", json={})
        await client.post("/v1/feedback", json={})
        await client.get("/admin/v1/tiers")
        async with RawClient(gateway.url) as raw:
            raw.writer.write(b"nonsense\r\n\r\n")
            await raw.read_until(b"invalid_http")
        rejected = gateway.parts.metrics.rejected
    assert rejected == Counter(
        {
            ("other", "unknown_url"): 1,
            ("/v1/chat/completions", "method_not_allowed"): 1,
            ("/v1/models", "method_not_allowed"): 1,
            ("/v1/chat/completions", "invalid_api_key"): 1,
            ("/v1/models", "invalid_api_key"): 1,
            ("/v1/embeddings", "invalid_api_key"): 1,
            ("/v1/feedback", "invalid_api_key"): 1,
            ("/admin/v1/tiers", "invalid_api_key"): 1,
            ("none", "invalid_http"): 1,
        }
    )
    assert standard_error().flush(PATIENCE_S)
    told = capsys.readouterr().err
    lines = read_lines(told)
    assert len(lines) == 9
    assert (lines[0]["method"], lines[0]["path"], lines[0]["status"]) == ("GET", "/v1/modles/sk-suffice-…", 404)
    assert (lines[2]["method"], lines[2]["path"], lines[2]["status"]) == ("DELETE", "/v1/models", 405)
    assert lines[3]["request_id"]
    assert secret not in told
    assert "hidden" not in told


async def test_a_known_key_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = make_settings(tmp_path, auth__required="always", server__max_body_bytes=2048)
    async with running(settings) as gateway:
        headers, key = await add_key(gateway)
        for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/feedback"):
            assert (await gateway.client.post(path, json={}, headers=headers)).status_code == 400
            large = {"x": "y" * 4096}
            assert (await gateway.client.post(path, json=large, headers=headers)).status_code == 413
        assert (await gateway.client.get("/v1/requests/x", headers=headers)).status_code == 404
        assert (await gateway.chat("hi")).status_code == 401
    assert standard_error().flush(PATIENCE_S)
    lines = read_lines(capsys.readouterr().err)
    assert [line["key_id"] for line in lines] == [key.key_id] * 7 + [None]


def test_a_flood_leaves_few_lines_and_every_count() -> None:
    now_s, told, counted = [0.0], io.StringIO(), Counter[tuple[str, str]]()
    writer = LogWriter(told)
    log = RefusalLog(LogConfig(), lambda *key: counted.update([key]), writer=writer, clock=lambda: now_s[0])
    refusal = Refusal("GET", "/x", "other", 404, "unknown_url")
    for _ in range(10_000):
        log.note(refusal)
    now_s[0] += 1.0
    for _ in range(10_000):
        log.note(refusal)
    assert counted["other", "unknown_url"] == 20_000
    assert writer.flush(PATIENCE_S)
    lines = read_lines(told.getvalue())
    assert len(lines) == 55
    assert sum(line.get("num_unlogged", 0) for line in lines) == 9_950


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/a\nb\x1b[2J\u2028", "/a?b?[2J?"),
        ("/" + "x" * 300, "/" + "x" * 199 + "…"),
        ("/sk-suffice-abcdef/more", "/sk-suffice-…"),
    ],
)
def test_a_path_is_shown_in_one_bounded_line(path: str, shown: str) -> None:
    assert clean_path(path) == shown
