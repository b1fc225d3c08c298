"""Serves the configured ladder for a bench: a process of its own, a log of its own, gone when the bench is.

``python -m gateway.bench.ladder_server --port N --data-dir DIR [--config FILE]``
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gateway.app import create_app
from gateway.config.settings import load_settings
from gateway.edge.server import make_server
from gateway.observe.telemetry import configure_logging


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(prog="python -m gateway.bench.ladder_server")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--config", type=Path)
    given = parser.parse_args()
    overrides = {"server.port": given.port, "data_dir": str(given.data_dir), "log.level": "warning"}
    # A check would take of the seconds that are being measured.
    overrides["verification.worker"] = False
    settings = load_settings(given.config, overrides=overrides)
    configure_logging(settings.log)
    make_server(create_app(settings), settings).run()


if __name__ == "__main__":
    main()
