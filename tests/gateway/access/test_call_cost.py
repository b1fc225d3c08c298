"""No call costs more than what was covered before it: a prompt's tokens never exceed the bound."""

from __future__ import annotations

from decimal import Decimal

import pytest

from backends.protocol import (
    Audio,
    File,
    GenerateRequest,
    Image,
    Message,
    OutputFormat,
    SamplingParams,
    Thought,
    Tool,
    ToolCall,
)
from gateway.access.call_cost import most_generation_nano_usd
from policies.types import Tier

TIER = Tier(1, "only", "m", price_per_input_token_usd=Decimal("0.000000001"))
WORD = "\u00e9" * 100  # of two bytes each, and a token may be a byte
HI = (Message("user", "hi"),)


def bound(request: GenerateRequest) -> int:
    return most_generation_nano_usd(TIER, request)


def request(*messages: Message, **fields: object) -> GenerateRequest:
    return GenerateRequest("r", messages=messages or HI, sampling=SamplingParams(max_tokens=1), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "longer",
    [
        request(Message("user", "hi" + WORD)),
        request(Message("user", "hi", name=WORD)),
        request(Message("user", "hi", reasoning=WORD)),
        request(Message("user", "hi", tool_calls=(ToolCall("1", "f", WORD),))),
        request(Message("user", "hi", tool_calls=(ToolCall("1", WORD, "{}"),))),
        request(Message("user", "hi", tool_call_id=WORD)),
        request(Message("user", "hi", thoughts=(Thought("", WORD, is_redacted=True),))),
        request(Message("user", "hi", parts=("hi", Image("https://x/y.png")))),
        request(Message("user", "hi", parts=("hi", Audio("A" * 16 * 200, "mp3")))),
        request(Message("user", "hi", parts=("hi", File("data:,")))),
        request(Message("user", "hi", parts=("hi", File("data:,", WORD)))),
        request(tools=(Tool("f", WORD),)),
        request(tools=(Tool("f", "", {"type": "object", "title": WORD}),)),
        request(output_format=OutputFormat("json_schema", {"title": WORD})),
        request(continued=Message("assistant", WORD)),
        request(continued=Message("assistant", "hi", tool_calls=(ToolCall("1", "f", WORD),))),
    ],
)
def test_all_that_a_model_reads_is_covered(longer: GenerateRequest) -> None:
    assert bound(longer) >= bound(request()) + 200


def test_media_are_covered_by_the_page_and_by_the_second() -> None:
    pages = "A" * 100 * 1365
    assert bound(request(Message("user", "", parts=(File(pages),)))) >= 100 * 3000
    minute = "A" * 60 * 1333
    assert 60 * 80 <= bound(request(Message("user", "", parts=(Audio(minute, "mp3"),)))) < 60 * 100


def test_a_template_has_room() -> None:
    assert bound(request(Message("user", ""))) >= 64 + 16
    assert bound(request(*[Message("user", "")] * 100)) >= 100 * 16
    assert bound(request(tools=(Tool("f"),) * 100)) >= 100 * 64
