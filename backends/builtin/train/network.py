"""Defines a small Llama in plain torch, with Hugging Face's parameter names and 4-bit rounding in its linear layers."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backends.builtin.quantize import Layout, fake_quantize
from backends.builtin.train.specs import RMS_NORM_EPS, ROPE_THETA, TierSpec

_INIT_STD = 0.02


class QuantizedLinear(nn.Module):
    """Computes a linear layer without bias with its rounded weight, as far as ``share`` says."""

    def __init__(self, num_in: int, num_out: int, group_size: int, layout: Layout) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.group_size, self.layout = group_size, layout

    def forward(self, x: Tensor, share: Tensor) -> Tensor:
        weight = fake_quantize(self.weight, self.group_size, self.layout, share)
        return F.linear(x, weight.to(x.dtype))


class TrainingRMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, RMS_NORM_EPS)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, spec: TierSpec) -> None:
        super().__init__()
        size, kv_size = spec.hidden_size, spec.num_kv_heads * spec.head_dim
        group, layout = spec.group_size, spec.quantization
        self.head_dim = spec.head_dim
        self.num_repeats = spec.num_heads // spec.num_kv_heads
        self.q_proj = QuantizedLinear(size, size, group, layout)
        self.k_proj = QuantizedLinear(size, kv_size, group, layout)
        self.v_proj = QuantizedLinear(size, kv_size, group, layout)
        self.o_proj = QuantizedLinear(size, size, group, layout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, share: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.view(*y.shape[:-1], -1, self.head_dim).transpose(1, 2)  # (B, H, T, D)

        q = _rotate(heads(self.q_proj(x, share)), cos, sin)
        k = _rotate(heads(self.k_proj(x, share)), cos, sin).repeat_interleave(self.num_repeats, 1)
        v = heads(self.v_proj(x, share)).repeat_interleave(self.num_repeats, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).flatten(-2), share))


class MLP(nn.Module):
    def __init__(self, spec: TierSpec) -> None:
        super().__init__()
        size, inner, group, layout = spec.hidden_size, spec.intermediate_size, spec.group_size, spec.quantization
        self.gate_proj = QuantizedLinear(size, inner, group, layout)
        self.up_proj = QuantizedLinear(size, inner, group, layout)
        self.down_proj = QuantizedLinear(inner, size, group, layout)

    def forward(self, x: Tensor, share: Tensor) -> Tensor:
        gated = F.silu(self.gate_proj(x, share)) * self.up_proj(x, share)
        return cast(Tensor, self.down_proj(gated, share))


class Block(nn.Module):
    def __init__(self, spec: TierSpec) -> None:
        super().__init__()
        self.input_layernorm = TrainingRMSNorm(spec.hidden_size)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = TrainingRMSNorm(spec.hidden_size)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, share: Tensor) -> Tensor:
        # The residual stream stays float32; matrix products run in the dtype of the rotary tables.
        x = x + self.self_attn(self.input_layernorm(x).to(cos.dtype), cos, sin, share)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x).to(cos.dtype), share))


class Network(nn.Module):
    """Defines the decoder; ``share`` is how far the 4-bit rounding is phased in (0 to 1)."""

    def __init__(self, spec: TierSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Block(spec) for _ in range(spec.num_layers))
        self.norm = TrainingRMSNorm(spec.hidden_size)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.embed_tokens.weight, std=_INIT_STD)
        for name, parameter in self.named_parameters():
            # Each block begins as the identity, so that a deep stack trains from the first step.
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def rotary(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each (length, head_dim / 2)."""
        dims = torch.arange(0, self.spec.head_dim, 2, device=device).float() / self.spec.head_dim
        angles = torch.arange(length, device=device).float()[:, None] * ROPE_THETA**-dims
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, token_ids: Tensor, share: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return hidden states (B, T, hidden) after the last norm, for int64 ``token_ids`` (B, T)."""
        x = self.embed_tokens(token_ids)
        cos, sin = self.rotary(token_ids.shape[1], token_ids.device, dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, share)
        return cast(Tensor, self.norm(x).to(dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return scores (..., vocab): the embedding is tied."""
        return F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype))
