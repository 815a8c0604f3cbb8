"""What a chat template can show, found by rendering probes, never from its name; and messages put in a form it shows.

A template that cannot show something would raise in the middle of a run, or leave it out without a word. Probed once
at start-up: a system message first and later, two messages of one role in a row, tools with calls and results, several
calls in one message, arguments as data or as text, ids of a certain form, and the key of reasoning.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from molt_sdk.errors import TemplateError
from molt_sdk.messages import parsed_arguments
from molt_sdk.rendering.template import ChatTemplate
from molt_sdk.rendering.tokens import Tokens
from molt_sdk.rendering.toolcalls import emulation_prompt
from molt_sdk.types import Message

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
IdForm = Literal["any", "short", "named"]
ID_FORMS: tuple[IdForm, ...] = ("any", "short", "named")
Shown = list[dict[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class Abilities(Struct, frozen=True, kw_only=True):
    """What a template shows as it is; what it does not is put in another form."""

    text_content: bool
    """Content as text; else as a list of one text part."""
    developer: bool
    """The role ``developer``; else it is shown as ``system``."""
    system: bool
    """A system message at the start; else its text goes in front of the first user message."""
    later_system: bool
    """A system message where it stands; else it is shown as a user message."""
    repeated_roles: bool
    """Two user messages, or two replies, in a row; else they are joined."""
    tools: bool
    """Schemas, calls and results; else all three are written as text (tool emulation)."""
    tool_role: bool
    """Results as messages of their own; else as user messages."""
    free_results: bool
    """Results without an id, behind a reply without calls or another result: errors of calls that could not be read;
    else as user messages."""
    user_behind_results: bool
    """A user message right behind results; else such an error is added to the last result."""
    parallel_calls: bool
    """Several calls in one reply; else those of such a reply are written as text."""
    arguments_as_text: bool
    """Arguments of calls as JSON text instead of data."""
    call_ids: IdForm
    """Ids of calls: any text; 9 letters and digits, as Mistral's templates demand; or ``functions.NAME:NUMBER``, as in
    Kimi's, which write the id instead of the name."""
    text_beside_thought: bool
    """A reply with reasoning, content and calls; else reasoning and content are joined."""
    reasoning_key: str
    """Key under which the template takes reasoning; "" for none: it is written as ``<think>`` text."""


def find_abilities(template: ChatTemplate) -> Abilities:
    def shows(messages: Shown, *expected: str, tools: Tools = ()) -> str:
        """The rendered text if it shows what is expected in that order, else ""."""
        try:
            text = template.text(messages if as_text else in_parts(messages), tools, generation_prompt=True)
        except TemplateError:
            return ""
        at = 0
        for part in expected:
            at = text.find(part, at)
            if at < 0:
                return ""
            at += len(part)
        return text

    user, reply = _message("user", "MOLTUSER1"), _message("assistant", "MOLTREPLY1")
    as_text = True
    if not shows([user], "MOLTUSER1"):
        as_text = False
        as_text = not shows([user], "MOLTUSER1")
    later = [user, reply, _message("system", "MOLTSYSTEM"), _message("user", "MOLTUSER2")]
    repeated = [user, _message("user", "MOLTUSER2"), reply, _message("assistant", "MOLTREPLY2"), user]

    def calling(calls: int, arguments_as_text: bool, ids: IdForm) -> bool:
        values = [f"MOLTVALUE{i}" for i in range(calls)]
        made = _calls([("MOLTTOOL", {"x": value}) for value in values])
        asked = [_shown_call(call, arguments_as_text, _call_id(call, i, ids)) for i, call in enumerate(made)]
        results = [
            _message("tool", f"MOLTRESULT{i}", name="MOLTTOOL", tool_call_id=asked[i]["id"]) for i in range(calls)
        ]
        told = [result["content"] for result in results]
        text = shows([user, _message("assistant", "", tool_calls=asked), *results], *values, *told, tools=[PROBE_TOOL])
        start = text.find("MOLTUSER1")
        named = all("MOLTTOOL" in text[start : text.find(value)] for value in values)  # not in the schema, nor later
        return "MOLTDESCRIPTION" in text and named and all(_written_once(text, value) for value in values)

    forms = [(as_text, ids) for ids in ID_FORMS for as_text in (False, True)]
    form = next((form for form in forms if calling(1, *form)), None)
    thought = {key: _message("assistant", "MOLTREPLY1", **{key: "MOLTTHOUGHT"}) for key in REASONING_KEYS}
    acted = {
        key: _message("assistant", "", tool_calls=_calls([("MOLTTOOL", {})]), **{key: "MOLTTHOUGHT"})
        for key in REASONING_KEYS
    }
    result = _message("tool", "MOLTRESULT", name="MOLTTOOL", tool_call_id="call00000")
    keys = (
        key
        for key in REASONING_KEYS
        if shows([user, thought[key]], "MOLTTHOUGHT") or shows([user, acted[key], result], "MOLTTHOUGHT")
    )
    key = next(keys, "")
    answered: list[Shown] = [[user, reply]]
    if form is not None:
        call = _shown_call(_calls([("MOLTTOOL", {})])[0], form[0], _call_id(_calls([("MOLTTOOL", {})])[0], 0, form[1]))
        answer = _message("tool", "MOLTRESULT", name="MOLTTOOL", tool_call_id=call["id"])
        answered.append([user, _message("assistant", "", tool_calls=[call]), answer])
    all_of_it = _message(
        "assistant", "MOLTREPLY1", tool_calls=_calls([("MOLTTOOL", {})]), **({key: "T"} if key else {})
    )
    return Abilities(
        text_content=as_text,
        developer=bool(shows([_message("developer", "MOLTSYSTEM"), user], "MOLTSYSTEM", "MOLTUSER1")),
        system=bool(shows([_message("system", "MOLTSYSTEM"), user], "MOLTSYSTEM")),
        later_system=bool(shows(later, "MOLTREPLY1", "MOLTSYSTEM", "MOLTUSER2")),
        repeated_roles=bool(shows(repeated, "MOLTUSER1", "MOLTUSER2", "MOLTREPLY1", "MOLTREPLY2")),
        tools=form is not None,
        tool_role=bool(shows([user, reply, _message("tool", "MOLTRESULT")], "MOLTRESULT")),
        free_results=all(shows([*before, _message("tool", "MOLTERROR")], "MOLTERROR") for before in answered),
        user_behind_results=bool(shows([*answered[-1], _message("user", "MOLTUSER2")], "MOLTUSER2")),
        parallel_calls=form is not None and calling(2, *form),
        arguments_as_text=form is not None and form[0],
        call_ids=form[1] if form is not None else "any",
        text_beside_thought=not key or bool(shows([user, all_of_it, result], "MOLTRESULT")),
        reasoning_key=key,
    )


PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "MOLTTOOL",
        "description": "MOLTDESCRIPTION",
        "parameters": {
            "type": "object",
            "properties": {
                "x": {"type": "string"},
                "n": {"type": "integer"},
                "yes": {"type": "boolean"},
                "deep": {"type": "object", "properties": {"list": {"type": "array", "items": {"type": "string"}}}},
            },
            "required": ["x"],
        },
    },
}


class Shaper:
    """Messages and tools in the form that one template shows, guarded against text that spells control tokens."""

    def __init__(self, abilities: Abilities, tokens: Tokens, *, emulate: bool) -> None:
        self.abilities = abilities
        self._tokens = tokens
        self._emulate = emulate

    def marker_for(self, messages: Sequence[Message], tools: Tools, *texts: str) -> str:
        """What guards a conversation; see :meth:`Tokens.marker_for`. Arguments are looked at as data: an escape in JSON
        text may hide a control token."""
        return self._tokens.marker_for(map(_with_data, messages), tools, [{"texts": texts}])

    def __call__(self, messages: Sequence[Message], tools: Tools, marker: str) -> tuple[Shown, list[dict[str, Any]]]:
        can = self.abilities
        ids: dict[str, str] = {}  # of the latest calls, as they are shown; "" for calls that are written as text
        shown: Shown = []
        for message in map(_with_data, messages):
            if message["role"] == "assistant":
                calls, as_text = message.get("tool_calls") or (), self._as_text(message)
                ids = {c["id"]: "" if as_text else _call_id(c, i, can.call_ids) for i, c in enumerate(calls)}
            part = self._shown(message, ids, marker)
            if (
                part["role"] == "user" != message["role"]
                and shown[-1]["role"] == "tool"
                and not can.user_behind_results
            ):
                shown[-1]["content"] += f"\n\n{part['content']}"
            else:
                shown.append(part)
        schemas: list[dict[str, Any]] = self._tokens.guard(list(tools), marker)
        if self._emulate and schemas:
            described = emulation_prompt(schemas)
            if shown[0]["role"] == "system":
                shown[0] = {**shown[0], "content": f"{shown[0]['content']}\n\n{described}"}
            else:
                shown.insert(0, _message("system", described))
            schemas = []
        if not can.system and shown[0]["role"] == "system":
            shown = _folded(shown)
        if not can.later_system:
            shown[1:] = [{**m, "role": "user"} if m["role"] == "system" else m for m in shown[1:]]
        if not can.repeated_roles:
            shown = _joined(shown)
        return (shown if can.text_content else in_parts(shown)), schemas

    def _as_text(self, message: Mapping[str, Any]) -> bool:
        """Whether the calls of a reply are written as text."""
        return self._emulate or (len(message.get("tool_calls") or ()) > 1 and not self.abilities.parallel_calls)

    def content(self, message: Mapping[str, Any], marker: str) -> str:
        """A message's guarded text: what users and tools say may not even spell the tags that the template writes."""
        text = str(message.get("content") or "")
        return str(self._tokens.guard(text, marker, strict=message["role"] in ("user", "tool")))

    def _shown(self, message: Mapping[str, Any], ids: Mapping[str, str], marker: str) -> dict[str, Any]:
        can, guard = self.abilities, self._tokens.guard
        role = message["role"]
        shown: dict[str, Any] = {"role": role, "content": self.content(message, marker)}
        if "name" in message:
            shown["name"] = guard(message["name"], marker)
        if role == "developer" and not can.developer:
            shown["role"] = "system"
        elif role == "tool":
            call_id = message.get("tool_call_id", "")
            free = not ids.get(call_id, call_id)
            if not (can.tool_role if self._emulate else can.free_results or not free):
                return _message("user", f"<tool_response>\n{shown['content']}\n</tool_response>")
            if not (free or self._emulate):
                shown["tool_call_id"] = guard(ids.get(call_id, call_id), marker)
        elif role == "assistant":
            calls = message.get("tool_calls") or ()
            if calls and self._as_text(message):
                shown["content"] = "\n".join(
                    filter(None, [shown["content"], *(_call_text(guard(call, marker)) for call in calls)])
                )
            elif calls:
                shown["tool_calls"] = [
                    _shown_call(guard(call, marker), can.arguments_as_text, guard(ids[call["id"]], marker))
                    for call in calls
                ]
            if reasoning := guard(message.get("reasoning", ""), marker):
                if can.reasoning_key and "tool_calls" in shown and shown["content"] and not can.text_beside_thought:
                    shown[can.reasoning_key] = f"{reasoning}\n\n{shown['content']}"
                    shown["content"] = ""
                elif can.reasoning_key:
                    shown[can.reasoning_key] = reasoning
                else:
                    shown["content"] = f"<think>\n{reasoning}\n</think>\n\n{shown['content']}"
        return shown


