"""Operations as declared: what a signature must say, how queries and bodies are read, what the schemas let through."""

from __future__ import annotations

from typing import Annotated, Any

import jsonschema
import pytest
from msgspec import Meta

from gateway.admin.api import admin_operations
from gateway.admin.common_shapes import Moment, Name
from gateway.admin.operation import AdminRequest, AdminResponse, AdminShape, Operation, OperationGroup, operation
from gateway.admin.record_views import Json
from gateway.api.declaration import Dollars
from gateway.config.sections import AdminConfig
from gateway.errors import InvalidRequest


class PaintQuery(AdminShape, frozen=True):
    """Which paint."""

    colour: Annotated[Name, Meta(description="Of this colour.")]
    coats: Annotated[int, Meta(ge=1, le=3, description="How many coats.")] = 2
    glossy: Annotated[bool, Meta(description="Whether it shines.")] = False
    since: Annotated[Moment, Meta(description="Mixed at or after this moment.")] | None = None


class PaintBody(AdminShape, frozen=True):
    """What is painted."""

    wall: Annotated[Name, Meta(description="Which wall.")]
    price_usd: Annotated[Dollars, Meta(description="What it may cost.")] | None = None
    note: Annotated[str, Meta(max_length=5, description="Why.")] = ""


class PaintOperations(OperationGroup):
    """Painting over HTTP."""

    @operation("POST", "/walls/{wall_id}/paint", returns=Json, status=202, conditional="may")
    async def paint_wall(
        self, request: AdminRequest, wall_id: str, query: PaintQuery, body: PaintBody
    ) -> AdminResponse:
        """Paint a wall, and let
        it dry.
        """
        return AdminResponse({})

    @operation("GET", "/walls", returns=Json)
    async def list_walls(self, request: AdminRequest) -> AdminResponse:
        """Every wall."""
        return AdminResponse({})

    @operation("POST", "/walls", returns=Json)
    async def put_wall(self, request: AdminRequest, body: bytes) -> AdminResponse:
        """Build a wall."""
        return AdminResponse({})

    @operation("PUT", "/walls", returns=Json)
    async def describe_wall(self, request: AdminRequest, body: dict[str, Any]) -> AdminResponse:
        """Describe a wall."""
        return AdminResponse({})


PAINT, LISTED, PUT, DESCRIBED = PaintOperations.operations(AdminConfig())


def test_a_declaration_is_what_decorator_signature_and_docstring_say() -> None:
    assert (PAINT.method, PAINT.path, PAINT.name) == ("POST", "/walls/{wall_id}/paint", "paint_wall")
    assert PAINT.summary == "Paint a wall, and let it dry."
    assert (PAINT.query, PAINT.body, PAINT.status, PAINT.conditional) == (PaintQuery, PaintBody, 202, "may")
    assert PAINT.path_parameters == ["wall_id"]
    assert [each.body_kind for each in (PAINT, LISTED, PUT, DESCRIBED)] == ["members", "none", "bytes", "free"]
    assert [each.is_write for each in (PAINT, LISTED)] == [True, False]


def test_a_signature_must_fit_its_path() -> None:
    with pytest.raises(TypeError, match="paint takes self, request; its path gives self, request, wall_id"):

        @operation("POST", "/walls/{wall_id}", returns=Json)
        async def paint(self: Any, request: AdminRequest) -> AdminResponse:
            """Paint."""
            return AdminResponse({})


@pytest.mark.parametrize("part", ["query", "body"])
def test_a_part_must_have_a_type(part: str) -> None:
    async def paint(self: Any, request: Any, query: Any) -> AdminResponse:
        """Paint."""
        return AdminResponse({})

    async def build(self: Any, request: Any, body: Any) -> AdminResponse:
        """Build."""
        return AdminResponse({})

    handler = paint if part == "query" else build
    del handler.__annotations__[part]
    with pytest.raises(TypeError, match=f"says no type for its {part}"):
        operation("POST", "/walls", returns=Json)(handler)


def test_a_query_is_an_admin_shape() -> None:
    with pytest.raises(TypeError, match="The query of paint is no AdminShape"):

        @operation("GET", "/walls", returns=Json)
        async def paint(self: Any, request: AdminRequest, query: dict[str, str]) -> AdminResponse:
            """Paint."""
            return AdminResponse({})


def test_a_summary_is_needed() -> None:
    with pytest.raises(TypeError, match="has no summary"):

        @operation("GET", "/walls", returns=Json)
        async def paint(self: Any, request: AdminRequest) -> AdminResponse:
            return AdminResponse({})


def test_names_and_paths_are_declared_once() -> None:
    class OtherOperations(OperationGroup):
        @operation("GET", "/walls", returns=Json)
        async def show_walls(self, request: AdminRequest) -> AdminResponse:
            """Every wall again."""
            return AdminResponse({})

        @operation("GET", "/gates", returns=Json)
        async def put_wall(self, request: AdminRequest) -> AdminResponse:
            """Something else."""
            return AdminResponse({})

    assert len(admin_operations(AdminConfig(), (PaintOperations,))) == 4
    with pytest.raises(ValueError, match="Declared twice: GET /walls, put_wall"):
        admin_operations(AdminConfig(), (PaintOperations, OtherOperations))


