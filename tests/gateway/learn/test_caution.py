"""After an alarm a candidate asks more of every answer below the top, and only what came after it is judged on."""

from __future__ import annotations

from gateway.learn.decision import cautious


def test_caution_asks_more_and_invents_nothing() -> None:
    derived = {
        "confidence": 0.95,
        "floors": [
            {"floor": 0.97, "thresholds": {"1": 0.9, "2": 0.6}, "quality_value_usd": "0.05"},
            {"floor": 0.99, "expected": {}},
        ],
    }
    first, second = cautious(derived, 4.0)["floors"]
    assert first == {"floor": 0.97, "thresholds": {"1": 0.975, "2": 0.9}, "quality_value_usd": "0.200"}
    assert second == {"floor": 0.99, "expected": {}}
    assert cautious(derived, 1.0)["floors"][0]["thresholds"] == {"1": 0.9, "2": 0.6}
