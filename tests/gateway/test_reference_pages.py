"""The reference pages say what the code says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from gateway import cli_docs
from gateway.cli import app
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


def test_no_option_of_a_command_is_lost() -> None:
    """Each stands in its command's entry or in its group's list, in the words of the command's own help."""
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    sections = {each.partition("`")[0]: each for each in page.split("### `")[1:]}
    num_options = 0
    for path, name, command in _commands(typer.main.get_command(app), "suffice"):
        section = sections[path]
        entry = re.search(rf"^- `{name}\b(?!-).*\n(?:  - .*\n)*", section, re.MULTILINE)
        assert entry is not None, f"{path} {name}"
        everywhere = section.partition("Every command takes:")[2].partition("Commands:")[0].partition("Several")[0]
        context = command.context_class(command, info_name=name)
        for written, text in (each.get_help_record(context) for each in command.params):
            num_options += 1
            line = f"- `{written}`: {' '.join(text.split())}\n"
            assert line in section or text == "[required]", f"{path} {name}: {written}"
            flag = next((each for each in written.split() if each.startswith("--")), written.split()[0])
            assert flag.rstrip(",") in entry[0] or line in everywhere, f"{path} {name}: {written}"
    assert num_options > 250


def _commands(group: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    for name, each in group.commands.items():
        if hasattr(each, "commands"):
            yield from _commands(each, f"{path} {name}")
        else:
            yield path, name, each
