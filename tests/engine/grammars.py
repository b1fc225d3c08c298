"""Small models whose tokens are text, and grammars for them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from engine.grammar import Grammar, GrammarCompiler, GrammarKind, GrammarSpec
from engine.request import Constraint
from engine.tokenizer import Tokenizer
from tests.engine import texts
from tests.engine.toy import ToyModel


@cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE of 420 and some tokens, with control tokens and reasoning tags."""
    return Tokenizer(texts.save(texts.byte_level(), Path(mkdtemp()) / "tokenizer"))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), tokenizer().vocab_size, tokenizer().eos_token_ids)


def toy(seed: int = 0, **options: Any) -> ToyModel:
    """A model that knows the tokens, and as much of what they mean as noise does."""
    return ToyModel(seed, vocab_size=tokenizer().vocab_size, context_length=1024, **options)


def compiled(kind: GrammarKind, text: str) -> Grammar:
    return compiler().compile(GrammarSpec(kind, text))


def constraint(kind: GrammarKind, text: Any, **options: Any) -> Constraint:
    """A constraint by a grammar; a schema and choices may be given as they are."""
    return Constraint(compiled(kind, text if isinstance(text, str) else json.dumps(text)), **options)