def _message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def in_parts(messages: Shown) -> Shown:
    """Content as a list of one text part, as templates of models that also see images may want it."""
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def _calls(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {"id": f"call_0_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]


def _with_data(message: Message) -> dict[str, Any]:
    """A message whose calls have arguments as data, where they are JSON."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = [
        {**call, "function": {**call["function"], "arguments": parsed_arguments(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _shown_call(call: Mapping[str, Any], as_text: bool, call_id: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "id": call_id, "function": {"name": function["name"], "arguments": arguments}}


def _call_id(call: Mapping[str, Any], index: int, form: IdForm) -> str:
    """The id under which the ``index``-th call of a message is shown: its own if that has the form."""
    call_id, name = str(call["id"]), str(call["function"]["name"])
    if form == "short" and not (len(call_id) == 9 and call_id.isalnum()):
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]
    if form == "named" and not re.fullmatch(r"\d+", call_id.removeprefix(f"functions.{name}:")):
        return f"functions.{name}:{index}"
    return call_id


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    name = json.dumps(function["name"], ensure_ascii=False)
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return f'<tool_call>{{"name": {name}, "arguments": {arguments}}}</tool_call>'


def _written_once(text: str, value: str) -> bool:
    """Whether an argument was encoded as JSON once: a template may encode text again that already was."""
    at = text.find(value)
    return "\\" not in text[max(0, at - 6) : at]


def _folded(messages: Shown) -> Shown:
    """System text in front of the first user message."""
    system, *rest = messages
    for i, message in enumerate(rest):
        if message["role"] == "user":
            folded = {**message, "content": f"{system['content']}\n\n{message['content']}"}
            return [*rest[:i], folded, *rest[i + 1 :]]
    return [_message("user", system["content"]), *rest]


def _joined(messages: Shown) -> Shown:
    """Neighbours of one role as one message, for templates in which roles alternate."""
    joined: Shown = []
    for message in messages:
        last = joined[-1] if joined else {}
        plain = not last.get("tool_calls") and not message.get("tool_calls")
        if message["role"] == last.get("role") and message["role"] in ("user", "assistant") and plain:
            joined[-1] = {**last, **message, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined
