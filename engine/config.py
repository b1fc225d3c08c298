"""Reads a checkpoint's ``config.json``, checked and typed; no torch.

:class:`ModelConfig` is the whole of what the decoder needs to know. Options that change the arithmetic in a way the
decoder does not compute are refused here by name, so a model either runs as its authors meant or does not load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from engine.errors import UnsupportedModel, UnsupportedQuantization

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]
QuantMethod = Literal["awq", "gptq"]

ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class Family:
    """Holds what one architecture fixes and the config does not say.

    ``qkv_bias`` and ``qk_norm`` are constants of the family; ``attention_bias`` says whether the config may switch all
    four attention biases on. ``window`` names who may slide: nobody, every layer, or the upper layers.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    window: Literal["never", "all", "upper"] = "never"


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(attention_bias=True, mlp_bias=True),
    "MistralForCausalLM": Family(window="all"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window="upper"),
    "Qwen3ForCausalLM": Family(qk_norm=True, attention_bias=True, window="upper"),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Describes the rotary position embedding: base, scaling type and its numbers (unused ones keep their defaults)."""

    theta: float = 10_000.0
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """Describes the 4-bit group quantisation of the linear layers.

    ``group_size`` is in input features; -1 in a file (one group per column) is resolved at load. ``zeros_minus_one`` is
    GPTQ's first file format, which stores each zero point less one. ``skip`` names modules left unquantised.
    """

    method: QuantMethod
    bits: int
    group_size: int
    desc_act: bool = False
    zeros_minus_one: bool = False
    skip: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Describes one decoder-only transformer.

    ``windows[i]`` is layer i's sliding window in tokens (the token itself included), None for full attention.
    ``context_length`` is how many positions the model was made for.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    tie_embeddings: bool
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    dtype: str
    quant: QuantConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], *, path: str = "config.json") -> ModelConfig:
        """Read a Hugging Face ``config.json``, as transformers 4 or 5 writes it.

        Parameters
        ----------
        raw : the parsed file
        path : where it came from, for messages

        Raises
        ------
        UnsupportedModel
            An architecture or option that the decoder does not compute, or a missing or nonsensical size.
        UnsupportedQuantization
            A ``quantization_config`` other than 4-bit AWQ (GEMM) or GPTQ.
        """
        reader = _Reader(raw, path)
        architecture, family = _family(reader)
        _refuse_foreign_arithmetic(reader)
        num_layers, num_heads = reader.size("num_hidden_layers"), reader.size("num_attention_heads")
        hidden_size = reader.size("hidden_size")
        num_kv_heads = reader.size("num_key_value_heads", default=num_heads)
        head_dim = reader.size("head_dim", default=hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise reader.refuse("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads={num_heads}")
        if head_dim % 2:
            raise reader.refuse("head_dim", head_dim, "an even number (RoPE turns pairs)")
        context_length = reader.size("max_position_embeddings", default=2048)
        attention_bias = family.attention_bias and reader.flag("attention_bias")
        return cls(
            architecture=architecture,
            vocab_size=reader.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.size("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            context_length=context_length,
            rms_norm_eps=reader.number("rms_norm_eps", default=1e-6),
            tie_embeddings=reader.flag("tie_word_embeddings"),
            rope=_rope(reader, context_length),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias,
            mlp_bias=family.mlp_bias and reader.flag("mlp_bias"),
            qk_norm=family.qk_norm,
            windows=_windows(reader, family, num_layers),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
            quant=_quant(reader),
            eos_token_ids=reader.ids("eos_token_id"),
            bos_token_id=next(iter(reader.ids("bos_token_id")), None),
        )


class _Reader:
    """Reads typed values from one JSON object; every complaint names the file, the key and the value."""

    def __init__(self, raw: Mapping[str, Any], path: str) -> None:
        self.raw = raw
        self.path = path

    def refuse(self, key: str, value: object, expected: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.path}: {key} is {value!r}; expected {expected}.", path=self.path)

    def size(self, key: str, *, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(key, value, "a positive integer")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refuse(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true or false")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.raw.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise self.refuse(key, value, "a token id or a list of token ids")
        return tuple(cast("list[int]", values))


def _family(reader: _Reader) -> tuple[str, Family]:
    names = reader.raw.get("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        if name in FAMILIES:
            return name, FAMILIES[name]
    raise reader.refuse("architectures", names, f"one of {', '.join(FAMILIES)}")


def _refuse_foreign_arithmetic(reader: _Reader) -> None:
    act = reader.raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise reader.refuse("hidden_act", act, "'silu'")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "num_experts", "num_local_experts"):
        if reader.raw.get(key):
            raise reader.refuse(key, reader.raw[key], "absent: the decoder does not compute it")


def _rope(reader: _Reader, context_length: int) -> RopeConfig:
    """Merge transformers 5's ``rope_parameters`` with the older ``rope_theta`` + ``rope_scaling``."""
    raw = reader.raw.get("rope_parameters") or reader.raw.get("rope_scaling") or {}
    if not isinstance(raw, Mapping):
        raise reader.refuse("rope_parameters", raw, "an object")
    rope = _Reader(raw, f"{reader.path}: rope_parameters")
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise rope.refuse("rope_type", rope_type, f"one of {', '.join(ROPE_TYPES)}")
    if raw.get("partial_rotary_factor", reader.raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise rope.refuse("partial_rotary_factor", raw.get("partial_rotary_factor"), "1.0: every head is turned whole")
    theta = rope.number("rope_theta", default=reader.number("rope_theta", default=10_000.0))
    if rope_type == "default":
        return RopeConfig(theta=theta)
    original = rope.size("original_max_position_embeddings", default=context_length)
    factor = rope.number("factor", default=context_length / original if rope_type == "yarn" else None)
    scaled = RopeConfig(theta=theta, rope_type=rope_type, factor=factor, original_max_positions=original)
    if rope_type == "llama3":
        return replace(
            scaled, low_freq_factor=rope.number("low_freq_factor"), high_freq_factor=rope.number("high_freq_factor")
        )
    if rope_type == "yarn":
        optional: dict[str, Any] = {
            k: rope.number(k) for k in ("attention_factor", "mscale", "mscale_all_dim") if raw.get(k)
        }
        ramp: dict[str, Any] = {k: rope.number(k) for k in ("beta_fast", "beta_slow") if raw.get(k)}
        return replace(scaled, **optional, **ramp, truncate=rope.flag("truncate", default=True))
    return scaled


def _windows(reader: _Reader, family: Family, num_layers: int) -> tuple[int | None, ...]:
    full: tuple[int | None, ...] = (None,) * num_layers
    if family.window == "never" or reader.raw.get("sliding_window") is None:
        return full
    window = reader.size("sliding_window")
    if family.window == "all":
        return (window,) * num_layers
    if not reader.flag("use_sliding_window"):
        return full
    layer_types = reader.raw.get("layer_types")
    if layer_types is None:
        first = reader.raw.get("max_window_layers", 28)
        return tuple(window if i >= first else None for i in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if len(layer_types) != num_layers or not set(layer_types) <= set(known):
        raise reader.refuse("layer_types", layer_types, f"{num_layers} of {sorted(known)}")
    return tuple(known[name] for name in layer_types)


def _quant(reader: _Reader) -> QuantConfig | None:
    raw = reader.raw.get("quantization_config")
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise reader.refuse("quantization_config", raw, "an object")
    method = str(raw.get("quant_method", "unstated")).lower()
    where = f"{reader.path}: quantization_config"

    def refuse(key: str, value: object, expected: str) -> UnsupportedQuantization:
        return UnsupportedQuantization(
            f"{where}: {key} is {value!r}; expected {expected}.", method=method, path=reader.path
        )

    if method not in ("awq", "gptq"):
        raise refuse("quant_method", method, "'awq' or 'gptq'")
    bits = raw.get("bits", raw.get("w_bit"))
    if bits != 4:
        raise refuse("bits", bits, "4")
    group_size = raw.get("group_size", raw.get("q_group_size", 128))
    if isinstance(group_size, bool) or not isinstance(group_size, int) or (group_size != -1 and group_size < 8):
        raise refuse("group_size", group_size, "-1 or at least 8")
    skip = raw.get("modules_to_not_convert") or ()
    if method == "awq":
        version = str(raw.get("version", "gemm")).lower()
        if version != "gemm":
            raise refuse("version", version, "'gemm'")
        return QuantConfig("awq", 4, group_size, skip=tuple(skip))
    file_format = str(raw.get("checkpoint_format", "gptq")).lower()
    if file_format not in ("gptq", "gptq_v2"):
        raise refuse("checkpoint_format", file_format, "'gptq' or 'gptq_v2'")
    desc_act = bool(raw.get("desc_act", False))
    return QuantConfig(
        "gptq", 4, group_size, desc_act=desc_act, zeros_minus_one=file_format == "gptq", skip=tuple(skip)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sets how one engine runs its model.

    Parameters
    ----------
    block_size : tokens per KV block
    num_blocks : size of the KV pool; None sizes it from ``kv_cache_bytes``, or from what is free
    kv_cache_bytes : memory for the KV pool
    context_length : most tokens of prompt and answer together; None takes the model's own
    max_num_seqs : most sequences in one step
    max_batch_tokens : most tokens in one step, prefill chunks and drafts included
    max_waiting : requests beyond this many in the queue are refused
    aging_s : waiting background work counts as live after this long
    itl_target_s : a step that decodes takes no more prompt tokens than are computed in about this time
    max_draft_tokens : most tokens proposed per sequence and step, when there is a drafter
    asynchronous : plan and launch each step while the one before it runs; None does so where the device is not the host
    runner : "device" keeps a step's buffers and draws on the device, in captured graphs on a GPU; "plain" reads back
        what it needs; "auto" takes the one that suits the model's device
    threads : intra-op threads on a CPU
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    context_length: int | None = None
    max_num_seqs: int = 32
    max_batch_tokens: int = 1024
    max_waiting: int = 1024
    aging_s: float = 10.0
    itl_target_s: float = 0.1
    max_draft_tokens: int = 5
    asynchronous: bool | None = None
    runner: Literal["auto", "plain", "device"] = "auto"
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "kv_cache_bytes", "context_length", "max_num_seqs", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1.")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}; expected at least max_num_seqs ({self.max_num_seqs}), "
                "since every running sequence takes one token of a step."
            )
