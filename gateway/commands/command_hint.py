"""Writes commands as they must be typed here and now: where this one lies, with its configuration and its port."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.config.settings import Settings


def program() -> list[str]:
    """Return how this program was started: by its name where the shell finds it, else by its path."""
    started = Path(sys.argv[0])
    if started.suffix == ".py":
        return [_shown(Path(sys.executable)), "-m", "gateway.cli"]
    found = shutil.which(started.name)
    if found is not None and os.path.realpath(found) == os.path.realpath(started):
        return [started.name]
    return [_shown(started)]


def hint(*words: str, settings: Settings | None = None, address: str | None = None) -> str:
    """Return a command for a shell.

    Parameters
    ----------
    words : what comes after the program's name
    settings : those that this process runs by; the command is told the same file
    address : of the running server, where the command is to reach it; told where the settings' file does not say it
    """
    typed = [*program(), *words]
    if settings is not None and settings.config_file is not None:
        typed += ["--config", _shown(settings.config_file)]
    if settings is not None and address is not None and _is_told_on_the_command_line(settings):
        typed += ["--url", address]
    return shlex.join(typed)


def _is_told_on_the_command_line(settings: Settings) -> bool:
    return any(settings.sources.get(f"server.{name}") == "command line" for name in ("host", "port")) or not (
        settings.server.port
    )


def _shown(path: Path) -> str:
    """Return a path from here, where it lies below."""
    try:
        # Not resolved: a virtual environment's interpreter is a link out of it.
        return str(Path(os.path.abspath(path)).relative_to(Path.cwd()))
    except ValueError:
        return str(path)
