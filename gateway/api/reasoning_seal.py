"""Seals a model's reasoning for clients that keep their own history (``encrypted_content``), and opens it again.

A client can neither read nor change what is sealed, nor can another tenant have it opened. It does not keep a client
from sending a seal again, in another conversation too. What is sealed is as long as the text: nothing is compressed,
so a short body cannot unfold to a long one.
"""

from __future__ import annotations

import base64
import binascii
import os

_MARK = "sfr1_"
_KEY_ID_BYTES, _NONCE_BYTES, _TAG_BYTES = 6, 12, 16
_HEAD_BYTES = _KEY_ID_BYTES + _NONCE_BYTES
_MAX_BYTES = 1_048_576


class BrokenSeal(ValueError):
    """It was altered, or sealed for another tenant."""


class ReasoningSeal:
    """Seals with AES-256-GCM; its keys differ from one installation to another.

    Random nonces of 96 bits serve for 2³² texts under one key.

    Parameters
    ----------
    key : 32 secret bytes
    key_id : tells this installation's seals from others'; not secret
    """

    def __init__(self, key: bytes, key_id: bytes) -> None:
        # It takes 70 ms to import: not from commands that seal nothing.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)
        self._key_id = key_id[:_KEY_ID_BYTES]

    def close(self, text: str, tenant: str) -> str | None:
        """Return a text sealed; None for one that is longer than any that is opened."""
        content = text.encode("utf-8", "surrogatepass")
        if len(content) > _MAX_BYTES:
            return None
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, content, self._about(tenant))
        return _MARK + base64.urlsafe_b64encode(self._key_id + nonce + sealed).decode()

    def open(self, token: str, tenant: str) -> str | None:
        """Return the text; None of what others sealed, which is nothing to us.

        Raises
        ------
        BrokenSeal
        """
        if not token.startswith(_MARK):
            return None
        try:
            # Exactly one writing of each seal: no stray characters, no other last one.
            found = base64.urlsafe_b64decode(token[len(_MARK) :])
            is_exact = _MARK + base64.urlsafe_b64encode(found).decode() == token
        except (binascii.Error, ValueError):
            raise BrokenSeal from None
        if found[:_KEY_ID_BYTES] != self._key_id:
            return None
        if not is_exact or not _HEAD_BYTES + _TAG_BYTES <= len(found) <= _HEAD_BYTES + _TAG_BYTES + _MAX_BYTES:
            raise BrokenSeal
        from cryptography.exceptions import InvalidTag

        try:
            content = self._cipher.decrypt(found[_KEY_ID_BYTES:_HEAD_BYTES], found[_HEAD_BYTES:], self._about(tenant))
        except InvalidTag:
            raise BrokenSeal from None
        return content.decode("utf-8", "surrogatepass")

    def _about(self, tenant: str) -> bytes:
        return b"reasoning\0" + self._key_id + tenant.encode("utf-8", "surrogatepass")
