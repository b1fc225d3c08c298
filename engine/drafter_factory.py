"""Makes the drafter of a draft model."""

from __future__ import annotations

from engine.blocks import BlockPool
from engine.device.drafter import DeviceDrafter
from engine.drafter import ModelDrafter
from engine.kv_cache import KVCache
from engine.models.decoder import DecoderModel
from engine.runner import StepModel


def model_drafter(
    model: StepModel,
    kv: KVCache,
    *,
    vocab_size: int,
    max_draft_tokens: int,
    max_sequences: int,
    pool: BlockPool | None = None,
) -> ModelDrafter | DeviceDrafter:
    """Draft with a smaller model: on the device where its kernels run, else by the host's rules.

    Parameters
    ----------
    model : the draft model; its tokenizer must be the target's
    kv : its own pool
    vocab_size : V of the target
    max_draft_tokens : most tokens per draft
    max_sequences : most sequences of the target in one step
    pool : the books of ``kv``'s blocks where its memory is shared
    """
    if isinstance(model, DecoderModel) and model.prefers_fused:
        return DeviceDrafter(
            model, kv, vocab_size=vocab_size, max_draft_tokens=max_draft_tokens, max_sequences=max_sequences, pool=pool
        )
    return ModelDrafter(model, kv, vocab_size=vocab_size, pool=pool)
