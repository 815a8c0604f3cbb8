"""Whatever shape a user's messages have, what is recorded is well-formed, or the error names the message."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_sdk.errors import RequestError
from molt_sdk.messages import copied, match_results, normalize, normalize_call, parsed_arguments


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
        ({"a": '<"é"\n>'}, '{"a": "<\\"é\\"\\n>"}'),  # no escapes but those that JSON needs
        (None, "{}"),
        ({}, "{}"),
        ("", "{}"),
        (" \n", "{}"),
        ("null", "{}"),
        ('""', "{}"),
        (json.dumps('{"city":"X", "b":1}'), '{"city":"X", "b":1}'),  # JSON in a JSON string
        (json.dumps('["X"]'), json.dumps('["X"]')),  # only an object is meant as arguments
        ('"Rome"', '"Rome"'),
        ('{"a": "{}"}', '{"a": "{}"}'),
        ("[1]", "[1]"),
        ([1], "[1]"),
        ("not json", "not json"),  # what it means is for the tool to say
    ],
)
def test_f32_f34_arguments_are_json_text(arguments: Any, text: str) -> None:
    """F32, F34: a dict, a string, and a string in a string are the same call."""
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
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], ["message 0", "'text'"]),
        ([{"role": "user", "content": [{"type": ["text"], "text": "x"}]}], ["message 0", "['text']"]),
        ([{"role": "user", "content": b"x"}], ["message 0", "bytes"]),
        ([{"role": "tool", "content": {"a": 1}}], ["message 0", "dict", "json.dumps"]),
        ([{"role": "tool", "content": 3}], ["message 0", "int", "json.dumps"]),
        ([{"role": "tool", "content": [1, 2]}], ["message 0", "type 1", "json.dumps"]),
        ([{"role": "tool", "content": [{"type": "image_url"}]}], ["message 0", "'image_url'", "only text parts"]),
        ([{"role": "user", "content": "x", "tool_calls": [call("{}")]}], ["message 0", "tool_calls", "role user"]),
        ([{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}], ["message 0", "use tool_calls"]),
        ([{"role": "assistant", "reasoning_content": 3}], ["message 0", "reasoning_content=3", "string"]),
        ([{"role": "assistant", "refusal": LONE}], ["message 0", "refusal", "lone surrogate"]),
        ([{"role": "assistant", "tool_calls": [call("{}", id=LONE)]}], ["message 0", "'f'", "id", "lone surrogate"]),
        ([{"role": "assistant", "tool_calls": [call("{}", id=7)]}], ["message 0", "'f'", "id=7", "string"]),  # type: ignore
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


# --- shapes of an assistant message -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "clean"),
    [
        ({"content": None, "tool_calls": None, "function_call": None, "refusal": None, "audio": None}, {"content": ""}),
        ({"content": [{"type": "output_text", "text": "a", "annotations": []}]}, {"content": "a"}),
        ({"content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]}, {"content": "ano"}),
        ({"content": None, "refusal": "I can't."}, {"content": "I can't."}),
        ({"content": "hi", "refusal": "I can't."}, {"content": "hi"}),
        ({"content": "a", "reasoning_content": "r"}, {"content": "a", "reasoning": "r"}),
        ({"content": "a", "reasoning": "r", "reasoning_content": "r"}, {"content": "a", "reasoning": "r"}),
        ({"content": "a", "reasoning": "", "reasoning_content": "r"}, {"content": "a", "reasoning": "r"}),
        ({"content": "a", "reasoning": "", "reasoning_content": None}, {"content": "a", "reasoning": ""}),
        ({"content": "a", "reasoning_details": [{"type": "x"}], "name": "bot"}, {"content": "a", "name": "bot"}),
        ({"content": "a", "tool_call_id": "c1"}, {"content": "a"}),
    ],
)
def test_assistant_messages_in_other_shapes(given: dict[str, Any], clean: dict[str, Any]) -> None:
    message: Any = {"role": "assistant", **given}
    assert normalize([message], "here") == [{"role": "assistant", **clean}]


def test_input_text_parts_are_text() -> None:
    given: Any = [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert normalize(given, "here") == [{"role": "user", "content": "ab"}]


# --- results and their calls ------------------------------------------------------------------------------------------


def asks(*calls: tuple[str, str]) -> dict[str, Any]:
    """An assistant message with calls, given as (id, name of the function)."""
    return {"role": "assistant", "content": "", "tool_calls": [call("{}", name, id) for id, name in calls]}


def result(content: str, id: str | None = None, name: str | None = None) -> dict[str, Any]:
    message = {"role": "tool", "content": content}
    return message | ({} if id is None else {"tool_call_id": id}) | ({} if name is None else {"name": name})


USER: dict[str, Any] = {"role": "user", "content": "q"}


def placed(*messages: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(id, content, name) of the results behind the last call."""
    clean = normalize([USER, *messages], "model.chat")  # type: ignore[list-item]
    return [(m.get("tool_call_id", ""), str(m["content"]), m.get("name", "")) for m in clean if m["role"] == "tool"]


