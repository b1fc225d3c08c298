"""The in-process backend on a random checkpoint with a real tokenizer, against transformers and its own contract."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from backends.config import LocalModelConfig, SpeculationConfig
from backends.errors import (
    BackendUnavailable,
    ContextLengthExceeded,
    ModelLoadError,
    RequestRejected,
    UnsupportedByBackend,
)
from backends.local import LocalBackend
from backends.protocol import (
    Backend,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Message,
    SamplingParams,
    TokenDelta,
)
from backends.weights import WeightPool
from tests.engine import texts
from tests.engine.checkpoints import make_reference, save_reference

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
HELLO = (Message("user", "hello world"),)


def make_folder(folder: Path, *, seed: int = 0, template: str | None = texts.CHAT_TEMPLATE) -> Any:
    tokenizer = texts.byte_level()
    model = make_reference("Llama", seed=seed, vocab_size=tokenizer.get_vocab_size(), eos_token_id=2)
    save_reference(model, folder)
    texts.save(tokenizer, folder, template=template)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_folder(path)
    return path


@pytest.fixture(scope="module")
def weights() -> WeightPool:
    return WeightPool()


@pytest.fixture
async def backend(folder: Path, weights: WeightPool) -> AsyncIterator[LocalBackend]:
    local = LocalBackend("tiny", LocalModelConfig(path=str(folder), device="cpu"), weights=weights)
    await local.start()
    yield local
    await local.close()


async def collect(backend: LocalBackend, request: GenerateRequest) -> tuple[list[TokenDelta], Finished]:
    events: list[Event] = [event async for event in backend.generate(request)]
    endings = [event for event in events if isinstance(event, Finished)]
    assert len(endings) == 1
    assert events[-1] is endings[0]
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    assert sum(delta.num_tokens for delta in deltas) == endings[0].usage.completion_tokens
    return deltas, endings[0]


async def test_tokens_of_a_late_event_loop_go_out_together(backend: LocalBackend) -> None:
    request = GenerateRequest("late", messages=HELLO, sampling=replace(GREEDY, ignore_eos=True))
    stream = backend.generate(request)
    first = await anext(aiter(stream))
    assert isinstance(first, TokenDelta)
    assert first.num_tokens < 24, "else nothing was left to wait for"
    # The loop is held until the engine has made every token.
    while backend.engine.stats().num_running:
        pass
    rest = [event async for event in stream if isinstance(event, TokenDelta)]
    assert first.num_tokens + sum(delta.num_tokens for delta in rest) == 24
    # One delta that was being waited for, all that came meanwhile, and what the ending sets free.
    assert len(rest) <= 3


def text_of(deltas: list[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


async def idle(backend: LocalBackend) -> None:
    for _ in range(2000):
        if not backend.engine.has_work():
            break
        await asyncio.sleep(0.001)
    pool = backend.engine.scheduler.pool
    assert pool.num_available == pool.num_blocks


async def test_greedy_chat_is_what_transformers_says(backend: LocalBackend, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert isinstance(backend, Backend)
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello world"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    expected = theirs.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :]
    deltas, ending = await collect(backend, GenerateRequest("r", messages=HELLO, sampling=GREEDY))
    assert text_of(deltas) == tokenizer.decode(expected, skip_special_tokens=True)
    assert ending.usage.prompt_tokens == prompt.shape[1]
    assert ending.usage.completion_tokens == len(expected)
    assert ending.compute_measured
    assert ending.compute_s > 0
    assert await backend.count_tokens(GenerateRequest("c", messages=HELLO)) == prompt.shape[1]


async def test_a_prompt_and_its_ids_say_the_same(backend: LocalBackend) -> None:
    by_text, _ = await collect(backend, GenerateRequest("r", prompt="seven plus nine", sampling=GREEDY))
    ids = tuple(backend._prompts.tokenizer.encode("seven plus nine"))
    by_ids, _ = await collect(backend, GenerateRequest("r", prompt_token_ids=ids, sampling=GREEDY))
    assert text_of(by_text) == text_of(by_ids)
    echoed, _ = await collect(backend, GenerateRequest("r", prompt="seven plus nine", sampling=GREEDY, echo=True))
    assert text_of(echoed) == "seven plus nine" + text_of(by_text)


async def test_stop_strings_cut_the_text_and_end_the_work(backend: LocalBackend) -> None:
    free, _ = await collect(backend, GenerateRequest("r", messages=HELLO, sampling=GREEDY))
    text = text_of(free)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    sampling = SamplingParams(temperature=0.0, max_tokens=24, stop=("never there", stop))
    deltas, ending = await collect(backend, GenerateRequest("r", messages=HELLO, sampling=sampling))
    assert text_of(deltas) == text[: text.index(stop)]
    assert (ending.reason, ending.stop_string) == (FinishReason.STOP, stop)
    assert ending.usage.completion_tokens <= 24
    many = SamplingParams(temperature=0.0, max_tokens=24, stop=(*(f"stop {i}" for i in range(1000)), stop))
    assert text_of((await collect(backend, GenerateRequest("r", messages=HELLO, sampling=many)))[0]) == text_of(deltas)


async def test_logprobs_join_to_the_text_and_agree_with_scoring(backend: LocalBackend) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=10, logprobs=3, ignore_eos=True)
    deltas, _ = await collect(backend, GenerateRequest("r", prompt="seven plus", sampling=sampling))
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert len(entries) == 10
    for entry in entries:
        assert len(entry.top) == 3
        assert entry.top[0][1:] == (entry.token_id, pytest.approx(entry.logprob))
    prompt_ids = (*backend._prompts.tokenizer.encode("seven plus"), *(entry.token_id for entry in entries))
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
    _, ending = await collect(backend, GenerateRequest("s", prompt_token_ids=prompt_ids, sampling=scoring))
    assert ending.prompt_logprobs is not None
    assert ending.prompt_logprobs[0] is None
    scored = [each.logprob for each in ending.prompt_logprobs[-10:] if each is not None]
    assert scored == pytest.approx([entry.logprob for entry in entries], abs=1e-4)


async def test_score_reads_an_answer(backend: LocalBackend, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    result = await backend.score(GenerateRequest("s", messages=HELLO), "The answer is 16.")
    prompt_ids = backend._prompts.tokenizer.encode_chat([{"role": "user", "content": "hello world"}], thinking=False)
    ids = torch.tensor([[*prompt_ids, *result.token_ids]])
    logits = torch.log_softmax(AutoModelForCausalLM.from_pretrained(folder)(ids).logits[0], -1)
    for place, (token, logprob, rank) in enumerate(
        zip(result.token_ids, result.logprobs, result.ranks, strict=True), start=len(prompt_ids) - 1
    ):
        assert logprob == pytest.approx(float(logits[place, token].detach()), abs=1e-4)
        assert rank == int((logits[place] > logits[place, token]).sum())
    assert backend._prompts.tokenizer.decode(result.token_ids) == "The answer is 16."
    assert (await backend.score(GenerateRequest("s", messages=HELLO), "")).token_ids == ()


async def test_embeddings_are_unit_vectors_and_depend_on_the_text(backend: LocalBackend) -> None:
    result = await backend.embed(["hello world", "hello world", "seven plus nine"])
    assert result.vectors[0] == pytest.approx(result.vectors[1], abs=1e-5)
    assert result.vectors[0] != pytest.approx(result.vectors[2], abs=1e-2)
    assert all(sum(x * x for x in vector) == pytest.approx(1.0) for vector in result.vectors)
    assert result.usage.prompt_tokens > 0


async def test_an_embedding_is_the_mean_of_transformers_last_hidden_states(backend: LocalBackend, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    words = "The quick brown fox jumps over the lazy dog, sort the numbers"
    (vector,) = (await backend.embed([words])).vectors
    ids = torch.tensor([backend._prompts.tokenizer.encode(words)])
    with torch.no_grad():
        hidden = AutoModelForCausalLM.from_pretrained(folder).model(ids).last_hidden_state[0].mean(0)
    assert vector == pytest.approx((hidden / hidden.norm()).tolist(), abs=1e-4)


async def test_thinking_is_returned_apart_and_closed_by_its_budget(backend: LocalBackend) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    request = GenerateRequest("r", messages=HELLO, sampling=sampling, thinking=True, extra={"thinking_budget": 9})
    deltas, ending = await collect(backend, request)
    assert "".join(delta.reasoning for delta in deltas)
    assert text_of(deltas)
    assert 9 < ending.usage.reasoning_tokens <= 9 + 4
    plain, ending = await collect(backend, GenerateRequest("r", messages=HELLO, sampling=sampling, thinking=False))
    assert not any(delta.reasoning for delta in plain)
    assert ending.usage.reasoning_tokens == 0
    with pytest.raises(RequestRejected, match="thinking_budget is 'x'"):
        await collect(
            backend,
            GenerateRequest("r", messages=HELLO, sampling=sampling, thinking=True, extra={"thinking_budget": "x"}),
        )


async def test_seeds_repeat_and_differ(backend: LocalBackend) -> None:
    async def once(seed: int) -> str:
        sampling = SamplingParams(temperature=1.0, max_tokens=20, seed=seed, ignore_eos=True)
        return text_of((await collect(backend, GenerateRequest("r", messages=HELLO, sampling=sampling)))[0])

    first, *others = await asyncio.gather(once(1), once(1), once(2))
    assert first == others[0]
    assert first != others[1]


async def test_bad_requests_are_refused_by_name(backend: LocalBackend) -> None:
    async def refuse(request: GenerateRequest, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            await collect(backend, request)

    long = GenerateRequest("r", prompt="seven " * 400, sampling=GREEDY)
    await refuse(long, ContextLengthExceeded, "maximum context length is 256 tokens. However, your prompt resulted in")
    await refuse(GenerateRequest("r", prompt="\ud800"), RequestRejected, "lone surrogate")
    await refuse(GenerateRequest("r", messages=(Message("wizard", "hi"),)), RequestRejected, "unknown role wizard")
    await refuse(GenerateRequest("r", prompt=""), RequestRejected, "no tokens")
    await refuse(GenerateRequest("r", prompt_token_ids=(99999,)), RequestRejected, "token id 99999")
    bias = SamplingParams(logit_bias={99999: 1.0})
    await refuse(GenerateRequest("r", prompt="a", sampling=bias), RequestRejected, "logit_bias has token id")
    await refuse(
        GenerateRequest("r", prompt="a", sampling=SamplingParams(temperature=-1.0)), RequestRejected, "temperature is"
    )
    await refuse(GenerateRequest("r", prompt="a", sampling=SamplingParams(stop=("",))), RequestRejected, "empty string")
    await idle(backend)
    assert (await collect(backend, GenerateRequest("r", messages=HELLO, sampling=GREEDY)))[1].reason


async def test_an_abandoned_generation_frees_its_blocks_and_says_what_it_used(backend: LocalBackend) -> None:
    bills: list[Finished] = []
    sampling = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    request = GenerateRequest("r", messages=HELLO, sampling=sampling, on_abandoned=bills.append)
    stream = backend.generate(request)
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    task = asyncio.create_task(collect(backend, request))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(backend)
    assert [bill.reason for bill in bills] == [FinishReason.CANCELLED] * 2
    assert bills[0].usage.prompt_tokens > 0
    assert 0 < bills[0].usage.completion_tokens < 200
    assert bills[0].compute_s > 0


async def test_health_makes_a_token_and_load_is_what_runs(backend: LocalBackend) -> None:
    health = await backend.health()
    assert health.ok, health.detail
    assert backend.load().running == 0
    stream = backend.generate(
        GenerateRequest("r", messages=HELLO, sampling=SamplingParams(max_tokens=200, ignore_eos=True))
    )
    await anext(stream)
    assert backend.load().running == 1
    assert backend.load().kv_free_fraction < 1.0
    await stream.aclose()  # type: ignore[attr-defined]


async def test_before_start_and_after_close_it_is_unavailable(folder: Path) -> None:
    backend = LocalBackend("tiny", LocalModelConfig(path=str(folder)))
    with pytest.raises(BackendUnavailable, match="still loading"):
        await collect(backend, GenerateRequest("r", messages=HELLO))
    assert not (await backend.health()).ok
    await asyncio.gather(backend.start(), backend.start())
    running = asyncio.create_task(
        collect(backend, GenerateRequest("r", messages=HELLO, sampling=SamplingParams(max_tokens=200, ignore_eos=True)))
    )
    while not backend.load().running:  # noqa: ASYNC110 - the state to wait for is the engine's, on another thread
        await asyncio.sleep(0.001)
    await backend.close()
    await backend.close()
    assert (await running)[1].reason is FinishReason.CANCELLED
    with pytest.raises(BackendUnavailable, match="closed"):
        await collect(backend, GenerateRequest("r", messages=HELLO))


async def test_tiers_share_weights(folder: Path) -> None:
    weights = WeightPool()
    seen: list[tuple[str, float]] = []
    config = LocalModelConfig(path=str(folder), device="cpu")
    first = LocalBackend("one", config, weights=weights, on_progress=lambda path, share: seen.append((path, share)))
    drafted = LocalModelConfig(
        path=str(folder), device="cpu", drafter=str(folder), speculation=SpeculationConfig(mode="draft")
    )
    second = LocalBackend("two", drafted, weights=weights)
    await asyncio.gather(first.start(), second.start())
    assert first.engine.model is second.engine.model
    assert not seen or seen[-1] == (str(folder), 1.0)
    request = GenerateRequest("r", messages=HELLO, sampling=GREEDY)
    (one, _), (two, ending) = await asyncio.gather(collect(first, request), collect(second, request))
    assert text_of(one) == text_of(two)
    assert ending.usage.draft_tokens > 0
    assert ending.usage.accepted_draft_tokens == ending.usage.draft_tokens
    await first.close()
    assert (await collect(second, request))[1].reason in (FinishReason.STOP, FinishReason.LENGTH)
    await second.close()
    assert weights._checkpoints.is_idle


async def test_a_model_cut_over_two_devices_answers_the_same(backend: LocalBackend, folder: Path) -> None:
    weights = WeightPool()
    config = LocalModelConfig(path=str(folder), device="cpu", tensor_parallel=2)
    cut = LocalBackend("cut", config, weights=weights)
    await cut.start()
    request = GenerateRequest("r", messages=HELLO, sampling=GREEDY)
    whole, divided = await asyncio.gather(collect(backend, request), collect(cut, request))
    assert text_of(divided[0]) == text_of(whole[0])
    ranks = cut.engine.model._workers  # type: ignore[attr-defined]
    await cut.close()
    assert not any(rank.is_alive() for rank in ranks)


async def test_what_cannot_be_loaded_is_named(folder: Path, tmp_path: Path) -> None:
    async def refuse(config: LocalModelConfig, match: str) -> None:
        backend = LocalBackend("bad", config)
        with pytest.raises(ModelLoadError, match=match):
            await backend.start()
        await backend.close()

    await refuse(LocalModelConfig(path=str(tmp_path / "nowhere")), "nowhere")
    await refuse(LocalModelConfig(path="builtin:tier9"), "builtin:tier1 to builtin:tier4")
    await refuse(LocalModelConfig(path=str(folder), kv_cache_bytes=1000), "KV cache needs 16 blocks")
    await refuse(LocalModelConfig(path=str(folder), context_length=10_000), "was made for 256")
    await refuse(LocalModelConfig(path=str(folder), device="cpu", tensor_parallel=5), "expected a divisor of num_heads")
    other = tmp_path / "other"
    make_folder(other)
    spec = json.loads((other / "tokenizer.json").read_text())
    spec["added_tokens"][0]["content"] = "<|another|>"
    (other / "tokenizer.json").write_text(json.dumps(spec))
    drafted = LocalModelConfig(path=str(folder), drafter=str(other), speculation=SpeculationConfig(mode="draft"))
    await refuse(drafted, "cannot draft for")


async def test_a_checkpoint_without_template_takes_prompts_only(tmp_path: Path) -> None:
    make_folder(tmp_path, template=None)
    backend = LocalBackend("bare", LocalModelConfig(path=str(tmp_path)))
    await backend.start()
    with pytest.raises(UnsupportedByBackend, match="'messages'"):
        await collect(backend, GenerateRequest("r", messages=HELLO))
    assert (await collect(backend, GenerateRequest("r", prompt="hello", sampling=GREEDY)))[1].usage.completion_tokens
    await backend.close()


async def test_many_requests_come_and_go_and_every_block_returns(backend: LocalBackend) -> None:
    """Clients that leave at any point, beside ones that stay, on the real thread."""
    rng = random.Random(4)

    async def one(number: int) -> None:
        sampling = SamplingParams(temperature=0.8, max_tokens=30, ignore_eos=True, stop=("zz",) if number % 3 else ())
        bills: list[Finished] = []
        request = GenerateRequest(
            str(number),
            messages=(Message("user", "seven plus nine " * rng.randrange(1, 8)),),
            sampling=sampling,
            on_abandoned=bills.append,
        )
        await asyncio.sleep(rng.random() * 0.2)
        stay = number % 2
        try:
            async with asyncio.timeout(None if stay else rng.random() * 0.1):
                _, ending = await collect(backend, request)
                assert ending.reason in (FinishReason.LENGTH, FinishReason.STOP)
                assert not bills
        except TimeoutError:
            assert not stay
            assert len(bills) <= 1

    await asyncio.gather(*(one(number) for number in range(60)))
    await idle(backend)
    assert backend.engine.stats().num_failed_steps == 0
    backend.engine.scheduler.check_integrity()


async def test_a_predicted_answer_is_written_in_fewer_steps(backend: LocalBackend) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    plain = GenerateRequest("r", messages=HELLO, sampling=sampling)
    deltas, _ = await collect(backend, plain)
    before = backend.engine.stats().num_steps
    deltas, _ = await collect(backend, plain)
    steps_alone = backend.engine.stats().num_steps - before
    predicted = dataclasses.replace(plain, prediction=text_of(deltas))
    before = backend.engine.stats().num_steps
    same, ending = await collect(backend, predicted)
    assert text_of(same) == text_of(deltas)
    # A random model writes what its own tokenizer would not, so not every token is met again.
    assert ending.usage.accepted_prediction_tokens > 0
    assert backend.engine.stats().num_steps - before < steps_alone


async def test_the_prediction_is_for_the_answer_after_the_reasoning(backend: LocalBackend) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    request = GenerateRequest("r", messages=HELLO, sampling=sampling, thinking=True, extra={"thinking_budget": 9})
    deltas, _ = await collect(backend, request)
    same, ending = await collect(backend, dataclasses.replace(request, prediction=text_of(deltas)))
    assert [(d.text, d.reasoning) for d in merged(same)] == [(d.text, d.reasoning) for d in merged(deltas)]
    assert ending.usage.accepted_prediction_tokens > 0


def merged(deltas: list[TokenDelta]) -> list[TokenDelta]:
    """Tokens that stood together arrive together; put the pieces of each part back together."""
    return [TokenDelta(text_of(deltas), "".join(delta.reasoning for delta in deltas))]


async def test_a_prediction_that_is_no_text_is_refused(backend: LocalBackend) -> None:
    with pytest.raises(RequestRejected) as caught:
        await collect(backend, GenerateRequest("r", messages=HELLO, prediction="a\ud800b"))
    assert caught.value.param == "prediction"
