"""Records to rows and back. Rows are tuples in the order of their table's columns, as the raw drivers take them.

Text from outside may hold what a database refuses (NUL, lone surrogates); it is mended here, so that a caller cannot
keep a request out of the log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_EVEN, Decimal
from functools import lru_cache
from typing import Any

import orjson
from msgspec import Struct

from backends.protocol import FinishReason
from classifier.types import TierSufficiency
from gateway.store.records import (
    VALIDATOR,
    VALIDATOR_VERSION,
    ApiKey,
    Attempt,
    PolicyVersion,
    RequestRecord,
    ResponseRecord,
    SessionRecord,
    StepRecord,
    VerificationJob,
)
from policies.sampling import FAULTY, DrawnCheck

Row = tuple[Any, ...]
EncodeTime = Callable[[datetime], Any]

_NANO = Decimal(10) ** 9
_MOST_INTEGER, _MOST_BIGINT = 2**31 - 1, 2**63 - 1
_SQLITE_TIME_CHARS = len("2026-01-31 12:00:00.000000")
_PLAIN = frozenset({dict, list, tuple})
_JSON_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_ANSWERED = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS})


class EncodedRecord(Struct, frozen=True):
    """The rows of one request, in one transaction: its own, its text, its session, its key's last use, its check, its
    response."""

    request_id: str
    request: Row
    text: Row | None
    session: Row | None
    key_use: Row | None
    job: Row | None = None
    job_text: Row | None = None
    response: Row | None = None


def to_nano_usd(cost_usd: Decimal) -> int:
    """Dollars to integer nano-dollars, half to even; at most what the column holds."""
    return min(int((cost_usd * _NANO).to_integral_value(ROUND_HALF_EVEN)), _MOST_BIGINT)


def from_nano_usd(nano_usd: int) -> Decimal:
    return Decimal(nano_usd) / _NANO


def clean_text(text: str) -> str:
    """Text that every database takes: NUL and lone surrogates become U+FFFD, whole surrogate pairs are joined."""
    if "\0" in text:
        text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def sqlite_time(moment: datetime) -> str:
    """The text that SQLAlchemy writes for a datetime in SQLite, so that both ways of writing agree."""
    utc = moment if moment.tzinfo is UTC else moment.astimezone(UTC)
    return utc.isoformat(" ", "microseconds")[:_SQLITE_TIME_CHARS]


def postgres_time(moment: datetime) -> datetime:
    return moment if moment.tzinfo is UTC else moment.astimezone(UTC)


def encode_record(
    record: RequestRecord,
    encode_time: EncodeTime,
    *,
    note_key_use: bool,
    job: VerificationJob | None = None,
    response: ResponseRecord | None = None,
) -> EncodedRecord:
    """Rows for the raw driver whose time format is ``encode_time``."""
    text: Row | None = None
    if record.prompt_text is not None or record.answer_text is not None:
        text = (record.request_id, _optional(record.prompt_text), _optional(record.answer_text))
    key_use = None
    if note_key_use and record.key_id is not None:
        key_use = (encode_time(record.created_at), record.key_id)
    return EncodedRecord(
        record.request_id,
        _request_row(record, encode_time),
        text,
        _session_row(record, encode_time),
        key_use,
        None if job is None else _job_row(job, encode_time),
        None if job is None or job.known_fault else _job_text_row(job),
        None if response is None else _response_row(response, encode_time),
    )


def _request_row(record: RequestRecord, encode_time: EncodeTime) -> Row:
    r = record
    tokens: tuple[int, ...] = (
        r.prompt_tokens, r.completion_tokens, r.cached_tokens, r.reasoning_tokens, r.draft_tokens,
        r.accepted_draft_tokens,
    )  # fmt: skip
    if max(tokens) > _MOST_INTEGER:
        tokens = tuple([_count(each) for each in tokens])
    return (
        r.request_id,
        encode_time(r.created_at),
        clean_text(r.tenant),
        r.key_id,
        _optional(r.session_id),
        r.endpoint,
        clean_text(r.model_requested),
        r.stream,
        r.num_choices,
        r.policy_name,
        r.policy_version,
        r.router_version,
        r.config_hash,
        to_json(r.features) if r.features else "{}",
        to_json([[s.tier, s.p_right, s.p_as_good] for s in r.sufficiency]) if r.sufficiency else "[]",
        r.novelty,
        r.decided_tier,
        r.final_tier,
        r.model_served,
        _ladder_json(r.ladder),
        r.propensity,
        _propensities_json(tuple(r.propensities.items())),
        str(r.reason),
        r.explored,
        r.confidence,
        to_json(r.overrides) if r.overrides else "{}",
        to_json([_attempt_row(attempt) for attempt in r.attempts]),
        *tokens,
        r.compute_s,
        to_nano_usd(r.cost_usd),
        None if r.measured_cost_usd is None else to_nano_usd(r.measured_cost_usd),
        r.ttft_s,
        r.itl_s,
        r.queue_s,
        r.total_s,
        r.overhead_s,
        str(r.finish_reason),
        r.status_code,
        r.error_code,
        r.prompt_digest,
        r.answer_digest,
        r.verify_probability,
        _optional(r.traceparent),
        r.domain,
        to_json(r.barred) if r.barred else None,
        r.conversation,
        r.turn,
        r.step,
        r.turn_id,
        r.call_digest,
    )


def _job_row(job: VerificationJob, encode_time: EncodeTime) -> Row:
    """A queued job: unclaimed, untried, without a result; or one whose verdict is known without any work."""
    identity = (job.verification_id, job.request_id, encode_time(job.created_at))
    drawn = (job.direction, job.tier, job.against_tier, job.inclusion_probability, job.stratum)
    about = (clean_text(job.tenant), job.domain, job.policy_name, job.policy_version, job.router_version)
    claim: Row = ("queued", None, None, 0, None, None)
    result: Row = (None, None, None, None, "{}", 0, None, None)
    if job.known_fault:
        assert job.ended_at is not None, "what is done has an end"
        scores = {VALIDATOR: 0.0, f"{VALIDATOR}.{job.known_fault}": 1.0}
        claim = ("done", None, None, 0, None, encode_time(job.ended_at))
        result = (0.0, 0, VALIDATOR, VALIDATOR_VERSION, to_json(scores), 0, 0.0, None)
    regions = None if job.regions is None else to_json(job.regions)
    return (*identity, *drawn, *about, *claim, *result, regions, job.turn_id)


def _job_text_row(job: VerificationJob) -> Row:
    return (job.verification_id, clean_text(job.prompt), to_json(job.sampling), clean_text(job.answer), None)


def _response_row(response: ResponseRecord, encode_time: EncodeTime) -> Row:
    r = response
    about = (r.request_id, encode_time(r.created_at), clean_text(r.tenant), r.previous_id, r.num_chained)
    regions = None if r.regions is None else to_json(r.regions)
    return (*about, r.chained_bytes, r.conversation, regions, r.input, r.response)


def _session_row(record: RequestRecord, encode_time: EncodeTime) -> Row | None:
    if record.session_id is None or record.final_tier is None or record.finish_reason not in _ANSWERED:
        return None
    if record.is_side_request:
        return None
    ended_at = record.created_at + timedelta(seconds=record.total_s)
    return (
        clean_text(record.tenant),
        clean_text(record.session_id),
        record.final_tier,
        record.model_served or "",
        _count(record.prompt_tokens + record.completion_tokens),
        encode_time(ended_at),
    )


def _attempt_row(attempt: Attempt) -> list[Any]:
    found = [attempt.tier, attempt.model, attempt.duration_s, attempt.error, attempt.confidence, attempt.cost_nano_usd]
    # Most requests are tried once and asked for nothing more.
    return found[:4] if found[4] is found[5] is None else found


def _read_attempt(
    tier: int,
    model: str,
    duration_s: float | None,
    error: str | None,
    confidence: float | None = None,
    cost_nano_usd: int | None = None,
) -> Attempt:
    known = None if confidence is None else float(confidence)
    return Attempt(tier, model, _float(duration_s), error, known, cost_nano_usd)


@lru_cache(1024)
def _ladder_json(ladder: tuple[int, ...]) -> str:
    """Encode an order of tiers; there are few."""
    return to_json(ladder)


@lru_cache(1024)
def _propensities_json(chances: tuple[tuple[int, float], ...]) -> str:
    """Encode the chances of tiers; there are as few, and numbers for keys take the encoder's longer way."""
    return to_json(dict(chances))


