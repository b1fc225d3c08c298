"""Says whether a request comes straight from a program on this machine, which alone an open server trusts.

An address listened on says who can connect, not who asks: a proxy on the same machine connects on behalf of the world,
and a browser on behalf of any page whose name was made to resolve to loopback (DNS rebinding). The proxy shows in the
headers that it adds, the page in the ``Host`` that the browser sends.

What this does not protect against: other programs of this machine's users, and a proxy that writes a ``Host`` of
loopback and adds no header of its own, as nginx does with nothing but ``proxy_pass``. Where a proxy stands in front,
``server.trusted_proxies`` or ``auth.required = "always"`` says so, and nothing is open.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from typing import Any

from gateway.errors import shorten

Connection = Mapping[str, Any]
"""The ASGI scope of a request: its peer, its headers, its version of HTTP."""

# Forwarded (RFC 7239) and Via (RFC 9110, section 7.6.3) are the standards; `x-forwarded-` and X-Real-IP are what nginx,
# Apache, Caddy, Traefik, Envoy and load balancers add; the rest name the client, or the way, in content delivery
# networks and tunnels. No program that calls its own machine has a reason to send one of them.
_FORWARDING = frozenset(
    {
        b"forwarded",
        b"via",
        b"x-real-ip",
        b"x-client-ip",
        b"x-cluster-client-ip",
        b"x-original-forwarded-for",
        b"x-original-host",
        b"x-envoy-external-address",
        b"x-proxyuser-ip",
        b"client-ip",
        b"true-client-ip",
        b"fastly-client-ip",
        b"cf-connecting-ip",
        b"cdn-loop",
    }
)
_FORWARDING_PREFIX = b"x-forwarded"

_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]{2,45}\]|[0-9A-Za-z._-]{1,253})(?::[0-9]{1,5})?")


def is_loopback(host: str) -> bool:
    """Whether an address, or the name ``localhost``, leads nowhere but to this machine."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    # A socket that listens to both families shows an IPv4 peer in this form.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def host_name(host: str) -> str | None:
    """Return the name or address in a ``Host`` header, in lower case and without its port; None where it has none."""
    found = _HOST.fullmatch(host)
    return None if found is None else found["name"].lower()


def foreign_host(connection: Connection, allowed_hosts: Collection[str] = ()) -> str | None:
    """Return what is wrong with a request's ``Host``; None if it names loopback or is one of ``allowed_hosts``."""
    given = [value.decode("latin-1") for name, value in connection.get("headers", ()) if name == b"host"]
    if len(given) != 1:
        return f"it has {len(given)} Host headers"
    name = host_name(given[0])
    if name is not None and (name in allowed_hosts or is_loopback(name)):
        return None
    return f"its Host is {shorten(given[0])!r}"


def foreign_sign(connection: Connection, allowed_hosts: Collection[str] = ()) -> str | None:
    """Return what shows that a request may come from elsewhere than a program on this machine; None if nothing does.

    A peer that is not known (a Unix socket, which is where proxies like to connect, or a call within the process) is
    not a loopback one.
    """
    peer = connection.get("client")
    if peer is None or not is_loopback(peer[0]):
        return f"it comes from {'an unknown peer' if peer is None else peer[0]}"
    for name, _ in connection.get("headers", ()):
        if name in _FORWARDING or name.startswith(_FORWARDING_PREFIX):
            return f"its header {shorten(name.decode('latin-1'))!r} shows a proxy"
    return foreign_host(connection, allowed_hosts)
