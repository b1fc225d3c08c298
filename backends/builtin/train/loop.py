"""Trains one tier."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from backends.builtin.reference import dequantized_state
from backends.builtin.train.batches import TrainingBatch
from backends.builtin.train.export import export
from backends.builtin.train.network import Network
from backends.builtin.train.specs import TierSpec

_WARM_UP = 0.02
_HOLD = 0.45
# Rounding is phased in between these shares of the run: early enough that most of the decay trains the rounded weights.
_ROUND_FROM, _ROUND_UNTIL = 0.30, 0.45
_PROMPT_WEIGHT = 0.05
_WEIGHT_DECAY = 0.02
_LOG_EVERY = 200


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Says how long and where a run trains.

    The schedule follows the clock: a run is given minutes, and ends with its decay done.
    """

    minutes: float
    seed: int
    device: str
    folder: Path
    compile: bool
    start_from: Path | None = None
    learning_rate_scale: float = 1.0
    checkpoint_minutes: float = 3.0


def learning_rate_scale(progress: float, hold: float = _HOLD) -> float:
    """Return the rate's factor at ``progress`` 0 to 1: warm-up, a plateau until ``hold``, a straight line to zero."""
    if progress < _WARM_UP:
        return progress / _WARM_UP
    if progress < hold:
        return 1.0
    return max(0.0, (1 - progress) / (1 - hold))


def rounding_share(progress: float) -> float:
    """Return how far the 4-bit rounding is phased in, 0 to 1."""
    return min(1.0, max(0.0, (progress - _ROUND_FROM) / (_ROUND_UNTIL - _ROUND_FROM)))


def make_optimizers(network: Network, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices, AdamW for embedding and norms.

    References
    ----------
    Jordan et al. 2024, "Muon: An optimizer for hidden layers"; Liu et al. 2025, "Muon is Scalable for LLM Training"
    (section 2.2, matching AdamW's update size).
    """
    # Muon is meant for the matrices of hidden layers.
    matrices = [p for n, p in network.named_parameters() if "proj." in n]
    others = [p for n, p in network.named_parameters() if "proj." not in n]
    fused = others[0].is_cuda
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=_WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=fused),
    ]


def loss_of(network: Network, token_ids: Tensor, kind: Tensor, share: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean cross-entropy of the next token, completions in full and prompts at a small weight.

    Parameters
    ----------
    token_ids, kind : int64 (B, T); ``kind`` 0 pad, 1 prompt, 2 completion
    """
    hidden = network(token_ids[:, :-1], share, dtype)
    return _head_loss(hidden, network.embed_tokens.weight, token_ids[:, 1:], kind[:, 1:])


def _head_loss(hidden: Tensor, embedding: Tensor, targets: Tensor, kind: Tensor) -> Tensor:
    logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    weights = (kind == 2).float() + _PROMPT_WEIGHT * (kind == 1).float()
    return (losses * weights.flatten()).sum() / weights.sum()


def _compiled(network: Network) -> None:
    """Compile block by block: all blocks share one compiled graph per batch shape."""
    global _head_loss
    torch._dynamo.config.recompile_limit = 64
    for layer in network.layers:
        assert isinstance(layer, nn.Module)
        layer.compile(dynamic=False)
    _head_loss = torch.compile(_head_loss, dynamic=False)


def load_trained(network: Network, folder: Path) -> None:
    """Start from an exported folder's dequantised weights."""
    state = dequantized_state(folder)
    network.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()}, strict=True)


class Trainer:
    """Holds one tier's network, its optimisers, and the clock its schedule follows."""

    def __init__(self, spec: TierSpec, config: RunConfig, tokenizer: Tokenizer, log: Callable[[str], None]) -> None:
        torch.manual_seed(config.seed)
        torch.set_float32_matmul_precision("high")
        self.spec, self.config, self.tokenizer, self.log = spec, config, tokenizer, log
        self.device = torch.device(config.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.network = Network(spec).to(self.device)
        if config.start_from is not None:
            load_trained(self.network, config.start_from / f"tier{spec.tier}")
        self.optimizers = make_optimizers(self.network, spec.learning_rate)
        self.share = torch.zeros((), device=self.device)
        self.num_steps = self.num_tokens = self.num_documents = 0
        self.loss = math.nan
        if config.compile:
            _compiled(self.network)

    def run(self, stream: Iterable[TrainingBatch]) -> dict[str, Any]:
        """Train until the minutes are over; export now and then, and at the end.

        Returns
        -------
        what was run, as written to ``training.json``
        """
        started = last_export = time.monotonic()
        for batch in stream:
            elapsed_s = time.monotonic() - started
            progress = elapsed_s / (60 * self.config.minutes)
            if progress >= 1:
                break
            self._step(batch, progress)
            if time.monotonic() - last_export > 60 * self.config.checkpoint_minutes:
                last_export = time.monotonic()
                self._export(elapsed_s)
        return self._export(time.monotonic() - started)

    def _step(self, batch: TrainingBatch, progress: float) -> None:
        token_ids = self._to_device(torch.from_numpy(batch.token_ids.astype("int64")))
        kind = self._to_device(torch.from_numpy(batch.kind.astype("int64")))
        # Weights that start on the 4-bit grid stay rounded, and only decay.
        fresh = self.config.start_from is None
        self.share.fill_(rounding_share(progress) if fresh else 1.0)
        scale = learning_rate_scale(progress, _HOLD if fresh else _WARM_UP)
        rate = self.spec.learning_rate * self.config.learning_rate_scale * scale
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        loss = loss_of(self.network, token_ids, kind, self.share, self.dtype)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        self.num_tokens += int((batch.kind > 0).sum())
        self.num_documents += batch.token_ids.shape[0]
        if self.num_steps % _LOG_EVERY == 0 or self.num_steps <= 3:
            self.loss = loss.item()
            self.log(
                f"tier {self.spec.tier} {progress:5.1%} step {self.num_steps} tokens {self.num_tokens / 1e6:.1f}M "
                f"loss {self.loss:.4f} lr {rate:.1e}"
            )

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _export(self, elapsed_s: float) -> dict[str, Any]:
        num_parameters = sum(p.numel() for p in self.network.parameters())
        record = {
            "tier": self.spec.tier,
            "seed": self.config.seed,
            "num_parameters": num_parameters,
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "training_s": round(elapsed_s, 1),
            "last_loss": self.loss if math.isfinite(self.loss) else None,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
        }
        if self.config.start_from is not None:
            before = json.loads((self.config.start_from / f"tier{self.spec.tier}" / "training.json").read_text())
            record = record | {"continued_from": before}
        export(self.network, self.tokenizer, self.config.folder / f"tier{self.spec.tier}", record)
        return record
