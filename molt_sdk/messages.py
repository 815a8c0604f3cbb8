"""Well-formed messages from whatever users pass: each by itself, then together as a conversation.

Rules of a conversation:

- A ``tool`` message answers a call of the assistant message before it; only other results may stand between the two.
  It is matched by ``tool_call_id``, without one by the ``name`` of the function, without that if a single call is
  pending, and put in the order of the calls: many templates place results by position. Nothing is guessed: a result
  that fits several calls, none, or an answered one is an error.
- Calls of one message that lack an id or share one get ids of their own, made of their position in the conversation.
  Their results are told apart by name, or by order if all of them are there: they can be written in no other way.
- A call may stay without a result.
- A result without ``tool_call_id`` where no call is pending answers text that the SDK could not read as a call: the
  errors that ``model.run`` sends back, or the results of an agent that reads calls from the text itself. It follows the
  results of the calls that could be read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from molt_sdk.errors import RequestError
from molt_sdk.types import Message, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text, and the key that holds it."""


def normalize(messages: str | Sequence[Message], place: str) -> list[Message]:
    """A list of well-formed messages: text becomes a user message, None content becomes "", text parts are joined,
    results stand behind their calls. Normalizing the list again changes nothing.

    Raises:
        RequestError: naming the message and what is wrong with it.
    """
    messages = message_list(messages, place)
    return match_results([normalize_one(message, f"{place}: message {i}") for i, message in enumerate(messages)], place)


