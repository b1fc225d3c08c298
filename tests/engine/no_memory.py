"""Memory that runs out at a chosen place, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class NoMemory(TorchFunctionMode):
    """Lets one of torch's functions find no memory, so many times."""

    def __init__(self, function: object, times: int = 1) -> None:
        super().__init__()
        self._function = function
        self.times_left = times

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is self._function and self.times_left:
            self.times_left -= 1
            raise torch.OutOfMemoryError("out of memory (simulated)")
        return func(*args, **kwargs or {})
