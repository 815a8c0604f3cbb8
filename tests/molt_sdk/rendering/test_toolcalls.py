from __future__ import annotations

import json
import re
import time
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_sdk.rendering.toolcalls import (
    HERMES,
    MAX_ERRORS,
    ParsedReply,
    emulation_prompt,
    parse_plain_json,
    parse_tool_calls,
)
from molt_sdk.tools import tool_from
from molt_sdk.types import ToolCall


def block(*objects: str) -> str:
    return "<tool_call>" + "\n".join(objects) + "</tool_call>"


def call(name: str, arguments: str, call_id: str = "call_0") -> ToolCall:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parse(text: str, *, truncated: bool = False) -> ParsedReply:
    return parse_tool_calls(text, truncated=truncated)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_text_without_calls_is_content_as_it_is() -> None:
    assert parse("  Hello {x}\n") == ParsedReply("  Hello {x}\n", None, [], [])


def test_one_call_with_text_around_it() -> None:
    reply = parse('Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n')
    assert reply == ParsedReply("Let me see.", None, [call("f", '{"x": 1}')], [])


def test_arguments_stay_as_the_model_wrote_them() -> None:
    written = '{"b":1,  "a":"é < \\u00e9", "nested": {"z": [1.0, 1e3]}}'
    assert parse(block('{"name":"f","arguments":' + written + "}")).tool_calls == [call("f", written)]


def test_several_blocks_and_several_objects_in_one_block() -> None:
    text = block('{"name":"f","arguments":{"x":1}}', '{"name":"g","arguments":{}}') + "and" + block('{"name":"h"}')
    reply = parse(text)
    assert reply.tool_calls == [call("f", '{"x":1}'), call("g", "{}", "call_1"), call("h", "{}", "call_2")]
    assert (reply.content, reply.errors) == ("and", [])


def test_ids_are_ours_and_unique() -> None:
    text = block('{"id": "c1", "name": "f"}') + block('{"id": "c1", "name": "f"}')
    reply = parse_tool_calls(text, truncated=False, id_prefix="call_7_")
    assert [made["id"] for made in reply.tool_calls] == ["call_7_0", "call_7_1"]


def test_parameters_is_another_spelling_of_arguments() -> None:
    assert parse(block('{"name": "f", "parameters": {"x": 1}}')).tool_calls == [call("f", '{"x": 1}')]


@pytest.mark.parametrize("fields", ['"name": "f"', '"name": "f", "arguments": null', '"name": "f", "arguments": ""'])
def test_missing_arguments_are_an_empty_object(fields: str) -> None:
    assert parse(block("{" + fields + "}")).tool_calls == [call("f", "{}")]


def test_an_object_in_a_json_string_is_unwrapped() -> None:
    assert parse(block('{"name": "f", "arguments": "{\\"city\\": \\"X\\"}"}')).tool_calls == [
        call("f", '{"city": "X"}')
    ]


def test_tags_and_braces_inside_strings_belong_to_the_arguments() -> None:
    arguments = '{"text": "mkdir {a,b </tool_call> <tool_call> <think> \\" }"}'
    reply = parse(block('{"name": "write", "arguments": ' + arguments + "}"))
    assert reply == ParsedReply("", None, [call("write", arguments)], [])


# --- blocks without an end --------------------------------------------------------------------------------------------


def test_a_complete_call_without_closing_tag_counts_when_the_model_stopped() -> None:
    text = 'So: <tool_call>{"name": "f", "arguments": {"x": 1}}\n'
    assert parse(text) == ParsedReply("So:", None, [call("f", '{"x": 1}')], [])


@pytest.mark.parametrize("end", ["", "\n", "</tool_c"])
def test_a_cut_block_is_an_error_and_stays_in_the_content(end: str) -> None:
    text = 'So: <tool_call>{"name": "f", "arguments": {"x": 1}}' + end
    reply = parse(text, truncated=True)
    assert (reply.content, reply.tool_calls) == (text, [])
    (error,) = reply.errors
    assert "length limit" in error


