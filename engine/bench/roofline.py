"""Computes the least time of a step on a device: bytes over measured bandwidth, or operations over measured rate."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import torch

from engine.config import ModelConfig

# 4 bits, and a 16-bit scale and zero point a group of 128.
_INT4_BYTES = 0.5 + 4 / 128
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class DeviceCeilings:
    """Holds the rates that the device was measured at in this run.

    Attributes
    ----------
    read_bytes_per_s : summing a tensor much larger than the caches
    matmul_flops : operations a second of a large bfloat16 product (a multiply and an add are two)
    """

    read_bytes_per_s: float
    matmul_flops: float

    def as_dict(self) -> dict[str, float]:
        return {name: float(f"{value:.4g}") for name, value in asdict(self).items()}


def measure_ceilings(device: torch.device) -> DeviceCeilings:
    """Measure both rates, the best of five passes each; takes a second or two."""
    on_gpu = device.type == "cuda"
    data = torch.randn((1 << 30) if on_gpu else (1 << 25), dtype=torch.bfloat16, device=device)
    side = 8192 if on_gpu else 1024
    a = torch.randn(side, side, dtype=torch.bfloat16 if on_gpu else torch.float32, device=device)
    read_s = min(_timed(lambda: torch.sum(data), device) for _ in range(_REPEATS))
    matmul_s = min(_timed(lambda: torch.mm(a, a), device) for _ in range(_REPEATS))
    return DeviceCeilings(data.nbytes / read_s, 2 * side**3 / matmul_s)


def sustained_matmul_flops(device: torch.device, seconds: float = 2.0) -> float:
    """Return the operations a second of a large bfloat16 product, once a GPU's power limit has set its clock.

    Prefill goes on for seconds, so this, rather than the best of a few products, is what it can be compared with.
    """
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    began_s, rate = time.perf_counter(), 0.0
    while time.perf_counter() - began_s < seconds:
        batch_s = _timed(lambda: [torch.mm(a, a) for _ in range(128)], device)
        rate = 128 * 2 * 8192**3 / batch_s
    return rate


def _timed(work: object, device: torch.device) -> float:
    assert callable(work)
    _wait(device)
    began_s = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - began_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Holds the bytes and operations of one model's tokens, from its shape alone.

    Attributes
    ----------
    linear_params : weights of all projections in the layers
    head_params : weights of the output head
    weight_bytes : read by every step: projections in their format, the head in 16 bits
    kv_bytes_per_token : keys and values of one position
    attention_flops_per_pair : operations for one query at one key, over all layers
    """

    linear_params: int
    head_params: int
    weight_bytes: float
    kv_bytes_per_token: int
    attention_flops_per_pair: int

    @classmethod
    def of(cls, config: ModelConfig) -> ModelCosts:
        hidden, inner = config.hidden_size, config.intermediate_size
        layer = hidden * (2 * config.q_size + 2 * config.kv_size) + 3 * hidden * inner
        linear, head = config.num_layers * layer, config.vocab_size * hidden
        weight_bytes = linear * (_INT4_BYTES if config.quant is not None else 2.0) + 2 * head
        return cls(
            linear, head, weight_bytes, 4 * config.kv_size * config.num_layers, 4 * config.q_size * config.num_layers
        )


def decode_floor_s(costs: ModelCosts, ceilings: DeviceCeilings, batch: int, context: int) -> float:
    """Return the least seconds of a step of ``batch`` sequences that each attend ``context`` tokens.

    Weights and their products first, attention after them: neither can hide behind the other's resource for long.
    """
    weights_s = costs.weight_bytes / ceilings.read_bytes_per_s
    products_s = 2 * (costs.linear_params + costs.head_params) * batch / ceilings.matmul_flops
    kv_s = batch * context * costs.kv_bytes_per_token / ceilings.read_bytes_per_s
    return max(weights_s, products_s) + kv_s


def prefill_floor_s(costs: ModelCosts, ceilings: DeviceCeilings, num_tokens: int) -> float:
    """Return the least seconds of a prompt: every token through the layers, one through the head, causal attention."""
    products = 2 * costs.linear_params * num_tokens + 2 * costs.head_params
    attention = costs.attention_flops_per_pair * num_tokens * num_tokens / 2
    weights_s = costs.weight_bytes / ceilings.read_bytes_per_s
    return max(weights_s, (products + attention) / ceilings.matmul_flops)


def kind_floors_s(
    costs: ModelCosts, ceilings: DeviceCeilings, *, num_tokens: int, num_drawn: int, num_keys: float, num_pairs: float
) -> dict[str, float]:
    """Return the least seconds of a step's products, head and attention, each alone.

    Parameters
    ----------
    num_tokens, num_drawn : rows through the layers, and through the head
    num_keys : read from the cache
    num_pairs : of a query and a key it sees
    """

    def least_s(num_bytes: float, operations: float) -> float:
        return max(num_bytes / ceilings.read_bytes_per_s, operations / ceilings.matmul_flops)

    head_bytes = 2 * costs.head_params
    return {
        "products": least_s(costs.weight_bytes - head_bytes, 2 * costs.linear_params * num_tokens),
        "head": least_s(head_bytes, 2 * costs.head_params * num_drawn),
        "attention": least_s(costs.kv_bytes_per_token * num_keys, costs.attention_flops_per_pair * num_pairs),
    }
