"""Prints why a command failed and names its exit status: our own errors in a line each, others as a traceback."""

from __future__ import annotations

import sys

from gateway.config.errors import SettingsError

USAGE_STATUS = 2
FAILURE_STATUS = 1

_OURS = {
    "backends.errors": "BackendError",
    "classifier.errors": "ClassifierError",
    "gateway.errors": "GatewayError",
    "gateway.learn.errors": "LearningError",
    "gateway.outcomes.errors": "OutcomeError",
    "gateway.store.errors": "StoreError",
    "policies.errors": "PolicyError",
}


class CommandError(Exception):
    """A command cannot do what was asked; the message is for the person at the keyboard."""

    def __init__(self, message: str, *, status: int = FAILURE_STATUS) -> None:
        super().__init__(message)
        self.status = status


def exit_status_of(error: Exception) -> int | None:
    """Print one of our errors and return its exit status; None for an error that is not ours to explain."""
    if isinstance(error, SettingsError):
        print("suffice: the configuration cannot be used:", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
        return USAGE_STATUS
    if isinstance(error, CommandError) or _is_ours(error):
        print(f"suffice: {error}", file=sys.stderr)
        return getattr(error, "status", FAILURE_STATUS) if isinstance(error, CommandError) else FAILURE_STATUS
    return None


def _is_ours(error: Exception) -> bool:
    # A tree can only have raised if its module is loaded; importing the others here would cost every failure a second.
    bases = (getattr(sys.modules.get(module), name, None) for module, name in _OURS.items())
    return any(base is not None and isinstance(error, base) for base in bases)
