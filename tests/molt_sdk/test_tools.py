from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import gc
import json
import weakref
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict

import msgspec
import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import molt_sdk.decorators as molt
from molt_sdk.errors import DefinitionError, RequestError
from molt_sdk.tools import Tool, ToolArgumentsError, result_text, tool_from, tools_from


class Unit(enum.Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Order(msgspec.Struct):
    item: str
    count: Annotated[int, msgspec.Meta(ge=1)] = 1


class Address(pydantic.BaseModel):
    street: str
    number: int


class Person(pydantic.BaseModel):
    """Someone."""

    name: str
    home: Address


class Filter(TypedDict):
    field: str
    limit: NotRequired[int]


@dataclasses.dataclass
class Node:
    value: int
    children: list[Node] = dataclasses.field(default_factory=list)


def weather(city: str, unit: Unit = Unit.CELSIUS, days: int | None = None) -> str:
    """Forecast for a city.

    Args:
        city: name of the city,
            in English
        days: how far to look ahead
    """
    return f"{city} {unit.name} {days}"


def _one(kind: Any, default: Any = dataclasses.MISSING) -> Tool:
    """A tool with a single parameter ``value`` of the given type."""

    def take(value: Any) -> Any:
        """Take a value."""
        return value

    take.__annotations__ = {"value": kind}
    if default is not dataclasses.MISSING:
        take.__defaults__ = (default,)
    return tool_from(take)


# --- schemas ----------------------------------------------------------------------------------------------------------


def test_schema_in_openai_shape_from_signature_and_docstring() -> None:
    assert tool_from(weather).schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Forecast for a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "name of the city, in English"},
                    "unit": {"enum": ["c", "f"], "default": "c"},
                    "days": {
                        "anyOf": [{"type": "integer"}, {"type": "null"}],
                        "description": "how far to look ahead",
                        "default": None,
                    },
                },
                "required": ["city"],
            },
        },
    }


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (Any, {}),
        (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (Literal["a", "b"], {"enum": ["a", "b"]}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (set[str], {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (Mapping[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (list, {"type": "array"}),
        (
            tuple[int, str],
            {
                "type": "array",
                "minItems": 2,
                "maxItems": 2,
                "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "items": False,
            },
        ),
        (
            Point,
            {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}},
                "required": ["x"],
            },
        ),
        (
            Order,
            {
                "type": "object",
                "properties": {
                    "item": {"type": "string"},
                    "count": {"type": "integer", "minimum": 1, "default": 1},
                },
                "required": ["item"],
            },
        ),
        (
            Filter,
            {
                "type": "object",
                "properties": {"field": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["field"],
            },
        ),
        (
            Person,
            {
                "description": "Someone.",
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "home": {
                        "type": "object",
                        "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
                        "required": ["street", "number"],
                    },
                },
                "required": ["name", "home"],
            },
        ),
        (Annotated[int, "how many"], {"type": "integer", "description": "how many"}),
        (
            Annotated[int, msgspec.Meta(ge=0, description="size")],
            {"type": "integer", "minimum": 0, "description": "size"},
        ),
    ],
)
def test_schema_of_types(kind: Any, schema: dict[str, Any]) -> None:
    assert _one(kind).parameters == {"type": "object", "properties": {"value": schema}, "required": ["value"]}


def test_a_field_called_title_stays() -> None:
    @dataclasses.dataclass
    class Book:
        title: str

    assert _one(Book).parameters["properties"]["value"]["properties"] == {"title": {"type": "string"}}


def test_a_type_that_contains_itself_keeps_its_reference() -> None:
    parameters = _one(list[Node]).parameters
    assert parameters["properties"]["value"] == {"type": "array", "items": {"$ref": "#/$defs/Node"}}
    assert parameters["$defs"]["Node"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}
    bound = _one(Node).bind({"value": {"value": 1, "children": [{"value": 2}]}})
    assert bound == {"value": Node(1, [Node(2)])}


def test_a_pydantic_model_that_contains_itself() -> None:
    class Tree(pydantic.BaseModel):
        children: list[Tree] = []

    Tree.model_rebuild(_types_namespace={"Tree": Tree})
    parameters = _one(Tree).parameters
    (name,) = parameters["$defs"]
    assert parameters["$defs"][name]["properties"]["children"]["items"] == {"$ref": f"#/$defs/{name}"}
    assert parameters["properties"]["value"] == {"$ref": f"#/$defs/{name}"}


@pytest.mark.parametrize(
    "docstring",
    [
        "Cut text.\n\nArgs:\n    size: how long\n\nReturns:\n    the text",
        "Cut text.\n\nParameters\n----------\nsize : int\n    how long\n\nReturns\n-------\nstr\n    the text",
        "Cut text.\n\n:param size: how long\n:returns: the text",
    ],
)
def test_docstring_styles(docstring: str) -> None:
    def cut(size: int) -> str:
        return "x" * size

    cut.__doc__ = docstring
    tool = tool_from(cut)
    assert tool.description == "Cut text."
    assert tool.parameters["properties"]["size"] == {"type": "integer", "description": "how long"}


def test_annotated_text_wins_over_the_docstring() -> None:
    def cut(size: Annotated[int, "from the annotation"]) -> None:
        """Cut.

        Args:
            size: from the docstring
        """

    assert tool_from(cut).parameters["properties"]["size"]["description"] == "from the annotation"


def test_defaults_are_json_and_odd_ones_are_left_out() -> None:
    assert _one(Point, Point(1, 2)).parameters["properties"]["value"]["default"] == {"x": 1, "y": 2}
    assert _one(Address, Address(street="s", number=1)).parameters["properties"]["value"]["default"] == {
        "street": "s",
        "number": 1,
    }
    odd = _one(float, float("inf")).parameters
    assert odd == {"type": "object", "properties": {"value": {"type": "number"}}}


def test_default_none_allows_null() -> None:
    tool = _one(int, None)
    assert tool.parameters["properties"]["value"]["default"] is None
    assert tool.bind('{"value": null}') == {"value": None}


def test_types_of_the_enclosing_function_resolve_when_they_are_used() -> None:
    @dataclasses.dataclass
    class Local:
        x: int

    def take(value: Local) -> int:
        """Take it."""
        return Local(value.x).x

    assert tool_from(take).bind({"value": {"x": 1}}) == {"value": Local(1)}


# --- definitions that cannot work -------------------------------------------------------------------------------------


def no_annotation(a: int, b) -> None:  # type: ignore[no-untyped-def]
    """Doc."""


def no_docstring(a: int) -> None: ...


def only_parameters_documented(a: int) -> None:
    """:param a: number"""


def star(*values: int) -> None:
    """Doc."""


def double_star(**values: int) -> None:
    """Doc."""


def positional_only(a: int, /) -> None:
    """Doc."""


def path(a: Path) -> None:
    """Doc."""


def callback(a: Callable[[], int]) -> None:
    """Doc."""


def two_objects(a: Point | Order) -> None:
    """Doc."""


def unresolvable(a: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Doc."""


def field_default(a: int = pydantic.Field(1, ge=0)) -> None:
    """Doc."""


def field_annotation(a: Annotated[int, pydantic.Field(ge=0)]) -> None:
    """Doc."""


def generator(a: int) -> Any:
    """Doc."""
    yield a


async def async_generator(a: int) -> Any:
    """Doc."""
    yield a


@molt.tool(name="no spaces please")
def bad_name(a: int) -> None:
    """Doc."""


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (no_annotation, ["'b'", "no type annotation", "`b: str`"]),
        (no_docstring, ["no docstring"]),
        (only_parameters_documented, ["no docstring that says what it does"]),
        (star, ["*values", "named parameters"]),
        (double_star, ["**values", "named parameters"]),
        (positional_only, ["'a'", "positional-only"]),
        (path, ["'a'", "Path", "dataclass"]),
        (callback, ["'a'", "no JSON schema"]),
        (two_objects, ["'a'", "more than one dict-like type"]),
        (unresolvable, ["'a'", "'Missing'", "module level"]),
        (field_default, ["pydantic.Field", "msgspec.Meta"]),
        (field_annotation, ["pydantic.Field", "msgspec.Meta"]),
        (generator, ["generator", "`return`"]),
        (async_generator, ["generator", "`return`"]),
        (bad_name, ["'no spaces please'", "name="]),
        (lambda a: a, ["lambda", "`def`"]),
    ],
)
def test_definition_errors_name_place_and_remedy(fn: Any, words: list[str]) -> None:
    with pytest.raises(DefinitionError) as caught:
        tool_from(fn)
    message = str(caught.value)
    assert f"{__file__}:{fn.__code__.co_firstlineno}" in message
    for word in [fn.__name__, *words]:
        assert word in message


@pytest.mark.parametrize("source", [None, 5, "weather", {"weather": weather}, object(), int, [weather, 3], len])
def test_what_is_no_source_of_tools(source: Any) -> None:
    with pytest.raises(DefinitionError):
        tools_from(source)


def test_unbound_method_says_to_pass_the_instance() -> None:
    with pytest.raises(DefinitionError, match=r"'self'.*pass an instance"):
        tool_from(Shop.order)


# --- collecting -------------------------------------------------------------------------------------------------------


class Base:
    @molt.tool
    def first(self, a: int) -> int:
        """First."""
        return a

    @molt.tool
    def second(self) -> str:
        """Second, of the base."""
        return "base"


class Shop(Base):
    def __init__(self, price: int) -> None:
        self.price = price

    @molt.tool(timeout=2.5, parallel=True)
    async def order(self, count: int = 1) -> int:
        """Order."""
        return self.price * count

    def helper(self) -> None:
        """No tool."""

    @property
    def expensive(self) -> int:
        raise AssertionError("collecting tools must not read properties")

    @molt.tool
    def second(self) -> str:
        """Second, overridden."""
        return "shop"

    @molt.tool
    @staticmethod
    def static(a: int) -> int:
        """Static."""
        return a

    @classmethod
    @molt.tool
    def of_class(cls, a: int) -> str:
        """Of the class."""
        return f"{cls.__name__}{a}"


def test_tools_of_an_instance_are_bound_and_in_definition_order() -> None:
    tools = {tool.name: tool for tool in tools_from(Shop(3))}
    assert list(tools) == ["first", "second", "order", "static", "of_class"]
    assert tools["first"].fn(**tools["first"].bind('{"a": 4}')) == 4
    assert tools["second"].fn() == "shop"
    assert tools["second"].description == "Second, overridden."
    assert tools["static"].fn(**tools["static"].bind('{"a": 4}')) == 4
    assert tools["of_class"].fn(**tools["of_class"].bind('{"a": 4}')) == "Shop4"
    assert (tools["order"].timeout, tools["order"].parallel) == (2.5, True)
    assert (tools["first"].timeout, tools["first"].parallel) == (None, False)


def test_tools_of_a_class_have_the_same_schemas_without_an_instance() -> None:
    assert [tool.schema for tool in tools_from(Shop)] == [tool.schema for tool in tools_from(Shop(1))]
    (order,) = [tool for tool in tools_from(Shop) if tool.name == "order"]
    assert order.bind("{}") == {}


def test_an_environment_may_have_no_tools() -> None:
    @molt.environment
    class Quiet:
        pass

    assert tools_from(Quiet) == tools_from(Quiet()) == []


def test_mixed_sources() -> None:
    ready = tool_from(weather)
    assert [tool.name for tool in tools_from([ready, Base(), (tool_from(Shop(1).order),)])] == [
        "weather",
        "first",
        "second",
        "order",
    ]
    assert tools_from(weather) == [ready]
    assert tools_from(ready) == [ready]
    assert tools_from([]) == []


def test_two_tools_of_one_name_name_both_places() -> None:
    @molt.tool(name="weather")
    def other() -> None:
        """Other."""

    with pytest.raises(DefinitionError) as caught:
        tools_from([weather, other])
    for fn in (weather, other):
        assert f"{__file__}:{fn.__code__.co_firstlineno}" in str(caught.value)


def test_an_override_without_the_decorator_is_refused_and_none_drops_the_tool() -> None:
    class Forgot(Base):
        def second(self) -> str:
            """Forgot."""
            return ""

    class Dropped(Base):
        second = None  # type: ignore[assignment]

    with pytest.raises(DefinitionError, match=r"Forgot\.second.*@tool"):
        tools_from(Forgot)
    assert [tool.name for tool in tools_from(Dropped)] == ["first"]


def test_decorated_functions_keep_their_signature() -> None:
    @functools.lru_cache
    def cached(a: int) -> int:
        """Cached."""
        return a

    @functools.wraps(weather)
    def wrapped(*args: Any, **kwargs: Any) -> str:
        return weather(*args, **kwargs).upper()

    assert tool_from(cached).bind('{"a": 1}') == {"a": 1}
    tool = tool_from(wrapped)
    assert tool.schema == tool_from(weather).schema
    assert tool.fn(**tool.bind('{"city": "Rome"}')) == "ROME CELSIUS NONE"


def test_functions_made_in_a_loop_are_not_kept_alive() -> None:
    def make() -> Callable[[int], int]:
        def local(a: int) -> int:
            """Local."""
            return a

        return local

    fn = make()
    tool_from(fn)
    gone = weakref.ref(fn)
    del fn
    gc.collect()
    assert gone() is None


# --- arguments --------------------------------------------------------------------------------------------------------


def test_bind_converts_to_the_annotated_types() -> None:
    def buy(order: Order, at: Point, by: Person, filters: list[Filter], unit: Unit, tags: set[str]) -> None:
        """Buy."""

    arguments = {
        "order": {"item": "tea"},
        "at": {"x": 1},
        "by": {"name": "A", "home": {"street": "S", "number": 1}},
        "filters": [{"field": "f"}],
        "unit": "f",
        "tags": ["a", "a"],
    }
    assert tool_from(buy).bind(json.dumps(arguments)) == {
        "order": Order("tea", 1),
        "at": Point(1, 0),
        "by": Person(name="A", home=Address(street="S", number=1)),
        "filters": [{"field": "f"}],
        "unit": Unit.FAHRENHEIT,
        "tags": {"a"},
    }


def test_bind_leaves_defaults_to_the_function() -> None:
    tool = tool_from(weather)
    assert tool.bind('{"city": "Rome"}') == {"city": "Rome"}
    assert tool.bind({"city": "Rome"}) == {"city": "Rome"}


def test_a_json_string_of_the_arguments_object_is_unwrapped() -> None:
    assert tool_from(weather).bind('"{\\"city\\": \\"X\\"}"') == {"city": "X"}


def test_no_arguments() -> None:
    def now() -> None:
        """Now."""

    assert tool_from(now).bind("") == tool_from(now).bind(" {} ") == {}
    assert tool_from(now).parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (int, "3", 3),
        (int, 3.0, 3),
        (int, 10**30, 10**30),
        (float, 3, 3.0),
        (float, "3.5", 3.5),
        (bool, "true", True),
        (bool, 1, True),
        (int | None, "null", None),
        (int | str, "3", "3"),
        (str, "null", "null"),
        (list[int], ["1", 2], [1, 2]),
        (Literal[1, 2], "2", 2),
    ],
)
def test_lax_conversions_for_what_models_write(kind: Any, given: Any, expected: Any) -> None:
    value = _one(kind).bind(json.dumps({"value": given}))["value"]
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (int, True, ["must be integer", "given true"]),
        (float, False, ["must be number", "given false"]),
        (int, 3.5, ["must be integer", "given 3.5"]),
        (int, "three", ["must be integer", 'given "three"']),
        (int, None, ["must be integer", "given null"]),
        (str, 5, ["must be string", "given 5"]),
        (bool, "perhaps", ["must be boolean"]),
        (list[int], 1, ["must be array of integer", "given 1"]),
        (list[int], [1, "x"], ["at [1]"]),
        (Literal["c", "f"], "k", ['must be "c" | "f"', 'given "k"']),
        (Unit, "k", ['must be "c" | "f"', 'given "k"']),
        (Annotated[int, msgspec.Meta(ge=1)], 0, ["must be integer >= 1", "given 0"]),
        (Order, {"item": "tea", "count": 0}, ["must be object", "at .count"]),
        (Person, {"name": "A", "home": {"street": "S"}}, ["must be object", "home.number", "Field required"]),
        (set[Any], [[1]], ["must be array", "given [[1]]"]),
        (float, 10**400, ["must be number"]),
    ],
)
def test_wrong_values_tell_the_model_what_was_expected(kind: Any, given: Any, words: list[str]) -> None:
    with pytest.raises(ToolArgumentsError) as caught:
        _one(kind).bind(json.dumps({"value": given}))
    for word in ['take: argument "value"', *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"city": "X", "when": 1}', ['unknown argument "when"', "city, unit, days"]),
        ('{"days": 1}', ['missing argument "city" (string)', "given: days"]),
        ('{"city": "X"', ["not valid JSON", '{"city": "X"']),
        ('{"city": NaN}', ["NaN is not JSON"]),
        ("[1]", ["one JSON object", "given [1]"]),
        ("null", ["one JSON object"]),
        ('"Rome"', ["not valid JSON", "Rome"]),
        ('{"city": "\\ud83d"}', ["half of a surrogate pair"]),
        ("[" * 100_000, ["not valid JSON"]),
        ('{"city": ' + "1" * 5000 + "}", ["not valid JSON"]),
    ],
)
def test_malformed_arguments(arguments: str, words: list[str]) -> None:
    with pytest.raises(ToolArgumentsError) as caught:
        tool_from(weather).bind(arguments)
    message = str(caught.value)
    message.encode()  # can be shown to a model
    assert len(message) < 400
    for word in ["weather: ", *words]:
        assert word in message


def test_surrogate_pairs_are_fine() -> None:
    assert tool_from(weather).bind('{"city": "\\ud83d\\ude00"}') == {"city": "😀"}


def test_tool_arguments_error_is_a_request_error() -> None:
    assert issubclass(ToolArgumentsError, RequestError)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
KINDS = [int, float, bool, str, int | None, int | str, list[int], set[Any], dict[str, float], tuple[int, str], Point]
KINDS += [Order, Person, Filter, Unit, Literal["a", 1], Node, datetime.date, Decimal, bytes]
FUZZED = [_one(kind) for kind in KINDS]


@given(tool=st.sampled_from(FUZZED), value=JSON)
def test_bind_returns_or_says_why(tool: Tool, value: Any) -> None:
    try:
        bound = tool.bind(json.dumps({"value": value}))
    except ToolArgumentsError as error:
        str(error).encode()
    else:
        assert list(bound) == ["value"]


# --- results ----------------------------------------------------------------------------------------------------------


class Opaque:
    def __str__(self) -> str:
        return "opaque"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is\n", "as it is\n"),
        (None, ""),
        (True, "true"),
        (3, "3"),
        (2**80, "1208925819614629174706176"),
        (0.1, "0.1"),
        (float("inf"), "Infinity"),
        (Decimal("1.50"), "1.50"),
        (datetime.datetime(2024, 1, 2, 3, 4), "2024-01-02T03:04:00"),
        (Unit.CELSIUS, "c"),
        ([1, "é"], '[1, "é"]'),
        ({"b": 1, "a": None}, '{"b": 1, "a": null}'),
        ({1: 2}, '{"1": 2}'),
        ({"b", "a"}, '["a", "b"]'),
        (Point(1, 2), '{"x": 1, "y": 2}'),
        (Order("tea"), '{"item": "tea", "count": 1}'),
        (Address(street="S", number=1), '{"street": "S", "number": 1}'),
        ([Address(street="S", number=1)], '[{"street": "S", "number": 1}]'),
        (np.float64(0.5), "0.5"),
        (np.int32(7), "7"),
        (np.array([[1, 2]]), "[[1, 2]]"),
        ({"a": np.array([1.5])}, '{"a": [1.5]}'),
        (Opaque(), "opaque"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        ("\ud83d\ude00 \ud83d", "😀 �"),
        (["\ud83d"], '["�"]'),
        (b"caf\xc3\xa9\n", "café\n"),
        (bytearray(b"a"), "a"),
        (b"\xff\x00", "/wA="),
        ([b"a"], '["YQ=="]'),
    ],
)
def test_result_text(value: Any, text: str) -> None:
    assert result_text(value) == text


def test_result_text_shows_no_address() -> None:
    """It is another one in each run."""

    class Plain:
        def method(self) -> None: ...

    def function() -> None: ...

    here = "test_result_text_shows_no_address.<locals>"
    assert result_text(Plain()) == f"<{__name__}.{here}.Plain object>"
    assert result_text([Plain()]) == f'["<{__name__}.{here}.Plain object>"]'
    assert result_text(function) == f"<function {here}.function>"


def test_result_text_of_a_cycle() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    assert result_text(cycle) == "[[...]]"
