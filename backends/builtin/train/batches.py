"""Streams training batches, drawn and tokenised by worker processes while the model computes.

Documents of like length share a batch and never share a row, so attention needs no mask but the causal one.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from backends.builtin.conversations import draw_document
from backends.builtin.tokenizer import END_OF_TEXT
from backends.builtin.train.specs import SPECS, TierSpec

# Few, so that the compiler sees few shapes: answers at once fit the first two, most thinking the next two.
BUCKETS = (64, 128, 256, 384, 512)
_DRAWN_AT_ONCE = 512
_QUEUE_DEPTH = 4


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Holds right-padded rows of one length.

    ``token_ids`` (rows, length) uint16; ``kind`` (rows, length) uint8: 0 padding, 1 prompt, 2 completion.
    """

    token_ids: npt.NDArray[np.uint16]
    kind: npt.NDArray[np.uint8]


def draw_batches(spec: TierSpec, tokenizer_path: Path, seed: str) -> Iterator[TrainingBatch]:
    """Yield batches of about ``spec.tokens_per_step`` positions for ever; the same seed gives the same batches."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    pad_id = tokenizer.token_to_id(END_OF_TEXT)
    assert pad_id is not None, "the shared tokenizer has lost its end of text"
    rng = Random(seed)
    waiting: dict[int, list[tuple[list[int], int]]] = {bucket: [] for bucket in BUCKETS}
    while True:
        documents = [draw_document(rng, spec.mix) for _ in range(_DRAWN_AT_ONCE)]
        prompts = tokenizer.encode_batch([d.prompt for d in documents])
        completions = tokenizer.encode_batch([d.completion for d in documents])
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = prompt.ids + completion.ids
            if len(ids) > BUCKETS[-1]:
                continue
            bucket = next(b for b in BUCKETS if len(ids) <= b)
            waiting[bucket].append((ids, len(prompt.ids)))
            if len(waiting[bucket]) * bucket >= spec.tokens_per_step:
                yield _stack(waiting[bucket], bucket, pad_id)
                waiting[bucket] = []


def _stack(rows: list[tuple[list[int], int]], length: int, pad_id: int) -> TrainingBatch:
    token_ids = np.full((len(rows), length), pad_id, dtype=np.uint16)
    kind = np.zeros((len(rows), length), dtype=np.uint8)
    for row, (ids, num_prompt) in enumerate(rows):
        token_ids[row, : len(ids)] = ids
        kind[row, :num_prompt] = 1
        kind[row, num_prompt : len(ids)] = 2
    return TrainingBatch(token_ids, kind)


def _work(queue: Queue[TrainingBatch], tier: int, tokenizer_path: Path, seed: str) -> None:
    for batch in draw_batches(SPECS[tier], tokenizer_path, seed):
        queue.put(batch)


class BatchStream:
    """Runs worker processes, read in turn, so that the stream does not depend on their speed.

    The workers are spawned, not forked, so that CUDA's state is never copied; they die with their owner.
    """

    def __init__(self, tier: int, tokenizer_path: Path, seed: int, num_workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._queues: list[Queue[TrainingBatch]] = [context.Queue(_QUEUE_DEPTH) for _ in range(num_workers)]
        self._workers = [
            context.Process(target=_work, args=(q, tier, tokenizer_path, f"{seed}/{tier}/{i}"), daemon=True)
            for i, q in enumerate(self._queues)
        ]
        for worker in self._workers:
            worker.start()

    def __iter__(self) -> Iterator[TrainingBatch]:
        while True:
            for queue in self._queues:
                yield queue.get()

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()
            worker.join()
