"""Finds a checkpoint's files: a folder, or a Hugging Face hub id fetched into the hub's own cache."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from engine.config import ModelConfig
from engine.errors import CheckpointCorrupt, CheckpointNotFound

_log = logging.getLogger("suffice.loading")

_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)

# What a text model needs; the weights of other frameworks stay where they are.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]


def resolve_checkpoint(source: str | Path) -> Path:
    """Return the folder that holds a checkpoint's files.

    Parameters
    ----------
    source : a folder, or a hub id such as ``Qwen/Qwen2.5-0.5B``, perhaps with a revision: ``owner/name@revision``. A
        hub id is looked up in the local hub cache when the network is away or ``HF_HUB_OFFLINE`` is set. Without a
        revision it is none where its owner is a folder here: then a folder was meant.

    Raises
    ------
    CheckpointNotFound
        Neither a folder with a ``config.json`` nor a hub id that can be had.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointNotFound(
                f"{path}: no config.json in this folder; expected a Hugging Face model.", path=path
            )
        return path
    if path.exists():
        raise CheckpointNotFound(f"{path} is a file; give the folder that holds config.json.", path=path)
    name = str(source)
    match = _HUB_ID.fullmatch(name)
    if path.is_absolute() or name.startswith((".", "~")) or match is None:
        raise CheckpointNotFound(
            f"{path}: no such folder, and {name!r} is not a hub id (owner/name or owner/name@revision).", path=path
        )
    repository, revision = match[1], match[2]
    if revision is None and path.parent.is_dir():
        raise CheckpointNotFound(
            f"{name!r} can be read in two ways. As a folder it is not there: {path.parent.absolute()} has no "
            f"{path.name!r}. As a hub id it is not looked up, since {str(path.parent)!r} is a folder here; write "
            f"{name + '@main'!r}, or another revision, if the hub is meant.",
            path=path,
        )
    if revision is None:
        _log.warning(
            "%s is no folder in %s, so it is taken for a hub id and its newest revision; %s@REVISION pins one",
            name,
            Path.cwd(),
            name,
        )
    return _from_hub(repository, revision)


def _from_hub(name: str, revision: str | None) -> Path:
    # Imported here: a folder needs no hub client, and this import costs a third of a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=HUB_PATTERNS))
    except HFValidationError as error:
        raise CheckpointNotFound(f"{name!r} is no folder and no valid hub id: {error}", path=name) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        cached = _from_hub_cache(name, revision)
        if cached is not None:
            return cached
        raise CheckpointNotFound(
            f"{name!r} is no folder in {Path.cwd()}, and as a hub id it could not be fetched"
            f"{'' if revision is None else f' at revision {revision!r}'} ({type(error).__name__}: {error}). "
            "Check the name, the network and HF_TOKEN, or give the path of a downloaded folder.",
            path=name,
        ) from error


def _from_hub_cache(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=HUB_PATTERNS, local_files_only=True))
    except (LocalEntryNotFoundError, OSError):
        return None
    return folder if (folder / "config.json").is_file() else None


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object.

    Raises
    ------
    CheckpointNotFound, CheckpointCorrupt
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointNotFound(f"{path}: no such file.", path=path) from error
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path}: not readable as JSON ({error}).", path=path) from error
    if not isinstance(value, dict):
        raise CheckpointCorrupt(f"{path}: holds a {type(value).__name__}; expected a JSON object.", path=path)
    return value


def load_config(source: str | Path) -> ModelConfig:
    """Read and check a checkpoint's ``config.json``; no weights are touched."""
    path = resolve_checkpoint(source) / "config.json"
    return ModelConfig.from_hf(read_json(path), path=str(path))
