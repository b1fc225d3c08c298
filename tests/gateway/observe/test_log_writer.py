"""Log lines wait for their reader; nothing else does (security review M12)."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.config.sections import LogConfig
from gateway.observe.log_writer import LogWriter, console_loss
from gateway.observe.telemetry import configure_logging
from tests.gateway.harness import LADDER_TOML
from tests.gateway.raw import PATIENCE_S

ROOT = Path(__file__).parents[3]
LINE = "x" * 99


class Pipe:
    """One of a page; nobody reads it until somebody does."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, 4096)
        self.stream = os.fdopen(self.write_end, "w")

    def read_all(self) -> list[str]:
        """Read to the end, which comes when the other side is closed."""
        with os.fdopen(self.read_end) as reader:
            return reader.read().splitlines()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.stream.close()


def test_what_has_no_room_is_dropped_and_told_of_later(pipe: Pipe) -> None:
    writer = LogWriter(pipe.stream, max_chars=20_000)
    for _ in range(1000):
        writer.put([LINE])
    assert not writer.flush(0.05), "nobody reads"
    num_dropped = writer.num_dropped
    assert 0 < num_dropped < 1000
    lines: list[str] = []
    with os.fdopen(pipe.read_end) as reader:
        while len(lines) < 1000 - num_dropped + 1:
            lines.append(reader.readline().rstrip("\n"))
        assert writer.flush(PATIENCE_S)
        writer.put(["one more"])
        assert reader.readline() == "one more\n", "a loss is told of once"
    # It is told of as soon as something could be written, which may be before the rest of what waited.
    others = [line for line in lines if line != LINE]
    assert len(others) == 1
    told = json.loads(others[0])
    assert (told["level"], told["num_dropped"]) == ("warning", num_dropped)
    assert str(num_dropped) in console_loss(num_dropped)


def test_lines_keep_their_order_and_are_whole(pipe: Pipe) -> None:
    writer = LogWriter(pipe.stream, linger_s=0.0)
    wanted = [f"{number} é \ud800" for number in range(300)]
    for line in wanted:
        writer.put([line])
    read_end = os.dup(pipe.read_end)
    os.set_blocking(read_end, False)
    found = b""
    while found.count(b"\n") < 300:
        try:
            found += os.read(read_end, 65536)
        except BlockingIOError:
            writer.flush(0.01)
    os.close(read_end)
    os.close(pipe.read_end)
    assert found.decode().splitlines() == [line.replace("\ud800", "\\ud800") for line in wanted]


def test_a_closed_stream_costs_lines_and_nothing_else(pipe: Pipe) -> None:
    os.close(pipe.read_end)
    writer = LogWriter(pipe.stream)
    writer.put([LINE])
    assert writer.flush(PATIENCE_S)
    assert writer.num_dropped == 1


def test_what_is_logged_goes_to_a_stream_without_a_file_too() -> None:
    root, told = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    try:
        configure_logging(LogConfig(format="console"), told)
        logging.getLogger("suffice.test").warning("hello")
        writer = root.handlers[0]._writer  # type: ignore[attr-defined]
        assert writer.flush(PATIENCE_S)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert told.getvalue().endswith("warning suffice.test hello\n")


@pytest.mark.slow
async def test_a_server_whose_log_nobody_reads_answers_all_the_same(tmp_path: Path, free_port: int) -> None:
    """Eighty answers, then nothing: so it was with the line written on the event loop."""
    config = tmp_path / "suffice.toml"
    config.write_text(f'{LADDER_TOML}\n[database]\nurl = "sqlite:///{tmp_path}/suffice.db"\n')
    pipe = Pipe()
    command = ("-m", "gateway.cli", "serve", "--config", str(config), "--port", str(free_port))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *command), cwd=ROOT, stdout=pipe.write_end, stderr=pipe.write_end
    )
    pipe.stream.close()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{free_port}", timeout=PATIENCE_S) as client:
            await _until_up(client, process)
            answers = await asyncio.gather(*(_ask(client, 125) for _ in range(16)))
            assert sum(answers) == 2000
            assert (await client.get("/healthz")).status_code == 200
        process.terminate()
        # The last lines are offered for a moment; then the process ends although nobody took them.
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert any('"suffice.request"' in line for line in pipe.read_all())


async def _until_up(client: httpx.AsyncClient, process: asyncio.subprocess.Process) -> None:
    async def is_up() -> bool:
        try:
            return (await client.get("/healthz")).is_success
        except httpx.HTTPError:
            return False

    for _ in range(int(PATIENCE_S / 0.05)):
        assert process.returncode is None
        if await is_up():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it does not start")


async def _ask(client: httpx.AsyncClient, count: int) -> int:
    body = {"model": "auto", "messages": [{"role": "user", "content": "hi"}]}
    num_answers = 0
    for _ in range(count):
        num_answers += (await client.post("/v1/chat/completions", json=body)).is_success
    return num_answers
