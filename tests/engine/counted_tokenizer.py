"""Stands before a tokenizer of the library and notes what it is given."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from engine.tokenizer import Tokenizer


class CountedTokenizer:
    """Counts characters; refuses the calls that keep the interpreter's lock.

    Attributes
    ----------
    num_chars : encoded in all
    most_inline : most characters of one call on the main thread, where the event loop is
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.num_chars = 0
        self.most_inline = 0

    def __getattr__(self, name: str) -> Any:
        assert name not in ("encode", "encode_batch"), f"{name} keeps the interpreter's lock, or more than is needed"
        return getattr(self._raw, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        num_chars = sum(map(len, texts))
        self.num_chars += num_chars
        if threading.current_thread() is threading.main_thread():
            self.most_inline = max(self.most_inline, num_chars)
        return self._raw.encode_batch_fast(texts, **options)


def counted(tokenizers: Iterable[Tokenizer]) -> list[CountedTokenizer]:
    """Put counters before everything that encodes for some tokenizers."""
    found = []
    for tokenizer in {id(each): each for each in tokenizers}.values():  # tiers of the same weights share theirs
        for encoder in (tokenizer._encoder, tokenizer._plain_encoder):
            if not isinstance(encoder.raw, CountedTokenizer):
                encoder.raw = CountedTokenizer(encoder.raw)  # type: ignore[assignment]
            found.append(encoder.raw)
    return found  # type: ignore[return-value]
