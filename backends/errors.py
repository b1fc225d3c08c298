"""Defines everything a backend can raise.

::

    BackendError
    ├── BackendUnavailable     down, breaker open, still loading          (another tier may answer)
    │   └── BackendOverloaded  queue full; carries ``retry_after_s``      (same tier later, or another tier)
    ├── BackendRefused         a server refuses our key or our account    (another tier may answer; the operator's)
    ├── BackendTimeout         connect, first token or gap                (another tier may answer)
    ├── BackendFailure         crashed, malformed answer, NaN             (another tier may answer)
    ├── ContextLengthExceeded  carries the numbers                        (the caller's to mend)
    ├── UnsupportedByBackend   names the option                           (the caller's to mend)
    ├── RequestRejected        the request cannot be served; carries a status (the caller's to mend)
    │   └── RejectedByServer   a remote server said so                    (the caller's to mend)
    ├── ModelLoadError         weights, tokenizer or config, names the file (at start)
    └── InvalidConfig          an option out of its limits, names it      (at start)
"""

from __future__ import annotations


class BackendError(Exception):
    """Base of the tree; ``retryable`` says whether another replica or tier may succeed.

    Messages are for the log: they may hold addresses and what a server said. Callers are told ``model``, the served
    model's name, which whoever asked it sets.
    """

    retryable: bool = False
    model: str | None = None


class BackendUnavailable(BackendError):
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BackendOverloaded(BackendUnavailable):
    pass


class BackendRefused(BackendError):
    """Another replica may hold another opinion of our key; the same one is not asked again."""

    retryable = True


class BackendTimeout(BackendError):
    retryable = True


class BackendFailure(BackendError):
    retryable = True


class ContextLengthExceeded(BackendError):
    """Begins with OpenAI's words, by which clients such as LiteLLM know it.

    Parameters
    ----------
    is_counted : False where the prompt has ``num_prompt_tokens`` at least, and nobody counted the rest
    param : the request's field that is too long
    """

    def __init__(
        self,
        num_prompt_tokens: int,
        context_length: int,
        max_tokens: int | None = None,
        *,
        is_counted: bool = True,
        param: str = "messages",
    ) -> None:
        at_least = "" if is_counted else "at least "
        asked = f" and {max_tokens} tokens of completion were asked for" if max_tokens is not None else ""
        super().__init__(
            f"This model's maximum context length is {context_length} tokens. However, your {param} resulted in "
            f"{at_least}{num_prompt_tokens} tokens{asked}. Shorten the {param} or lower max_tokens."
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.context_length = context_length
        self.max_tokens = max_tokens
        self.is_counted = is_counted
        self.param = param


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


# Fields that we send, and codes that OpenAI and vLLM document: all else that a server names is its own text.
_SENT_FIELDS = frozenset(
    {
        "messages", "prompt", "input", "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "seed", "min_tokens", "ignore_eos", "max_tokens",
        "max_completion_tokens", "stop", "stop_token_ids", "logit_bias", "logprobs", "top_logprobs", "prompt_logprobs",
        "response_format", "user", "prediction", "reasoning_effort", "echo",
    }
)  # fmt: skip
_KNOWN_CODES = frozenset(
    {
        "context_length_exceeded", "invalid_value", "invalid_type", "unsupported_value", "unsupported_parameter",
        "missing_required_parameter", "unknown_parameter", "model_not_found", "content_filter",
        "content_policy_violation", "string_above_max_length", "array_above_max_length", "integer_above_max_value",
        "integer_below_min_value", "decimal_above_max_value", "decimal_below_min_value", "invalid_prompt",
    }
)  # fmt: skip


class RejectedByServer(RequestRejected):
    """Keeps of a server's ``param`` and ``code`` what is of a known vocabulary: callers are shown both."""

    def __init__(self, message: str, *, status: int, param: str | None = None, code: str | None = None) -> None:
        super().__init__(
            message,
            status=status,
            param=param if param in _SENT_FIELDS else None,
            code=code if code in _KNOWN_CODES else None,
        )


class ModelLoadError(BackendError):
    pass


class InvalidConfig(BackendError, ValueError):
    """``field_name`` is relative to the config class; whoever knows the file adds the path in front."""

    def __init__(self, field_name: str, value: object, expected: str) -> None:
        super().__init__(f"{field_name} is {value!r}; expected {expected}.")
        self.field_name = field_name
        self.value = value
        self.expected = expected
