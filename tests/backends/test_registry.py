"""Tables become backends, and nothing heavy is imported before a table asks for it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from backends.config import EchoModelConfig, LocalModelConfig, RemoteModelConfig, ReplayModelConfig, SpeculationConfig
from backends.local_engine.engine_groups import drafter_path_of
from backends.protocol import Backend, Finished, FinishReason, GenerateRequest, Message, SamplingParams, TokenDelta
from backends.registry import build_backends
from backends.replay import AnswerRecord
from backends.testing import Script
from tests.backends.provider.server import ProviderServer

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


async def test_every_kind_but_local_is_built_and_answers(tmp_path: Path) -> None:
    recordings = tmp_path / "answers.jsonl"
    recordings.write_bytes(AnswerRecord(prompt="2 + 2 =", answer="4").to_json())
    with ProviderServer(Script(text="4"), api_key="sk-1") as server:
        built = build_backends(
            {
                "echo": EchoModelConfig(text="4"),
                "far": RemoteModelConfig(urls=(server.url(),), model="provider-model", api_key_env="KEY"),
                "tape": ReplayModelConfig(path=str(recordings)),
            },
            api_keys={"far": "sk-1"},
        )
        assert list(built) == ["echo", "far", "tape"]
        for name, backend in built.items():
            assert isinstance(backend, Backend)
            assert backend.model_id == name
            await backend.start()
            events = [event async for event in backend.generate(GenerateRequest("r", prompt="2 + 2 ="))]
            assert "".join(event.text for event in events if isinstance(event, TokenDelta)) == "4"
            assert isinstance(events[-1], Finished)
            assert events[-1].reason is FinishReason.STOP
            await backend.close()


async def test_local_models_share_weights_and_leave_no_thread() -> None:
    drafting = SpeculationConfig(mode="draft", max_draft_tokens=3)
    built = build_backends(
        {
            "small": LocalModelConfig(path="builtin:tier1", device="cpu"),
            "large": LocalModelConfig(path="builtin:tier2", device="cpu", drafter="small", speculation=drafting),
        }
    )
    before = set(threading.enumerate())
    try:
        for backend in built.values():
            await backend.start()
        names = [thread.name for thread in set(threading.enumerate()) - before]
        assert any(name.startswith("engine") for name in names)
        request = GenerateRequest("r", messages=(Message("user", "What is 2 + 3?"),), sampling=GREEDY)
        for backend in built.values():
            events = [event async for event in backend.generate(request)]
            assert isinstance(events[-1], Finished)
            assert events[-1].reason in (FinishReason.STOP, FinishReason.LENGTH)
    finally:
        for backend in built.values():
            await backend.close()
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert not any(name.startswith("engine") for name in left)


def test_a_drafter_is_a_served_model_or_a_path() -> None:
    drafting = SpeculationConfig(mode="draft")
    models = {
        "small": LocalModelConfig(path="builtin:tier1"),
        "large": LocalModelConfig(path="builtin:tier3", drafter="small", speculation=drafting),
        "other": LocalModelConfig(path="builtin:tier3", drafter="/models/draft", speculation=drafting),
    }
    assert [drafter_path_of(config, models) for config in models.values()] == [None, "builtin:tier1", "/models/draft"]


def test_torch_waits_for_a_local_model() -> None:
    script = """
import sys
from backends.config import EchoModelConfig, RemoteModelConfig
from backends.registry import build_backends
build_backends({"a": EchoModelConfig(), "b": RemoteModelConfig(urls=("http://h/v1",), model="m")})
print([name for name in ("torch", "transformers", "sklearn") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