def message_list(messages: str | Sequence[Any], place: str) -> list[Any]:
    """The messages as they are, text as one user message. Raises RequestError for anything but a list of some."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"{place}: messages must be a string or a list of messages, got {type(messages).__name__}")
    if not messages:
        raise RequestError(f"{place}: messages is empty; give at least one message")
    return list(messages)


def match_results(messages: Sequence[Message], place: str, first: int = 0) -> list[Message]:
    """The conversation with each tool result behind its call; see the rules at the top.

    ``messages`` are well-formed one by one, and those before index ``first`` also together, so that they stay as they
    are up to where they are :func:`settled`. No message is changed in place.

    Raises:
        RequestError: a result that answers no call, an answered one, or one of several.
    """
    first = settled(messages, first)
    matched = list(messages[:first])
    while first < len(messages):
        end = first + 1
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        message = messages[first]
        if message["role"] == "tool" or (message["role"] != "assistant" and end > first + 1):
            index = first if message["role"] == "tool" else first + 1
            raise RequestError(
                f"{place}: message {index} is a tool result, but no assistant message stands before it; results follow "
                "the message whose calls they answer"
            )
        matched += _answered(message, messages[first + 1 : end], first, place)
        first = end
    return matched


def settled(messages: Sequence[Message], count: int) -> int:
    """How many of the first ``count`` messages of a checked conversation stay as they are whatever follows them: all
    but the last one that is no result, and what stands behind it. Results are matched, and ids of calls made unique,
    together; whoever reads the others again has to read them as they were given."""
    while count > 0 and messages[count - 1]["role"] == "tool":
        count -= 1
    return max(count - 1, 0)


def _answered(message: Message, results: Sequence[Message], index: int, place: str) -> list[Message]:
    """One message that is no result, at ``index`` of the conversation, and the results behind it in their order."""
    given = message.get("tool_calls") or []
    calls = _with_unique_ids(given, index)
    if calls != given:
        message = {**message, "tool_calls": calls}
    groups: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for i, result in enumerate(results):
        groups[result.get("tool_call_id", ""), result.get("name", "")].append(i)
    pending = list(range(len(calls)))
    result_of: dict[int, int] = {}  # by call
    free: list[int] = []
    for (wanted, name), members in sorted(groups.items(), key=lambda item: (not item[0][0], not item[0][1])):
        if not wanted and not pending:
            free += members
            continue
        fitting = [c for c in pending if wanted in ("", given[c]["id"])]
        if name and (len(fitting) > 1 or not wanted):
            named = [c for c in fitting if given[c]["function"]["name"] == name]
            fitting = named if named or not wanted else fitting
        by_order = len({given[c]["id"] for c in fitting}) == 1  # also where only one fits
        if not by_order or len(fitting) != len(members):
            known = any(call["id"] == wanted for call in given)
            surplus = known and len(members) > len(fitting)
            where = f"{place}: message {index + 1 + members[len(fitting) if fitting and surplus else 0]}"
            raise _unmatched(where, wanted, name, [given[c] for c in pending], known=known, surplus=surplus)
        result_of.update(zip(fitting, members, strict=True))
        pending = [c for c in pending if c not in fitting]
    answers = [_answer(results[result_of[c]], call) for c, call in enumerate(calls) if c in result_of]
    return [message, *answers, *(results[i] for i in sorted(free))]


def _answer(result: Message, call: ToolCall) -> Message:
    """The result with the id of its call, and with the name of the function if it has none: some templates show it."""
    answer: Message = {**result, "tool_call_id": call["id"]}
    answer.setdefault("name", call["function"]["name"])
    return answer


def _unmatched(
    where: str, wanted: str, name: str, pending: Sequence[ToolCall], *, known: bool, surplus: bool
) -> RequestError:
    listed = ", ".join(f"{call['id']!r} of {call['function']['name']}" for call in pending) or "none"
    if wanted and not known:
        return RequestError(
            f"{where} has tool_call_id={wanted!r}, which no pending call has; pending calls: {listed}. A result "
            "follows the assistant message that holds the call in its tool_calls"
        )
    if wanted and surplus:
        return RequestError(f"{where} is one result too many for the tool call {wanted!r}; give one result per call")
    if name and all(call["function"]["name"] != name for call in pending):
        return RequestError(f"{where} is a result of {name!r}, which no pending call names; pending calls: {listed}")
    shared = len({call["id"] for call in pending}) < len(pending)
    advice = "Give each call an id of its own and set" if shared else "Set"
    return RequestError(
        f"{where} has {f'tool_call_id={wanted!r}' if wanted else 'no tool_call_id'} and is ambiguous; pending calls: "
        f"{listed}. {advice} tool_call_id to the id of the call that it answers"
    )


def _with_unique_ids(calls: Sequence[ToolCall], index: int) -> list[ToolCall]:
    """The calls of message ``index`` with ids that differ; the first of those that share an id keeps it."""
    taken = {call["id"] for call in calls}
    seen = {""}
    unique: list[ToolCall] = []
    for i, call in enumerate(calls):
        if call["id"] in seen:
            made = f"call_at_{index}_{i}"
            while made in taken:
                made += "_"
            taken.add(made)
            call = {**call, "id": made}
        seen.add(call["id"])
        unique.append(call)
    return unique


def normalize_one(message: Any, place: str) -> Message:
    """One message by itself. Keys that mean nothing here are left out; reasoning is also read from
    ``reasoning_content``, and a refusal is the content of a message without one."""
    if not isinstance(message, Mapping) or "role" not in message:
        advice = "; append reply.message" if isinstance(getattr(message, "message", None), Mapping) else ""
        raise RequestError(f"{place} is {message!r:.200}; a message is a dict with a role and a content{advice}")
    role = message["role"]
    if role not in ROLES:
        raise RequestError(f"{place} has role {role!r}; use one of {', '.join(ROLES)}")
    if "content" not in message and role != "assistant":  # an assistant may only call tools
        raise RequestError(f"{place} has no content (keys: {', '.join(map(str, message))})")
    clean: Message = {"role": role, "content": _content_text(message.get("content"), role, place)}
    if role == "assistant":
        _add_assistant_keys(clean, message, place)
    elif message.get("tool_calls"):
        raise RequestError(f"{place} has tool_calls and the role {role}; only an assistant calls tools")
    elif role == "tool" and (call_id := _text_of(message, "tool_call_id", place)):
        clean["tool_call_id"] = call_id
    if name := _text_of(message, "name", place):
        clean["name"] = name
    return clean


def _add_assistant_keys(clean: Message, message: Mapping[str, Any], place: str) -> None:
    if not clean["content"] and (refusal := _text_of(message, "refusal", place)):
        clean["content"] = refusal
    if calls := message.get("tool_calls"):
        if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
            raise RequestError(f"{place} has tool_calls of type {type(calls).__name__}; use a list of tool calls")
        clean["tool_calls"] = [normalize_call(call, place) for call in calls]
    if message.get("function_call"):
        raise RequestError(f"{place} has a function_call, which is OpenAI's old form; use tool_calls")
    thoughts = [_text_of(message, key, place) for key in ("reasoning", "reasoning_content")]
    if any(thought is not None for thought in thoughts):
        clean["reasoning"] = thoughts[0] or thoughts[1] or ""


def _text_of(message: Mapping[str, Any], key: str, place: str) -> str | None:
    """The text under ``key``; None where there is none."""
    value = message.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise RequestError(f"{place} has {key}={value!r:.80} of type {type(value).__name__}; use a string")
    return encodable(value, f"{place}, {key},")


def copied(message: Message) -> Message:
    """The same message in objects of its own: what a user does to it changes no record."""
    copy: Message = {**message}
    if "tool_calls" in message:
        copy["tool_calls"] = [{**call, "function": {**call["function"]}} for call in message["tool_calls"]]
    return copy


def encodable(text: str, place: str) -> str:
    """The text itself. Raises RequestError if it holds half of a surrogate pair, which no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{place} holds a lone surrogate at character {error.start}; the tokenizer cannot encode it"
        ) from None
    return text


