"""Describes the machine that a figure was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "transformers", "safetensors", "llama_cpp_python")


def machine_card() -> dict[str, object]:
    """Describe machine, versions, commit, and the memory bandwidth that bounds a decode step."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "gpu": gpu,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "threads": torch.get_num_threads(),
        "read_gb_per_s": round(read_bandwidth() / 1e9, 2),
    }


def read_bandwidth(num_bytes: int = 1 << 28) -> float:
    """Return the bytes per second that the threads in use read from memory: best of five sums over 256 MiB."""
    data = torch.ones(num_bytes // 4)
    best_s = float("inf")
    for _ in range(5):
        began_s = time.perf_counter()
        data.sum()
        best_s = min(best_s, time.perf_counter() - began_s)
    return num_bytes / best_s


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
