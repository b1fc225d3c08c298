"""Goes on with an answer that somebody else began: its tokens in the prompt, its streams and its grammar behind it."""

from __future__ import annotations

from backends.continuation import Seam
from backends.errors import UnsupportedByBackend
from backends.local_engine.tool_stream import ToolStream
from backends.protocol import GenerateRequest, TokenDelta, ToolCallDelta, join_calls
from engine.text_stream import TextStream


def prime(stream: TextStream | ToolStream, request: GenerateRequest, begun_ids: tuple[int, ...], model: str) -> Seam:
    """Bring a stream to the end of a begun answer, and return what leaves out what was sent of it.

    Raises
    ------
    UnsupportedByBackend
        Read as this model writes them, its calls would not be those that were sent.
    """
    begun = request.continued
    if begun is None or not begun_ids:
        return Seam()
    for token_id in begun_ids:
        stream.push(token_id)
    shown = stream.take() if isinstance(stream, ToolStream) else [TokenDelta(stream.take()[1])]
    calls = join_calls([piece for delta in shown for piece in delta.tool_calls])
    if [call.name for call in calls] != [call.name for call in begun.tool_calls]:
        raise UnsupportedByBackend("continue", model)
    if calls:
        sent, read = begun.tool_calls[-1].arguments, calls[-1].arguments
        if not read.startswith(sent):
            raise UnsupportedByBackend("continue", model)
        if isinstance(stream, ToolStream) and read != sent:
            # The bracket that all arguments begin with, of a call that was no more than its name.
            stream.show(TokenDelta(tool_calls=(ToolCallDelta(len(calls) - 1, arguments=read[len(sent) :]),)))
        return Seam()
    text = "".join([delta.text for delta in shown])
    return Seam(begun.content[len(text) :] if begun.content.startswith(text) else "")
