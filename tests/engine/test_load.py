"""Checkpoints that load, and every way they may be broken: each a typed error that names the file and the tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import ModelConfig
from engine.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    LoadError,
    OutOfMemoryPlan,
    TensorMismatch,
    UnsupportedModel,
    UnsupportedQuantization,
)
from engine.load.model import load_model, refuse_unless_fits
from engine.load.source import load_config, resolve_checkpoint
from engine.load.tensors import TensorFiles
from tests.engine.checkpoints import make_reference, save_quantized, save_reference
from tests.engine.test_model import run_whole

TOKENS = [3, 100, 50, 7]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference(make_reference(seed=8), tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder: Path, **changes: Any) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    raw.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
    return folder


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_shards_equal_the_single_file(saved: Path, tmp_path: Path) -> None:
    save_reference(make_reference(seed=8), tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert torch.equal(run_whole(load_model(tmp_path), TOKENS), run_whole(load_model(saved), TOKENS))


def test_half_precision_files_equal_their_widened_weights(tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        reference, narrowed = make_reference(seed=8), make_reference(seed=8).to(dtype)
        model = load_model(save_reference(narrowed, tmp_path / str(dtype)))
        reference.load_state_dict(narrowed.state_dict())
        with torch.no_grad():
            expected = reference(torch.tensor([TOKENS])).logits[0]
        assert torch.allclose(run_whole(model, TOKENS), expected, atol=1e-4)


def test_progress_rises_to_one(saved: Path) -> None:
    seen: list[float] = []
    load_model(saved, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert len(seen) == 4


def test_weight_bytes_count_each_tensor_once(tmp_path: Path) -> None:
    reference = make_reference(tie_word_embeddings=True)
    model = load_model(save_reference(reference, tmp_path))
    norms = sum(p.numel() for n, p in reference.named_parameters() if "norm" in n)
    assert model.weight_bytes == 4 * (sum(p.numel() for p in reference.parameters()) - norms)


def test_old_and_new_rope_spellings_agree(folder: Path) -> None:
    new = load_config(
        edit_config(folder, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}, rope_theta=...)
    )
    old = load_config(
        edit_config(folder, rope_parameters=..., rope_theta=5e4, rope_scaling={"type": "linear", "factor": 2.0})
    )
    assert new.rope == old.rope
    assert new.rope.theta == 5e4


def test_several_end_tokens_are_read(folder: Path) -> None:
    assert load_config(edit_config(folder, eos_token_id=[5, 9])).eos_token_ids == (5, 9)
    assert load_config(edit_config(folder, eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_unsupported_configs_are_refused_by_name(folder: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named.replace("(", r"\(")) as caught:
        load_config(edit_config(folder, **changes))
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "fp8"}, "fp8"),
        ({}, "unstated"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, "bits is 8"),
        ({"quant_method": "awq", "bits": 3, "group_size": 32}, "bits is 3"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "all"}, "group_size is 'all'"),
    ],
)
def test_unsupported_quantisation_is_refused_by_name(folder: Path, quantization: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedQuantization, match=named) as caught:
        load_config(edit_config(folder, quantization_config=quantization))
    assert caught.value.method == quantization.get("quant_method", "unstated")


@pytest.mark.parametrize(
    ("group_size", "error", "named"),
    [(None, UnsupportedQuantization, "no 4-bit"), (32, UnsupportedQuantization, "32"), (128, LoadError, "Hopper")],
)
def test_8_bit_activations_are_refused_where_nothing_would_take_them(
    folder: Path, group_size: int | None, error: type[LoadError], named: str
) -> None:
    quant = {"quant_method": "awq", "bits": 4, "group_size": group_size}
    edit_config(folder, quantization_config=... if group_size is None else quant)
    with pytest.raises(error, match=named):
        load_model(folder, activations="fp8", load_format="dummy")


def test_a_name_that_is_nowhere(tmp_path: Path) -> None:
    for source in (tmp_path / "absent", "./absent", "absent", "a/b/c"):
        with pytest.raises(CheckpointNotFound, match="no such folder"):
            resolve_checkpoint(source)
    with pytest.raises(CheckpointNotFound, match=r"no config\.json"):
        resolve_checkpoint(tmp_path)
    file = tmp_path / "weights"
    file.write_bytes(b"")
    with pytest.raises(CheckpointNotFound, match="is a file"):
        resolve_checkpoint(file)


def test_a_hub_id_without_network_comes_from_the_cache(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real cache folder in the hub's own layout, and the hub client switched offline."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointNotFound, match="acme/tiny") as caught:
        resolve_checkpoint("acme/tiny")
    assert "network" in str(caught.value)
    repo, commit = cache / "models--acme--tiny", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(saved, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    assert load_model("acme/tiny").config == load_model(saved).config


def test_a_missing_folder_is_not_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``models/tiny`` is more likely a folder that is not there than somebody's repository (security review L10)."""
    import huggingface_hub

    asked: list[tuple[str, object]] = []

    def record(name: str, *, revision: object = None, **_: object) -> str:
        asked.append((name, revision))
        raise OSError("no network in tests")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", record)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(CheckpointNotFound, match="two ways") as caught:
        resolve_checkpoint("models/tiny")
    assert str(tmp_path / "models") in str(caught.value)
    assert "'models/tiny@main'" in str(caught.value)
    assert asked == []
    for source, wanted in (("models/tiny@v1.0", ("models/tiny", "v1.0")), ("acme/tiny", ("acme/tiny", None))):
        with pytest.raises(CheckpointNotFound, match="could not be fetched"):
            resolve_checkpoint(source)
        assert asked[0] == wanted
        asked.clear()
    for source in ("acme/tiny@", "acme/ti ny", "acme/tiny@a@b"):
        with pytest.raises(CheckpointNotFound, match="no such folder"):
            resolve_checkpoint(source)
    assert asked == []


