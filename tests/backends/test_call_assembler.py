"""Pieces of tool calls, however a server cuts and repeats them, are the calls once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backends.protocol import ToolCallDelta
from backends.remote.call_assembler import CallAssembler

CALLS = st.lists(st.tuples(st.text("abc", min_size=1, max_size=4), st.text(max_size=12)), min_size=1, max_size=4)


def joined(pieces: list[ToolCallDelta]) -> list[tuple[str, str, str]]:
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        if piece.index not in calls:
            assert piece.name, "a call begins with its name"
            assert piece.call_id, "and with its id"
            calls[piece.index] = [piece.call_id, piece.name, piece.arguments]
        else:
            assert (piece.name, piece.call_id) == ("", ""), "which come once"
            calls[piece.index][2] += piece.arguments
    assert list(calls) == list(range(len(calls)))
    return [(call_id, name, arguments) for call_id, name, arguments in calls.values()]


@given(CALLS, st.booleans(), st.booleans(), st.booleans(), st.data())
def test_any_way_of_sending_gives_the_calls_once(
    calls: list[tuple[str, str]], repeats: bool, has_ids: bool, reuses_index: bool, data: st.DataObject
) -> None:
    assembler, taken = CallAssembler(), list[ToolCallDelta]()
    for place, (name, arguments) in enumerate(calls):
        index = 0 if reuses_index and has_ids else place
        call_id = f"call_{place}" if has_ids else ""
        cut = data.draw(st.integers(0, len(arguments)))
        first = ToolCallDelta(index, call_id, name, arguments[:cut])
        rest = ToolCallDelta(index, call_id if repeats else "", name if repeats else "", arguments[cut:])
        taken += assembler.take((first,))
        taken += assembler.take((rest,))
    taken += assembler.rest()
    assert assembler.rest() == ()
    found = joined(taken)
    assert [(name, arguments) for _, name, arguments in found] == [(n, a or "{}") for n, a in calls]
    assert len({call_id for call_id, _, _ in found}) == len(calls)
    if has_ids:
        assert [call_id for call_id, _, _ in found] == [f"call_{place}" for place in range(len(calls))]


def test_what_never_began_is_no_call() -> None:
    assembler = CallAssembler()
    assert assembler.take((ToolCallDelta(3, arguments="{}"),)) == ()
    assert not assembler.has_calls
