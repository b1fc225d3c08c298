"""Log-probabilities have OpenAI's shape where there are few or none (fault review S9)."""

from __future__ import annotations

import orjson
import pytest

from backends.protocol import Finished, FinishReason, SamplingParams, TokenLogprob
from gateway.api.answer_encoder import AnswerChoice, CompletionsEncoder, ResponseHead
from gateway.api.chat_codec import ChatEncoder
from gateway.api.completion_codec import CompletionEncoder
from gateway.api.request import InferenceRequest

HEAD = ResponseHead("id", 0, "model", "fp")
REQUEST = InferenceRequest(model="auto", prompts=("hi",), sampling=SamplingParams())


def answer(*entries: TokenLogprob, wants_logprobs: bool = True) -> AnswerChoice:
    """An answer that ended, with these log-probabilities."""
    finished = Finished(FinishReason.LENGTH)
    return AnswerChoice(0, logprobs=list(entries), finished=finished, wants_logprobs=wants_logprobs)


@pytest.mark.parametrize("top", [(), (("b", 2, -0.1),), (("a", 1, -2.0), ("b", 2, -0.1))])
def test_the_sampled_token_is_always_among_the_top(top: tuple[tuple[str, int, float], ...]) -> None:
    entry = TokenLogprob("a", 1, -2.0, top)
    found = CompletionEncoder(HEAD, REQUEST).choice(answer(entry))["logprobs"]["top_logprobs"]
    assert found == [{token: value for token, _, value in top} | {"a": -2.0}]


@pytest.mark.parametrize("encoder", [ChatEncoder, CompletionEncoder])
def test_an_answer_without_tokens_of_its_own_has_empty_logprobs(encoder: type[CompletionsEncoder]) -> None:
    shown = orjson.loads(orjson.dumps(encoder(HEAD, REQUEST).choice(answer())))["logprobs"]
    assert shown is not None
    assert all(not value for value in shown.values())
    assert encoder(HEAD, REQUEST).choice(answer(wants_logprobs=False))["logprobs"] is None
