"""Model tables: every limit holds, every message names the field, and nothing heavy is imported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from backends.config import (
    MODEL_KINDS,
    BreakerConfig,
    LocalModelConfig,
    RemoteModelConfig,
    RetryConfig,
    SpeculationConfig,
    TimeoutConfig,
)
from backends.errors import InvalidConfig

URL = "http://127.0.0.1:8000/v1"


@pytest.mark.parametrize(
    ("build", "field_name"),
    [
        (lambda: LocalModelConfig(path=""), "path"),
        (lambda: LocalModelConfig(path="m", dtype="int3"), "dtype"),  # type: ignore[arg-type]
        (lambda: LocalModelConfig(path="m", max_num_seqs=0), "max_num_seqs"),
        (lambda: LocalModelConfig(path="m", max_num_seqs="8"), "max_num_seqs"),  # type: ignore[arg-type]
        (lambda: LocalModelConfig(path="m", threads=True), "threads"),
        (lambda: LocalModelConfig(path="m", speculation=SpeculationConfig(mode="draft")), "drafter"),
        (lambda: SpeculationConfig(max_draft_tokens=65), "max_draft_tokens"),
        (lambda: RemoteModelConfig(urls=(), model="m"), "urls"),
        (lambda: RemoteModelConfig(urls=("ftp://host",), model="m"), "urls"),
        (lambda: RemoteModelConfig(urls=("http://u:secret@host/v1",), model="m"), "urls"),
        (lambda: RemoteModelConfig(urls=(URL, URL), model="m"), "urls"),
        (lambda: LocalModelConfig(path="m", activations="int8"), "activations"),  # type: ignore[arg-type]
        (lambda: LocalModelConfig(path="m", activations="fp8", device="cpu"), "activations"),
        (lambda: LocalModelConfig(path="m", activations="fp8", tensor_parallel=2), "activations"),
        (lambda: RemoteModelConfig(urls=(URL,), model=""), "model"),
        (lambda: RemoteModelConfig(urls=(URL,), model="m", capabilities=("fly",)), "capabilities"),  # type: ignore[arg-type]
        (lambda: RemoteModelConfig(urls=(URL,), model="m", capabilities=("generate", "score")), "score_api"),
        (lambda: TimeoutConfig(gap_s=float("nan")), "gap_s"),
        (lambda: TimeoutConfig(gap_s=0.0), "gap_s"),
        (lambda: RetryConfig(max_attempts=0), "max_attempts"),
        (lambda: BreakerConfig(open_s=10, max_open_s=5), "max_open_s"),
    ],
)
def test_a_value_out_of_its_limits_is_refused_by_name(build: Any, field_name: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        build()
    assert caught.value.field_name == field_name
    assert field_name in str(caught.value)


def test_credentials_in_a_url_are_not_repeated() -> None:
    with pytest.raises(InvalidConfig) as caught:
        RemoteModelConfig(urls=("http://user:secret@host/v1",), model="m")
    assert "secret" not in str(caught.value)


def test_required_fields_are_required() -> None:
    for kind in ("local", "remote", "replay"):
        with pytest.raises(TypeError, match="missing"):
            MODEL_KINDS[kind]()


def test_every_option_says_what_it_is() -> None:
    nested = (SpeculationConfig, TimeoutConfig, RetryConfig, BreakerConfig)
    for config_class in (*MODEL_KINDS.values(), *nested):
        assert all(each.metadata.get("help") for each in fields(config_class)), config_class


def test_nothing_heavy_is_imported() -> None:
    heavy = "torch transformers sklearn httpx aiohttp"
    check = f"import sys, backends.config; print([m for m in {heavy.split()} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
