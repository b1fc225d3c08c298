"""Talks to a running server, and shows each answer's tier, reason and cost: ``suffice chat``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from backends.remote.sse import SSEParser
from gateway.commands.command_hint import hint
from gateway.commands.server_url import local_url
from gateway.config.settings import Settings, load_settings, read_client_key
from gateway.failure_report import CommandError

_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
_FAINT, _PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(slots=True)
class StreamedReply:
    """Holds what a streamed answer amounted to; ``note`` is its ``suffice`` object."""

    text: str = ""
    note: dict[str, Any] = field(default_factory=dict)


def chat(config: Path | None, *, url: str | None, model: str, system: str | None) -> None:
    """Read lines until the end of input; ``/reset`` starts over.

    Raises
    ------
    CommandError
        Nothing answers at the address.
    """
    settings = load_settings(config, need_secrets=False)
    base = url or server_address(settings)
    opening: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    key = read_client_key()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=base, headers=headers, timeout=_TIMEOUT) as client:
        _check(client, base)
        for line in _lines():
            if line == "/reset":
                messages = list(opening)
                continue
            messages.append({"role": "user", "content": line})
            reply = _ask(client, model, messages)
            if reply is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": reply.text})
                print(f"{_faint(_footer(reply.note))}\n", flush=True)


def stream_chat(client: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of one streamed answer, errors among them.

    Raises
    ------
    CommandError
        The server refused, in its own words.
    """
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            raise CommandError(complaint(response))
        parser = SSEParser()
        for piece in response.iter_bytes():
            for event in parser.feed(piece):
                if event.data != b"[DONE]":
                    yield json.loads(event.data)


def _ask(client: httpx.Client, model: str, messages: list[dict[str, str]]) -> StreamedReply | None:
    body = {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    reply, is_reasoning = StreamedReply(), False
    try:
        for chunk in stream_chat(client, body):
            if "error" in chunk:
                raise CommandError(chunk["error"]["message"])
            reply.note = chunk.get("suffice") or reply.note
            for choice in chunk.get("choices", ()):
                delta = choice["delta"]
                if thought := delta.get("reasoning_content"):
                    is_reasoning = True
                    _show(_faint(thought))
                if text := delta.get("content"):
                    _show("\n" + text if is_reasoning else text)
                    is_reasoning = False
                    reply.text += text
    except (CommandError, httpx.HTTPError) as error:
        print(f"\nsuffice: {error}", file=sys.stderr)
        return None
    except KeyboardInterrupt:
        # Leaving the stream closes the connection, and that cancels the answer at the server.
        print("\n(cancelled)")
        return None
    print()
    return reply


def _check(client: httpx.Client, base: str) -> None:
    try:
        client.get("/healthz")
    except httpx.HTTPError as error:
        raise CommandError(
            f"Nothing answers at {base} ({error}); start it with `{hint('up')}`, or give --url."
        ) from error


def _lines() -> Iterator[str]:
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("you> " if is_terminal else "").strip()
        except EOFError:
            return
        if line:
            yield line


def server_address(settings: Settings) -> str:
    """Return where a server with these settings is reached from this machine."""
    return local_url(settings.server.host, settings.server.port)


def complaint(response: httpx.Response) -> str:
    """Return what a refusal says."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"


def _footer(note: dict[str, Any]) -> str:
    if not note:
        return ""
    confidence = f", P(as good) {note['confidence']:.2f}" if note.get("confidence") is not None else ""
    return (
        f"tier {note['tier']} {note['tier_name']} ({note['model']}): {note['reason']}{confidence}, ${note['cost_usd']}"
    )


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _faint(text: str) -> str:
    return f"{_FAINT}{text}{_PLAIN}" if sys.stdout.isatty() else text
