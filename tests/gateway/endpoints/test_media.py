"""Images, audio and files in each protocol: through the gateway to a server that takes them, and to no other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from backends.protocol import Capability
from backends.testing import EchoBackend, Script
from tests.backends.provider.server import ProviderServer
from tests.backends.remote_kit import EVERYTHING, make
from tests.gateway.harness import assert_error, echo_backends, make_settings, running

PDF = "data:application/pdf;base64,JVBERg=="
SOUND = {"data": "UklGRg==", "format": "wav"}
SAY = {"type": "text", "text": "what?"}
CHAT_SOUND = {"type": "input_audio", "input_audio": SOUND}
CHAT_FILE = {"type": "file", "file": {"file_data": PDF, "filename": "a.pdf"}}
DOCUMENT = {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}
WAYS: dict[str, tuple[str, dict[str, Any], Capability, list[dict[str, Any]]]] = {
    "audio in chat": ("/v1/chat/completions", {"content": [SAY, CHAT_SOUND]}, "audio", [SAY, CHAT_SOUND]),
    "a file in chat": ("/v1/chat/completions", {"content": [CHAT_FILE, SAY]}, "files", [CHAT_FILE, SAY]),
    "a file without a name": (
        "/v1/chat/completions",
        {"content": [{"type": "file", "file": {"file_data": PDF}}]},
        "files",
        [{"type": "file", "file": {"file_data": PDF}}],
    ),
    "a document": (
        "/v1/messages",
        {"content": [{"type": "document", "source": DOCUMENT, "title": "a.pdf"}, SAY]},
        "files",
        [CHAT_FILE, SAY],
    ),
    "a file in items": (
        "/v1/responses",
        {"content": [{"type": "input_file", "file_data": PDF, "filename": "a.pdf"}]},
        "files",
        [CHAT_FILE],
    ),
    "audio in items": ("/v1/responses", {"content": [CHAT_SOUND]}, "audio", [CHAT_SOUND]),
}
way = pytest.mark.parametrize("way", WAYS)


def body_of(path: str, message: Mapping[str, Any]) -> dict[str, Any]:
    said = [{"role": "user", **message}]
    return {"input": said} if path == "/v1/responses" else {"messages": said, "max_tokens": 9}


@way
async def test_it_reaches_a_server_that_takes_it(tmp_path: Path, way: str) -> None:
    path, message, capability, told = WAYS[way]
    with ProviderServer(Script(text="seen")) as server:
        large: Any = make(server, "ok", capabilities=(*EVERYTHING, capability))
        async with running(make_settings(tmp_path), echo_backends() | {"large": large}) as gateway:
            answer = await gateway.client.post(path, json=body_of(path, message) | {"model": "expert"})
            assert answer.status_code == 200, answer.text
        assert server.requests[-1].body["messages"] == [{"role": "user", "content": told}]


@way
async def test_a_tier_that_lacks_it_is_passed_over_or_named(tmp_path: Path, way: str) -> None:
    path, message, capability, _ = WAYS[way]
    others: Any = frozenset({"generate", "tokenize", "images", "audio", "files"}) - {capability}
    backends = echo_backends() | {"small": EchoBackend("small", capabilities=others)}
    async with running(make_settings(tmp_path), backends) as gateway:
        body = body_of(path, message)
        refused = await gateway.client.post(path, json=body | {"model": "simple"})
        assert capability in assert_error(refused, 400, "unsupported_parameter", "messages")["message"]
        answer = await gateway.client.post(path, json=body | {"model": "auto"})
        assert (answer.status_code, answer.json()["model"]) == (200, "large")
        if path == "/v1/messages":
            counted = await gateway.client.post(f"{path}/count_tokens", json=body | {"model": "auto"})
            assert counted.status_code == 200
