"""Encodes text without holding the interpreter, and no more of it than a limit of tokens can hold.

``tokenizers`` keeps the interpreter's lock while it encodes one text, and lets go of it for a batch: so everything here
is a batch. A text that cannot fit is refused by its bytes, since no token stands for more than the longest one of the
vocabulary; what may fit by its bytes but is long is counted piece by piece, and refused as soon as it is too much.

The tokenizer's memory of words is filled once and then left as it is. It would otherwise learn the words of each text,
and reading another's words again would be quicker than reading new ones: a clock could tell what others had sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import pre_tokenizers

from engine.errors import TextTooLong

# Shorter texts, and those of fewer characters than this a token of the limit, are encoded whole: a few milliseconds.
_WHOLE_CHARS = 32_768
_WHOLE_CHARS_PER_TOKEN = 4
_PIECE_CHARS = 16_384
# Pieces may have a little more tokens than the whole: what stands across a seam is cut.
_SEAM_TOKENS, _SEAM_SHARE = 4, 1 / 8
_MOST_IN_BATCH = 1024
# Words that the tokenizer remembers; its own default.
_REMEMBERED_WORDS = 10_000

# Composing characters (NFC) makes at most three bytes one.
_NFC_SHRINKS = 3
_LOSSLESS_SPLITS = frozenset({"ByteLevel", "Metaspace", "Digits"})


class BoundedEncoder:
    """Wraps one tokenizer of the ``tokenizers`` library.

    Parameters
    ----------
    raw : as read from its file
    tokenizer_json : the file's content

    Attributes
    ----------
    max_token_bytes : most bytes of text that one token can stand for; None where there is no such number
    """

    def __init__(self, raw: RawTokenizer, tokenizer_json: Mapping[str, Any]) -> None:
        self.raw = raw
        self.max_token_bytes = max_token_bytes(raw, tokenizer_json)
        _fix_word_memory(raw)

    def refuse_long(self, texts: Sequence[str], limit: int) -> None:
        """Refuse texts that together cannot be ``limit`` tokens, by their bytes alone.

        Raises
        ------
        TextTooLong
        """
        most = self.max_token_bytes
        # A character is four bytes at most, so that few texts are measured.
        if most is None or 4 * sum(map(len, texts)) <= most * limit:
            return
        num_bytes = sum(len(text) if text.isascii() else len(text.encode("utf-8", "replace")) for text in texts)
        if num_bytes > most * limit:
            raise TextTooLong(-(-num_bytes // most), limit)

    def encode(self, text: str, *, add_special_tokens: bool, limit: int | None = None) -> list[int]:
        """Return the token ids of a text.

        Raises
        ------
        TextTooLong
            It has more than ``limit`` tokens; not every text that has is refused.
        """
        if limit is not None:
            self.refuse_long([text], limit)
            self.refuse_counted(text, limit)
        ids: list[int] = self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_many(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text; equal ones are encoded once."""
        distinct = list(dict.fromkeys(texts))
        known: dict[str, list[int]] = {}
        for batch in batches(distinct):
            found = self.raw.encode_batch_fast(batch, add_special_tokens=add_special_tokens)
            known.update(zip(batch, (each.ids for each in found), strict=True))
        return [known[text] for text in texts]

    def refuse_counted(self, text: str, limit: int) -> None:
        """Refuse a text of far more than ``limit`` tokens, having encoded little more than those.

        Raises
        ------
        TextTooLong
        """
        if len(text) <= max(_WHOLE_CHARS, _WHOLE_CHARS_PER_TOKEN * limit):
            return
        num_tokens = 0
        for number, piece in enumerate(_pieces(text), start=1):
            num_tokens += len(self.raw.encode_batch_fast([piece], add_special_tokens=False)[0])
            least = int((num_tokens - _SEAM_TOKENS * number) * (1 - _SEAM_SHARE))
            if least > limit:
                raise TextTooLong(least, limit)


def batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Cut a list of texts into batches of bounded size; a text is never cut."""
    batch: list[str] = []
    num_chars = 0
    for text in texts:
        if batch and (len(batch) == _MOST_IN_BATCH or num_chars + len(text) > _WHOLE_CHARS):
            yield batch
            batch, num_chars = [], 0
        batch.append(text)
        num_chars += len(text)
    if batch:
        yield batch


def max_token_bytes(raw: RawTokenizer, tokenizer_json: Mapping[str, Any]) -> int | None:
    """Return the most bytes of text that one token can stand for.

    None where a tokenizer drops text (blanks between words), or makes one token of any unknown word: there a few tokens
    may stand for a text of any length.
    """
    model = tokenizer_json.get("model") or {}
    vocabulary = raw.get_vocab(with_added_tokens=True)
    is_byte_level = any(each.get("type") == "ByteLevel" for each in _parts(tokenizer_json.get("pre_tokenizer")))
    if model.get("type", "BPE") not in ("BPE", "Unigram") or not (is_byte_level or model.get("byte_fallback")):
        return None
    every_byte = pre_tokenizers.ByteLevel.alphabet() if is_byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    if not vocabulary.keys() >= set(every_byte):
        return None
    shrinks = 1
    for each in _parts(tokenizer_json.get("normalizer")):
        if each.get("type") == "NFC":
            shrinks = _NFC_SHRINKS
        elif not _keeps_length(each):
            return None
    if not all(_keeps_text(each) for each in _parts(tokenizer_json.get("pre_tokenizer"))):
        return None
    added = tokenizer_json.get("added_tokens") or []
    if any(each.get("lstrip") or each.get("rstrip") for each in added):
        return None  # such a token takes the blanks beside it along, however many
    named = {each.get("content", "") for each in added}
    longest = 1
    for token in vocabulary:
        # A byte-level vocabulary writes each byte as one character.
        is_bytes = is_byte_level and token not in named
        longest = max(longest, len(token) if is_bytes else len(token.replace("▁", " ").encode()))
    return longest * shrinks


def _parts(section: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the steps of a normaliser or pre-tokeniser, a sequence's one by one."""
    if not section:
        return []
    inner = section.get("normalizers") or section.get("pretokenizers")
    return [section] if inner is None else [part for each in inner for part in _parts(each)]


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    if normalizer.get("type") == "Prepend":
        return True
    pattern = (normalizer.get("pattern") or {}).get("String")
    is_replacement = normalizer.get("type") == "Replace" and isinstance(pattern, str)
    return is_replacement and len(normalizer.get("content", "").encode()) >= len(str(pattern).encode())


def _keeps_text(split: Mapping[str, Any]) -> bool:
    kind = split.get("type")
    return kind in _LOSSLESS_SPLITS or (kind in ("Split", "Punctuation") and split.get("behavior") != "Removed")


def _pieces(text: str) -> Iterator[str]:
    """Cut a text before blanks, as tokenizers do; where there is none, anywhere."""
    start = 0
    while start < len(text):
        end = start + _PIECE_CHARS
        blank = text.rfind(" ", start + 1, end) if end < len(text) else -1
        end = blank if blank > start else end
        yield text[start:end]
        start = end


def _fix_word_memory(raw: RawTokenizer) -> None:
    """Fill the memory of words with the vocabulary's own, then let it learn no more."""
    resize = getattr(raw.model, "_resize_cache", None)
    if resize is None:
        return
    names = sorted(raw.get_vocab(with_added_tokens=False).items(), key=lambda each: each[1])[:_REMEMBERED_WORDS]
    texts = raw.decode_batch([[token_id] for _, token_id in names], skip_special_tokens=False)
    raw.encode_batch_fast(texts, add_special_tokens=False)
    # A full memory takes nothing more; what it has it keeps.
    resize(1)