def refusal(*messages: dict[str, Any]) -> str:
    with pytest.raises(RequestError) as error:
        normalize([USER, *messages], "model.chat")  # type: ignore[list-item]
    assert str(error.value).startswith("model.chat: message ")
    return str(error.value)


THREE = asks(("c1", "weather"), ("c2", "time"), ("c3", "weather"))


@pytest.mark.parametrize("order", list(itertools.permutations(["c1", "c2", "c3"])))
def test_f40_results_stand_in_the_order_of_their_calls(order: tuple[str, ...]) -> None:
    """F40: whatever the order in which they are sent."""
    in_order = [("c1", "of c1", "weather"), ("c2", "of c2", "time"), ("c3", "of c3", "weather")]
    assert placed(THREE, *(result(f"of {id}", id) for id in order)) == in_order


def test_f40_an_id_that_no_pending_call_has_is_refused() -> None:
    """F40: the message, the id and what is pending are named."""
    error = refusal(THREE, result("1", "c1"), result("?", "c9"))
    assert "message 3 has tool_call_id='c9'" in error
    assert "pending calls: 'c2' of time, 'c3' of weather" in error


@pytest.mark.parametrize("between", [[asks(("d1", "f"))], [{"role": "assistant", "content": "x"}], [USER]])
def test_f40_a_result_belongs_to_the_message_before_it(between: list[dict[str, Any]]) -> None:
    """A result that comes later would be put where another call's result is expected."""
    assert "message 3 " in refusal(THREE, *between, result("1", "c1"))


def test_a_result_needs_an_assistant_message_before_it() -> None:
    assert "message 1 is a tool result, but no assistant message stands before it" in refusal(result("1"))
    with pytest.raises(RequestError, match="message 0 is a tool result"):
        normalize([result("1", "c1"), USER], "here")  # type: ignore[list-item]


def test_two_results_of_one_call_are_refused() -> None:
    assert "message 3 is one result too many for the tool call 'c2'" in refusal(
        THREE, result("1", "c2"), result("2", "c2")
    )


def test_f41_a_result_without_an_id_is_matched_if_one_call_is_pending() -> None:
    """F41: also where ids of other results leave one call over, before it or behind it."""
    for lacking in (None, ""):
        assert placed(asks(("c1", "f")), result("1", lacking)) == [("c1", "1", "f")]
        in_order = [("c1", "1", "weather"), ("c2", "2", "time"), ("c3", "3", "weather")]
        assert placed(THREE, result("2", lacking), result("3", "c3"), result("1", "c1")) == in_order


@pytest.mark.parametrize(
    "results",
    [
        [result("1")],
        [result("1"), result("2")],
        [result("1"), result("2"), result("3")],  # as many as calls: their order still says nothing
        [result("2", "c2"), result("1")],
        [result("1", name="weather")],
        [result("1", name="weather"), result("3", name="weather")],
    ],
)
def test_f41_a_result_that_fits_several_calls_is_ambiguous(results: list[dict[str, Any]]) -> None:
    """F41: calls with ids are never answered first in, first out."""
    error = refusal(THREE, *results)
    assert "no tool_call_id and is ambiguous" in error
    assert "Set tool_call_id" in error


def test_f41_two_results_without_ids_for_one_call_are_ambiguous() -> None:
    assert "message 2 has no tool_call_id and is ambiguous" in refusal(asks(("c1", "f")), result("1"), result("2"))


def test_f41_the_name_of_the_function_tells_calls_apart() -> None:
    """The form of transformers, which has names and no ids."""
    calls = asks(("", "weather"), ("", "time"))
    expected = [("call_at_1_0", "rain", "weather"), ("call_at_1_1", "noon", "time")]
    assert placed(calls, result("noon", name="time"), result("rain", name="weather")) == expected
    assert placed(THREE, result("noon", name="time")) == [("c2", "noon", "time")]
    assert "result of 'date', which no pending call names" in refusal(THREE, result("x", name="date"))
    # an id decides, whatever the name says
    assert placed(asks(("c1", "f")), result("1", "c1", "shown")) == [("c1", "1", "shown")]


