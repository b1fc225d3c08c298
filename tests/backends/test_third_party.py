"""The remote backend against servers that are not ours: what applies of the protocol holds there too."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from backends.builtin.paths import model_dir
from backends.builtin.tasks.task_generator import generate
from backends.config import LocalModelConfig, RemoteModelConfig
from backends.local import LocalBackend
from backends.protocol import Backend, GenerateRequest, Message, SamplingParams
from backends.remote.openai_backend import OpenAIBackend
from backends.testing import EchoBackend
from tests.backends.conformance import ConformanceCheck, checks_for
from tests.backends.conformance_subject import ConformanceSubject, collect, text_of
from tests.backends.peer_servers import (
    PeerServer,
    has_llama_cpp,
    has_transformers_server,
    llama_cpp_server,
    transformers_server,
)

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)

# What each server keeps of the protocol; transformers has no log-probabilities, llama.cpp does not count tokens.
TRAITS = {
    "transformers": frozenset({"generate", "long_answers"}),
    "llama.cpp": frozenset({"generate", "long_answers", "logprobs"}),
}


@pytest.fixture(scope="module")
def transformers_peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerServer]:
    if not has_transformers_server():
        pytest.skip("transformers serve needs fastapi: pip install fastapi")
    from backends.builtin.reference import load_reference

    folder = tmp_path_factory.mktemp("dense")
    load_reference(model_dir(1)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(model_dir(1) / name, folder / name)
    with transformers_server(folder) as peer:
        yield peer


@pytest.fixture(scope="module")
def llama_cpp_peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerServer]:
    if not has_llama_cpp():
        pytest.skip("llama.cpp's server is not installed: pip install 'llama-cpp-python[server]' gguf")
    from backends.builtin.gguf_export import export_gguf

    path = tmp_path_factory.mktemp("gguf") / "tier1.gguf"
    export_gguf(model_dir(1), path)
    with llama_cpp_server(path) as peer:
        yield peer


async def test_llama_cpp_says_what_the_engine_says(llama_cpp_peer: PeerServer) -> None:
    """The same weights, exported and read by somebody else's code, give the same greedy answers."""
    remote = OpenAIBackend("peer", RemoteModelConfig(urls=(llama_cpp_peer.url,), model=llama_cpp_peer.model))
    local = LocalBackend("ours", LocalModelConfig(path="builtin:tier1", device="cpu"))
    await local.start()
    try:
        answers = []
        for task in generate(seed=5, count=12, split="test"):
            request = GenerateRequest(task.task_id, messages=(Message("user", task.prompt),), sampling=GREEDY)
            answers.append([text_of((await collect(backend, request))[0]) for backend in (remote, local)])
        # Sums are rounded in another order, so a near tie may fall the other way.
        assert sum(theirs == ours for theirs, ours in answers) >= len(answers) - 1, answers
    finally:
        await local.close()
        await remote.close()


def applicable(name: str) -> list[ConformanceCheck]:
    return checks_for(ConformanceSubject(EchoBackend, TRAITS[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "check"),
    [pytest.param(name, check, id=f"{name}-{check}") for name in TRAITS for check in applicable(name)],
)
async def test_a_server_that_is_not_ours_conforms(
    name: str, check: ConformanceCheck, request: pytest.FixtureRequest
) -> None:
    fixture = {"transformers": "transformers_peer", "llama.cpp": "llama_cpp_peer"}[name]
    peer: PeerServer = request.getfixturevalue(fixture)

    def make() -> Backend:
        capabilities = ("generate", "logprobs") if "logprobs" in TRAITS[name] else ("generate",)
        # transformers lists the models that a hub's cache holds, and fails where there is no hub.
        config = RemoteModelConfig(
            urls=(peer.url,),
            model=peer.model,
            capabilities=capabilities,  # type: ignore[arg-type]
            health_check="token",
        )
        return OpenAIBackend("peer", config)

    await check(ConformanceSubject(make, TRAITS[name]))
