"""Groups models that one engine can serve: those that differ only in what a request can carry.

Two tiers over the same weights, one that thinks and is drafted for and one that answers at once, need one engine: one
batch reads the weights once for both, and one KV pool holds what both computed. What is the engine's own (where and how
it computes, how long a context it keeps, which drafter it has) must be equal; models that differ in it get engines of
their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from backends.config import LocalModelConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Holds the models of one engine.

    Attributes
    ----------
    members : their names, in the configuration's order; the engine has the first one's
    config : what the engine is built from: places and KV memory of all members together, and the drafter that those
        have who have one
    drafter_path : checkpoint of that drafter, if a model drafts
    """

    members: tuple[str, ...]
    config: LocalModelConfig
    drafter_path: str | None

    @classmethod
    def alone(cls, name: str, config: LocalModelConfig, drafter_path: str | None = None) -> EngineGroup:
        """Return a group of one model, with an engine to itself."""
        return cls((name,), config, drafter_path)

    def takes(self, config: LocalModelConfig, drafter_path: str | None) -> bool:
        """Return whether a further model can be served by the same engine."""
        if _engine_of(config) != _engine_of(self.config):
            return False
        modes = self.config.speculation.mode, config.speculation.mode
        if "off" in modes:
            return True
        return config.speculation == self.config.speculation and drafter_path == self.drafter_path

    def joined_by(self, name: str, config: LocalModelConfig, drafter_path: str | None) -> EngineGroup:
        """Return the group with one more model, which it must take."""
        drafts = self.config.speculation.mode == "off" and config.speculation.mode != "off"
        kv_cache_bytes = self.config.kv_cache_bytes
        merged = replace(
            self.config,
            max_num_seqs=self.config.max_num_seqs + config.max_num_seqs,
            kv_cache_bytes=None if kv_cache_bytes is None else kv_cache_bytes + (config.kv_cache_bytes or 0),
            drafter=config.drafter if drafts else self.config.drafter,
            speculation=config.speculation if drafts else self.config.speculation,
        )
        return EngineGroup((*self.members, name), merged, drafter_path if drafts else self.drafter_path)


def _engine_of(config: LocalModelConfig) -> tuple[object, ...]:
    """Return what models of one engine have in common."""
    return (
        config.path,
        config.dtype,
        config.cpu_compute,
        config.activations,
        config.load_format,
        config.device,
        config.tensor_parallel,
        config.threads,
        config.context_length,
        config.max_batch_tokens,
        config.kv_cache_bytes is None,
    )


def engine_groups(models: Mapping[str, ModelConfig]) -> dict[str, EngineGroup]:
    """Return every local model's name → the group that its engine serves."""
    groups: list[EngineGroup] = []
    for name, config in models.items():
        if not isinstance(config, LocalModelConfig):
            continue
        drafter_path = drafter_path_of(config, models) if config.speculation.mode == "draft" else None
        place = next((i for i, group in enumerate(groups) if group.takes(config, drafter_path)), None)
        if place is None:
            groups.append(EngineGroup.alone(name, config, drafter_path))
        else:
            groups[place] = groups[place].joined_by(name, config, drafter_path)
    return {name: group for group in groups for name in group.members}


def drafter_path_of(config: LocalModelConfig, models: Mapping[str, ModelConfig]) -> str | None:
    """Return the checkpoint that drafts: that of the model ``drafter`` names, or ``drafter`` itself as a path."""
    named = models.get(config.drafter) if config.drafter is not None else None
    return named.path if isinstance(named, LocalModelConfig) else config.drafter
