"""A router file is read back bit for bit or refused with a reason."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from classifier import artifact as artifact_module
from classifier.artifact import RouterArtifact
from classifier.errors import ArtifactCorrupt, ArtifactError, ArtifactNotFound, ArtifactUnsupported
from classifier.router import ArtifactRouter
from classifier.training import FittedRouter
from tests.classifier.simulated_ladder import draw, request_of


@pytest.fixture(scope="module")
def saved(fitted: FittedRouter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fitted.artifact.save(tmp_path_factory.mktemp("router") / "router.npz")


@pytest.mark.slow
def test_saving_and_loading_changes_nothing(saved: Path, fitted: FittedRouter, router: ArtifactRouter) -> None:
    loaded = ArtifactRouter.load(saved)
    assert loaded.version == router.version == fitted.artifact.version
    assert dict(loaded.artifact.metadata) == dict(fitted.artifact.metadata)
    requests = [request_of(task.prompt) for task in draw(40, seed=9)[0]]
    for mine, theirs in zip(loaded.predict(requests), router.predict(requests), strict=True):
        assert (mine.tiers, mine.novelty) == (theirs.tiers, theirs.novelty)


def test_equal_content_is_equal_bytes(saved: Path, fitted: FittedRouter, tmp_path: Path) -> None:
    assert fitted.artifact.save(tmp_path / "again.npz").read_bytes() == saved.read_bytes()
    assert [each.name for each in tmp_path.iterdir()] == ["again.npz"]  # no temporary neighbour is left


def test_the_version_follows_the_content(fitted: FittedRouter) -> None:
    artifact = fitted.artifact
    assert artifact.with_metadata(note="x").version != artifact.version
    arrays = {**artifact.arrays, "linear_bias": artifact.arrays["linear_bias"] + 1e-6}
    assert RouterArtifact.create(arrays, artifact.metadata).version != artifact.version
    with pytest.raises(ValueError, match="read-only"):
        artifact.arrays["linear_bias"][0] = 1.0


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_is_noticed(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(saved.read_bytes())
    if data.draw(st.booleans(), label="cut short"):
        damaged = bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    else:
        position = data.draw(st.integers(0, len(whole) - 1))
        whole[position] ^= data.draw(st.integers(1, 255))
        damaged = bytes(whole)
    path = tmp_path / "damaged.npz"
    path.write_bytes(damaged)
    try:
        loaded = RouterArtifact.load(path)
    except ArtifactError:
        return
    # Bytes of a zip that mean nothing (times, attributes) may change; the content may not.
    assert loaded.version == RouterArtifact.load(saved).version


def _npz(path: Path, **members: Any) -> Path:
    np.savez(path, **members)
    return path


def _metadata(**values: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(values).encode(), dtype=np.uint8)


def test_foreign_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactNotFound, match="suffice bootstrap"):
        RouterArtifact.load(tmp_path / "absent.npz")
    with pytest.raises(ArtifactCorrupt):
        RouterArtifact.load(tmp_path)
    (tmp_path / "text.npz").write_text("a router, honestly")
    with pytest.raises(ArtifactCorrupt):
        RouterArtifact.load(tmp_path / "text.npz")
    with pytest.raises(ArtifactCorrupt, match="no metadata"):
        RouterArtifact.load(_npz(tmp_path / "weights.npz", w=np.zeros(3)))
    with pytest.raises(ArtifactCorrupt, match="format"):
        RouterArtifact.load(_npz(tmp_path / "other.npz", metadata=_metadata(format="other")))
    with pytest.raises(ArtifactCorrupt, match="not JSON"):
        RouterArtifact.load(_npz(tmp_path / "json.npz", metadata=np.frombuffer(b"{", dtype=np.uint8)))
    deep = _npz(tmp_path / "deep.npz", metadata=np.frombuffer(b"[" * 200_000, dtype=np.uint8))
    with pytest.raises(ArtifactCorrupt, match="not JSON"):
        RouterArtifact.load(deep)
    with pytest.raises(ArtifactCorrupt, match="not numbers"):
        RouterArtifact.load(_npz(tmp_path / "words.npz", names=np.array(["a", "b"])))
    future = _metadata(format=artifact_module.FORMAT, format_version=99)
    with pytest.raises(ArtifactUnsupported, match="99"):
        RouterArtifact.load(_npz(tmp_path / "future.npz", metadata=future))
    monkeypatch.setattr(artifact_module, "MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(ArtifactCorrupt, match="no router"):
        RouterArtifact.load(_npz(tmp_path / "large.npz", w=np.zeros(1000)))


def test_files_that_say_more_than_they_hold_are_refused(saved: Path, tmp_path: Path) -> None:
    """A header may promise terabytes, and a zip may hold any number of names."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**13,)})
    for number, members in enumerate(
        (
            {"weights.npy": header.getvalue() + b"few"},
            {f"part{place}.npy": b"" for place in range(artifact_module.MAX_MEMBERS + 1)},
            {"metadata.npy": b"\x93NUMPY"},
        )
    ):
        path = tmp_path / f"{number}.npz"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        with pytest.raises(ArtifactCorrupt):
            RouterArtifact.load(path)


