"""Starts the ranks of a model: one process for each GPU but the first, which is the engine's own."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
from collections.abc import Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from engine.config import ModelConfig
from engine.errors import LoadError
from engine.load.dummy import DummyTensors
from engine.load.model import LoadFormat, ProgressFn, choose_device, choose_dtype
from engine.load.source import load_config, resolve_checkpoint
from engine.load.tensors import TensorFiles, TensorSource
from engine.parallel.follower import follow
from engine.parallel.model import ParallelModel
from engine.parallel.ranks import BROKEN, Ranks
from engine.parallel.shard import shard_config
from engine.parallel.shard_loader import assemble_shard

logger = logging.getLogger(__name__)


def load_parallel(
    source: str | Path | ModelConfig,
    devices: Sequence[str],
    *,
    dtype: torch.dtype | str = "auto",
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: ProgressFn | None = None,
) -> ParallelModel:
    """Load one model over several devices of this host; the first is this process's.

    Parameters
    ----------
    source : a folder, a hub id, or with ``load_format="dummy"`` also a config
    devices : such as ``("cuda:0", "cuda:1")``; ``("cpu", "cpu")`` for tests
    dtype, load_format, progress : see :func:`engine.load.model.load_model`

    Raises
    ------
    engine.errors.LoadError
        What one device would raise, or the model cannot be cut so, or a rank did not start.
    """
    config = source if isinstance(source, ModelConfig) else load_config(source)
    shard_config(config, len(devices))
    targets = [str(choose_device(device)) for device in devices]
    chosen = choose_dtype(dtype, config, torch.device(targets[0]))
    folder = None if isinstance(source, ModelConfig) else resolve_checkpoint(source)
    port = _free_port()
    context = multiprocessing.get_context("spawn")
    workers: list[BaseProcess] = []
    pipes: list[Connection] = []
    for rank in range(1, len(targets)):
        ours, theirs = context.Pipe()
        arguments = (rank, len(targets), port, targets[rank], theirs, folder, config, chosen, load_format, seed)
        workers.append(context.Process(target=_serve_rank, args=arguments, name=f"rank-{rank}", daemon=True))
        workers[-1].start()
        theirs.close()  # so that a pipe ends with the process that holds its other end
        pipes.append(ours)
    try:
        ranks = Ranks(0, len(targets), port, torch.device(targets[0]), pipes)
        shard = assemble_shard(
            _source(folder, config, ranks.device, load_format, seed), config, chosen, ranks, progress
        )
        ranks.agree(True)  # the others take as long over loading as they need
    except BROKEN as error:
        _end(workers)
        raise LoadError(f"The ranks of the model did not start: {error}") from error
    except BaseException:
        _end(workers)
        raise
    return ParallelModel(shard, ranks, workers)


def _source(
    folder: Path | None, config: ModelConfig, device: torch.device, load_format: LoadFormat, seed: int
) -> TensorSource:
    if folder is None or load_format == "dummy":
        return DummyTensors(config, device=device, seed=seed)
    return TensorFiles(folder, device)


def _serve_rank(
    rank: int,
    size: int,
    port: int,
    device: str,
    pipe: Connection,
    folder: Path | None,
    config: ModelConfig,
    dtype: torch.dtype,
    load_format: LoadFormat,
    seed: int,
) -> None:
    """Run a worker process, from its start to its end."""
    target = torch.device(device)
    if target.type == "cuda":
        torch.cuda.set_device(target)
    else:
        torch.set_num_threads(1)
    ranks = Ranks(rank, size, port, target, [pipe])
    shard = assemble_shard(_source(folder, config, target, load_format, seed), config, dtype, ranks)
    status = 1
    try:
        ranks.agree(True)
        follow(shard, ranks)
        status = 0
    except (OSError, EOFError):
        pass  # rank 0 is gone without a word; its process has said why
    except Exception:
        logger.exception("rank %d cannot go on", rank)
    # Nothing here is worth an orderly end, and a collective that nobody answers may hold this process for good.
    logging.shutdown()
    os._exit(status)


def _end(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()
        worker.join()


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
