"""Messages to prompt ids, sampled ids to a message, and the bridge that continues sampled ids.

The bridge is derived from the chat template itself: render the conversation up to the sampled reply, then with the
reply (its raw sampled text) and the new messages. If the first text is a prefix of the second, the reply survives in it
unchanged and is followed by the end-of-turn control token, then everything after that token continues the sampled ids
exactly: no BPE merge crosses a control token. Otherwise there is no bridge, and the reason says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from molt_sdk.errors import TemplateError
from molt_sdk.messages import first_difference, parsed_arguments, shown_difference
from molt_sdk.rendering.template import ChatTemplate, ModelFiles
from molt_sdk.rendering.toolcalls import emulation_prompt, parse_plain_json, parse_tool_calls
from molt_sdk.types import FinishReason, Message, ToolCall


class Bridge(NamedTuple):
    """Untrained ids that follow a sampled completion."""

    token_ids: list[int]


class NoBridge(NamedTuple):
    """Why the request cannot continue the sampled ids."""

    reason: str


class ParsedCompletion(NamedTuple):
    message: Message
    tool_errors: list[str]
    """What was wrong with tool calls that could not be read, in words for the model."""


class Renderer:
    """All text/token conversions for one model directory. Stateless after construction; safe to share."""

    def __init__(self, model: str) -> None:
        self.files = ModelFiles(model)
        self._template = ChatTemplate(self.files) if self.files.chat_template is not None else None

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            self._template = ChatTemplate(self.files)  # raises the error that names the missing template
        return self._template

    @property
    def context_length(self) -> int:
        return self.files.context_length

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """EOS ids of the model's config plus the end-of-turn token of its template."""
        return self._template.eos_token_ids if self._template is not None else self.files.eos_token_ids

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a new root: the rendered conversation with the generation prompt."""
        marker = self.template.marker_for(messages, tools)
        return self.template.encode(self._render(messages, tools, marker), marker)

    def raw_prompt(self, text: str) -> list[int]:
        """Ids of raw text for ``model.complete``: BOS as the tokenizer adds it, exactly once. Special tokens in the
        text are control tokens here: whoever writes raw text writes the whole prompt."""
        ids = list(self.files.tokenizer.encode(text, add_special_tokens=True).ids)
        bos = self.files.special_ids.get(self.files.special_map.get("bos_token", ""))
        if bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        return ids

    def bridge(
        self,
        messages: Sequence[Message],
        completion_token_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> Bridge | NoBridge:
        """What to append to the ids of ``messages`` + completion so that ``new_messages`` follow.

        ``messages`` is the parent's conversation without its reply; the reply is given by its sampled ids.
        """
        template = self.template
        if template.end_of_turn is None:
            return NoBridge("the chat template writes no control token after an assistant message")
        end_text, end_id = template.end_of_turn
        ended = bool(completion_token_ids) and completion_token_ids[-1] in self.eos_token_ids
        if ended and completion_token_ids[-1] != end_id:
            shown = self.files.tokenizer.id_to_token(completion_token_ids[-1])
            return NoBridge(f"the reply ended with {shown!r}, but the template closes a turn with {end_text!r}")
        raw = self.text(completion_token_ids)
        reply: Message = {"role": "assistant", "content": raw}
        conversation = [*messages, reply, *new_messages]
        marker = template.marker_for(conversation, tools)
        try:
            head = self._render(messages, tools, marker)
            full = self._render(conversation, tools, marker)
        except TemplateError as error:
            return NoBridge(str(error))
        raw = template.break_up(raw, marker)
        if not full.startswith(head):
            at = first_difference(head, full)
            shown = shown_difference(head, full, at)
            return NoBridge(f"the chat template rewrote earlier text at character {at}: {shown}")
        rest = full[len(head) :]
        for form in (raw, raw.rstrip(), raw.strip()):  # templates may trim what was sampled; the ids stay as sampled
            if rest.startswith(form + end_text):
                suffix = rest[len(form) + (len(end_text) if ended else 0) :]
                return Bridge(template.encode(suffix, marker))
        return NoBridge("the chat template rewrote the model's own reply")

    def encode_reply(self, text: str, *, end: bool) -> list[int]:
        """Ids of a reply as a model would sample it, closed by the template's end-of-turn token if ``end``."""
        ids = list(self.files.tokenizer.encode(text, add_special_tokens=False).ids)
        if end and self.eos_token_ids:
            closing = self._template.end_of_turn if self._template is not None else None
            ids.append(closing[1] if closing else self.eos_token_ids[0])
        return ids

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of a completion without its closing EOS; other special tokens stay visible."""
        ids = list(token_ids)
        if ids and ids[-1] in self.eos_token_ids:
            ids.pop()
        return self.files.tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def parse(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason,
        tools: Sequence[Mapping[str, Any]],
        call_prefix: str,
    ) -> ParsedCompletion:
        """The assistant message of a completion: content, reasoning, tool calls (only if tools were offered)."""
        text = self.text(token_ids)
        if not tools:
            return ParsedCompletion({"role": "assistant", "content": text}, [])
        truncated = finish_reason == "length"
        parsed = parse_tool_calls(
            text, truncated=truncated, id_prefix=call_prefix, thinking=self.template.opens_thinking
        )
        if not truncated and not parsed.tool_calls and not parsed.errors:
            bare = parse_plain_json(parsed.content, _tool_names(tools), call_id=f"{call_prefix}0")
            if bare is not None:
                parsed = msgspec.structs.replace(parsed, content="", tool_calls=[bare])
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning is not None:
            message["reasoning"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = parsed.tool_calls
        return ParsedCompletion(message, parsed.errors)

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], marker: str) -> str:
        template = self.template
        if template.tools_supported:
            guarded = template.guard(_with_argument_objects(messages), marker)
            return template.text(guarded, template.guard(tools, marker), generation_prompt=True)
        shown = self._emulate(messages, tools) if _uses_tools(messages, tools) else messages
        if not template.system_supported:
            shown = _fold_system(shown)
        return template.text(template.guard(shown, marker), (), generation_prompt=True)

    def _emulate(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Tools for a template that has none: described in the system message, called and answered in plain text."""
        shown: list[Message] = []
        if tools:
            described = emulation_prompt(tools)
            if messages and messages[0]["role"] == "system":
                shown.append({"role": "system", "content": f"{messages[0].get('content')}\n\n{described}"})
                messages = messages[1:]
            else:
                shown.append({"role": "system", "content": described})
        for message in messages:
            content = str(message.get("content") or "")
            calls = message.get("tool_calls")
            if calls:
                text = "\n".join(filter(None, [content, *map(_call_text, calls)]))
                shown.append({"role": "assistant", "content": text})
            elif message["role"] == "tool" and not self.template.tool_role_supported:
                shown.append({"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"})
            elif message["role"] == "tool":
                shown.append({"role": "tool", "content": content})
            else:
                shown.append(message)
        return shown


