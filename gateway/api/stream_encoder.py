"""The events of a stream that wait to be written, in order."""

from __future__ import annotations

from backends.protocol import TokenDelta
from gateway.api.answer_encoder import Wire
from gateway.api.choice import Answer


class Frames:
    """Encodes deltas as they come and gives all that wait at once; each choice is opened before its first delta."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.pending: list[bytes] = []
        self._opened: set[int] = set()

    def add(self, answer: Answer, delta: TokenDelta) -> None:
        """Queue the frame of some new text."""
        if self.wire.holds_back:
            return
        if answer.index not in self._opened:
            self._open(answer)
        frame = self.wire.delta(answer.index, delta)
        if frame:
            self.pending.append(frame)

    def end(self, answer: Answer) -> None:
        """Queue the frame that ends a choice."""
        if answer.index not in self._opened:
            self._open(answer)
        if self.wire.holds_back:
            self.pending.append(self.wire.held(answer))
        self.pending.append(self.wire.ending(answer.index, answer.finish_reason))

    def take(self) -> bytes:
        """All that waits, as one piece."""
        frames, self.pending = self.pending, []
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def _open(self, answer: Answer) -> None:
        self._opened.add(answer.index)
        self.pending.append(self.wire.opening(answer.index))
