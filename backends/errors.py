"""Defines everything a backend can raise.

::

    BackendError
    ├── BackendUnavailable     down, breaker open, still loading          (another tier may answer)
    │   └── BackendOverloaded  queue full; carries ``retry_after_s``      (same tier later, or another tier)
    ├── BackendTimeout         connect, first token or gap                (another tier may answer)
    ├── BackendFailure         crashed, malformed answer, NaN             (another tier may answer)
    ├── ContextLengthExceeded  carries the numbers                        (the caller's to mend)
    ├── UnsupportedByBackend   names the option                           (the caller's to mend)
    ├── RequestRejected        the server said 4xx; carries its status    (the caller's to mend)
    ├── ModelLoadError         weights, tokenizer or config, names the file (at start)
    └── InvalidConfig          an option out of its limits, names it      (at start)
"""

from __future__ import annotations


class BackendError(Exception):
    """Base of the tree; ``retryable`` says whether another replica or tier may succeed."""

    retryable: bool = False


class BackendUnavailable(BackendError):
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BackendOverloaded(BackendUnavailable):
    pass


class BackendTimeout(BackendError):
    retryable = True


class BackendFailure(BackendError):
    retryable = True


class ContextLengthExceeded(BackendError):
    def __init__(self, num_prompt_tokens: int, context_length: int, max_tokens: int | None = None) -> None:
        asked = f" and {max_tokens} completion tokens were asked for" if max_tokens is not None else ""
        super().__init__(
            f"This model's context is {context_length} tokens; the prompt has {num_prompt_tokens} tokens{asked}. "
            "Shorten the messages or lower max_tokens."
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.context_length = context_length
        self.max_tokens = max_tokens


class UnsupportedByBackend(BackendError):
    def __init__(self, option: str, model_id: str) -> None:
        super().__init__(f"{option!r} is not supported by model {model_id!r}.")
        self.option = option


class RequestRejected(BackendError):
    def __init__(self, message: str, *, status: int, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class ModelLoadError(BackendError):
    pass


class InvalidConfig(BackendError, ValueError):
    """``field_name`` is relative to the config class; whoever knows the file adds the path in front."""

    def __init__(self, field_name: str, value: object, expected: str) -> None:
        super().__init__(f"{field_name} is {value!r}; expected {expected}.")
        self.field_name = field_name
        self.value = value
        self.expected = expected
