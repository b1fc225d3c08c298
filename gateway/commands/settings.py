"""Shows and checks the configuration: ``suffice config show`` and ``suffice config validate``."""

from __future__ import annotations

from pathlib import Path

from gateway.commands.result_printer import print_json, print_table
from gateway.config.settings import load_settings


def show(config: Path | None, *, as_json: bool) -> None:
    """Print every setting with its value and its source."""
    settings = load_settings(config, need_secrets=False)
    shown = settings.shown()
    if as_json:
        entries = {path: {"value": value, "source": settings.sources[path]} for path, value in shown.items()}
        print_json({"config_hash": settings.config_hash, "settings": entries})
        return
    rows = [(path, _plain(value), settings.sources[path]) for path, value in sorted(shown.items())]
    print_table(("setting", "value", "from"), rows)
    print(f"configuration {settings.config_hash}")
    print("Edits of policies and router through the admin API win over it: `suffice admin get-control` shows them.")


def validate(config: Path | None, *, need_secrets: bool) -> None:
    """Load the configuration and say what it describes."""
    settings = load_settings(config, need_secrets=need_secrets)
    where = settings.config_file or "the built-in configuration"
    tiers = ", ".join(f"{tier.index} {tier.name}" for tier in settings.ladder)
    print(f"{where} is sound: tiers {tiers}; {len(settings.policies)} policies; configuration {settings.config_hash}")


def _plain(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
