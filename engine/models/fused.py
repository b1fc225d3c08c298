"""Does the decoder's forward pass in few launches: what a GPU runs, and what a captured graph replays.

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
from engine.kernels.paged_step import HeadNorms, PagedStep
from engine.kv_cache import KVCache
from engine.layers.rope import inverse_frequencies

if TYPE_CHECKING:
    from engine.models.decoder import DecoderLayer, DecoderModel


@dataclass(slots=True)
class StepTensors:
    """Holds one step's input on the device: T tokens of S sequences, laid end to end.

    Attributes
    ----------
    token_ids, positions : int64 (T,)
    paged : where they lie in the cache
    """

    token_ids: Tensor
    positions: Tensor
    paged: PagedStep

    @classmethod
    def of(cls, batch: Batch) -> StepTensors:
        """Return the same step as a batch laid out for the plain pass."""
        paged = PagedStep(
            block_tables=batch.block_tables,
            context_lens=batch.context_lens,
            query_starts=batch.query_start,
            slots=batch.slot_mapping,
            max_query_len=max(batch.query_lens),
        )
        return cls(batch.token_ids, batch.positions, paged)


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
            x = layer.o(self._attention(layer, x, cos, sin, step.paged, kv.layers[index]))
            x, residual = rms_norm(x, layer.post_norm.weight, layer.post_norm.eps, residual)
            x = layer.down(layer.gated(x))
        return rms_norm(x, model.norm.weight, model.norm.eps, residual)[0]

    def _attention(
        self, layer: DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor, step: PagedStep, cache: Tensor
    ) -> Tensor:
        """Return (T, num_heads * head_dim), before the output projection."""
        config = self.model.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        heads = layer.qkv(x).view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        norms = HeadNorms(
            None if layer.q_norm is None else layer.q_norm.weight,
            None if layer.k_norm is None else layer.k_norm.weight,
            config.rms_norm_eps,
        )
        out = turn_and_attend(
            query, key, value, cos, sin, cache, step, scale=self._scale, window=layer.window, norms=norms
        )
        return out.view(x.shape[0], -1)
