"""Runs a program of another room under a command's name; the program reads its own options."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence

from gateway.failure_report import CommandError


def run_module(module: str, command: str, arguments: Sequence[str]) -> None:
    """Call ``main(argv)`` of a module and exit with what it returns.

    Raises
    ------
    CommandError
        A package the program needs is not installed.
    """
    try:
        program = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "gateway":
            raise
        raise CommandError(f"{command} needs the package {error.name}; pip install 'suffice[bench]'.") from error
    # argparse names the program after argv[0].
    sys.argv = [command, *arguments]
    status = program.main(list(arguments)) if inspect.signature(program.main).parameters else program.main()
    sys.exit(status or 0)
