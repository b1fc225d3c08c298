"""Puts a checkpoint's tensors together as a :class:`DecoderModel`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from engine.config import ModelConfig, QuantConfig
from engine.errors import LoadError, OutOfMemoryPlan, TensorMismatch, UnsupportedModel, UnsupportedQuantization
from engine.kernels.int4 import UNIT
from engine.kv_cache import DTYPES
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.quant import QuantWeight
from engine.load.awq import read_awq
from engine.load.dummy import Codes, DummyTensors
from engine.load.gptq import read_gptq
from engine.load.linear import Activations, CpuCompute, LinearFactory, LinearPart
from engine.load.source import load_config, resolve_checkpoint
from engine.load.tensors import TensorFiles, TensorSource
from engine.models.decoder import DecoderLayer, DecoderModel

ProgressFn = Callable[[float], None]
LoadFormat = Literal["auto", "dummy"]


def load_model(
    source: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    cpu_compute: CpuCompute = "auto",
    activations: Activations = "auto",
    load_format: LoadFormat = "auto",
    progress: ProgressFn | None = None,
) -> DecoderModel:
    """Load a Hugging Face checkpoint.

    Parameters
    ----------
    source : a folder or a hub id
    dtype : of activations, dense weights and KV; "auto" is float32 on a CPU and the checkpoint's own elsewhere (float16
        checkpoints compute in bfloat16, whose range they cannot leave)
    device : where weights live
    cpu_compute, activations : see :class:`engine.load.linear.LinearFactory`
    load_format : "auto" reads the safetensors files; "dummy" needs ``config.json`` alone and draws random weights
    progress : called with the share done, 0 to 1, after each layer

    Raises
    ------
    engine.errors.LoadError
        One of its kinds, naming the file and, where there is one, the tensor.
    """
    folder = resolve_checkpoint(source)
    config = load_config(folder)
    target = choose_device(device)
    chosen = choose_dtype(dtype, config, target)
    factory = LinearFactory(chosen, target, cpu_compute, activations)
    if activations == "fp8":
        refuse_unless_fp8(config, chosen, target)
    if load_format == "dummy":
        return assemble(DummyTensors(config, device=target, folder=folder), config, factory, progress)
    files = TensorFiles(folder, target)
    if target.type == "cuda":
        refuse_unless_fits(folder, files.num_bytes, torch.cuda.mem_get_info(target)[0])
    return assemble(files, config, factory, progress)


def dummy_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    activations: Activations = "auto",
    seed: int = 0,
    residual_scale: float = 1.0,
    codes: Codes = "random",
    progress: ProgressFn | None = None,
) -> DecoderModel:
    """Make a model of this shape and format with random weights; no files. See :func:`load_model`."""
    target = choose_device(device)
    source = DummyTensors(config, device=target, seed=seed, residual_scale=residual_scale, codes=codes)
    chosen = choose_dtype(dtype, config, target)
    if activations == "fp8":
        refuse_unless_fp8(config, chosen, target)
    return assemble(source, config, LinearFactory(chosen, target, activations=activations), progress)


def assemble(
    source: TensorSource, config: ModelConfig, factory: LinearFactory, progress: ProgressFn | None = None
) -> DecoderModel:
    """Put a model together from wherever its tensors come from."""
    with torch.inference_mode():
        return Assembler(source, config, factory).assemble(progress or (lambda share: None))


def refuse_unless_fp8(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse ``activations = "fp8"`` where no product would take them.

    Raises
    ------
    LoadError, UnsupportedQuantization
    """
    quant = config.quant
    if quant is None or (quant.group_size > 0 and quant.group_size % UNIT):
        held = "no 4-bit weights" if quant is None else f"4-bit weights in groups of {quant.group_size} inputs"
        raise UnsupportedQuantization(
            f"activations is 'fp8', but the model has {held}; the kernels take groups of a multiple of {UNIT} inputs. "
            "Leave it at 'auto'.",
            method="none" if quant is None else quant.method,
        )
    if device.type != "cuda" or dtype == torch.float32 or torch.cuda.get_device_capability(device)[0] != 9:
        raise LoadError(
            f"activations is 'fp8', but the model computes in {str(dtype).removeprefix('torch.')} on {device}; "
            "expected a half type on a GPU of compute capability 9.0 (Hopper). Leave it at 'auto' here."
        )


def refuse_unless_fits(folder: Path, needed_bytes: int, free_bytes: int) -> None:
    """Refuse a checkpoint whose files alone are larger than what a device has free.

    Raises
    ------
    OutOfMemoryPlan
    """
    if needed_bytes > free_bytes:
        raise OutOfMemoryPlan(
            f"{folder}: the weights take {needed_bytes:,} bytes and the device has {free_bytes:,} free, "
            f"{needed_bytes - free_bytes:,} too few. Take a smaller or a quantised checkpoint, or free memory.",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
            path=folder,
        )


def choose_device(device: torch.device | str) -> torch.device:
    """Return the device that a name stands for; a :class:`LoadError` if it is not here."""
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise LoadError(f"device is {device!r}; expected 'cpu', 'cuda' or 'cuda:N'.") from error
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise LoadError(f"device is {device!r}, but PyTorch sees {torch.cuda.device_count()} CUDA devices here.")
    return target


