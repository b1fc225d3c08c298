"""Stores a router as a file: plain arrays and one JSON text, immutable, named by the hash of its content.

The file is a zip of ``.npy`` members as ``numpy.savez_compressed`` writes it, read without pickle. The member
``metadata`` holds UTF-8 JSON: format, feature schema, training window, metrics with their baselines, calibration, and
what the gateway needs to decide by it (``decision``: thresholds derived for a floor, value of quality, novelty
bound).

It protects against truncation, alteration by accident, foreign files and files that would unpack to gigabytes. It
does not protect against someone who can write the file: the version is a digest, not a signature.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.errors import ArtifactCorrupt, ArtifactError, ArtifactNotFound, ArtifactUnsupported

FORMAT = "suffice-router"
FORMAT_VERSION = 1
MAX_UNPACKED_BYTES = 512 * 1024 * 1024
MAX_MEMBERS = 64
_VERSION_CHARS = 16

Arrays = Mapping[str, NDArray[Any]]


def content_version(arrays: Arrays, metadata: Mapping[str, Any]) -> str:
    """Return 16 hex digits of the SHA-256 over every array's name, type, shape and bytes, and the canonical JSON."""
    digest = hashlib.sha256(canonical_json(metadata))
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:_VERSION_CHARS]


def canonical_json(metadata: Mapping[str, Any]) -> bytes:
    """Return one spelling for equal metadata; NaN is refused, since JSON has none."""
    return json.dumps(metadata, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True, slots=True)
class RouterArtifact:
    """Holds a fitted router at rest.

    Attributes
    ----------
    arrays : name -> read-only array
    metadata : JSON-able description, see the module's docstring
    version : hash of both
    """

    arrays: Arrays
    metadata: Mapping[str, Any]
    version: str

    @classmethod
    def create(cls, arrays: Arrays, metadata: Mapping[str, Any]) -> RouterArtifact:
        """Freeze arrays and metadata under their content's version."""
        described = {"format": FORMAT, "format_version": FORMAT_VERSION, **metadata}
        frozen = {name: _read_only(array) for name, array in arrays.items()}
        return cls(frozen, json.loads(canonical_json(described)), content_version(frozen, described))

    def with_metadata(self, **changes: Any) -> RouterArtifact:
        """Return the same arrays under amended metadata: a new artifact with a new version."""
        return RouterArtifact.create(self.arrays, {**self.metadata, **changes})

    @property
    def num_tiers(self) -> int:
        """Return how many tiers it estimates."""
        return int(self.metadata["num_tiers"])

    def as_bytes(self) -> bytes:
        """Return the file's content."""
        buffer = io.BytesIO()
        described = np.frombuffer(canonical_json(self.metadata), dtype=np.uint8)
        version = np.frombuffer(self.version.encode(), dtype=np.uint8)
        members: dict[str, Any] = {"metadata": described, "version": version, **self.arrays}
        np.savez_compressed(buffer, **members)
        return buffer.getvalue()

    def save(self, path: Path | str) -> Path:
        """Write the file whole or not at all: a temporary neighbour is synced, then renamed over ``path``."""
        target, content = Path(path), self.as_bytes()
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return target

    @classmethod
    def load(cls, path: Path | str) -> RouterArtifact:
        """Read a file back.

        Raises
        ------
        ArtifactNotFound
            There is no such file.
        ArtifactCorrupt
            It is not a router file, is cut short, or would unpack beyond ``MAX_UNPACKED_BYTES``.
        ArtifactUnsupported
            Another format version.
        """
        source = Path(path)
        try:
            content = source.read_bytes()
        except FileNotFoundError:
            raise ArtifactNotFound(source, "no such file; `suffice bootstrap` makes one.") from None
        except OSError as error:
            raise ArtifactCorrupt(source, f"not a readable router file ({type(error).__name__}: {error}).") from error
        return cls.from_bytes(content, source)

    @classmethod
    def from_bytes(cls, content: bytes, source: Path) -> RouterArtifact:
        """Read a file's content back; ``source`` is what error messages call it.

        Raises
        ------
        ArtifactCorrupt, ArtifactUnsupported
            As :meth:`load`.
        """
        try:
            members = _read_members(source, content)
        except ArtifactError:
            raise
        except Exception as error:  # a damaged zip or array header makes zipfile, zlib and numpy raise a dozen kinds
            raise ArtifactCorrupt(source, f"not a readable router file ({type(error).__name__}: {error}).") from error
        metadata = _parse_metadata(source, members.pop("metadata", None))
        claimed = members.pop("version", np.empty(0, dtype=np.uint8)).tobytes()
        artifact = cls({n: _read_only(a) for n, a in members.items()}, metadata, content_version(members, metadata))
        if claimed != artifact.version.encode():
            raise ArtifactCorrupt(source, f"it says version {claimed!r}, its content is {artifact.version}.")
        return artifact


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    frozen = np.array(array, order="C", copy=True)
    frozen.flags.writeable = False
    return frozen


def _read_members(path: Path, content: bytes) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        infos = archive.infolist()
        unpacked = sum(info.file_size for info in infos)
        if len(infos) > MAX_MEMBERS or unpacked > MAX_UNPACKED_BYTES:
            raise ArtifactCorrupt(path, f"{len(infos)} members of {unpacked} bytes are no router this system wrote.")
        members = {}
        for info in infos:
            # zipfile checks each member's CRC once it is read to its end.
            array = np.lib.format.read_array(io.BytesIO(archive.read(info)), allow_pickle=False)
            if array.dtype.kind not in "biuf":
                raise ArtifactCorrupt(path, f"{info.filename} holds {array.dtype}, not numbers.")
            members[info.filename.removesuffix(".npy")] = array
    return members


def _parse_metadata(path: Path, raw: NDArray[Any] | None) -> dict[str, Any]:
    if raw is None:
        raise ArtifactCorrupt(path, "it has no metadata; this is not a router.")
    try:
        metadata = json.loads(raw.tobytes())
    except (ValueError, RecursionError) as error:
        raise ArtifactCorrupt(path, f"its metadata is not JSON ({error}).") from error
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise ArtifactCorrupt(path, f"its metadata does not say format {FORMAT!r}.")
    if metadata.get("format_version") != FORMAT_VERSION:
        raise ArtifactUnsupported(
            path,
            f"format version {metadata.get('format_version')!r}; this version reads {FORMAT_VERSION}. "
            "Fit it again with `suffice bootstrap`.",
        )
    return metadata
