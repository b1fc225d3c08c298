"""Every backend is put to the same protocol."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from backends.config import LocalModelConfig, RemoteModelConfig, SpeculationConfig
from backends.local import LocalBackend
from backends.protocol import Backend
from backends.remote.openai_backend import OpenAIBackend
from backends.testing import EchoBackend, Script
from backends.weights import LoadOptions, WeightPool
from tests.backends.conformance import CHECKS, ConformanceCheck, checks_for
from tests.backends.conformance_subject import ConformanceSubject
from tests.backends.provider.server import ProviderServer

KEPT = {"seed", "ignore_eos", "exact_counts", "context_limit", "long_answers"}
EVERYTHING = frozenset({"generate", "score", "embed", "tokenize", "logprobs", "prompt_token_ids", *KEPT})
CAPABILITIES = ("generate", "score", "embed", "tokenize", "logprobs", "prompt_token_ids")
# Without logprobs a server's chunks are taken for a token each, which they need not be.
NAMES = ("echo", "remote-httpx", "remote-aiohttp", "remote-modest", "local", "local-thinking")
# Endless, so that closing and cancelling meet a running request.
LONG = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. " * 8


@pytest.fixture(scope="module")
def server() -> Iterator[ProviderServer]:
    with ProviderServer(Script(text=LONG, token_delay_s=0.0005), context_length=512) as running:
        yield running
        assert running.errors == []


@pytest.fixture(scope="module")
def weights() -> Iterator[WeightPool]:
    pool = WeightPool()
    # Held from first to last, so that the checkpoints are read once.
    plain = LoadOptions(path="builtin:tier1", dtype="auto", device="cpu")
    held = [pool.acquire(each) for each in (plain, replace(plain, cpu_compute="exact"))]
    yield pool
    for checkpoint in held:
        pool.release(checkpoint)


def traits_of(name: str) -> frozenset[str]:
    if name == "remote-modest":
        return frozenset({"generate", "ignore_eos", "long_answers"})
    if name == "local-thinking":
        return EVERYTHING | {"thinking"}
    return EVERYTHING


def remote(server: ProviderServer, name: str) -> Backend:
    transport = "httpx" if name == "remote-httpx" else "aiohttp"
    if name == "remote-modest":
        return OpenAIBackend(
            name, RemoteModelConfig(urls=(server.url(),), model=server.model, capabilities=("generate",))
        )
    config = RemoteModelConfig(
        urls=(server.url(), f"http://localhost:{server.port}/ok/v1"),
        model=server.model,
        capabilities=CAPABILITIES,  # type: ignore[arg-type]
        score_api="vllm",
        context_length=server.context_length,
        transport=transport,  # type: ignore[arg-type]
    )
    return OpenAIBackend(name, config)


def local(name: str, weights: WeightPool) -> Backend:
    config = LocalModelConfig(path="builtin:tier1", device="cpu", context_length=512)
    if name == "local-thinking":
        drafting = SpeculationConfig(mode="draft")
        # In full precision: where int8 rounds activations, a seeded sample of a hundred tokens may part from another
        # whose steps were drafted elsewhere, by sums in another order that rounding then makes larger.
        config = LocalModelConfig(
            path="builtin:tier1",
            device="cpu",
            context_length=512,
            cpu_compute="exact",
            thinking=True,
            drafter="builtin:tier1",
            speculation=drafting,
        )
    return LocalBackend(name, config, weights=weights)


async def engine_is_idle(backend: Backend) -> bool:
    assert isinstance(backend, LocalBackend)
    pool = backend.engine.scheduler.pool
    return not backend.engine.has_work() and pool.num_available == pool.num_blocks


def subject_of(name: str, request: pytest.FixtureRequest) -> ConformanceSubject:
    traits = traits_of(name)
    if name == "echo":
        return ConformanceSubject(lambda: EchoBackend(script=Script(text=LONG), context_length=512), traits)
    if name.startswith("remote"):
        if name == "remote-aiohttp":
            pytest.importorskip("aiohttp")
        server: ProviderServer = request.getfixturevalue("server")
        return ConformanceSubject(lambda: remote(server, name), traits)
    weights: WeightPool = request.getfixturevalue("weights")
    return ConformanceSubject(lambda: local(name, weights), traits, is_idle=engine_is_idle)


def applicable(name: str) -> list[ConformanceCheck]:
    return checks_for(ConformanceSubject(EchoBackend, traits_of(name)))


@pytest.mark.parametrize(
    ("name", "check"),
    [pytest.param(name, check, id=f"{name}-{check}") for name in NAMES for check in applicable(name)],
)
async def test_conformance(name: str, check: ConformanceCheck, request: pytest.FixtureRequest) -> None:
    await check(subject_of(name, request))


def test_no_check_is_left_out_for_everyone() -> None:
    assert [check.name for check in CHECKS] == [check.name for check in applicable("echo")]


async def test_a_broken_backend_is_caught() -> None:
    """The suite itself can fail: a backend that forgets its ending, its stop strings or its limit is found out."""

    class Forgetful(EchoBackend):
        async def generate(self, request):  # type: ignore[no-untyped-def, override]
            async for event in super().generate(request):
                if getattr(event, "text", None):
                    yield event

    failed = []
    for check in CHECKS:
        try:
            await check(ConformanceSubject(lambda: Forgetful(script=Script(text=LONG)), EVERYTHING))
        except (AssertionError, TimeoutError, IndexError):
            failed.append(check.name)
    assert "one_ending" in failed
    assert "max_tokens_is_kept" in failed
