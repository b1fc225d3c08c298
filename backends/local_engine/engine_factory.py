"""Makes from a model's table an engine that serves it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from backends.config import LocalModelConfig
from backends.errors import ModelLoadError
from backends.local_engine.engine_groups import EngineGroup
from backends.weights import Checkpoint, LoadOptions, Progress, WeightPool
from engine.arena import Arena
from engine.config import EngineConfig
from engine.device.runner import DeviceRunner
from engine.device.warm_up import warm_up
from engine.drafter import Drafter, NGramDrafter
from engine.drafter_factory import model_drafter
from engine.engine import Engine
from engine.errors import EngineError
from engine.grammar import GrammarCompiler
from engine.kv_cache import KVCache
from engine.speculator import Speculator
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# The drafter's pool holds this many whole contexts; more sequences than that at once are seldom worth drafting for.
_DRAFTED_CONTEXTS = 8


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """Holds an engine and the checkpoints it keeps in memory, the target first.

    ``grammars`` is None where the tokenizer's tokens are none that a grammar could follow.
    """

    engine: Engine
    checkpoints: tuple[Checkpoint, ...]
    grammars: GrammarCompiler | None = None


def build(group: EngineGroup, weights: WeightPool, *, on_progress: Progress | None) -> ServedEngine:
    """Load what a group's table names and start its engine; blocks for as long as reading the files takes.

    Raises
    ------
    ModelLoadError
        The checkpoint, its drafter or its KV cache cannot be loaded; says which file or how many bytes.
    """
    model_id, config, drafter_path = group.members[0], group.config, group.drafter_path
    device = pick_device(config.device)
    options = LoadOptions(
        path=config.path,
        dtype=config.dtype,
        device=device,
        cpu_compute=config.cpu_compute,
        activations=config.activations,
        load_format=config.load_format,
        tensor_parallel=config.tensor_parallel,
    )
    checkpoints = [weights.acquire(options, on_progress)]
    try:
        if config.speculation.mode == "draft":
            assert drafter_path is not None
            drafted_by = replace(options, path=drafter_path, tensor_parallel=1)
            checkpoints.append(weights.acquire(drafted_by, on_progress))
            _check_drafter(config.path, drafter_path, *checkpoints)
        engine_config = _engine_config(config)
        # A cut model's other ranks have pools of their own, which follow the first one's block by block.
        is_shared = config.kv_cache_bytes is None and config.tensor_parallel == 1
        arena = weights.arena_for(device) if is_shared else None
        drafter = _drafter(model_id, config, engine_config, checkpoints, arena)
        engine = Engine(
            checkpoints[0].model,
            engine_config,
            arena=arena,
            eos_token_ids=checkpoints[0].tokenizer.eos_token_ids,
            loop=weights.loop_for(device, config.threads or 1),
            speculator=drafter and Speculator(drafter, max_draft_tokens=config.speculation.max_draft_tokens),  # type: ignore[arg-type]
            share=weights.share_for(device),
            name=model_id,
        )
        _warm_up(engine)
    except (EngineError, ValueError, ModelLoadError) as error:
        for checkpoint in checkpoints:
            weights.release(checkpoint)
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{model_id} cannot be served: {error}") from error
    return ServedEngine(engine, tuple(checkpoints), _grammars(model_id, engine, checkpoints[0].tokenizer))


def _grammars(model_id: str, engine: Engine, tokenizer: Tokenizer) -> GrammarCompiler | None:
    try:
        return GrammarCompiler(tokenizer, engine.model.config.vocab_size, engine.eos_token_ids)
    except ValueError as error:
        logger.warning("%s serves no structured output: %s", model_id, error)
        return None


def close(served: ServedEngine, weights: WeightPool) -> None:
    """End what the engine runs and give back its checkpoints; blocks for a step at most."""
    served.engine.close()
    for checkpoint in served.checkpoints:
        weights.release(checkpoint)


def _warm_up(engine: Engine) -> None:
    if isinstance(engine.core.runner, DeviceRunner):
        try:
            warm_up(engine)
        except EngineError:
            engine.close()
            raise


def _engine_config(config: LocalModelConfig) -> EngineConfig:
    return EngineConfig(
        kv_cache_bytes=config.kv_cache_bytes,
        context_length=config.context_length,
        max_num_seqs=config.max_num_seqs,
        # A step gives every running sequence one token at least.
        max_batch_tokens=max(config.max_batch_tokens, config.max_num_seqs),
        max_draft_tokens=config.speculation.max_draft_tokens,
        threads=config.threads or 1,
    )


def _drafter(
    model_id: str,
    config: LocalModelConfig,
    engine_config: EngineConfig,
    checkpoints: list[Checkpoint],
    arena: Arena | None,
) -> Drafter | None:
    if config.speculation.mode == "off":
        return None
    if config.speculation.mode == "ngram":
        return NGramDrafter()
    target, draft = (checkpoint.model for checkpoint in checkpoints)
    pool = None
    if arena is None:
        context_length = min(engine_config.context_length or target.config.context_length, draft.config.context_length)
        num_contexts = min(engine_config.max_num_seqs, _DRAFTED_CONTEXTS)
        num_blocks = -(-context_length // engine_config.block_size) * num_contexts
        kv = KVCache(draft.config, num_blocks, engine_config.block_size, dtype=draft.dtype, device=draft.device)
    else:
        kv = arena.lay_out(draft.config, engine_config.block_size, draft.dtype)
        pool = arena.join(f"{model_id}'s drafter", kv, min_tokens=0)  # whom it finds no room for is not drafted for
    return model_drafter(
        draft,
        kv,
        vocab_size=target.config.vocab_size,
        max_draft_tokens=engine_config.max_draft_tokens,
        max_sequences=engine_config.max_num_seqs,
        pool=pool,
    )


def _check_drafter(path: str, drafter_path: str, target: Checkpoint, draft: Checkpoint) -> None:
    if draft.tokenizer.fingerprint != target.tokenizer.fingerprint:
        raise ModelLoadError(
            f"{drafter_path} cannot draft for {path}: their tokenizers give tokens different ids. "
            "Use a drafter of the same family, or speculation.mode = 'ngram'."
        )


def pick_device(name: str) -> str:
    """Return a device's name; ``auto`` is the first GPU, else the CPU."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
