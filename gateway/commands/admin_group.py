"""Makes ``suffice admin``: one command an operation, of its declaration, when the group is first looked into.

Declarations import the server's parts; the other commands should not wait for that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from gateway.admin.operation import Operation

_TYPES: Mapping[str, type] = {"integer": int, "number": float, "boolean": bool}


class AdminGroup(TyperGroup):
    """Holds commands that are made when somebody asks for them."""

    @cached_property
    def _made(self) -> dict[str, Any]:
        from gateway.admin.api import admin_operations
        from gateway.config.sections import AdminConfig

        app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
        # Defaults alone: which operations there are does not depend on settings.
        for operation in admin_operations(AdminConfig()):
            app.command(operation.name.replace("_", "-"), help=operation.summary)(_command(operation))
        by_name = {each.name: each for each in admin_operations(AdminConfig())}
        shown, turned = by_name["get_kill_switch"], by_name["set_kill_switch"]
        app.command("kill-switch", help=_KILL_SWITCH_HELP)(_kill_switch(shown, turned))
        found: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
        return found

    @property
    def commands(self) -> Any:
        return self._made

    @commands.setter
    def commands(self, _given: Any) -> None:
        """The base class sets what it is given, which is nothing."""


class _Position(StrEnum):
    ON = "on"
    OFF = "off"


_KILL_SWITCH_HELP = (
    "Turn the kill switch on (all traffic goes to the top tier) or off (route again); alone: say how it stands."
)


def _kill_switch(shown: Operation, turned: Operation) -> Callable[..., None]:
    """Return the one command of an emergency, in the words that come to mind then."""
    named = inspect.signature(_command(turned)).parameters

    def run(**given: Any) -> None:
        from gateway.commands.admin import call

        position = given.pop("position")
        call(shown if position is None else turned, given | {"body_on": position == _Position.ON})

    kind = Annotated[
        _Position | None, typer.Argument(metavar="[on|off]", help="How it is to stand.", show_default=False)
    ]
    first = inspect.Parameter("position", inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=None)
    others = [each for name, each in named.items() if name != "body_on"]
    run.__signature__ = inspect.Signature([first, *others])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in (first, *others)}
    return run


def _command(operation: Operation) -> Callable[..., None]:
    """Return a function whose signature is the operation's parameters."""
    from gateway.admin.operation import member_schemas

    parameters: dict[str, Any] = {}
    for name in operation.path_parameters:
        parameters[name] = Annotated[str, typer.Argument(metavar=name.upper())]
    for name, schema in operation.query_schemas.items():
        parameters[f"query_{name}"] = _option(name, schema)
    if operation.body_kind == "members":
        for name, schema in member_schemas(operation.body):
            parameters |= _body_options(name, schema)
    elif operation.body_kind != "none":
        parameters["file"] = Annotated[Path, typer.Argument(help=_FILE_HELP[operation.body_kind])]
    if operation.conditional != "no":
        parameters["if_match"] = Annotated[str | None, typer.Option("--if-match", help=_IF_MATCH_HELP)]
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


_IF_MATCH_HELP = "The ETag that must still be the active one; put-policy and remove-policy read it where none is given."
_FILE_HELP = {
    "bytes": "The artifact.",
    "free": "The body, as JSON or TOML; - reads JSON from standard input.",
}


def _default(name: str, kind: Any) -> Any:
    if isinstance(kind.__metadata__[0], typer.models.ArgumentInfo):
        return inspect.Parameter.empty
    return False if name == "as_json" else None


def _option(name: str, schema: Mapping[str, Any]) -> Any:
    kind = _TYPES.get(str(schema.get("type")), str)
    flag = f"--{name.replace('_', '-')}"
    names = [flag]
    if kind is bool:
        # Who turned something --on looks for --off.
        names = ["--on/--off", " /--no-on"] if flag == "--on" else [f"{flag}/--no-{flag[2:]}"]
    # A default is the server's to apply; it is only told of.
    default = schema.get("default")
    shown = schema["description"] if default in (None, "") else f"{schema['description']} [default: {default}]"
    return Annotated[kind | None, typer.Option(*names, help=shown, show_default=False)]


def _body_options(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for one member of a body: an object of plain members is one option each, a deeper one a file."""
    from gateway.admin.operation import given_schema

    members = {each: given_schema(inner) for each, inner in schema.get("properties", {}).items()}
    if not members:
        return {f"body_{name}": _option(name, schema)}
    if any(each.get("type") in ("object", "array") for each in members.values()):
        option = typer.Option(f"--{name}", metavar="FILE", help=f"{schema['description']} A file of JSON or TOML.")
        return {f"file_{name}": Annotated[Path | None, option]}
    return {f"body_{name}__{each}": _option(each, inner) for each, inner in members.items()}
