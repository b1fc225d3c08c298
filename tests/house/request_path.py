"""Follows one chat request through the code: how many files of ours it enters, and how often it moves between them.

::

    python -m tests.house.request_path             # one whole and one streamed request
    python -m tests.house.request_path --verbose   # and the files, in order of their first entry
    python -m tests.house.request_path --json

The whole application answers in this process, by the settings it has without a configuration: the built-in router, the
log in SQLite, no key; its models are echoes, the worker that checks answers in the background is off, and only errors
are told on standard output. No server stands before it: the ASGI application is called directly, after a first request
of the same kind that is not counted. From that call until it returns, every entry into a function of ours on the event
loop's thread is seen: its call, and each time a coroutine or generator goes on. Production code alone counts, not
libraries and not the tests.

A *file* counts once it was entered. A *move* is an entry into another file than the entry before it; going back by a
return is none, so twice the moves is about what a reader's eye does. What the log's own thread and the router's do is
not counted. What the event loop does meanwhile for others is, and whether an answer is drawn for a check is chance, so
the median of several requests is shown. Moves grow with the answer's length, which is twelve words here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from backends.testing import EchoBackend
from gateway.app import create_app
from gateway.config.settings import load_settings
from tests.house.measures import ROOMS

HERE = Path(__file__).parents[2]
NUM_TRACED = 15

# Familiar to the router, and of twelve words to the echo.
PROMPT = "What is 17 + 25 + 3? Only the sum."


@dataclass
class Trace:
    """The files a request was in, one after the other."""

    visits: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        """Return the files in order of their first entry."""
        return list(dict.fromkeys(self.visits))

    @property
    def num_moves(self) -> int:
        return len(self.visits) - 1


class Follower:
    """Notes the file of every function of ours that is entered. A profile function of the interpreter."""

    def __init__(self, root: Path) -> None:
        self.trace = Trace()
        self._roots = tuple(f"{root / room}/" for room in ROOMS)
        self._num_root_chars = len(str(root)) + 1
        self._names: dict[str, str | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        name = self._name(frame) if event == "call" else None
        if name is not None and (not self.trace.visits or self.trace.visits[-1] != name):
            self.trace.visits.append(name)

    def _name(self, frame: FrameType) -> str | None:
        path = frame.f_code.co_filename
        if path not in self._names:
            self._names[path] = path[self._num_root_chars :] if path.startswith(self._roots) else None
        return self._names[path]


async def ask(app: Any, *, streamed: bool, follower: Follower | None) -> None:
    """Call the application with one chat request.

    Raises
    ------
    RuntimeError : the answer is no success, so its path tells nothing
    """
    body = {"model": "auto", "messages": [{"role": "user", "content": PROMPT}], "stream": streamed}
    content = json.dumps(body).encode()
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(content)),
    ]
    path = "/v1/chat/completions"
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 8000),
        "state": {},
    }
    messages: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": content, "more_body": False}]
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    sys.setprofile(follower)
    try:
        await app(scope, receive, send)
    finally:
        sys.setprofile(None)
    answer = b"".join(message.get("body", b"") for message in sent)
    if sent[0]["status"] != 200 or b"sum" not in answer:
        raise RuntimeError(f"the request was not answered: {answer!r}")


async def trace_requests(folder: Path) -> dict[str, Trace]:
    """Return the path of a whole and of a streamed request, each the median of several by its moves."""
    chosen = {
        "database.url": f"sqlite:///{folder / 'suffice.db'}",
        "verification.worker": False,
        "log.level": "error",
    }
    settings = load_settings(environ={"HOME": str(folder)}, overrides=chosen)
    backends = {name: EchoBackend(name) for name in settings.models}
    app = create_app(settings, backends=backends, rng=random.Random(0))
    found: dict[str, Trace] = {}
    async with app.router.lifespan_context(app):
        for name, streamed in (("whole", False), ("streamed", True)):
            await ask(app, streamed=streamed, follower=None)
            followers = [Follower(HERE) for _ in range(NUM_TRACED)]
            for follower in followers:
                await ask(app, streamed=streamed, follower=follower)
            traces = sorted((each.trace for each in followers), key=lambda trace: trace.num_moves)
            found[name] = traces[NUM_TRACED // 2]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.house.request_path", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--verbose", action="store_true", help="the files, and how often each was entered")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        traces = asyncio.run(trace_requests(Path(folder)))
    if options.json:
        told = {name: {"files": len(trace.files), "moves": trace.num_moves} for name, trace in traces.items()}
        print(json.dumps(told))
        return 0
    for name, trace in traces.items():
        print(f"{name:<10}{len(trace.files):>4} files{trace.num_moves:>6} moves")
        if options.verbose:
            times = Counter(trace.visits)
            print("\n".join(f"    {times[file]:>4}  {file}" for file in trace.files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
