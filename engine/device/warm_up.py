"""Compiles and captures steps before a request comes, so that it does not wait for either.

A shape of step compiles its kernels when it first runs and is captured when it runs again: on an H200 the first two
1,024-token prompts of a 70B model took 0.5 and 0.9 seconds, the third 0.26. So the engine serves itself such steps
before its first request. Decodes of more sequences than are likely at once follow when it has nothing to do: one run of
padding alone after another, which needs no block and which nobody's books know of.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from itertools import product

from engine.device.draw_kinds import DrawKind
from engine.device.graph_cache import LADDER
from engine.device.runner import DeviceRunner
from engine.device.step_shapes import NUM_SEQUENCES, NUM_TOKENS, captured_sizes
from engine.engine import Engine, collect
from engine.models.decoder import DecoderModel
from engine.request import Request, SamplingParams
from engine.sink import QueueSink

logger = logging.getLogger(__name__)

# Compile, capture.
_TURNS = 2
# Batch sizes beyond this are left for quiet moments.
_MOST_SEQUENCES = 32
# Greedy, and drawn at a temperature: what most requests ask for.
_TEMPERATURES = (0.0, 1.0)


def warm_up(
    engine: Engine,
    *,
    temperatures: tuple[float, ...] = _TEMPERATURES,
    most_sequences: int = _MOST_SEQUENCES,
    timeout_s: float = 600.0,
) -> None:
    """Let an engine decode in batches and read prompts of the captured sizes; blocks until it has.

    Decodes of more sequences follow by :func:`padded_decodes` when the engine is quiet. Not so with tensor parallelism,
    where a step that one rank has no memory for is the end of the model: what no request asks for is not worth that.

    Parameters
    ----------
    temperatures : one or both of 0 and another
    most_sequences : of a step before this returns

    Raises
    ------
    engine.errors.EngineError
        What one of the steps failed with: the engine cannot serve.
    """
    config, limit = engine.config, engine.context_length
    most_sequences = min(most_sequences, config.max_num_seqs)
    for temperature in temperatures:
        # Each answer decodes once per turn, and once more to end.
        sampling = SamplingParams(temperature=temperature, seed=0, max_tokens=_TURNS + 2, ignore_eos=True)
        for size in LADDER:
            if size <= most_sequences and limit >= 1 + _TURNS + 2:
                _serve(engine, [1] * size, sampling, timeout_s)
        one = SamplingParams(temperature=temperature, seed=0, max_tokens=1)
        for most in sorted({min(size, most_sequences) for size in NUM_SEQUENCES}):
            for num_tokens in _prompt_sizes(engine):
                # As many prompts as there may be, all but the first of one token.
                count = min(most, num_tokens)
                lengths = [num_tokens - count + 1] + [1] * (count - 1)
                if lengths[0] < limit:
                    for _ in range(_TURNS):
                        _serve(engine, lengths, one, timeout_s)
    if isinstance(engine.model, DecoderModel):
        engine.when_quiet(padded_decodes(engine, larger_sizes(engine, most_sequences), temperatures=temperatures))


def larger_sizes(engine: Engine, num_sequences: int) -> list[int]:
    """Sizes of decodes beyond so many sequences that the engine may come to."""
    runner = _runner_of(engine)
    return [size for size in LADDER if num_sequences < size <= runner.max_sequences]


def padded_decodes(
    engine: Engine,
    sizes: Sequence[int],
    *,
    temperatures: tuple[float, ...] = _TEMPERATURES,
    query_lengths: Sequence[int] = (1,),
) -> Iterator[None]:
    """Compile and capture decodes, one run of padding for each item; for :meth:`engine.engine.Engine.when_quiet`.

    Ends early where a capture failed. Shapes that traffic has captured meanwhile are replayed, to no effect.

    Parameters
    ----------
    sizes, query_lengths : see :meth:`engine.device.runner.DeviceRunner.launch_padding`
    temperatures : as for :func:`warm_up`
    """
    runner = _runner_of(engine)
    kinds = [DrawKind.SCALED if temperature else DrawKind.GREEDY for temperature in temperatures]
    for size, query_len, draws in product(sizes, query_lengths, kinds):
        for _ in range(_TURNS):
            if runner.graphs.has_failed:
                return
            runner.collect(runner.launch_padding(size, draws, query_len))
            yield
    if sizes:
        logger.info("%s: decodes of %s sequences are warm", engine.name, ", ".join(map(str, sizes)))


def _runner_of(engine: Engine) -> DeviceRunner:
    runner = engine.core.runner
    assert isinstance(runner, DeviceRunner), "only the device's runner captures"
    return runner


def _prompt_sizes(engine: Engine) -> list[int]:
    """Return the captured sizes, and of those beyond, which are only compiled, the least and the largest."""
    captured = captured_sizes(engine.model.config)
    beyond = [size for size in NUM_TOKENS if size not in captured]
    return [size for size in (*captured, *beyond[:1], *beyond[-1:]) if size <= engine.config.max_batch_tokens]


def _serve(engine: Engine, lengths: list[int], sampling: SamplingParams, timeout_s: float) -> None:
    sinks = [QueueSink() for _ in lengths]
    requests = []
    for index, length in enumerate(lengths):
        # A salt nobody else has, and never the same: the prefix cache must not spare the work.
        salt = f"warm-up {secrets.token_hex(8)} {index}"
        requests.append(Request("warm-up", (0,) * length, sampling, speculate=False, cache_salt=salt))
    engine.submit_all(list(zip(requests, sinks, strict=True)))
    for sink in sinks:
        collect(sink, timeout_s)
