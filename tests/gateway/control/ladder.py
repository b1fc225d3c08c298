"""A ladder of four echoes, which the shipped router fits, and further routers made from that one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from backends.protocol import Backend
from backends.testing import EchoBackend
from classifier.artifact import RouterArtifact
from classifier.router import BUILTIN
from gateway.config.settings import Settings
from gateway.store.control_records import RouterVersion
from tests.gateway.control.waiting import until
from tests.gateway.harness import Gateway, make_settings, running

NAMES = ("one", "two", "three", "four")

FOUR_TOML = "\n".join(
    f'[[tiers]]\nname = "{name}"\nmodel = "m{name}"\nprice_per_request_usd = {price}\n[models.m{name}]\nkind = "echo"\n'
    for name, price in zip(NAMES, ("0.0001", "0.0005", "0.003", "0.01"), strict=True)
)


def four_settings(tmp_path: Path, url: str, **overrides: Any) -> Settings:
    given = {
        "router__artifact": "builtin",
        "monitor__every_s": 3600,
        "verification__worker": False,
        "control__rollout_every_s": 3600,
    } | overrides
    return make_settings(tmp_path, FOUR_TOML, database__url=url, **given)


def four_backends() -> dict[str, Backend]:
    return {f"m{name}": EchoBackend(f"m{name}") for name in NAMES}


@asynccontextmanager
async def serving(tmp_path: Path, url: str, **overrides: Any) -> AsyncIterator[Gateway]:
    """A gateway with the shipped router that leads; driver and monitor move when they are told to."""
    async with running(four_settings(tmp_path, url, **overrides), four_backends()) as gateway:
        control = gateway.parts.control
        await until(lambda: control.leader.lease is not None)
        yield gateway


def make_router(tmp_path: Path, name: str) -> tuple[RouterVersion, bytes]:
    """The shipped router under another description, and so another version."""
    artifact = RouterArtifact.load(BUILTIN).with_metadata(note=name)
    content = artifact.save(tmp_path / f"{name}.npz").read_bytes()
    return RouterVersion(version=artifact.version, created_at=datetime.now(UTC), origin="retrain"), content
