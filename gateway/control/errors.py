"""Everything the control plane can raise.

::

    ControlError
    ├── Conflict         somebody else changed it first; carries what was expected and what was found
    ├── UnknownVersion   no policy, router, rollout or alert of that name
    ├── RouterRefused    an artifact that cannot serve here; says why
    └── LeaseLost        the writer is no longer the leader, so its change was not made
"""

from __future__ import annotations


class ControlError(Exception):
    """Base of the tree."""


class Conflict(ControlError):
    """A change that rests on a state which is no longer active; nothing was changed."""

    def __init__(self, subject: str, expected: object, found: object) -> None:
        super().__init__(f"{subject} was changed meanwhile: expected {expected}, found {found}. Read it again.")
        self.subject = subject
        self.expected = expected
        self.found = found


class UnknownVersion(ControlError):
    """``kind`` and ``name`` of what does not exist."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"There is no {kind} {name[:80]!r}.")
        self.kind = kind
        self.name = name


class RouterRefused(ControlError):
    """A router that cannot be used with this ladder or by this version."""

    def __init__(self, version: str, problem: str) -> None:
        super().__init__(f"Router {version[:80]!r} cannot be used: {problem}")
        self.version = version


class LeaseLost(ControlError):
    """The lease a change was to be made under has passed to another holder."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The lease {name!r} has passed to another holder; the change was not made.")
        self.name = name