def test_a_router_is_not_what_its_name_says_but_its_content(saved: Path, tmp_path: Path) -> None:
    """Another router's version pasted over this one's is noticed."""
    with zipfile.ZipFile(saved) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.frombuffer(b"0123456789abcdef", dtype=np.uint8))
    members["version.npy"] = buffer.getvalue()
    path = tmp_path / "claimed.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(ArtifactCorrupt, match="0123456789abcdef"):
        RouterArtifact.load(path)


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    touched = tmp_path / "touched"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (touched.write_text, ("opened",))

    path = tmp_path / "trap.npz"
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.array([Trap()], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.npy", buffer.getvalue())
    with pytest.raises(ArtifactCorrupt):
        RouterArtifact.load(path)
    assert not touched.exists()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("linear_bias", lambda a: a[:-1]),
        ("forest_child", lambda a: a + 1),
        ("forest_feature", lambda a: a + 10_000),
        ("forest_roots", lambda a: -a - 1),
        ("projection", lambda a: a[:, :-1]),
        ("calibration_offsets", lambda a: a[:-1]),
        ("encoder_idf", lambda a: a[:100]),
        ("forest_feature", lambda a: a - 1_000),
        ("forest_roots", lambda a: a[:0]),
        ("forest_child", lambda a: a[:, None]),
        ("forest_value", lambda a: a[:, :-1]),
        ("linear_dense", lambda a: a * np.nan),
        ("encoder_scale", lambda a: a + np.inf),
        ("forest_threshold", lambda a: a * np.nan),
        ("calibration_offsets", lambda a: a + 1),
        ("calibration_y", lambda a: np.append(a, 0.5)),
        ("novelty_grids", lambda a: a[:, :-1]),
        ("novelty_combined", lambda a: a[:5]),
        ("seen_words", lambda a: a[:-1]),
    ],
)
def test_arrays_that_do_not_fit_are_refused_at_start(fitted: FittedRouter, name: str, change: Any) -> None:
    arrays = {**fitted.artifact.arrays, name: change(fitted.artifact.arrays[name])}
    with pytest.raises(ArtifactCorrupt, match="do not fit"):
        ArtifactRouter(RouterArtifact.create(arrays, fitted.artifact.metadata))


@pytest.mark.parametrize(
    "change",
    [
        {"forest_depth": 10**9},  # a request would walk until it is killed
        {"forest_depth": -1},
        {"forest_weight": 2.0},
        {"hashing": {"word_bits": 60, "char_bits": 13, "max_word_ngram": 2, "char_ngrams": [3, 5]}},
        {"hashing": {"word_bits": 13, "char_bits": 13, "max_word_ngram": 2, "char_ngrams": [3, 10**9]}},
        {"hashing": {"word_bits": 13, "char_bits": 13, "max_word_ngram": 10**9, "char_ngrams": [3, 5]}},
        {"hashing": {"word_bits": 13, "char_bits": 13, "max_word_ngram": 2, "char_ngrams": [5, 3]}},
        {"hashing": [13, 13]},
        {"novelty": {"num_held_out": 7}},
        {"novelty": {"num_held_out": 10**400}},
        {"novelty": None},
        {"embedding": {"source": "none", "model": "", "dim": 3}},
        {"embedding": {"source": "none"}},
        {"num_tiers": "four"},
        {"num_tiers": None},
        {"is_binary": ...},
        {"confidence": [1]},
    ],
    ids=str,
)
def test_metadata_that_no_fit_writes_is_refused_at_start(fitted: FittedRouter, change: dict[str, Any]) -> None:
    kept = {name: value for name, value in fitted.artifact.metadata.items() if change.get(name) is not ...}
    described = kept | {name: value for name, value in change.items() if value is not ...}
    with pytest.raises(ArtifactCorrupt):
        ArtifactRouter(RouterArtifact.create(fitted.artifact.arrays, described))


@pytest.mark.parametrize("num_tiers", [0, 1, 3, 10**12])
def test_a_router_of_other_tiers_than_its_features_is_refused(fitted: FittedRouter, num_tiers: int) -> None:
    with pytest.raises(ArtifactUnsupported):
        ArtifactRouter(fitted.artifact.with_metadata(num_tiers=num_tiers))


def test_another_feature_schema_is_refused(fitted: FittedRouter) -> None:
    with pytest.raises(ArtifactUnsupported, match="other features"):
        ArtifactRouter(fitted.artifact.with_metadata(features=["num_chars"]))
    missing = {name: array for name, array in fitted.artifact.arrays.items() if name != "seen_words"}
    with pytest.raises(ArtifactCorrupt, match="seen_words"):
        ArtifactRouter(RouterArtifact.create(missing, fitted.artifact.metadata))
