"""Names the address at which this machine reaches a server of its own."""

from __future__ import annotations

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def local_url(host: str, port: int, root_path: str = "") -> str:
    """Return an address to call from this machine, also where all addresses are listened on."""
    name = _LOOPBACK.get(host, host)
    return f"http://{f'[{name}]' if ':' in name and not name.startswith('[') else name}:{port}{root_path}"
