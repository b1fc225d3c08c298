"""Everything that checking answers can raise.

::

    VerificationError
    ├── CombinationUnusable   the file that combines the graders is missing or broken   (at start)
    └── NothingToGoBy         no grader had an opinion that can be combined             (the job fails)
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
