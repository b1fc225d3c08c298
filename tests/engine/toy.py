"""A language model small enough to compute exactly, so that equalities between runs can be tested bit for bit.

Its "attention" adds up position-weighted integer embeddings of the whole prefix, read from the paged cache; sums of
small integers are exact in float32 in any order. Whoever reads a wrong slot, writes one twice or runs a token at a
wrong position gets another sum, hence other logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import ModelConfig, RopeConfig
from engine.kv_cache import KVCache

WIDTH = 8


def toy_config(vocab_size: int = 23, context_length: int = 256) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=WIDTH,
        context_length=context_length,
        rms_norm_eps=1e-6,
        tie_embeddings=False,
        rope=RopeConfig(),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(None,),
        dtype="float32",
        eos_token_ids=(0,),
    )


class ToyModel:
    """Implements ``engine.runner.StepModel``.

    ``blur`` mixes in noise that depends on the token alone, which makes a worse model of the same kind: a drafter.
    ``fail_on`` makes any step that computes that token raise; ``nan_on`` gives NaN to every row after it.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        vocab_size: int = 23,
        context_length: int = 256,
        blur: float = 0.0,
        fail_on: int | None = None,
        nan_on: int | None = None,
    ) -> None:
        self.config = toy_config(vocab_size, context_length)
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.blur = blur
        self.fail_on = fail_on
        self.nan_on = nan_on
        self.num_forwards = 0
        self.num_tokens = 0
        generator = torch.Generator().manual_seed(seed)
        self.embedding = torch.randint(-3, 4, (vocab_size, WIDTH), generator=generator).float()
        self.last = torch.randint(-3, 4, (vocab_size, WIDTH), generator=generator).float()
        self.head = torch.randint(-3, 4, (WIDTH, vocab_size), generator=generator).float()
        self.noise = torch.rand((vocab_size,), generator=torch.Generator().manual_seed(seed + 99))
        self.weight_bytes = self.embedding.nbytes + self.last.nbytes + self.head.nbytes

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        self.num_forwards += 1
        self.num_tokens += batch.num_tokens
        if self.fail_on is not None and bool((batch.token_ids == self.fail_on).any()):
            raise RuntimeError("the device is on fire")
        weights = (batch.positions % 5 + 1).float().unsqueeze(1)
        kv.slots[0][batch.slot_mapping, 0] = self.embedding[batch.token_ids] * weights
        out = []
        start = 0
        for table, length, count in zip(
            batch.block_tables_host, batch.context_lens_host, batch.query_lens, strict=True
        ):
            slots = [table[p // kv.block_size] * kv.block_size + p % kv.block_size for p in range(length)]
            sums = kv.slots[0][slots, 0].cumsum(0)[length - count :]
            ids = batch.token_ids[start : start + count]
            hidden = sums + self.last[ids]
            if self.nan_on is not None:
                bad = (ids == self.nan_on).cumsum(0) > 0
                hidden[bad] = float("nan")
            out.append(hidden)
            start += count
        return torch.cat(out)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.sin(hidden @ self.head * 0.37) * 3.0 + self.blur * self.noise

    def reference(self, token_ids: list[int]) -> Tensor:
        """Logits after each token, (T, V), computed without any cache."""
        ids = torch.tensor(token_ids)
        weights = (torch.arange(len(token_ids)) % 5 + 1).float().unsqueeze(1)
        return self.logits((self.embedding[ids] * weights).cumsum(0) + self.last[ids])

    def greedy(self, prompt: list[int], count: int, *, eos: bool = True) -> list[int]:
        """What a greedy run must say."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            tokens.append(int(self.reference(tokens)[-1].argmax()))
            if eos and tokens[-1] in self.config.eos_token_ids:
                break
        return tokens[len(prompt) :]
