"""Puts aiohttp's connections under httpx: the same requests and responses for less CPU time.

Only what the remote backend uses is here: HTTP/1.1, bodies given whole, answers streamed. Failures become httpx's own
exceptions, so that one table (:mod:`backends.remote.failure_table`) serves both transports.

The package httpx-aiohttp 0.2.0 does the same at the same CPU time, but reports a refused and a dropped connection as
``ConnectTimeout``, on which a replica is not tried again, and reads "no limit" as 100 connections.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import httpx
from yarl import URL

# Most specific first. ServerDisconnectedError and ClientOSError are ClientConnectionErrors too, hence the order.
_EXCEPTIONS: tuple[tuple[type[Exception], type[httpx.TransportError]], ...] = (
    (aiohttp.ConnectionTimeoutError, httpx.ConnectTimeout),
    (aiohttp.ServerTimeoutError, httpx.ReadTimeout),
    (aiohttp.ClientProxyConnectionError, httpx.ProxyError),
    (aiohttp.ClientHttpProxyError, httpx.ProxyError),
    (aiohttp.ClientConnectorError, httpx.ConnectError),
    (aiohttp.ServerDisconnectedError, httpx.RemoteProtocolError),
    (aiohttp.ClientResponseError, httpx.RemoteProtocolError),
    (aiohttp.ClientPayloadError, httpx.ReadError),
    (aiohttp.ClientError, httpx.ReadError),
    (OSError, httpx.ReadError),
)


def translate(error: Exception) -> httpx.TransportError:
    """Return httpx's name for a failure of aiohttp."""
    for theirs, ours in _EXCEPTIONS:
        if isinstance(error, theirs):
            return ours(str(error))
    raise AssertionError(f"no row for {type(error).__name__}") from error


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        content = self._response.content
        try:
            while chunk := await content.readany():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise translate(error) from error

    async def aclose(self) -> None:
        # A body that was read to its end has given its connection back already; any other is cut off here.
        self._response.close()


class AiohttpTransport(httpx.AsyncBaseTransport):
    """Send httpx requests through an aiohttp session.

    Parameters
    ----------
    connect_s : limit in seconds on opening a connection
    keepalive_s : seconds an idle connection is kept
    verify_tls : whether certificates are checked
    proxy : URL of an HTTP proxy
    """

    def __init__(
        self, *, connect_s: float, keepalive_s: float, verify_tls: bool = True, proxy: str | None = None
    ) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s)
        self._keepalive_s = keepalive_s
        self._verify_tls = verify_tls
        self._proxy = proxy
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; the answer's body is read as it is iterated over."""
        try:
            response = await self._opened().request(
                request.method,
                # httpx has encoded the URL already.
                URL(str(request.url), encoded=True),
                headers=[(key.decode(), value.decode()) for key, value in request.headers.raw],
                data=request.content or None,
                allow_redirects=False,
                proxy=self._proxy,
            )
        except (aiohttp.ClientError, OSError) as error:
            raise translate(error) from error
        return httpx.Response(
            response.status, headers=list(response.raw_headers), stream=_Body(response), request=request
        )

    async def aclose(self) -> None:
        """Close the session and every connection."""
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        # A session belongs to the event loop that runs when it is made, so it is made late.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # max_outstanding bounds the requests of a replica; a second limit here would make them wait unseen.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive_s, ssl=self._verify_tls),
                # Requests of different callers share this session: no cookie of one may reach another.
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=self._timeout,
                # httpx decodes bodies by their headers; to do it here as well would decode twice.
                auto_decompress=False,
                trust_env=False,
            )
        return self._session