def choose_dtype(dtype: torch.dtype | str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype that an option (see :func:`load_model`) means for this model on this device."""
    if isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")
    else:
        name = dtype
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        name = "float32" if config.dtype == "float32" and config.quant is None else "bfloat16"
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype is {name!r}; expected 'auto' or one of {', '.join(DTYPES)}.")
    return DTYPES[name]


class Assembler:
    """Takes tensors by their Hugging Face names and builds layers; one use.

    ``config`` is what the files hold; a subclass may build another model of them (:mod:`engine.parallel.shard_loader`).
    """

    def __init__(self, files: TensorSource, config: ModelConfig, factory: LinearFactory) -> None:
        self.files = files
        self.config = config
        self.factory = factory

    @property
    def built_config(self) -> ModelConfig:
        """Return the config of the model that is built."""
        return self.config

    def assemble(self, report: ProgressFn) -> DecoderModel:
        config, factory = self.config, self.factory
        stored = self.files.take_float("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        embedding = stored.to(device=factory.device, dtype=factory.dtype)
        layers: list[DecoderLayer] = []
        for index in range(config.num_layers):
            layers.append(self._layer(index))
            report((index + 1) / (config.num_layers + 1))
        model = DecoderModel(
            self.built_config,
            embedding=embedding,
            layers=layers,
            norm=self._norm("model.norm", config.hidden_size),
            lm_head=self.head(embedding),
            dtype=factory.dtype,
            device=factory.device,
        )
        self.files.finish()
        report(1.0)
        return model

    def head(self, embedding: Tensor) -> Linear:
        """Build the layer from hidden states to scores over the vocabulary."""
        config = self.config
        if config.tie_embeddings:
            # Some exporters write the tied head a second time; the embedding is the truth.
            self.files.ignore(["lm_head.weight"])
            return self.build("lm_head", [LinearPart(embedding, None)])
        return self._linear("", [("lm_head", config.vocab_size)], config.hidden_size, bias=False)

    def build(self, last_name: str, parts: list[LinearPart]) -> Linear:
        """Make one layer of projections that read the same input; ``last_name`` is the last one's."""
        return self.factory.build(parts)

    def build_gated(self, gate: LinearPart, up: LinearPart) -> Linear:
        """Make the layer that computes ``silu(gate) * up``."""
        return self.factory.build_gated(gate, up)

    def _layer(self, index: int) -> DecoderLayer:
        config = self.config
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv = [("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size)]
        return DecoderLayer(
            input_norm=self._norm(f"{prefix}input_layernorm", hidden),
            qkv=self._linear(attention, qkv, hidden, bias=config.qkv_bias),
            o=self._linear(attention, [("o_proj", hidden)], config.q_size, bias=config.o_bias),
            post_norm=self._norm(f"{prefix}post_attention_layernorm", hidden),
            gated=self.build_gated(
                *(self._part(f"{mlp}{name}", hidden, inner, config.mlp_bias) for name in ("gate_proj", "up_proj"))
            ),
            down=self._linear(mlp, [("down_proj", hidden)], inner, bias=config.mlp_bias),
            q_norm=self._norm(f"{attention}q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=self._norm(f"{attention}k_norm", config.head_dim) if config.qk_norm else None,
            window=config.windows[index],
        )

    def _norm(self, name: str, size: int) -> RMSNorm:
        weight = self.files.take_float(f"{name}.weight", (size,))
        return RMSNorm(weight.to(device=self.factory.device, dtype=self.factory.dtype), self.config.rms_norm_eps)

    def _linear(self, prefix: str, outputs: list[tuple[str, int]], in_features: int, *, bias: bool) -> Linear:
        parts = [self._part(f"{prefix}{name}", in_features, out, bias) for name, out in outputs]
        return self.build(outputs[-1][0], parts)

    def _part(self, name: str, in_features: int, out_features: int, bias: bool) -> LinearPart:
        quant = self.config.quant
        weight: Tensor | QuantWeight
        if quant is not None and f"{name}.qweight" in self.files:
            weight = self._quantized(name, in_features, out_features, quant)
        else:
            weight = self.files.take_float(f"{name}.weight", (out_features, in_features))
        return LinearPart(weight, self._bias(name, out_features, bias))

    def _quantized(self, name: str, in_features: int, out_features: int, quant: QuantConfig) -> QuantWeight:
        read = read_awq if quant.method == "awq" else read_gptq
        return read(self.files, name, in_features, out_features, quant)

    def _bias(self, name: str, out_features: int, bias: bool) -> Tensor | None:
        key = f"{name}.bias"
        if bias:
            return self.files.take_float(key, (out_features,))
        if self.config.quant is not None and key in self.files and self.files.take(key).any():
            # GPTQ exporters write zero biases for layers that have none; others would be lost.
            raise TensorMismatch(f"{self.files.folder}: {key} is not zero; config.json says there is none.", tensor=key)
        return None
