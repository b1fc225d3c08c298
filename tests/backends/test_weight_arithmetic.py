"""Packed weights, byte by byte in numpy, and the memory that a model's shape is said to take."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from backends.builtin.paths import model_dir
from backends.builtin.quantize import Layout, fake_quantize, pack, unpack
from backends.builtin.reference import dequantized_state
from backends.errors import ModelLoadError
from backends.footprint import BYTES_PER_VALUE, footprint, read_shape, shape_of
from backends.local_engine.slab_plan import slabs_for, slabs_in
from backends.weights import LoadOptions, load_checkpoint

Array = npt.NDArray[Any]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

# --- layouts ---------------------------------------------------------------------------------------------------------


def nibbles(words: Array) -> Array:
    """int32 (..., n) → whole numbers (..., n, 8), lowest bits first."""
    return (words.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15


def unpack_gptq(qweight: Array, qzeros: Array, scales: Array, g_idx: Array) -> Array:
    """Read GPTQ's layout as its paper's code writes it: (in, out) float32."""
    levels = nibbles(qweight).transpose(0, 2, 1).reshape(-1, qweight.shape[1]).astype(np.int64)
    zeros = nibbles(qzeros).reshape(qzeros.shape[0], -1).astype(np.int64) + 1
    return (levels - zeros[g_idx]) * scales.astype(np.float32)[g_idx]


def unpack_awq(qweight: Array, qzeros: Array, scales: Array) -> Array:
    """Read AWQ's "GEMM" layout: (in, out) float32."""

    def columns(words: Array) -> Array:
        return nibbles(words)[..., np.argsort(AWQ_ORDER)].reshape(words.shape[0], -1).astype(np.int64)

    levels, zeros = columns(qweight), columns(qzeros)
    group = np.arange(levels.shape[0]) // (levels.shape[0] // scales.shape[0])
    return (levels - zeros[group]) * scales.astype(np.float32)[group]


def read_packed(packed: dict[str, Array]) -> Array:
    """Return the weight (out, in) of either layout."""
    read = unpack_gptq(**packed) if "g_idx" in packed else unpack_awq(**packed)
    return np.ascontiguousarray(read.T)


@given(st.integers(0, 2**31), st.sampled_from(["gptq", "awq"]), st.sampled_from([32, 64]), st.sampled_from([8, 40]))
def test_numpy_reads_what_was_packed(seed: int, layout: Layout, group_size: int, num_out: int) -> None:
    weight = torch.randn(num_out, 128, generator=torch.Generator().manual_seed(seed)) * 0.1
    packed = pack(weight, group_size, layout)
    read = read_packed({name: tensor.numpy() for name, tensor in packed.items()})
    assert np.array_equal(read, unpack(packed, layout).numpy())
    assert np.array_equal(read, fake_quantize(weight, group_size, layout).numpy())


@given(st.lists(st.integers(0, 15), min_size=64, max_size=64), st.integers(1, 15))
def test_levels_that_lie_on_the_grid_are_kept_exactly(levels: list[int], zero: int) -> None:
    """Weights that need no rounding, spanning the whole grid, come back to the bit."""
    levels[:2] = [0, 15]
    weight = (np.array([levels], np.float32) - zero) * np.float32(0.25)
    read = read_packed(
        {name: each.numpy() for name, each in pack(torch.from_numpy(weight).repeat(8, 1), 64, "awq").items()}
    )
    assert np.array_equal(read, np.repeat(weight, 8, axis=0))


@pytest.mark.parametrize("tier", [1, 2, 3])
def test_the_shipped_weights_read_the_same_in_numpy(tier: int) -> None:
    tensors = load_file(str(model_dir(tier) / "model.safetensors"))
    state = dequantized_state(model_dir(tier))
    stems = {name.rpartition(".")[0] for name in tensors if name.endswith(".qweight")}
    assert len(stems) == 7 * json.loads((model_dir(tier) / "config.json").read_text())["num_hidden_layers"]
    for stem in stems:
        packed = {name.rpartition(".")[2]: each for name, each in tensors.items() if name.startswith(f"{stem}.")}
        read = read_packed(packed)
        assert np.array_equal(read, state[f"{stem}.weight"].numpy())
        assert np.isfinite(read).all()
        assert read.std() > 0
    plain = {name for name in tensors if name.rpartition(".")[0] not in stems}
    assert all(np.array_equal(tensors[name].astype(np.float32), state[name].numpy()) for name in plain)


