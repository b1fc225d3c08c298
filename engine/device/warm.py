"""Compiling and capturing before the first request, so that it does not wait for either.

A shape of step compiles its kernels when it first runs and is captured when it runs again: on an H200 the first two
1,024-token prompts of a 70B model took 0.5 and 0.9 seconds, the third 0.26. Here the engine serves itself such steps.
"""

from __future__ import annotations

import secrets

from engine.device.graphs import LADDER
from engine.device.runner import NUM_TOKENS
from engine.engine import Engine, collect
from engine.request import Request, SamplingParams
from engine.sink import QueueSink

# Compile, capture.
_TURNS = 2
# Batch sizes beyond this are captured when they first come: who waits for it then shares it with many.
_MOST_SEQUENCES = 32
# Greedy, and drawn at a temperature: what most requests ask for.
_TEMPERATURES = (0.0, 1.0)


def warm_up(engine: Engine, *, timeout_s: float = 600.0) -> None:
    """Let an engine decode in batches and read prompts of the captured sizes; blocks until it has.

    Raises
    ------
    engine.errors.EngineError
        What one of the steps failed with: the engine cannot serve.
    """
    config, limit = engine.config, engine.context_length
    for temperature in _TEMPERATURES:
        # Each answer decodes once per turn, and once more to end.
        sampling = SamplingParams(temperature=temperature, seed=0, max_tokens=_TURNS + 2, ignore_eos=True)
        for size in LADDER:
            if size <= min(config.max_num_seqs, _MOST_SEQUENCES) and limit >= 1 + _TURNS + 2:
                _serve(engine, [1] * size, sampling, timeout_s)
        one = SamplingParams(temperature=temperature, seed=0, max_tokens=1)
        for _ in range(_TURNS):
            for num_tokens in NUM_TOKENS:
                if num_tokens <= config.max_batch_tokens and num_tokens + 1 <= limit:
                    _serve(engine, [num_tokens], one, timeout_s)


def _serve(engine: Engine, lengths: list[int], sampling: SamplingParams, timeout_s: float) -> None:
    sinks = [QueueSink() for _ in lengths]
    for index, (length, sink) in enumerate(zip(lengths, sinks, strict=True)):
        # A salt nobody else has, and never the same: the prefix cache must not spare the work.
        salt = f"warm-up {secrets.token_hex(8)} {index}"
        engine.submit(Request("warm-up", (0,) * length, sampling, speculate=False, cache_salt=salt), sink)
    for sink in sinks:
        collect(sink, timeout_s)
