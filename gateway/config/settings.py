"""Reads the one settings object: defaults, then one TOML file, then the environment, then the command line.

Only this module reads ``os.environ``. Importing it loads no model library. Names: ``[server] port`` in the file is
``SUFFICE_SERVER__PORT`` in the environment and ``server.port`` in messages; ``SUFFICE_CONFIG`` names the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from backends.config import DeviceConfig, ModelConfig
from gateway.config import sections
from gateway.config.display import digest, shown_value
from gateway.config.ladder_tables import (
    DEFAULT_POLICY,
    check_references,
    read_aliases,
    read_devices,
    read_embeddings,
    read_ladder,
    read_models,
    read_policies,
)
from gateway.config.raw_config import Leaf, Table, builtin_table, environment_table, file_table, merge, override_table
from gateway.config.store_section import StoreConfig
from gateway.config.table_reader import ConfigReader, declared_fields
from policies.ladder import Ladder
from policies.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Holds everything the gateway was told, checked. Made by :func:`load_settings`.

    Attributes
    ----------
    data_dir : where the default database and other state live
    ladder : the tiers, cheapest first
    models : served model's name -> how it is served
    devices : device's name -> what its models share
    embeddings : served model's name -> what its vectors cost
    aliases : further name, or beginning of names before a ``*`` -> policy, tier or model
    policy : the policy of requests that name none
    policies : all policies by name, the default one included
    api_keys : model's name -> the secret its ``api_key_env`` named; never shown
    values, sources : every setting's dotted path -> its value, and where that was written
    """

    data_dir: Path
    server: sections.ServerConfig
    auth: sections.AuthConfig
    redis: sections.RedisConfig
    log: sections.LogConfig
    metrics: sections.MetricsConfig
    router: sections.RouterConfig
    admin: sections.AdminConfig
    verification: sections.VerificationConfig
    control: sections.ControlConfig
    monitor: sections.MonitorConfig
    learning: sections.LearningConfig
    database: StoreConfig
    policy: Policy
    policies: Mapping[str, Policy]
    ladder: Ladder
    models: Mapping[str, ModelConfig]
    devices: Mapping[str, DeviceConfig] = field(default_factory=dict)
    embeddings: Mapping[str, sections.EmbeddingConfig] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    config_file: Path | None = None
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    values: Mapping[str, Any] = field(default_factory=dict, repr=False)
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def config_hash(self) -> str:
        """Return twelve hex digits that change when any setting does; passwords do not enter."""
        return digest({path: value for path, value in self.shown().items() if path != "data_dir"})

    def shown(self) -> dict[str, Any]:
        """Return every setting as JSON, passwords in URLs replaced by ``***``."""
        return {path: shown_value(value) for path, value in self.values.items()}


SECTIONS: Mapping[str, type[Any]] = {
    name: cls
    for name, (_, cls) in declared_fields(Settings).items()
    if isinstance(cls, type) and is_dataclass(cls) and name != "policy"
}
"""Name of each section in the file, and the class that declares its keys."""

_TOP_LEVEL_KEYS = ("data_dir", *SECTIONS, "policy", "policies", "tiers", "models", "devices", "embeddings", "aliases")

# Not admin: SUFFICE_ADMIN_KEY is a client's key, and no section with an underscore missing.
_SECTIONS_IN_VARIABLES = ({*SECTIONS} - {"admin"}) | {"policy"}


def load_settings(
    config_file: Path | str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    need_secrets: bool = True,
) -> Settings:
    """Read and check the whole configuration.

    Parameters
    ----------
    config_file : TOML file; None takes ``SUFFICE_CONFIG``, and the built-in ladder without one
    environ : variables, by default the process's
    overrides : dotted path -> value, stronger than all else; None values are ignored
    need_secrets : refuse a model whose ``api_key_env`` names a variable that is not set

    Raises
    ------
    SettingsError
        Anything unknown, of the wrong type, out of range or inconsistent; all problems at once.
    """
    environ = os.environ if environ is None else environ
    named = config_file or environ.get("SUFFICE_CONFIG")
    path = Path(named) if named else None
    written = file_table(path) if path else {}
    # A ladder of one's own starts from nothing: no built-in tier, model or router hides in it.
    below = merge([{} if "tiers" in written else builtin_table(), written])
    table = merge(
        [
            below,
            environment_table(environ, below, _SECTIONS_IN_VARIABLES),
            override_table(overrides or {}, "command line"),
        ]
    )
    return _settle(table, environ, path, need_secrets)


