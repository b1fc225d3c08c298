"""The pages say what the program does: every setting, metric, error code, column, command and path is on its page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from gateway.store import tables

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def page(name: str) -> str:
    return (DOCS / name).read_text()


def test_every_column_of_the_log_is_explained() -> None:
    text = page("log.md")
    missing = [column.name for column in tables.requests.c if f"`{column.name}`" not in text]
    assert missing == []


def test_every_table_is_named() -> None:
    text = page("log.md")
    assert [name for name in tables.metadata.tables if f"`{name}`" not in text] == []


def test_every_setting_is_on_the_configuration_page() -> None:
    from gateway.config.settings import load_settings

    text = page("configuration.md")
    keys = {path.rsplit(".", 1)[-1] for path in load_settings(environ={}).values}
    assert len(keys) > 40
    assert sorted(key for key in keys if f"`{key}`" not in text and f".{key}`" not in text) == []


def test_every_setting_named_elsewhere_exists() -> None:
    """``section.key`` in backquotes on any page is a setting, not a memory of one."""
    from gateway.config.settings import load_settings

    known = set(load_settings(environ={}).values)
    sections = {path.split(".")[0] for path in known} & {
        "server",
        "auth",
        "database",
        "redis",
        "log",
        "metrics",
        "router",
        "verification",
        "admin",
    }
    pattern = re.compile(rf"`((?:{'|'.join(sorted(sections))})\.[a-z_]+)(?: = [^`]*)?`")
    named = {match for each in DOCS.glob("*.md") for match in pattern.findall(each.read_text())}
    assert "database.sqlite_sync" in named
    assert sorted(named - known) == []


def test_every_metric_is_on_the_metrics_page() -> None:
    """Names are read from the source: strings that look like a metric's."""
    text = page("metrics.md")
    strings = {
        node.value
        for path in (ROOT / "gateway").rglob("metrics.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = {each for each in strings if re.fullmatch(r"(vllm:|gen_ai[._]|suffice_)[a-z0-9_.]+", each)}
    assert len(names) > 5
    assert sorted(name for name in names if name not in text) == []


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_that_pages_name_exist(path: Path) -> None:
    from typer.main import get_command

    from gateway.cli import app

    root = get_command(app)
    wrong = []
    for words in re.findall(r"(?:^|`|\s)suffice ([a-z-]+(?: [a-z][a-z-]*)?)", path.read_text(), flags=re.MULTILINE):
        first, *rest = words.split()
        command = root.commands.get(first)  # type: ignore[attr-defined]
        if command is None:
            continue
        group = getattr(command, "commands", None)
        if group is not None and rest and rest[0] not in group:
            wrong.append(words)
    assert wrong == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_modules_and_files_that_pages_name_exist(path: Path) -> None:
    text = path.read_text()
    modules = re.findall(r"python -m ((?:gateway|engine|classifier|backends)[a-z0-9_.]*)", text)
    files = re.findall(r"`((?:deploy|migrations|tests|gateway|engine|backends|policies|classifier)/[\w./-]+)`", text)
    missing = [name for name in modules if not _module_exists(name.rstrip("."))]
    assert missing + [name for name in files if not (ROOT / name).exists()] == []


def _module_exists(name: str) -> bool:
    place = ROOT.joinpath(*name.split("."))
    return place.with_suffix(".py").exists() or (place / "__main__.py").exists()


def test_names_that_the_glossary_cites_exist() -> None:
    """A term without a place in the code is a word of the page alone."""
    cited = {
        name
        for row in page("glossary.md").splitlines()
        if row.startswith("| ") and row.count("|") == 4
        for name in re.findall(r"`([^`]+)`", row.split("|")[3])
    }
    assert len(cited) > 80
    known = _names_in_the_code()
    missing = {name for name in cited if name.strip("/") not in known and not (ROOT / name).exists()}
    assert sorted(missing) == []


def test_no_term_is_explained_twice() -> None:
    rows = [row for row in page("glossary.md").splitlines() if row.startswith("| ") and row.count("|") == 4]
    terms = [term.strip() for row in rows for term in row.split("|")[1].split(",")]
    assert sorted({term for term in terms if terms.count(term) > 1} - {"term"}) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_use_the_words_of_the_glossary(path: Path) -> None:
    """What the glossary says ``instead of`` on its last table is on no page; generated parts are the code's to say."""
    head, _, instead = page("glossary.md").partition("## Instead of")
    phrases = [row.split("|")[2].strip() for row in instead.splitlines() if row.startswith("| ")][1:]
    assert len(phrases) > 5
    text = head if path.name == "glossary.md" else path.read_text()
    text = re.sub(r"<!-- (?:help|operations|table: [a-z-]+) -->.*?<!-- end -->", "", text, flags=re.DOTALL)
    words = " ".join(text.lower().split())
    assert [phrase for phrase in phrases if re.search(rf"\b{re.escape(phrase)}\b", words)] == []


def _names_in_the_code() -> set[str]:
    """Return what the packages define (classes, functions, fields, parameters) or spell out as a whole string."""
    names: set[str] = set()
    for package in ("gateway", "policies", "classifier", "backends", "engine"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(node.name)
                elif isinstance(node, ast.arg):
                    names.add(node.arg)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                    names.add(node.value if isinstance(node.value, str) else node.value.decode("latin-1"))
    return names
