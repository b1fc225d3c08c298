"""Reads off a request what it says of tools, as routers see it."""

from __future__ import annotations

from collections.abc import Sequence

from classifier.text import own_text
from classifier.tool_features import OfferedTool, ToolUse, tool_features
from gateway.api.conversation import read_shape, turns_of
from gateway.api.request import InferenceRequest, TextPart, ToolResultPart, Turn


def read_tool_features(request: InferenceRequest, texts: Sequence[tuple[str, str]]) -> tuple[float, ...]:
    """Return the values of :data:`classifier.tool_features.TOOL_FEATURES` for a request that offers tools.

    Parameters
    ----------
    texts : its turns, as (role, text)
    """
    turns = turns_of(request.prompts[0])
    shape, choice = read_shape(turns), request.tool_choice
    use = ToolUse(
        [OfferedTool(each.name, each.description, each.parameters) for each in request.tools],
        choice.mode,
        bool(choice.names),
        shape.steps_in_turn if shape.in_tool_loop else 0,
        shape.num_calls,
        _last_result(turns) if shape.in_tool_loop else None,
        bool(shape.failed_results),
    )
    return tool_features(use, own_text(texts))


def _last_result(turns: Sequence[Turn]) -> str:
    parts = [part for turn in turns for part in turn.parts if isinstance(part, ToolResultPart)]
    return "\n".join([part.text for part in parts[-1].parts if isinstance(part, TextPart)])
