"""Where the time of a decode step goes: kernels by name, the host, and the gaps between them."""

from __future__ import annotations

import time
from collections import Counter

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from engine.bench.contenders import Countdown
from engine.bench.measures import Prompts
from engine.engine import Engine
from engine.request import Request, SamplingParams

_WARM_STEPS = 24
_STEPS = 32
_TOP = 12


def profile_decode(engine: Engine, prompts: Prompts, batch: int) -> dict[str, object]:
    """Step an engine that has no thread of its own through decoding ``batch`` sequences.

    Returns
    -------
    Milliseconds a step by the wall, by the host alone (the step's own thread time) and of kernels on the device, and
    the share of each of the busiest kernels. Kernel times are missing without a GPU.
    """
    ended = Countdown(batch)
    sampling = SamplingParams(temperature=0.0, max_tokens=_WARM_STEPS + 3 * _STEPS, ignore_eos=True)
    for index, prompt in enumerate(prompts.draw(batch, 128)):
        engine.submit(Request(f"profile-{batch}-{index}", tuple(prompt), sampling), ended)
    _step(engine, _WARM_STEPS)
    _synchronize(engine)
    began_s, began_host_s = time.perf_counter(), time.thread_time()
    _step(engine, _STEPS)
    host_s = time.thread_time() - began_host_s
    _synchronize(engine)
    wall_s = time.perf_counter() - began_s
    found: dict[str, object] = {
        "batch": batch,
        "step_ms": round(wall_s / _STEPS * 1e3, 4),
        "host_cpu_ms": round(host_s / _STEPS * 1e3, 4),
    }
    if engine.model.device.type == "cuda":
        found |= _kernels(engine)
    while engine.has_work():
        engine.step()
    ended.wait()
    return found


def _kernels(engine: Engine) -> dict[str, object]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        _step(engine, _STEPS)
        torch.cuda.synchronize()
    total_us: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            total_us[event.name] += event.device_time
            count[event.name] += 1
    busy_us = sum(total_us.values())
    return {
        "kernels_ms": round(busy_us / _STEPS / 1e3, 4),
        "launches": round(sum(count.values()) / _STEPS, 1),
        "top": [
            {"kernel": name[:80], "share": round(us / busy_us, 4), "calls": round(count[name] / _STEPS, 1)}
            for name, us in total_us.most_common(_TOP)
        ],
    }


def _step(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def _synchronize(engine: Engine) -> None:
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize(engine.model.device)
