"""Lineage of the turns of one trajectory while it is recorded: which turn a request extends, or why none.

Lineage rule: a request may extend an earlier turn whose messages + reply are a prefix of the request's messages (in
canonical form: text joined, arguments as parsed JSON, reasoning left out); the longest wins, ties go to the newest. The
match is only a candidate: the new prompt is the parent's ids plus a bridge verified on the template, else a new root.

A conversation that grows is held once, for all turns along it, and what a request repeats of it, in whatever form the
client sends it, is recognised by plain comparison: reading one more message costs the same at the end of a long
conversation as at its start.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from molt_sdk.messages import (
    first_difference,
    match_results,
    normalize_one,
    parsed_arguments,
    settled,
    shown_difference,
)
from molt_sdk.rendering.window import Window, window_of
from molt_sdk.types import Message, ToolCall, Turn

COMPARED = 32
"""Latest turns that a request is compared with; keeps the cost of one call apart from the trajectory's length."""

SETTLED: Message = {"role": "user", "content": ""}
"""Stands for a message that needs no other look when those behind it are read."""


def canonical(message: Message) -> bytes:
    """What makes two messages the same for lineage: a client that echoes a reply without its reasoning, with parsed
    arguments or with None for "" still continues it; any change of text, name or arguments does not. The name of a
    tool message is that of its call, whether or not the client repeats it. (A reply that is echoed without some of its
    parallel calls is restored first: what was left out is no change.)"""
    calls = [_call_data(call) for call in message.get("tool_calls") or ()]
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
    ends: list[int]
    """How many of ``given`` each of ``messages`` and those before it were made of: a reply may be echoed in two."""
    messages: list[Message]
    """Well-formed. A reply that was echoed incompletely is as it was sampled."""
    keys: list[bytes]
    """One per non-empty prefix of the messages."""
    restored: list[int]
    """Indices of the messages that were echoed incompletely."""

    def first(self, count: int) -> Request:
        """A copy of its first ``count`` messages."""
        given = self.ends[count - 1] if count else 0
        restored = self.restored[: bisect.bisect_left(self.restored, count)]
        return Request(self.given[:given], self.ends[:count], self.messages[:count], self.keys[:count], restored)

    def append(self, message: Message, taken: int = 1) -> None:
        """Take up the next message, made of the next ``taken`` of ``given``."""
        self.ends.append((self.ends[-1] if self.ends else 0) + taken)
        self.messages.append(message)
        self.keys.append(extend_key(self.keys[-1] if self.keys else b"", message))


class Conversation:
    """Messages and token ids that grow turn by turn. It is shared: what a turn covers is a prefix of it."""

    def __init__(self, messages: list[Message], token_ids: list[int], read: Request) -> None:
        self.messages = messages
        """Every reply as it was sampled."""
        self.token_ids = token_ids
        self.read = read
        """The same messages, as the latest request gave them: its client will most likely give them so again."""


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

    def common(self, request: Request) -> int:
        """How many of its messages the request begins with. Keys are chained: where two differ, all later ones do."""
        keys = self.conversation.read.keys
        shorter = range(min(self.messages, len(request.keys)))
        return bisect.bisect_left(shorter, True, key=lambda i: keys[i] != request.keys[i])

    def behind(self, request: Request) -> list[Message]:
        """The messages of a request that goes on with this turn; results have the ids that their calls were given, not
        those that the client made of them."""
        given = request.messages[self.messages - 1].get("tool_calls") or ()
        sampled = self.turn.message.get("tool_calls") or ()
        ids = {call["id"]: own["id"] for call, own in zip(given, sampled, strict=True)}
        new = request.messages[self.messages :]
        results = itertools.takewhile(lambda message: message["role"] == "tool", new)
        renamed = [_renamed(result, ids) for result in results]
        return renamed + new[len(renamed) :]


class Lineage:
    """The turns of one trajectory as conversations."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._nodes_by_key: defaultdict[bytes, list[Node]] = defaultdict(list)
        self._nodes_by_prompt: defaultdict[bytes, list[Node]] = defaultdict(list)

    def read(self, messages: Sequence[Any], place: str, visible: Callable[[Turn], bool]) -> Request:
        """Well-formed messages with their keys. What a conversation of ``visible`` turns holds already is not read
        again, and a reply of such a turn that a client echoed incompletely is as it was sampled.

        Raises RequestError naming the message and what is wrong with it.
        """
        request = self._repeated(messages, visible)
        at = len(request.given)
        new = [normalize_one(messages[i], f"{place}: message {i}") for i in range(at, len(messages))]
        request.given.extend(map(_kept, messages[at:]))
        new = match_results([SETTLED] * at + new, place, at)[at:]
        ids: dict[str, str] = {}  # for the results behind an incomplete echo
        at = 0
        while at < len(new):
            message, taken = new[at], 1
            if message["role"] == "tool":
                message = _renamed(message, ids)
            elif message["role"] == "assistant" and (echo := self._incomplete_echo(request.keys, new[at:], visible)):
                message, (taken, ids) = echo
                request.restored.append(len(request.messages))
            else:
                ids = {}
            request.append(message, taken)
            at += taken
        return request

    def _repeated(self, messages: Sequence[Any], visible: Callable[[Turn], bool]) -> Request:
        """What is known of the messages from the conversation of which they repeat most; only the latest are looked
        at."""
        best: Request | None = None
        most = 0
        for node in _one_of_each(_latest(self._nodes, visible)):
            known = node.conversation.read
            length = min(known.ends[node.messages - 1], len(messages))
            if length > most and _same(known.given[most : most + 1], messages[most : most + 1]):
                same = _same(known.given[:length], messages[:length])
                if same > most:
                    best, most = known, same
        if best is None:
            return Request([], [], [], [], [])
        return best.first(settled(best.messages, bisect.bisect_right(best.ends, most)))

    def _incomplete_echo(
        self, keys: Sequence[bytes], given: Sequence[Message], visible: Callable[[Turn], bool]
    ) -> tuple[Message, _Echo] | None:
        """The reply to the conversation of ``keys`` of which ``given`` begins with an incomplete echo: the one with the
        ids of its calls, else the newest. None where ``given`` begins with a whole echo, or with none."""
        if not keys or keys[-1] not in self._nodes_by_prompt:
            return None
        if any(visible(node.turn) for node in self._nodes_by_key.get(extend_key(keys[-1], given[0]), ())):
            return None
        replies = [node.turn.message for node in _latest(self._nodes_by_prompt[keys[-1]], visible)]
        echoes = [(reply, echo) for reply in replies if (echo := _echo(reply, given))]
        return min(echoes, key=lambda found: sum(a != b for a, b in found[1].ids.items()), default=None)

    def add(self, turn: Turn, parent: Node | None, request: Request, token_ids: list[int]) -> None:
        """Remember ``turn``; ``token_ids`` are its prompt + completion after those of its parent."""
        read = request.first(len(request.messages))
        read.given.append(_kept(turn.message))
        read.append(turn.message)
        if parent is None:
            conversation = Conversation(list(request.messages), token_ids, read)
            window = window_of(request.messages)
        else:
            conversation = parent.conversation
            if len(conversation.messages) > parent.messages:  # another turn went on from there
                conversation = Conversation(conversation.messages[: parent.messages], parent.token_ids, read)
            conversation.read = read
            conversation.messages += parent.behind(request)
            conversation.token_ids += token_ids
            window = parent.window.extended(conversation.messages, parent.messages - 1)
        conversation.messages.append(turn.message)
        node = Node(turn, conversation, len(conversation.messages), len(conversation.token_ids), window)
        self._nodes.append(node)
        self._nodes_by_prompt[request.keys[-1]].append(node)
        self._nodes_by_key[read.keys[-1]].append(node)

    def candidate(
        self, keys: Sequence[bytes], tools: Sequence[dict[str, Any]], visible: Callable[[Turn], bool]
    ) -> Node | None:
        """The node of the longest visible match; on a tie the newest that was offered the same tools, else the
        newest."""
        for key in reversed(keys):
            nodes = _latest(self._nodes_by_key.get(key, ()), visible)
            if nodes:
                return next((node for node in nodes if list(node.turn.tools) == tools), nodes[0])
        return None

    def remarks(self, request: Request, parent: Node, own: Callable[[Turn], bool]) -> tuple[str, ...]:
        """What was restored of a request that goes on behind ``parent``, and which edit keeps it from going on behind a
        later one of the agent's ``own`` turns."""
        known = {i for i in parent.conversation.read.restored if i < parent.messages - 1}  # those have their remark
        restored = [i for i in request.restored if i not in known]
        remarks = [f"message {i} was echoed incompletely and is as it was sampled" for i in restored]
        return (*remarks, *self._edit(request, parent, own))

    def _edit(self, request: Request, parent: Node, own: Callable[[Turn], bool]) -> list[str]:
        """The edit behind ``parent``, at most one: of a reply, or before a reply that the request still shows. Where
        other messages follow than before, or the same ones again, the agent branched and edited nothing."""
        later = [node for node in _latest(self._nodes, own) if node.messages > parent.messages]
        common = [(node.common(request), node) for node in later]
        for same, node in sorted(common, key=lambda pair: pair[0], reverse=True):
            if same < parent.messages or same == len(request.messages):
                break
            there = (node.conversation.messages[same], *request.messages[same:])
            if any(message["role"] == "assistant" for message in there):
                return [f"{_difference(same, node, request.messages[same])}, so turn {node.turn.id} is not continued"]
        return []

    def explain_new_root(
        self, request: Request, tools: Sequence[dict[str, Any]], visible: Callable[[Turn], bool]
    ) -> str:
        """Why a request extends no turn: the first message in which it differs from the closest of the latest."""
        nodes = _latest(self._nodes, visible)
        if not nodes:
            return "first call"
        asked = len(request.messages)

        def rank(node: Node) -> tuple[int, bool, bool]:
            same = node.common(request)
            repeated = same == asked == node.messages - 1
            return same, repeated, repeated and list(node.turn.tools) == tools

        closest = max(nodes, key=rank)
        same, repeated, same_tools = rank(closest)
        if not same:
            edited = next((node for node in _one_of_each(nodes) if _repeats(node, request.messages)), None)
            if edited is None:
                return "a new conversation"
            closest = edited
        turn = closest.turn.id
        if repeated:
            return f"same prompt as turn {turn}" if same_tools else f"same messages as turn {turn}, with other tools"
        if same >= asked:
            return f"history of turn {turn} was cut to its first {asked} messages"
        return f"differs from turn {turn}: {_difference(same, closest, request.messages[same])}"


