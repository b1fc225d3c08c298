"""Every operation with text that no database should see: NUL, broken UTF-8, far too much, the ends of the calendar."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admin.nul_check import refuse_nul
from gateway.errors import InvalidRequest
from tests.gateway.admin.kit import PREFIX, Admin, administered
from tests.gateway.harness import assert_error

ODD = ("\U0001f600", "x" * 20_000, "..", "%", "'; --", "\x01\x7f", "\N{REPLACEMENT CHARACTER}")
BROKEN = ("%ED%A0%80", "%FF", "%C0%80")
FAR_MOMENTS = (
    "0001-01-01T00:00:00+14:00", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59-14:00", "9999-12-31T23:59:59Z",
)  # fmt: skip
LATE_MOMENTS = ("0003-01-01T00:00:00+14:00", "9996-12-31T23:59:59-14:00")
VALUES = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from("ab\0."), max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab\0", max_size=2), inner, max_size=3),
)


def operations(admin: Admin) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Method, path and description of each operation of the administration."""
    for path, methods in admin.document["paths"].items():
        if path.startswith(PREFIX):
            for method, described in methods.items():
                yield method.upper(), path.removeprefix(PREFIX), described


def queries(described: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for each in described.get("parameters", ()):
        if each["in"] == "query":
            yield each["name"], each["schema"]


def members(described: Mapping[str, Any]) -> list[str]:
    """Members of a JSON body; some words where it is checked by what it is used for."""
    content = described.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema")
    return [] if schema is None else list(schema.get("properties", {})) or ["anything"]


def fill(path: str, value: str = "x") -> str:
    return re.sub(r"{\w+}", value, path)


@pytest.mark.slow
async def test_nul_is_refused_by_name_wherever_it_stands(tmp_path: Path, database_url: str) -> None:
    """It was a 500, with the statement's parameters in the log (security review L2)."""
    num_asked = 0
    async with administered(tmp_path, database__url=database_url) as admin:
        for method, path, described in operations(admin):
            for name in re.findall(r"{(\w+)}", path):
                await admin.error(method, fill(path, "a%00b"), 400, "invalid_value", name, json={})
                num_asked += 1
            for name, _ in queries(described):
                await admin.error(method, f"{fill(path)}?{name}=a%00b", 400, "invalid_value", name, json={})
                num_asked += 1
            for name in members(described):
                for value in ("a\0b", ["a", {"b": "\0"}], {"\0": 1}):
                    answer = await admin(method, fill(path), json={name: value})
                    assert_error(answer, 400, "invalid_value", answer.json()["error"]["param"])
                    assert answer.json()["error"]["param"].startswith(name), (method, path, name)
                    num_asked += 1
        assert num_asked > 150
        entries = (await admin.get("/audit?limit=500"))["data"]
        assert entries, "what was tried is written down, whatever its path"
        assert not [each for each in entries if "\0" in each["subject"]]


@pytest.mark.slow
async def test_other_odd_text_is_answered_and_not_stumbled_over(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url) as admin:
        for method, path, described in operations(admin):
            asked = [fill(path, each) for each in (*(quote(odd, safe="") for odd in ODD if odd != ".."), *BROKEN)]
            if "{" not in path:
                asked = []
            asked += [f"{fill(path)}?{name}={quote(odd)}" for name, _ in queries(described) for odd in ODD]
            for url in asked:
                answer = await admin.gateway.client.request(method, PREFIX + url, json={})
                assert answer.status_code < 500, (method, url[:80], answer.text)
            for name in members(described):
                for written in (f'"{"x" * 200_000}"', '"\\ud800"', "1e400", "-" + "9" * 400, "[" * 30 + "]" * 30):
                    body = f'{{"{name}": {written}}}'
                    answer = await admin.gateway.client.request(method, PREFIX + fill(path), content=body)
                    assert answer.status_code < 500, (method, path, name, written[:20], answer.text[:200])


@pytest.mark.slow
async def test_the_ends_of_the_calendar_are_refused(tmp_path: Path, database_url: str) -> None:
    """They were told as an outage of the database (security review L3)."""
    num_asked = 0
    async with administered(tmp_path, database__url=database_url) as admin:
        for method, path, described in operations(admin):
            for name, schema in queries(described):
                if "date-time" not in str(schema):
                    continue
                for moment in FAR_MOMENTS:
                    url = f"{fill(path)}?{name}={quote(moment)}"
                    await admin.error(method, url, 400, "invalid_value", name)
                for moment in LATE_MOMENTS:
                    url = f"{fill(path)}?{name}={quote(moment)}"
                    assert (await admin(method, url)).status_code == 200, url
                num_asked += 1
        assert num_asked >= 4


@given(VALUES)
def test_it_is_found_wherever_it_is_and_nowhere_else(value: Any) -> None:
    def holds(part: Any) -> bool:
        if isinstance(part, dict):
            return any(holds(name) or holds(each) for name, each in part.items())
        return any(map(holds, part)) if isinstance(part, list) else isinstance(part, str) and "\0" in part

    if not holds(value):
        refuse_nul(value, "")
        return
    with pytest.raises(InvalidRequest) as refused:
        refuse_nul(value, "")
    assert "\0" not in f"{refused.value}{refused.value.param}"


@pytest.mark.parametrize("is_kept", [True, False])
async def test_reading_kept_texts_leaves_an_entry(tmp_path: Path, database_url: str, is_kept: bool) -> None:
    """An administrator may read prompts, and others can see that it was done (security review L5)."""
    options = {"log__prompts": "full" if is_kept else "digest", "database__url": database_url}
    async with administered(tmp_path, **options) as admin:
        request_id = (await admin.gateway.chat("a secret")).headers["x-suffice-request-id"]
        shown = await admin.get(f"/requests/{request_id}")
        await admin.get("/requests")
        entries = (await admin.get("/audit"))["data"]
        assert ("a secret" in str(shown)) == is_kept
        told = [(each["action"], each["subject"], each["status"], each["remote"]) for each in entries]
        assert told == [("get_request", f"{PREFIX}/requests/{request_id}", 200, "127.0.0.1")] * is_kept
        assert "a secret" not in str(entries)
        comment = {"request_id": request_id, "kind": "rating", "value": 1, "comment": "mine"}
        await admin.gateway.client.post("/v1/feedback", json=comment)
        await admin.get(f"/requests/{request_id}")
        assert len((await admin.get("/audit"))["data"]) == 2 * is_kept + (not is_kept)
