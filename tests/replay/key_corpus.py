"""Asks a server that wants keys and lets web pages of one origin in."""

from __future__ import annotations

import json
import time
from typing import Any

from tests.replay.generation_corpus import CHAT, TEXT, USER, VECTORS
from tests.replay.recorder import Recorder

CONFIG = """
[[tiers]]
name = "simple"
model = "m1"
price_per_request_usd = 0.0001
[[tiers]]
name = "expert"
model = "m2"
price_per_request_usd = 0.01
price_per_output_token_usd = 0.00001
[models.m1]
kind = "echo"
[models.m2]
kind = "echo"
[policy]
exploration_share = 0.0
sampling_share = 0.0
[verification]
enabled = false
[learning]
enabled = false
[auth]
required = "always"
[server]
port = PORT
root_path = "/suffice"
cors_origins = ["https://app.example"]
[database]
url = "sqlite:///FOLDER/suffice.db"
"""
COMMANDS = (("keys", "create", "--create", "--name", "root", "--scope", "admin", "--json"),)

CHEAP: dict[str, Any] = {"model": "simple", "messages": USER}
PATHS = (
    ("POST", CHAT),
    ("POST", TEXT),
    ("POST", VECTORS),
    ("POST", "/v1/feedback"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/auto"),
    ("GET", "/v1/requests/none"),
    ("GET", "/metrics"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/openapi.json"),
    ("GET", "/admin/v1/tiers"),
    ("GET", "/admin/v1/nothing"),
    ("GET", "/v1/nothing"),
)
# A minute's limit is counted by the clock's minute: a burst must not straddle its turn.
_BURST_S = 15


def play(recorder: Recorder, printed: str) -> None:
    """Play all of it; ``printed`` is what the command said of the first key."""
    root = {"authorization": f"Bearer {json.loads(printed)['key']}"}
    _doors(recorder, root)
    _origins(recorder, root)
    _limits(recorder, root)


def _doors(recorder: Recorder, root: dict[str, str]) -> None:
    doors = {
        "no key": {},
        "a wrong key": {"authorization": "Bearer sk-suffice-" + "x" * 43},
        "no bearer": {"authorization": "Basic abc"},
        "an admin key": root,
    }
    for method, path in PATHS:
        for words, headers in doors.items():
            recorder.call(method, path, {} if method == "POST" else None, headers=headers, name=f"{path} with {words}")
    recorder.call("POST", CHAT, CHEAP, headers={"authorization": "Bearer " + "x" * 300}, name="an endless key")
    recorder.call("POST", CHAT, CHEAP, headers={"authorization": "Bearer "}, name="an empty key")


def _origins(recorder: Recorder, root: dict[str, str]) -> None:
    mine = _key(recorder, root, name="pages")
    for origin in ("https://app.example", "https://evil.example", "null"):
        page = {"origin": origin}
        recorder.call("POST", CHAT, CHEAP, headers=page | mine, name=f"chat from {origin}")
        recorder.call("POST", CHAT, CHEAP | {"stream": True}, headers=page | mine, name=f"stream from {origin}")
        recorder.call("POST", CHAT, CHEAP, headers=page, name=f"chat from {origin} without a key")
        recorder.call("GET", "/admin/v1/tiers", headers=page | root, name=f"administration from {origin}")
        for method, asked in (("POST", "authorization"), ("DELETE", "x-custom"), ("PATCH", "")):
            ask = {"access-control-request-method": method, "access-control-request-headers": asked}
            recorder.call("OPTIONS", CHAT, headers=page | ask, name=f"preflight of {method} from {origin}")


def _limits(recorder: Recorder, root: dict[str, str]) -> None:
    left_s = 60 - time.time() % 60
    if left_s < _BURST_S:
        time.sleep(left_s + 0.1)
    mine = _key(recorder, root, name="minute", limits={"requests_per_minute": 3})
    for place in range(5):
        recorder.call("POST", CHAT, CHEAP | {"stream": place == 1}, headers=mine, name="three a minute")
    recorder.call("POST", TEXT, {"model": "simple", "prompt": "a"}, headers=mine)
    recorder.call("POST", VECTORS, {"model": "auto", "input": "a"}, headers=mine)
    recorder.call("GET", "/v1/models", headers=mine, name="models of a limited key")
    mine = _key(recorder, root, name="tokens", limits={"tokens_per_minute": 1000})
    for change in ({"max_tokens": 900}, {"max_tokens": 900}, {"max_tokens": 5000}, {"temperature": 9}):
        recorder.call("POST", CHAT, CHEAP | change, headers=mine, name=f"a thousand tokens, {json.dumps(change)}")
    mine = _key(recorder, root, name="budget", limits={"budget_usd_per_day": "0.0002", "budget_usd_per_month": 1})
    recorder.call("POST", CHAT, CHEAP | {"model": "expert"}, headers=mine, name="dearer than the budget")
    for _ in range(3):
        answer = recorder.call("POST", CHAT, CHEAP, headers=mine, name="two a day")
    other = _key(recorder, root, name="other", tenant="other")
    answer = recorder.call("POST", CHAT, CHEAP, headers=mine, is_kept=False)
    answer = recorder.call("POST", CHAT, CHEAP, headers=other, name="another tenant's")
    request_id = answer.header("x-suffice-request-id")
    for words, headers in (("the same key", other), ("another key", mine)):
        recorder.call("GET", f"/v1/requests/{request_id}", headers=headers, name=f"explained to {words}")
        report = {"request_id": request_id, "kind": "correct", "value": True}
        recorder.call("POST", "/v1/feedback", report, headers=headers, name=f"feedback of {words}")
    recorder.call("GET", "/admin/v1/usage?group_by=tenant", headers=root)
    recorder.call("GET", "/metrics", name="metrics at the end")


def _key(recorder: Recorder, root: dict[str, str], **body: Any) -> dict[str, str]:
    made = recorder.call("POST", "/admin/v1/keys", body, headers=root, name=f"key {body['name']}")
    return {"authorization": f"Bearer {made.json()['key']}"}
