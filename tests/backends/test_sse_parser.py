"""Event streams give the same events wherever reads are torn, and those the standard's own algorithm gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.remote.sse import EventTooLarge, SSEParser, SSEvent


def parse(*pieces: bytes) -> list[SSEvent]:
    parser = SSEParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.end()


def by_the_standard(data: bytes) -> list[SSEvent]:
    """Interpret a whole stream line by line, as the HTML Living Standard (9.2.6) words it.

    One thing is ours: an event whose blank line is missing at the stream's end is still given.
    """
    text = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events, buffer, kind = [], list[bytes](), b""
    for line in [*text.split(b"\n"), b""]:
        if not line:
            if buffer:
                events.append(SSEvent(b"\n".join(buffer), kind))
            buffer, kind = [], b""
        elif not line.startswith(b":"):
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                buffer.append(value)
            elif name == b"event":
                kind = value
    return events


STREAMS = {
    "openai": b'data: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n',
    "crlf": b"data: one\r\n\r\ndata: two\r\n\r\n",
    "cr": b"data: one\r\rdata: two\r\r",
    "mixed line ends": b"data: a\r\ndata: b\rdata: c\n\r\n\n\rdata: d\n\n",
    "byte order mark": b"\xef\xbb\xbfdata: x\n\n",
    "byte order mark inside": b"data: x\n\n\xef\xbb\xbfdata: y\n\n",
    "utf-8": "data: naïve 🦊 不\n\ndata: 是\n\n".encode(),
    "comments": b": ping\n\n: ping\ndata: x\n: ping\n\n",
    "named": b"event: message_start\ndata: {}\n\nevent: ping\n\ndata: y\n\n",
    "several lines": b"data: a\ndata:\ndata:  b\n\n",
    "no value": b"data\n\nevent\ndata: x\n\n",
    "other fields": b"id: 7\nretry: 100\ndata: x\nfoo: bar\ndatum: y\n\n",
    "no last blank line": b"data: x\n\ndata: [DONE]",
    "half a line": b"data: x\n\ndat",
    "empty": b"",
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_torn_at_any_two_bytes_is_the_same(name: str) -> None:
    data = STREAMS[name]
    expected = by_the_standard(data)
    assert parse(data) == expected
    assert parse(*(data[at : at + 1] for at in range(len(data)))) == expected
    for first in range(len(data) + 1):
        assert parse(data[:first], data[first:]) == expected
        for second in range(first, len(data) + 1, 3):
            assert parse(data[:first], b"", data[first:second], data[second:]) == expected


PIECES = st.sampled_from(
    [b"\r", b"\n", b"\r\n", b"data", b"data:", b"event:", b": ", b" ", b"x", b"\xef\xbb\xbf", b"\xff"]
)


@given(st.lists(st.lists(PIECES, max_size=6).map(b"".join), max_size=6))
def test_any_bytes_in_any_pieces_follow_the_standard(pieces: list[bytes]) -> None:
    assert parse(*pieces) == by_the_standard(b"".join(pieces))


def test_an_event_is_given_as_soon_as_its_blank_line_is_there() -> None:
    parser = SSEParser()
    assert parser.feed(b"data: x\n") == []
    assert parser.feed(b"\n") == [SSEvent(b"x")]
    # A carriage return is enough: the newline that may follow it belongs to it, and ends nothing twice.
    assert parser.feed(b"data: y\r\r") == [SSEvent(b"y")]
    assert parser.feed(b"\ndata: z\n\n") == [SSEvent(b"z")]
    assert parser.end() == []
    assert parser.end() == []


@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_limit_holds_for_a_line_and_for_an_event_whatever_the_reads(size: int) -> None:
    limit = 50
    fits, one_more = b"data: " + b"x" * (limit - 6), b"data: " + b"x" * (limit - 5)

    def feed(data: bytes) -> list[SSEvent]:
        parser = SSEParser(max_event_bytes=limit)
        return [event for at in range(0, len(data), size) for event in parser.feed(data[at : at + size])]

    assert feed(fits + b"\n\n") == [SSEvent(b"x" * (limit - 6))]
    with pytest.raises(EventTooLarge) as caught:
        feed(one_more + b"\n\n")
    assert caught.value.limit_bytes == limit
    several = b"data: " + b"x" * 20 + b"\n"
    assert len(feed(several * 2 + b"\n")[0].data) == 41
    with pytest.raises(EventTooLarge):
        feed(several * 3)
    # Comments count as lines, not as an event: a server may ping for ever.
    assert feed(b": ping\n" * 100) == []


@given(st.integers(0, 40), st.integers(0, 40))
def test_what_one_event_leaves_does_not_reach_the_next(first: int, second: int) -> None:
    parser = SSEParser(max_event_bytes=60)
    for size in (first, second, first):
        assert parser.feed(b"event: k\ndata: " + b"x" * size + b"\n\n") == [SSEvent(b"x" * size, b"k")]
        assert parser.feed(b"data: y\n\n") == [SSEvent(b"y")]
