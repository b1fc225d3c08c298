"""Findings of starting, stopping and what lies about: models and modules that are fetched, passwords, drains."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from classifier.artifact import RouterArtifact
from tests.drills.kit import Server
from tests.drills.reproductions.stage import (
    CHAT,
    ECHO,
    QUIET,
    Found,
    Parts,
    Stage,
    asking,
    client_of,
    reproduces,
    status_of,
)

_ADMIN = "/admin/v1"
_FOUR = "".join(
    f'[[tiers]]\nname = "t{tier}"\nmodel = "m{tier}"\n[models.m{tier}]\nkind = "echo"\n' for tier in (1, 2, 3, 4)
)
_SHADOW = """\
import pathlib
pathlib.Path(__file__).with_name("it-ran").touch()
raise ImportError("a stranger's module")
"""


@contextmanager
def fake_hub() -> Iterator[tuple[str, list[str]]]:
    """A model hub that has nothing; gives its URL and the paths that it is asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(404)
            self.send_header("content-length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", paths
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@reproduces("M11", "a router is uploaded that names mallory/any-repo as its encoder; a hub of the drill's own counts")
async def named_encoder(stage: Stage) -> Found:
    own = RouterArtifact.load(next((stage.tree / "classifier" / "builtin").glob("*.npz")))
    encoder = {"source": "sentence-transformers", "model": "mallory/any-repo", "dim": 0}
    content = own.with_metadata(embedding=encoder).as_bytes()
    with fake_hub() as (url, paths):
        async with stage.serving(_FOUR + QUIET, environ={"HF_ENDPOINT": url}) as server, client_of(server) as client:
            told = await status_of(client.post(f"{_ADMIN}/routers", content=content))
    num = sum("mallory/any-repo" in path for path in paths)
    return Found(num > 0, f"{told}; the hub was asked for it {num} times")


@reproduces("M13", "a database password with a slash in config show")
async def shown_password(stage: Stage) -> Found:
    url = "postgresql://postgres:s3cr3t/pa55@127.0.0.1:5432/log"
    done = await stage.command("config", "show", SUFFICE_DATABASE__URL=url)
    shown = [each for each in ("s3cr3t", "pa55") if each in done.output]
    assert done.status == 0, done.output
    return Found(bool(shown), f"shown: {', '.join(shown) or 'nothing of it'}")


@reproduces("M14", "orjson.py in the server's working directory; then a what-if")
async def foreign_module(stage: Stage) -> Found:
    place = stage.folder / "cwd"
    place.mkdir()
    (place / "orjson.py").write_text(_SHADOW)
    async with stage.serving(ECHO + QUIET, cwd=place) as server, client_of(server) as client:
        (await client.post(CHAT, json=asking("hi"))).raise_for_status()
        body = {"policy": {"mode": "floor", "quality_floor": 0.9}, "last": 10}
        told = await status_of(client.post(f"{_ADMIN}/what-if", json=body))
    has_run = (place / "it-ran").exists()
    return Found(has_run, f"{told}; the module {'ran' if has_run else 'did not run'}")


@reproduces("L1", "SIGTERM: a new connection a second later, and a stream that the drain cuts off")
async def stopping(stage: Stage) -> Found:
    parts = Parts()
    slow = ECHO.replace('kind = "echo"', 'kind = "echo"\ntoken_delay_s = 0.2')
    async with stage.serving(slow + QUIET + "[server]\ndrain_timeout_s = 1.0\n") as server:
        streaming = asyncio.ensure_future(_stream(server))
        await asyncio.sleep(1.0)
        server.signal(signal.SIGTERM)
        await asyncio.sleep(1.0)
        async with client_of(server) as client:
            told = await status_of(client.get("/readyz"))
        parts.note(told == "ConnectError", f"/readyz a second after: {told}")
        assert server.process is not None, "it was started"
        await server.process.wait()
        ending = await streaming
    parts.note("Traceback" in server.log, f"cut stream: {ending}, {server.log.count('Traceback')} tracebacks logged")
    return parts.found()


async def _stream(server: Server) -> str:
    async with client_of(server) as client:
        answer = await client.post(CHAT, json=asking("word " * 400, stream=True))
    return "an error event" if '"error"' in answer.text else "no error event"


@reproduces("L10", "path = a missing relative folder, beside others; and a hub id with a revision")
async def missing_folder(stage: Stage) -> Found:
    parts = Parts()
    (stage.folder / "models").mkdir()
    for path, meaning in (("models/qwen3-4b", "folder"), ("mallory/any-repo@v1.2", "revision")):
        toml = f'[[tiers]]\nname = "a"\nmodel = "m"\n[models.m]\nkind = "local"\npath = "{path}"\n' + QUIET
        config = stage.folder / "suffice.toml"
        config.write_text(f'{toml}[database]\nurl = "sqlite:///{stage.folder}/{meaning}.db"\n')
        with fake_hub() as (url, paths):
            done = await stage.command("serve", "-c", str(config), "--port", "0", HF_ENDPOINT=url)
        if meaning == "folder":
            is_asked = any("qwen3-4b" in each for each in paths)
            parts.note(is_asked, f"status {done.status}, the hub was {'asked' if is_asked else 'not asked'}")
        else:
            is_pinned = any("v1.2" in each and "any-repo@" not in each for each in paths)
            parts.note(not is_pinned, f"a revision is {'asked for' if is_pinned else 'no hub id'}")
    return parts.found()


@reproduces("L11", "a redis.url with a slash in its password")
async def redis_password(stage: Stage) -> Found:
    config = stage.folder / "suffice.toml"
    config.write_text(f'{ECHO}{QUIET}[database]\nurl = "sqlite:///{stage.folder}/suffice.db"\n')
    url = "redis://:s3cr3t/pa55@127.0.0.1:6379/0"
    done = await stage.command("serve", "-c", str(config), "--port", "0", seconds=30.0, SUFFICE_REDIS__URL=url)
    is_traceback = "Traceback" in done.output
    last = json.dumps((done.output.strip().splitlines() or [""])[-1][:80])
    return Found(is_traceback, f"status {done.status}, {'a traceback' if is_traceback else last}")
