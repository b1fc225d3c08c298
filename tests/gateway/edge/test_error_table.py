"""The error table is complete, and what it says reaches the caller in one shape."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

import backends.errors
import classifier.errors
import gateway.control.errors
import gateway.errors
import gateway.learn.errors
import gateway.store.errors
import gateway.verify.errors
import policies.errors
from gateway.edge.error_table import TABLE, answer_to

ROOMS = (
    backends.errors,
    classifier.errors,
    gateway.control.errors,
    gateway.errors,
    gateway.learn.errors,
    gateway.store.errors,
    gateway.verify.errors,
    policies.errors,
)


def exceptions(room: ModuleType) -> list[type[Exception]]:
    """The exceptions a module defines itself."""
    return [
        each
        for _, each in inspect.getmembers(room, inspect.isclass)
        if issubclass(each, Exception) and each.__module__ == room.__name__
    ]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_every_exception_of_ours_has_a_row(room: ModuleType) -> None:
    found = exceptions(room)
    assert found
    assert [each.__name__ for each in found if each not in TABLE] == []


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_every_exception_is_drawn_in_its_tree(room: ModuleType) -> None:
    assert room.__doc__ is not None
    assert [each.__name__ for each in exceptions(room) if each.__name__ not in room.__doc__] == []


def test_the_table_holds_nothing_else() -> None:
    known = {each for room in ROOMS for each in exceptions(room)}
    assert set(TABLE) == known


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_rows_are_consistent(kind: type[Exception]) -> None:
    row = TABLE[kind]
    assert 400 <= row.status < 600
    assert row.type == "server_error" or row.status < 500
    assert row.retryable <= (row.status >= 429 or row.status == 408)
    assert row.code == row.code.lower().replace(" ", "_")


def test_a_stranger_is_an_internal_error_that_says_nothing() -> None:
    answer = answer_to(ZeroDivisionError("secret of the house"), "the-id")
    assert answer.status == 500
    assert answer.code == "internal_error"
    assert "secret" not in answer.body["error"]["message"]
    assert "the-id" in answer.body["error"]["message"]


def test_a_refusal_of_our_own_credentials_is_not_the_callers() -> None:
    refused = backends.errors.RequestRejected("bad key sk-123", status=401)
    answer = answer_to(refused, "the-id")
    assert answer.status == 502
    assert "sk-123" not in answer.body["error"]["message"]


def test_a_refusal_of_the_request_keeps_its_status_and_field() -> None:
    refused = backends.errors.RequestRejected("top_p too large", status=422, param="top_p", code="bad_top_p")
    answer = answer_to(refused, "the-id")
    assert (answer.status, answer.code, answer.body["error"]["param"]) == (422, "bad_top_p", "top_p")


def test_a_subclass_without_a_row_takes_its_base_class_row() -> None:
    class Fuller(gateway.errors.QueueFull):
        pass

    answer = answer_to(Fuller(1, 2, 3.0), "the-id")
    assert answer.status == 429
    assert answer.retry_after_s == 3
