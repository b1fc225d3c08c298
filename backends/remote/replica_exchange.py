"""Makes one HTTP exchange with a replica: sends, then reads chunks, with a limit on every silence."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import httpx

from backends.config import TimeoutConfig
from backends.errors import BackendError, BackendFailure, BackendTimeout
from backends.remote.answer_accumulator import AnswerAccumulator
from backends.remote.body_decoder import BodyDecoder, BodyUndecodable
from backends.remote.chunk_decoder import AnswerChunk, ErrorChunk, MalformedChunk, read_chunk
from backends.remote.failure_table import FOREIGN_ERRORS, from_error_chunk, from_status, from_transport, strike_out
from backends.remote.sse import EventTooLarge, SSEParser, SSEvent
from backends.remote.wait_registry import WaitRegistry

# An error body is read for its message only; a web page may be large.
_MAX_ERROR_BYTES = 64 * 1024
_MAX_ANSWER_BYTES = 8 * 1024 * 1024
# How long a finished stream may take to say that it is over. Past it the connection is dropped instead of reused.
_DRAIN_S = 0.1


class ReplicaExchange:
    """Holds one request that was sent and the chunks that come back.

    Use as an async context manager: leaving it closes the response, and with it the connection when the stream was not
    read to its end, which is how a server learns that nobody listens.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        base_url: str,
        path: str,
        body: bytes,
        *,
        headers: Mapping[str, str],
        timeouts: TimeoutConfig,
        waits: WaitRegistry,
        secrets: tuple[str, ...] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._client = client
        self._request = client.build_request("POST", _join(base_url, path), content=body, headers=dict(headers))
        self._timeouts = timeouts
        self._waits = waits
        self._secrets = secrets
        self._clock = clock
        self._where = base_url
        self._response: httpx.Response | None = None
        self._reader: AsyncIterator[bytes] | None = None
        self._decoder = BodyDecoder()
        self._unpacked: Iterator[bytes] = iter(())
        self._patience_s = timeouts.first_token_s
        self._num_tokens = 0

    async def __aenter__(self) -> ReplicaExchange:
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self.close()

    async def close(self) -> None:
        """Give the connection back, or drop it when the answer was not read to its end. Idempotent."""
        if self._response is not None:
            await self._response.aclose()

    async def send(self) -> None:
        """Send the request and wait for the head of the answer.

        Raises
        ------
        BackendError : no connection, no answer in time, or a status other than 200
        """
        sent_s = self._clock()
        try:
            self._response = await self._waits.bounded(
                self._client.send(self._request, stream=True), self._timeouts.first_token_s
            )
        except TimeoutError:
            raise self._silence("no answer", self._timeouts.first_token_s) from None
        except FOREIGN_ERRORS as error:
            raise from_transport(error, self._where) from error
        # The first token has one limit, whether the head or the body is late.
        self._patience_s -= self._clock() - sent_s
        # Raw: httpx would unpack a compressed body whole, whatever its size.
        self._reader = self._response.aiter_raw().__aiter__()
        try:
            if self._response.status_code != 200:
                raise await self._refusal(self._response)
            self._check_encoding(self._response)
        except BaseException:
            await self.close()
            raise

    async def read_all(self, limit_bytes: int = _MAX_ANSWER_BYTES) -> bytes:
        """Return the whole body of an answer that is not a stream."""
        pieces: list[bytes] = []
        num_bytes = 0
        while (piece := await self._piece()) is not None:
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > limit_bytes:
                raise BackendFailure(f"{self._where} sent more than {limit_bytes} bytes.")
        return b"".join(pieces)

    async def chunks(self) -> AsyncGenerator[list[AnswerChunk], None]:
        """Yield the chunks of an answer, those that arrived together in one list.

        Ends after ``[DONE]`` or at the stream's end, whichever comes first; whether the answer was whole then is for
        the caller to say.
        """
        assert self._response is not None, "send first"
        kind = self._response.headers.get("content-type", "")
        if kind.startswith("application/json"):
            # The server does not stream; its whole answer reads like one chunk.
            yield [self._read(await self.read_all())]
            return
        if kind.startswith("text/html"):
            raise BackendFailure(f"{self._where} answered with a web page. Check urls.")
        parser = SSEParser()
        is_done = False
        while not is_done:
            piece = await self._piece()
            events = self._feed(parser, piece) if piece is not None else parser.end()
            chunks, failure, is_done = self._read_events(events)
            if chunks:
                yield chunks
            if failure is not None:
                raise failure
            if piece is None:
                return
        await self._drain()

    def expect(self, answer: AnswerAccumulator) -> None:
        """Set how long the next silence may be, by what has come so far."""
        if answer.is_complete:
            self._patience_s = _DRAIN_S if answer.has_usage else self._timeouts.trailer_s
        elif answer.num_tokens > self._num_tokens:
            self._num_tokens = answer.num_tokens
            self._patience_s = self._timeouts.gap_s

    def _check_encoding(self, response: httpx.Response) -> None:
        try:
            self._decoder = BodyDecoder(response.headers.get("content-encoding", ""))
        except BodyUndecodable as error:
            raise BackendFailure(f"{self._where}: {error}.") from None

    async def _piece(self) -> bytes | None:
        """Return the next bytes of the body, None at its end."""
        while True:
            try:
                for piece in self._unpacked:
                    return piece
            except BodyUndecodable as error:
                raise BackendFailure(f"{self._where}: {error}.") from error
            raw = await self._raw_piece()
            if raw is None:
                return None
            self._unpacked = self._decoder.feed(raw)

    async def _raw_piece(self) -> bytes | None:
        assert self._reader is not None, "send first"
        # Only time spent waiting here counts: a reader that is slow to take tokens does not make the server late.
        began_s = self._clock()
        limit_s = self._patience_s
        try:
            piece = await self._waits.bounded(anext(self._reader), limit_s)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            raise self._silence("no token", limit_s) from None
        except FOREIGN_ERRORS as error:
            raise from_transport(error, self._where) from error
        self._patience_s = limit_s - (self._clock() - began_s)
        return piece

    async def _drain(self) -> None:
        # Reading to the end lets the connection serve the next request; bytes after [DONE] mean nothing.
        self._patience_s = _DRAIN_S
        try:
            while await self._piece() is not None:
                pass
        except BackendError:
            return

    def _feed(self, parser: SSEParser, piece: bytes) -> list[SSEvent]:
        try:
            return parser.feed(piece)
        except EventTooLarge as error:
            raise BackendFailure(f"{self._where}: {error}") from error

    def _read_events(self, events: list[SSEvent]) -> tuple[list[AnswerChunk], BackendError | None, bool]:
        """Return (chunks, failure, whether ``[DONE]`` was seen); chunks before a bad one are not lost."""
        chunks: list[AnswerChunk] = []
        for event in events:
            if event.data == b"[DONE]":
                return chunks, None, True
            try:
                chunks.append(self._read(event.data))
            except BackendError as failure:
                return chunks, failure, False
        return chunks, None, False

    def _read(self, data: bytes) -> AnswerChunk:
        try:
            return read_chunk(data)
        except MalformedChunk as error:
            raise BackendFailure(f"{self._where}: {strike_out(str(error), self._secrets)}.") from error
        except ErrorChunk as error:
            raise from_error_chunk(error.body, self._where, self._secrets) from None

    async def _refusal(self, response: httpx.Response) -> BackendError:
        try:
            self._check_encoding(response)
            body = await self.read_all(_MAX_ERROR_BYTES)
        except BackendError:
            body = b""
        return from_status(response.status_code, response.headers, body, self._where, self._secrets)

    def _silence(self, what: str, limit_s: float) -> BackendTimeout:
        return BackendTimeout(f"{self._where}: {what} in {max(0.0, limit_s):.3g} s.")


def _join(base_url: str, path: str) -> str:
    """Join a path; ``../name`` is beside ``/v1``, where vLLM keeps what OpenAI does not define."""
    if path.startswith("../"):
        return base_url.removesuffix("/v1") + path[2:]
    return base_url + path
