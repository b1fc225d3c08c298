"""Fine-tunes a small text encoder to tell from a prompt which tiers suffice.

All weights learn, by AdamW on the log-loss of the checked answers, each weighed by the inverse of the chance of its
check. The heads begin at the base rates, so that the first step starts from "no prompt is different". After every so
many steps the loss of newer prompts, which teach nothing, is looked at; the weights that had the least of it are kept,
and where it does not fall for long, or steps or time are at an end, so is the fit.

With the same rows, seed, steps and device it gives the same weights as far as the device's sums are the same; a fit
that time has ended says so in its card. Memory: 16 bytes a parameter, the states of 1,024 tokens, the rows' token ids.

References
----------
Devlin et al. 2019, "BERT", section 3.2 (fine-tuning). Reimers and Gurevych 2019, "Sentence-BERT" (mean pooling).
Prechelt 1998, "Early Stopping - But When?".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from classifier.embedding import load_sentence_transformer
from classifier.errors import EmbeddingError
from classifier.fitting import prior_logit
from classifier.rows import Floats, Rows
from classifier.tuned_encoder import MAX_PARAMETERS, TierHeads, TokenReader, TunedEncoder, pack, stored
from classifier.types import RouterRequest

Progress = Callable[[float], None]
"""Told the part of the most steps that is done, 0..1; what it raises ends the fit."""

MAX_TOKENS = 256
_WARM_UP = 0.1
_CLIP_NORM = 1.0
_LOOK_STEPS = 50
# A step's states are held for so many tokens at a time; gradients of its parts add up to its own.
_TOKENS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class TuningOptions:
    """Says how an encoder is fine-tuned.

    Parameters
    ----------
    max_seconds : after which it ends with what it has
    max_steps : batches, at most
    learning_rate : of AdamW; rises over the first tenth of the steps, then stays
    batch_size : prompts a step
    patience : looks at the newer prompts without a lower loss before it ends, those of the first tenth not counted
    device : torch device name
    """

    max_seconds: float
    max_steps: int = 1000
    learning_rate: float = 5e-5
    batch_size: int = 16
    patience: int = 20
    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRows(Rows):
    """Holds prompts with what was checked of them.

    Attributes
    ----------
    requests : n prompts
    labels : float64 (n, num_tiers - 1), P(the tier suffices), NaN where not checked
    weights : float64 (n, num_tiers - 1), of mean about 1 where there is a label
    """

    requests: tuple[RouterRequest, ...]
    labels: Floats
    weights: Floats


@dataclass(frozen=True, slots=True)
class TuningResult:
    """Holds a fine-tuned encoder, and how it came about as JSON."""

    encoder: TunedEncoder
    card: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Batches:
    """Gives rows as tensors, a batch at a time."""

    tokens: list[list[int]]
    labels: Tensor
    weights: Tensor
    size: int
    device: str

    @classmethod
    def of(cls, rows: TuningRows, reader: TokenReader, options: TuningOptions) -> _Batches:
        known = ~np.isnan(rows.labels)
        labels, weights = (
            torch.tensor(each, dtype=torch.float32, device=options.device)
            for each in (np.where(known, rows.labels, 0.5), np.where(known, rows.weights, 0.0))
        )
        return cls(reader.read(rows.requests), labels, weights, options.batch_size, options.device)

    def drawn(self, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield row numbers of batches without end, every row once before any comes again."""
        while True:
            order = rng.permutation(len(self.tokens))
            for start in range(0, len(order), self.size):
                yield order[start : start + self.size]

    def parts(self, rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Yield rows, alike lengths together, as many at once as have ``_TOKENS_AT_ONCE`` tokens with padding."""
        order = rows[np.argsort([len(self.tokens[row]) for row in rows], kind="stable")]
        start = 0
        for end in range(1, len(order) + 1):
            is_full = end < len(order) and (end + 1 - start) * len(self.tokens[order[end]]) > _TOKENS_AT_ONCE
            if is_full or end == len(order):
                yield order[start:end]
                start = end

    def loss(self, net: TierHeads, rows: NDArray[np.int64]) -> Tensor:
        """Add up the weighed log-loss of the rows' checked answers."""
        ids, mask = (each.to(self.device) for each in TokenReader.batch([self.tokens[row] for row in rows]))
        place = torch.from_numpy(rows).to(self.device)
        each = functional.binary_cross_entropy_with_logits(net(ids, mask), self.labels[place], reduction="none")
        return (each * self.weights[place]).sum()

    @torch.inference_mode()
    def mean_loss(self, net: TierHeads) -> float:
        """Return the loss of all rows, a unit of weight."""
        net.eval()
        parts = [self.loss(net, part).item() for part in self.parts(np.arange(len(self.tokens)))]
        net.train()
        return sum(parts) / float(self.weights.sum())


def tune_encoder(
    model: str,
    fit: TuningRows,
    newer: TuningRows,
    options: TuningOptions,
    *,
    seed: int,
    progress: Progress = lambda done: None,
) -> TuningResult:
    """Fine-tune a sentence-transformers model.

    Parameters
    ----------
    model : folder or hub id
    fit : to learn from
    newer : to know by when to stop; came after those, and teach nothing
    options : how long and how fast
    seed : of heads, order and dropout
    progress : told after every step

    Raises
    ------
    EmbeddingError
        The model cannot be had, is too large, is none that can be fine-tuned, or the device fails.
    """
    _need(options.device)
    try:
        # Dropout draws from torch's own generator; who else uses it finds it as it was.
        with torch.random.fork_rng(devices=[options.device] if options.device.startswith("cuda") else []):
            torch.manual_seed(seed)
            return _tune(model, fit, newer, options, seed, progress)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
        # Models and devices fail in kinds of their own: no such device, no memory, no mean of states to be had.
        problem = f"{type(error).__name__}: {error}"
        raise EmbeddingError(f"Encoder {model!r} cannot be fine-tuned on {options.device} ({problem}).") from error


def _need(device: str) -> None:
    """Raise where there is no such device; torch itself says so in several ways."""
    kind, _, index = device.partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise EmbeddingError(f"There is no device {device!r} to fine-tune an encoder on.")


def _tune(
    model: str, fit: TuningRows, newer: TuningRows, options: TuningOptions, seed: int, progress: Progress
) -> TuningResult:
    net, tokenizer, max_tokens = _open(model, fit, options.device)
    reader = TokenReader(tokenizer, max_tokens)
    rows, look = (_Batches.of(each, reader, options) for each in (fit, newer))
    best, card = _descend(net, rows, look, options, seed, progress)
    encoder = TunedEncoder(pack(net, best, tokenizer, max_tokens), model)
    num_labels = {name: int((~np.isnan(each.labels)).sum()) for name, each in (("fit", fit), ("newer", newer))}
    described = {
        "model": model,
        "num_parameters": sum(each.numel() for each in net.parameters()),
        "max_tokens": max_tokens,
        "learning_rate": options.learning_rate,
        "batch_size": options.batch_size,
        "device": options.device,
        "seed": seed,
        "num_labels": num_labels,
    }
    return TuningResult(encoder, described | card)


def _open(model: str, rows: TuningRows, device: str) -> tuple[TierHeads, str, int]:
    """Open the net before its first step, its tokenizer, and how many tokens it reads."""
    loaded = load_sentence_transformer(model, "cpu")
    transformer = loaded[0].auto_model
    num_parameters = sum(each.numel() for each in transformer.parameters())
    if num_parameters > MAX_PARAMETERS:
        raise EmbeddingError(
            f"Encoder {model!r} has {num_parameters} parameters; up to {MAX_PARAMETERS} are fine-tuned. Name a smaller "
            "one, or set learning.encoder_tuning_s = 0 to use it as it is."
        )
    net = TierHeads(transformer, rows.labels.shape[1])
    priors = [prior_logit(label, weight) for label, weight in zip(rows.labels.T, rows.weights.T, strict=True)]
    with torch.no_grad():
        net.heads.weight.mul_(0.1)
        net.heads.bias.copy_(torch.tensor(priors))
    tokenizer: str = loaded.tokenizer.backend_tokenizer.to_str()
    return net.to(device), tokenizer, min(int(loaded.max_seq_length or MAX_TOKENS), MAX_TOKENS)


def _descend(
    net: TierHeads, rows: _Batches, look: _Batches, options: TuningOptions, seed: int, progress: Progress
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Find the weights with the least loss of the newer rows, and describe the way there."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.learning_rate, weight_decay=0.01)
    warm_up = max(1.0, _WARM_UP * options.max_steps)
    every = min(_LOOK_STEPS, -(-len(rows.tokens) // rows.size))
    started_s, ended_by = time.monotonic(), "steps"
    least = begun = look.mean_loss(net)
    best, best_step, step = stored(net), 0, 0
    for step, batch in zip(range(1, options.max_steps + 1), rows.drawn(np.random.default_rng(seed)), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, step / warm_up)
        optimizer.zero_grad(set_to_none=True)
        for part in rows.parts(batch):
            (rows.loss(net, part) / len(batch)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(net.parameters(), _CLIP_NORM)
        optimizer.step()
        progress(step / options.max_steps)
        is_over = time.monotonic() - started_s >= options.max_seconds
        if step % every and step < options.max_steps and not is_over:
            continue
        if (loss := look.mean_loss(net)) < least:
            least, best, best_step = loss, stored(net), step
        if is_over:
            ended_by = "time"
        elif step - max(best_step, warm_up) >= options.patience * every:
            ended_by = "no lower loss"
        else:
            continue
        break
    card = {"num_steps": step, "kept_step": best_step, "ended_by": ended_by}
    return best, card | {"log_loss": {"before": round(begun, 5), "after": round(least, 5)}}