def _with_argument_objects(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Templates with tool support expect arguments as data, as transformers passes them, not as JSON text."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        changed: dict[str, Any] = dict(message)
        if calls := message.get("tool_calls"):
            changed["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": parsed_arguments(call["function"]["arguments"])}}
                for call in calls
            ]
        shown.append(changed)
    return shown


def _call_text(call: ToolCall) -> str:
    function = call["function"]
    name = json.dumps(function["name"], ensure_ascii=False)
    arguments = json.dumps(parsed_arguments(function["arguments"]), ensure_ascii=False)
    return f'<tool_call>{{"name": {name}, "arguments": {arguments}}}</tool_call>'


def _tool_names(tools: Sequence[Mapping[str, Any]]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}


def _uses_tools(messages: Sequence[Message], tools: Sequence[Any]) -> bool:
    return bool(tools) or any(m["role"] == "tool" or m.get("tool_calls") for m in messages)


def _fold_system(messages: Sequence[Message]) -> list[Message]:
    """System text in front of the first user message, for templates without a system role."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, *rest = messages
    for i, message in enumerate(rest):
        if message["role"] == "user":
            folded: Message = {"role": "user", "content": f"{system.get('content')}\n\n{message.get('content')}"}
            return [*rest[:i], folded, *rest[i + 1 :]]
    return [{"role": "user", "content": str(system.get("content"))}, *rest]