def _count(number: int) -> int:
    """A number that its column holds: whatever a remote server counts, its answer has been given and must be logged."""
    return min(number, _MOST_INTEGER)


def _optional(text: str | None) -> str | None:
    return None if text is None else clean_text(text)


def to_json(value: Any) -> str:
    """JSON text; NaN and infinity become null, keys become text, unusable characters are mended."""
    # Exact types first: what an abstract class asks of a value costs more than encoding most of them.
    if type(value) not in _PLAIN and isinstance(value, Mapping):
        value = dict(value)
    try:
        # Without options the keys of a mapping cost a third.
        encoded = orjson.dumps(value)
    except TypeError:
        encoded = _encode_any(value)
    if b"\\u0000" in encoded:
        # PostgreSQL's jsonb has no NUL.
        encoded = orjson.dumps(_clean(value), option=_JSON_OPTIONS)
    return encoded.decode()


def _encode_any(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=_JSON_OPTIONS)
    except TypeError:
        return orjson.dumps(_clean(value), option=_JSON_OPTIONS)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Mapping):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value


def decode_record(row: Mapping[str, Any]) -> RequestRecord:
    """A row of ``requests``, left-joined with ``request_texts`` (columns ``prompt`` and ``answer``)."""
    fields = dict(row)
    cost, measured = fields.pop("cost_nano_usd"), fields.pop("measured_cost_nano_usd")
    return RequestRecord(
        cost_usd=from_nano_usd(cost),
        measured_cost_usd=None if measured is None else from_nano_usd(measured),
        finish_reason=FinishReason(fields.pop("finish_reason")),
        features={name: _float(value) for name, value in fields.pop("features").items()},
        sufficiency=tuple(TierSufficiency(tier, _float(p), _float(q)) for tier, p, q in fields.pop("sufficiency")),
        ladder=tuple(fields.pop("ladder")),
        propensities={int(tier): _float(p) for tier, p in fields.pop("propensities").items()},
        attempts=tuple(_read_attempt(*each) for each in fields.pop("attempts")),
        barred={int(tier): bar for tier, bar in (fields.pop("barred") or {}).items()},
        prompt_text=fields.pop("prompt"),
        answer_text=fields.pop("answer"),
        **fields,
    )


def _float(value: float | None) -> float:
    """A float from JSON: ``jsonb`` gives whole numbers back as int, however large, and NaN was written as null."""
    return math.nan if value is None else float(value)


def decode_key(row: Mapping[str, Any]) -> ApiKey:
    return ApiKey(**row)


def decode_session(row: Mapping[str, Any]) -> SessionRecord:
    return SessionRecord(**row)


def decode_step(row: Mapping[str, Any]) -> StepRecord:
    fields = dict(row)
    direction, against, chance, stratum = (
        fields.pop(name) for name in ("direction", "against_tier", "inclusion_probability", "stratum")
    )
    # A fault that was known without a draw says nothing of the turn's own draw.
    is_drawn = direction is not None and stratum != FAULTY
    return StepRecord(drawn=DrawnCheck(direction, against, chance, stratum) if is_drawn else None, **fields)


def decode_response(row: Mapping[str, Any]) -> ResponseRecord:
    regions = row["regions"]
    return ResponseRecord(**{**row, "regions": None if regions is None else tuple(regions)})


def decode_policy_version(row: Mapping[str, Any]) -> PolicyVersion:
    return PolicyVersion(**row)
