"""Holds the secret of this installation: digests of texts are made with it, and keys are derived from it."""

from __future__ import annotations

import hmac

from gateway.store.keyed_digest import KeyedDigest
from gateway.store.rows import clean_text


class InstallationSecret:
    """Made at the first start, kept in the database (table ``secrets``), the same for all servers of one log."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._digest = KeyedDigest(secret)

    def digest(self, content: str) -> str:
        """HMAC-SHA256 (hex) of a text: equal texts match, but none can be guessed."""
        return self._digest.of(clean_text(content).encode())

    def derive_key(self, purpose: str) -> bytes:
        """Return 32 secret bytes for one purpose: HKDF-SHA256.

        It extracts before it expands: an expansion of the secret itself is :meth:`digest` of some text, and callers
        choose texts.

        References
        ----------
        RFC 5869, sections 2.2 and 2.3.
        """
        extracted = hmac.digest(b"suffice", self._secret, "sha256")
        return hmac.digest(extracted, purpose.encode() + b"\x01", "sha256")
