"""Runs ``transformers`` on the same weights, dequantised to float32: one after another, and as one padded batch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from engine.bench.load_pass import LoadPass
from engine.bench.workload import Job
from engine.load.dense import dense_state_dict
from engine.load.source import resolve_checkpoint


def load_peer(source: str | Path) -> Any:
    """Return a float32 transformers model with the checkpoint's dequantised weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = json.loads((resolve_checkpoint(source) / "config.json").read_text())
    raw.pop("quantization_config", None)
    for key in ("torch_dtype", "dtype"):
        raw.pop(key, None)
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    model.load_state_dict(dense_state_dict(source))
    return model


def run_one_after_another(model: Any, jobs: list[Job]) -> LoadPass:
    """Run each job alone, as ``generate`` in a loop serves them."""
    began_s = time.perf_counter()
    answers = [_generate(model, [job], job.num_output)[0] for job in jobs]
    return LoadPass(time.perf_counter() - began_s, [len(answer) for answer in answers], answers)


def run_padded_batch(model: Any, jobs: list[Job]) -> LoadPass:
    """Run all jobs as one left-padded batch until the longest answer is done; only the tokens asked for count."""
    began_s = time.perf_counter()
    rows = _generate(model, jobs, max(job.num_output for job in jobs))
    total_s = time.perf_counter() - began_s
    answers = [row[: job.num_output] for row, job in zip(rows, jobs, strict=True)]
    return LoadPass(total_s, [len(answer) for answer in answers], answers)


def _generate(model: Any, jobs: list[Job], num_output: int) -> list[list[int]]:
    width = max(len(job.prompt_ids) for job in jobs)
    padded = [[0] * (width - len(job.prompt_ids)) + list(job.prompt_ids) for job in jobs]
    mask = [[0] * (width - len(job.prompt_ids)) + [1] * len(job.prompt_ids) for job in jobs]
    with torch.inference_mode():
        out = model.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=num_output,
            min_new_tokens=num_output,
            eos_token_id=None,
            pad_token_id=0,
        )
    rows: list[list[int]] = out[:, width:].tolist()
    return rows
