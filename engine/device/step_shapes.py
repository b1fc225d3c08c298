"""Chooses the shapes of steps: which are captured, and what a step is padded to."""

from __future__ import annotations

from engine.config import ModelConfig
from engine.device.graph_cache import bucket
from engine.device.step_buffers import StepShape
from engine.scheduler import ScheduledSequence

# Query lengths worth a graph: a decode's, and those of checks of a few drafts.
QUERY_LENGTHS = (1, 2, 3, 4, 6, 8)

# Token counts that steps with prompts are padded to where they are captured, and sequences and rows of any of them:
# few, since every combination is captured for itself, and sequences without tokens cost next to nothing.
NUM_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
NUM_SEQUENCES = (8, 32, 128, 512)
# Larger steps are padded too, so that kernels are not compiled anew for counts that no 16 divides.
_MULTIPLE = 16
# Such a step is worth a graph while the host launches it more slowly than the device runs it: a layer is about 25
# launches of 14 us, and twice that beside threads of other engines; products reach about 400 TFLOP/s at such sizes.
_LAYER_LAUNCH_S = 2 * 25 * 14e-6
_FLOPS = 4e14


def captured_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Return the token counts of steps with prompts that are worth a graph for a model of this shape."""
    attention = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    layer_flops = 2 * (attention + 3 * config.hidden_size * config.intermediate_size)
    return tuple(size for size in NUM_TOKENS if layer_flops * size / _FLOPS < _LAYER_LAUNCH_S)


def rounded_up(num_tokens: int) -> int:
    """Return a count that kernels are compiled for."""
    return -(-num_tokens // _MULTIPLE) * _MULTIPLE


def whole_tiles(num_tokens: int) -> int:
    """Return the most tokens up to ``num_tokens`` that fill the tiles of products.

    A product of 193 rows takes about as long as one of 256: tiles hold 64 to 256 rows, in steps of 32 up to 128 and
    of 64 beyond (:data:`engine.kernels.cuda_int4_many.CUTS`).
    """
    tile = 32 if num_tokens <= 128 else 64
    return max(num_tokens - num_tokens % tile, min(num_tokens, tile))


def uniform_query(items: list[ScheduledSequence]) -> int | None:
    """Return the query length of a graph that serves all items, None if there is none."""
    longest = 0
    for item in items:
        sequence = item.sequence
        if item.num_tokens != 1 or not item.draws or sequence.num_to_score or not sequence.pooled_done:
            return None
        longest = max(longest, item.num_drafts)
    return next((length for length in QUERY_LENGTHS if length > longest), None)


def keeps_prompt(item: ScheduledSequence) -> bool:
    """Tell whether the prompt's hidden states are wanted on their way."""
    sequence = item.sequence
    return item.start < sequence.num_prompt and (bool(sequence.num_to_score) or not sequence.pooled_done)


def padded_shape(num_tokens: int, num_sequences: int, num_rows: int, *, most: int, max_tokens: int) -> StepShape:
    """Return the shape that holds a step with prompts, whatever it draws.

    Parameters
    ----------
    num_tokens : not padded further
    most, max_tokens : sequences and tokens of any step
    """
    sequences = min(bucket(num_sequences, NUM_SEQUENCES) or most, most)
    if num_rows <= sequences:
        return StepShape(num_tokens, sequences, sequences if num_rows else 0)
    # Only where the host checks drafts are there more rows than sequences.
    rows = bucket(num_rows, NUM_SEQUENCES) or num_rows
    return StepShape(num_tokens, sequences, min(rows, max_tokens))
