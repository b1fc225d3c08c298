"""A keyed digest is HMAC-SHA256, whatever the length of key and text."""

from __future__ import annotations

import hmac

from hypothesis import given
from hypothesis import strategies as st

from gateway.store.keyed_digest import KeyedDigest


@given(key=st.binary(max_size=200), texts=st.lists(st.binary(max_size=300), min_size=1, max_size=3))
def test_it_is_the_librarys(key: bytes, texts: list[bytes]) -> None:
    digest = KeyedDigest(key)
    assert [digest.of(text) for text in texts] == [hmac.new(key, text, "sha256").hexdigest() for text in texts]
