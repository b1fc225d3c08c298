"""Everything a policy can raise.

::

    PolicyError
    ├── InvalidPolicy      the policy itself is wrong; names the field                    (at start)
    ├── InvalidLadder      the tier table is wrong; names the tier and the field          (at start)
    ├── ConflictingLimits  request and policy leave no tier; names the fields             (the caller's to mend)
    │   ├── OutsideRegions     none of the tiers is in a region that both permit
    │   ├── BeyondCost         each of the tiers is expected to cost more than is permitted
    │   └── TierNotPermitted   the caller's key permits none of the tiers
    ├── UnknownTier        a tier that is not on the ladder                               (the caller's to mend)
    ├── NoTierFits         the prompt is beyond every permitted tier's context; numbers   (the caller's to mend)
    └── NoTierAvailable    permitted tiers exist, none can take the request now           (try again later)
"""

from __future__ import annotations

from collections.abc import Iterable


class PolicyError(Exception):
    """Base of the tree."""


class InvalidPolicy(PolicyError, ValueError):
    """A policy whose fields cannot stand; ``field_name`` is relative to the policy."""

    def __init__(self, field_name: str, value: object, expected: str) -> None:
        super().__init__(f"{field_name} is {value!r}; expected {expected}.")
        self.field_name = field_name
        self.value = value
        self.expected = expected


class ConflictingLimits(PolicyError):
    """Limits that exclude each other; ``fields`` names them in the caller's spelling."""

    def __init__(self, message: str, *, fields: Iterable[str]) -> None:
        super().__init__(message)
        self.fields = tuple(fields)


class OutsideRegions(ConflictingLimits):
    """The tiers that are left otherwise are all in regions that policy or request does not permit."""


class BeyondCost(ConflictingLimits):
    """The request is expected to cost more than policy or request permits at every tier that is left otherwise."""


class TierNotPermitted(ConflictingLimits):
    """The tiers that are left otherwise are none that the caller's key permits."""


class UnknownTier(PolicyError):
    """A tier asked for by number that the ladder does not have."""

    def __init__(self, field_name: str, tier: int, known: Iterable[int]) -> None:
        self.field_name = field_name
        self.tier = tier
        self.known = tuple(known)
        super().__init__(f"{field_name} is {tier}; expected one of {', '.join(map(str, self.known))}.")


class NoTierFits(PolicyError):
    """No permitted tier has room for the prompt and the asked completion.

    Begins with OpenAI's words, by which clients such as LiteLLM know it. ``is_counted`` is False where the prompt has
    ``num_prompt_tokens`` at least, and nobody counted the rest.
    """

    def __init__(
        self, num_prompt_tokens: int, max_tokens: int | None, context_length: int, *, is_counted: bool = True
    ) -> None:
        at_least = "" if is_counted else "at least "
        asked = f" and {max_tokens} tokens of completion were asked for" if max_tokens is not None else ""
        super().__init__(
            f"This model's maximum context length is {context_length} tokens. However, your messages resulted in "
            f"{at_least}{num_prompt_tokens} tokens{asked}, and no permitted tier takes more. "
            "Shorten the messages, lower max_tokens, or permit a tier with a longer context."
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.context_length = context_length
        self.is_counted = is_counted


class NoTierAvailable(PolicyError):
    """Every permitted tier is down or full."""

    def __init__(self, tiers: Iterable[int]) -> None:
        self.tiers = tuple(sorted(tiers))
        super().__init__(f"None of the permitted tiers can take a request now: {', '.join(map(str, self.tiers))}.")


class InvalidLadder(PolicyError, ValueError):
    """A ladder that cannot stand; ``tier`` is the name of the offending tier, ``field_name`` its field."""

    def __init__(self, tier: str, field_name: str, value: object, expected: str) -> None:
        super().__init__(f"{tier}.{field_name} is {value!r}; expected {expected}.")
        self.tier = tier
        self.field_name = field_name
        self.value = value
        self.expected = expected
