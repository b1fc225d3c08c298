"""Prints the memory arithmetic of the capacity plan, for this machine or a named device: ``suffice plan``."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from backends.config import DeviceConfig
from gateway.commands.result_printer import print_json, print_table
from gateway.config.settings import load_settings
from gateway.failure_report import USAGE_STATUS, CommandError
from gateway.models.capacity_plan import (
    DEVICES_BYTES,
    GIB,
    CapacityPlan,
    PlannedTier,
    make_plan,
    planned_tiers,
    reference_tiers,
    size_in_words,
)

USUAL_CONTEXT = 4096
_HOST = "this machine's memory"


def plan(
    config: Path | None,
    *,
    gpu: str | None,
    memory_gib: float | None,
    reference: bool,
    context: int | None,
    shares: str | None,
    as_json: bool,
) -> None:
    """Print the plan; exit status 1 when the ladder does not fit.

    Raises
    ------
    CommandError
        An unknown device, a context or shares that are no use, or a ladder that does not fit.
    """
    device, memory_bytes = _device(gpu, memory_gib)
    if context is not None and context < 1:
        raise CommandError(f"--context is {context}; expected at least 1.", status=USAGE_STATUS)
    if reference:
        tiers, kv_bytes = reference_tiers(), None
    else:
        settings = load_settings(config, need_secrets=False)
        tiers = planned_tiers(settings.ladder, settings.models)
        kv_bytes = _shared_bytes(settings.devices, is_gpu=device != _HOST)
    if context is None:
        context = _usual_context(tiers)
    try:
        parts = [float(part) for part in shares.split(",")] if shares else None
        made = make_plan(
            tiers, device=device, memory_bytes=memory_bytes, context_tokens=context, shares=parts, kv_bytes=kv_bytes
        )
    except ValueError as error:
        raise CommandError(f"--shares: {error}", status=USAGE_STATUS) from error
    if as_json:
        print_json(_as_json(made))
    else:
        _print(made)
    if not made.fits:
        raise CommandError(_why_not(made))


def _shared_bytes(devices: Mapping[str, DeviceConfig], *, is_gpu: bool) -> int | None:
    """Return the bytes for KV that the configuration lets the models of the planned device share."""
    found = devices.get("cuda:0" if is_gpu else "cpu")
    return None if found is None else found.kv_bytes


def _usual_context(tiers: Sequence[PlannedTier]) -> int:
    """Return a length of request that every model of the ladder can take."""
    return min([USUAL_CONTEXT, *(tier.footprint.context_length for tier in tiers if tier.footprint is not None)])


def _device(gpu: str | None, memory_gib: float | None) -> tuple[str, int]:
    if gpu is not None and memory_gib is not None:
        raise CommandError("--gpu and --memory-gib exclude each other.", status=USAGE_STATUS)
    if memory_gib is not None:
        if not 0 < memory_gib < 1_000_000:
            raise CommandError(f"--memory-gib is {memory_gib}; expected a number above 0.", status=USAGE_STATUS)
        return f"{memory_gib:g} GiB", int(memory_gib * GIB)
    if gpu is None:
        return _this_machine()
    if gpu.lower() not in DEVICES_BYTES:
        known = ", ".join(DEVICES_BYTES)
        raise CommandError(f"--gpu is {gpu!r}; known are {known}; else use --memory-gib.", status=USAGE_STATUS)
    return gpu.lower(), DEVICES_BYTES[gpu.lower()]


def _this_machine() -> tuple[str, int]:
    """Return name and bytes of the first GPU, or of the machine's memory when there is none."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()[0]
        name, mebibytes = answer.rsplit(",", 1)
        return name.strip(), int(mebibytes) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        pass
    try:
        line = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()[0]
        return _HOST, int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError) as error:
        raise CommandError("Neither a GPU nor /proc/meminfo was found; use --gpu or --memory-gib.") from error


