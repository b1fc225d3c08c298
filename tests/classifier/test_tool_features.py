"""What requests say of tools: read in bounded time, learnt from, kept in the log, and nothing to those without any."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from classifier.encoder import read_requests
from classifier.errors import ArtifactUnsupported
from classifier.features import feature_names
from classifier.hashing import HashConfig
from classifier.log_view import ViewReader, tool_entries, tool_values
from classifier.router import ArtifactRouter
from classifier.table import TrainingTable
from classifier.tool_features import TOOL_FEATURES, OfferedTool, ToolUse, chat_request, tool_features
from classifier.training import fit_router
from classifier.types import RouterRequest
from tests.classifier.conftest import SMALL

WORDS = ("rain", "train", "stock", "song", "river", "chess")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


def tool(name: str, description: str = "", parameters: Any = SCHEMA) -> OfferedTool:
    return OfferedTool(name, description, parameters)


def named(use: ToolUse, text: str = "") -> dict[str, float]:
    return dict(zip(TOOL_FEATURES, tool_features(use, text), strict=True))


def with_tools(num: int, rng: random.Random) -> RouterRequest:
    text = " ".join(rng.choices(WORDS, k=6))
    return RouterRequest((("user", text),), tools=tool_features(ToolUse([tool(f"t{n}") for n in range(num)]), text))


@pytest.fixture(scope="module")
def tool_router() -> ArtifactRouter:
    """A router of prompts whose words say nothing: with many tools the cheap tier is wrong, with few it is right."""
    rng = random.Random(0)
    counts = [rng.choice((0, 1, 30)) for _ in range(300)]
    requests = [with_tools(count, rng) for count in counts]
    scores = np.array([[float(rng.random() < (0.1 if count == 30 else 0.95)), 1.0] for count in counts])
    return ArtifactRouter(fit_router(TrainingTable.build(requests, scores), seed=0, options=SMALL).artifact)


def test_a_request_without_tools_has_none() -> None:
    assert tool_features(ToolUse(), "Which tools?") == ()
    assert chat_request([{"role": "user", "content": "hi"}], []) == RouterRequest((("user", "hi"),))


def test_what_is_offered_and_asked_for() -> None:
    use = ToolUse([tool("get_forecast", "Weather of a city."), tool("playSong")], "required", is_named=True)
    found = named(use, "What is the weather forecast?")
    assert np.expm1([found["num_tools"], found["num_parameters"], found["num_required_parameters"]]) == pytest.approx(
        [2, 4, 2]
    )
    assert (found["is_call_required"], found["is_call_forbidden"], found["is_tool_named"]) == (1.0, 0.0, 1.0)
    assert found["best_tool_overlap"] == 0.5 > found["second_tool_overlap"] == 0.0
    assert found["best_name_overlap"] == 0.5
    assert sum(value for name, value in found.items() if name.startswith("tool_name_")) == 2.0


@given(st.lists(st.text(max_size=8), max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_tools_does_not_count(names: list[str], rng: random.Random) -> None:
    tools = [tool(name, name) for name in names]
    shuffled = rng.sample(tools, len(tools))
    assert tool_features(ToolUse(tools), "a b") == pytest.approx(tool_features(ToolUse(shuffled), "a b"))


def test_a_loop_is_counted_from_the_last_user_turn() -> None:
    def call(number: int) -> dict[str, Any]:
        return {"role": "assistant", "content": None, "tool_calls": [{"id": f"c{number}"}]}

    def result(text: Any) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": "c", "content": text}

    before = [{"role": "user", "content": "a"}, call(0), result("{}")]
    answer = {"role": "assistant", "content": "so"}
    loop = [answer, {"role": "user", "content": "b"}, call(1), result("ok"), call(2), result("Error: no such file")]
    tools = [{"type": "function", "function": {"name": "f"}}]

    def read(*messages: dict[str, Any]) -> dict[str, float]:
        return dict(zip(TOOL_FEATURES, chat_request(messages, tools).tools, strict=True))

    found = read(*before, *loop)
    assert np.expm1([found["loop_depth"], found["num_calls"]]) == pytest.approx([2, 3])
    assert (found["is_last_result_error"], found["is_last_result_json"]) == (1.0, 0.0)
    asked = read(*before)
    assert (asked["is_last_result_error"], asked["is_last_result_json"]) == (0.0, 1.0)
    # What a client tells of the surroundings behind a result opens no turn.
    assert read(*before, {"role": "user", "content": "<environment>"})["loop_depth"] == asked["loop_depth"] > 0
    fresh = read(*before, answer, {"role": "user", "content": "c"})
    assert (fresh["loop_depth"], fresh["last_result_chars"]) == (0.0, 0.0)
    parts = [{"type": "text", "text": "[1]"}, {"type": "image_url"}]
    assert (
        chat_request([*before[:2], result(parts)], tools).tools
        == chat_request([*before[:2], result("[1]")], tools).tools
    )


def test_five_hundred_large_tools_are_read_in_bounded_time() -> None:
    deep: Any = {"type": "object"}
    for _ in range(2000):
        deep = {"properties": {"a": deep}, "description": "word " * 100}
    tools = [tool(f"t{n}", "word " * 20_000, deep) for n in range(500)]
    begun_s = time.process_time()
    found = tool_features(ToolUse(tools, last_result="x" * 1_000_000), "word " * 10_000)
    # Read whole it would be minutes.
    assert time.process_time() - begun_s < 5.0
    assert np.isfinite(found).all()


def test_a_router_learns_what_words_do_not_say(tool_router: ArtifactRouter) -> None:
    rng = random.Random(1)
    few, many = ([with_tools(num, rng) for _ in range(40)] for num in (1, 30))
    good = [np.mean([each.tiers[0].p_as_good for each in tool_router.predict(part)]) for part in (few, many)]
    assert good[0] > 0.8 > 0.4 > good[1]
    assert tool_router.reads_tools
    names = feature_names(2, reads_tools=True)
    assert tool_router.artifact.metadata["features"] == list(names) == [*feature_names(2), *TOOL_FEATURES]


def test_the_log_keeps_what_was_read(tool_router: ArtifactRouter) -> None:
    """And of a request without tools no more than before."""
    rng = random.Random(2)
    requests = [with_tools(num, rng) for num in (0, 1, 30)]
    said = tool_router.predict(requests)
    reader = ViewReader(2, tool_router.num_components, reads_tools=True)
    rows = [reader.read(each.features, [(t.tier, t.p_right, t.p_as_good) for t in each.tiers], 0.0) for each in said]
    views = reader.stack([row for row in rows if row is not None])
    raw = read_requests(requests, 2, HashConfig(), reads_tools=True)
    assert views.dense == pytest.approx(raw.dense)
    assert [tool_values(each.features) for each in said] == [pytest.approx(each.tools) for each in requests]
    assert not set(said[0].features) & set(TOOL_FEATURES)
    assert tool_entries(requests[0].tools or [0.0] * len(TOOL_FEATURES)) == {}
    assert len(reader.stack([])) == 0


def test_a_router_without_tools_is_what_it_was(tool_router: ArtifactRouter) -> None:
    """The shipped one takes no notice of tools; a fit on requests without any makes the artifact that it always did."""
    shipped, rng = ArtifactRouter.load(), random.Random(3)
    plain = [with_tools(0, rng) for _ in range(5)]
    with_some = [RouterRequest(each.turns, tools=with_tools(9, rng).tools) for each in plain]
    assert not shipped.reads_tools
    for one, other in zip(shipped.predict(plain), shipped.predict(with_some), strict=True):
        assert (one.tiers, one.novelty, one.features) == (other.tiers, other.novelty, other.features)
    table = TrainingTable.build([with_tools(0, rng) for _ in range(60)], np.array([[n % 2, 1.0] for n in range(60)]))
    assert fit_router(table, seed=0, options=SMALL).artifact.metadata["features"] == list(feature_names(2))


def test_other_features_are_refused(tool_router: ArtifactRouter) -> None:
    names = [*feature_names(2), *TOOL_FEATURES[1:]]
    with pytest.raises(ArtifactUnsupported, match="other features"):
        ArtifactRouter(tool_router.artifact.with_metadata(features=names))
