"""Asks ``/admin/v1``: every operation of the server's own document in wrong forms, then each in good ones."""

from __future__ import annotations

import json
from typing import Any

from tests.replay.generation_corpus import CHAT, UNKNOWN_ID, USER
from tests.replay.recorder import Recorder

ADMIN = "/admin/v1"

CONFIG = """
[[tiers]]
name = "simple"
model = "m1"
price_per_request_usd = 0.0001
[[tiers]]
name = "medium"
model = "m2"
price_per_request_usd = 0.0005
[[tiers]]
name = "complex"
model = "m3"
price_per_request_usd = 0.003
[[tiers]]
name = "expert"
model = "m4"
price_per_request_usd = 0.01
[models.m1]
kind = "echo"
[models.m2]
kind = "echo"
[models.m3]
kind = "echo"
[models.m4]
kind = "echo"
text = "quite another answer"
[router]
timeout_s = 60
[policy]
exploration_share = 0.0
sampling_share = 1.0
sampling.down_share = 0.0
sampling.doubt_share = 0.0
[policies.careful]
allowed_tiers = ["expert"]
[policies.spare]
allowed_tiers = ["simple", "expert"]
mode = "benefit"
quality_value_usd = 0.5
[verification]
poll_s = 0.05
allowance_usd = 100
max_cost_share = 10
[log]
prompts = "full"
[learning]
enabled = false
[monitor]
every_s = 3600
[control]
rollout_every_s = 3600
[admin]
max_body_bytes = 4096
[server]
port = PORT
[database]
url = "sqlite:///FOLDER/suffice.db"
"""

WRONG_POLICIES: tuple[dict[str, Any], ...] = (
    {"colour": 1},
    {"quality_flor": 0.5},
    {"quality_floor": 1.2},
    {"quality_floor": "high"},
    {"mode": "guess"},
    {"allowed_tiers": [1, 9]},
    {"allowed_tiers": "one"},
    {"thresholds": {"7": 0.5}},
    {"thresholds": {"1": 3}},
    {"thresholds": {"one": 0.5}},
    {"sampling": {"shares": {"1": 2}}},
    {"sampling": {"share": 1}},
    {"sampling": {"edges": [0.9, 0.5]}},
    {"sampling": 5},
    {"escalation": {"mode": "sideways"}},
    {"quality_value_usd": -1},
    {"budget_usd_per_day": "much"},
    {"max_cost_usd": True},
    {"allowed_regions": ["mars"]},
    {"sticky": "glue"},
    {"expected_output_tokens": 0},
    {"max_fallbacks": 1.5},
    {"name": "other"},
    {"version": "7"},
    {"quality_floor": 2, "mode": "guess", "colour": 1},
)

WRONG_KEYS: tuple[dict[str, Any], ...] = (
    {"scope": "root"},
    {"name": ""},
    {"tenant": 7},
    {"colour": 1},
    {"limits": []},
    {"limits": {"rpm": 1}},
    {"limits": {"requests_per_minute": 0}},
    {"limits": {"tokens_per_minute": 1.5}},
    {"limits": {"budget_usd_per_day": -1}},
    {"limits": {"budget_usd_per_day": "1e-12"}},
    {"limits": {"budget_usd_per_month": "much"}},
)

# Listings with every filter that has a meaning here.
LISTINGS = (
    "/tiers",
    "/thresholds",
    "/control",
    "/kill-switch",
    "/policies",
    "/policies/default",
    "/policies/default/versions",
    "/routers",
    "/rollouts",
    "/retrain-runs",
    "/requests",
    "/requests?limit=2",
    "/requests?tier=1&status=200&policy=default",
    "/requests?reason=pinned",
    "/requests?tenant=nobody",
    "/requests?session_id=talk-1",
    "/requests?since=2020-01-01T00:00:00Z&until=2021-01-01T00:00:00Z",
    "/requests?since=yesterday",
    "/requests?cursor=nonsense",
    "/requests?limit=0",
    "/usage",
    "/usage?group_by=tier",
    "/usage?group_by=day,tenant,policy",
    "/usage?group_by=colour",
    "/usage?tier=1",
    "/verifications",
    "/verifications?status=done&tier=1",
    "/verifications?direction=sideways",
    "/reports/floor",
    "/reports/drift",
    "/reports/verification",
    "/evaluations",
    "/alerts",
    "/alerts?open=true",
    "/audit",
    "/audit?action=set_kill_switch&limit=1",
    "/keys",
    "/nothing",
)


