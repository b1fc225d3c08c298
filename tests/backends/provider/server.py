"""Plays an OpenAI-compatible provider, well or badly, by path: a real HTTP server in a thread.

``server.url("reset_after_3_tokens")`` is a base URL whose every completion breaks off after three tokens; the names are
the keys of ``behaviours.BEHAVIOURS``. Behaviours are served by uvicorn over real sockets, so what
a client sees (torn reads, resets, silence) is what it would see in production.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from types import TracebackType
from typing import Any

import orjson
import uvicorn

from backends.testing import Script, count_prompt_tokens
from tests.backends.provider.behaviours import BEHAVIOURS, Behaviour, answer_other
from tests.backends.provider.call import ProviderCall, Receive, RecordedRequest, Scope, Send

_ECHO = Script()


class ProviderServer:
    """Serve behaviours on a free port of 127.0.0.1 until the ``with`` block ends.

    Parameters
    ----------
    script : what good answers say; see :class:`backends.testing.Script`
    model, api_key : what requests must carry; no key is asked for when None
    context_length : prompts and answers beyond it are refused as vLLM refuses them
    more : behaviours beside ``BEHAVIOURS``

    Attributes
    ----------
    behaviours : by name; a test may add its own while the server runs
    requests : everything that arrived, in order
    num_active : requests being answered
    num_gone : clients that hung up before their answer's end
    errors : what went wrong in the server itself; a test that ends with any here has not tested what it meant to
    """

    def __init__(
        self,
        script: Script = _ECHO,
        *,
        model: str = "provider-model",
        api_key: str | None = None,
        context_length: int = 8192,
        more: Mapping[str, Behaviour] | None = None,
    ) -> None:
        self.behaviours = ChainMap(dict(more or {}), BEHAVIOURS)
        self.script = script
        self.model = model
        self.api_key = api_key
        self.context_length = context_length
        self.requests: list[RecordedRequest] = []
        self.num_active = 0
        self.num_gone = 0
        self.errors: list[Exception] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        # Connections inherit it; asyncio sets it only where a socket says that it is TCP.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port: int = self._socket.getsockname()[1]
        options: dict[str, Any] = {
            "log_level": "critical",
            "lifespan": "off",
            "proxy_headers": False,
            "loop": "asyncio",
            "interface": "asgi3",
        }
        self._server = uvicorn.Server(uvicorn.Config(self._app, timeout_graceful_shutdown=1, **options))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def url(self, behaviour: str = "ok") -> str:
        """Return the base URL under which every completion behaves so."""
        return f"http://127.0.0.1:{self.port}/{behaviour}/v1"

    def count(self, behaviour: str) -> int:
        """Return how many requests a behaviour has seen."""
        return sum(seen.behaviour == behaviour for seen in self.requests)

    def connections(self) -> set[Any]:
        """Return the open connections, as uvicorn's protocol objects."""
        return set(self._server.server_state.connections)

    async def settled(self, timeout_s: float = 5.0) -> bool:
        """Wait until no request is being answered; return whether that came true in time."""
        deadline = time.monotonic() + timeout_s
        # The server lives on a thread and loop of its own, so there is no event of ours to wait for.
        while self.num_active and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return self.num_active == 0

    def __enter__(self) -> ProviderServer:
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the provider server did not start")
            time.sleep(0.005)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._socket.close()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        _, behaviour, *rest = scope["path"].split("/")
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        body = await _read_body(receive)
        seen = RecordedRequest(behaviour, "/" + "/".join(rest), headers, orjson.loads(body) if body else {})
        self.requests.append(seen)
        self.num_active += 1
        watch = _DisconnectWatch(receive)
        try:
            await self._answer(ProviderCall(scope, watch.receive, send, seen, self.script, self.count(behaviour), self))
        except Exception as error:
            self.errors.append(error)
            raise
        finally:
            self.num_active -= 1
            self.num_gone += watch.is_gone

    async def _answer(self, call: ProviderCall) -> None:
        if call.seen.path.removeprefix("/v1") not in ("/chat/completions", "/completions"):
            await answer_other(call)
            return
        refusal = self._refusal(call)
        if refusal is not None and call.seen.behaviour == "ok":
            await call.error(refusal[0], refusal[1])
            return
        behave = self.behaviours.get(call.seen.behaviour)
        if behave is None:
            await call.error(404, f"no behaviour {call.seen.behaviour!r}")
        else:
            await behave(call)

    def _refusal(self, call: ProviderCall) -> tuple[int, str] | None:
        if self.api_key is not None and call.seen.headers.get("authorization") != f"Bearer {self.api_key}":
            return 401, f"Incorrect API key provided: {call.seen.headers.get('authorization')}"
        if call.seen.body.get("model") != self.model:
            return 404, f"The model {call.seen.body.get('model')!r} does not exist."
        num_prompt = count_prompt_tokens(call.request)
        wanted = call.request.sampling.max_tokens or 1
        if num_prompt + wanted > self.context_length:
            return 400, (
                f"This model's maximum context length is {self.context_length} tokens. However, you requested "
                f"{num_prompt + wanted} tokens ({num_prompt} in the messages, {wanted} in the completion)."
            )
        return None


class _DisconnectWatch:
    """Remember whether the client hung up while its answer was being made."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_gone = False

    async def receive(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        self.is_gone = self.is_gone or message["type"] == "http.disconnect"
        return message


async def _read_body(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)