def test_a_query_is_read_as_its_types() -> None:
    given = [("colour", "7"), ("coats", "3"), ("glossy", "true"), ("since", "2026-01-31T12:00:00Z")]
    query = PAINT.read_query(given)
    assert (query.colour, query.coats, query.glossy) == ("7", 3, True)
    assert query.since.isoformat() == "2026-01-31T12:00:00+00:00"
    assert PAINT.read_query([("colour", "red")]) == PaintQuery("red", 2, False, None)
    assert LISTED.read_query([]) is None


@pytest.mark.parametrize(
    ("given", "param", "code", "said"),
    [
        ([("colour", "red"), ("shade", "1")], "shade", None, "known are colour, coats, glossy, since"),
        ([("colour", "red"), ("colour", "red")], "colour", None, "given twice"),
        ([], "colour", None, "You must give 'colour' in the query: Of this colour."),
        ([("colour", "red"), ("coats", "two")], "coats", "invalid_type", "expected an integer, got a string"),
        ([("colour", "red"), ("coats", "9")], "coats", None, "expected an integer from 1 to 3, got 9"),
        ([("colour", "red"), ("coats", "1" * 30)], "coats", "invalid_type", "expected an integer"),
        ([("colour", "red"), ("glossy", "yes")], "glossy", "invalid_type", "expected a boolean"),
        ([("colour", "red"), ("since", "noon")], "since", None, "expected a moment such as"),
        ([("colour", "red"), ("since", "2026-01-31T12:00:00")], "since", None, "expected a moment such as"),
        ([("since", "noon"), ("coats", "x")], "since", None, "expected a moment such as"),
    ],
)
def test_a_wrong_query_is_named(given: list[tuple[str, str]], param: str, code: str | None, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        PAINT.read_query(given)
    assert (refused.value.param, refused.value.code) == (param, code)
    assert said in str(refused.value)


def test_nothing_is_known_where_no_query_is_declared() -> None:
    with pytest.raises(InvalidRequest, match="'x' is unknown; known are none"):
        LISTED.read_query([("x", "1")])


def test_a_body_is_read_as_its_types() -> None:
    body = PAINT.read_body({"wall": "north", "price_usd": "1.5", "note": None})
    assert (body.wall, format(body.price_usd, "f"), body.note) == ("north", "1.5", "")
    assert DESCRIBED.read_body({"anything": [1]}) == {"anything": [1]}


@pytest.mark.parametrize(
    ("given", "param", "code", "said"),
    [
        ({"wall": "north", "door": 1}, "door", None, "The body has no field 'door'; known are wall, "),
        ({"door": 1}, "door", None, "The body has no field 'door'"),
        ({}, "wall", None, "You must give 'wall': Which wall."),
        ({"wall": None}, "wall", None, "You must give 'wall': Which wall."),
        ({"wall": 7}, "wall", "invalid_type", "expected a string, got an integer"),
        ({"wall": "n", "note": "too long"}, "note", None, "expected 0 to 5 characters, got '8 characters'"),
        ({"wall": "n", "price_usd": -1}, "price_usd", None, "expected an amount of dollars from 0"),
    ],
)
def test_a_wrong_body_is_named(given: dict[str, Any], param: str, code: str | None, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        PAINT.read_body(given)
    assert (refused.value.param, refused.value.code) == (param, code)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "sent", [{"wall": "n"}, {"wall": "n", "note": None, "price_usd": None}, {"wall": "n", "note": "x"}]
)
def test_the_schema_of_a_body_lets_through_what_is_read(sent: dict[str, Any]) -> None:
    PAINT.read_body(sent)
    jsonschema.validate(sent, PAINT.body_schema())


@pytest.mark.parametrize("sent", [{}, {"wall": None}, {"wall": "n", "door": 1}, {"wall": "n", "note": "too long"}])
def test_the_schema_of_a_body_refuses_what_is_refused(sent: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        PAINT.read_body(sent)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(sent, PAINT.body_schema())


def test_the_largest_trial_is_a_setting() -> None:
    def most(config: AdminConfig) -> Operation:
        return next(each for each in admin_operations(config) if each.name == "try_policy")

    few, many = most(AdminConfig(what_if_max_rows=10)), most(AdminConfig(what_if_max_rows=100))
    assert many.read_body({"last": 100}).last == 100
    with pytest.raises(InvalidRequest, match="expected an integer from 1 to 10, got 100"):
        few.read_body({"last": 100})
    assert few.body_schema()["properties"]["last"]["anyOf"][0]["maximum"] == 10
    assert few.read_body({}).last == 1000, "what is not said is the server's to choose"
