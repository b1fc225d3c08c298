"""The drawing of the rooms stays true: who may import whom, what stays light, what is never used, what is documented.

::

    migrations ─► gateway ─┬─► policies
                           ├─► classifier
                           └─► backends ─► engine
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("engine", "classifier", "policies", "backends", "gateway", "migrations")

# Room -> what it may import from us.
ARROWS: dict[str, frozenset[str]] = {
    "engine": frozenset(),
    "classifier": frozenset(),
    "policies": frozenset(),
    "backends": frozenset({"engine"}),
    "gateway": frozenset({"policies", "classifier", "backends"}),
    "migrations": frozenset({"gateway"}),
}

HEAVY = ("torch", "sklearn", "transformers", "sentence_transformers", "scipy", "pandas", "matplotlib")
LIGHT_MODULES = (
    "gateway.config.settings",
    "gateway.cli",
    "gateway.errors",
    "policies",
    "classifier.types",
    "backends.protocol",
)

# Modules that can run what they read.
UNSAFE_IMPORTS = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"})
UNSAFE_CALLS = frozenset({"eval", "exec"})

# The aim is 60 to 250; beyond this a file has two nouns.
MAX_FILE_LINES = 550


@dataclass(frozen=True)
class Import:
    """A statement at ``line`` of ``path`` and the ``names`` taken from ``module``.

    ``is_typing``: never at run time; ``is_optional``: inside a function or a ``try``, so the module loads without it.
    """

    path: Path
    line: int
    module: str
    names: tuple[str, ...]
    is_typing: bool
    is_optional: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def source_files() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports_of(path: Path) -> Iterator[Import]:
    tree = parse(path)
    typing = _lines(
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    optional = _lines(
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try)
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found: list[tuple[str, tuple[str, ...]]] = [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [(_absolute(path, node), tuple(alias.name for alias in node.names))]
        else:
            continue
        for module, names in found:
            yield Import(path, node.lineno, module, names, node.lineno in typing, node.lineno in optional)


def _lines(nodes: Iterable[ast.stmt]) -> set[int]:
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def _absolute(path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = path.relative_to(ROOT).parts[: -node.level]
    return ".".join((*package, *(node.module or "").split("."))).rstrip(".")


@cache
def all_imports() -> list[Import]:
    return [each for path in source_files() for each in imports_of(path)]


def room_of(name: str) -> str:
    return name.split(".")[0]


def test_the_walk_sees_the_rooms() -> None:
    """Were the walk blind, every test below would pass."""
    assert {path.relative_to(ROOT).parts[0] for path in source_files()} == set(ROOMS)
    assert any(each.module == "gateway.store.tables" and "migrations" in str(each.path) for each in all_imports())
    assert any(each.module == "torch" for each in all_imports())


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_one_way(room: str) -> None:
    wrong = [
        str(each)
        for each in all_imports()
        if each.path.is_relative_to(ROOT / room)
        and room_of(each.module) in ROOMS
        and room_of(each.module) not in ARROWS[room] | {room}
    ]
    assert wrong == []


def test_only_the_local_backend_meets_the_engine() -> None:
    """The others may know its configuration and its errors; a gateway of remote models then needs no engine."""
    allowed = ("local", "weights", "builtin")
    wrong = [
        str(each)
        for each in all_imports()
        if each.path.is_relative_to(ROOT / "backends")
        and room_of(each.module) == "engine"
        and each.module not in {"engine.config", "engine.errors"}
        and not each.path.relative_to(ROOT / "backends").parts[0].startswith(allowed)
    ]
    assert wrong == []


def test_nothing_imports_the_tests() -> None:
    assert [str(each) for each in all_imports() if room_of(each.module) == "tests"] == []


def test_names_come_from_the_module_that_defines_them() -> None:
    """Never through a package's ``__init__``: importing a package by name gives its modules, not their contents."""
    wrong = []
    for each in all_imports():
        if room_of(each.module) not in ROOMS:
            continue
        folder = ROOT.joinpath(*each.module.split("."))
        if folder.is_dir() and not folder.with_suffix(".py").exists():
            wrong += [f"{each}: {name}" for name in each.names if not _is_module(folder, name)]
    assert wrong == []


