"""Unpacks compressed bodies in small pieces, up to a bound.

Servers are asked not to compress (``accept-encoding: identity``). One that does so all the same is served where it uses
gzip or deflate once; a body that unpacks to far more than any answer does is refused before it is in memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

MAX_PIECE_BYTES = 64 * 1024
"""Most that is unpacked at once."""

# A stream of one-token events is repetitive: real ones reach some 30 to 1. Deflate itself goes to 1,032 to 1.
_MAX_RATIO = 100
_FREE_BYTES = 1024 * 1024


class BodyUndecodable(Exception):
    """Not what its header says, or larger than a body may be."""


class BodyDecoder:
    """Decode one body as it arrives.

    Parameters
    ----------
    encoding : the answer's ``content-encoding``; empty or ``identity`` passes bytes through

    Attributes
    ----------
    num_in, num_out : bytes received, bytes given out

    Raises
    ------
    BodyUndecodable : an encoding that was not asked for and is not undone here, such as one on top of another
    """

    def __init__(self, encoding: str = "") -> None:
        self.num_in = 0
        self.num_out = 0
        name = encoding.strip().lower()
        # Of "deflate" until its first two bytes have come.
        self._held: bytes | None = b"" if name == "deflate" else None
        self._inflater: zlib._Decompress | None = None
        if name in ("gzip", "x-gzip"):
            self._inflater = zlib.decompressobj(zlib.MAX_WBITS | 16)
        elif name not in ("", "identity", "deflate"):
            raise BodyUndecodable(f"the answer is encoded as {name[:80]!r}, which was not asked for")

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what ``data`` decodes to, in pieces of at most :data:`MAX_PIECE_BYTES` where it was compressed.

        Raises
        ------
        BodyUndecodable
        """
        self.num_in += len(data)
        if self._held is not None:
            data, self._held = self._held + data, None
            if len(data) < 2:
                self._held = data
                return
            self._inflater = zlib.decompressobj(zlib.MAX_WBITS if _has_zlib_head(data) else -zlib.MAX_WBITS)
        if self._inflater is None:
            self.num_out += len(data)
            yield data
            return
        while data and not self._inflater.eof:
            piece = self._inflate(data)
            data = self._inflater.unconsumed_tail
            self.num_out += len(piece)
            if self.num_out > _FREE_BYTES + _MAX_RATIO * self.num_in:
                raise BodyUndecodable(f"{self.num_in} bytes unpack to more than {self.num_out}")
            if piece:
                yield piece

    def _inflate(self, data: bytes) -> bytes:
        assert self._inflater is not None, "only where something is compressed"
        try:
            return self._inflater.decompress(data, MAX_PIECE_BYTES)
        except zlib.error as error:
            raise BodyUndecodable(f"damaged: {error}") from error


def _has_zlib_head(data: bytes) -> bool:
    """Whether bytes begin as RFC 1950, section 2.2, says. RFC 9110 means that form; some servers send it bare."""
    return data[0] & 0x0F == 8 and int.from_bytes(data[:2]) % 31 == 0
