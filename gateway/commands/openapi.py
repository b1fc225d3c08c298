"""Prints the description of every path, without a server: ``suffice openapi``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gateway.admin.openapi import describe_settings
from gateway.config.settings import load_settings


def print_document(config: Path | None) -> None:
    """Print the document of what the settings would serve."""
    settings = load_settings(config, need_secrets=False)
    sys.stdout.write(json.dumps(describe_settings(settings), ensure_ascii=False, indent=1) + "\n")
