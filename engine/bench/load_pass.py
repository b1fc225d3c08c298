"""Runs our engine under the bench's load: all jobs at once, each token stamped as it is handed over."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field

from engine.bench.workload import Job
from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.decoder import DecoderModel
from engine.request import Event, Request, SamplingParams, TokenChunk


@dataclass(slots=True)
class LoadPass:
    """Holds one pass over the jobs: seconds, tokens per job, and where they are known the tokens and their times."""

    total_s: float
    counts: list[int]
    answers: list[list[int]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.total_s


class _StampingSink:
    """Notes when each token arrives; runs on the engine's thread."""

    loop = None

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.times_s: list[float] = []
        self.done = threading.Event()
        self.error: Exception | None = None

    def put(self, event: Event) -> None:
        if isinstance(event, TokenChunk):
            self.token_ids += event.token_ids
            self.times_s += [time.perf_counter()] * len(event.token_ids)
            return
        self.error = event.error
        self.done.set()


def run_our_engine(model: DecoderModel, jobs: list[Job], *, threads: int) -> LoadPass:
    """Serve all jobs concurrently on a fresh engine.

    Raises
    ------
    engine.errors.EngineError
        What any of the requests ended with.
    """
    num_blocks = sum(math.ceil((len(job.prompt_ids) + job.num_output) / 16) for job in jobs) + 1
    engine = Engine(model, EngineConfig(num_blocks=num_blocks, max_num_seqs=max(32, len(jobs)), threads=threads))
    try:
        sinks = [_StampingSink() for _ in jobs]
        began_s = time.perf_counter()
        for index, (job, sink) in enumerate(zip(jobs, sinks, strict=True)):
            sampling = SamplingParams(temperature=0.0, max_tokens=job.num_output, ignore_eos=True)
            engine.submit(Request(f"bench-{index}", job.prompt_ids, sampling), sink)
        for sink in sinks:
            sink.done.wait()
        total_s = time.perf_counter() - began_s
    finally:
        engine.close()
    for sink in sinks:
        if sink.error is not None:
            raise sink.error
    return LoadPass(
        total_s,
        [len(sink.token_ids) for sink in sinks],
        [sink.token_ids for sink in sinks],
        ttft_s=[sink.times_s[0] - began_s for sink in sinks],
        itl_s=[b - a for sink in sinks for a, b in zip(sink.times_s, sink.times_s[1:], strict=False)],
    )
