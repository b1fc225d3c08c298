"""Shows where the time of a step goes: kernels by what they are for, what lies idle between them, and the host."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from engine.bench.measured_engines import EndingCounter
from engine.bench.measures import PromptSource
from engine.bench.roofline import DeviceCeilings, ModelCosts, kind_floors_s
from engine.engine import Engine
from engine.request import Request, SamplingParams

_WARM_STEPS = 24
_STEPS = 32
_DECODE_PROMPT = 128
# What a kernel is for, by part of its name; the library's products are those of the head where weights have 4 bits.
_KINDS = (
    ("int4_", "products"),
    ("attention_many", "attention"),
    ("_attend", "attention"),
    ("_combine", "attention"),
    ("_rms_norm", "norms"),
    ("_silu_and_mul", "gate"),
    ("_rope_and_write_kv", "turn"),
    ("gemm", "head"),
    ("gemv", "head"),
    ("nvjet", "head"),
    ("cutlass", "head"),
    ("splitK", "head"),
)


def profile_decode(engine: Engine, prompts: PromptSource, batch: int, ceilings: DeviceCeilings) -> dict[str, object]:
    """Step an engine that has no thread of its own through decoding ``batch`` sequences.

    Returns
    -------
    Milliseconds a step by the wall and by the host alone (the step's own thread time); with a GPU also by kind of
    kernel (see :func:`by_kind`), with floors.
    """
    ended = EndingCounter(batch)
    _submit(engine, prompts, batch, _DECODE_PROMPT, _WARM_STEPS + 3 * _STEPS, ended)
    _step(engine, _WARM_STEPS)
    _synchronize(engine)
    began_s, began_host_s = time.perf_counter(), time.thread_time()
    _step(engine, _STEPS)
    host_s = time.thread_time() - began_host_s
    _synchronize(engine)
    wall_s = time.perf_counter() - began_s
    found: dict[str, object] = {
        "step": "decode",
        "batch": batch,
        "step_ms": round(wall_s / _STEPS * 1e3, 4),
        "host_cpu_ms": round(host_s / _STEPS * 1e3, 4),
    }
    context = batch * (_DECODE_PROMPT + _WARM_STEPS + 1.5 * _STEPS)
    floors = kind_floors_s(
        ModelCosts.of(engine.model.config),
        ceilings,
        num_tokens=batch,
        num_drawn=batch,
        num_keys=context,
        num_pairs=context,
    )
    found |= _profiled(engine, lambda: _step(engine, _STEPS), _STEPS, floors)
    _finish(engine, ended)
    return found


def profile_prefill(
    engine: Engine, prompts: PromptSource, count: int, num_tokens: int, ceilings: DeviceCeilings
) -> dict[str, object]:
    """Profile computing ``count`` prompts in as few steps as the engine's limit allows, all of it together."""
    found: dict[str, object] = {"step": "prefill", "prompts": count, "num_tokens": num_tokens}

    def serve() -> None:
        ended = EndingCounter(count)
        _submit(engine, prompts, count, num_tokens, 1, ended)
        _finish(engine, ended)
        _synchronize(engine)

    serve()
    began_s = time.perf_counter()
    serve()
    found["step_ms"] = round((time.perf_counter() - began_s) * 1e3, 3)
    floors = kind_floors_s(
        ModelCosts.of(engine.model.config),
        ceilings,
        num_tokens=count * num_tokens,
        num_drawn=count,
        num_keys=0,
        num_pairs=count * num_tokens * num_tokens / 2,
    )
    return found | _profiled(engine, serve, 1, floors)


def _profiled(engine: Engine, work: Callable[[], None], steps: int, floors_s: dict[str, float]) -> dict[str, object]:
    if engine.model.device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA
    ]
    return by_kind(spans, steps, floors_s)


def by_kind(spans: Iterable[tuple[str, float, float]], steps: int, floors_s: dict[str, float]) -> dict[str, object]:
    """Sum the kernels of ``steps`` equal steps, (name, began, ended) in microseconds, to milliseconds a step by kind.

    A kernel counts from the end of the one before it where the two overlap (programmatic dependent launch), so that the
    parts and what lies idle between them add up to the whole.
    """
    us: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, int] = defaultdict(int)
    idle_us, last = 0.0, None
    for name, began, ended in sorted(spans, key=lambda span: span[2]):
        kind = next((kind for part, kind in _KINDS if part in name), "others")
        if last is not None:
            idle_us += max(began - last, 0.0)
            began = max(began, last)
        us[kind] += ended - began
        calls[kind] += 1
        last = ended
    return {
        "idle_ms": round(idle_us / steps / 1e3, 4),
        "launches": round(sum(calls.values()) / steps, 1),
        "kinds": {
            kind: {
                "ms": round(us[kind] / steps / 1e3, 4),
                "calls": round(calls[kind] / steps, 1),
                **({"floor_ms": round(floors_s[kind] * 1e3, 4)} if kind in floors_s else {}),
            }
            for kind in sorted(us, key=us.__getitem__, reverse=True)
        },
    }


def _submit(
    engine: Engine, prompts: PromptSource, count: int, num_tokens: int, max_tokens: int, ended: EndingCounter
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts.draw(count, num_tokens)):
        engine.submit(Request(f"profile-{count}-{index}", tuple(prompt), sampling), ended)


def _finish(engine: Engine, ended: EndingCounter) -> None:
    while engine.has_work():
        engine.step()
    ended.wait()


def _step(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def _synchronize(engine: Engine) -> None:
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize(engine.model.device)
