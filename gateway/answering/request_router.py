"""Routes one request: estimate, facts, decision."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from backends.errors import BackendError, ContextLengthExceeded
from backends.protocol import PLAIN_TEXT, Backend, GenerateRequest, ToolCall
from classifier.log_view import tool_entries
from classifier.types import Sufficiency
from gateway.answering.phases import UNCALIBRATED, AdmittedRequest, RoutedRequest, RoutingBasis
from gateway.answering.sessions import Sessions
from gateway.api.request import InferenceRequest, Prompt, ToolResultPart, Turn, media_in, messages_of, prompt_size
from gateway.api.tool_use import read_tool_features
from gateway.control.control_state import groups_of
from gateway.control.router_set import RouterSet, sticky_key
from gateway.errors import InvalidRequest, UnsupportedOption
from gateway.models.catalog import Catalog
from policies.limits import permitted_tiers
from policies.policy import Policy
from policies.routing_decision import decide
from policies.types import Overrides, RequestFacts, TierEstimate

# Bytes of text bound tokens from above; a chat template adds its own few per message.
_TEMPLATE_TOKENS_PER_TURN = 16
_CHARS_PER_TOKEN = 4
_NO_QUARANTINE: Mapping[int, float] = {}
_ALL_ABLE: frozenset[int] = frozenset()
_NO_WAITS: Mapping[int, float] = {}

# Capability -> what to tell a caller who needs it where the model asked for lacks it.
_LACKING = {
    "prompt_token_ids": "'{}' in this form is not supported by the model asked for.",
    "logprobs": "'{}' in this form is not supported by the model asked for.",
    "tools": "'{}' needs a model that calls tools; the model asked for does not.",
    "structured_output": "'{}' is not supported by the model asked for.",
    "images": "'{}' holds images, which the model asked for does not read.",
    "audio": "'{}' holds audio, which the model asked for does not hear.",
    "files": "'{}' holds files, which the model asked for does not read.",
}

# The router's word groups that name a subject; the others say how a prompt is put.
DOMAINS = ("math", "code", "science", "medicine", "law", "finance", "history", "writing", "calendar", "unit")
_GROUPS = tuple((f"group_{name}", name) for name in DOMAINS)


@dataclass(frozen=True, slots=True)
class PromptCount:
    """Holds a prompt's tokens; ``is_exact`` where every model that may answer has counted them."""

    num_tokens: int
    is_exact: bool