def _latest(nodes: Sequence[Node], visible: Callable[[Turn], bool]) -> list[Node]:
    """The latest visible nodes, newest first."""
    return list(itertools.islice((node for node in reversed(nodes) if visible(node.turn)), COMPARED))


def _one_of_each(nodes: Sequence[Node]) -> Iterator[Node]:
    """The first node of each conversation."""
    seen: set[int] = set()
    for node in nodes:
        if id(node.conversation) not in seen:
            seen.add(id(node.conversation))
            yield node


def _repeats(node: Node, messages: Sequence[Message]) -> bool:
    """Whether a request with another first message shows any other one of the node's in the same place, or any
    reply."""
    known = node.conversation.messages[: node.messages]
    if any(canonical(a) == canonical(b) for a, b in zip(known[1:], messages[1:], strict=False)):
        return True
    replies = {canonical(message) for message in known if message["role"] == "assistant"}
    return any(message["role"] == "assistant" and canonical(message) in replies for message in messages)


def _renamed(result: Message, ids: Mapping[str, str]) -> Message:
    call_id = result.get("tool_call_id", "")
    return {**result, "tool_call_id": ids[call_id]} if call_id in ids else result


class _Echo(NamedTuple):
    """An incomplete echo of a reply."""

    messages: int
    ids: dict[str, str]
    """Ids of the calls that are left, each with the id that the reply has for this call."""


