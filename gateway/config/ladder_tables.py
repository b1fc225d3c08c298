"""Reads the tables whose keys are names: the ladder's tiers, the served models, their devices, the policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from backends.config import MODEL_KINDS, DeviceConfig, ModelConfig, device_key
from gateway.config.display import digest, shown_value
from gateway.config.errors import Problem
from gateway.config.raw_config import Leaf, Table
from gateway.config.table_reader import ConfigReader, first_source
from policies.errors import InvalidLadder
from policies.ladder import Ladder, check_ladder
from policies.policy import Policy
from policies.types import Tier

DEFAULT_POLICY = "default"


def read_ladder(reader: ConfigReader, node: Table | Leaf | None) -> Ladder:
    if not isinstance(node, dict):
        reader.problems.append(Problem("tiers", "expected a list of tables: write [[tiers]]", "no value given"))
        return ()
    tiers = [
        reader.read(Tier, each, f"tiers.{name}", given={"index": place, "name": name})
        for place, (name, each) in enumerate(node.items(), start=1)
    ]
    ladder = tuple(tier for tier in tiers if tier is not None)
    if len(ladder) == len(tiers):
        try:
            check_ladder(ladder)
        except InvalidLadder as error:
            reader.note(f"tiers.{error.tier}.{error.field_name}", f"is {error.value!r}; expected {error.expected}")
    return ladder


def read_models(reader: ConfigReader, node: Table | Leaf | None) -> dict[str, ModelConfig]:
    models: dict[str, ModelConfig] = {}
    for name, each in (node if isinstance(node, dict) else {}).items():
        path = f"models.{name}"
        if not isinstance(each, dict):
            reader.problems.append(Problem(path, f"is {each.value!r}; expected a table", each.source))
            continue
        kind, rest = _kind(each)
        if kind not in MODEL_KINDS:
            source = each["kind"].source if isinstance(each.get("kind"), Leaf) else "no value given"  # type: ignore[union-attr]
            message = f"is {kind!r}; expected one of {', '.join(map(repr, MODEL_KINDS))}"
            reader.problems.append(Problem(f"{path}.kind", message, source))
            continue
        reader.values[f"{path}.kind"] = kind
        reader.sources[f"{path}.kind"] = each["kind"].source if isinstance(each.get("kind"), Leaf) else "from its keys"  # type: ignore[union-attr]
        model = reader.read(MODEL_KINDS[kind], rest, path)
        if model is not None:
            models[name] = model
    return models


def read_devices(reader: ConfigReader, node: Table | Leaf | None) -> dict[str, DeviceConfig]:
    """``[devices.NAME]`` by the name's one spelling (:func:`backends.config.device_key`)."""
    devices: dict[str, DeviceConfig] = {}
    if isinstance(node, Leaf):
        reader.problems.append(Problem("devices", f"is {node.value!r}; expected a table", node.source))
    for name, each in (node if isinstance(node, dict) else {}).items():
        path = f"devices.{name}"
        key = device_key(name)
        if key is None:
            reader.problems.append(Problem(path, "is no device; expected cpu, cuda or cuda:N", first_source(each)))
        elif key in devices:
            reader.problems.append(Problem(path, f"is {key}, which another table describes", first_source(each)))
        elif device := reader.read(DeviceConfig, each, path):
            devices[key] = device
    return devices


def _kind(node: Table) -> tuple[Any, Table]:
    """A model's kind, written or plain from its keys, and the other keys."""
    rest = {key: each for key, each in node.items() if key != "kind"}
    written = node.get("kind")
    if isinstance(written, Leaf):
        return written.value, rest
    return ("remote" if "urls" in node else "local"), rest


