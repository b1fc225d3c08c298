"""Damaged checkpoints: each is refused at start with its path and what is wrong, never with a traceback of ours."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.builtin.paths import model_dir
from backends.errors import ModelLoadError
from backends.weights import LoadOptions, WeightPool, load_checkpoint


def edit(name: str, **changes: Any) -> Callable[[Path], None]:
    """Damage that changes keys of a JSON file."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def garble(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text('{"broken"') and None


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
    "half the weights": (cut_weights, "not a whole safetensors file"),
    "garbled weights": (garble_weights, "not a whole safetensors file"),
    "garbled config": (garble("config.json"), "not readable as JSON"),
    "garbled tokenizer": (garble("tokenizer.json"), "tokenizer.json"),
    "garbled generation config": (garble("generation_config.json"), "generation_config.json"),
    "unknown quantisation": (edit("config.json", quantization_config={"quant_method": "magic"}), "magic"),
    "unknown architecture": (edit("config.json", architectures=["FooForCausalLM"]), "FooForCausalLM"),
    "misshapen": (edit("config.json", vocab_size=999_999), "embed_tokens"),
    "missing layers": (edit("config.json", num_hidden_layers=99), "is missing"),
    "no heads": (edit("config.json", num_attention_heads=0), "num_attention_heads"),
    "broken template": (edit("tokenizer_config.json", chat_template="{% for m in messages %}{{ m"), "not valid Jinja"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(name: str, tmp_path: Path) -> None:
    damage, expected = DAMAGES[name]
    folder = tmp_path / "model"
    shutil.copytree(model_dir(1), folder)
    damage(folder)
    with pytest.raises(ModelLoadError, match=expected) as refused:
        load_checkpoint(LoadOptions(path=str(folder), dtype="float32", device="cpu"))
    assert str(folder) in str(refused.value)


def test_an_absent_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such folder"):
        load_checkpoint(LoadOptions(path=str(tmp_path / "absent"), dtype="float32", device="cpu"))


def test_the_way_of_computing_is_part_of_what_is_shared() -> None:
    pool = WeightPool()
    plain = LoadOptions(path="builtin:tier1", dtype="auto", device="cpu")
    fast, exact = pool.acquire(plain), pool.acquire(replace(plain, cpu_compute="exact"))
    assert pool.acquire(replace(plain)) is fast
    assert exact is not fast
    assert exact.model.layers[0].down.weight_bytes < fast.model.layers[0].down.weight_bytes


def test_the_last_use_ends_the_shared_thread_whatever_failed_to_load(tmp_path: Path) -> None:
    pool = WeightPool()
    options = LoadOptions(path="builtin:tier1", dtype="auto", device="cpu")
    held = [pool.acquire(options), pool.acquire(options)]
    loop = pool.loop_for("cpu", 1)
    assert loop is not None
    assert pool.loop_for("cpu", 4) is loop
    with pytest.raises(ModelLoadError):
        pool.acquire(LoadOptions(path=str(tmp_path / "absent"), dtype="auto", device="cpu"))
    pool.release(held[0])
    assert pool.loop_for("cpu", 1) is loop
    pool.release(held[1])
    after = pool.loop_for("cpu", 1)
    assert after is not loop
    assert after is not None
    after.close()


def test_dummy_weights_need_no_weight_file(tmp_path: Path) -> None:
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ):
        if (model_dir(1) / name).exists():
            shutil.copy(model_dir(1) / name, tmp_path)
    checkpoint = load_checkpoint(LoadOptions(path=str(tmp_path), dtype="auto", device="cpu", load_format="dummy"))
    real = load_checkpoint(LoadOptions(path="builtin:tier1", dtype="auto", device="cpu"))
    assert checkpoint.model.weight_bytes == real.model.weight_bytes