def play(recorder: Recorder) -> None:
    """Play all of it to one server, wrong forms first: they must leave nothing behind."""
    _wrong_forms(recorder)
    _checked_answers(recorder)
    _policies(recorder)
    _routers(recorder)
    _kill_switch_and_retraining(recorder)
    _what_if(recorder)
    for path in LISTINGS:
        recorder.call("GET", ADMIN + path)
    recorder.call("GET", "/openapi.json")
    recorder.call("GET", "/metrics")
    _keys(recorder)


def _wrong_forms(recorder: Recorder) -> None:
    document = recorder.call("GET", "/openapi.json", is_kept=False).json()
    for template, methods in document["paths"].items():
        if not template.startswith(ADMIN):
            continue
        path = template.replace("{", "no-").replace("}", "")
        for method, operation in methods.items():
            _wrong_form(recorder, method.upper(), path, operation)
        recorder.call("PATCH", path)
        recorder.call("OPTIONS", path)


def _wrong_form(recorder: Recorder, method: str, path: str, operation: dict[str, Any]) -> None:
    name = operation["operationId"]
    tag = {"if-match": '"x"'}
    has_json = "application/json" in operation.get("requestBody", {}).get("content", {})
    body: Any = {} if has_json else None
    recorder.call(method, f"{path}?colour=red", body, headers=tag, name=f"{name}: unknown query")
    recorder.call(method, path, body, headers={"origin": "https://evil.example"}, name=f"{name}: a web page")
    recorder.call(
        method, path, body, headers={"authorization": f"Bearer sk-suffice-{'x' * 43}"}, name=f"{name}: wrong key"
    )
    if any("{" in each for each in (operation.get("path", ""),)) or "no-" in path:
        recorder.call(method, path, body, headers=tag, name=f"{name}: unknown name")
    if any(each["name"] == "If-Match" for each in operation.get("parameters", ())):
        recorder.call(method, path, body, headers={"if-match": "*"}, name=f"{name}: any version")
    if any(each["name"] == "If-None-Match" for each in operation.get("parameters", ())):
        recorder.call(method, path, body, name=f"{name}: no precondition")
    for each in operation.get("parameters", ()):
        if each["in"] == "query" and each["name"] in ("limit", "tier", "open", "since"):
            recorder.call(method, f"{path}?{each['name']}=x", body, name=f"{name}: {each['name']}=x")
            recorder.call(
                method, f"{path}?{each['name']}=1&{each['name']}=2", body, name=f"{name}: {each['name']} twice"
            )
    if has_json:
        for content in (b"{", b"[]", b'{"colour": 1}', b" " * 5000):
            recorder.call(method, path, content=content, headers=tag, name=f"{name}: body {content[:20]!r}")
        for wrong in ({"reason": 1}, {"on": "yes"}, {"version": 1}, {"limits": 1}):
            recorder.call(method, path, wrong, headers=tag, name=f"{name}: {json.dumps(wrong)}")


def _checked_answers(recorder: Recorder) -> None:
    """Leave rows in the log whose answers were checked, so that reports have something to say."""
    for place, content in enumerate(("2 + 2 = 4", "one two three", "quite another answer", "the answer is 42")):
        body = {"model": "auto", "messages": [{"role": "user", "content": content}]}
        suffice = {"max_tier": 1 + place % 3, "session_id": f"talk-{place % 2}"}
        answer = recorder.call("POST", CHAT, body | {"suffice": suffice}, name=f"to be checked: {content}")
        request_id = answer.header("x-suffice-request-id")
        # One check at a time: which model a second one would find busy is chance.
        recorder.until(
            "GET",
            f"{ADMIN}/verifications?request_id={request_id}",
            lambda found: bool(found["data"]) and all(each["status"] == "done" for each in found["data"]),
        )
        recorder.call("GET", f"{ADMIN}/requests/{request_id}", name=f"checked: {content}")
        recorder.call("GET", f"{ADMIN}/verifications?request_id={request_id}", name=f"its checks: {content}")
    for model in ("simple", "careful", "m3"):
        recorder.call("POST", CHAT, {"model": model, "messages": USER}, name=f"for the log: {model}")
    report = {"request_id": request_id, "kind": "correct", "value": False}
    recorder.call("POST", "/v1/feedback", report, name="feedback on a checked answer")


