"""Turns text into token ids, by a checkpoint's tokenizer and chat template; knows which end an answer.

Control tokens come from the template alone. Text that a caller put into a message is read as plain text even where it
spells a control token: such spellings are cut out before the template is rendered, and encoded by a second tokenizer
that knows no added tokens. A message without any is rendered and encoded as a whole, exactly as ``transformers`` would.
(Reasoning tags in an earlier assistant turn are left alone, since templates strip them.) A raw prompt, as the
completions endpoint takes it, is the caller's whole context, so there control tokens are read as such.

Encoding lets other threads run (:mod:`engine.bounded_encoder`), and with a ``limit`` its work is bounded by that, not
by the text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from engine.bounded_encoder import BoundedEncoder, batches
from engine.chat_template import ChatTemplate
from engine.detokenizer import TokenBytes, decode
from engine.errors import CheckpointCorrupt, CheckpointNotFound, InvalidText, NoChatTemplate, TextTooLong
from engine.load.source import read_json
from engine.template_tools import ToolSupport
from engine.text_stream import ThinkTags

_TAG_NAMES = (("<think>", "</think>"),)

Messages = list[dict[str, Any]]
Layout = Callable[[Messages, list[Any]], tuple[Messages, list[Any]]]
"""Changes messages and tools into those that a template is to show."""


class Tokenizer:
    """Holds a checkpoint's tokenizer.

    Attributes
    ----------
    vocab_size : ids are below it, added tokens included
    eos_token_ids : from ``generation_config.json``, else ``config.json``, else the tokenizer's own ``eos_token``
    think_tags : ids of the reasoning tags, if each is one token
    template, tool_template : lays out messages; the same where there are tools, some checkpoints having one of its own
    """

    def __init__(self, folder: str | Path) -> None:
        """Read ``tokenizer.json`` and the configuration files beside it.

        Raises
        ------
        CheckpointNotFound, CheckpointCorrupt
            Naming the file.
        """
        folder = Path(folder)
        self._json = _read(folder / "tokenizer.json", required=True)
        self._config = _read(folder / "tokenizer_config.json")
        try:
            self._raw = RawTokenizer.from_str(json.dumps(self._json))
            self._plain = RawTokenizer.from_str(json.dumps({**self._json, "added_tokens": []}))
        except Exception as error:  # tokenizers raises bare Exception
            path = folder / "tokenizer.json"
            raise CheckpointCorrupt(f"{path} is not a tokenizer that can be read: {error}", path=path) from error
        for each in (self._raw, self._plain):
            each.no_padding()
            each.no_truncation()
        self._encoder = BoundedEncoder(self._raw, self._json)
        self._plain_encoder = BoundedEncoder(self._plain, self._json)
        self.vocab_size = self._raw.get_vocab_size(with_added_tokens=True)
        self.bytes = TokenBytes(self._raw, self._json)
        self.eos_token_ids = self._eos_ids(folder)
        self.think_tags = self._find_tags()
        sources = self._template_sources(folder)
        self.template = self._compile(sources.get("default", next(iter(sources.values()), None)))
        self.tool_template = self._compile(sources.get("tool_use")) or self.template
        added = {token.content: i for i, token in self._raw.get_added_tokens_decoder().items()}
        self._added_ids = frozenset(added.values())
        tags = {name for pair in _TAG_NAMES for name in pair}
        self._controls = _any_of(added)
        self._controls_but_tags = _any_of(set(added) - tags)

    def _eos_ids(self, folder: Path) -> tuple[int, ...]:
        for name in ("generation_config.json", "config.json"):
            value = _read(folder / name).get("eos_token_id")
            if value is not None:
                return tuple(value) if isinstance(value, list) else (int(value),)
        token = _content(self._config.get("eos_token"))
        found = None if token is None else self._raw.token_to_id(token)
        return () if found is None else (found,)

    def _find_tags(self) -> ThinkTags | None:
        for opening, closing in _TAG_NAMES:
            open_id, close_id = self._raw.token_to_id(opening), self._raw.token_to_id(closing)
            if open_id is not None and close_id is not None:
                return ThinkTags(open_id, close_id)
        return None

    def _template_sources(self, folder: Path) -> dict[str, str]:
        """Return the checkpoint's templates by name; the only one of most is ``default``."""
        path = folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else self._config.get("chat_template")
        if isinstance(source, list):
            return {str(each.get("name")): each["template"] for each in source if each.get("template")}
        return {} if source is None else {"default": source}

    def _compile(self, source: str | None) -> ChatTemplate | None:
        if source is None:
            return None
        special = {
            key: content
            for key, value in self._config.items()
            if key.endswith("_token") and (content := _content(value)) is not None
        }
        return ChatTemplate(source, special)

    @cached_property
    def tool_support(self) -> ToolSupport:
        """Return what the template does with tools."""
        template = self.tool_template
        return ToolSupport(tools=False, calls=False) if template is None else ToolSupport.of(template)

    @property
    def has_thinking_switch(self) -> bool:
        """Tell whether a request can turn reasoning on and off."""
        return self.think_tags is not None and self.template is not None and self.template.has_thinking_switch

    @property
    def fingerprint(self) -> int:
        """Return a number that is equal for tokenizers of the same ids and tokens, which drafting needs."""
        return hash(frozenset(self._raw.get_vocab(with_added_tokens=True).items()))

    def to_json(self) -> str:
        """Return the tokenizer in the library's own form."""
        text: str = self._raw.to_str()
        return text

    @property
    def max_token_bytes(self) -> int | None:
        """Return the most bytes of text that one token can stand for; None where there is no such number."""
        return self._encoder.max_token_bytes

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Return the token ids of a raw prompt; control tokens are read as such.

        Raises
        ------
        TextTooLong
            It has more than ``limit`` tokens. Not every text that has is refused: the caller counts what it gets.
        InvalidText
            The text has a lone surrogate.
        """
        _check(text)
        return self._encoder.encode(text, add_special_tokens=add_special_tokens, limit=limit)

    def encode_many(self, texts: Sequence[str], *, limit: int) -> list[list[int]]:
        """Return the token ids of each of several raw prompts, none of which may have more than ``limit``.

        Raises
        ------
        TextTooLong, InvalidText
            Before anything is encoded, where the bytes of one are too many.
        """
        for text in texts:
            self._encoder.refuse_long([text], limit)
        for text in texts:
            _check(text)
        return [ids for batch in batches(texts) for ids in self._encode_batch(batch, limit)]

    def _encode_batch(self, texts: list[str], limit: int) -> list[list[int]]:
        if len(texts) == 1:  # perhaps a long one
            return [self._encoder.encode(texts[0], add_special_tokens=True, limit=limit)]
        return self._encoder.encode_many(texts, add_special_tokens=True)

    def encode_plain(self, text: str, *, limit: int | None = None) -> list[int]:
        """Return the token ids of text in which nothing is a control token. ``limit`` as for :meth:`encode`."""
        _check(text)
        return self._spelled_out(text, self._plain_encoder.encode(text, add_special_tokens=False, limit=limit))

    def _spelled_out(self, text: str, ids: list[int]) -> list[int]:
        if self._added_ids.isdisjoint(ids):
            return ids
        # The control token is an ordinary entry of the vocabulary too; single characters cannot spell it.
        spelled = self._plain_encoder.encode_many(list(text), add_special_tokens=False)
        return [i for char_ids in spelled for i in char_ids]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        lay_out: Layout | None = None,
        limit: int | None = None,
    ) -> list[int]:
        """Return the token ids of messages, laid out by the checkpoint's template.

        Parameters
        ----------
        messages : ``role``, ``content`` (text) and what else a template may read: ``name``, ``tool_calls`` …
        thinking : passed to the template as ``enable_thinking`` unless None
        variables : more for the template
        tools : what the model may call, in OpenAI's shape
        lay_out : changes messages and tools into those that the template is to show; control tokens that it writes
            itself are read as such. Given for every conversation with tools or calls
        limit : as for :meth:`encode`

        Raises
        ------
        NoChatTemplate, ChatTemplateError, InvalidText, TextTooLong
        """
        template = self.template if lay_out is None else self.tool_template
        if template is None:
            raise NoChatTemplate(
                "The checkpoint has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json), "
                "so it cannot be given messages; use the completions endpoint with a prompt."
            )
        if limit is not None:
            # Templates may leave out an assistant's reasoning, so its turns are measured when they are laid out.
            self._encoder.refuse_long([_text(each) for each in messages if each.get("role") != "assistant"], limit)
        more = dict(variables or {})
        if thinking is not None:
            more["enable_thinking"] = thinking
        cut: list[str] = []
        key = secrets.token_hex(8)
        safe = [self._cut_controls(message, cut, key) for message in messages]
        if limit is not None and len(cut) > limit:
            raise TextTooLong(len(cut), limit)  # each takes a token at least
        if lay_out is not None:
            safe, more["tools"] = lay_out(safe, [_cut(tool, self._controls, cut, key) for tool in tools])
        text = template.render(safe, add_generation_prompt=add_generation_prompt, **more)
        if not cut:
            return self.encode(text, add_special_tokens=False, limit=limit)
        # re.split with a group alternates text and the index between the marks, which JSON may have escaped.
        pieces = re.split(rf"(?:\ue000|\\ue000){key}:([0-9]+)(?:\ue001|\\ue001)", text)
        return self._join(pieces[::2], [cut[int(index)] for index in pieces[1::2]], limit)

    def _join(self, pieces: list[str], spellings: list[str], limit: int | None) -> list[int]:
        """Encode text and the spellings between its pieces, and lay them end to end."""
        if limit is not None:
            self._encoder.refuse_long(pieces, limit)
        for piece in pieces:
            _check(piece)
            if limit is not None:
                self._encoder.refuse_counted(piece, limit)
        plain = {each: self.encode_plain(each) for each in set(spellings)}
        following, ids = iter(spellings), list[int]()
        for batch in batches(pieces):
            for own in self._encoder.encode_many(batch, add_special_tokens=False):
                ids += own
                if (spelling := next(following, None)) is not None:
                    ids += plain[spelling]
            if limit is not None and len(ids) > limit:
                raise TextTooLong(len(ids), limit)
        return ids

    def _cut_controls(self, message: Mapping[str, Any], cut: list[str], key: str) -> dict[str, Any]:
        """Replace what spells a control token by marks that a caller cannot guess; ``cut`` keeps the spellings."""
        answered = self._controls_but_tags if message.get("role") == "assistant" else self._controls
        return {
            name: _cut(value, answered if name == "content" else self._controls, cut, key)
            for name, value in message.items()
        }

    def is_thinking_open(self, prompt_ids: Sequence[int]) -> bool:
        """Tell whether a prompt ends inside reasoning, as templates leave it for models that always think."""
        tags = self.think_tags
        if tags is None or tags.open_id not in prompt_ids:
            return False
        last = next((i for i in reversed(prompt_ids) if i in (tags.open_id, tags.close_id)), None)
        return last == tags.open_id

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text, None where the vocabulary has none such."""
        found: int | None = self._raw.token_to_id(token)
        return found

    def has_token(self, token: str) -> bool:
        """Tell whether the vocabulary has a token."""
        return self.token_id(token) is not None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens."""
        return decode(self.bytes, token_ids)


def _read(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise CheckpointNotFound(f"{path} does not exist; a checkpoint needs a fast tokenizer's file.", path=path)
        return {}
    return read_json(path)


def _content(token: Any) -> str | None:
    """Return a special token as older and newer configurations write it: text, or an object with ``content``."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _any_of(names: Any) -> re.Pattern[str] | None:
    ordered = sorted((name for name in names if name), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _cut(value: Any, pattern: re.Pattern[str] | None, cut: list[str], key: str) -> Any:
    """Return a value of JSON, cut in all of its strings, names included."""
    if pattern is None:
        return value
    if isinstance(value, str):

        def mark(match: re.Match[str]) -> str:
            cut.append(match.group())
            return f"\ue000{key}:{len(cut) - 1}\ue001"

        return pattern.sub(mark, value)
    if isinstance(value, Mapping):
        return {_cut(name, pattern, cut, key): _cut(each, pattern, cut, key) for name, each in value.items()}
    if isinstance(value, list):
        return [_cut(each, pattern, cut, key) for each in value]
    return value


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _check(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidText(
            f"The text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, "
            "which is not a character; send well-formed Unicode."
        ) from error
