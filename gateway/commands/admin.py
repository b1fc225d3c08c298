"""Calls the administration: options to a request, an answer to a table or JSON."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from gateway.admin.api import PREFIX
from gateway.admin.operation import Operation
from gateway.commands.admin_tables import show
from gateway.commands.chat import complaint, server_address
from gateway.commands.command_hint import hint
from gateway.commands.result_printer import print_json
from gateway.config.settings import load_settings, read_admin_key
from gateway.failure_report import USAGE_STATUS, CommandError

_TIMEOUT = httpx.Timeout(120.0, connect=5.0)


def call(operation: Operation, given: Mapping[str, Any]) -> None:
    """Make the call that a command line describes, and print what is answered.

    Raises
    ------
    CommandError
        Nothing answers, or what answers refuses; in its own words.
    """
    settings = load_settings(given["config"], need_secrets=False)
    base = given["url"] or server_address(settings)
    key = read_admin_key()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=base, headers=headers, timeout=_TIMEOUT) as client:
        try:
            response = _send(client, operation, given)
        except httpx.HTTPError as error:
            raise CommandError(
                f"Nothing answers at {base} ({error}); start it with `{hint('up')}`, or give --url."
            ) from error
    if response.status_code >= 400:
        raise CommandError(complaint(response), status=USAGE_STATUS if response.status_code == 400 else 1)
    if given["as_json"]:
        print_json(response.json())
    else:
        show(response.json())


def _send(client: httpx.Client, operation: Operation, given: Mapping[str, Any]) -> httpx.Response:
    path = operation.path.format_map({name: quote(given[name], safe="") for name in operation.path_parameters})
    query = {
        name.removeprefix("query_"): str(value).lower() if isinstance(value, bool) else value
        for name, value in given.items()
        if name.startswith("query_") and value is not None
    }
    content: dict[str, Any] = {}
    if operation.body_kind == "bytes":
        content["content"] = _read(given["file"])
    elif operation.body_kind != "none":
        content["json"] = _file(given["file"]) if operation.body_kind == "free" else _body(given)
    headers = _condition(client, operation, path, given)
    return client.request(operation.method, PREFIX + path, params=query, headers=headers, **content)


def _condition(client: httpx.Client, operation: Operation, path: str, given: Mapping[str, Any]) -> dict[str, str]:
    """Return what the change rests on: as told; where it must rest on something, what is active now, or nothing."""
    if given.get("if_match") is not None:
        return {"if-match": f'"{given["if_match"]}"'}
    if operation.conditional != "must":
        return {}
    found = client.get(PREFIX + path)
    tag = found.headers.get("etag") if found.status_code == 200 else None
    return {"if-match": tag} if tag is not None else {"if-none-match": "*"}


def _body(given: Mapping[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name.startswith("file_"):
            body[name.removeprefix("file_")] = _file(value)
        elif name.startswith("body_"):
            outer, _, inner = name.removeprefix("body_").partition("__")
            if inner:
                body.setdefault(outer, {})[inner] = value
            else:
                body[outer] = value
    return body


def _file(path: Path) -> Any:
    """Return a body from a file; TOML where it is called so, else JSON.

    Raises
    ------
    CommandError
    """
    content = _read(path)
    try:
        if path.suffix == ".toml":
            return tomllib.loads(content.decode())
        return json.loads(content)
    except ValueError as error:
        raise CommandError(f"{path} cannot be read: {error}", status=USAGE_STATUS) from error


def _read(path: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}.", status=USAGE_STATUS) from error
