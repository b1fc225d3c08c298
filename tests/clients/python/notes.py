"""What every script here has in common: two tools over a few notes, a form, and a report of what came back.

A script is called with the server's URL. It prints one JSON object: the endpoint and what was done there (a key such as
``"/v1/messages tools"``) with the values that the tests look at.
"""

from __future__ import annotations

import json
import secrets
import sys
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel

URL = sys.argv[1]
MODEL = "auto"
TASK = "Read the note 'todo' and write its secret into the note 'done'."
QUESTION = "Count to three."
SECRET = f"secret-{secrets.token_hex(6)}"

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"

_notes: dict[str, str] = {}
_seen: dict[str, Any] = {}


class Place(BaseModel):
    """A city and how many live there."""

    city: str
    people: int


def read_note(name: str) -> str:
    """Return the text of a note."""
    return f"It says {SECRET}." if name == "todo" else _notes[name]


def write_note(name: str, text: str) -> str:
    """Write a note."""
    _notes[name] = text
    return "Done."


TOOLS = {"read_note": read_note, "write_note": write_note}


def _parameters(*names: str) -> dict[str, Any]:
    properties = {name: {"type": "string"} for name in names}
    return {"type": "object", "properties": properties, "required": list(names), "additionalProperties": False}


FUNCTIONS = [
    {"name": "read_note", "description": "Return a note.", "parameters": _parameters("name")},
    {"name": "write_note", "description": "Write a note.", "parameters": _parameters("name", "text")},
]


def call(name: str, arguments: str | dict[str, Any]) -> str:
    """Run a tool as a client asks for it."""
    return TOOLS[name](**(json.loads(arguments) if isinstance(arguments, str) else arguments))


def worked(endpoint: str, what: str, said: str | None) -> None:
    """Note that the task was done: what was said at its end, and what was written since the last one."""
    _seen[f"{endpoint} {what}"] = {"said": said, "wanted": f"Wrote {SECRET}.", "written": _notes.pop("done", None)}


def said(endpoint: str, what: str, text: str | None) -> None:
    """Note an answer to :data:`QUESTION`."""
    _seen[f"{endpoint} {what}"] = {"said": text, "wanted": "one two three"}


def filled(endpoint: str, what: str, place: Place | None) -> None:
    """Note a filled form."""
    shown = None if place is None else place.model_dump()
    _seen[f"{endpoint} {what}"] = {"said": shown, "wanted": {"city": "Kiel", "people": 248000}}


def report(package: str) -> None:
    """Print what was seen, and by which version of a package."""
    print(json.dumps({"version": version(package), "seen": _seen}))