def _echo(reply: Message, given: Sequence[Message]) -> _Echo | None:
    """What ``given`` begins with: one message that lacks some of the reply's parallel calls, or two of which the first
    has its text and the second its calls. None if the reply was changed, or if a lacking call comes later."""
    calls = reply.get("tool_calls") or []
    first, *rest = given
    parts = [first]
    if not first.get("tool_calls") and rest and rest[0]["role"] == "assistant" and not rest[0].get("content"):
        parts.append(rest[0])
    kept = parts[-1].get("tool_calls") or []
    if first.get("content") != reply.get("content") or not kept:
        return None
    ids: dict[str, str] = {}
    left = list(calls)
    for call in kept:
        fitting = [c for c in left if _call_json(c) == _call_json(call)]
        sampled = next((c for c in fitting if c["id"] == call["id"]), fitting[0] if fitting else None)
        if sampled is None:
            return None
        ids[call["id"]] = sampled["id"]
        left = left[left.index(sampled) + 1 :]
    lacking = {_call_json(call) for call in calls if call["id"] not in ids.values()}
    later = next((message for message in given[len(parts) :] if message["role"] != "tool"), first)
    if later is not first and any(_call_json(call) in lacking for call in later.get("tool_calls") or ()):
        return None
    return _Echo(len(parts), ids)


def _call_data(call: ToolCall) -> tuple[str, bool, Any]:
    """Name, whether the arguments are JSON, and the arguments."""
    text = call["function"]["arguments"]
    data = parsed_arguments(text)
    return call["function"]["name"], data is not text, data


def _call_json(call: ToolCall) -> str:
    return json.dumps(_call_data(call), sort_keys=True)


class _Leaf:
    """Equal to the same number of the same type: 1, 1.0 and True are equal in Python and different in a prompt. Made of
    anything else, which may change or lie, it is equal to nothing."""

    def __init__(self, given: Any) -> None:
        self._number = given if type(given) in (bool, int) or (type(given) is float and given) else None

    def __eq__(self, other: object) -> bool:
        return self._number is not None and type(other) is type(self._number) and other == self._number

    __hash__ = None  # type: ignore[assignment]


class _Json:
    """Equal to data that is the same JSON text: the order of keys is seen in a prompt."""

    def __init__(self, given: Any) -> None:
        self._text = json.dumps(given)

    def __eq__(self, other: object) -> bool:
        return json.dumps(other) == self._text

    __hash__ = None  # type: ignore[assignment]


def _kept(given: Any) -> Any:
    """A copy of a message that stays the same whatever the user does to the original, and equals only what reads the
    same."""
    try:
        return _owned(given)
    except Exception:  # of an object that a user put into a message, or of what is nested without end
        return _Leaf(None)


def _owned(given: Any) -> Any:
    if given is None or type(given) is str:
        return given
    if type(given) is dict and all(type(key) is str for key in given):
        data = given.get("arguments")
        return {
            key: _Json(value) if value is data and isinstance(value, dict) else _owned(value)
            for key, value in given.items()
        }
    return type(given)(map(_owned, given)) if type(given) in (list, tuple) else _Leaf(given)


def _same(known: Sequence[Any], messages: Sequence[Any]) -> int:
    """How many leading messages are equal. What cannot be compared differs."""
    try:
        return len(known) if known == messages else first_difference(known, messages)
    except Exception:  # the comparison of an object that a user put into a message
        return 0


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
