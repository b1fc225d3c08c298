"""Holds the one decoder: every supported family is this forward pass with other switches set in its config."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import ModelConfig
from engine.kernels.dispatch import has_triton
from engine.kv_cache import KVCache
from engine.layers.attention import AttentionGroup, attend, plan_attention
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rotary, rotate
from engine.models.fused import FusedDecoder, StepTensors


@dataclass(slots=True)
class DecoderLayer:
    """Holds one block's weights. ``qkv`` gives queries, keys, values in that order; ``gated`` ``silu(gate) * up``."""

    input_norm: RMSNorm
    qkv: Linear
    o: Linear
    post_norm: RMSNorm
    gated: Linear
    down: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    window: int | None

    @property
    def weight_bytes(self) -> int:
        return sum(linear.weight_bytes for linear in (self.qkv, self.o, self.gated, self.down))


class DecoderModel:
    """Holds weights and does the forward pass; no state between calls, so any number of engines may share one.

    Attributes
    ----------
    config : what the checkpoint declared
    dtype, device : of activations, and of the KV cache it expects
    fused : the same forward pass for a GPU
    prefers_fused : it is what runs here; the kernels compute in 16 bits, so a model in float32 keeps the plain pass
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Tensor,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        lm_head: Linear,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.lm_head = lm_head
        self.dtype = dtype
        self.device = device
        self.rotary = Rotary(config, dtype=dtype, device=device)
        self.fused = FusedDecoder(self)
        self.prefers_fused = device.type == "cuda" and dtype != torch.float32 and has_triton()
        self._windows = frozenset(config.windows)
        self._scale = config.head_dim**-0.5
        self._token_bytes = 2 * config.kv_size * dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights held, each tensor counted once (a tied head is the embedding)."""
        head = 0 if self.config.tie_embeddings else self.lm_head.weight_bytes
        return self.embedding.nbytes + head + sum(layer.weight_bytes for layer in self.layers)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        """Compute a step: write every token's key and value into ``kv``, return the normalised last hidden states.

        Parameters
        ----------
        batch : T tokens; positions below ``config.context_length``
        kv : this model's pool

        Returns
        -------
        (T, hidden_size) in ``dtype``
        """
        if self.prefers_fused:
            return self.fused.forward(StepTensors.of(batch), kv)
        groups = plan_attention(batch, kv.block_size, self._windows, self.dtype, self._token_bytes)
        cos, sin = self.rotary.at(batch.positions)
        rows = kv.rows_of(batch.slot_mapping)
        hidden = self.embedding.index_select(0, batch.token_ids).to(self.dtype)
        for index, layer in enumerate(self.layers):
            attention = self._attention(layer, layer.input_norm(hidden), kv, index, rows, groups, cos, sin)
            hidden = hidden + layer.o(attention)
            hidden = hidden + layer.down(layer.gated(layer.post_norm(hidden)))
        return self.norm(hidden)

    def _attention(
        self,
        layer: DecoderLayer,
        x: Tensor,
        kv: KVCache,
        index: int,
        rows: Tensor,
        groups: list[AttentionGroup],
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        heads = layer.qkv(x).view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
            heads = torch.cat((layer.q_norm(query), layer.k_norm(key), value), dim=1)
        heads = rotate(heads, cos, sin)
        kv.slots[index].index_copy_(0, rows, heads[:, num_heads:])
        return attend(heads[:, :num_heads], kv.layers[index], groups, layer.window, self._scale)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return scores over the vocabulary, float32 (R, vocab_size), of R rows that :meth:`forward` returned."""
        return self.lm_head(hidden).float()
