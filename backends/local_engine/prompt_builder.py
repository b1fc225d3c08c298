"""Builds from a text-level request what the engine takes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from backends.errors import ContextLengthExceeded, RequestRejected, UnsupportedByBackend
from backends.local_engine.errors import translate
from backends.local_engine.model_tools import ModelTools, has_tools, offers_calls, tool_json
from backends.local_engine.tool_stream import ToolStream
from backends.protocol import GenerateRequest, Message, Priority
from engine import request as engine_request
from engine.errors import EngineError
from engine.stop_strings import StopAutomaton
from engine.text_stream import TextStream
from engine.tokenizer import Tokenizer

# Encoding runs at about 1 MB/s; longer texts leave the event loop to others meanwhile.
_INLINE_CHARS = 2_048
# Laying out a turn takes about as long as encoding so many characters.
_TURN_CHARS = 32
# Threads of its own: those that all of a server shares are not to be had while long prompts wait for theirs.
_NUM_THREADS = 2
# Of what an answer may have, the part that reasoning may take before it is closed, so that an answer follows.
_THINKING_SHARE = 0.75
# A prompt is usually counted before it is served, so the latest encodings are kept, unless they are long.
_NUM_KEPT = 64
_KEPT_CHARS = 16_384
# What models write between the end of their reasoning and the answer.
_AFTER_REASONING = "\n\n"

T = TypeVar("T")

_COPIED = tuple(f.name for f in dataclasses.fields(engine_request.SamplingParams))
_PRIORITY = {Priority.LIVE: engine_request.Priority.LIVE, Priority.BACKGROUND: engine_request.Priority.BACKGROUND}


class PromptBuilder:
    """Encodes prompts and lays out engine requests for one served model.

    Parameters
    ----------
    tokenizer : the checkpoint's
    thinking : whether the model reasons unless a request says otherwise
    tool_format : how it writes tool calls
    """

    def __init__(self, model_id: str, tokenizer: Tokenizer, *, thinking: bool, tool_format: str = "auto") -> None:
        self.model_id = model_id
        self.tokenizer = tokenizer
        self.tools = ModelTools(tokenizer, tool_format)
        self._thinking = thinking
        self._kept: OrderedDict[tuple[Any, ...], tuple[int, ...]] = OrderedDict()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix=f"encode-{model_id}")

    def close(self) -> None:
        """Let the threads go once what they encode is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, request: GenerateRequest, limit: int | None = None) -> tuple[int, ...]:
        """Return the token ids of the prompt, after the chat template for messages, without a begun answer.

        Raises
        ------
        ContextLengthExceeded
            It has more than ``limit`` tokens. Not every text that has is refused here; the engine counts.
        RequestRejected, UnsupportedByBackend
        """
        if request.prompt_token_ids is not None:
            given = tuple(request.prompt_token_ids)
            if limit is not None and len(given) > limit:
                raise ContextLengthExceeded(len(given), limit, request.sampling.max_tokens, param="prompt")
            return given
        messages = request.messages or ()
        tools = json.dumps(tool_json(request.tools)) if offers_calls(request) else ""
        length = len(request.prompt or "") + len(tools) + sum([_size(message) for message in messages])
        if length > _KEPT_CHARS:
            return await self._work(length, partial(self._encode, request, limit))
        # Encoding the same text again costs no time, which others must not notice.
        key = (_salt(request), request.prompt, request.messages, request.thinking, tools)
        ids = self._kept.pop(key, None)
        if ids is None:
            ids = await self._work(length, partial(self._encode, request, limit))
        self._kept[key] = ids
        if len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)
        return ids

    async def encode_whole(
        self, request: GenerateRequest, limit: int | None = None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the token ids of the prompt and, where an answer was begun, of that; the first end with the second.

        Without a template the two are one text, and may be cut into tokens elsewhere.

        Raises
        ------
        ContextLengthExceeded, RequestRejected, UnsupportedByBackend
        """
        begun = request.continued
        if begun is None or (not begun.content and not begun.tool_calls):
            return await self.encode(request, limit), ()
        size = _size(begun)
        begun_ids = await self._work(size, partial(self.tools.begun_ids, begun))
        if begun_ids is None:
            raise UnsupportedByBackend("continue", self.model_id)
        if request.messages is None:
            whole = dataclasses.replace(request, prompt=(request.prompt or "") + begun.content)
            return await self.encode(whole, limit), begun_ids
        tags = self.tokenizer.think_tags
        reasoning = begun.reasoning if tags is not None else ""
        prompt_ids = await self.encode(dataclasses.replace(request, thinking=bool(reasoning)), limit)
        if tags is not None and self.tokenizer.is_thinking_open(prompt_ids):
            thought = self.tokenizer.encode_plain(reasoning)
            prompt_ids = (*prompt_ids, *thought, *self._closing_ids())
        elif tags is not None and reasoning:
            thought = self.tokenizer.encode_plain(f"\n{reasoning}")
            prompt_ids = (*prompt_ids, tags.open_id, *thought, *self._closing_ids())
        return (*prompt_ids, *begun_ids), begun_ids

    def _closing_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a model's reasoning for it."""
        return tuple(self.tokenizer.encode("\n</think>" + _AFTER_REASONING, add_special_tokens=False))

    async def _work(self, num_chars: int, work: Callable[[], T]) -> T:
        """Do work on so much text: here where it is short, else in a thread of ours."""
        if num_chars <= _INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _encode(self, request: GenerateRequest, limit: int | None) -> tuple[int, ...]:
        param = "messages" if request.prompt is None else "prompt"
        try:
            if request.prompt is not None:
                return tuple(self.tokenizer.encode(request.prompt, limit=limit))
            return tuple(self._encode_chat(request, limit))
        except EngineError as error:
            raise translate(error, self.model_id, param=param) from error

    def _encode_chat(self, request: GenerateRequest, limit: int | None) -> list[int]:
        if request.messages is None:
            raise RequestRejected("Give messages, prompt or prompt_token_ids.", status=400, param="messages")
        thinking = self._thinking if request.thinking is None else request.thinking
        switch = thinking if self.tokenizer.has_thinking_switch else None
        messages = self.tools.messages(request.messages)
        if not has_tools(request):
            return self.tokenizer.encode_chat(messages, thinking=switch, limit=limit)
        # Without calls to be made, the prompt need not show the tools.
        tools = tool_json(request.tools) if offers_calls(request) else ()
        return self.tokenizer.encode_chat(
            messages, thinking=switch, tools=tools, lay_out=self.tools.lay_out, limit=limit
        )

    async def predicted(
        self, request: GenerateRequest, prompt_ids: tuple[int, ...], context_length: int
    ) -> engine_request.Prediction | None:
        """Return the token ids of the answer that the caller predicts.

        They stand after the reasoning, where the prompt leaves that open.

        Raises
        ------
        RequestRejected
            It holds what is no text.
        """
        if not request.prediction:
            return None
        close_id = None
        if request.messages is not None and self.tokenizer.is_thinking_open(prompt_ids):
            assert self.tokenizer.think_tags is not None
            close_id = self.tokenizer.think_tags.close_id
        # What does not fit the context is not encoded: few tokens are longer than eight characters.
        text = ("" if close_id is None else _AFTER_REASONING) + request.prediction[: 8 * context_length]
        try:
            ids = await self._work(len(text), partial(self.tokenizer.encode_plain, text))
        except EngineError as error:
            raise translate(error, self.model_id, param="prediction") from error
        return engine_request.Prediction(tuple(ids), close_id) if ids else None

    async def encode_answer(self, answer: str, limit: int) -> tuple[int, ...]:
        """Return the token ids of an answer that is to be scored.

        Raises
        ------
        ContextLengthExceeded, RequestRejected
        """
        try:
            return tuple(await self._work(len(answer), partial(self.tokenizer.encode_plain, answer, limit=limit)))
        except EngineError as error:
            raise translate(error, self.model_id, param="answer") from error

    async def encode_inputs(self, texts: Sequence[str], limit: int) -> list[list[int]]:
        """Return the token ids of texts to embed, each of ``limit`` at most.

        Raises
        ------
        ContextLengthExceeded, RequestRejected
        """
        num_chars = sum(map(len, texts))
        try:
            return await self._work(num_chars, partial(self.tokenizer.encode_many, texts, limit=limit))
        except EngineError as error:
            raise translate(error, self.model_id, param="input") from error

    def text_stream(
        self, request: GenerateRequest, prompt_ids: tuple[int, ...], eos: tuple[int, ...]
    ) -> TextStream | ToolStream:
        """Return the stream by which tokens become what the caller sees. Raises the engine's ``InvalidRequest``."""
        sampling = request.sampling
        chat = request.messages is not None
        stop = StopAutomaton(sampling.stop) if sampling.stop else None
        calls = chat and offers_calls(request)
        text = TextStream(
            self.tokenizer.bytes,
            stop=None if calls else stop,
            stop_ids=frozenset((*(() if sampling.ignore_eos else eos), *sampling.stop_token_ids)),
            tags=self.tokenizer.think_tags if chat else None,
            thinking=chat and self.tokenizer.is_thinking_open(prompt_ids),
        )
        return self.tools.stream(request, text, stop) if calls else text

    def to_engine(
        self,
        request: GenerateRequest,
        prompt_ids: tuple[int, ...],
        *,
        context_length: int,
        stop_check: TextStream | ToolStream | None,
    ) -> engine_request.Request:
        """Return the same request in token ids. Raises the engine's ``InvalidRequest`` on an option out of range."""
        sampling = request.sampling
        opened = request.messages is not None and self.tokenizer.is_thinking_open(prompt_ids)
        return engine_request.Request(
            request.request_id,
            prompt_ids,
            engine_request.SamplingParams(**{name: getattr(sampling, name) for name in _COPIED}),
            _PRIORITY[request.priority],
            score_from=1 if sampling.prompt_logprobs is not None and len(prompt_ids) > 1 else None,
            thinking=self._thinking_limit(request, context_length - len(prompt_ids)) if opened else None,
            speculate=request.extra.get("speculate") is not False,
            cache_salt=_salt(request),
            stop_check=stop_check,
        )

    def _thinking_limit(self, request: GenerateRequest, room: int) -> engine_request.ThinkingBudget:
        """Return the budget a request asks for, else a share of the answer's room.

        Past it the closing tag is written for the model.
        """
        tags = self.tokenizer.think_tags
        assert tags is not None
        if request.sampling.max_tokens is not None:
            room = min(room, request.sampling.max_tokens)
        budget = request.extra.get("thinking_budget")
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise RequestRejected(
                f"thinking_budget is {budget!r}; expected a number of tokens, 0 or more.",
                status=400,
                param="thinking_budget",
            )
        limit = int(room * _THINKING_SHARE) if budget is None else budget
        return engine_request.ThinkingBudget(tags.close_id, self._closing_ids(), max(limit, 1))

    def score_request(
        self, prompt: GenerateRequest, prompt_ids: tuple[int, ...], answer_ids: tuple[int, ...]
    ) -> engine_request.Request:
        """Return one prefill of prompt and answer that keeps the answer's log-probabilities."""
        return engine_request.Request(
            prompt.request_id,
            (*prompt_ids, *answer_ids),
            engine_request.SamplingParams(max_tokens=0),
            _PRIORITY[prompt.priority],
            score_from=len(prompt_ids),
            cache_salt=_salt(prompt),
        )


def _size(message: Message) -> int:
    calls = sum([len(call.name) + len(call.arguments) for call in message.tool_calls])
    return _TURN_CHARS + len(message.content) + len(message.reasoning) + calls


def _salt(request: GenerateRequest) -> str:
    """Return what a request shares its cached prefixes by."""
    return str(request.extra.get("cache_salt", ""))
