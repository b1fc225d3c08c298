"""Knows the tool formats there are, and which of them a model writes."""

from __future__ import annotations

from backends.local_engine.tool_formats.hermes import HermesFormat
from backends.local_engine.tool_formats.llama3_json import Llama3Format
from backends.local_engine.tool_formats.mistral import MistralFormat
from backends.local_engine.tool_formats.qwen3_coder import Qwen3CoderFormat
from backends.local_engine.tool_formats.tool_format import ToolFormat
from engine.tokenizer import Tokenizer

# The first that fits is taken: Qwen3-Coder's templates have the markers of Hermes too.
FORMATS: tuple[ToolFormat, ...] = (MistralFormat(), Qwen3CoderFormat(), HermesFormat(), Llama3Format())
DEFAULT = HermesFormat()


def find_format(tokenizer: Tokenizer, name: str) -> ToolFormat:
    """Return the format of a name; ``auto`` is that of the template, else Hermes's.

    Models whose template shows tools in a format that is not among these are told of that of Hermes instead.
    """
    if name != "auto":
        return next(each for each in FORMATS if each.name == name)
    template = tokenizer.tool_template
    source = template.source if template is not None and tokenizer.tool_support.tools else ""
    return next((each for each in FORMATS if source and each.fits(source, tokenizer.has_token)), DEFAULT)
