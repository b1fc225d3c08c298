"""Puts the engines that are measured behind one small face: ours, and vLLM where it can be imported."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from engine.bench.measures import SLACK
from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.models.decoder import DecoderModel
from engine.parallel.model import ParallelModel
from engine.request import Event, Request, RequestEnding, SamplingParams
from engine.speculator import Speculator


class EndingCounter:
    """Counts endings; a sink shared by every request of a pass."""

    loop = None

    def __init__(self, count: int) -> None:
        self._left = count
        self._done = threading.Event()
        self.error: Exception | None = None

    def put(self, event: Event) -> None:
        if isinstance(event, RequestEnding):
            self.error = self.error or event.error
            self._left -= 1
            if not self._left:
                self._done.set()

    def wait(self) -> None:
        """Return when all have ended; raise what any of them ended with."""
        self._done.wait()
        if self.error is not None:
            raise self.error


class MarkTimer:
    """Notes when all of some answers had a number of tokens.

    Parameters
    ----------
    count : answers
    marks : numbers of tokens to wait for
    """

    def __init__(self, count: int, marks: Sequence[int]) -> None:
        self._left = dict.fromkeys(marks, count)
        self._at_s: dict[int, float] = {}
        self._done = threading.Event()
        self.error: Exception | None = None

    def note(self, before: int, after: int) -> None:
        """Note that an answer of ``before`` tokens has ``after``; called on the engine's thread alone."""
        for mark in self._left:
            if before < mark <= after:
                self._left[mark] -= 1
                if not self._left[mark]:
                    self._at_s[mark] = time.perf_counter()
        if not any(self._left.values()):
            self._done.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._done.set()

    def wait(self) -> dict[int, float]:
        """Return when all reached each mark, seconds of the performance counter; raise what an answer ended with."""
        self._done.wait()
        if self.error is not None:
            raise self.error
        return self._at_s


class MarkSink:
    """Tells a :class:`MarkTimer` of one answer's tokens; its sink."""

    loop = None

    def __init__(self, reached: MarkTimer) -> None:
        self._reached = reached
        self._num_tokens = 0
        self.ended = threading.Event()

    def put(self, event: Event) -> None:
        if isinstance(event, RequestEnding):
            if event.error is not None:
                self._reached.fail(event.error)
            self.ended.set()
        else:
            before = self._num_tokens
            self._num_tokens += len(event.token_ids)
            self._reached.note(before, self._num_tokens)


class OurEngine:
    """Runs our engine with its stepping thread. Use as a context manager.

    Parameters
    ----------
    model : weights
    max_num_seqs : most requests in one step
    kv_tokens : size of the KV pool
    max_batch_tokens : most tokens in one step
    speculator : for speed at a set acceptance
    """

    def __init__(
        self,
        model: DecoderModel | ParallelModel,
        *,
        max_num_seqs: int,
        kv_tokens: int,
        max_batch_tokens: int = 8192,
        speculator: Speculator | None = None,
    ) -> None:
        config = EngineConfig(
            num_blocks=-(-kv_tokens // 16),
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max(max_batch_tokens, max_num_seqs),
            # Nobody is answered live here: prompts may take whole steps, as they do in the peer's offline mode.
            itl_target_s=10.0,
            max_waiting=1 << 20,
        )
        self.vocab_size = model.config.vocab_size
        self.engine = Engine(model, config, speculator=speculator, name="bench")
        self._count = 0

    def serve(self, prompts: Sequence[Sequence[int]], num_output: int) -> float:
        """See :class:`engine.bench.measures.MeasuredEngine`."""
        requests = self._requests(prompts, num_output)
        ended = EndingCounter(len(requests))
        began_s = time.perf_counter()
        self.engine.submit_all([(request, ended) for request in requests])
        ended.wait()
        return time.perf_counter() - began_s

    def decode(self, prompts: Sequence[Sequence[int]], first: int, last: int) -> float:
        """See :class:`engine.bench.measures.MeasuredEngine`; every answer goes on until all have ``last`` tokens."""
        requests = self._requests(prompts, last + SLACK)
        reached = MarkTimer(len(requests), (first, last))
        answers = [MarkSink(reached) for _ in requests]
        handles = self.engine.submit_all(list(zip(requests, answers, strict=True)))
        try:
            at_s = reached.wait()
        finally:
            for handle in handles:
                self.engine.cancel(handle)
            for answer in answers:
                answer.ended.wait()
        return at_s[last] - at_s[first]

    def _requests(self, prompts: Sequence[Sequence[int]], num_output: int) -> list[Request]:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        requests = [Request(f"bench-{self._count + i}", tuple(p), sampling) for i, p in enumerate(prompts)]
        self._count += len(requests)
        return requests

    def __enter__(self) -> OurEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()


class VllmEngine:
    """Runs vLLM's offline engine on the same shape, random weights, prefix caching off.

    Raises
    ------
    ImportError
        vLLM is not installed here.
    """

    def __init__(self, config: ModelConfig, folder: str, *, max_num_seqs: int) -> None:
        import vllm  # type: ignore[import-not-found,unused-ignore]

        self.vocab_size = config.vocab_size
        self._params: Any = vllm.SamplingParams
        self._llm: Any = vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=8192,
            max_num_seqs=max_num_seqs,
        )

    def serve(self, prompts: Sequence[Sequence[int]], num_output: int) -> float:
        """See :class:`engine.bench.measures.MeasuredEngine`."""
        params = self._params(temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        began_s = time.perf_counter()
        self._llm.generate(inputs, params, use_tqdm=False)
        return time.perf_counter() - began_s

    def decode(self, prompts: Sequence[Sequence[int]], first: int, last: int) -> float:
        """See :class:`engine.bench.measures.MeasuredEngine`: two runs, since it answers when all is done."""
        short_s = self.serve(prompts, first)
        return self.serve(prompts, last) - short_s

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(self, *_: object) -> None:
        del self._llm