def test_calls_before_the_cut_count() -> None:
    reply = parse(block('{"name": "f"}') + ' <tool_call>{"name": "g", "argum', truncated=True)
    assert reply.tool_calls == [call("f", "{}")]
    assert reply.content == '<tool_call>{"name": "g", "argum'
    assert len(reply.errors) == 1


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        ('{"name": "f" "arguments": {}}', "expected , at '\"arguments"),
        ('{"name": "f", "arguments": {"x" 1}}', "Expecting ':' delimiter at '1}}"),
        ('{"name": "f", "arguments": {}', "expected , at '</tool_call>"),
        ('{"name": "f", "arguments": {}}}', "expected { at '}</tool_call>"),
        ('{"name": "f",}', 'expected "'),
        ("{'name': 'f'}", 'expected "'),
        ("f(x=1)", "expected { at 'f(x=1)"),
        ("", "empty"),
        ("[]", "it is empty"),
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": "", "arguments": {}}', 'no "name"'),
        ('{"name": 3, "arguments": {}}', 'no "name"'),
        ('{"name": "f", "arguments": [1]}', "not an object"),
        ('{"name": "f", "arguments": 0}', "not an object"),
        ('{"name": "f", "arguments": "Rome"}', "Expecting value at 'Rome'"),
        ('{"name": "f", "arguments": "{} {}"}', "more than one object"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN is not JSON"),
        ('{"name": "f", "arguments": {"x": "a\nb"}}', "control character"),
        ('{"name": "f", "name": "g"}', '"name" twice'),
        ('{"name": "f", "arguments": {}, "parameters": {}}', 'both "arguments" and "parameters"'),
        ('{"name": "\\ud83d", "arguments": {}}', "surrogate"),
        ('{"name": "f", "arguments": {"x": ' + "[" * 100_000 + "}}", "nested too deeply"),
        ('{"name": "f", "arguments": {"x": ' + "1" * 5000 + "}}", "limit"),
    ],
)
def test_an_unreadable_block_is_an_error_for_the_model_and_stays_in_the_content(inside: str, words: str) -> None:
    text = f"a {block(inside)} b"
    reply = parse(text)
    assert (reply.content, reply.tool_calls) == (text, [])
    (error,) = reply.errors
    assert words in error
    assert HERMES.shown in error
    assert len(error) < 350
    error.encode()


def test_a_block_is_read_as_a_whole_or_not_at_all() -> None:
    bad = block('{"name": "f"}', '{"name": "g"')
    reply = parse(bad + block('{"name": "h"}'))
    assert reply.tool_calls == [call("h", "{}")]
    assert reply.content == bad
    assert len(reply.errors) == 1


def test_a_closing_tag_alone_is_an_error() -> None:
    reply = parse('{"name": "f", "arguments": {}}</tool_call>')
    assert reply.tool_calls == []
    assert "without <tool_call>" in reply.errors[0]


def test_errors_are_bounded_and_say_so() -> None:
    text = "<tool_call>{]" * 1000
    reply = parse(text)
    assert reply.content == text
    assert len(reply.errors) == MAX_ERRORS + 1
    assert "not read" in reply.errors[-1]


# --- reasoning --------------------------------------------------------------------------------------------------------


def test_calls_inside_reasoning_are_not_executed() -> None:
    thought = 'maybe <tool_call>{"name":"rm","arguments":{}}</tool_call>'
    assert parse(f"<think>{thought}</think>Done.") == ParsedReply("Done.", thought, [], [])


def test_reasoning_that_the_prompt_began() -> None:
    thought = 'maybe <tool_call>{"name":"rm"}</tool_call>'
    for reply in (parse(f"{thought}\n</think>\n\nDone."), parse_tool_calls(thought, truncated=True, thinking=True)):
        assert (reply.reasoning, reply.tool_calls, reply.errors) == (thought, [], [])
    reply = parse_tool_calls("hm</think>" + block('{"name": "f"}'), truncated=False, thinking=True)
    assert reply == ParsedReply("", "hm", [call("f", "{}")], [])


