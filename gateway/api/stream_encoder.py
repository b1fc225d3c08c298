"""The events of a stream that wait to be written, in order."""

from __future__ import annotations

from backends.protocol import TokenDelta
from gateway.api.answer_encoder import AnswerEncoder
from gateway.api.choice import AnswerChoice


class StreamEncoder:
    """Encodes deltas as they come and gives all that wait at once; each choice is opened before its first delta."""

    def __init__(self, encoder: AnswerEncoder) -> None:
        encoder.start_stream()
        self.encoder = encoder
        self.pending: list[bytes] = []
        self._opened: set[int] = set()

    def add(self, choice: AnswerChoice, delta: TokenDelta) -> None:
        """Queue the frame of some new text."""
        if self.encoder.holds_back:
            return
        if choice.index not in self._opened:
            self._open(choice)
        frame = self.encoder.delta(choice.index, delta)
        if frame:
            self.pending.append(frame)

    def end(self, choice: AnswerChoice) -> None:
        """Queue the frame that ends a choice."""
        if choice.index not in self._opened:
            self._open(choice)
        if self.encoder.holds_back:
            self.pending.append(self.encoder.held(choice))
        self.pending.append(self.encoder.ending(choice.index, choice.finish_reason))

    def take(self) -> bytes:
        """All that waits, as one piece."""
        frames, self.pending = self.pending, []
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def _open(self, choice: AnswerChoice) -> None:
        self._opened.add(choice.index)
        self.pending.append(self.encoder.opening(choice.index))
