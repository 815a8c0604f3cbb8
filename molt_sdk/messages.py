"""Well-formed messages from whatever users pass."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from molt_sdk.errors import RequestError
from molt_sdk.types import Message, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool")


def normalize(messages: str | Sequence[Message], place: str) -> list[Message]:
    """A list of well-formed messages: text becomes a user message, None content becomes "", text parts are joined.

    Raises:
        RequestError: naming the message and what is wrong with it.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"{place}: messages must be a string or a list of messages, got {type(messages).__name__}")
    if not messages:
        raise RequestError(f"{place}: messages is empty; give at least one message")
    return [_normalize_one(message, f"{place}: message {i}") for i, message in enumerate(messages)]


def _normalize_one(message: Any, place: str) -> Message:
    if not isinstance(message, Mapping) or "role" not in message:
        raise RequestError(f"{place} is {message!r}; a message is a dict with a role and a content")
    if message["role"] not in ROLES:
        raise RequestError(f"{place} has role {message['role']!r}; use one of {', '.join(ROLES)}")
    if "content" not in message and message["role"] != "assistant":  # an assistant may only call tools
        raise RequestError(f"{place} has no content (keys: {', '.join(map(str, message))})")
    clean: Message = {"role": message["role"], "content": _content_text(message.get("content"), place)}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
            raise RequestError(f"{place} has tool_calls of type {type(calls).__name__}; use a list of tool calls")
        clean["tool_calls"] = [normalize_call(call, place) for call in calls]
    for key in ("tool_call_id", "name", "reasoning"):
        value = message.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise RequestError(f"{place} has {key}={value!r:.80} of type {type(value).__name__}; use a string")
            clean[key] = encodable(value, f"{place}, {key},")
    return clean


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


def _content_text(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return encodable(content, place)
    if isinstance(content, Sequence):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise RequestError(f"{place} has a content part of type {kind!r}; only text parts are supported")
        return _content_text("".join(part["text"] for part in content), place)
    raise RequestError(f"{place} has content of type {type(content).__name__}; use a string or a list of text parts")


def normalize_call(call: Any, place: str) -> ToolCall:
    """A well-formed tool call in objects of its own. Raises RequestError."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place} has a tool call {call!r}; expected {{id, type, function: {{name, arguments}}}}")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        try:
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{place} has a tool call whose arguments are not JSON: {error}") from None
    place = f"{place}, tool call {function['name']!r},"
    return {
        "id": encodable(str(call.get("id") or ""), place),
        "type": "function",
        "function": {"name": encodable(function["name"], place), "arguments": encodable(arguments, place)},
    }


def parsed_arguments(arguments: str) -> Any:
    """Arguments as data when they are JSON that can be written again, else the text itself."""
    try:
        value = json.loads(arguments)
        if "\\ud" in arguments.lower():  # an escaped surrogate may lack its other half
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return value


def first_difference(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Index of the first item that differs; the shorter length where one is a prefix of the other."""
    differing = (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    return next(differing, min(len(before), len(after)))


def shown_difference(before: str, after: str, at: int) -> str:
    """Both texts around character ``at``, for an explanation."""
    near = slice(max(0, at - 12), at + 24)
    return f"{before[near]!r} became {after[near]!r}"
