"""Lineage of the turns of one trajectory while it is recorded: which turn a request extends, or why none.

Lineage rule: a request may extend an earlier turn whose messages + reply are a prefix of the request's messages (in
canonical form: text joined, arguments as parsed JSON, reasoning left out); the longest wins, ties go to the newest. The
match is only a candidate: the new prompt is the parent's ids plus a bridge verified on the template, else a new root.

A conversation that grows is held once, for all turns along it, and what a request repeats of it is recognised by plain
comparison: reading one more message costs the same at the end of a long conversation as at its start.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from molt_sdk.messages import (
    first_difference,
    match_results,
    normalize_one,
    parsed_arguments,
    settled,
    shown_difference,
)
from molt_sdk.rendering.window import Window
from molt_sdk.types import Message, ToolCall, Turn

COMPARED = 32
"""Latest turns that a request is compared with; keeps the cost of one call apart from the trajectory's length."""


def canonical(message: Message) -> bytes:
    """What makes two messages the same for lineage: a client that echoes a reply without its reasoning, with parsed
    arguments or with None for "" still continues it; any change of text, name or arguments does not. The name of a
    tool message is that of its call, whether or not the client repeats it. (A reply that is echoed without some of its
    parallel calls is restored first: what was left out is no change.)"""
    calls = [
        (call["function"]["name"], parsed_arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    name = message.get("name", "") if message["role"] != "tool" else ""
    parts = [message["role"], message.get("content") or "", calls, message.get("tool_call_id") or "", name]
    return json.dumps(parts, sort_keys=True).encode()  # JSON holds whatever a model writes: huge integers, odd escapes


def extend_key(key: bytes, message: Message) -> bytes:
    """Key of a conversation from the key of all but its last message (b"" for none)."""
    return hashlib.blake2b(key + canonical(message), digest_size=16).digest()


class Request(NamedTuple):
    """The messages of one call, read."""

    given: list[Any]
    """As the user gave them, in objects of their own."""
    messages: list[Message]
    """The same, well-formed."""
    keys: list[bytes]
    """One per non-empty prefix of the messages."""
    remarks: tuple[str, ...] = ()
    """What was restored of replies that were echoed incompletely."""


class Conversation:
    """Messages and token ids that grow turn by turn. It is shared: what a turn covers is a prefix of it."""

    def __init__(self, request: Request, token_ids: list[int]) -> None:
        self.given = request.given
        self.messages = request.messages
        self.keys = request.keys
        self.token_ids = token_ids

    def branch(self, messages: int, tokens: int) -> Conversation:
        """A prefix of it, to grow on its own."""
        request = Request(self.given[:messages], self.messages[:messages], self.keys[:messages])
        return Conversation(request, self.token_ids[:tokens])


class Node(NamedTuple):
    """A turn, and the part of a conversation that ends with its reply."""

    turn: Turn
    conversation: Conversation
    messages: int
    """Messages up to its reply."""
    tokens: int
    """Prompt + completion."""
    window: Window
    """What decides how a template continues the messages before the reply."""

    @property
    def token_ids(self) -> list[int]:
        """A new list of its prompt + completion."""
        return self.conversation.token_ids[: self.tokens]

    @property
    def keys(self) -> Sequence[bytes]:
        return self.conversation.keys


class Lineage:
    """The turns of one trajectory as conversations."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._nodes_by_key: defaultdict[bytes, list[Node]] = defaultdict(list)

    def read(self, messages: Sequence[Any], place: str, visible: Callable[[Turn], bool]) -> Request:
        """Well-formed messages with their keys. What an earlier conversation holds already is not read again, and a
        reply of a ``visible`` turn that a client echoed incompletely is as it was recorded.

        Raises RequestError naming the message and what is wrong with it.
        """
        known, same = self._repeated(messages)
        same = settled(known.messages, same) if known else 0
        given = known.given[:same] if known else []
        clean = known.messages[:same] if known else []
        for i in range(same, len(messages)):
            clean.append(normalize_one(messages[i], f"{place}: message {i}"))
            given.append(_owned(messages[i]))
        clean = match_results(clean, place, same)
        request = Request(given, clean, _extended(known.keys[:same] if known else [], clean))
        return self._restored(request, [node for node in self._nodes[-COMPARED:] if visible(node.turn)])

    def _restored(self, request: Request, nodes: Sequence[Node]) -> Request:
        """The request with replies of the closest of ``nodes`` instead of echoes that lack parallel calls, or that are
        split into text and calls."""
        while nodes:
            same, node = max(((_common(node.keys[: node.messages], request.keys), node) for node in nodes), key=_first)
            if same >= min(node.messages, len(request.messages)):
                break
            reply = node.conversation.messages[same]
            taken = _echo(reply, request.messages[same : same + 2])
            if not taken:
                break
            messages = [*request.messages[:same], reply, *request.messages[same + taken :]]
            remark = f"message {same} was echoed incompletely and is as it was sampled"
            keys = _extended(request.keys[:same], messages)
            request = Request(list(messages), messages, keys, (*request.remarks, remark))
        return request

    def _repeated(self, messages: Sequence[Any]) -> tuple[Conversation | None, int]:
        """The conversation of which the request repeats most, and how many messages; only the latest are looked at."""
        best: Conversation | None = None
        most = 0
        seen: set[int] = set()
        for node in reversed(self._nodes[-COMPARED:]):
            known = node.conversation
            if id(known) in seen:
                continue
            seen.add(id(known))
            length = min(len(known.given), len(messages))
            if length > most and _same(known.given[most : most + 1], messages[most : most + 1]):
                same = _same(known.given[:length], messages[:length])
                if same > most:
                    best, most = known, same
        return best, most

    def add(self, turn: Turn, parent: Node | None, request: Request, token_ids: list[int], window: Window) -> None:
        """Remember ``turn``; ``token_ids`` are its prompt + completion after those of its parent."""
        covered = len(request.messages)
        if parent is None:
            copied = Request(list(request.given), list(request.messages), list(request.keys))
            conversation = Conversation(copied, token_ids)
        else:
            conversation = parent.conversation
            if len(conversation.messages) > parent.messages:  # another turn went on from there
                conversation = conversation.branch(parent.messages, parent.tokens)
            conversation.given += request.given[parent.messages :]
            conversation.messages += request.messages[parent.messages :]
            conversation.keys += request.keys[parent.messages :]
            conversation.token_ids += token_ids
        conversation.given.append(_owned(turn.message))
        conversation.messages.append(turn.message)
        conversation.keys.append(extend_key(request.keys[-1], turn.message))
        node = Node(turn, conversation, covered + 1, len(conversation.token_ids), window)
        self._nodes.append(node)
        self._nodes_by_key[conversation.keys[-1]].append(node)

    def candidate(self, keys: Sequence[bytes], visible: Callable[[Turn], bool]) -> Node | None:
        """The node of the longest visible match, the newest on a tie."""
        for key in reversed(keys):
            for node in reversed(self._nodes_by_key.get(key, ())):
                if visible(node.turn):
                    return node
        return None

    def explain_new_root(
        self, request: Request, tools: Sequence[dict[str, Any]], visible: Callable[[Turn], bool]
    ) -> str:
        """Why a request extends no turn: the first message in which it differs from the closest of the latest."""
        nodes = [node for node in self._nodes[-COMPARED:] if visible(node.turn)]
        if not nodes:
            return "first call"
        asked = len(request.messages)

        def rank(node: Node) -> tuple[int, bool]:
            same = _common(node.keys[: node.messages], request.keys)
            return same, same == asked == node.messages - 1

        closest = max(reversed(nodes), key=rank)
        same, repeated = rank(closest)
        turn = closest.turn.id
        if repeated:
            same_tools = list(closest.turn.tools) == tools
            return f"same prompt as turn {turn}" if same_tools else f"same messages as turn {turn}, with other tools"
        if same >= asked:
            return f"history of turn {turn} was cut to its first {asked} messages"
        return f"differs from turn {turn}: {_difference(same, closest, request.messages[same])}"


def _extended(keys: list[bytes], messages: Sequence[Message]) -> list[bytes]:
    """Keys of all messages from those of the first."""
    start = keys[-1] if keys else b""
    return [*keys, *itertools.islice(itertools.accumulate(messages[len(keys) :], extend_key, initial=start), 1, None)]


def _first(pair: tuple[int, Node]) -> int:
    return pair[0]


def _echo(reply: Message, given: Sequence[Message]) -> int:
    """How many messages are an incomplete echo of a reply: one that lacks some of its parallel calls, or two of which
    the first has its text and the second its calls. 0 if it was changed."""
    calls = [_call_json(call) for call in reply.get("tool_calls") or ()]
    if not calls or any(message["role"] != "assistant" for message in given[:1]):
        return 0
    first, *rest = given
    parts = [first]
    if not first.get("tool_calls") and rest and rest[0]["role"] == "assistant" and not rest[0].get("content"):
        parts.append(rest[0])
    kept = [_call_json(call) for call in parts[-1].get("tool_calls") or ()]
    wanted = iter(calls)
    if first.get("content") != reply.get("content") or not kept or not all(call in wanted for call in kept):
        return 0
    return len(parts)


def _call_json(call: ToolCall) -> str:
    return json.dumps([call["function"]["name"], parsed_arguments(call["function"]["arguments"])], sort_keys=True)


def _owned(given: Any) -> Any:
    """A copy that stays the same whatever the user does to the original."""
    if isinstance(given, dict):
        return {key: value if type(value) is str else _owned(value) for key, value in given.items()}
    return [_owned(item) for item in given] if isinstance(given, list | tuple) else given


def _same(known: Sequence[Any], messages: Sequence[Any]) -> int:
    """How many leading messages are equal. What cannot be compared differs."""
    try:
        return len(known) if known == messages else first_difference(known, messages)
    except Exception:  # the comparison of an object that a user put into a message
        return 0


def _common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many leading keys are equal. Keys are chained: where two differ, all later ones do."""
    shorter = range(min(len(one), len(other)))
    return bisect.bisect_left(shorter, True, key=lambda i: one[i] != other[i])


def _difference(index: int, closest: Node, after: Message) -> str:
    before = closest.conversation.messages[index]
    if before["role"] != after["role"]:
        return f"message {index} changed its role from {before['role']} to {after['role']}"
    old, new = str(before.get("content") or ""), str(after.get("content") or "")
    if old != new:
        at = first_difference(old, new)
        return f"message {index} ({after['role']}) changed at character {at}: {shown_difference(old, new, at)}"
    if after["role"] != "tool" and before.get("name") != after.get("name"):
        return f"message {index} ({after['role']}) has another name"
    return f"message {index} ({after['role']}) has other tool calls or another tool_call_id"
