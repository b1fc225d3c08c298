"""Describes what answers depend on, so that answers of two ladders are never mixed in one file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backends.config import LocalModelConfig, ModelConfig
from gateway.outcomes.answer_collection import CollectOptions
from policies.ladder import Ladder

_KEPT = ("path", "dtype", "thinking", "urls", "model", "extra_body")
_READ_WHOLE_BYTES = 256 * 1024 * 1024


def describe_ladder(ladder: Ladder, models: Mapping[str, ModelConfig], options: CollectOptions) -> dict[str, Any]:
    """Models, their weights and the sampling; not prices, nor how many requests ran at once."""
    return {
        "tiers": {tier.name: {"served_model": tier.model, **describe_model(models[tier.model])} for tier in ladder},
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
    }


def describe_model(config: ModelConfig) -> dict[str, Any]:
    """Options that change answers; for a local folder also a digest of its files."""
    described: dict[str, Any] = {
        name: value if isinstance(value, str | bool) else str(value)
        for name, value in asdict(config).items()
        if name in _KEPT
    }
    if isinstance(config, LocalModelConfig) and (folder := _folder(config.path)):
        described["files"] = digest_folder(folder)
    return described


def digest_folder(folder: Path) -> str:
    """Twelve hex digits over names and contents; of large files, only over names and sizes."""
    digest = hashlib.sha256()
    for path in sorted(each for each in folder.iterdir() if each.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        if size <= _READ_WHOLE_BYTES:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _folder(path: str) -> Path | None:
    if path.startswith("builtin:tier"):
        from backends.builtin.paths import model_dir

        found = model_dir(int(path.removeprefix("builtin:tier")))
    else:
        found = Path(path)
    return found if found.is_dir() else None
