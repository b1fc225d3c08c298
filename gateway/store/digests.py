"""Keyed digests of texts: equal texts match, but none can be guessed without the key."""

from __future__ import annotations

import hashlib

_BLOCK_BYTES = 64


class KeyedDigest:
    """HMAC-SHA256 under one key, which is taken in once and not with every text.

    Parameters
    ----------
    key : at most 64 bytes

    References
    ----------
    RFC 2104. ``hmac.HMAC`` does the same by way of several calls more, most of a short text's time.
    """

    def __init__(self, key: bytes) -> None:
        assert len(key) <= _BLOCK_BYTES, "a longer key would be hashed first"
        padded = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(each ^ 0x36 for each in padded))
        self._outer = hashlib.sha256(bytes(each ^ 0x5C for each in padded))

    def __call__(self, content: bytes) -> str:
        """The digest in hex."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(content)
        outer.update(inner.digest())
        return outer.hexdigest()
