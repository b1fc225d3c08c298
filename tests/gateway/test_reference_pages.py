"""The reference pages say what the code says."""

from __future__ import annotations

from pathlib import Path

from gateway import cli_docs
from gateway.config import reference

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_configuration_page_is_current() -> None:
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert reference.missing_tables(page) == []
    assert reference.renew(page) == page, "run: python -m gateway.config.reference docs/configuration.md"


def test_every_setting_has_a_meaning() -> None:
    for name in reference._TABLES:
        for row in reference.table(name).splitlines()[2:]:
            assert len(row.rstrip(" |").rpartition("|")[2].strip()) > 1, row


def test_command_page_is_current() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert cli_docs.renew(page) == page, "run: python -m gateway.cli_docs docs/cli.md"
