"""Carries one generation from the engine's events to the protocol's."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

from backends.continuation import Seam
from backends.local_engine.errors import translate
from backends.local_engine.tool_stream import ToolStream
from backends.protocol import Event, Finished, FinishReason, Timings, TokenDelta, TokenLogprob, Usage
from engine import request as engine_request
from engine.detokenizer import TokenBytes
from engine.errors import EngineClosed
from engine.sequence import Sequence
from engine.sink import AsyncSink
from engine.text_stream import TextStream

_REASON = {
    engine_request.FinishReason.STOP: FinishReason.STOP,
    engine_request.FinishReason.LENGTH: FinishReason.LENGTH,
    engine_request.FinishReason.CANCELLED: FinishReason.CANCELLED,
    engine_request.FinishReason.ERROR: FinishReason.ERROR,
}


class EngineCall:
    """Reads one request's sink.

    Parameters
    ----------
    request : as submitted
    sink : where its events arrive
    text : turns its tokens into text
    tokens : the tokenizer's bytes, for log-probabilities
    seam : leaves out of its text what was sent before; None where nothing was

    Attributes
    ----------
    failed : an error was raised, so nothing is left to cancel
    """

    def __init__(
        self,
        model_id: str,
        request: engine_request.Request,
        sink: AsyncSink,
        text: TextStream | ToolStream,
        tokens: TokenBytes,
        seam: Seam | None = None,
    ) -> None:
        self.request = request
        self.sink = sink
        self.failed = False
        self._model_id = model_id
        self._text = text
        self._tokens = tokens
        self._seam = seam or Seam()
        self._num_pending = 0
        self._logprobs: list[TokenLogprob] = []

    async def events(self) -> AsyncIterator[Event]:
        """Yield deltas, then the ending; raises if the first thing to happen is an error."""
        began = False
        event = await self.sink.get()
        while not isinstance(event, engine_request.RequestEnding):
            self._take(event)
            # Tokens that have arrived by now, as after a late turn of the event loop, go out together.
            waiting = self.sink.get_nowait()
            if waiting is None or isinstance(waiting, engine_request.RequestEnding):
                for delta in self._deltas():
                    began = True
                    yield delta
            event = await self.sink.get() if waiting is None else waiting
        if event.error is not None and not began and not isinstance(event.error, EngineClosed):
            self.failed = True
            raise translate(event.error, self._model_id) from event.error
        if event.error is None:
            # Of an answer that broke, half a character or stop string is left to whoever goes on with it.
            self._text.finish()
        for delta in self._deltas(last=True):
            yield delta
        yield self.finished(event)

    async def drain(self) -> engine_request.RequestEnding:
        """Return the ending, whatever comes before it."""
        while True:
            event = await self.sink.get()
            if isinstance(event, engine_request.RequestEnding):
                return event

    def _take(self, chunk: engine_request.TokenChunk) -> None:
        wants = self.request.sampling.logprobs is not None
        for index, token_id in enumerate(chunk.token_ids):
            self._num_pending += 1
            self._text.push(token_id)
            if wants and self._text.in_answer and not self._text.is_silent(token_id):
                self._logprobs.append(self._logprob(chunk.logprobs[index]))

    def _deltas(self, *, last: bool = False) -> list[TokenDelta]:
        """Return what can be shown now; tokens without visible text are counted with the next that has some."""
        if isinstance(self._text, ToolStream):
            new = [self._new(delta) for delta in self._text.take()]
            shown = [delta for delta in new if delta.text or delta.reasoning or delta.tool_calls]
        else:
            reasoning, text = self._text.take()
            text = self._seam.take(text)
            shown = [TokenDelta(text, reasoning)] if reasoning or text else []
        if not shown and last and self._num_pending:
            shown = [TokenDelta()]
        if not shown:
            return []
        first = dataclasses.replace(shown[0], num_tokens=self._num_pending, logprobs=tuple(self._logprobs))
        self._num_pending = 0
        self._logprobs = []
        return [first, *shown[1:]]

    def _new(self, delta: TokenDelta) -> TokenDelta:
        text = self._seam.take(delta.text)
        return delta if text is delta.text else dataclasses.replace(delta, text=text)

    def finished(self, ending: engine_request.RequestEnding) -> Finished:
        """Return the protocol's ending. An engine that was closed cancelled what ran."""
        closed = isinstance(ending.error, EngineClosed)
        reason = FinishReason.CANCELLED if closed else self._reason(ending.reason)
        prompt_logprobs = None
        if self.request.sampling.prompt_logprobs is not None:
            prompt_logprobs = (None, *(self._logprob(scored) for scored in ending.prompt_logprobs))
        return Finished(
            reason=reason,
            usage=Usage(
                prompt_tokens=ending.num_prompt_tokens,
                completion_tokens=ending.num_output_tokens,
                cached_tokens=ending.num_cached_tokens,
                reasoning_tokens=min(self._text.num_reasoning_tokens, ending.num_output_tokens),
                draft_tokens=ending.num_draft_tokens,
                accepted_draft_tokens=ending.num_accepted_tokens,
                accepted_prediction_tokens=ending.num_accepted_predicted_tokens,
                rejected_prediction_tokens=ending.num_predicted_tokens - ending.num_accepted_predicted_tokens,
            ),
            timings=Timings(ending.queue_s, ending.ttft_s, ending.itl_s, ending.total_s),
            compute_s=ending.compute_s,
            compute_measured=True,
            error=None if ending.error is None else str(translate(ending.error, self._model_id)),
            prompt_logprobs=prompt_logprobs,
            stop_string=self._text.stop_string if reason is FinishReason.STOP else None,
        )

    def _reason(self, reason: engine_request.FinishReason) -> FinishReason:
        if reason is engine_request.FinishReason.STOP and isinstance(self._text, ToolStream) and self._text.has_calls:
            return FinishReason.TOOL_CALLS
        return _REASON[reason]

    def abandoned(self, sequence: Sequence, ending: engine_request.RequestEnding | None) -> Finished:
        """Return the bill of a request nobody reads any more.

        Without its ending it is made from what the engine has counted so far.
        """
        if ending is None:
            ending = engine_request.RequestEnding(
                engine_request.FinishReason.CANCELLED,
                num_prompt_tokens=sequence.num_prompt,
                num_output_tokens=sequence.num_output,
                num_cached_tokens=sequence.num_cached,
                compute_s=sequence.compute_s,
            )
        return dataclasses.replace(self.finished(ending), reason=FinishReason.CANCELLED)

    def _logprob(self, scored: engine_request.TokenLogprob) -> TokenLogprob:
        text_of = self._tokens.text_of
        return TokenLogprob(
            text_of(scored.token_id),
            scored.token_id,
            scored.logprob,
            tuple((text_of(token), token, logprob) for token, logprob in scored.top),
        )