def read_policies(reader: ConfigReader, table: Table, ladder: Ladder) -> dict[str, Policy]:
    """The default policy from ``[policy]``; each ``[policies.NAME]`` says only where it differs from that."""
    named = table.get("policies")
    policies: dict[str, Policy] = {}
    default = _policy(reader, table.get("policy"), "policy", DEFAULT_POLICY, ladder, None)
    if default is not None:
        policies[DEFAULT_POLICY] = default
    for name, node in (named if isinstance(named, dict) else {}).items():
        path = f"policies.{name}"
        if name == DEFAULT_POLICY:
            reader.problems.append(Problem(path, "the default policy is written as [policy]", "policies"))
        elif policy := _policy(reader, node, path, name, ladder, default):
            policies[name] = policy
    return policies


def _policy(
    reader: ConfigReader, node: Table | Leaf | None, path: str, name: str, ladder: Ladder, base: Policy | None
) -> Policy | None:
    numbered = _number_tiers(reader, node, path, {tier.name: tier.index for tier in ladder})
    given = {"name": name, "version": "1"}
    policy = reader.read(
        Policy, numbered, path, given=given, base=base, base_source="as in [policy]" if base else "default"
    )
    if policy is None:
        return None
    try:
        policy.check_against(ladder)
    except ValueError as error:
        reader.note(f"{path}.{getattr(error, 'field_name', '')}", str(error))
    # The version is the content: an edited policy is another version without anyone counting.
    content = {each.name: shown_value(getattr(policy, each.name)) for each in dataclasses.fields(policy)}
    return dataclasses.replace(policy, version=digest(content))


def _number_tiers(
    reader: ConfigReader, node: Table | Leaf | None, path: str, numbers: Mapping[str, int]
) -> Table | Leaf | None:
    """Tiers may be written by name in a policy; decisions know their numbers."""
    if not isinstance(node, dict):
        return node
    numbered = dict(node)
    allowed, thresholds = node.get("allowed_tiers"), node.get("thresholds")
    if isinstance(allowed, Leaf):
        written = [each.strip() for each in allowed.value.split(",")] if allowed.is_text else allowed.value
        if isinstance(written, list):
            known = [_number(reader, each, f"{path}.allowed_tiers", allowed.source, numbers) for each in written]
            numbered["allowed_tiers"] = Leaf([each for each in known if each is not None], allowed.source)
    if isinstance(thresholds, dict):
        numbered["thresholds"] = _number_keys(reader, thresholds, f"{path}.thresholds", numbers)
    sampling = node.get("sampling")
    if isinstance(sampling, dict) and isinstance(shares := sampling.get("shares"), dict):
        numbered["sampling"] = sampling | {"shares": _number_keys(reader, shares, f"{path}.sampling.shares", numbers)}
    escalation = node.get("escalation")
    if isinstance(escalation, dict) and isinstance(least := escalation.get("least_confidence"), dict):
        where = f"{path}.escalation.least_confidence"
        numbered["escalation"] = escalation | {"least_confidence": _number_keys(reader, least, where, numbers)}
    return numbered


def _number_keys(reader: ConfigReader, table: Table, path: str, numbers: Mapping[str, int]) -> Table:
    return {
        str(number): each
        for key, each in table.items()
        if (number := _number(reader, key, path, first_source(each), numbers)) is not None
    }


def _number(reader: ConfigReader, tier: Any, path: str, source: str, numbers: Mapping[str, int]) -> Any:
    if not isinstance(tier, str):
        return tier
    if tier in numbers:
        return numbers[tier]
    if tier.isascii() and tier.isdigit():
        return int(tier)
    reader.problems.append(Problem(path, f"{tier!r} is not a tier; known: {', '.join(map(repr, numbers))}", source))
    return None


def check_references(reader: ConfigReader, ladder: Ladder, models: Mapping[str, ModelConfig]) -> None:
    known = ", ".join(map(repr, models)) or "none"
    for tier in ladder:
        if tier.model not in models and f"models.{tier.model}.kind" not in reader.values:
            reader.note(
                f"tiers.{tier.name}.model", f"is {tier.model!r}, which no [models] table describes; known: {known}"
            )
