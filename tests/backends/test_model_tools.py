"""The in-process backend calls tools: laid out by templates, drawn by a grammar, read from tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from backends.config import LocalModelConfig
from backends.errors import InvalidConfig
from backends.local import LocalBackend
from backends.local_engine.model_tools import ModelTools, tool_json
from backends.local_engine.tool_formats.mistral import MistralFormat
from backends.protocol import (
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Message,
    SamplingParams,
    TokenDelta,
    Tool,
    ToolCall,
    ToolChoice,
    join_calls,
)
from engine.tokenizer import Tokenizer
from tests.engine import texts
from tests.engine.checkpoints import make_reference, save_reference

SCHEMA = {
    "type": "object",
    "properties": {"day": {"type": "integer"}},
    "required": ["day"],
    "additionalProperties": False,
}
TOOLS = (Tool("forecast", "Weather <|im_end|> of a day.", SCHEMA), Tool("now"))
HELLO = (Message("user", "hello"),)
LOOP = (
    Message("user", "Kiel?"),
    Message(
        "assistant", "", tool_calls=(ToolCall("call_1", "forecast", '{"day": 1}'), ToolCall("call_2", "now", "{}"))
    ),
    Message("tool", "rain", tool_call_id="call_1"),
    Message("tool", "noon", tool_call_id="call_2"),
)
HERMES = (
    "{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\\n</tools> Answer with <tool_call>.<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for c in m.tool_calls or [] %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{- c.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# One call a turn, arguments as text, ids of nine characters.
SINGLE = (
    "{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) }}{%- endif %}{%- for m in messages %}"
    "{%- if m.tool_calls %}{%- set c = m.tool_calls[0] %}"
    "{%- if m.tool_calls | length != 1 or c.id | length != 9 %}{{ raise_exception('one call') }}{%- endif %}"
    "{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments + c.id }}"
    "{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + m.tool_call_id }}"
    "{%- else %}{{- m.role + ': ' + m.content }}{%- endif %}"
    "{%- endfor %}"
)


def save_model(folder: Path, template: str, *markers: str) -> Path:
    raw = texts.byte_level(600)
    raw.add_tokens([AddedToken(each, special=False, normalized=False) for each in markers])
    model = make_reference(
        "Llama", seed=0, vocab_size=raw.get_vocab_size(), eos_token_id=2, max_position_embeddings=1024
    )
    save_reference(model, folder)
    return texts.save(raw, folder, template=template)


@pytest.fixture(scope="module", params=["told", "tokens"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template shows no tools, and one like Hermes."""
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "told":
        return save_model(path, texts.CHAT_TEMPLATE)
    return save_model(path, HERMES, "<tool_call>", "</tool_call>")


@pytest.fixture
async def backend(folder: Path) -> AsyncIterator[LocalBackend]:
    local = LocalBackend("tiny", LocalModelConfig(path=str(folder), device="cpu"))
    await local.start()
    yield local
    await local.close()


async def collect(backend: LocalBackend, **given: Any) -> tuple[str, tuple[ToolCall, ...], Finished]:
    request = GenerateRequest("r", **({"messages": HELLO, "tools": TOOLS, "thinking": False} | given))
    events: list[Event] = [event async for event in backend.generate(request)]
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    ending = events[-1]
    assert isinstance(ending, Finished)
    assert sum(delta.num_tokens for delta in deltas) == ending.usage.completion_tokens
    pieces = [piece for delta in deltas for piece in delta.tool_calls]
    return "".join(delta.text for delta in deltas), join_calls(pieces), ending


@pytest.mark.parametrize("seed", range(3))
async def test_a_random_model_makes_valid_calls_where_it_must(backend: LocalBackend, seed: int) -> None:
    assert "tools" in backend.capabilities
    sampling = SamplingParams(seed=seed, max_tokens=400)
    choice = ToolChoice("required", ("forecast",), parallel=False)
    text, made, ending = await collect(backend, sampling=sampling, tool_choice=choice)
    assert text == ""
    assert made[0].name == "forecast"
    assert made[0].call_id.startswith("call_")
    if ending.reason is FinishReason.TOOL_CALLS:
        assert isinstance(json.loads(made[0].arguments)["day"], int)
    else:
        assert ending.reason is FinishReason.LENGTH
    text, made, ending = await collect(
        backend, sampling=sampling, tool_choice=ToolChoice("required", ("now",), parallel=False)
    )
    assert text == ""
    assert {call.name for call in made} == {"now"}
    assert ending.reason is FinishReason.LENGTH or all(json.loads(call.arguments) == {} for call in made)


async def test_a_call_that_is_cut_off_ends_with_length(backend: LocalBackend) -> None:
    choice = ToolChoice("required", ("forecast",))
    _, made, ending = await collect(backend, sampling=SamplingParams(seed=0, max_tokens=3), tool_choice=choice)
    assert ending.reason is FinishReason.LENGTH
    assert all(call.arguments != "{}" for call in made)


