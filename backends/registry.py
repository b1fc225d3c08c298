"""Turns model tables into backends; each kind's libraries load when a table asks for them, torch with a local one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from backends.config import (
    DeviceConfig,
    EchoModelConfig,
    LocalModelConfig,
    ModelConfig,
    RemoteModelConfig,
    ReplayModelConfig,
)
from backends.local_engine.engine_groups import EngineGroup, engine_groups
from backends.protocol import Backend

if TYPE_CHECKING:
    from backends.weights import WeightPool

_NO_KEYS: Mapping[str, str] = {}
_NO_DEVICES: Mapping[str, DeviceConfig] = {}

Progress = Callable[[str, float], None]
"""Called with a checkpoint's path and the share of it that is loaded, from a worker thread."""


def build_backends(
    models: Mapping[str, ModelConfig],
    *,
    devices: Mapping[str, DeviceConfig] = _NO_DEVICES,
    api_keys: Mapping[str, str] = _NO_KEYS,
    on_progress: Progress | None = None,
) -> dict[str, Backend]:
    """Build the backend of every served model, not started.

    Local models share one pool, so that a checkpoint named twice is loaded once, and one engine where that is possible.

    Parameters
    ----------
    models : served model's name → its table
    devices : device's name → what its models share
    api_keys : served model's name → the secret its ``api_key_env`` named
    """
    weights, groups = _pool(models, devices), engine_groups(models)
    return {
        name: _build(name, config, api_keys.get(name), weights, groups.get(name), on_progress)
        for name, config in models.items()
    }


def _pool(models: Mapping[str, ModelConfig], devices: Mapping[str, DeviceConfig]) -> WeightPool | None:
    if not any(isinstance(config, LocalModelConfig) for config in models.values()):
        return None
    from backends.weights import WeightPool

    return WeightPool({name: device.kv_bytes for name, device in devices.items()})


def _build(
    name: str,
    config: ModelConfig,
    api_key: str | None,
    weights: WeightPool | None,
    group: EngineGroup | None,
    on_progress: Progress | None,
) -> Backend:
    if isinstance(config, LocalModelConfig):
        from backends.local import LocalBackend

        return LocalBackend(name, config, weights=weights, group=group, on_progress=on_progress)
    if isinstance(config, RemoteModelConfig):
        from backends.remote.openai_backend import OpenAIBackend

        return OpenAIBackend(name, config, api_key=api_key)
    if isinstance(config, ReplayModelConfig):
        from backends.replay import ReplayBackend

        return ReplayBackend(name, Path(config.path), context_length=config.context_length)
    return _build_echo(name, config)


def _build_echo(name: str, config: EchoModelConfig) -> Backend:
    from backends.testing import EchoBackend, Script

    script = Script(text=config.text, first_delay_s=config.first_delay_s, token_delay_s=config.token_delay_s)
    return EchoBackend(name, script, context_length=config.context_length)