def _print(made: CapacityPlan) -> None:
    rows = [
        (
            each.tier.name,
            each.tier.model,
            size_in_words(each.tier.footprint.num_params) if each.tier.footprint else "",
            _gb(each.weight_bytes) if each.weight_bytes else "remote" if each.tier.footprint is None else "shared",
            f"{each.share:.0%}",
            _gb(each.kv_bytes),
            f"{each.num_kv_tokens:,}",
            f"{each.concurrency:,}",
        )
        for each in made.tiers
    ]
    headings = ("tier", "model", "params", "weights", "share", "KV", "KV tokens", "at once")
    print_table(headings, rows, title=f"{made.device}: {_gb(made.memory_bytes)}")
    print(
        f"weights {_gb(made.weight_bytes)} + reserve {_gb(made.reserve_bytes)} + KV {_gb(made.kv_bytes)}; "
        f"{made.concurrency:,} requests of {made.context_tokens:,} tokens at once"
    )
    for each in made.tiers:
        if each.engine_of is not None:
            print(f"{each.tier.name} is served by the engine of {each.engine_of}: one batch, one KV pool")
    if made.is_shared:
        guaranteed = ", ".join(
            f"{each.guaranteed_slabs:,} to {each.tier.name}" for each in made.tiers if each.engine_of is None
        )
        print(
            f"KV shared in {made.num_slabs:,} slabs of {_gb(made.slab_bytes)}; guaranteed, for one whole context each: "
            f"{guaranteed}; by demand: {max(made.num_slabs - made.guaranteed_slabs, 0):,}"
        )


def _why_not(made: CapacityPlan) -> str:
    if made.shortfall_bytes:
        needed = f"weights {_gb(made.weight_bytes)} + reserve {_gb(made.reserve_bytes)}"
        needed += f" + KV {_gb(made.kv_bytes)}" if made.is_shared else ""
        return f"The ladder does not fit {made.device}: {needed} exceed {_gb(made.memory_bytes)}."
    if made.is_shared and made.guaranteed_slabs > made.num_slabs:
        return (
            f"The ladder does not fit {made.device}: one whole context for each model takes {made.guaranteed_slabs:,} "
            f"slabs of {_gb(made.slab_bytes)}, the shared memory for KV has {made.num_slabs:,}. "
            "Set context_length to what requests need, or raise kv_bytes."
        )
    short = [each.tier.name for each in made.tiers if each.tier.footprint and each.num_kv_tokens < made.context_tokens]
    return (
        f"The ladder does not fit {made.device}: after the weights {_gb(made.kv_bytes)} are left for KV, "
        f"too little for one request of {made.context_tokens:,} tokens on {', '.join(short)}."
    )


def _as_json(made: CapacityPlan) -> dict[str, object]:
    return {
        "device": made.device,
        "fits": made.fits,
        "memory_bytes": made.memory_bytes,
        "reserve_bytes": made.reserve_bytes,
        "weight_bytes": made.weight_bytes,
        "kv_bytes": made.kv_bytes,
        "shortfall_bytes": made.shortfall_bytes,
        "context_tokens": made.context_tokens,
        "concurrency": made.concurrency,
        "is_shared": made.is_shared,
        "slab_bytes": made.slab_bytes,
        "num_slabs": made.num_slabs,
        "guaranteed_slabs": made.guaranteed_slabs,
        "tiers": [
            {
                "name": each.tier.name,
                "model": each.tier.model,
                "share": each.share,
                "num_params": each.tier.footprint.num_params if each.tier.footprint else None,
                "weight_bytes": each.weight_bytes,
                "kv_bytes_per_token": each.tier.kv_bytes_per_token,
                "kv_bytes": each.kv_bytes,
                "num_kv_tokens": each.num_kv_tokens,
                "concurrency": each.concurrency,
                "guaranteed_slabs": each.guaranteed_slabs,
                "engine_of": each.engine_of,
            }
            for each in made.tiers
        ],
    }


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
