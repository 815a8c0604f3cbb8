"""Whatever shape a user's messages have, what is recorded is well-formed, or the error names the message."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_sdk.errors import RequestError
from molt_sdk.messages import copied, normalize, normalize_call, parsed_arguments


def call(arguments: Any, name: str = "f", id: str = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_text_is_one_user_message() -> None:
    assert normalize("hi", "here") == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("", ""),
        ("hi", "hi"),
        ([], ""),
        ([{"type": "text", "text": "hi"}], "hi"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
    ],
)
def test_content_becomes_text(content: Any, text: str) -> None:
    """F25: a list of parts is neither an empty message nor a Python repr."""
    assert normalize([{"role": "user", "content": content}], "here") == [{"role": "user", "content": text}]


def test_missing_content_is_empty_and_unknown_keys_are_left_out() -> None:
    given = [{"role": "assistant", "refusal": None, "audio": None, "tool_calls": [], "name": None}]
    assert normalize(given, "here") == [{"role": "assistant", "content": ""}]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"b":1, "a": 2}', '{"b":1, "a": 2}'),  # JSON text stays as it was written
        ({"b": 1, "a": "é"}, '{"b": 1, "a": "é"}'),
        (None, "{}"),
        ({}, "{}"),
    ],
)
def test_arguments_are_json_text(arguments: Any, text: str) -> None:
    """F32: a dict and a string are the same call."""
    message = {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
    clean = normalize([message], "here")[0]  # type: ignore[list-item]
    assert clean["tool_calls"] == [call(text)]


def test_the_callers_objects_are_not_kept() -> None:
    given: list[Any] = [{"role": "assistant", "content": "x", "tool_calls": [call("{}")]}]
    clean = normalize(given, "here")
    given[0]["content"] = "changed"
    given[0]["tool_calls"][0]["function"]["name"] = "changed"
    given.append({"role": "user", "content": "more"})
    assert clean == [{"role": "assistant", "content": "x", "tool_calls": [call("{}")]}]


def test_a_copy_shares_nothing_that_can_be_changed() -> None:
    message = normalize([{"role": "assistant", "content": "x", "tool_calls": [call("{}")]}], "here")[0]  # type: ignore
    copy = copied(message)
    assert copy == message
    copy["tool_calls"][0]["function"]["name"] = "changed"
    copy["tool_calls"][0]["id"] = "changed"
    copy["content"] = "changed"
    assert message == {"role": "assistant", "content": "x", "tool_calls": [call("{}")]}


LONE = "abc\ud83d"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], ["messages is empty"]),
        ({"role": "user", "content": "x"}, ["list of messages", "dict"]),
        (3, ["int"]),
        (None, ["NoneType"]),
        (["hi"], ["message 0", "'hi'", "role"]),
        ([{"content": "x"}], ["message 0", "role"]),
        ([{"role": "user", "content": "x"}, {"role": "bot", "content": "x"}], ["message 1", "'bot'", "assistant"]),
        ([{"role": "user", "text": "hi"}], ["message 0", "no content", "role, text"]),
        ([{"role": "user", "content": 3}], ["message 0", "int"]),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], ["message 0", "'image_url'"]),
        ([{"role": "user", "content": ["x"]}], ["message 0", "'x'"]),
        ([{"role": "user", "content": LONE}], ["message 0", "lone surrogate at character 3"]),
        ([{"role": "user", "content": [{"type": "text", "text": LONE}]}], ["message 0", "lone surrogate"]),
        ([{"role": "tool", "content": "x", "tool_call_id": LONE}], ["message 0", "tool_call_id", "lone surrogate"]),
        ([{"role": "tool", "content": "x", "tool_call_id": 3}], ["message 0", "tool_call_id=3", "string"]),
        ([{"role": "user", "content": "x", "name": LONE}], ["message 0", "name", "lone surrogate"]),
        ([{"role": "assistant", "reasoning": LONE}], ["message 0", "reasoning", "lone surrogate"]),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], ["message 0", "tool call", "function"]),
        ([{"role": "assistant", "tool_calls": 3}], ["message 0", "tool_calls of type int"]),
        ([{"role": "assistant", "tool_calls": [call({"a": object()})]}], ["message 0", "not JSON"]),
        ([{"role": "assistant", "tool_calls": [call(LONE)]}], ["message 0", "'f'", "lone surrogate"]),
    ],
)
def test_a_malformed_message_is_named(messages: Any, words: list[str]) -> None:
    """F22: what cannot be encoded is refused, never recorded as something else."""
    with pytest.raises(RequestError) as error:
        normalize(messages, "model.chat")
    assert [word for word in ["model.chat", *words] if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"b": 1}', {"b": 1}),
        ("not json", "not json"),
        ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
        ('{"a": "\\ud83d"}', '{"a": "\\ud83d"}'),  # half of a pair cannot be written again
        ("[" * 100_000, "[" * 100_000),
        ("9" * 5000, "9" * 5000),  # more digits than Python reads
    ],
)
def test_arguments_are_data_where_that_can_be_written_again(text: str, value: Any) -> None:
    assert parsed_arguments(text) == value


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec=None)), inner),
        max_leaves=5,
    )
)
def test_any_arguments_give_a_call_or_a_request_error(arguments: Any) -> None:
    try:
        clean = normalize_call(call(arguments), "here")
    except RequestError:
        return
    clean["function"]["arguments"].encode()
    parsed_arguments(clean["function"]["arguments"])
