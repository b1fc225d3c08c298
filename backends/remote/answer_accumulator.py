"""Accumulates one generation: chunks in, one delta per read out, and the ending when it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

from backends.continuation import Seam
from backends.errors import BackendFailure
from backends.protocol import (
    Finished,
    FinishReason,
    GenerateRequest,
    Thought,
    Timings,
    TokenDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from backends.remote.answer_limit import AnswerLimit
from backends.remote.call_assembler import CallAssembler
from backends.remote.chunk_decoder import AnswerChunk
from backends.remote.request_encoder import begun_text
from backends.remote.stop_cutter import StopCutter

# English prose in common vocabularies; only used where a server does not count.
_BYTES_PER_TOKEN = 4


class AnswerAccumulator:
    """Accumulates one generation. ``clock`` is in seconds; it starts at construction.

    ``is_cut`` says that more came than was asked for: what follows is not wanted. ``has_bad_usage`` says that the
    server's counts could not be, and were ignored or cut.
    """

    def __init__(
        self,
        request: GenerateRequest,
        clock: Callable[[], float],
        began_s: float | None = None,
        *,
        context_length: int | None = None,
    ) -> None:
        self._request = request
        self._context_length = context_length
        self._limit = AnswerLimit(request, context_length)
        self._num_chunks = 0
        self._num_chars = 0
        self._num_counted = 0
        self.is_cut = False
        self.has_bad_usage = False
        self._clock = clock
        self._began_s = clock() if began_s is None else began_s
        self._first_s: float | None = None
        self._reason: FinishReason | None = None
        self._unknown_reason: str | None = None
        self._stop_string: str | None = None
        self._usage: Usage | None = None
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._cutter = StopCutter(request.sampling.stop)
        self._seam = Seam()
        if request.continued is not None:
            shown = self._cutter.feed(begun_text(request))
            self._seam = Seam(request.continued.content[len(shown) :])
        self._calls = CallAssembler()
        self.num_tokens = 0
        self.num_reasoning_tokens = 0

    def restarted(self) -> AnswerAccumulator:
        """Return a blank answer for the next attempt; time runs on."""
        return AnswerAccumulator(self._request, self._clock, self._began_s, context_length=self._context_length)

    @property
    def has_begun(self) -> bool:
        """Return whether a first token has arrived."""
        return self._first_s is not None

    @property
    def is_complete(self) -> bool:
        """Return whether it is known why the answer ended."""
        return self._reason is not None or self.is_over

    @property
    def is_over(self) -> bool:
        """Return whether the answer is ended from our side, at a stop string or at its limit."""
        return self.is_stopped or self.is_cut

    @property
    def is_stopped(self) -> bool:
        """Return whether a stop string came that the server should have cut off: what follows is not wanted."""
        return self._cutter.is_stopped

    @property
    def is_unreadable(self) -> bool:
        """Return whether the server gave a reason for ending that nobody documented."""
        return self._unknown_reason is not None and not self.is_over

    @property
    def has_usage(self) -> bool:
        """Return whether the server has counted its tokens."""
        return self._usage is not None

    def take(self, chunks: Sequence[AnswerChunk]) -> list[TokenDelta]:
        """Take chunks that arrived together; return their content in as few deltas as keep its order.

        Text that has already arrived together is not made to travel apart.
        """
        deltas: list[TokenDelta] = []
        text = reasoning = ""
        signed: tuple[Thought, ...] = ()
        logprobs: tuple[TokenLogprob, ...] = ()
        calls: tuple[ToolCallDelta, ...] = ()
        num_tokens = 0
        for chunk in chunks:
            if self.is_cut:
                break
            self._note(chunk)
            if not chunk.has_content or self.is_stopped:
                continue
            if self._passes_limit(chunk):
                self.is_cut = True
                # Of a whole answer in one chunk the permitted part is shown.
                chunk = self._shortened(chunk)
                if not chunk.has_content:
                    break
            # One delta shows reasoning, what signs it, text, calls in this order; where they come in another, a new one
            # begins.
            is_thought = bool(chunk.reasoning or chunk.signed)
            if (signed and is_thought) or (text and is_thought) or (calls and (is_thought or chunk.text)):
                deltas.append(TokenDelta(text, reasoning, num_tokens, logprobs, calls, signed))
                text, reasoning, logprobs, num_tokens, calls, signed = "", "", (), 0, (), ()
            text += self._seam.take(self._cutter.feed(chunk.text)) if chunk.text else ""
            reasoning += chunk.reasoning
            signed += chunk.signed
            logprobs += chunk.logprobs
            calls += self._calls.take(chunk.tool_calls) if chunk.tool_calls else ()
            num_tokens += self._count(chunk)
        if num_tokens:
            deltas.append(TokenDelta(text, reasoning, num_tokens, logprobs, calls, signed))
            if self._first_s is None:
                self._first_s = self._clock()
        return deltas

    def rest(self) -> list[TokenDelta]:
        """Return what was held back, once the answer is over: text in which a stop string might have begun, ``{}``."""
        held = self._seam.take(self._cutter.flush())
        # A call that was cut off must not look as if it had wanted no arguments.
        is_whole = self._reason in (FinishReason.STOP, FinishReason.TOOL_CALLS) and not self.is_over
        calls = self._calls.rest() if is_whole else ()
        return [TokenDelta(held, tool_calls=calls)] if held or calls else []

    def _note(self, chunk: AnswerChunk) -> None:
        if chunk.reason is not None and self._reason is None:
            self._reason = chunk.reason
            self._unknown_reason = chunk.unknown_reason
            self._stop_string = chunk.stop_string
        self.has_bad_usage |= chunk.has_bad_usage
        if chunk.usage is not None:
            self._usage = chunk.usage
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs = chunk.prompt_logprobs

    def _passes_limit(self, chunk: AnswerChunk) -> bool:
        """Count a chunk with content; return whether it is beyond what was asked for."""
        self._num_chunks += 1
        self._num_chars += chunk.num_chars
        self._num_counted += len(chunk.logprobs)
        # Counts that run along with the answer are of tokens up to here.
        running = self._usage.completion_tokens if self._usage is not None and self._reason is None else 0
        return self._limit.is_passed(self._num_chunks, self._num_chars, max(self._num_counted, running))

    def _shortened(self, chunk: AnswerChunk) -> AnswerChunk:
        most = self._limit.max_chars
        room = len(chunk.text) + len(chunk.reasoning) if most is None else most
        room = max(0, room - (self._num_chars - len(chunk.text) - len(chunk.reasoning)))
        if self._num_chunks > 1 or room >= len(chunk.text) + len(chunk.reasoning):
            return AnswerChunk()
        reasoning = chunk.reasoning[:room]
        self._num_chars = most or 0
        return AnswerChunk(text=chunk.text[: room - len(reasoning)], reasoning=reasoning)

    def _count(self, chunk: AnswerChunk) -> int:
        # A chunk is one token at most servers; with logprobs the count is exact.
        num_tokens = len(chunk.logprobs) or 1
        self.num_tokens += num_tokens
        if chunk.reasoning and not chunk.text:
            self.num_reasoning_tokens += num_tokens
        return num_tokens

    def whole(self, where: str) -> Finished:
        """Return the ending of a stream that came to its end.

        Raises
        ------
        BackendFailure : it ended without saying why, or for a reason nobody documented
        """
        if self.is_over:
            return self.ending()
        if self._unknown_reason is not None:
            raise BackendFailure(f"{where} ended the answer with finish_reason {self._unknown_reason!r}.")
        if self._reason is None:
            what = "in the middle of the answer" if self.has_begun else "without an answer"
            raise BackendFailure(f"{where} ended the stream {what}.")
        return self.ending()

    def ending(self, reason: FinishReason | None = None, error: str | None = None) -> Finished:
        """Return the ending: the server's, unless another reason is given."""
        if reason is None:
            ours = FinishReason.STOP if self.is_stopped else FinishReason.LENGTH
            reason = ours if self.is_over else self._reason
        assert reason is not None, "an answer that has not ended needs a reason"
        # Servers that were told which tool to call say `stop`; who reads calls waits for the other word.
        if reason is FinishReason.STOP and self._calls.has_calls:
            reason = FinishReason.TOOL_CALLS
        if self._usage is not None:
            usage = self._limit.plausible(self._usage, self._num_chars)
            self.has_bad_usage |= usage is not self._usage
            self._usage = usage
        return Finished(
            reason=reason,
            usage=self._usage if self._usage is not None else self._estimate(),
            timings=self._timings(),
            error=error,
            prompt_logprobs=self._prompt_logprobs,
            usage_estimated=self._usage is None,
            stop_string=self._found_stop() if reason is FinishReason.STOP else None,
        )

    def _found_stop(self) -> str | None:
        """Return the stop string that ended the answer: the one found here, or one of ours that the server names."""
        is_ours = self._stop_string in self._request.sampling.stop
        return self._cutter.found or (self._stop_string if is_ours else None)

    def _estimate(self) -> Usage:
        return Usage(
            prompt_tokens=estimate_prompt_tokens(self._request),
            completion_tokens=self.num_tokens,
            reasoning_tokens=self.num_reasoning_tokens,
        )

    def _timings(self) -> Timings:
        total_s = self._clock() - self._began_s
        if self._first_s is None:
            return Timings(total_s=total_s)
        ttft_s = self._first_s - self._began_s
        num_tokens = self._usage.completion_tokens if self._usage is not None else self.num_tokens
        itl_s = (total_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else 0.0
        return Timings(ttft_s=ttft_s, itl_s=itl_s, total_s=total_s)


def estimate_prompt_tokens(request: GenerateRequest) -> int:
    """Estimate the prompt's length in tokens from its bytes; exact for token ids."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    if request.messages is not None:
        texts = [message.content for message in request.messages]
    else:
        texts = [request.prompt or ""]
    if request.continued is not None:
        texts.append(request.continued.content)
    return max(1, sum(ceil(len(text.encode("utf-8", "replace")) / _BYTES_PER_TOKEN) for text in texts))