def _policies(recorder: Recorder) -> None:
    first = recorder.call("GET", f"{ADMIN}/policies/spare")
    tag, body = first.header("etag"), first.json()["body"]
    match = {"if-match": tag}
    for change in WRONG_POLICIES:
        words = json.dumps(change)
        wrong = body | change
        recorder.call("PUT", f"{ADMIN}/policies/spare", wrong, headers=match, name=f"wrong policy {words}")
        recorder.call("POST", f"{ADMIN}/policies/spare/validate", wrong, name=f"validate {words}")
    better = body | {"quality_floor": 0.5}
    recorder.call("POST", f"{ADMIN}/policies/spare/validate", better)
    recorder.call("PUT", f"{ADMIN}/policies/spare", better, name="without a precondition")
    recorder.call("PUT", f"{ADMIN}/policies/spare", better, headers={"if-match": '"old"'}, name="stale")
    recorder.call("PUT", f"{ADMIN}/policies/spare", better, headers={"if-none-match": "*"}, name="not a new one")
    saved = recorder.call("PUT", f"{ADMIN}/policies/spare?note=lower", better, headers=match, name="saved")
    recorder.call("PUT", f"{ADMIN}/policies/spare", body, headers=match, name="stale by now")
    recorder.call("POST", CHAT, {"model": "spare", "messages": USER}, name="by the saved policy")
    recorder.call("GET", f"{ADMIN}/policies/spare", name="as saved")
    recorder.call("GET", f"{ADMIN}/policies/spare/versions")
    old, new = tag.strip('"'), saved.header("etag").strip('"')
    for query in (f"from={old}", f"from={old}&to={new}", f"from={new}&to={old}", "from=x", f"from={old}&to=x", ""):
        recorder.call("GET", f"{ADMIN}/policies/spare/diff?{query}")
    recorder.call("POST", f"{ADMIN}/policies/spare/rollback")
    recorder.call("POST", f"{ADMIN}/policies/spare/activate", {"version": new})
    recorder.call("POST", f"{ADMIN}/policies/spare/activate", {"version": "none"}, name="activate what is not there")
    new_one = {"if-none-match": "*"}
    made = recorder.call("PUT", f"{ADMIN}/policies/fresh", {}, headers=new_one, name="a new policy")
    recorder.call("PUT", f"{ADMIN}/policies/a%20b", {}, headers=new_one, name="a name that is none")
    recorder.call("POST", f"{ADMIN}/policies/fresh/default")
    recorder.call("POST", CHAT, {"model": "auto", "messages": USER}, name="by the new default")
    recorder.call("POST", f"{ADMIN}/policies/default/default")
    recorder.call("POST", f"{ADMIN}/policies/fresh/release", {"reason": "looked at"})
    recorder.call("POST", f"{ADMIN}/policies/fresh/rollback")
    recorder.call("DELETE", f"{ADMIN}/policies/fresh", name="remove without a precondition")
    recorder.call("DELETE", f"{ADMIN}/policies/fresh", headers={"if-match": made.header("etag")})
    recorder.call("DELETE", f"{ADMIN}/policies/default", headers={"if-match": '"x"'})
    recorder.call("POST", CHAT, {"model": "fresh", "messages": USER}, name="by a removed policy")


def _routers(recorder: Recorder) -> None:
    (artifact,) = recorder.server.tree.glob("classifier/**/router.npz")
    routers = f"{ADMIN}/routers"
    for content in (b"", b"nonsense", b"PK\x03\x04"):
        recorder.call("POST", routers, content=content, name=f"upload {content!r}")
    uploaded = recorder.call("POST", f"{routers}?note=ours", content=artifact.read_bytes(), name="upload the built-in")
    version = uploaded.json()["version"]
    recorder.call("GET", f"{routers}/{version}", name="the uploaded router")
    tag = recorder.call("GET", routers, name="routers after the upload").header("etag")
    match = {"if-match": tag}
    recorder.call("POST", f"{routers}/{version}/shadow", {"reason": "try"}, headers=match, name="shadow")
    recorder.call("POST", f"{routers}/{version}/shadow", {"reason": "again"}, name="shadow again")
    recorder.call("POST", CHAT, {"model": "auto", "messages": USER}, name="with a router in shadow")
    recorder.call("GET", f"{ADMIN}/rollouts", name="rollouts under way")
    recorder.call("POST", f"{routers}/rollback", {"reason": "enough"}, name="end the rollout")
    recorder.call("POST", f"{routers}/{version}/promote", headers=match, name="promote, stale")
    recorder.call("POST", f"{routers}/{version}/promote", {"reason": "good"}, name="promote")
    recorder.call("POST", CHAT, {"model": "auto", "messages": USER}, name="by the promoted router")
    recorder.call("GET", f"{ADMIN}/thresholds", name="thresholds of the promoted router")
    recorder.call("POST", f"{routers}/rollback", {"reason": "back"}, name="back to none")
    recorder.call("POST", f"{routers}/rollback", name="nothing to go back to")