def test_reasoning_before_and_between_calls() -> None:
    reply = parse("<think>\none\n</think>" + block('{"name": "f"}') + "<think>two</think> end")
    assert reply == ParsedReply("end", "one\ntwo", [call("f", "{}")], [])


def test_empty_reasoning_is_not_none() -> None:
    assert parse("<think>\n\n</think>\n\nHi").reasoning == ""
    assert parse("Hi").reasoning is None


def test_unclosed_reasoning_lasts_to_the_end() -> None:
    text = '<think>let me <tool_call>{"name": "f"}</tool_call>'
    cut = parse(text, truncated=True)
    assert cut == ParsedReply("", text.removeprefix("<think>"), [], [])
    ended = parse(text)
    assert (ended.content, ended.tool_calls) == ("", [])
    assert "inside <think>" in ended.errors[0]
    assert parse("<think>only a thought").errors == []


# --- robustness -------------------------------------------------------------------------------------------------------

PIECES = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f", "arguments": {"x": 1}}', "{", "}", '"']
PIECES += ['{"name": "f"}', "\\", ",", ":", "[", "text", " ", "\n", "NaN", "\ud83d", "é"]


@given(text=st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25).map("".join), cut=st.booleans())
def test_never_raises_and_loses_no_text(text: str, cut: bool) -> None:
    reply = parse(text, truncated=cut)
    assert [made["id"] for made in reply.tool_calls] == [f"call_{i}" for i in range(len(reply.tool_calls))]
    for made in reply.tool_calls:
        assert isinstance(json.loads(made["function"]["arguments"]), dict)
    if not reply.tool_calls and reply.reasoning is None:
        assert reply.content == text  # nothing was taken, so nothing may be missing

    # Every character outside tags, JSON objects and white space must turn up again, and none that was not there.
    said = reply.content + (reply.reasoning or "")
    expected = list(re.sub(r"</?think>|</?tool_call>|\s", "", text))
    kept = list(re.sub(r"</?think>|</?tool_call>|\s", "", said))
    taken = len(expected) - len(kept)
    objects = ['{"name":"f","arguments":{"x":1}}', '{"name":"f"}']
    written = [re.sub(r"\s", "", item) for item in objects]
    short = sum(made["function"]["arguments"] == "{}" for made in reply.tool_calls)
    assert taken == short * len(written[1]) + (len(reply.tool_calls) - short) * len(written[0])


@given(
    calls=st.lists(
        st.tuples(
            st.text(min_size=1, max_size=5).filter(str.strip),
            st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=20), max_size=3),
        ),
        max_size=4,
    ),
    ascii_only=st.booleans(),
)
def test_what_json_writes_is_read_back(calls: list[tuple[str, dict[str, Any]]], ascii_only: bool) -> None:
    text = "".join(
        block(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only)) for name, arguments in calls
    )
    reply = parse(text)
    made = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in reply.tool_calls]
    assert (made, reply.errors) == (calls, [])


UNITS = [
    '<tool_call>{"a" ',
    '<tool_call>{"',
    '<tool_call>{"name":"a"}',
    '<tool_call>{"name":"',
    "</tool_call>",
    "<think>",
]
UNITS += [
    "</think>",
    "<think></think>",
    "<tool_call>{]</tool_call>\n",
    '<tool_call>{"name": "f"}</tool_call>',
    "{",
    "[",
]


@pytest.mark.parametrize("unit", UNITS)
def test_time_is_linear_in_the_length(unit: str) -> None:
    def seconds(length: int) -> float:
        text = unit * (length // len(unit))
        started = time.perf_counter()
        parse(text)
        return time.perf_counter() - started

    seconds(1_000)
    # 20 times the text: quadratic work would take 400 times as long; 0.05 s absorbs the noise of a busy machine.
    small = min(seconds(20_000) for _ in range(3))
    assert min(seconds(400_000) for _ in range(2)) < 100 * small + 0.05


# --- calls without tags -----------------------------------------------------------------------------------------------


def test_plain_json_of_a_known_tool_is_a_call() -> None:
    assert parse_plain_json(' {"name": "f", "arguments": {"b":1}}\n', {"f"}, call_id="c") == call("f", '{"b":1}', "c")
    assert parse_plain_json('{"name": "f", "parameters": {}}', {"f"}) == call("f", "{}")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "g", "arguments": {}}',
        '{"name": "f"}',
        '{"name": "f", "arguments": {}} and more',
        '{"name": "f", "arguments": {}',
        'Result: {"name": "f", "arguments": {}}',
        "[]",
        "",
    ],
)
def test_other_plain_text_is_an_answer(text: str) -> None:
    assert parse_plain_json(text, {"f"}) is None


