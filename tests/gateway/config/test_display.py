"""No password of a URL is shown, stored or logged, whatever it is made of (security review M13, L11)."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis.connection import parse_url
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from gateway.config.display import mask_passwords
from gateway.config.errors import SettingsError
from gateway.config.settings import load_settings
from gateway.store.errors import StoreUrlInvalid
from gateway.store.urls import parse_database_url

# Whatever stands in it, the marks are recognised where they are shown.
PASSWORDS = st.lists(st.text("/@:?#&=%[]\\ +é\n", max_size=4), min_size=2, max_size=4).map("SECRET".join)
SCHEMES = st.sampled_from(["postgresql", "postgres", "postgresql+asyncpg", "redis", "rediss", "http"])
USERS = st.sampled_from(["", "me", "me.and-you", "me@corp"])
PLACES = st.sampled_from(["db", "127.0.0.1:5432", "[::1]:6379"])


@given(SCHEMES, USERS, PASSWORDS, PLACES, st.booleans())
def test_no_part_of_a_password_is_left(scheme: str, user: str, password: str, place: str, is_quoted: bool) -> None:
    written = quote(password, safe="") if is_quoted else password
    shown = mask_passwords(f"{scheme}://{user}:{written}@{place}/name")
    assert "SECRET" not in shown
    assert shown == f"{scheme}://{user}:***@{place}/name"


@given(USERS, PASSWORDS, st.booleans())
def test_what_the_parsers_take_for_a_password_is_not_shown(user: str, password: str, is_quoted: bool) -> None:
    written = quote(password, safe="") if is_quoted else password
    for text in (f"postgresql://{user}:{written}@db/x", f"redis://{user}:{written}@db:6379/0"):
        try:
            found = make_url(text).password if text.startswith("p") else parse_url(text).get("password")
        except (ArgumentError, ValueError):
            continue
        assert found is None or str(found) in ("", "***") or "SECRET" not in mask_passwords(text)


@given(USERS, PASSWORDS, st.sampled_from(["", "?application_name=x", "?sslmode=require", "?password=SECRET"]))
@example("", "@SECRET?SECRET=SECRET\n", "")
def test_a_database_url_is_told_without_it(user: str, password: str, options: str) -> None:
    try:
        told = parse_database_url(f"postgresql://{user}:{password}@db:5432/x{options}").shown
    except StoreUrlInvalid as refused:
        told = str(refused)
    assert "SECRET" not in told


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://h:6379/0?password=hunter2&db=1", "redis://h:6379/0?password=***&db=1"),
        ("postgresql://u@h/x?sslpassword=hunter2", "postgresql://u@h/x?sslpassword=***"),
        ("https://h/v1?api_key=hunter2", "https://h/v1?api_key=***"),
        ("http://h:8000/v1", "http://h:8000/v1"),
        ("postgresql://u@h:5432/x", "postgresql://u@h:5432/x"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("sqlite:////var/lib/suffice.db", "sqlite:////var/lib/suffice.db"),
        ("me:pw@host is no URL", "me:pw@host is no URL"),
    ],
)
def test_options_are_masked_and_the_rest_is_left(text: str, shown: str) -> None:
    assert mask_passwords(text) == shown


@pytest.mark.parametrize(
    "url",
    ["redis://:hunt/er2@h:6379/0", "redis://:hunt?er2@h:1/0", "redis://:x@[::1", "redis://h:port", "redis://h?db=x"],
)
def test_a_redis_url_that_cannot_be_read_is_a_sentence(tmp_path: Path, url: str) -> None:
    with pytest.raises(SettingsError, match=r"redis\.url: is .*, which cannot be read") as refused:
        load_settings(environ={"HOME": str(tmp_path)}, overrides={"redis.url": url})
    assert "er2" not in str(refused.value)
    assert "hunt" not in str(refused.value)


def test_what_is_stored_of_the_settings_holds_no_password(tmp_path: Path) -> None:
    url = "postgresql://postgres:s3cr3t/pa55@127.0.0.1:5432/x"
    options = {"database.url": url, "redis.url": "redis://:s3cr3t%2Fpa55@h:6379/0"}
    shown = load_settings(environ={"HOME": str(tmp_path)}, overrides=options).shown()
    assert shown["database.url"] == "postgresql://postgres:***@127.0.0.1:5432/x"
    assert "pa55" not in str(shown)
