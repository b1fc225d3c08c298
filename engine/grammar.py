"""Compiles what an answer must be (a JSON Schema, a regular expression, a grammar) for one tokenizer.

llguidance does the work: it parses the text so far and tells which tokens may come next. Compiling belongs on a thread
of its own; it lets others run, and its time and memory are bounded: by the size of the text before anything is parsed,
then by the library's own limits. Nothing is fetched: a ``$ref`` to another document is refused. The first mask, the
slowest, is computed here too, so that no step waits for it.

A schema is enforced whole or refused: a keyword that cannot be enforced is named.
"""

from __future__ import annotations

import ast
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.errors import GrammarTooLarge, InvalidGrammar, UnsupportedGrammar
from engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

GrammarKind = Literal["json_schema", "regex", "choice", "lark"]

MAX_CHARS = 262_144
MAX_MEMBERS = 5_000
"""Keys of a schema, property names among them: the time to compile one object grows with their square."""
MAX_CHOICES = 5_000

# Between two parts of JSON there is one blank, or a new line with its indentation, as JSON is written: a model that is
# fond of blanks must come to an end.
JSON_BLANKS = r" |\r?\n[ \t]{0,40}"
# A schema's own `x-guidance` may not loosen what is enforced.
_SCHEMA_OPTIONS: JsonCompileOptions = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_pattern": JSON_BLANKS,
}
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=250_000,
    verbose_errors=False,
)
# A mask that is known already and still takes this long would hold up every step.
_MOST_WARM_MASK_S = 0.02
_NUM_KEPT = 32
_LINE_BREAKS = ("\n", "\n\n", "\r\n", "\r\n\r\n")

_TOO_LARGE = ("too large", "too big", "fuel exhausted", "recursion limit", "too many", "limit", "TooComplex")
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])")
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (.*)")
_UNSUPPORTED = re.compile(r"(\w+) constraints are not supported")


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """Says what an answer must be.

    Parameters
    ----------
    kind : ``json_schema``, ``regex`` (Rust's syntax, of the whole answer), ``choice`` (a JSON list of texts) or
        ``lark`` (llguidance's dialect, which may hold schemas as ``%json`` and control tokens by their names)
    text : the schema, expression, list or grammar
    """

    kind: GrammarKind
    text: str