# --- the prompt for templates without tools ---------------------------------------------------------------------------


class Point(msgspec.Struct):
    x: int
    label: str = ""


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression such as "12 * 7"."""
    return expression


def search(query: str, limit: int = 5, near: Point | None = None, tags: list[str] | None = None) -> str:
    """Search
    the web.

    Args:
        query: what to look for, e.g. 'red shoes'
        near: where
    """
    return query


def schema(fn: Any) -> dict[str, Any]:
    return tool_from(fn).schema


def test_prompt_of_a_simple_tool() -> None:
    assert emulation_prompt([schema(calculator)]) == (
        "You can call these tools:\n"
        'calculator(expression: string): Evaluate an arithmetic expression such as "12 * 7".\n'
        'To call one, reply <tool_call>{"name": "...", "arguments": {...}}</tool_call>\n'
        'Example: <tool_call>{"name": "calculator", "arguments": {"expression": "12 * 7"}}</tool_call>'
    )


def test_prompt_shows_optional_described_and_nested_parameters() -> None:
    lines = emulation_prompt([schema(search), schema(calculator)]).splitlines()
    assert lines[1] == (
        "search(query: string, limit: integer = 5, near: object | null = null, "
        "tags: array of string | null = null): Search the web."
    )
    assert lines[2] == "  query: what to look for, e.g. 'red shoes'"
    name, _, rest = lines[3].partition(": where ")
    assert name == "  near"
    assert json.loads(rest)["anyOf"][0]["properties"] == {
        "x": {"type": "integer"},
        "label": {"type": "string", "default": ""},
    }
    assert lines[4].startswith("calculator(expression: string): ")
    assert lines[-1] == 'Example: <tool_call>{"name": "search", "arguments": {"query": "red shoes"}}</tool_call>'


def test_no_tools_no_prompt() -> None:
    assert emulation_prompt([]) == ""


def many(
    a: str,
    b: Annotated[int, "such as 40"],
    c: Annotated[int, msgspec.Meta(ge=3)],
    d: float,
    e: bool,
    f: list[Point],
    g: dict[str, int],
    h: int | None,
    i: Annotated[str, msgspec.Meta(examples=["seen"])],
    k: Any,
) -> None:
    """Do it."""


def test_the_example_fits_its_own_tool_and_its_own_parser() -> None:
    tool = tool_from(many)
    reply = parse(emulation_prompt([tool.schema]).splitlines()[-1])
    (made,) = reply.tool_calls
    bound = tool.bind(made["function"]["arguments"])
    assert bound == {
        "a": "text",
        "b": 40,
        "c": 3,
        "d": 1.0,
        "e": True,
        "f": [Point(1)],
        "g": {},
        "h": 1,
        "i": "seen",
        "k": "text",
    }


def test_a_schema_of_another_make_is_described_too() -> None:
    bare = {"type": "function", "function": {"name": "ping"}}
    prompt = emulation_prompt([bare])
    assert prompt.splitlines()[1] == "ping()"
    assert '{"name": "ping", "arguments": {}}' in prompt
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    parameters = {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/Node"}},
        "$defs": {"Node": node},
        "required": ["n"],
    }
    recursive = {"type": "function", "function": {"name": "walk", "description": "Walk.", "parameters": parameters}}
    lines = emulation_prompt([recursive]).splitlines()
    assert lines[1] == "walk: Walk."
    assert json.loads(lines[2].removeprefix("  arguments: ")) == parameters
    assert '{"name": "walk", "arguments": {"n": {}}}' in lines[-1]
