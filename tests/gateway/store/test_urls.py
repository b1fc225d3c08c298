"""Database URLs: accepted spellings, refusals that say what was expected, and no password anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.store.errors import StoreUrlInvalid
from gateway.store.urls import parse_database_url


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        ("sqlite:////var/lib/suffice/log.db", "sqlite+aiosqlite"),
        ("sqlite+aiosqlite:////var/lib/suffice/log.db", "sqlite+aiosqlite"),
        ("postgres://u:p@db/suffice", "postgresql+asyncpg"),
        ("postgresql://u:p@db:5433/suffice", "postgresql+asyncpg"),
        ("postgresql+asyncpg://u@/suffice?host=/run/postgresql", "postgresql+asyncpg"),
    ],
)
def test_accepted_spellings(text: str, driver: str) -> None:
    assert parse_database_url(text).sqlalchemy_url.drivername == driver


def test_relative_and_home_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert parse_database_url("sqlite:///log.db").path == tmp_path / "log.db"
    assert parse_database_url("sqlite:///~/log.db").path == tmp_path / "home" / "log.db"


def test_libpq_options_reach_the_driver() -> None:
    url = parse_database_url("postgresql://u@db/x?sslmode=require&application_name=mine")
    assert url.connect_args == {"ssl": "require", "server_settings": {"application_name": "mine"}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "cannot be read"),
        ("not a url", "cannot be read"),
        ("postgresql://u:hunter2@db:port/x", "cannot be read"),
        ("mysql://u:hunter2@db/x", "'mysql' is not supported"),
        ("postgresql+psycopg2://u:hunter2@db/x", "not supported"),
        ("postgresql://u:hunter2@db/x?sslmod=require", "unknown option 'sslmod'"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:////log.db?mode=memory", "without options"),
    ],
)
def test_refused(text: str, expected: str) -> None:
    with pytest.raises(StoreUrlInvalid, match=expected) as refused:
        parse_database_url(text)
    assert "hunter2" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_the_password_is_not_shown() -> None:
    shown = parse_database_url("postgresql+asyncpg://u:hunter2@db/x").shown
    assert shown == "postgresql://u:***@db/x"
