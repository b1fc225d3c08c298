"""What has been generated so far for one choice."""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.protocol import Finished, FinishReason, TokenDelta, TokenLogprob


@dataclass(slots=True)
class Answer:
    """One choice. ``finished`` is None while it runs; what was sent is what ``texts`` and ``reasonings`` join to."""

    index: int
    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_tokens: int = 0
    finished: Finished | None = None

    def add(self, delta: TokenDelta) -> None:
        """Take one delta in."""
        self.num_tokens += delta.num_tokens
        if delta.text:
            self.texts.append(delta.text)
        if delta.reasoning:
            self.reasonings.append(delta.reasoning)
        if delta.logprobs:
            self.logprobs.extend(delta.logprobs)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasonings)

    @property
    def finish_reason(self) -> FinishReason:
        assert self.finished is not None, "an answer that runs has no ending"
        return self.finished.reason
