"""What the tests of this folder serve: small checkpoints of each kind, and the same few requests."""

from __future__ import annotations

from pathlib import Path

from tests.engine.checkpoints import make_reference, save_quantized, save_reference

PROMPTS = [[3, 100, 50, 7], list(range(5, 45)), [9] * 3]


def write_checkpoint(kind: str, folder: Path) -> Path:
    """Of an architecture, or ``awq``, ``gptq``, ``tied``, ``biased``."""
    if kind in ("awq", "gptq"):
        save_quantized(make_reference(seed=4), folder, kind, group_size=16)  # type: ignore[arg-type]
        return folder
    if kind == "tied":
        return save_reference(make_reference(seed=4, tie_word_embeddings=True), folder)
    if kind == "biased":
        return save_reference(make_reference(seed=4, attention_bias=True, mlp_bias=True), folder)
    return save_reference(make_reference(kind, seed=4), folder)
