"""Writes ``/docs``: the OpenAPI document as one page of HTML for people, without scripts or foreign parts."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h2 { margin-top: 2.5rem; } code, summary b { font-family: ui-monospace, monospace; }
details { border-top: 1px solid #ddd; padding: .4rem 0; } summary { cursor: pointer; }
table { border-collapse: collapse; margin: .5rem 0 .5rem 1rem; }
td { padding: .1rem 1rem .1rem 0; vertical-align: top; }
.m { display: inline-block; width: 4.5rem; color: #06c; } .t { color: #666; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } .m { color: #6af; } .t { color: #999; } }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

HEADERS: Mapping[str, str] = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}

_MAX_DEPTH = 3


def render(document: Mapping[str, Any]) -> bytes:
    """Return the page of an OpenAPI document."""
    info, schemas = document["info"], document.get("components", {}).get("schemas", {})
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).append(_operation(method, path, operation, schemas))
    about = {tag["name"]: tag["description"] for tag in document.get("tags", ())}
    parts = [
        f"<h2>{escape(tag)}</h2><p>{escape(about.get(tag, ''))}</p>{''.join(operations)}"
        for tag, operations in by_tag.items()
    ]
    title = escape(f"{info['title']} {info['version']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><h1>{title}</h1>'
        f'<p>{escape(info.get("summary", ""))} For programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{''.join(parts)}</body></html>"
    ).encode()


def _operation(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    anchor = escape(operation["operationId"])
    parts = []
    rows = [_parameter(each, schemas) for each in operation.get("parameters", ())]
    if rows:
        parts.append(f"<table>{''.join(rows)}</table>")
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<p>Body, <code>{escape(kind)}</code></p>{_members(content.get('schema', {}), schemas)}")
    answers = []
    for status, answer in operation["responses"].items():
        answers.append(_row(f"<b>{escape(status)}</b>", "", answer.get("description", "")))
    parts.append(f"<p>Answers</p><table>{''.join(answers)}</table>")
    for status, answer in operation["responses"].items():
        schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
        if status.startswith("2") and schema:
            parts.append(f"<p>Body of {escape(status)}</p>{_members(schema, schemas)}")
    head = f'<span class="m">{method.upper()}</span><b>{escape(path)}</b> {escape(operation.get("summary", ""))}'
    return f'<details id="{anchor}"><summary>{head}</summary>{"".join(parts)}</details>'


def _parameter(parameter: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    schema = parameter.get("schema", {})
    about = parameter.get("description") or schema.get("description", "")
    need = "" if parameter.get("required") else ", optional"
    name = f"<code>{escape(parameter['name'])}</code>"
    return _row(name, f"{_type(schema, schemas)} ({parameter['in']}{need})", about)


def _members(schema: Mapping[str, Any], schemas: Mapping[str, Any], depth: int = 0) -> str:
    """Return an object's members as a table, those of objects inside below them."""
    schema = _given(_resolved(schema, schemas), schemas)
    if schema.get("type") == "array":
        schema = _given(_resolved(schema.get("items", {}), schemas), schemas)
    needed = schema.get("required", ())
    rows = []
    for name, inner in schema.get("properties", {}).items():
        found = _given(_resolved(inner, schemas), schemas)
        about = escape(inner.get("description") or found.get("description", ""))
        if depth < _MAX_DEPTH:
            about += _members(found, schemas, depth + 1)
        need = "" if name in needed else ", optional"
        kind = escape(_type(inner, schemas) + need)
        rows.append(f'<tr><td><code>{escape(name)}</code></td><td class="t">{kind}</td><td>{about}</td></tr>')
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _row(name: str, kind: str, about: str) -> str:
    return f'<tr><td>{name}</td><td class="t">{escape(kind)}</td><td>{escape(about)}</td></tr>'


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return schemas.get(name, {}) if name else schema


def _given(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a schema says of a value that is there: the one alternative beside null."""
    inner = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    return _resolved(inner[0], schemas) if len(inner) == 1 else schema


def _type(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    schema = _resolved(schema, schemas)
    if "anyOf" in schema:
        kinds = dict.fromkeys(_type(each, schemas) for each in schema["anyOf"] if each != {"type": "null"})
        return " or ".join(kinds)
    if "enum" in schema:
        return ", ".join(json.dumps(each) for each in schema["enum"][:12])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"array of {_type(schema.get('items', {}), schemas)}"
    bounds = [
        f"{sign} {schema[name]}"
        for name, sign in (("minimum", "≥"), ("maximum", "≤"), ("exclusiveMinimum", ">"), ("exclusiveMaximum", "<"))
        if name in schema
    ]
    return " ".join([str(kind), ", ".join(bounds)]).strip()