async def test_a_stop_string_in_the_text_is_named(backend: LocalBackend) -> None:
    for seed in range(8):
        free, made, _ = await collect(backend, sampling=SamplingParams(seed=seed, max_tokens=24))
        stop = free[len(free) // 2 : len(free) // 2 + 2]
        if made or len(stop) < 2:
            continue
        sampling = SamplingParams(seed=seed, max_tokens=24, stop=(stop,))
        text, _, ending = await collect(backend, sampling=sampling)
        assert (text, ending.reason, ending.stop_string) == (free.partition(stop)[0], FinishReason.STOP, stop)
        return
    raise AssertionError("no seed made plain text")


async def test_without_a_call_to_be_made_there_is_text(backend: LocalBackend) -> None:
    sampling = SamplingParams(seed=0, max_tokens=24)
    text, made, ending = await collect(backend, sampling=sampling, tool_choice=ToolChoice("none"))
    assert made == ()
    assert ending.reason in (FinishReason.STOP, FinishReason.LENGTH)
    plain, _, _ = await collect(backend, sampling=sampling, tools=())
    assert text == plain, "the prompt is that without tools"


async def test_tools_are_counted_and_a_schema_that_cannot_be_enforced_is_left(backend: LocalBackend) -> None:
    plain = await backend.count_tokens(GenerateRequest("c", messages=HELLO))
    with_tools = await backend.count_tokens(GenerateRequest("c", messages=HELLO, tools=TOOLS))
    assert plain is not None
    assert with_tools is not None
    assert with_tools > plain + 20
    odd = {"type": "object", "properties": {"a": {"$ref": "https://elsewhere.example/a"}}}
    _, made, _ = await collect(
        backend,
        tools=(Tool("odd", "", odd),),
        tool_choice=ToolChoice("required"),
        sampling=SamplingParams(max_tokens=60),
    )
    assert made[0].name == "odd"


async def test_a_generation_left_inside_a_call_frees_its_blocks(backend: LocalBackend) -> None:
    request = GenerateRequest("r", messages=HELLO, tools=TOOLS, tool_choice=ToolChoice("required"), thinking=False)
    async for event in backend.generate(request):
        if isinstance(event, TokenDelta) and event.tool_calls:
            break
    while backend.engine.has_work():
        pass
    pool = backend.engine.scheduler.pool
    assert pool.num_available == pool.num_blocks


def rendered(tokenizer: Tokenizer, tools: ModelTools) -> str:
    ids = tokenizer.encode_chat(tools.messages(LOOP), tools=tool_json(TOOLS), lay_out=tools.lay_out)
    return "".join([tokenizer.bytes.text_of(token_id) for token_id in ids])


def test_a_template_gets_what_it_defines(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_model(tmp_path, HERMES, "<tool_call>", "</tool_call>"))
    tools = ModelTools(tokenizer, "auto")
    assert (tools.format.name, tools.uses_template) == ("hermes", True)
    text = rendered(tokenizer, tools)
    assert '<tool_call>\n{"name": "forecast", "arguments": {"day": 1}}\n</tool_call>' in text
    assert text.count("<tool_response>") == 2
    assert '"description": "Weather <|im_end|> of a day."' in text
    ids = tokenizer.encode_chat(tools.messages(LOOP), tools=tool_json(TOOLS), lay_out=tools.lay_out)
    # A caller's text is no control token; the template's are.
    assert ids.count(tokenizer.token_id("<|im_end|>")) == 5


def test_a_template_of_single_calls_gets_them_one_by_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_model(tmp_path, SINGLE, "[TOOL_CALLS]", "[ARGS]"))
    tools = ModelTools(tokenizer, "auto")
    assert (tools.format.name, tools.uses_template) == ("mistral", True)
    assert tokenizer.tool_support.text_arguments
    assert not tokenizer.tool_support.many_calls
    first, second = MistralFormat().call_id("call_1"), MistralFormat().call_id("call_2")
    assert len(first) == 9
    assert rendered(tokenizer, tools).endswith(
        f'[TOOL_CALLS]forecast[ARGS]{{"day": 1}}{first}[TOOL_RESULTS]rain{first}'
        f"[TOOL_CALLS]now[ARGS]{{}}{second}[TOOL_RESULTS]noon{second}"
    )


def test_a_template_without_tools_is_told_of_them(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_model(tmp_path, texts.CHAT_TEMPLATE))
    tools = ModelTools(tokenizer, "auto")
    assert (tools.format.name, tools.uses_template) == ("hermes", False)
    text = rendered(tokenizer, tools)
    assert text.startswith("<|im_start|>system\n# Tools")
    assert '"name": "forecast"' in text
    assert '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|im_end|>" in text


def test_an_unknown_format_is_refused_by_its_key() -> None:
    with pytest.raises(InvalidConfig, match="tool_format"):
        LocalModelConfig(path="x", tool_format="morse")  # type: ignore[arg-type]
