"""Holds what has been generated so far for one choice."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from backends.protocol import Finished, FinishReason, TokenDelta, TokenLogprob


@dataclass(slots=True)
class AnswerChoice:
    """One choice. ``finished`` is None while it runs; what was sent is what ``texts`` and ``reasonings`` join to.

    ``scored`` are the log-probabilities of the answer's own tokens, kept where its tier's confidence is asked for.
    """

    index: int
    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_tokens: int = 0
    finished: Finished | None = None
    scored: list[float] | None = None

    def score(self, delta: TokenDelta, *, is_wanted: bool) -> TokenDelta:
        """Keep what a delta says of its tokens' probability; the delta as the caller sees it.

        Parameters
        ----------
        is_wanted : the caller asked for log-probabilities too
        """
        assert self.scored is not None, "nobody asked for its confidence"
        self.scored += [each.logprob for each in delta.logprobs]
        return delta if is_wanted else replace(delta, logprobs=())

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
