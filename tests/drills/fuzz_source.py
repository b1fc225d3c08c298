"""Makes requests nobody should send: from the server's own declarations, then broken in every way that is cheap."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, -(2**63), 2**64, 10**40, 0.5, -0.0, 1e308, 5e-324, "", " ", "a", "\x00",
    "\ud7ff", "\uffff", "𝔘", "é" * 300, "a" * 5000, "auto", "tier-1", "{{ 7 * 7 }}", "../../etc/passwd", "'; --", "%00",
    [], [[]], {}, {"": None}, [None], [1, "a", {}], {"a": {"b": {"c": []}}}, "2026-01-01T00:00:00Z", "9999-12-31",
    "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "NaN", "1e999", "0.1", "-0.1",
)  # fmt: skip
_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "X" * 40, "")
_HEADERS = (
    "x-suffice-tier: 99", "x-suffice-regions: ,", "x-suffice-max-cost-usd: nan", "x-suffice-nothing: 1", "origin: null",
    "content-length: 5", "content-length: -1", "content-length: 99999999999999999999", "transfer-encoding: chunked",
    "transfer-encoding: gzip", "expect: 100-continue", "authorization: Basic x", "authorization: Bearer",
    "x-forwarded-for: 203.0.113.9", "host: evil.example", "host:", "connection: upgrade", "upgrade: websocket",
    "traceparent: 00-zz", "if-match: *", "if-none-match: *", "content-type: text/xml", "accept: " + "a/b," * 500,
    "x-a: " + "b" * 3000, ": empty", "no colon", "x\x00y: 1", "x-nul: a\x00b", "  folded: 1", "x-high: \xff\xa0",
    "range: bytes=0-", "content-encoding: gzip", "idempotency-key: " + "k" * 400, "cookie: a=b",
)  # fmt: skip
_MAX_BODY_BYTES = 5_000_000
# A child process each: enough of them belong to the test, not more.
_SLOW = frozenset({"try_policy"})


@dataclass(frozen=True, slots=True)
class FuzzRequest:
    """``is_framed``: it is one whole request by its own head, so that an answer must come."""

    kind: str
    endpoint: str
    data: bytes
    is_framed: bool


class FuzzSource:
    """Draws requests by seed.

    Parameters
    ----------
    document : the server's OpenAPI document
    key : goes into most requests, so that they come further than the door
    """

    def __init__(self, document: Mapping[str, Any], key: str, seed: int) -> None:
        self._rng = random.Random(seed)
        self._schemas = document.get("components", {}).get("schemas", {})
        self._key = key
        self._operations = [
            (method.upper(), path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ]
        self._weights = [
            0.02 if each["operationId"] in _SLOW else 4.0 if path.startswith("/v1/") and method == "POST" else 1.0
            for method, path, each in self._operations
        ]

    def draw(self) -> FuzzRequest:
        """Return the next request."""
        method, path, operation = self._rng.choices(self._operations, self._weights)[0]
        kind = self._rng.choices(("valid", "mutated", "text", "head", "path"), (2, 6, 2, 1, 1))[0]
        if kind == "head":
            return self._head(path)
        if kind == "path":
            return self._framed("path", "other", self._rng.choice(("GET", method)), self._odd_path(path), b"", [])
        body = self._body(kind, operation)
        headers = [self._rng.choice(_HEADERS[:4])] if self._rng.random() < 0.05 else []
        if self._rng.random() < 0.3:
            headers.append("if-none-match: *")
        return self._framed(kind, path, method, self._target(path, operation), body, headers)

    def _framed(
        self, kind: str, endpoint: str, method: str, target: str, body: bytes, headers: list[str]
    ) -> FuzzRequest:
        lines = [f"{method} {target} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}", *headers]
        if self._rng.random() < 0.97:
            lines.append(f"authorization: Bearer {self._key}")
        head = "\r\n".join(lines).encode("latin-1", "replace")
        return FuzzRequest(kind, f"{method} {endpoint}", head + b"\r\n\r\n" + body, is_framed=True)

    def _head(self, path: str) -> FuzzRequest:
        """A head that may be anything; nobody promises it an answer, only that it costs nothing."""
        rng = self._rng
        lines = [f"{rng.choice(_METHODS)} {rng.choice((path, self._odd_path(path), '*', 'http://a/b', ''))} HTTP/1.1"]
        if rng.random() < 0.1:
            lines = [rng.choice(("", "GET", "GET / HTTP/9.9", "GET / HTTP/1.0", "\x16\x03\x01", "PRI * HTTP/2.0"))]
        lines += rng.sample(_HEADERS, rng.randrange(6))
        end = rng.choice(("\r\n", "\n", "\r"))
        body = rng.choice(("", "{}", "5\r\nhello\r\n0\r\n\r\n", "zz\r\n"))
        data = (end.join(lines) + end + end + body).encode("latin-1", "replace")
        return FuzzRequest("head", "raw", data, is_framed=False)

    def _odd_path(self, path: str) -> str:
        rng = self._rng
        odd = rng.choice(
            ("/", "//", "/%00", "/..", "/%2e%2e/%2e%2e/etc", "/%c3%a9", "?", "?x=1&x=2", "/" * 50, "/%ff", ";a=b")
        )
        long = "/" + "a" * rng.randrange(3000)
        return rng.choice((path + odd, "/" + odd.strip("?") + path, path.upper(), long))

    def _target(self, path: str, operation: Mapping[str, Any]) -> str:
        parts, query = path, []
        for parameter in operation.get("parameters", ()):
            value = self._value(parameter.get("schema", {}), 0) if self._rng.random() < 0.6 else self._odd()
            text = quote(str(value)[:2000].encode("utf-8", "replace"), safe="")
            if parameter["in"] == "path":
                parts = parts.replace("{%s}" % parameter["name"], text or "x")  # noqa: UP031 - braces
            elif parameter["in"] == "query" and self._rng.random() < 0.3:
                query.append(f"{parameter['name']}={text}")
        if self._rng.random() < 0.02:
            query.append("unknown=1")
        return parts + ("?" + "&".join(query) if query else "")

    def _body(self, kind: str, operation: Mapping[str, Any]) -> bytes:
        content = operation.get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema")
        if schema is None:
            return b"" if not content else self._rng.randbytes(self._rng.randrange(200))
        value = self._value(schema, 0)
        if kind == "mutated":
            for _ in range(self._rng.randrange(1, 4)):
                value = self._mutated(value)
        text = json.dumps(value, ensure_ascii=self._rng.random() < 0.5).encode("utf-8", "surrogatepass")
        # Beyond the limit of a body there is nothing to learn, and sending it holds up the others.
        text = text[:_MAX_BODY_BYTES]
        return self._torn(text) if kind == "text" else text

    def _torn(self, text: bytes) -> bytes:
        """What is no JSON any more, or JSON of a kind that parsers dislike."""
        rng = self._rng
        cut = rng.randrange(len(text) + 1)
        return rng.choice(
            (
                text[:cut],
                text[:cut] + rng.randbytes(3) + text[cut:],
                text.replace(b":", b":NaN,", 1),
                b"[" * rng.randrange(1, 20_000),
                b'{"a":' * rng.randrange(1, 5000) + b"1",
                b"{" + b",".join([b'"x":1'] * rng.randrange(1, 3000)) + b"}",
                text + text,
                b"\xef\xbb\xbf" + text,
                text.decode("utf-8", "replace").encode("utf-16"),
                b'{"model":"auto","messages":"\\ud800"}',
                b" " * rng.randrange(1, 50_000),
                b"1" * rng.randrange(1, 6000),
            )
        )

    def _mutated(self, value: Any) -> Any:
        """Return a value with one place in it changed."""
        rng = self._rng
        if isinstance(value, dict) and value and rng.random() < 0.85:
            name = rng.choice(list(value))
            act = rng.random()
            if act < 0.15:
                return {key: each for key, each in value.items() if key != name}
            if act < 0.25:
                return value | {rng.choice(("", "x", "é", name + " ", "__proto__", "a" * 300)): self._odd()}
            return value | {name: self._mutated(value[name]) if act < 0.7 else self._odd()}
        if isinstance(value, list) and value and rng.random() < 0.85:
            place = rng.randrange(len(value))
            return [*value[:place], self._mutated(value[place]), *value[place + (rng.random() < 0.8) :]]
        if isinstance(value, str) and rng.random() < 0.3:
            return value * rng.choice((0, 2, 50))
        return self._odd()

    def _odd(self) -> Any:
        rng = self._rng
        if rng.random() < 0.02:
            return rng.choice(("word " * 20_000, ["x"] * 5000, {str(number): number for number in range(2000)}))
        return rng.choice(_ODD)

    def _value(self, schema: Mapping[str, Any], depth: int) -> Any:
        """Return a value that the schema describes, nearly always."""
        rng = self._rng
        if "$ref" in schema:
            schema = self._schemas.get(schema["$ref"].rpartition("/")[2], {})
        for several in ("anyOf", "oneOf"):
            if several in schema:
                return self._value(rng.choice(schema[several]), depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = rng.choice(kind)
        if kind == "object" or "properties" in schema:
            return self._object(schema, depth)
        if kind == "array":
            most = min(schema.get("maxItems", 3), 3)
            least = min(schema.get("minItems", 0), 3)
            num = rng.randint(least, max(least, most))
            return [self._value(schema.get("items", {}), depth + 1) for _ in range(num)]
        if kind == "string":
            return rng.choice(("auto", "hi", "a b c", "simple", "é𝔘", "x" * min(schema.get("maxLength", 40), 40)))
        if kind in ("integer", "number"):
            low, high = schema.get("minimum", -5), min(schema.get("maximum", 64), 10**6)
            drawn = rng.uniform(low, max(low, high))
            return int(drawn) if kind == "integer" else rng.choice((low, drawn, high))
        if kind == "boolean":
            return rng.random() < 0.5
        return None if kind == "null" else self._odd()

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        needed = schema.get("required", ())
        share = 0.25 / (1 + depth)
        return {
            name: self._value(inner, depth + 1)
            for name, inner in schema.get("properties", {}).items()
            if name in needed or self._rng.random() < share
        }
