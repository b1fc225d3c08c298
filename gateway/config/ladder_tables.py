"""Reads the tables whose keys are names: tiers, served models, prices of their vectors, devices, policies, aliases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from backends.config import MODEL_KINDS, DeviceConfig, ModelConfig, device_key
from gateway.config.policy_body import read_policy
from gateway.config.raw_config import Leaf, Table
from gateway.config.sections import EmbeddingConfig
from gateway.config.table_reader import ConfigReader, join
from policies.errors import InvalidLadder
from policies.ladder import Ladder, check_ladder
from policies.policy import Policy
from policies.types import Tier

DEFAULT_POLICY = "default"
AUTO = "auto"

_KIND: Any = Literal[tuple(MODEL_KINDS)]

# Keys of a policy and of its parts that are tables with a tier as key.
_TABLES_BY_TIER = ("thresholds", "shares", "least_confidence")
_POLICY_PARTS = ("sampling", "escalation")


def read_ladder(reader: ConfigReader, node: Table | Leaf | None) -> Ladder:
    """Return the tiers in the order written, none where any of them cannot be read."""
    if not isinstance(node, dict):
        reader.refuse("tiers", "expected a list of tables: write [[tiers]]", node)
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
    """Return the served models by name, each as the class of its kind."""
    models: dict[str, ModelConfig] = {}
    for name, table in reader.named_tables(node, "models"):
        path, plain = f"models.{name}", "remote" if "urls" in table else "local"
        kind = reader.read_value(_KIND, table.get("kind"), f"{path}.kind", plain, default_source="from its keys")
        if f"{path}.kind" not in reader.values:
            # Which keys there are depends on the kind.
            continue
        rest = {key: each for key, each in table.items() if key != "kind"}
        if model := reader.read(MODEL_KINDS[kind], rest, path):
            models[name] = model
    return models


def read_devices(reader: ConfigReader, node: Table | Leaf | None) -> dict[str, DeviceConfig]:
    """Return ``[devices.NAME]`` by the name's one spelling (:func:`backends.config.device_key`)."""
    devices: dict[str, DeviceConfig] = {}
    for name, table in reader.named_tables(node, "devices"):
        path, key = f"devices.{name}", device_key(name)
        if key is None:
            reader.refuse(path, "is no device; expected cpu, cuda or cuda:N", table)
        elif key in devices:
            reader.refuse(path, f"is {key}, which another table describes", table)
        elif device := reader.read(DeviceConfig, table, path):
            devices[key] = device
    return devices


def read_embeddings(
    reader: ConfigReader, node: Table | Leaf | None, models: Table | Leaf | None
) -> dict[str, EmbeddingConfig]:
    """Return ``[embeddings.NAME]`` by served model; each must be described in ``models``, the written ``[models]``."""
    found: dict[str, EmbeddingConfig] = {}
    known = models if isinstance(models, dict) else {}
    for name, table in reader.named_tables(node, "embeddings"):
        path = f"embeddings.{name}"
        if name not in known:
            reader.refuse(path, f"is no served model; known: {', '.join(map(repr, known)) or 'none'}", table)
        elif embedding := reader.read(EmbeddingConfig, table, path):
            found[name] = embedding
    return found


def read_policies(
    reader: ConfigReader, default: Table | Leaf | None, named: Table | Leaf | None, ladder: Ladder
) -> dict[str, Policy]:
    """Return the policies by name; each ``[policies.NAME]`` says only where it differs from ``[policy]``."""
    numbers = {tier.name: tier.index for tier in ladder}
    if isinstance(default, dict):
        default = _number_tiers(reader, default, "policy", numbers)
    base = read_policy(reader, default, "policy", DEFAULT_POLICY, ladder)
    policies = {DEFAULT_POLICY: base} if base else {}
    for name, table in reader.named_tables(named, "policies"):
        path = f"policies.{name}"
        if name == DEFAULT_POLICY:
            reader.refuse(path, "the default policy is written as [policy]", table)
            continue
        numbered = _number_tiers(reader, table, path, numbers)
        if policy := read_policy(reader, numbered, path, name, ladder, base=base):
            policies[name] = policy
    return policies


def read_aliases(
    reader: ConfigReader,
    node: Table | Leaf | None,
    ladder: Ladder,
    models: Table | Leaf | None,
    policies: Iterable[str],
) -> dict[str, str]:
    """Return ``[aliases]``: name, or beginning of names before a ``*`` -> what it stands for.

    ``models`` is the written ``[models]``. A target is a name itself, so no alias leads to another.
    """
    if isinstance(node, Leaf):
        reader.refuse("aliases", f"is {node.value!r}; expected a table", node)
        return {}
    tiers = [name for tier in ladder for name in (tier.name, f"tier-{tier.index}")]
    known = dict.fromkeys((AUTO, *tiers, *(models if isinstance(models, dict) else ()), *policies))
    found: dict[str, str] = {}
    for name, each in (node or {}).items():
        path = join("aliases", name)
        target = reader.read_value(str, each, path, None)
        if "*" in name[:-1] or not name:
            reader.refuse(path, "is no name; expected one with at most one *, at its end", each)
        elif name in known:
            reader.refuse(path, "is the name of a policy, a tier or a model already", each)
        elif target is not None and target not in known:
            names = ", ".join(map(repr, known))
            reader.refuse(path, f"is {target!r}; expected a policy, a tier or a model: {names}", each)
        elif target is not None:
            found[name] = target
    return found


def _number_tiers(reader: ConfigReader, table: Table, path: str, numbers: Mapping[str, int]) -> Table:
    """Return a policy's table with tiers by number, which decisions know; they may be written by name."""
    numbered: Table = {}
    for key, node in table.items():
        where = join(path, key)
        if key == "allowed_tiers" and isinstance(node, Leaf):
            node = _number_list(reader, node, where, numbers)
        elif key in _TABLES_BY_TIER and isinstance(node, dict):
            keys = ((_number(reader, tier, where, each, numbers), each) for tier, each in node.items())
            node = {str(number): each for number, each in keys if number is not None}
        elif key in _POLICY_PARTS and isinstance(node, dict):
            node = _number_tiers(reader, node, where, numbers)
        numbered[key] = node
    return numbered


def _number_list(reader: ConfigReader, leaf: Leaf, path: str, numbers: Mapping[str, int]) -> Leaf:
    written = [each.strip() for each in leaf.value.split(",")] if leaf.is_text else leaf.value
    if not isinstance(written, list):
        return leaf
    known = [_number(reader, each, path, leaf, numbers) if isinstance(each, str) else each for each in written]
    return Leaf([each for each in known if each is not None], leaf.source)


def _number(reader: ConfigReader, tier: str, path: str, node: Table | Leaf, numbers: Mapping[str, int]) -> int | None:
    if tier in numbers:
        return numbers[tier]
    if tier.isascii() and tier.isdigit():
        return int(tier)
    reader.refuse(path, f"{tier!r} is not a tier; known: {', '.join(map(repr, numbers))}", node)
    return None


def check_references(reader: ConfigReader, ladder: Ladder, node: Table | Leaf | None) -> None:
    """Refuse tiers whose model has no table in ``node``, the written ``[models]``; a table with problems counts."""
    described = node if isinstance(node, dict) else {}
    known = ", ".join(map(repr, described)) or "none"
    for tier in ladder:
        if tier.model not in described:
            reader.note(
                f"tiers.{tier.name}.model", f"is {tier.model!r}, which no [models] table describes; known: {known}"
            )
