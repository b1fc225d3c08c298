"""Sealed reasoning is opened by nobody else, and in no other form than it was sent."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from gateway.api.reasoning_seal import BrokenSeal, ReasoningSeal
from gateway.config.store_section import StoreConfig
from gateway.store.installation_secret import InstallationSecret
from gateway.store.store import Store

SEAL = ReasoningSeal(b"k" * 32, b"id" * 16)


def opened(token: str, tenant: str = "a", seal: ReasoningSeal = SEAL) -> str | None:
    """The text; None of what is not opened, for whichever reason."""
    try:
        return seal.open(token, tenant)
    except BrokenSeal:
        return None


@pytest.mark.parametrize("text", ["", "hm", "äöü \N{GRINNING FACE}", "a\0b", "x" * 10_000])
def test_what_was_sealed_is_opened(text: str) -> None:
    token = SEAL.close(text, "a")
    assert token is not None
    assert SEAL.open(token, "a") == text
    assert SEAL.close(text, "a") != token, "each seal is another"


def test_no_altered_seal_is_opened() -> None:
    token = SEAL.close("reasoning", "a")
    assert token is not None
    for place, char in enumerate(token):
        for other in "AB=_ä":
            if other != char:
                assert opened(token[:place] + other + token[place + 1 :]) is None
    for place in range(len(token)):
        assert opened(token[:place]) is None
    for more in ("A", "AAAA", "=", "\n", " "):
        assert opened(token + more) is None
        assert opened(token[:20] + more + token[20:]) is None


def test_no_other_tenant_or_key_opens_it() -> None:
    token = SEAL.close("reasoning", "a")
    assert token is not None
    with pytest.raises(BrokenSeal):
        SEAL.open(token, "b")
    with pytest.raises(BrokenSeal):
        ReasoningSeal(b"l" * 32, b"id" * 16).open(token, "a")
    # Another installation's is nobody's fault.
    assert ReasoningSeal(b"k" * 32, b"no" * 16).open(token, "a") is None
    assert SEAL.open("gAAAAABo", "a") is None


def test_it_is_bounded_and_says_nothing() -> None:
    assert SEAL.close("x" * 1_048_577, "a") is None
    token = SEAL.close("secret reasoning", "a")
    assert token is not None
    assert b"secret" not in base64.urlsafe_b64decode(token[5:])


def test_the_key_is_derived_and_no_digest_shows_it() -> None:
    secret = InstallationSecret(b"s" * 32)
    key = secret.derive_key("reasoning")
    assert key == HKDF(SHA256(), 32, b"suffice", b"reasoning").derive(b"s" * 32)
    assert secret.derive_key("another") != key
    # What expanding the secret itself would come to is the digest of a text that anybody may send.
    assert secret.digest("reasoning\x01") == HKDFExpand(SHA256(), 32, b"reasoning").derive(b"s" * 32).hex()
    assert bytes.fromhex(secret.digest("reasoning\x01")) != key


async def test_the_key_outlives_the_process(tmp_path: Path) -> None:
    keys = []
    for _ in range(2):
        async with Store(StoreConfig(url=f"sqlite:///{tmp_path / 'suffice.db'}")) as store:
            keys.append(store.secret.derive_key("reasoning"))
    assert keys[0] == keys[1]