# --- memory ----------------------------------------------------------------------------------------------------------

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "torch_dtype": "float16",
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_parameters_are_those_of_transformers(is_tied: bool, num_kv_heads: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    raw = {**LLAMA, "tie_word_embeddings": is_tied, "num_key_value_heads": num_kv_heads}
    theirs = LlamaForCausalLM(LlamaConfig(**raw))
    found = footprint(shape_of(raw, "config.json"))
    assert found.num_params == sum(parameter.numel() for parameter in theirs.parameters())
    assert found.weight_bytes == 2 * found.num_params
    # A key and a value for each KV head of each layer, 16 bits a number.
    assert found.kv_bytes_per_token == 2 * 3 * num_kv_heads * 16 * 2
    assert found.context_length == 256


@pytest.mark.parametrize("dtype", [*BYTES_PER_VALUE, "auto"])
def test_a_wider_type_takes_so_much_more(dtype: str) -> None:
    found, half = (footprint(shape_of(LLAMA, "x"), name) for name in (dtype, "float16"))
    factor = BYTES_PER_VALUE.get(dtype, 2) // 2
    assert found.weight_bytes == factor * half.weight_bytes
    assert found.kv_bytes_per_token == factor * half.kv_bytes_per_token


@pytest.mark.parametrize("tier", [1, 2, 3])
def test_packed_weights_take_what_their_file_does(tier: int) -> None:
    """Scales and zero points included; the file adds a header and, for GPTQ, an order of inputs."""
    found = footprint(read_shape(model_dir(tier)))
    tensors = load_file(str(model_dir(tier) / "model.safetensors"))
    in_file = sum(each.nbytes for name, each in tensors.items() if not name.endswith("g_idx"))
    assert found.weight_bytes == pytest.approx(in_file, rel=0.001)
    model = load_checkpoint(
        LoadOptions(path=f"builtin:tier{tier}", dtype="auto", device="cpu", cpu_compute="int4")
    ).model
    assert model.config.context_length == found.context_length


@pytest.mark.parametrize(
    "raw",
    [
        [],
        7,
        {},
        {**LLAMA, "architectures": ["Foo"]},
        {**LLAMA, "hidden_size": "64"},
        {**LLAMA, "num_attention_heads": 0},
        {key: value for key, value in LLAMA.items() if key != "vocab_size"},
    ],
)
def test_a_shape_that_is_none_is_refused_with_its_place(raw: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"far/config\.json"):
        shape_of(raw, "far/config.json")


def test_a_folder_without_a_readable_config_is_named(tmp_path: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_shape(tmp_path)
    for text in ("{", "[" * 100_000, "\xff"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelLoadError, match=r"config\.json"):
            read_shape(tmp_path)


@given(st.integers(1, 100_000), st.integers(64, 400_000), st.integers(2**28, 2**36))
def test_slabs_hold_what_they_are_said_to_hold(num_tokens: int, kv_bytes_per_token: int, kv_bytes: int) -> None:
    slab_bytes, num_slabs = slabs_in(kv_bytes)
    assert 0 <= kv_bytes - slab_bytes * num_slabs < slab_bytes
    needed = slabs_for(num_tokens, kv_bytes_per_token, slab_bytes)
    assert needed >= 1
    assert slabs_for(num_tokens + 1, kv_bytes_per_token, slab_bytes) in (needed, needed + 1)
    if kv_bytes_per_token * 16 <= slab_bytes:
        assert needed * slab_bytes >= num_tokens * kv_bytes_per_token
