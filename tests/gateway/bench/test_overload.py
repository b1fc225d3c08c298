"""The overload bench counts what it says it counts; how much that is, is not a test's business."""

from __future__ import annotations

import json
from itertools import repeat

import pytest

from gateway.bench import overload
from gateway.bench.overload import summarise
from gateway.bench.tenant_load import Reply, Tenant


def replies(status: int, took_s: float, num: int, *, has_retry_after: bool = True) -> list[Reply]:
    """One a second, from second 0 on."""
    return [Reply(float(second), took_s, status, has_retry_after) for second in range(num)]


def test_goodput_counts_what_is_answered_in_time_and_in_the_overload() -> None:
    tenants = [Tenant("modest", 1.0, repeat(b"")), Tenant("greedy", 20.0, repeat(b""))]
    alone = {"modest": replies(200, 0.5, 10)}
    together = {
        "modest": replies(200, 0.9, 101),
        "greedy": [*replies(200, 11.0, 50), *replies(429, 0.1, 101), *replies(0, 60.0, 3)],
    }
    found = summarise(1.0, tenants, alone, together)
    assert found["goodput_share"] == 1.0, "late answers do not count, nor the last, which came after the end"
    assert (found["num_shed"], found["num_failed"]) == (101, 3)
    assert (found["longest_shed_s"], found["all_say_retry_after"]) == (0.1, True)
    modest, greedy = found["tenants"]
    assert (modest["p99_alone_s"], modest["p99_s"]) == (0.5, 0.9)
    assert (greedy["p99_alone_s"], greedy["num_offered"], greedy["num_served"]) == (None, 154, 50)
    assert all(found["goals"].values())


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        (replies(429, 1.2, 3), "sheds within 1 s"),
        (replies(429, 0.1, 3, has_retry_after=False), "sheds say Retry-After"),
    ],
)
def test_a_goal_that_is_missed_is_told(changed: list[Reply], missed: str) -> None:
    tenants = [Tenant("modest", 1.0, repeat(b"")), Tenant("greedy", 2.0, repeat(b""))]
    together = {"modest": replies(200, 0.9, 101), "greedy": changed}
    found = summarise(1.0, tenants, {"modest": replies(200, 0.5, 10)}, together)
    assert [goal for goal, is_met in found["goals"].items() if not is_met] == [missed]


@pytest.mark.slow
def test_the_bench_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert overload.main(["--seconds", "4", "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["bench"] == "overload"
    assert line["capacity_per_s"] > 0
    assert line["num_shed"] > 0
    assert line["all_say_retry_after"]
    assert [row["num_served"] > 0 for row in line["tenants"]] == [True] * 4
