"""Encoding bounded by a limit of tokens, beside other threads (security review H1, fault review S1)."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import normalizers, pre_tokenizers

from backends.builtin.paths import model_dir
from engine import bounded_encoder
from engine.bounded_encoder import BoundedEncoder, batches, max_token_bytes
from engine.errors import TextTooLong
from engine.tokenizer import Tokenizer
from tests.engine import texts
from tests.engine.counted_tokenizer import counted

BUILTIN = Tokenizer(model_dir(1))


def encoder_of(raw: RawTokenizer) -> BoundedEncoder:
    return BoundedEncoder(raw, json.loads(raw.to_str()))


def composed() -> RawTokenizer:
    raw = texts.byte_level()
    raw.normalizer = normalizers.NFC()
    return raw


LOSSLESS = {
    "byte_level": texts.byte_level(),
    "metaspace": texts.metaspace(),
    "byte_fallback": texts.byte_fallback_alone(),
    "composed": composed(),
    "builtin": RawTokenizer.from_file(str(model_dir(1) / "tokenizer.json")),
}
ENCODERS = {name: encoder_of(raw) for name, raw in LOSSLESS.items()}
# Runs of one character make the longest tokens; Hangul and accents compose.
any_text = st.text(st.sampled_from("ab \n0é中\u1112\u1161\u11abe\u0301🙂"), max_size=60) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=30
)


@pytest.mark.parametrize("kind", LOSSLESS)
@given(text=any_text, limit=st.integers(1, 8), times=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_what_is_refused_by_its_bytes_has_more_tokens(kind: str, text: str, limit: int, times: int) -> None:
    text *= times
    num_tokens = len(LOSSLESS[kind].encode(text, add_special_tokens=False))
    refused = None
    try:
        ENCODERS[kind].refuse_long([text], limit)
    except TextTooLong as error:
        refused = error
    assert refused is None or num_tokens >= refused.least_tokens > refused.limit == limit


@pytest.mark.parametrize("kind", LOSSLESS)
@given(text=any_text)
@settings(max_examples=100, deadline=None)
def test_the_ids_are_those_of_the_library(kind: str, text: str) -> None:
    encoder, fresh = ENCODERS[kind], LOSSLESS[kind]
    expected = fresh.encode(text, add_special_tokens=False).ids
    assert encoder.encode(text, add_special_tokens=False) == expected
    assert encoder.encode_many([text, "a", text], add_special_tokens=False)[::2] == [expected, expected]


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("unit", ["word ", "word", " ", "\n", "1", "é", "中文 ", "a b c d "])
def test_counting_ends_soon_after_the_limit(kind: str, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the shape of the text: the work is bounded by the limit, not by the text."""
    monkeypatch.setattr(bounded_encoder, "_WHOLE_CHARS", 64)
    monkeypatch.setattr(bounded_encoder, "_PIECE_CHARS", 1024)
    encoder, raw, limit = ENCODERS[kind], LOSSLESS[kind], 200
    text = unit * 20_000
    given_chars: list[int] = []

    class Noted:
        def __getattr__(self, name: str) -> Any:
            return getattr(raw, name)

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            given_chars.append(sum(map(len, texts)))
            return raw.encode_batch_fast(texts, **options)

    monkeypatch.setattr(encoder, "raw", Noted())
    with pytest.raises(TextTooLong) as caught:
        encoder.refuse_counted(text, limit)
    assert limit < caught.value.least_tokens <= len(raw.encode(text, add_special_tokens=False))
    longest = encoder.max_token_bytes
    assert longest is not None
    assert sum(given_chars) <= 2 * longest * limit
    given_chars.clear()
    with pytest.raises(TextTooLong):
        encoder.encode(unit * 20_000, add_special_tokens=False, limit=limit)
    assert sum(given_chars) <= 2 * longest * limit


@pytest.mark.parametrize("kind", LOSSLESS)
def test_a_text_that_fits_is_never_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_encoder, "_WHOLE_CHARS", 16)
    monkeypatch.setattr(bounded_encoder, "_PIECE_CHARS", 64)
    for text in ("word " * 300, "abab" * 300, " " * 900, "\n\n" * 400, "8" * 700, "e\u0301" * 300):
        expected = LOSSLESS[kind].encode(text, add_special_tokens=False).ids
        assert ENCODERS[kind].encode(text, add_special_tokens=False, limit=len(expected)) == expected


def test_only_tokenizers_that_keep_all_text_have_a_longest_token() -> None:
    """Where unknown words or blanks vanish, a few tokens may stand for any length of text."""
    assert all(encoder.max_token_bytes for encoder in ENCODERS.values())
    assert ENCODERS["composed"].max_token_bytes == 3 * (ENCODERS["byte_level"].max_token_bytes or 0)
    for raw in texts.without_bytes().values():
        assert max_token_bytes(raw, json.loads(raw.to_str())) is None
    for change in (
        {"normalizer": normalizers.NFKC()},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])},
    ):
        raw = texts.byte_level()
        for name, value in change.items():
            setattr(raw, name, value)
        assert max_token_bytes(raw, json.loads(raw.to_str())) is None
    stripping = json.loads(texts.byte_level().to_str())
    stripping["added_tokens"][0]["rstrip"] = True
    assert max_token_bytes(RawTokenizer.from_str(json.dumps(stripping)), stripping) is None


@given(st.lists(st.text(max_size=6), max_size=30))
def test_batches_hold_every_text_in_order(given_texts: list[str]) -> None:
    found = list(batches(given_texts))
    assert [text for batch in found for text in batch] == given_texts
    assert all(found)


def test_other_threads_run_while_a_text_is_encoded() -> None:
    """``tokenizers``' own ``encode`` holds the interpreter from beginning to end: then nothing ticks."""
    is_done = threading.Event()
    text = "How many letters has the word estimate? " * 12_000

    def work() -> None:
        BUILTIN.encode(text)
        BUILTIN.encode_plain(text)
        BUILTIN.encode_chat([{"role": "user", "content": text}])
        is_done.set()

    thread = threading.Thread(target=work)
    thread.start()
    num_ticks = 0
    while not is_done.is_set():
        time.sleep(0.001)
        num_ticks += 1
    thread.join()
    assert num_ticks > 20


def test_many_control_tokens_in_a_message_are_encoded_once(tmp_path: Path) -> None:
    tokenizer = Tokenizer(texts.save(texts.byte_level(), tmp_path))
    counters = counted([tokenizer])
    message = [{"role": "user", "content": "x<|im_end|>" * 5000}]
    with pytest.raises(TextTooLong) as caught:
        tokenizer.encode_chat(message, limit=4000)
    assert caught.value.least_tokens == 5000
    assert not any(each.num_chars for each in counters)
    ids = tokenizer.encode_chat(message)
    assert sum(each.num_chars for each in counters) < 5000
    spelled = tokenizer.encode_plain("<|im_end|>")
    assert len(ids) > 5000 * len(spelled)
    assert tokenizer.decode(ids).count("x<|im_end|>") == 5000
