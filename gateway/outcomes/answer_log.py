"""Answers on disk while they are collected: one JSON object a line, appended, so that a killed run goes on.

The first line says which ladder answered and how; a file of another ladder is refused rather than mixed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from backends.protocol import ToolCall
from gateway.outcomes.errors import CollectionError

_FORMAT = "suffice-outcomes-1"


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """Holds one tier's answer to one prompt, and what it took.

    Attributes
    ----------
    key : the prompt's
    tier : 1-based
    text : visible text, thinking apart
    finish_reason : protocol's ending; ``error`` where the tier refused the request for good
    prompt_tokens, completion_tokens : as billed
    compute_s : device seconds, None where the backend cannot know
    total_s : wall seconds from asking to the ending
    num_scored, total_logprob, least_logprob : of the answer's own tokens; 0 of them where the backend does not say
    calls : of tools, each with its id, name and arguments
    """

    key: str
    tier: int
    text: str
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    compute_s: float | None = None
    total_s: float = 0.0
    num_scored: int = 0
    total_logprob: float = 0.0
    least_logprob: float = 0.0
    calls: Sequence[Sequence[str]] = ()

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Return the calls."""
        return tuple([ToolCall(*each) for each in self.calls])


class AnswerLog:
    """The file, open for appending; use as a context manager.

    Parameters
    ----------
    path : created if absent
    ladder : JSON-able description of what answers; compared with the file's

    Raises
    ------
    CollectionError
        The file is of another ladder or no such file at all.
    """

    def __init__(self, path: Path, ladder: Mapping[str, Any]) -> None:
        self.path = path
        self._header = {"format": _FORMAT, "ladder": json.loads(json.dumps(ladder))}
        self.answers: dict[tuple[str, int], RecordedAnswer] = {}
        self._file: IO[bytes] | None = None

    def __enter__(self) -> AnswerLog:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = self._read() if self.path.exists() else 0
        self._file = self.path.open("r+b" if self.path.exists() else "w+b")
        # A run that was killed may have left half a line; what follows must not be glued to it.
        self._file.truncate(kept)
        self._file.seek(kept)
        if not kept:
            self._write(self._header)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def add(self, answer: RecordedAnswer) -> None:
        """Append one answer; it is in the file, if not yet on the disk, when this returns."""
        self.answers[answer.key, answer.tier] = answer
        self._write(asdict(answer))

    def _write(self, value: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(value).encode() + b"\n")
        self._file.flush()

    def _read(self) -> int:
        """Load what is whole; the number of bytes to keep."""
        kept = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break
                self._read_line(number, line)
                kept += len(line)
        return kept

    def _read_line(self, number: int, line: bytes) -> None:
        try:
            value = json.loads(line)
            if number:
                answer = RecordedAnswer(**value)
                self.answers[answer.key, answer.tier] = answer
        except (ValueError, TypeError) as error:
            raise CollectionError(f"{self.path}, line {number + 1}: not a record of answers ({error}).") from error
        if not number and value != self._header:
            raise CollectionError(
                f"{self.path} holds answers of another ladder or other settings; name another file with --work, or "
                "delete this one to start over."
            )
