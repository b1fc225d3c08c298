"""What has been generated so far: one growing answer per choice, and their sums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from backends.protocol import Finished, FinishReason, TokenDelta, TokenLogprob, Usage


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


def sum_usage(usages: Iterable[Usage]) -> Usage:
    """Token counts of several generations together."""
    columns = [
        (
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
            usage.reasoning_tokens,
            usage.draft_tokens,
            usage.accepted_draft_tokens,
        )
        for usage in usages
    ]
    return Usage(*map(sum, zip(*columns, strict=True))) if columns else Usage()
