"""A built-in model written as GGUF is the same model, by a reader that is not ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backends.builtin.paths import model_dir

pytest.importorskip("gguf", reason="the export needs the package gguf: pip install gguf")


@pytest.mark.parametrize(("weight_type", "tolerance"), [("f32", 1e-5), ("f16", 0.01), ("q8_0", 0.1)])
def test_transformers_reads_the_same_logits(tmp_path: Path, weight_type: str, tolerance: float) -> None:
    from transformers import AutoModelForCausalLM

    from backends.builtin.gguf_export import export_gguf
    from backends.builtin.reference import load_reference

    export_gguf(model_dir(1), tmp_path / "tier1.gguf", weight_type)  # type: ignore[arg-type]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tier1.gguf", dtype=torch.float32)
    token_ids = torch.arange(5, 45)[None]
    with torch.inference_mode():
        found = exported.eval()(token_ids).logits
        expected = load_reference(model_dir(1))(token_ids).logits
    # Relative root mean square: what rounding the weights to eleven, or to eight, bits leaves of the logits.
    error = float((found - expected).square().mean().sqrt() / expected.std())
    assert error < tolerance