class RequestRouter:
    """Decides which tier answers.

    Attributes
    ----------
    kill_switch : all traffic goes to the top tier
    quarantine : (policy's name, router's version) -> quarantined tier -> P(as good) it must reach
    group_quarantine : likewise -> tenant or domain -> quarantined tier -> P(as good) it must reach
    unavailable : tiers that cannot be asked now, by number
    """

    def __init__(self, catalog: Catalog, routers: RouterSet, sessions: Sessions, rng: random.Random) -> None:
        self.catalog = catalog
        self.routers = routers
        self.kill_switch = False
        self.quarantine: Mapping[tuple[str, str], Mapping[int, float]] = {}
        self.group_quarantine: Mapping[tuple[str, str], Mapping[str, Mapping[int, float]]] = {}
        self.unavailable: frozenset[int] = frozenset()
        self._sessions = sessions
        self._rng = rng
        contexts = [tier.context_length for tier in catalog.ladder if tier.context_length is not None]
        self._shortest_context = min(contexts) if len(contexts) == len(catalog.ladder) else None

    async def route(self, admitted: AdmittedRequest) -> RoutedRequest:
        """Estimate and decide.

        Raises
        ------
        UnknownModel, InvalidRequest, UnsupportedOption, PolicyError
        """
        request, caller = admitted.request, admitted.caller
        policy, overrides = self._rule(request)
        key = sticky_key(self._sessions.conversation_digest(admitted.conversation), caller.key_id, admitted.request_id)
        slot = self.routers.pick(key)
        # Thresholds belong to the router they were derived with; nothing is awaited between the two readings.
        policy = slot.policies.get(policy.name, policy)
        version, turns = slot.version, request.turns
        size = _size(request)
        # Before anything is encoded: what no tier can do is refused, and none counts what it cannot read.
        unable = self._unable(request, overrides)
        # Before the estimate: a prompt that fits nowhere need not be looked at.
        num_tokens, is_counted = await self._num_prompt_tokens(admitted, len(turns), policy, overrides, size, unable)
        tools = read_tool_features(request, turns) if request.tools else ()
        estimate = await slot.predictor.predict(turns, tools)
        if tools and estimate is not None:
            # Whether this router reads them or not: the next one may learn from them.
            estimate = structs.replace(estimate, features={**estimate.features, **tool_entries(tools)})
        domain = domain_of(estimate.features) if estimate is not None else ""
        basis = admitted.basis = RoutingBasis(policy, version, turns, estimate, domain, tools)
        standing = await self._sessions.find(admitted.conversation)
        facts = RequestFacts(
            num_prompt_tokens=num_tokens,
            max_tokens=request.sampling.max_tokens,
            estimates=_tier_estimates(estimate),
            overrides=overrides,
            session=standing.session,
            lock=standing.lock,
            unavailable=self.unavailable,
            unable=unable,
            expected_wait_s=self._waits(policy),
            kill_switch=self.kill_switch,
            novelty=estimate.novelty if estimate is not None else 0.0,
            quarantine=self._quarantine((policy.name, version), caller.tenant, domain),
            guessed_prompt_tokens=_guess_tokens(size),
            num_answers=request.num_choices,
            is_prompt_counted=is_counted,
        )
        decision = decide(facts, policy, self.catalog.ladder, self._rng)
        confidence = getattr(slot.router, "confidence", UNCALIBRATED) if decision.escalation_path else UNCALIBRATED
        return RoutedRequest(admitted, basis, facts, decision, confidence)

    async def count_tokens(self, request: InferenceRequest, request_id: str, tenant: str) -> PromptCount:
        """Count a request's prompt for the tiers that it may go to: the most that any of their models makes of it.

        Raises
        ------
        UnknownModel, InvalidRequest, UnsupportedOption, PolicyError, BackendError
        """
        policy, overrides = self._rule(request)
        unable = self._unable(request, overrides)
        permitted = permitted_tiers(overrides, policy, self.catalog.ladder)
        permitted = tuple([tier for tier in permitted if tier.index not in unable]) or permitted
        salt = self.catalog.cache_salt(tenant)
        most, is_exact = 0, True
        for model in dict.fromkeys([tier.model for tier in permitted]):
            try:
                found = await count_prompt_tokens(request, request_id, self.catalog.backends[model], salt)
                is_counted = found is not None
            except ContextLengthExceeded as error:
                found, is_counted = error.num_prompt_tokens, error.is_counted
            except BackendError as error:
                error.model = model
                raise
            if not is_counted:
                # The least that it can be, or nothing, is known.
                found = max(found or 0, _guess_tokens(_size(request)))
            most, is_exact = max(most, found or 0), is_exact and is_counted
        return PromptCount(most, is_exact)

    def is_current(self, routed: RoutedRequest) -> bool:
        """Tell whether what rules out tiers is still as it was when a request that had to wait was routed."""
        facts, basis = routed.facts, routed.basis
        if facts.kill_switch != self.kill_switch or not self.unavailable <= facts.unavailable:
            return False
        key = (basis.policy.name, basis.router_version)
        return self._quarantine(key, routed.admitted.caller.tenant, basis.domain) == facts.quarantine

    def _rule(self, request: InferenceRequest) -> tuple[Policy, Overrides]:
        """Return the active policy and what the request asks of it, the model's name included."""
        preferences, model = request.preferences, request.model
        target = self.catalog.resolve(model)
        named, overrides = preferences.policy, preferences.overrides
        policy = target.policy if named is None else self.catalog.policy(named, overrides.permissions)
        if target.tier is None:
            return policy, overrides
        if overrides.tier not in (None, target.tier.index):
            raise InvalidRequest(
                f"'model' {model!r} is tier {target.tier.index}, 'suffice.tier' asks for tier {overrides.tier}.",
                param="suffice.tier",
                code="conflicting_limits",
            )
        return policy, replace(overrides, tier=target.tier.index)

    def _quarantine(self, key: tuple[str, str], tenant: str, domain: str) -> Mapping[int, float]:
        """Return the most that policy, tenant and domain ask of each quarantined tier."""
        # Nearly always nothing is quarantined, and nothing to look up.
        if not self.quarantine and not self.group_quarantine:
            return _NO_QUARANTINE
        asked = self.quarantine.get(key, _NO_QUARANTINE)
        groups = self.group_quarantine.get(key)
        if not groups:
            return asked
        most = dict(asked)
        for group in groups_of(tenant, domain):
            for tier, least in groups.get(group, _NO_QUARANTINE).items():
                most[tier] = max(most.get(tier, 0.0), least)
        return most

    async def _num_prompt_tokens(
        self,
        admitted: AdmittedRequest,
        num_turns: int,
        policy: Policy,
        overrides: Overrides,
        size: int,
        unable: frozenset[int],
    ) -> tuple[int | None, bool]:
        """Guess where any guess fits every context, else ask the highest tier that may see the prompt.

        Returns
        -------
        The number; False where it is only the least that it can be

        Raises
        ------
        PolicyError
            No tier may.
        """
        if not num_turns:
            return size, True
        if self._shortest_context is not None:
            # A character is at most 4 bytes of UTF-8, and a token at least one byte.
            template = _TEMPLATE_TOKENS_PER_TURN * (num_turns + 1)
            if 4 * size + template + (admitted.request.sampling.max_tokens or 1) <= self._shortest_context:
                return _guess_tokens(size), True
        permitted = permitted_tiers(overrides, policy, self.catalog.ladder)
        permitted = tuple([tier for tier in permitted if tier.index not in unable]) or permitted
        known = [tier.context_length for tier in permitted if tier.context_length is not None]
        backend = self.catalog.backend(permitted[-1])
        try:
            salt = self.catalog.cache_salt(admitted.caller.tenant)
            most = max(known, default=None)
            return await count_prompt_tokens(admitted.request, admitted.request_id, backend, salt, limit=most), True
        except ContextLengthExceeded as error:
            return error.num_prompt_tokens, error.is_counted

    def _unable(self, request: InferenceRequest, overrides: Overrides) -> frozenset[int]:
        """Return the tiers whose model lacks what this request needs.

        Raises
        ------
        UnsupportedOption
            The tier asked for lacks it, or every tier does.
        """
        needs: list[tuple[str, str]] = []
        prompt = request.prompts[0]
        if not isinstance(prompt, str) and isinstance(prompt[0], int):
            needs.append(("prompt_token_ids", "prompt"))
        if request.sampling.logprobs is not None:
            needs.append(("logprobs", "logprobs"))
        others = request.other_parts
        if request.tools:
            needs.append(("tools", "tools"))
        elif any(isinstance(part, ToolCall | ToolResultPart) for part in others):
            needs.append(("tools", "messages"))
        if request.output_format is not PLAIN_TEXT:
            needs.append(("structured_output", "response_format"))
        if others:
            needs += [(each, "messages") for each in sorted(media_in(others))]
        unable = _ALL_ABLE
        for capability, param in needs:
            lacking = {t.index for t in self.catalog.ladder if capability not in self.catalog.backend(t).capabilities}
            if overrides.tier in lacking or len(lacking) == len(self.catalog.ladder):
                raise UnsupportedOption(_LACKING[capability].format(param), param=param)
            unable |= lacking
        return unable

    def _waits(self, policy: Policy) -> Mapping[int, float]:
        """Return the expected waiting per tier, read only for a policy that prices or limits it."""
        if policy.max_wait_s is None and not policy.wait_cost_per_s_usd:
            return _NO_WAITS
        loads = {tier.index: self.catalog.backend(tier).load() for tier in self.catalog.ladder}
        return {index: load.predicted_wait_s for index, load in loads.items() if load.predicted_wait_s is not None}


