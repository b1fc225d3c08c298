"""Makes of what an answer must be the grammar by which the engine draws it."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

from backends.errors import BackendFailure, RequestRejected
from backends.local_engine.errors import translate
from backends.protocol import GenerateRequest, OutputFormat
from engine.errors import GrammarError
from engine.grammar import MAX_CHARS, GrammarCompiler, GrammarSpec
from engine.request import Constraint
from engine.tokenizer import Tokenizer

# Of its own, and one only: whoever sends what is slow to compile waits behind it, and nobody else does.
_NUM_THREADS = 1


class ConstraintBuilder:
    """Compiles grammars for one served model, off the event loop.

    Parameters
    ----------
    compiler : the engine's
    tokenizer : the checkpoint's
    thinking : whether the model reasons unless a request says otherwise
    """

    def __init__(self, model_id: str, compiler: GrammarCompiler, tokenizer: Tokenizer, *, thinking: bool) -> None:
        self.model_id = model_id
        self._compiler = compiler
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix=f"grammar-{model_id}")

    def close(self) -> None:
        """Let the thread go once what it compiles is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def build(
        self,
        request: GenerateRequest,
        prompt_ids: tuple[int, ...],
        spec: GrammarSpec,
        *,
        param: str,
        begun_ids: tuple[int, ...] = (),
    ) -> Constraint:
        """Compile a grammar and say where in this request's output it begins: after the reasoning.

        Of an answer that was begun (``begun_ids``) it goes on where that ends.

        Parameters
        ----------
        param : the request's field that the grammar came in

        Raises
        ------
        RequestRejected
        BackendFailure
            It does not permit what was begun.
        """
        salt = str(request.extra.get("cache_salt", ""))
        try:
            grammar = self._compiler.kept(spec, salt)
            if grammar is None:
                loop = asyncio.get_running_loop()
                grammar = await loop.run_in_executor(self._threads, self._compiler.compile, spec, salt)
        except GrammarError as error:
            raise translate(error, self.model_id, param=param) from error
        if begun_ids:
            loop = asyncio.get_running_loop()
            rest = await loop.run_in_executor(self._threads, grammar.after, begun_ids)
            if rest is None:
                raise BackendFailure("The grammar asked for does not permit what was sent of the answer.")
            return Constraint(rest)
        tags = self._tokenizer.think_tags
        if tags is None or request.messages is None:
            return Constraint(grammar)
        is_open = self._tokenizer.is_thinking_open(prompt_ids)
        may_open = not is_open and (self._thinking if request.thinking is None else request.thinking)
        return Constraint(grammar, tags.open_id if may_open else None, tags.close_id, is_open)


def spec_of(wanted: OutputFormat) -> GrammarSpec | None:
    """Return the grammar of an answer's text; None where any will do.

    Raises
    ------
    RequestRejected
        It is no JSON, or far too long.
    """
    match wanted.kind:
        case "text":
            return None
        case "json_object":
            return GrammarSpec("json_schema", '{"type":"object"}')
        case "json_schema" | "choice":
            return GrammarSpec(wanted.kind, _as_json(wanted))
        case "regex":
            return GrammarSpec("regex", str(wanted.spec))
        case "grammar":
            return GrammarSpec("lark", str(wanted.spec))


def param_of(wanted: OutputFormat) -> str:
    """Return the field in which an answer's format is asked for."""
    return "response_format" if wanted.kind.startswith("json") else "structured_outputs"


def _as_json(wanted: OutputFormat) -> str:
    try:
        text = wanted.spec if isinstance(wanted.spec, str) else json.dumps(wanted.spec)
    except (RecursionError, ValueError) as error:
        raise RequestRejected("It is nested too deeply.", status=400, param=param_of(wanted)) from error
    # What is too long for the compiler need not be kept until it is asked.
    return text[: MAX_CHARS + 1]
