"""The decoder's forward pass in few launches: what a GPU runs, and what a captured graph replays.

The arithmetic is that of :meth:`engine.models.decoder.DecoderModel.forward`. What differs is the cut: the residual
stream is carried through the norms, queries, keys and values are turned and stored in one go, attention reads the paged
cache directly. Nothing depends on values a host would have to read, so shapes alone decide which launches are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.batch import Batch
from engine.kernels.fused import rms_norm, rope_tables
from engine.kernels.paged_attention import turn_and_attend
from engine.kv_cache import KVCache
from engine.layers.rope import inverse_frequencies

if TYPE_CHECKING:
    from engine.models.decoder import DecoderLayer, DecoderModel


@dataclass(slots=True)
class StepTensors:
    """One step's input on the device: T tokens of S sequences, laid end to end.

    Attributes
    ----------
    token_ids, positions : int64 (T,)
    slots : int64 (T,), where each token's key and value go; below 0: nowhere, the row is padding
    query_starts : int32 (S + 1,), sequence s owns rows ``query_starts[s]:query_starts[s + 1]``
    context_lens : int32 (S,), keys present after this step; 0: a padding sequence
    block_tables : int32 (S, width)
    max_query_len : the longest query, known on the host
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_query_len: int

    @classmethod
    def of(cls, batch: Batch) -> StepTensors:
        """The same step as a batch laid out for the plain pass."""
        return cls(
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            batch.query_start,
            batch.context_lens,
            batch.block_tables,
            max(batch.query_lens),
        )


class FusedDecoder:
    """Runs a decoder's weights through the fused kernels (their references, off a GPU); no state between calls."""

    def __init__(self, model: DecoderModel) -> None:
        self.model = model
        inv_freq, self._attention_factor = inverse_frequencies(model.config.rope, model.config.head_dim)
        self._inv_freq = inv_freq.to(model.device)
        self._scale = model.config.head_dim**-0.5

    def forward(self, step: StepTensors, kv: KVCache) -> Tensor:
        """Write every token's key and value into ``kv``, return the normalised last hidden states, (T, hidden_size)."""
        model = self.model
        cos, sin = rope_tables(step.positions, self._inv_freq, self._attention_factor)
        # An ordinary kernel: what came before it is there for all that start early, see `turn_and_attend`.
        x = model.embedding.index_select(0, step.token_ids)
        residual: Tensor | None = None
        for index, layer in enumerate(model.layers):
            x, residual = rms_norm(x, layer.input_norm.weight, layer.input_norm.eps, residual)
            x = layer.o(self._attention(layer, x, cos, sin, step, kv.layers[index]))
            x, residual = rms_norm(x, layer.post_norm.weight, layer.post_norm.eps, residual)
            x = layer.down(layer.gated(x))
        return rms_norm(x, model.norm.weight, model.norm.eps, residual)[0]

    def _attention(
        self, layer: DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor, step: StepTensors, cache: Tensor
    ) -> Tensor:
        """(T, num_heads * head_dim), before the output projection."""
        config = self.model.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        heads = layer.qkv(x).view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        norms = layer.q_norm, layer.k_norm
        out = turn_and_attend(
            query,
            key,
            value,
            cos,
            sin,
            step.slots,
            cache,
            step.block_tables,
            step.context_lens,
            step.query_starts,
            scale=self._scale,
            window=layer.window,
            max_query_len=step.max_query_len,
            q_norm=None if norms[0] is None else norms[0].weight,
            k_norm=None if norms[1] is None else norms[1].weight,
            eps=config.rms_norm_eps,
        )
        return out.view(x.shape[0], -1)
