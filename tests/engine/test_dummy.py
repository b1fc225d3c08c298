"""Random weights must be what a file of the same format would have held: names, shapes, and states that stay finite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.errors import LoadError
from engine.load.dummy import DummyTensors
from engine.load.model import dummy_model, load_model
from engine.load.source import load_config
from engine.load.tensors import TensorFiles
from tests.engine.checkpoints import make_reference, save_quantized, save_reference
from tests.engine.test_model import run_whole

FORMATS = ["dense", "awq", "gptq"]
TOKENS = [5, 9, 17, 80, 3]


@pytest.fixture(params=FORMATS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    reference = make_reference(seed=2)
    if request.param == "dense":
        return save_reference(reference, tmp_path)
    save_quantized(reference, tmp_path, method=request.param)
    return tmp_path


def test_it_holds_the_names_that_a_file_of_the_format_holds(folder: Path) -> None:
    files, dummy = TensorFiles(folder), DummyTensors(load_config(folder), device=torch.device("cpu"))
    for name in files.names():
        if not name.endswith(("g_idx", "bias")):
            assert name in dummy, name
            stored = files.take(name)
            drawn = dummy.take(name, tuple(stored.shape))
            assert drawn.shape == stored.shape
            assert drawn.dtype.is_floating_point == stored.dtype.is_floating_point


def test_the_model_needs_only_a_config_and_stays_finite(folder: Path, tmp_path: Path) -> None:
    real = load_model(folder)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(LoadError):
        load_model(bare)
    model = load_model(bare, load_format="dummy")
    assert model.config == real.config
    assert model.weight_bytes == real.weight_bytes
    out = run_whole(model, TOKENS)
    assert out.isfinite().all()
    assert out.std() > 0


def test_the_seed_decides_the_weights(folder: Path) -> None:
    config = load_config(folder)
    first, again, other = (run_whole(dummy_model(config, seed=seed), TOKENS) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_layers_left_out_of_quantisation_are_dense(tmp_path: Path) -> None:
    save_quantized(make_reference(seed=2), tmp_path, method="awq")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"]["modules_to_not_convert"] = ["down_proj"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    dummy = DummyTensors(load_config(tmp_path), device=torch.device("cpu"))
    assert "model.layers.0.mlp.down_proj.weight" in dummy
    assert "model.layers.0.mlp.down_proj.qweight" not in dummy
    assert "model.layers.0.mlp.up_proj.qweight" in dummy


def test_zero_codes_are_zero_weights_and_everything_else_is_small(tmp_path: Path) -> None:
    save_quantized(make_reference(seed=2), tmp_path, method="awq")
    model = dummy_model(load_config(tmp_path), codes="zero")
    layer = model.layers[0]
    assert not layer.o(torch.randn(3, layer.o.in_features)).any()
    for values in (model.embedding, layer.input_norm.weight):
        assert 0 < values.abs().max() <= 1e-3
