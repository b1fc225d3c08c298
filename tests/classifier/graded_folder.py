"""Folders of graded prompts as ``suffice evaluate`` reads them, made up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet

HARD, EASY = ("integral", "theorem", "lemma", "topology"), ("hello", "weather", "colour", "name")


def folder_of(
    path: Path,
    seed: int,
    *,
    num_prompts: int = 240,
    benchmark: str = "made",
    learnable: bool = True,
    middle: bool = False,
) -> Path:
    """Prompts whose words tell whether the weak model is right; or do not."""
    rng = np.random.default_rng(seed)
    prompts, scores = [], []
    for number in range(num_prompts):
        hard = bool(rng.random() < 0.5)
        words = HARD if (hard if learnable else rng.random() < 0.5) else EASY
        text = " ".join(rng.choice(words, 6)) + f" case {rng.integers(50)}"
        name = f"{benchmark}/{seed}-{number}"
        prompts.append(
            {
                "prompt_id": name,
                "benchmark": benchmark,
                "domain": "d",
                "prompt": text,
                "group_id": name,
                "fold": number % 3,
            }
        )
        scores.append({"prompt_id": name, "model": "weak", "score": float(rng.random() < (0.2 if hard else 0.95))})
        scores.append({"prompt_id": name, "model": "strong", "score": float(rng.random() < 0.95)})
        if middle:
            scores.append({"prompt_id": name, "model": "middle", "score": float(rng.random() < 0.7)})
    path.mkdir()
    parquet.write_table(arrow.Table.from_pylist(prompts), path / "prompts.parquet")
    parquet.write_table(arrow.Table.from_pylist(scores), path / "scores.parquet")
    return path