def _content_text(content: Any, role: str, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return encodable(content, place)
    advice = "; write the result as text, for example with json.dumps(...)" if role == "tool" else ""
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        raise RequestError(
            f"{place} has content of type {type(content).__name__}; use a string or a list of text parts{advice}"
        )
    return encodable("".join(_part_text(part, advice, place) for part in content), place)


def _part_text(part: Any, advice: str, place: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else part
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    text = part.get(key) if isinstance(part, Mapping) and key else None
    if not isinstance(text, str):
        raise RequestError(f"{place} has a content part of type {kind!r:.80}; only text parts are supported{advice}")
    return text


def normalize_call(call: Any, place: str) -> ToolCall:
    """A well-formed tool call in objects of its own. Raises RequestError.

    Arguments are JSON text: None and "" become "{}", data is written as JSON, an object that is written as a JSON
    string is unwrapped. All other text stays as it is, also what is no JSON.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"{place} has a tool call {call!r:.200}; expected {{id, type, function: {{name, arguments}}}}"
        )
    place = f"{place}, tool call {function['name']!r},"
    return {
        "id": _text_of(call, "id", place) or "",
        "type": "function",
        "function": {
            "name": encodable(function["name"], place),
            "arguments": encodable(_arguments_text(function.get("arguments"), place), place),
        },
    }


def _arguments_text(arguments: Any, place: str) -> str:
    if not isinstance(arguments, str):
        try:
            return json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{place} has arguments that are not JSON: {error}") from None
    text = arguments.strip()
    if text.startswith('"'):
        inner = parsed_arguments(text)
        if isinstance(inner, str) and isinstance(parsed_arguments(inner or "{}"), dict):
            text = arguments = inner
    return arguments if text not in ("", "null") else "{}"


def parsed_arguments(arguments: str) -> Any:
    """Arguments as data when they are JSON that can be written and shown again, else the text itself."""
    try:
        value = json.loads(arguments)
        if too_deep(value):
            return arguments
        if "\\ud" in arguments.lower():  # an escaped surrogate may lack its other half
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return value


MAX_DEPTH = 64
"""Of arguments: templates and their helpers recurse."""


def too_deep(value: Any) -> bool:
    """Whether JSON data is nested deeper than templates can show."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


def first_difference(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Index of the first item that differs; the shorter length where one is a prefix of the other."""
    differing = (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    return next(differing, min(len(before), len(after)))


def shown_difference(before: str, after: str, at: int) -> str:
    """Both texts around character ``at``, for an explanation; "…" stands where they were cut."""
    return f"{_excerpt(before, at)} became {_excerpt(after, at)}"


def _excerpt(text: str, at: int) -> str:
    start, end = max(0, at - 12), at + 24
    return f"{'…' * (start > 0)}{text[start:end]!r}{'…' * (end < len(text))}"
