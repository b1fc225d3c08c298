"""Shows what ``suffice up`` does: models as they load, then the tiers and a request to paste."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from backends.config import LocalModelConfig, RemoteModelConfig
from backends.errors import ModelLoadError
from gateway.access.authenticator import OpenTo
from gateway.commands.command_hint import hint
from gateway.commands.result_printer import print_table
from gateway.config.settings import Settings
from gateway.models.capacity_plan import model_folder, size_in_words

QUESTION = "What is 17 + 25?"


class LoadingDisplay:
    """Shows each model as it loads: a spinner on a terminal, a line elsewhere.

    It is called with (model's name, ``loading`` or ``ready``), as the loader's ``Progress`` is.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._began_s: dict[str, float] = {}
        self._rows: dict[str, TaskID] = {}
        columns = (
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True)) if sys.stderr.isatty() else None

    def __call__(self, model: str, state: str) -> None:
        described = f"{model}  {describe_model(self._settings, model)}"
        if state == "loading":
            self._began_s[model] = time.monotonic()
            if self._progress is not None:
                self._rows[model] = self._progress.add_task(described, total=1)
        elif self._progress is not None:
            self._progress.update(self._rows[model], completed=1)
        else:
            elapsed_s = time.monotonic() - self._began_s.get(model, time.monotonic())
            print(f"{described}: loaded in {elapsed_s:.1f} s", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing and leave the last state on the screen. May be called twice."""
        if self._progress is not None:
            self._progress.stop()


_WHO_MAY: Mapping[OpenTo, str] = {
    "nobody": "",
    "local": (
        "\nOpen: loopback only, without a proxy. Programs on this machine need no key; whatever a proxy passes on or "
        "calls\nit by another name does: {keys_create}"
    ),
    "everybody": "\nOpen to whoever can connect (auth.required = never); elsewhere the administration needs a key.",
}


def print_welcome(settings: Settings, address: str, *, opened: OpenTo, num_keys: int) -> None:
    """Print the tiers, a request that works when pasted, and who needs no key."""
    needs_key = opened == "nobody"
    rows = [
        (tier.index, tier.name, tier.model, describe_model(settings, tier.model), f"${tier.price_per_request_usd:f}")
        for tier in settings.ladder
    ]
    print_table(("tier", "name", "model", "what it is", "per request"), rows, title=f"Suffice answers at {address}/v1")
    print(curl(address, needs_key=needs_key))
    if _WHO_MAY[opened]:
        print(_WHO_MAY[opened].format(keys_create=hint("keys", "create", settings=settings)))
    if needs_key and not num_keys:
        made_by = hint("keys", "create", settings=settings)
        print(f"\nEvery request needs a key here and none exists yet: {made_by}")
    talk = hint("chat", settings=settings, address=address)
    print(f"\nTo talk to it: {talk}\nIts API: {address}/docs. Ctrl-C ends it.", flush=True)


def curl(address: str, *, needs_key: bool) -> str:
    """Return a request to paste into a shell."""
    body = json.dumps({"model": "auto", "messages": [{"role": "user", "content": QUESTION}]})
    # Double quotes: the shell is to fill the key in.
    key = ' -H "authorization: Bearer $SUFFICE_API_KEY"' if needs_key else ""
    return f"curl -si {address}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'"


def describe_model(settings: Settings, model: str) -> str:
    """Say in a few words where a served model runs, how large it is and what is special about it."""
    config = settings.models[model]
    if isinstance(config, RemoteModelConfig):
        replicas = f"{len(config.urls)} replicas of " if len(config.urls) > 1 else ""
        return f"{replicas}{config.model} at {config.urls[0]}"
    if not isinstance(config, LocalModelConfig):
        return config.kind
    parts = [_size(config), "thinks step by step" if config.thinking else ""]
    if config.speculation.mode != "off":
        drafted = f"drafted by {config.drafter}" if config.speculation.mode == "draft" else "drafts from its text"
        parts.append(drafted)
    return ", ".join(part for part in parts if part)


def _size(config: LocalModelConfig) -> str:
    from backends.footprint import footprint, read_shape

    try:
        shape = read_shape(model_folder(config.path))
    except (ModelLoadError, ValueError):
        # A hub id, or a folder whose fault the loader will name better.
        return config.path
    size = size_in_words(footprint(shape, config.dtype).num_params)
    bits = f", {shape.quant.bits}-bit {shape.quant.method.upper()}" if shape.quant is not None else ""
    return f"{size} weights{bits}, in this process"
