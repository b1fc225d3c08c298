"""Translates the engine's errors into this room's: the one table at the border."""

from __future__ import annotations

from backends.errors import (
    BackendError,
    BackendFailure,
    BackendOverloaded,
    BackendUnavailable,
    ContextLengthExceeded,
    RequestRejected,
    UnsupportedByBackend,
)
from engine import errors


def translate(error: Exception, model_id: str, *, param: str = "messages") -> BackendError:
    """Return our error for the engine's, most specific first; what is not in the table is a failure of ours.

    Parameters
    ----------
    param : the request's field that text, or a grammar, came from
    """
    match error:
        case errors.RequestTooLong():
            return ContextLengthExceeded(error.num_prompt_tokens, error.limit, error.max_tokens, param=param)
        case errors.TextTooLong():
            return ContextLengthExceeded(error.least_tokens, error.limit, is_counted=False, param=param)
        case errors.InvalidRequest():
            return RequestRejected(str(error), status=400, param=error.param)
        case errors.EngineOverloaded():
            # Retry-After counts whole seconds.
            return BackendOverloaded(f"{model_id}: {error}", retry_after_s=max(error.retry_after_s, 1.0))
        case errors.EngineClosed() | errors.DeviceLost():
            return BackendUnavailable(f"{model_id}: {error}")
        case errors.NoChatTemplate():
            return UnsupportedByBackend("messages", model_id)
        case errors.TokenizerError():
            return RequestRejected(str(error), status=400, param=param)
        case errors.UnsupportedGrammar():
            return RequestRejected(str(error), status=400, param=param, code="unsupported_parameter")
        case errors.GrammarError():
            return RequestRejected(str(error), status=400, param=param, code="invalid_value")
        case errors.NothingAllowed():
            return RequestRejected(str(error), status=400, param="logit_bias")
        case _:
            return BackendFailure(f"{model_id}: {error}")
