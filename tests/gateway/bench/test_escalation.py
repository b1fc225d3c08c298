"""What the escalation bench makes of replies and runs."""

from __future__ import annotations

import pytest

from backends.protocol import Finished, FinishReason, Usage
from gateway.bench.escalation import describe_escalations, describe_outcome, print_tables
from gateway.bench.escalation_pairs import LadderComparison, TaskRun, summarise
from gateway.bench.ladder_client import LadderReply


def reply(text: str, tier: int, *, is_right: bool, doubted: tuple[int, ...] = ()) -> LadderReply:
    return LadderReply(is_right, text, tier, 0.01 * tier, None, 0.5, (), None, "benefit", 0.1, 0.001, 5, doubted)


TIERS = {
    "tier-1": [reply("a", 1, is_right=True), reply("b", 1, is_right=False), reply("c", 1, is_right=False)],
    "tier-2": [reply("A", 2, is_right=True), reply("B", 2, is_right=True), reply("C", 2, is_right=False)],
}


def test_replies_become_accuracy_cost_and_what_going_up_was_worth() -> None:
    replies = [
        reply("A", 2, is_right=True, doubted=(1,)),
        reply("B", 2, is_right=True, doubted=(1,)),
        reply("other", 2, is_right=False, doubted=(1,)),
    ]
    found = describe_escalations(replies, TIERS)
    # Three went up, of which two had been wrong; one of those was mended, and one answer is not its tier's own.
    assert found["escalated"] == 3
    assert found["escalated_equal"] == 2
    assert found["rightly_doubted_share"] == pytest.approx(2 / 3)
    assert found["mended_share"] == 0.5
    outcome = describe_outcome(replies)
    assert outcome["accuracy"] == pytest.approx(2 / 3)
    assert outcome["accuracy_95"][0] < 2 / 3 < outcome["accuracy_95"][1]
    assert outcome["cost_usd"] == pytest.approx(0.02)
    assert outcome["shares"] == {"2": 1.0}
    stayed = describe_escalations(TIERS["tier-1"], TIERS)
    assert (stayed["escalated"], stayed["mended_share"]) == (0, None)


def run(text: str, compute_s: float, num_steps: int, accepted: int = 0, rejected: int = 0) -> TaskRun:
    usage = Usage(10, 8, accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected)
    return TaskRun(text, compute_s, num_steps, Finished(FinishReason.STOP, usage))


def test_runs_become_what_predictions_saved(capsys: pytest.CaptureFixture[str]) -> None:
    comparisons = [
        LadderComparison(run("x", 0.1, 8), run("y", 1.0, 8), run("y", 0.25, 2, accepted=6, rejected=2)),
        LadderComparison(run("x", 0.1, 8), run("z", 1.0, 8), run("w", 0.75, 6, accepted=0, rejected=8)),
    ]
    found = summarise(comparisons)
    assert (found["tasks"], found["equal"]) == (2, 1)
    assert found["accepted_share"] == pytest.approx(6 / 16)
    assert found["steps_saved_share"] == pytest.approx(0.5)
    assert found["compute_saved_share"] == pytest.approx(0.5)
    assert (found["steps_anew"], found["answer_tokens"]) == (8, 8)
    policies = {"next": describe_outcome(TIERS["tier-2"]) | describe_escalations(TIERS["tier-2"], TIERS)}
    tiers = {name: describe_outcome(each) for name, each in TIERS.items()}
    endpoint = {"card": {"tasks": 3}, "tiers": tiers, "policies": policies}
    predictions = {"card": {}, "pairs": [{"low": 1, "high": 2, "any": found}], "long": {"right": found}}
    print_tables({"bench": "escalation", "endpoint": endpoint, "predictions": predictions})
    printed = capsys.readouterr().out
    assert "1 → 2" in printed
    assert "long, right" in printed
    assert "66.7%" in printed
