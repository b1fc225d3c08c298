"""Starts servers that are not ours, for comparison: llama.cpp's and transformers', each in its own process.

::

    with llama_cpp_server(Path("tier1.gguf")) as peer:
        OpenAIBackend("peer", RemoteModelConfig(urls=(peer.url,), model=peer.model))

Tests hold the remote backend to the protocol against them, and benches run the same load on them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx

_READY_S = 120.0


@dataclass(frozen=True, slots=True)
class PeerServer:
    """Holds a running server: base URL, the model's name there, its process."""

    url: str
    model: str
    pid: int


class PeerStartError(Exception):
    """A server did not come up; carries the end of what it printed."""


def has_llama_cpp() -> bool:
    """Return whether llama.cpp's server can be started: ``pip install 'llama-cpp-python[server]'``."""
    return find_spec("llama_cpp") is not None and find_spec("fastapi") is not None


def has_transformers_server() -> bool:
    """Return whether ``transformers serve`` can be started: ``pip install fastapi``."""
    return find_spec("transformers") is not None and find_spec("fastapi") is not None


@contextlib.contextmanager
def llama_cpp_server(
    gguf: Path, *, context_length: int = 1024, threads: int = 1, python: str = sys.executable
) -> Iterator[PeerServer]:
    """Serve a GGUF file by llama.cpp (``llama_cpp.server``) until the block ends.

    Parameters
    ----------
    threads : CPU threads, for prompt and answer alike
    python : an interpreter that has ``llama-cpp-python[server]``, where it is not this one
    """
    port = free_port()
    options = {
        "model": gguf,
        "model_alias": "peer",
        "port": port,
        "host": "127.0.0.1",
        "n_ctx": context_length,
        "n_threads": threads,
        "n_threads_batch": threads,
        "logits_all": True,
        "verbose": False,
        # One request at a time is all it can do; without this a new one cuts the running one off.
        "interrupt_requests": False,
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with _running([python, "-m", "llama_cpp.server", *arguments], port, "/v1/models", "peer", threads) as peer:
        yield peer


@contextlib.contextmanager
def transformers_server(folder: Path, *, threads: int = 1, continuous_batching: bool = False) -> Iterator[PeerServer]:
    """Serve a checkpoint folder by ``transformers serve`` until the block ends."""
    port = free_port()
    # The command line of transformers, as its console script calls it.
    start = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
    options = ["serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    if continuous_batching:
        options.append("--continuous-batching")
    with _running([sys.executable, "-c", start, *options], port, "/health", str(folder), threads) as peer:
        yield peer


def free_port() -> int:
    """Return a port nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _running(command: Sequence[str], port: int, ready_path: str, model: str, threads: int) -> Iterator[PeerServer]:
    # A copy with the threads bounded; nothing is read from it here.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}{ready_path}", output.fileno())
            yield PeerServer(f"http://127.0.0.1:{port}/v1", model, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, output: int) -> None:
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    size = os.lseek(output, 0, os.SEEK_END)
    os.lseek(output, max(0, size - 2000), os.SEEK_SET)
    raise PeerStartError(f"{process.args!r} did not come up:\n{os.read(output, 2000).decode(errors='replace')}")
