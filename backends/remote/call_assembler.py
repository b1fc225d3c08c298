"""Makes of the pieces of tool calls, as servers send them, pieces as they should be."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from backends.protocol import ToolCallDelta


class CallAssembler:
    """Follows the calls of one answer.

    A server may repeat id and name with each piece, begin a new call at an index it has used, leave out ids, or send
    nothing for a call without arguments. What comes out has each id and name once, calls counted from 0 in the order
    in which they began, and at least ``{}`` for arguments.
    """

    def __init__(self) -> None:
        # The server's index -> ours of the call that goes on there.
        self._places: dict[int, int] = {}
        self._ids: list[str] = []
        self._has_arguments: list[bool] = []

    @property
    def has_calls(self) -> bool:
        return bool(self._ids)

    def take(self, pieces: Sequence[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
        """Return what some pieces add."""
        taken = []
        for piece in pieces:
            place = self._places.get(piece.index)
            if place is None or (piece.name and piece.call_id not in ("", self._ids[place])):
                if not piece.name:
                    # A piece of a call that never began: there is nothing to call.
                    continue
                place = self._places[piece.index] = len(self._ids)
                self._ids.append(piece.call_id or f"call_{uuid.uuid4().hex[:24]}")
                self._has_arguments.append(False)
                taken.append(ToolCallDelta(place, self._ids[place], piece.name, piece.arguments))
            elif piece.arguments:
                taken.append(ToolCallDelta(place, arguments=piece.arguments))
            self._has_arguments[place] |= bool(piece.arguments)
        return tuple(taken)

    def rest(self) -> tuple[ToolCallDelta, ...]:
        """Return the arguments of the calls that were sent without any; once the answer is over."""
        bare = [place for place, has_arguments in enumerate(self._has_arguments) if not has_arguments]
        for place in bare:
            self._has_arguments[place] = True
        return tuple([ToolCallDelta(place, arguments="{}") for place in bare])
