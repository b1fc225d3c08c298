"""Everything that checking answers can raise.

::

    VerificationError
    ├── CombinationUnusable   the file that combines the graders is missing or broken   (at start)
    ├── NothingToGoBy         no grader had an opinion that can be combined             (the job fails)
    └── IdempotencyKeyReused  the same key came with other feedback before              (the caller's to mend)
"""

from __future__ import annotations


class VerificationError(Exception):
    """Base of the tree."""


class CombinationUnusable(VerificationError):
    def __init__(self, path: str, problem: str) -> None:
        super().__init__(
            f"{path} cannot be used to combine graders: {problem}. Make one with `python -m gateway.verify.fitting`, "
            'or set verification.combination = "builtin".'
        )
        self.path = path


class NothingToGoBy(VerificationError):
    def __init__(self, graders: tuple[str, ...]) -> None:
        given = ", ".join(graders) or "none"
        super().__init__(f"Of the graders only these had an opinion, which is not enough for a verdict: {given}.")
        self.graders = graders


class IdempotencyKeyReused(VerificationError):
    param = "Idempotency-Key"

    def __init__(self, key: str) -> None:
        super().__init__(
            f"The idempotency key {key[:80]!r} was used for other feedback before. What was reported stays as it is; "
            "report something new under a new key."
        )
