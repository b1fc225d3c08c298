"""Turns token ids back into text, a token at a time and never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any, Literal

from tokenizers import Tokenizer as RawTokenizer

Kind = Literal["byte_level", "metaspace", "byte_fallback", "other"]


def _byte_of_char() -> dict[str, int]:
    """Return the printable stand-ins that byte-level BPE writes for bytes (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    table = {chr(b): b for b in plain}
    table.update({chr(256 + i): b for i, b in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()


def decoder_kind(tokenizer_json: dict[str, Any]) -> Kind:
    """Tell from a tokenizer's ``decoder`` section how its tokens become bytes."""
    decoder = tokenizer_json.get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    names = [part.get("type") for part in parts]
    if "ByteLevel" in names:
        return "byte_level"
    spaces = any(p.get("type") == "Replace" and p.get("content") == " " for p in parts)
    if "Metaspace" in names or ("ByteFallback" in names and spaces):
        return "metaspace"
    if "ByteFallback" in names and set(names) <= {"ByteFallback", "Fuse"}:
        return "byte_fallback"
    return "other"


class TokenBytes:
    """Gives each token's bytes, where a tokenizer's tokens have bytes of their own.

    Attributes
    ----------
    kind : ``other`` means they have not, and text must be found by decoding runs of tokens
    strips_space : the first character of a text, if a space, is not part of it
    """

    def __init__(self, raw: RawTokenizer, tokenizer_json: dict[str, Any]) -> None:
        self.raw = raw
        self.kind = decoder_kind(tokenizer_json)
        self.strips_space = self.kind == "metaspace" and _strips(tokenizer_json["decoder"])
        self.special = frozenset(i for i, token in raw.get_added_tokens_decoder().items() if token.special)
        self._added = {i: token.content for i, token in raw.get_added_tokens_decoder().items()}
        self._table: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Return the bytes of one token; empty for an id without one."""
        known = self._table.get(token_id)
        if known is None:
            known = self._table[token_id] = self._bytes(token_id)
        return known

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.raw.id_to_token(token_id)
        if token is None:
            return b""
        if self.kind == "byte_level":
            if all(char in _BYTE_OF_CHAR for char in token):
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            return token.encode()
        if self.kind in ("metaspace", "byte_fallback"):
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return (token.replace("▁", " ") if self.kind == "metaspace" else token).encode()
        text: str = self.raw.decode([token_id], skip_special_tokens=False)
        return text.encode()

    def text_of(self, token_id: int) -> str:
        """Return a token on its own, for log-probabilities; incomplete characters become U+FFFD."""
        return self.of(token_id).decode("utf-8", "replace")


def _strips(decoder: dict[str, Any]) -> bool:
    for part in decoder.get("decoders", [decoder]):
        if part.get("type") == "Metaspace":
            return bool(part.get("prepend_scheme", "always") != "never")
        if part.get("type") == "Strip" and part.get("start", 0) > 0:
            return True
    return False


class Detokenizer:
    """Decodes one text. Special tokens are left out."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokens.strips_space
        self._run: list[int] = []  # for kinds without bytes: ids since the last whole piece of text
        self._run_text = ""

    def push(self, token_id: int) -> str:
        """Return the text that is certain after this token; bytes of an unfinished character wait."""
        if token_id in self._tokens.special:
            return ""
        if self._tokens.kind == "other":
            return self._push_run(token_id)
        text = self._utf8.decode(self._tokens.of(token_id))
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def _push_run(self, token_id: int) -> str:
        self._run.append(token_id)
        text: str = self._tokens.raw.decode(self._run, skip_special_tokens=True)
        if text.endswith("\ufffd") and len(self._run) < 16:
            return ""
        new = text[len(self._run_text) :]
        # The last token stays as context: decoders of this kind look at a token's neighbour.
        self._run = self._run[-1:]
        self._run_text = self._tokens.raw.decode(self._run, skip_special_tokens=True)
        return new

    def flush(self) -> str:
        """Return what was held back at the end of a text: an unfinished character, as U+FFFD."""
        if self._tokens.kind == "other":
            text: str = self._tokens.raw.decode(self._run, skip_special_tokens=True)
            rest, self._run, self._run_text = text[len(self._run_text) :], [], ""
            return rest
        return self._utf8.decode(b"", final=True)


def decode(tokens: TokenBytes, token_ids: Iterable[int]) -> str:
    """Decode a whole text at once."""
    detokenizer = Detokenizer(tokens)
    return "".join([detokenizer.push(token_id) for token_id in token_ids]) + detokenizer.flush()
