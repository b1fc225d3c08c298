"""Tables become backends, and nothing heavy is imported before a table asks for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from backends.config import EchoModelConfig, LocalModelConfig, RemoteModelConfig, ReplayModelConfig, SpeculationConfig
from backends.protocol import Backend, Finished, FinishReason, GenerateRequest, TokenDelta
from backends.provider.server import ProviderServer
from backends.registry import build_backends, drafter_path_of
from backends.replay import AnswerRecord
from backends.testing import Script


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