@pytest.mark.parametrize("id", ["", "c1"])
def test_f38_calls_that_share_an_id_get_ids_of_their_own(id: str) -> None:
    """F38: empty or repeated ids. Their results have nothing but order, so all of them have to be there."""
    calls = asks((id, "f"), (id, "f"))
    first = id or "call_at_1_0"
    clean = normalize([USER, calls, USER, calls], "here")  # type: ignore[list-item]
    assert [[c["id"] for c in m["tool_calls"]] for m in clean[1::2]] == [
        [first, "call_at_1_1"],
        [id or "call_at_3_0", "call_at_3_1"],
    ]
    assert placed(calls, result("1", id), result("2", id)) == [(first, "1", "f"), ("call_at_1_1", "2", "f")]
    error = refusal(calls, result("1", id))
    assert "ambiguous" in error
    assert "Give each call an id of its own" in error
    mixed = asks((id, "f"), (id, "g"))
    assert placed(mixed, result("2", id, "g"), result("1", id, "f")) == [(first, "1", "f"), ("call_at_1_1", "2", "g")]


def test_f38_only_calls_without_an_id_are_answered_by_order() -> None:
    calls = asks(("", "f"), ("c2", "f"))
    assert "ambiguous" in refusal(calls, result("1"), result("2"))
    assert placed(calls, result("2", "c2"), result("1")) == [("call_at_1_0", "1", "f"), ("c2", "2", "f")]


def test_f38_a_made_id_is_not_that_of_another_call() -> None:
    clean = normalize([USER, asks(("", "f"), ("call_at_1_0", "g"), ("", "h"))], "here")  # type: ignore[list-item]
    assert [c["id"] for c in clean[1]["tool_calls"]] == ["call_at_1_0_", "call_at_1_0", "call_at_1_2"]


def test_a_call_may_stay_without_a_result() -> None:
    assert placed(THREE, result("3", "c3"), result("1", "c1")) == [("c1", "1", "weather"), ("c3", "3", "weather")]
    assert placed(THREE, USER) == []


def test_results_where_no_call_is_pending_answer_text_that_was_not_read_as_a_call() -> None:
    """What ``model.run`` sends for unreadable calls; it stands behind the results of those that could be read."""
    error = result("Error: A tool call was not executed")
    said: dict[str, Any] = {"role": "assistant", "content": "<tool_call>"}
    assert placed(said, error, error) == [("", error["content"], "")] * 2
    assert placed(asks(("c1", "f")), error, result("1", "c1"), error) == [
        ("c1", "1", "f"),
        ("", error["content"], ""),
        ("", error["content"], ""),
    ]
    assert "tool_call_id='c1', which no pending call has; pending calls: none" in refusal(said, result("1", "c1"))


CONVERSATIONS = st.lists(
    st.one_of(
        st.just(USER),
        st.just({"role": "assistant", "content": "a"}),
        st.lists(st.tuples(st.sampled_from(["", "c1", "c2", "call_at_0_0"]), st.sampled_from("fg")), max_size=3).map(
            lambda calls: asks(*calls)
        ),
        st.builds(
            result, st.sampled_from("123"), st.sampled_from([None, "", "c1", "c2"]), st.sampled_from([None, "f", "g"])
        ),
    ),
    min_size=1,
    max_size=8,
)


@given(CONVERSATIONS, st.integers(0, 8))
def test_normalizing_twice_or_from_any_message_on_is_the_same(messages: list[Any], first: int) -> None:
    """What was checked once can be used again, and nothing that was given is changed."""
    given = copy.deepcopy(messages)
    try:
        clean = normalize(messages, "here")
    except RequestError:
        assert messages == given
        return
    assert messages == given
    assert normalize(clean, "here") == clean
    known = copy.deepcopy(clean)
    assert match_results(clean, "here", min(first, len(clean))) == clean
    assert clean == known


@given(st.permutations(["c1", "c2", "c3"]), st.integers(0, 3))
def test_results_that_follow_checked_ones_are_matched_with_them(order: list[str], known: int) -> None:
    whole: Any = [USER, THREE, *(result(id, id) for id in order)]
    checked = normalize(whole[: 2 + known], "here")
    assert match_results([*checked, *whole[2 + known :]], "here", first=len(checked)) == normalize(whole, "here")


def test_a_reply_in_place_of_its_message_is_refused_with_advice() -> None:
    class Reply:
        message: Any = {"role": "assistant", "content": "a"}  # noqa: RUF012

    with pytest.raises(RequestError, match=r"here: message 1 is .*; append reply\.message"):
        normalize([USER, Reply()], "here")  # type: ignore[list-item]
    with pytest.raises(RequestError, match=r"message 0 is 3; a message is a dict with a role and a content$"):
        normalize([3], "here")  # type: ignore[list-item]
