"""Model tables: every limit holds, every message names the field, and nothing heavy is imported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import Field, FrozenInstanceError, fields
from typing import Any

import pytest

from backends.config import (
    MODEL_KINDS,
    BreakerConfig,
    DeviceConfig,
    EchoModelConfig,
    LocalModelConfig,
    RemoteModelConfig,
    ReplayModelConfig,
    RetryConfig,
    SpeculationConfig,
    TimeoutConfig,
    device_key,
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


# Every config class with the least it can be made of.
LEAST: dict[type[Any], dict[str, Any]] = {
    LocalModelConfig: {"path": "m"},
    RemoteModelConfig: {"urls": (URL,), "model": "m"},
    EchoModelConfig: {},
    ReplayModelConfig: {"path": "r.jsonl"},
    DeviceConfig: {"kv_bytes": 1},
    SpeculationConfig: {},
    TimeoutConfig: {},
    RetryConfig: {},
    BreakerConfig: {},
}
LIMITED = [
    pytest.param(kind, each, id=f"{kind.__name__}.{each.name}")
    for kind in LEAST
    for each in fields(kind)
    if each.metadata.get("at_least") is not None or each.metadata.get("at_most") is not None
]
CHOSEN = [
    pytest.param(kind, each, id=f"{kind.__name__}.{each.name}")
    for kind in LEAST
    for each in fields(kind)
    if each.metadata.get("choices")
]


def refusal(kind: type[Any], name: str, value: Any) -> InvalidConfig:
    with pytest.raises(InvalidConfig) as caught:
        kind(**{**LEAST[kind], name: value})
    assert caught.value.field_name == name
    assert caught.value.value is value or caught.value.value == value
    return caught.value


@pytest.mark.parametrize(("kind", "option"), LIMITED)
def test_limits_include_themselves_and_nothing_beyond(kind: type[Any], option: Field[Any]) -> None:
    low, high = option.metadata["at_least"], option.metadata["at_most"]
    other = {"max_open_s": 1e9} if option.name == "open_s" else {"open_s": 0.0} if option.name == "max_open_s" else {}
    for limit, beyond, words in ((low, -1, "at least"), (high, 1, "at most")):
        if limit is not None:
            assert getattr(kind(**{**LEAST[kind], **other, option.name: limit}), option.name) == limit
            error = refusal(kind, option.name, limit + beyond)
            assert str(error) == f"{option.name} is {limit + beyond!r}; expected {words} {limit}."
    for wrong in ("8", True, [8]):
        assert "expected a number" in str(refusal(kind, option.name, wrong))
    assert "finite" in str(refusal(kind, option.name, float("inf")))


@pytest.mark.parametrize(("kind", "option"), CHOSEN)
def test_choices_are_all_taken_and_all_named(kind: type[Any], option: Field[Any]) -> None:
    for choice in option.metadata["choices"]:
        assert getattr(kind(**{**LEAST[kind], option.name: choice}), option.name) == choice
    error = refusal(kind, option.name, "something else")
    assert error.expected == "one of " + ", ".join(map(repr, option.metadata["choices"]))


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
def test_the_defaults_are_within_the_limits_and_frozen(kind: type[Any]) -> None:
    made = kind(**LEAST[kind])
    assert made == kind(**LEAST[kind])
    with pytest.raises(FrozenInstanceError):
        setattr(made, fields(kind)[0].name, None)
    with pytest.raises(TypeError, match="nonsense"):
        kind(**LEAST[kind], nonsense=1)
    with pytest.raises(TypeError, match="positional"):
        kind(*LEAST[kind].values(), 1)


def test_what_a_table_gave_cannot_change_what_was_made_of_it() -> None:
    urls, body, headers = [URL, URL + "2"], {"a": 1}, {"x": "1"}
    made = RemoteModelConfig(urls=urls, model="m", extra_body=body, extra_headers=headers)  # type: ignore[arg-type]
    urls.clear()
    body["b"] = 2
    headers.clear()
    assert (made.urls, made.extra_body, made.extra_headers) == ((URL, URL + "2"), {"a": 1}, {"x": "1"})
    assert RemoteModelConfig(urls=URL, model="m").urls == (URL,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("cpu", "cpu"),
        ("cuda", "cuda:0"),
        ("cuda:0", "cuda:0"),
        ("cuda:07", "cuda:7"),
        ("cuda:12", "cuda:12"),
        ("auto", None),
        ("CUDA", None),
        ("cuda:", None),
        ("cuda:-1", None),
        ("cuda:1234", None),
        ("cuda:٣", None),
        ("", None),
    ],
)
def test_a_device_has_one_spelling(name: str, key: str | None) -> None:
    assert device_key(name) == key


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