def _is_module(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").exists() or (folder / name).is_dir()


def test_packages_hold_only_a_docstring() -> None:
    wrong = []
    for path in source_files():
        if path.name == "__init__.py":
            body = parse(path).body
            is_docstring = len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
            if not is_docstring:
                wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []


def test_there_are_no_import_cycles() -> None:
    """At module level, between our modules (imports inside functions and for types alone are left out)."""
    modules = {_module_name(path): path for path in source_files()}
    graph = {name: _loads_at_import(path, modules.keys()) for name, path in modules.items()}
    done: set[str] = set()
    cycles: list[str] = []

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            cycles.append(" -> ".join((*trail[trail.index(name) :], name)))
        elif name not in done:
            for other in graph[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    assert cycles == []


def test_rooms_of_the_gateway_form_no_circle() -> None:
    """First-level groups of ``gateway/``: imports inside functions count, those for types alone do not."""
    modules = {_module_name(path) for path in source_files()}
    arrows: dict[str, set[str]] = {}
    for each in all_imports():
        name = _module_name(each.path)
        if each.is_typing or not name.startswith("gateway."):
            continue
        for target in (each.module, *(f"{each.module}.{part}" for part in each.names)):
            if target.startswith("gateway.") and target in modules:
                arrows.setdefault(_group_of(name), set()).add(_group_of(target))
    assert len(arrows) > 10, "were the walk blind, nothing would be found"
    circles = [group for group in arrows if group in _reachable(arrows, arrows[group] - {group})]
    assert circles == []


def _group_of(module: str) -> str:
    return module.split(".")[1]


def _reachable(arrows: Mapping[str, set[str]], start: Iterable[str]) -> set[str]:
    found: set[str] = set()
    waiting = list(start)
    while waiting:
        group = waiting.pop()
        if group not in found:
            found.add(group)
            waiting += arrows.get(group, set())
    return found


def test_the_gateway_has_rooms_not_a_lobby() -> None:
    assert len([path for path in (ROOT / "gateway").glob("*.py") if path.name != "__init__.py"]) <= 15


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _loads_at_import(path: Path, known: Container[str]) -> set[str]:
    found: set[str] = set()
    for each in imports_of(path):
        if not each.is_typing and not each.is_optional:
            candidates = [each.module, *(f"{each.module}.{name}" for name in each.names)]
            found |= {name for name in candidates if name in known}
    return found - {_module_name(path)}


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_light_modules_stay_light(module: str) -> None:
    program = (
        "import importlib, pkgutil, sys\n"
        f"package = importlib.import_module({module!r})\n"
        "for each in pkgutil.walk_packages(getattr(package, '__path__', []), package.__name__ + '.'):\n"
        "    importlib.import_module(each.name)\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_nothing_reads_pickles_or_runs_text() -> None:
    wrong = [str(each) for each in all_imports() if room_of(each.module) in UNSAFE_IMPORTS]
    for path in source_files():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                where = f"{path.relative_to(ROOT)}:{node.lineno} calls {name}"
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if name in UNSAFE_CALLS or keywords.get("allow_pickle") == "True":
                    wrong.append(where)
                if name == "torch.load" or keywords.get("trust_remote_code") == "True":
                    wrong.append(where)
                if keywords.get("shell") == "True":
                    wrong.append(where)
    assert wrong == []


def test_only_the_settings_read_the_environment() -> None:
    """Handing a copy on to a child process reads nothing."""
    wrong = []
    for room in ("gateway", "policies", "backends", "classifier"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if path == ROOT / "gateway" / "config" / "settings.py":
                continue
            for node in ast.walk(parse(path)):
                is_read = isinstance(node, ast.Subscript | ast.Attribute) and ast.unparse(node.value) == "os.environ"
                if is_read or (isinstance(node, ast.Attribute) and ast.unparse(node) == "os.getenv"):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []


def test_policies_touch_no_clock_dice_or_disk() -> None:
    banned = frozenset({"time", "os", "asyncio", "socket", "pathlib", "logging", "secrets", "subprocess", "threading"})
    wrong = [
        str(each)
        for each in all_imports()
        if each.path.is_relative_to(ROOT / "policies") and room_of(each.module) in banned
    ]
    assert wrong == []


def test_files_stay_small() -> None:
    long = {
        str(path.relative_to(ROOT)): num_lines
        for path in source_files()
        if (num_lines := len(path.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert long == {}


def test_modules_say_what_they_are() -> None:
    assert [str(path.relative_to(ROOT)) for path in source_files() if not ast.get_docstring(parse(path))] == []


def test_every_signature_is_typed() -> None:
    wrong = []
    for path in source_files():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                untyped = [
                    each.arg for each in arguments if each.annotation is None and each.arg not in {"self", "cls"}
                ]
                if untyped or node.returns is None:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}({', '.join(untyped)})")
    assert wrong == []


def test_what_is_imported_is_declared() -> None:
    """A fresh machine has the declared dependencies and no others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {_distribution(text) for text in project["dependencies"]}
    optional = {_distribution(text) for extra in project["optional-dependencies"].values() for text in extra}
    modules = {"pytorch": "torch", "scikit_learn": "sklearn"}
    known = {modules.get(name, name) for name in declared | optional}
    # scikit-learn cannot be without scipy, nor PyTorch for CUDA without triton; the others are for modules imported
    # only where they are found.
    known |= {"scipy", "triton", "aiohttp", "yarl", "gguf"} | set(ROOMS) | sys.stdlib_module_names
    foreign = {str(each) for each in all_imports() if room_of(each.module) not in known and not each.is_optional}
    assert foreign == set()


def _distribution(requirement: str) -> str:
    name = requirement
    for mark in "[<>=!~; ":
        name = name.split(mark)[0]
    return name.replace("-", "_").lower()
