"""Says when a server has sent more than was asked for, whatever it claims."""

from __future__ import annotations

from dataclasses import replace

from backends.protocol import GenerateRequest, Usage

# Most servers send a token a chunk, some split tokens: honest answers stay far below either bound.
_CHUNKS_PER_TOKEN = 8
_FREE_CHUNKS = 64
_CHARS_PER_TOKEN = 32
_FREE_CHARS = 1024
# Chat templates and instructions of the provider's own come on top of the prompt.
_FREE_PROMPT_TOKENS = 16_384


class AnswerLimit:
    """Bounds one generation by its ``max_tokens``, or by the model's context where none was given.

    A server's own counts are believed where they say that the limit is passed. Without them, or where they say less, an
    answer has passed it with 8 chunks or 32 characters a token (and 64 chunks, 1,024 characters).

    Parameters
    ----------
    request : with ``max_tokens``
    context_length : of the model, where known
    """

    __slots__ = ("_is_exact", "_max_prompt_tokens", "max_chars", "max_chunks", "max_tokens")

    def __init__(self, request: GenerateRequest, context_length: int | None = None) -> None:
        given = request.sampling.max_tokens
        self.max_tokens = context_length if given is None else given
        # An echoed prompt comes as part of the answer, with its log-probabilities.
        self._is_exact = not request.echo
        prompt_bytes = prompt_size(request)
        echoed = prompt_bytes if request.echo else 0
        self._max_prompt_tokens = prompt_bytes + _FREE_PROMPT_TOKENS
        self.max_chunks: int | None = None
        self.max_chars: int | None = None
        if self.max_tokens is not None:
            self.max_chunks = _CHUNKS_PER_TOKEN * self.max_tokens + _FREE_CHUNKS + echoed
            self.max_chars = _CHARS_PER_TOKEN * self.max_tokens + _FREE_CHARS + echoed

    def is_passed(self, num_chunks: int, num_chars: int, num_counted: int) -> bool:
        """Return whether the answer is longer than was asked for.

        Parameters
        ----------
        num_chunks, num_chars : received with content
        num_counted : tokens by the server's own log-probabilities or running counts
        """
        if self.max_tokens is None or self.max_chunks is None or self.max_chars is None:
            return False
        is_counted = self._is_exact and num_counted > self.max_tokens
        return is_counted or num_chunks > self.max_chunks or num_chars > self.max_chars

    def plausible(self, usage: Usage, num_chars: int) -> Usage:
        """Return a server's counts, cut where they cannot be.

        A prompt has no more tokens than bytes (and a template of 16,384 tokens), an answer no more than were asked for
        or, where more came, than it has characters.
        """
        prompt = min(usage.prompt_tokens, self._max_prompt_tokens)
        completion = usage.completion_tokens
        if self.max_tokens is not None:
            completion = min(completion, max(self.max_tokens, num_chars))
        if (prompt, completion) == (usage.prompt_tokens, usage.completion_tokens):
            return usage
        return replace(
            usage,
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=min(usage.cached_tokens, prompt),
            reasoning_tokens=min(usage.reasoning_tokens, completion),
        )


def prompt_size(request: GenerateRequest) -> int:
    """Return the prompt's length in bytes, or in tokens where it is given as tokens."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    texts = [request.prompt or ""] if request.messages is None else [each.content for each in request.messages]
    if request.continued is not None:
        texts += (request.continued.content, request.continued.reasoning)
    return sum(len(text.encode("utf-8", "replace")) for text in texts)