async def count_prompt_tokens(
    request: InferenceRequest, request_id: str, backend: Backend, cache_salt: str, *, limit: int | None = None
) -> int | None:
    """Return the length of the longest prompt in a backend's tokens; None where it cannot know.

    Raises
    ------
    ContextLengthExceeded
        It is more than ``limit``.
    """
    prompts = request.prompts
    longest = prompts[0] if len(prompts) == 1 else max(prompts, key=prompt_size)
    asked = GenerateRequest(
        request_id,
        extra={"cache_salt": cache_salt},
        thinking=request.thinking if "thinking" in backend.capabilities else None,
        tools=request.tools,
        tool_choice=request.tool_choice,
        **prompt_argument(longest),
    )
    return await backend.count_tokens(asked, limit=limit)


def prompt_argument(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as the one argument of :class:`GenerateRequest` that holds its kind."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt[0], Turn):
        return {"messages": messages_of(prompt)}
    return {"prompt_token_ids": prompt}


def domain_of(features: Mapping[str, float]) -> str:
    """Return the subject whose words a prompt uses most; empty without any."""
    most, found = 0.0, ""
    for feature, name in _GROUPS:
        count = features.get(feature, 0.0)
        if count > most:
            most, found = count, name
    return found


def _tier_estimates(estimate: Sufficiency | None) -> tuple[TierEstimate, ...]:
    if estimate is None:
        return ()
    return tuple([TierEstimate(each.tier, each.p_right, each.p_as_good) for each in estimate.tiers])


def _size(request: InferenceRequest) -> int:
    """Return the characters of a request's longest prompt, tools included."""
    size = max([prompt_size(prompt) for prompt in request.prompts])
    if request.tools:
        size += sum([len(str(tool.parameters)) + len(tool.description) + len(tool.name) for tool in request.tools])
    return size


def _guess_tokens(num_chars: int) -> int:
    return num_chars // _CHARS_PER_TOKEN + 1
