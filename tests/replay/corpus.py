"""All scenarios, each with a server of its own."""

from __future__ import annotations

from tests.replay import admin_corpus, fault_corpus, generation_corpus, key_corpus
from tests.replay.recorder import Scenario

SCENARIOS = (
    Scenario("open", generation_corpus.CONFIG, generation_corpus.play),
    Scenario("upstream", fault_corpus.UPSTREAM_CONFIG, fault_corpus.play_upstream, joins_deltas=True),
    Scenario("tight", fault_corpus.TIGHT_CONFIG, fault_corpus.play_tight),
    Scenario("keys", key_corpus.CONFIG, key_corpus.play, key_corpus.COMMANDS),
    Scenario("admin", admin_corpus.CONFIG, admin_corpus.play),
)