def test_a_pinned_revision_is_the_one_that_is_read(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repo, commit = cache / "models--acme--tiny", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(saved, repo / "snapshots" / commit)
    assert resolve_checkpoint(f"acme/tiny@{commit}") == repo / "snapshots" / commit
    with pytest.raises(CheckpointNotFound, match="at revision 'other'"):
        resolve_checkpoint("acme/tiny@other")


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointNotFound, match=r"pytorch_model\.bin"):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 5_000, -1])
def test_truncated_weights(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors") as caught:
        load_model(folder)
    assert caught.value.path == str(path)


def test_damaged_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:40] = b"\xff" * 32
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors"):
        load_model(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\ud800", "[" * 100_000])
def test_damaged_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointCorrupt, match=r"config\.json"):
        load_model(folder)


def test_missing_tensor(folder: Path) -> None:
    with pytest.raises(TensorMismatch, match="is missing") as caught:
        load_model(edit_tensors(folder, lambda tensors: tensors.pop(UP)))
    assert caught.value.tensor == UP


def test_unexpected_tensor(folder: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)  # harmless: follows from the config

    with pytest.raises(TensorMismatch, match=r"layers\.9") as caught:
        load_model(edit_tensors(folder, add))
    assert "inv_freq" not in str(caught.value)


def test_misshapen_tensor(folder: Path) -> None:
    with pytest.raises(TensorMismatch, match=r"\(96, 160\); config.json makes it \(160, 96\)") as caught:
        load_model(edit_tensors(folder, lambda tensors: tensors.update({UP: torch.zeros(96, 160)})))
    assert caught.value.tensor == UP


def test_integer_tensor_under_a_dense_name(folder: Path) -> None:
    with pytest.raises(TensorMismatch, match="int32"):
        load_model(edit_tensors(folder, lambda tensors: tensors.update({UP: torch.zeros(160, 96, dtype=torch.int32)})))


def test_broken_shards(tmp_path: Path) -> None:
    folder = save_reference(make_reference(seed=8), tmp_path / "s", max_shard_size="200KB")
    index = folder / "model.safetensors.index.json"
    shards = sorted(folder.glob("model-*.safetensors"))
    shards[1].rename(shards[1].with_suffix(".gone"))
    with pytest.raises(CheckpointNotFound, match=shards[1].name):
        load_model(folder)
    shards[1].with_suffix(".gone").rename(shards[1])
    whole = json.loads(index.read_text())
    for weight_map in (None, [], {"a": 1}, {"a": "../secret.safetensors"}):
        index.write_text(json.dumps({**whole, "weight_map": weight_map}))
        with pytest.raises(CheckpointCorrupt, match=r"index\.json"):
            load_model(folder)
    moved = {**whole["weight_map"], UP: shards[0].name, "model.norm.weight": shards[0].name}
    index.write_text(json.dumps({**whole, "weight_map": moved}))
    with pytest.raises(TensorMismatch, match="is missing"):
        load_model(folder)


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_broken_quantised_tensors(method: Any, suffix: str, tmp_path: Path) -> None:
    save_quantized(make_reference(seed=8), tmp_path, method, symmetric=False)
    name = f"model.layers.1.mlp.up_proj.{suffix}"
    whole = load_file(tmp_path / "model.safetensors")
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: whole[name][:-1].clone()}))
    with pytest.raises(TensorMismatch, match=name):
        load_model(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(TensorMismatch, match=r"up_proj"):
        load_model(tmp_path)


def test_group_indices_that_are_no_grouping(tmp_path: Path) -> None:
    save_quantized(make_reference(seed=8), tmp_path, "gptq", desc_act=True)
    name = "model.layers.0.mlp.down_proj.g_idx"
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: torch.zeros(160, dtype=torch.int32)}))
    with pytest.raises(TensorMismatch, match="g_idx"):
        load_model(tmp_path)


def test_lost_biases_are_not_dropped_silently(tmp_path: Path) -> None:
    save_quantized(make_reference(seed=8), tmp_path, "gptq")
    zero = {f"model.layers.{i}.self_attn.q_proj.bias": torch.zeros(96) for i in range(3)}
    load_model(edit_tensors(tmp_path, lambda tensors: tensors.update(zero)))
    real = {name: torch.ones(96) for name in zero}
    with pytest.raises(TensorMismatch, match=r"q_proj\.bias is not zero"):
        load_model(edit_tensors(tmp_path, lambda tensors: tensors.update(real)))


def test_devices_and_dtypes_that_are_not_there(saved: Path) -> None:
    with pytest.raises(UnsupportedModel, match="int3"):
        load_model(saved, dtype="int3")
    with pytest.raises(LoadError, match="toaster"):
        load_model(saved, device="toaster")
    with pytest.raises(LoadError, match="CUDA devices"):
        load_model(saved, device="cuda:99")


def test_weights_larger_than_the_device_are_refused_with_the_arithmetic(saved: Path) -> None:
    files = TensorFiles(saved)
    refuse_unless_fits(saved, files.num_bytes, files.num_bytes)
    with pytest.raises(OutOfMemoryPlan, match=f"{files.num_bytes:,} bytes .* 7 too few") as caught:
        refuse_unless_fits(saved, files.num_bytes, files.num_bytes - 7)
    assert caught.value.free_bytes == files.num_bytes - 7


def test_config_sizes_are_derived(saved: Path) -> None:
    config: ModelConfig = load_config(saved)
    assert (config.q_size, config.kv_size, config.head_dim) == (96, 32, 16)
    assert config.windows == (None, None, None)
