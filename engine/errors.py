"""Defines everything the engine can raise.

::

    EngineError
    ├── InvalidRequest             an option no run could honour; carries ``param``
    │   └── RequestTooLong         prompt and answer exceed the context or the KV pool; carries the numbers
    ├── EngineOverloaded           the queue is full; carries ``retry_after_s``
    ├── EngineClosed               submitted to, or cut off by, an engine that is closed
    ├── DeviceLost                 a fault ended the GPU's context; every model on it is down; carries ``device``
    ├── KernelBuildFailed          a GPU kernel did not compile or load; the message carries what the compiler said
    ├── StepFailed                 the forward pass raised; everything in that step ends with it
    ├── RankLost                   a process that holds part of a model is gone; the model must be loaded again
    ├── NonFiniteLogits            NaN or infinity in one request's logits; only that request ends
    ├── NothingAllowed             min_tokens and stop tokens left no token to draw
    ├── GrammarError               what an answer must be cannot be enforced
    │   ├── InvalidGrammar         it is malformed, or nothing satisfies it
    │   ├── UnsupportedGrammar     it asks for what cannot be enforced; carries ``keyword``
    │   └── GrammarTooLarge        it would take too much time or memory
    ├── TokenizerError             text and token ids
    │   ├── InvalidText            text that no tokenizer can read (a lone surrogate)
    │   ├── TextTooLong            more tokens than were allowed; carries a lower bound of their number
    │   ├── NoChatTemplate         messages, but the checkpoint has no template
    │   └── ChatTemplateError      the template refused the messages
    └── LoadError                  a checkpoint could not become a model; carries ``path``
        ├── CheckpointNotFound     no such folder, hub id or file
        ├── UnsupportedModel       architecture, activation, RoPE type … that no code here computes
        ├── UnsupportedQuantization  method, bits or layout; carries ``method``
        ├── CheckpointCorrupt      unreadable JSON, truncated or damaged weight file
        ├── TensorMismatch         a missing, unexpected or misshapen tensor; carries ``tensor``
        └── OutOfMemoryPlan        weights or the KV pool do not fit; carries the arithmetic
"""

from __future__ import annotations

from pathlib import Path


class EngineError(Exception):
    """Roots the tree."""


class InvalidRequest(EngineError):
    """``param`` names the option at fault."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLong(InvalidRequest):
    """``limit`` is the most tokens that prompt and answer may have together."""

    def __init__(self, num_prompt_tokens: int, max_tokens: int | None, limit: int, why: str) -> None:
        asked = "" if max_tokens is None else f" and {max_tokens} more were asked for"
        super().__init__(
            "prompt",
            f"The prompt has {num_prompt_tokens} tokens{asked}; at most {limit} fit together ({why}). "
            "Shorten the prompt or lower max_tokens.",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit


class EngineOverloaded(EngineError):
    """``retry_after_s`` estimates when a place will be free."""

    def __init__(self, num_waiting: int, max_waiting: int, retry_after_s: float) -> None:
        super().__init__(
            f"{num_waiting} requests are waiting and at most {max_waiting} may; try again in {retry_after_s:.1f} s."
        )
        self.num_waiting = num_waiting
        self.max_waiting = max_waiting
        self.retry_after_s = retry_after_s


class EngineClosed(EngineError):
    pass


class DeviceLost(EngineError):
    """``device`` cannot be used by this process any more; a new process can."""

    def __init__(self, device: str, fault: str) -> None:
        super().__init__(f"{device} is lost to this process ({fault}). Restart the server.")
        self.device = device


class KernelBuildFailed(EngineError):
    """The compiler or the driver refused a kernel."""


class StepFailed(EngineError):
    pass


class RankLost(EngineError):
    pass


class NonFiniteLogits(EngineError):
    pass


class NothingAllowed(EngineError):
    pass


class GrammarError(EngineError):
    """Roots what can be wrong with a schema, expression or grammar."""


class InvalidGrammar(GrammarError):
    pass


class UnsupportedGrammar(GrammarError):
    """``keyword`` names what cannot be enforced."""

    def __init__(self, keyword: str) -> None:
        super().__init__(f"{keyword!r} cannot be enforced; leave it out.")
        self.keyword = keyword


class GrammarTooLarge(GrammarError):
    pass


class TokenizerError(EngineError):
    pass


class InvalidText(TokenizerError):
    pass


class TextTooLong(TokenizerError):
    """A text was not encoded, or not to its end: it has ``least_tokens`` at least, and ``limit`` fit."""

    def __init__(self, least_tokens: int, limit: int) -> None:
        super().__init__(f"The text has at least {least_tokens} tokens; at most {limit} fit. Shorten it.")
        self.least_tokens = least_tokens
        self.limit = limit


class NoChatTemplate(TokenizerError):
    pass


class ChatTemplateError(TokenizerError):
    pass


class LoadError(EngineError):
    """A checkpoint could not become a model."""

    def __init__(self, message: str, *, path: str | Path | None = None) -> None:
        super().__init__(message)
        self.path = None if path is None else str(path)


class CheckpointNotFound(LoadError):
    pass


class UnsupportedModel(LoadError):
    pass


class UnsupportedQuantization(LoadError):
    def __init__(self, message: str, *, method: str, path: str | Path | None = None) -> None:
        super().__init__(message, path=path)
        self.method = method


class CheckpointCorrupt(LoadError):
    pass


class TensorMismatch(LoadError):
    def __init__(self, message: str, *, tensor: str, path: str | Path | None = None) -> None:
        super().__init__(message, path=path)
        self.tensor = tensor


class OutOfMemoryPlan(LoadError):
    """The memory asked for is not there; ``needed_bytes`` and ``free_bytes`` say by how much."""

    def __init__(self, message: str, *, needed_bytes: int, free_bytes: int, path: str | Path | None = None) -> None:
        super().__init__(message, path=path)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