def _kill_switch_and_retraining(recorder: Recorder) -> None:
    switch = f"{ADMIN}/kill-switch"
    tag = recorder.call("GET", switch, name="the switch at first").header("etag")
    recorder.call("PUT", switch, {"on": True, "reason": "a drill"}, headers={"if-match": tag}, name="switch on")
    recorder.call("PUT", switch, {"on": False}, headers={"if-match": '"77"'}, name="switch off, stale")
    recorder.call("POST", CHAT, {"model": "auto", "messages": USER}, name="with the switch on")
    recorder.call("POST", CHAT, {"model": "simple", "messages": USER}, name="pinned with the switch on")
    recorder.call("PUT", switch, {"on": False}, name="switch off")
    run = recorder.call("POST", f"{ADMIN}/router/retrain", {"reason": "a test"}).json()
    recorder.call("POST", f"{ADMIN}/router/retrain", name="retrain again")
    recorder.call("GET", f"{ADMIN}/retrain-runs?status=requested")
    recorder.call("GET", f"{ADMIN}/retrain-runs/{run['run_id']}", name="the run")


def _what_if(recorder: Recorder) -> None:
    path = f"{ADMIN}/what-if"
    for wrong in ({"policy": {"mode": "guess"}}, {"last": 0}, {"name": "none"}, {"policy": 5}, {"decided_by": 5}):
        recorder.call("POST", path, wrong, name=f"what if {json.dumps(wrong)}")
    made = recorder.call("POST", path, {"policy": {"allowed_tiers": [1]}, "last": 5}, name="what if all went to tier 1")
    evaluation = recorder.call("GET", f"{ADMIN}/evaluations?kind=whatif").json()["data"][0]
    recorder.call("GET", f"{ADMIN}/evaluations/{evaluation['evaluation_id']}", name="the what-if as kept")
    assert made.status == 200, made.body


def _keys(recorder: Recorder) -> None:
    """Come last: the first key of the scope ``admin`` closes the administration to all others."""
    keys = f"{ADMIN}/keys"
    for change in WRONG_KEYS:
        recorder.call("POST", keys, change, name=f"wrong key {json.dumps(change)}")
    sent = {"name": "batch", "tenant": "acme", "limits": {"requests_per_minute": 100, "budget_usd_per_day": "0.5"}}
    made = recorder.call("POST", keys, sent, name="a key").json()
    one = f"{keys}/{made['id']}"
    old = {"authorization": f"Bearer {made['key']}"}
    recorder.call("POST", CHAT, {"model": "simple", "messages": USER}, headers=old, name="with the key")
    tag = recorder.call("GET", one, name="the key").header("etag")
    for change in WRONG_KEYS[4:]:
        recorder.call("PUT", f"{one}/limits", change, name=f"wrong limits {json.dumps(change)}")
    limits = {"limits": {"budget_usd_per_day": "0.00000001", "requests_per_minute": None}}
    recorder.call("PUT", f"{one}/limits", limits, headers={"if-match": '"x"'}, name="limits, stale")
    recorder.call("PUT", f"{one}/limits", limits, headers={"if-match": tag}, name="limits")
    recorder.call("POST", CHAT, {"model": "simple", "messages": USER}, headers=old, name="no budget left")
    rotated = recorder.call("POST", f"{one}/rotate", name="rotate").json()
    new = {"authorization": f"Bearer {rotated['key']}"}
    recorder.call("POST", CHAT, {"model": "simple", "messages": USER}, headers=old, name="with the old secret")
    recorder.call("GET", f"{ADMIN}/tiers", headers=new, name="a key for use below admin")
    recorder.call("DELETE", one, name="revoke")
    recorder.call("DELETE", one, name="revoke again")
    recorder.call("POST", f"{one}/rotate", name="rotate a revoked key")
    recorder.call("PUT", f"{one}/limits", limits, name="limits of a revoked key")
    recorder.call("GET", f"{keys}/{UNKNOWN_ID}")
    admin = recorder.call("POST", keys, {"name": "root", "scope": "admin"}, name="a key for administration").json()
    recorder.call("GET", f"{ADMIN}/tiers", name="without a key now")
    root = {"authorization": f"Bearer {admin['key']}"}
    recorder.call("GET", keys, headers=root, name="all keys")
    recorder.call("GET", f"{ADMIN}/audit?limit=5", headers=root, name="the end of the audit log")
    recorder.call("POST", CHAT, {"model": "simple", "messages": USER}, headers=root, name="chat with an admin key")
