"""``suffice admin``: one command an operation, made of its declaration when the group is first looked into.

Declarations import the server's parts; the other commands should not wait for that.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from gateway.admin.operation import Operation

_TYPES: Mapping[str, type] = {"integer": int, "number": float, "boolean": bool}


class AdminGroup(TyperGroup):
    """Its commands are there when somebody asks for them."""

    @cached_property
    def _made(self) -> dict[str, Any]:
        from gateway.admin.describing import unopened_room
        from gateway.config.settings import load_settings

        app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
        # Defaults alone: which operations there are does not depend on settings.
        for operation in unopened_room(load_settings(environ={})).operations:
            app.command(operation.name.replace("_", "-"), help=operation.summary)(_command(operation))
        found: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
        return found

    @property
    def commands(self) -> Any:
        return self._made

    @commands.setter
    def commands(self, _given: Any) -> None:
        """The base class sets what it is given, which is nothing."""


def _command(operation: Operation) -> Callable[..., None]:
    """A function whose signature is the operation's parameters."""
    from gateway.admin.operation import Bytes, Free

    parameters: dict[str, Any] = {}
    for name in re.findall(r"{(\w+)}", operation.path):
        parameters[name] = Annotated[str, typer.Argument(metavar=name.upper())]
    for name, each in operation.query.items():
        parameters[f"query_{name}"] = _option(name, each.schema, each.help)
    if isinstance(operation.body, Bytes | Free):
        parameters["file"] = Annotated[Path, typer.Argument(help=_FILE_HELP[type(operation.body).__name__])]
    else:
        for name, each in (operation.body or {}).items():
            parameters |= _body_options(name, each.schema, each.help)
    if operation.conditional != "no":
        help_text = "The ETag that the change rests on; by default the one in force now."
        parameters["if_match"] = Annotated[str | None, typer.Option("--if-match", help=help_text)]
    parameters["config"] = Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="TOML file with the server's address.")
    ]
    parameters["url"] = Annotated[
        str | None, typer.Option("--url", help="A running server; by default the configured address.")
    ]
    parameters["as_json"] = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

    def run(**given: Any) -> None:
        from gateway.commands.admin import call

        call(operation, given)

    # An argument has no default, and options come with None or False.
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=_default(name, kind))
            for name, kind in parameters.items()
        ]
    )
    run.__annotations__ = parameters
    return run


_FILE_HELP = {
    "Bytes": "The artifact.",
    "Free": "The body, as JSON or TOML; - reads JSON from standard input.",
}


def _default(name: str, kind: Any) -> Any:
    if isinstance(kind.__metadata__[0], typer.models.ArgumentInfo):
        return inspect.Parameter.empty
    return False if name == "as_json" else None


def _option(name: str, schema: Mapping[str, Any], help_text: str) -> Any:
    kind = _TYPES.get(str(schema.get("type")), str)
    flag = f"--{name.replace('_', '-')}"
    names = [f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag]
    # A check's default is the server's to apply; it is only told of.
    shown = f"{help_text} [default: {schema['default']}]" if _says(schema.get("default")) else help_text
    return Annotated[kind | None, typer.Option(*names, help=shown, show_default=False)]


def _says(default: Any) -> bool:
    return default not in (None, "") and not isinstance(default, list | tuple)


def _body_options(name: str, schema: Mapping[str, Any], help_text: str) -> dict[str, Any]:
    """Options for one member of a body: an object of plain members is one option each, a deeper one a file."""
    members = schema.get("properties")
    if not members:
        return {f"body_{name}": _option(name, schema, help_text)}
    if any(_plain(each).get("type") in ("object", "array") for each in members.values()):
        option = typer.Option(f"--{name}", metavar="FILE", help=f"{help_text} A file of JSON or TOML.")
        return {f"file_{name}": Annotated[Path | None, option]}
    return {
        f"body_{name}__{each}": _option(each, _plain(inner), inner.get("description", help_text))
        for each, inner in members.items()
    }


def _plain(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is inside "this or null"."""
    alternatives = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    return alternatives[0] if alternatives else schema
