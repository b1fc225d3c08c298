"""The address at which this machine reaches a server of its own."""

from __future__ import annotations

import pytest

from gateway.commands.server_url import local_url


@pytest.mark.parametrize(
    ("host", "root_path", "url"),
    [
        ("127.0.0.1", "", "http://127.0.0.1:8000"),
        ("0.0.0.0", "", "http://127.0.0.1:8000"),
        ("", "/suffice", "http://127.0.0.1:8000/suffice"),
        ("::", "", "http://[::1]:8000"),
        ("fe80::1", "", "http://[fe80::1]:8000"),
        ("[::1]", "", "http://[::1]:8000"),
        ("models.example", "/v2", "http://models.example:8000/v2"),
    ],
)
def test_a_server_is_called_where_it_listens(host: str, root_path: str, url: str) -> None:
    assert local_url(host, 8000, root_path) == url