class Grammar:
    """Holds a compiled grammar, for any number of answers. Safe from any thread.

    Attributes
    ----------
    vocab_size : V of the model it was compiled for
    eos_token_ids : tokens that end an answer, allowed where it satisfies the grammar
    line_breaks : tokens of line breaks alone
    all_but_eos : int32 (words,), the mask of every token but those that end an answer
    """

    def __init__(
        self, matcher: LLMatcher, *, vocab_size: int, eos_token_ids: tuple[int, ...], line_breaks: frozenset[int]
    ) -> None:
        self._matcher = matcher
        self._lock = threading.Lock()
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.line_breaks = line_breaks
        words = np.full(-(-vocab_size // 32), 0xFFFFFFFF, dtype=np.uint32)
        for token_id in eos_token_ids:
            words[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
        self.all_but_eos = words.view(np.int32)

    def matcher(self) -> LLMatcher:
        """Return a matcher at the beginning of an answer."""
        with self._lock:
            return self._matcher.deep_copy()

    def after(self, token_ids: Sequence[int]) -> Grammar | None:
        """Return the grammar of what may follow tokens of an answer; None if it does not permit them."""
        matcher = self.matcher()
        if matcher.try_consume_tokens(list(token_ids)) != len(token_ids):
            return None
        return Grammar(
            matcher, vocab_size=self.vocab_size, eos_token_ids=self.eos_token_ids, line_breaks=self.line_breaks
        )


class GrammarCompiler:
    """Compiles grammars for one model and keeps the latest. Safe from any thread.

    Parameters
    ----------
    tokenizer : the checkpoint's; it must be one whose tokens stand for bytes
    vocab_size : width of the model's logits
    eos_token_ids : tokens that end an answer, one at least

    Raises
    ------
    ValueError
        The tokenizer's tokens have no bytes of their own, or none of them ends an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        if tokenizer.bytes.kind == "other":
            raise ValueError("This tokenizer's tokens read otherwise beside others, so no grammar can follow them.")
        if not eos_token_ids:
            raise ValueError("This tokenizer has no token that ends an answer.")
        self._vocab_size = vocab_size
        self._tokenizer = LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        encoded = [self._tokenizer.tokenize_str(text) for text in _LINE_BREAKS]
        self._line_breaks = frozenset(ids[0] for ids in encoded if len(ids) == 1)
        self._kept: OrderedDict[tuple[str, GrammarSpec], Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def kept(self, spec: GrammarSpec, salt: str = "") -> Grammar | None:
        """Return a grammar that was compiled before under the same salt."""
        with self._lock:
            grammar = self._kept.get((salt, spec))
            if grammar is not None:
                self._kept.move_to_end((salt, spec))
            return grammar

    def compile(self, spec: GrammarSpec, salt: str = "") -> Grammar:
        """Return a grammar; blocks for as long as compiling takes, without the interpreter's lock.

        Parameters
        ----------
        salt : only those who give the same one can tell, by the time it takes, what was compiled before

        Raises
        ------
        InvalidGrammar, UnsupportedGrammar, GrammarTooLarge
        """
        grammar = self.kept(spec, salt)
        if grammar is None:
            grammar = self._compile(spec)
            with self._lock:
                self._kept[salt, spec] = grammar
                if len(self._kept) > _NUM_KEPT:
                    self._kept.popitem(last=False)
        return grammar

    def _compile(self, spec: GrammarSpec) -> Grammar:
        try:
            matcher = LLMatcher(self._tokenizer, _serialised(spec), log_level=0, limits=_LIMITS)
        except ValueError as error:  # a lone surrogate, which is no character
            raise InvalidGrammar(f"It is not well-formed text: {type(error).__name__}.") from error
        if matcher.is_error():
            raise _error_of(matcher.get_error())
        matcher.compute_bitmask()
        began_s = time.thread_time()
        matcher.deep_copy().compute_bitmask()
        seconds = time.thread_time() - began_s
        if matcher.is_error():
            raise _error_of(matcher.get_error())
        if seconds > _MOST_WARM_MASK_S:
            raise GrammarTooLarge("It takes too long to say which tokens may come next; use smaller repetitions.")
        return Grammar(
            matcher,
            vocab_size=self._vocab_size,
            eos_token_ids=tuple(self._tokenizer.eos_tokens),
            line_breaks=self._line_breaks,
        )


def _serialised(spec: GrammarSpec) -> str:
    """Return llguidance's own form, or refuse what is malformed or too large to be looked at."""
    if len(spec.text) > MAX_CHARS:
        raise GrammarTooLarge(f"It has {len(spec.text)} characters; at most {MAX_CHARS} are allowed.")
    if spec.kind == "json_schema":
        schema = _read_json(spec.text)
        if not isinstance(schema, dict):
            raise InvalidGrammar("The schema is not an object.")
        _count_members(schema)
        return LLMatcher.grammar_from_json_schema(spec.text, overrides=_SCHEMA_OPTIONS)
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    return LLMatcher.grammar_from_lark(_choices(spec.text) if spec.kind == "choice" else spec.text)


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidGrammar(f"It is not JSON: {error}.") from error
    except RecursionError:
        raise GrammarTooLarge("It is nested too deeply.") from None


def _count_members(schema: Any) -> None:
    num_members = sum(len(node) for node in _nodes(schema) if isinstance(node, dict))
    if num_members > MAX_MEMBERS:
        raise GrammarTooLarge(f"It has {num_members} keywords and names; at most {MAX_MEMBERS} are allowed.")


def _nodes(schema: Any) -> Iterator[Any]:
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, dict):
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def _choices(text: str) -> str:
    choices = _read_json(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise InvalidGrammar("The choices are not a list of texts, none of them empty.")
    if len(choices) > MAX_CHOICES:
        raise GrammarTooLarge(f"It has {len(choices)} choices; at most {MAX_CHOICES} are allowed.")
    # DEL is the one control character that JSON leaves as it is.
    return "start: " + " | ".join(json.dumps(each).replace("\x7f", "\\u007f") for each in choices)


def _error_of(message: str) -> InvalidGrammar | UnsupportedGrammar | GrammarTooLarge:
    """Return our error for the library's words, which name keywords of the caller's own text only."""
    message = message.replace("\n<non-verbose/>", "").strip()
    if found := _UNIMPLEMENTED.search(message):
        return UnsupportedGrammar(str(ast.literal_eval(found[1])[0]))
    if found := _UNKNOWN_FORMAT.search(message):
        return UnsupportedGrammar(f"format: {found[1]}")
    if found := _UNSUPPORTED.search(message):
        return UnsupportedGrammar(found[1])
    if "not present in a registry" in message:
        return UnsupportedGrammar("$ref to another document")
    if "circular references" in message:
        return UnsupportedGrammar("$ref to itself beside other keywords")
    if any(words in message for words in _TOO_LARGE):
        return GrammarTooLarge(f"It is too large: {message}.")
    if message.startswith("NoExtension"):
        return InvalidGrammar("Nothing satisfies it.")
    return InvalidGrammar(f"{message.removesuffix('.')}.")
