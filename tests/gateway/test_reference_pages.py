"""The reference pages say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway import cli_docs
from gateway.config import reference

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_configuration_page_is_current() -> None:
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert reference.missing_sections(page) == []
    assert reference.renew(page) == page, "run: python -m gateway.config.reference docs/configuration.md"


def test_every_setting_has_a_meaning() -> None:
    lines = [line for section in reference.DECLARED for line in reference.keys(section)]
    assert len(lines) > 100
    assert [line for line in lines if len(line.partition("): ")[2]) < 5] == []


@pytest.mark.parametrize(
    "line",
    [
        "- `host` (`127.0.0.1`): Address to listen on.\n",
        "- `root_path` (string): Path prefix a reverse proxy strips, such as `/suffice`.\n",
        "- `max_n` (`16`, 1–128): Largest `n`.\n",
        "- `max_messages` (`2048`, ≥ 1): Most messages in one request.\n",
        "- `cors_origins` (list, each a string): Origins that browsers may call from; `*` for all.\n",
    ],
)
def test_a_key_is_one_line_of_default_type_limits_and_meaning(line: str) -> None:
    assert line in list(reference.keys("server"))


def test_choices_are_named_once_the_default_first() -> None:
    assert next(iter(reference.keys("auth"))).startswith("- `required` (`auto`; or `always`, `never`): ")


def test_command_page_is_current() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert cli_docs.renew(page) == page, "run: python -m gateway.cli_docs docs/cli.md"
