"""Routers over HTTP: real artifacts uploaded, brought to traffic and taken back; and what is no router refused."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import numpy as np
import pytest

from classifier import embedding
from classifier.artifact import RouterArtifact
from classifier.errors import EmbeddingError
from classifier.router import BUILTIN
from gateway.control.errors import RouterRefused
from gateway.control.router_loader import read_router
from tests.gateway.admin.kit import administered

FOUR = "".join(f'[[tiers]]\nname = "t{i}"\nmodel = "m{i}"\nprice_per_request_usd = 0.00{i}\n' for i in range(1, 5))
FOUR += "".join(f'[models.m{i}]\nkind = "echo"\n' for i in range(1, 5))


def ladder_of_four() -> dict[str, object]:
    from backends.testing import EchoBackend

    return {f"m{i}": EchoBackend(f"m{i}") for i in range(1, 5)}


async def test_a_router_is_uploaded_promoted_shadowed_and_rolled_back(tmp_path: Path, database_url: str) -> None:
    options = {"toml": FOUR, "database__url": database_url}
    other = RouterArtifact.load(BUILTIN).with_metadata(note="another").save(tmp_path / "other.npz")
    async with administered(tmp_path, backends=ladder_of_four(), **options) as admin:
        first = (await admin("POST", "/routers?note=ours", content=BUILTIN.read_bytes())).json()
        assert (first["status"], first["origin"], first["note"]) == ("candidate", "upload", "ours")
        again = await admin("POST", "/routers", content=BUILTIN.read_bytes())
        assert (again.status_code, again.json()["version"]) == (201, first["version"])
        tag = (await admin("GET", "/routers")).headers["etag"]
        promoted = await admin(
            "POST", f"/routers/{first['version']}/promote", json={"reason": "first"}, headers={"if-match": tag}
        )
        assert promoted.json()["active"] == first["version"]
        assert (await admin.gateway.chat("hi")).headers["x-suffice-router-version"] == first["version"]
        stale = {"headers": {"if-match": tag}}
        await admin.error(
            "POST", f"/routers/{first['version']}/promote", 412, "precondition_failed", "If-Match", **stale
        )
        second = (await admin("POST", "/routers", content=other.read_bytes())).json()
        await admin.error(
            "POST", f"/routers/{second['version']}/shadow", 412, "precondition_failed", "If-Match", **stale
        )
        rollout = (await admin("POST", f"/routers/{second['version']}/shadow", json={"reason": "try"})).json()
        assert (rollout["stage"], rollout["router_version"]) == ("shadow", second["version"])
        await admin.error("POST", f"/routers/{second['version']}/shadow", 409, "conflict")
        await admin.error("POST", "/routers/rollback", 412, "precondition_failed", "If-Match", **stale)
        ended = (await admin("POST", "/routers/rollback", json={"reason": "enough"})).json()
        assert (ended["active"], ended["canary"]) == (first["version"], None)
        shown = await admin.get(f"/rollouts/{rollout['id']}")
        assert (shown["status"], shown["reason"]) == ("rolled_back", "enough")
        assert [each["id"] for each in (await admin.get("/rollouts"))["data"]] == [rollout["id"]]
        assert (await admin("POST", "/routers/rollback")).json()["active"] is None
        await admin.error("POST", "/routers/rollback", 409, "conflict")
        assert (await admin.gateway.chat("hi")).headers["x-suffice-router-version"] == "none"
        listed = (await admin.get("/routers"))["data"]
        assert {each["version"] for each in listed} == {first["version"], second["version"]}


def _pickled() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, metadata=np.array([{"a": 1}], dtype=object))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"", b"x" * 100, pickle.dumps({"a": 1}), _pickled(), BUILTIN.read_bytes()[:-100]],
    ids=["empty", "noise", "pickle", "objects", "torn"],
)
async def test_what_is_no_router_is_refused(tmp_path: Path, content: bytes) -> None:
    async with administered(tmp_path, backends=ladder_of_four(), toml=FOUR) as admin:
        await admin.error("POST", "/routers", 400, "router_refused", content=content)
        assert (await admin.get("/routers"))["data"] == []


async def test_a_router_for_another_ladder_is_refused(tmp_path: Path) -> None:
    async with administered(tmp_path) as admin:
        error = await admin.error("POST", "/routers", 400, "router_refused", content=BUILTIN.read_bytes())
        assert "the ladder has 2" in error["message"]
        for method, path in (
            ("GET", "/routers/none"),
            ("POST", "/routers/none/promote"),
            ("POST", "/routers/none/shadow"),
            ("GET", "/rollouts/none"),
            ("GET", "/retrain-runs/none"),
        ):
            await admin.error(method, path, 404, "not_found")


async def test_a_retraining_is_asked_for_once(tmp_path: Path, database_url: str) -> None:
    async with administered(tmp_path, database__url=database_url, learning__enabled=False) as admin:
        run = (await admin("POST", "/router/retrain", json={"reason": "a test"})).json()
        assert (run["trigger"], run["status"], run["reason"]) == ("admin", "requested", "a test")
        assert (await admin("POST", "/router/retrain")).json()["run_id"] == run["run_id"]
        assert [each["run_id"] for each in (await admin.get("/retrain-runs?status=requested"))["data"]] == [
            run["run_id"]
        ]
        assert (await admin.get(f"/retrain-runs/{run['run_id']}"))["run_id"] == run["run_id"]


async def test_an_upload_names_no_model_that_the_settings_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may upload a router does not choose what this server fetches (security review M11)."""
    asked: list[str] = []

    def record(model: str, device: str) -> object:
        asked.append(model)
        raise EmbeddingError(f"{model} was asked for")

    monkeypatch.setattr(embedding, "load_sentence_transformer", record)
    own = RouterArtifact.load(BUILTIN)
    named = {"source": embedding.SENTENCE_TRANSFORMERS, "model": "mallory/any-repo", "dim": 0}
    path = own.with_metadata(embedding=named).save(tmp_path / "named.npz")
    async with administered(tmp_path, toml=FOUR, backends=ladder_of_four()) as admin:
        error = await admin.error("POST", "/routers", 400, "router_refused", content=path.read_bytes())
        assert "mallory/any-repo" in error["message"]
        assert "learning.encoder" in error["message"]
        assert (await admin.get("/routers"))["data"] == []
    assert asked == []
    # The same holds where one lies in the database already, and once the settings name it, it is loaded.
    version = RouterArtifact.load(path).version
    with pytest.raises(RouterRefused, match=r"learning\.encoder"):
        read_router(version, path.read_bytes())
    assert asked == []
    with pytest.raises(RouterRefused, match="was asked for"):
        read_router(version, path.read_bytes(), ["mallory/any-repo"])
    assert asked == ["mallory/any-repo"]