def read_client_key(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the key that our own clients send, from ``SUFFICE_API_KEY``."""
    return (os.environ if environ is None else environ).get("SUFFICE_API_KEY") or None


def read_admin_key(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the key that ``suffice admin`` sends, from ``SUFFICE_ADMIN_KEY``."""
    return (os.environ if environ is None else environ).get("SUFFICE_ADMIN_KEY") or None


def isolate_children() -> None:
    """Let no process started from here on import from the working directory, those of libraries included."""
    os.environ["PYTHONSAFEPATH"] = "1"


def _settle(table: Table, environ: Mapping[str, str], path: Path | None, need_secrets: bool) -> Settings:
    reader = ConfigReader()
    reader.refuse_unknown(table, _TOP_LEVEL_KEYS, "")
    data_dir = reader.read_value(Path, table.get("data_dir"), "data_dir", _state_dir(environ))
    ladder = read_ladder(reader, table.get("tiers"))
    models = read_models(reader, table.get("models"))
    devices = read_devices(reader, table.get("devices"))
    embeddings = read_embeddings(reader, table.get("embeddings"), table.get("models"))
    policies = read_policies(reader, table.get("policy"), table.get("policies"), ladder)
    aliases = read_aliases(reader, table.get("aliases"), ladder, table.get("models"), policies)
    url = Leaf(f"sqlite:///{data_dir.absolute() / 'suffice.db'}", "default: in data_dir")
    table = merge([{"database": {"url": url}}, table])
    read = {name: reader.read(cls, table.get(name), name) for name, cls in SECTIONS.items()}
    check_references(reader, ladder, table.get("models"))
    _check_url(reader, "database.url", ("sqlite", "sqlite+aiosqlite", "postgresql", "postgresql+asyncpg", "postgres"))
    if _check_url(reader, "redis.url", ("redis", "rediss", "unix")):
        _check_redis_url(reader)
    api_keys = _read_secrets(reader, models, environ) if need_secrets else {}
    reader.finish()
    return Settings(
        data_dir=data_dir,
        policy=policies[DEFAULT_POLICY],
        policies=policies,
        ladder=ladder,
        models=models,
        devices=devices,
        embeddings=embeddings,
        aliases=aliases,
        config_file=path,
        api_keys=api_keys,
        values=reader.values,
        sources=reader.sources,
        **read,  # type: ignore[arg-type]  # finish() has raised if any section is None
    )


def _state_dir(environ: Mapping[str, str]) -> Path:
    """Return where state lies by default, as the XDG base directories have it."""
    state_home = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".local/state"
    return Path(state_home) / "suffice"


def _check_url(reader: ConfigReader, path: str, schemes: tuple[str, ...]) -> bool:
    url = reader.values.get(path)
    if not isinstance(url, str):
        return False
    if url.partition("://")[0] in schemes:
        return True
    expected = " or ".join(f"{scheme}://" for scheme in schemes)
    reader.note(path, f"is {shown_value(url)!r}; expected a URL that begins with {expected}")
    return False


def _check_redis_url(reader: ConfigReader) -> None:
    """Refuse a URL that Redis's own client cannot read, which it does in words that may hold a part of the password."""
    from redis.connection import parse_url

    url = reader.values["redis.url"]
    try:
        parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError:
        reader.note(
            "redis.url",
            f"is {shown_value(url)!r}, which cannot be read; expected redis://[[USER]:PASSWORD@]HOST[:PORT][/DB], "
            "special characters of the password percent-encoded",
        )


def _read_secrets(
    reader: ConfigReader, models: Mapping[str, ModelConfig], environ: Mapping[str, str]
) -> dict[str, str]:
    secrets: dict[str, str] = {}
    for name, model in models.items():
        variable = getattr(model, "api_key_env", None)
        if variable is None:
            continue
        if environ.get(variable):
            secrets[name] = environ[variable]
        else:
            reader.note(f"models.{name}.api_key_env", f"names the variable {variable}, which is not set")
    return secrets
