"""Builds the HTTP client of a remote backend: httpx, over aiohttp's connections where that package is installed.

``docs/backends.md`` has what either costs.
"""

from __future__ import annotations

from http.cookiejar import CookieJar, DefaultCookiePolicy
from importlib.util import find_spec

import httpx

from backends.config import RemoteModelConfig
from backends.errors import ModelLoadError

_KEEPALIVE_S = 30.0


def has_aiohttp() -> bool:
    """Return whether the faster transport can be had."""
    return find_spec("aiohttp") is not None


def build_client(config: RemoteModelConfig) -> httpx.AsyncClient:
    """Build the client that all replicas of a model share.

    Raises
    ------
    ModelLoadError : ``transport = "aiohttp"`` without the package
    """
    is_fast = config.transport == "aiohttp" or (config.transport == "auto" and has_aiohttp())
    return httpx.AsyncClient(
        transport=_aiohttp_transport(config) if is_fast else None,
        # Limits on silence are the exchange's own, which knows a token from a keep-alive comment.
        timeout=httpx.Timeout(None, connect=config.timeouts.connect_s),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE_S),
        verify=config.verify_tls,
        proxy=None if is_fast else config.proxy,
        # Proxies come from the configuration alone: variables of the environment would redirect prompts unasked.
        trust_env=False,
        # Requests of different callers share this client: no cookie of one may reach another.
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        # A redirect would take the prompt and the API key to whatever host an answer names.
        follow_redirects=False,
    )


def _aiohttp_transport(config: RemoteModelConfig) -> httpx.AsyncBaseTransport:
    if not has_aiohttp():
        raise ModelLoadError('transport = "aiohttp" needs the package aiohttp: pip install "suffice[fast]".')
    from backends.remote.aiohttp_transport import AiohttpTransport

    return AiohttpTransport(
        connect_s=config.timeouts.connect_s,
        keepalive_s=_KEEPALIVE_S,
        verify_tls=config.verify_tls,
        proxy=config.proxy,
    )
