"""Sampled ids to an assistant message: reasoning, content, tool calls, and what was wrong with calls.

Two readers: that of the ``renderers`` library for a model that it knows, else our own for Hermes-style blocks and for a
reply that is one JSON object. Whichever reads, a call that was only thought, that was cut by the length limit or that
cannot be read is not executed; the model is told why. The sampled ids stay what they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from molt_sdk.rendering.known import KnownCall, KnownModel
from molt_sdk.rendering.tokens import Tokens
from molt_sdk.rendering.toolcalls import (
    HERMES,
    MAX_ERRORS,
    OPEN,
    CallForm,
    parse_plain_json,
    parse_tool_calls,
    read_block,
    split_reasoning,
    thinks,
    tool_call,
)
from molt_sdk.types import FinishReason, Message, ToolCall

Tools = Sequence[Mapping[str, Any]]
OPENING = 16
"""Latest ids of a prompt in which ``<think>`` is looked for."""


class ParsedCompletion(NamedTuple):
    message: Message
    tool_errors: list[str]
    """What was wrong with tool calls that could not be read, in words for the model."""
    remarks: Sequence[str] = ()
    """What was repaired or given up, for the record."""


class ReplyParser:
    """Reads the replies of one model."""

    def __init__(
        self,
        tokens: Tokens,
        eos_token_ids: Sequence[int],
        known: KnownModel | None,
        form: CallForm = HERMES,
        *,
        opens_thinking: bool,
    ) -> None:
        self._tokens = tokens
        self._eos = frozenset(eos_token_ids)
        self._known = known
        self._form = form
        self._opens_thinking = opens_thinking

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of a completion without its closing EOS; other special tokens stay visible."""
        ended = bool(token_ids) and token_ids[-1] in self._eos
        return self._tokens.decode(token_ids[:-1] if ended else token_ids)

    def parse(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason,
        tools: Tools,
        call_prefix: str = "call_",
        prompt: Sequence[int] = (),
    ) -> ParsedCompletion:
        """The assistant message of a completion; tool calls only if tools were offered. Never raises.

        ``prompt``: the latest ids of the prompt; ``call_prefix``: what the ids of calls begin with.
        """
        truncated = finish_reason == "length"
        if self._known is not None:
            parsed = self._parse_known(self._known, token_ids, truncated, tools, call_prefix, prompt)
            if parsed is not None:
                return parsed
        text, thinking = self.text(token_ids), self._begins_thinking(prompt)
        if not tools:
            reasoning, content = split_reasoning(text, thinking=thinking)
            return ParsedCompletion(_message(content, reasoning, []), [])
        read = parse_tool_calls(text, truncated=truncated, id_prefix=call_prefix, thinking=thinking, form=self._form)
        calls, content = read.tool_calls, read.content
        if not truncated and not calls and not read.errors:
            bare = parse_plain_json(content, _names(tools), call_id=f"{call_prefix}0")
            calls, content = ([bare], "") if bare is not None else ([], content)
        return ParsedCompletion(_message(content, read.reasoning, calls), read.errors, read.remarks)

    def _begins_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt opened reasoning; templates may do so in some turns only."""
        if not prompt or not self._opens_thinking:
            return self._opens_thinking
        return self._tokens.decode(prompt[-OPENING:]).rstrip().endswith("<think>")

    def _parse_known(
        self,
        known: KnownModel,
        token_ids: Sequence[int],
        truncated: bool,
        tools: Tools,
        call_prefix: str,
        prompt: Sequence[int],
    ) -> ParsedCompletion | None:
        if token_ids and token_ids[-1] in self._eos and token_ids[-1] not in known.stop_token_ids:
            token_ids = token_ids[:-1]
        reply = known.parse(token_ids, prompt, tools)
        if reply is None:
            return None
        if not tools:
            if reply.calls:  # nothing was offered: what looks like a call is part of what it says
                return None
            return ParsedCompletion(_message(reply.content, reply.reasoning, []), [])
        text = self.text(token_ids)
        unfinished = "</think>" not in text and (self._begins_thinking(prompt) or thinks(text))
        if reply.thinking or unfinished:
            drafted = not truncated and (reply.calls or OPEN in text)
            errors = ["A tool call was not executed: it is inside <think>; write </think> first."] if drafted else []
            thought = text.partition("<think>")[2] if unfinished and thinks(text) else text
            reasoning = reply.reasoning if reply.thinking else thought
            return ParsedCompletion(_message(reply.content if reply.thinking else "", reasoning, []), errors)
        calls, errors, remarks = _executable(reply.calls, call_prefix, truncated)
        content = reply.content
        if not (truncated or reply.calls):
            bare = parse_plain_json(content, _names(tools), call_id=f"{call_prefix}0")
            calls, content = ([bare], "") if bare is not None else ([], content)
        return ParsedCompletion(_message(content, reply.reasoning, calls), errors, remarks)


def _executable(
    attempts: Sequence[KnownCall], call_prefix: str, truncated: bool
) -> tuple[list[ToolCall], list[str], list[str]]:
    """Calls to execute, errors for the model, remarks for the record."""
    calls: list[ToolCall] = []
    errors: list[str] = []
    remarks: list[str] = []
    taken: set[str] = set()
    for attempt in attempts:
        found, problem = _arguments(attempt, truncated)
        for name, arguments in found:
            call_id = attempt.id if len(found) == 1 and attempt.id else f"{call_prefix}{len(calls)}"
            if call_id in taken:
                remarks.append(f"the id {call_id!r} of a tool call was used twice and renamed")
                call_id = f"{call_prefix}{len(calls)}"
            taken.add(call_id)
            calls.append(tool_call(call_id, name, arguments))
            if isinstance(attempt.arguments, str) and not attempt.problem:
                remarks.append(f"the arguments of {call_id} were a JSON string and were unwrapped")
        if problem and len(errors) < MAX_ERRORS:
            near = attempt.raw.strip()[:60]
            errors.append(
                f"A tool call was not executed: {problem}. It was near {near!r}. Write it in your own format."
            )
    return calls, errors, remarks


def _arguments(attempt: KnownCall, truncated: bool) -> tuple[list[tuple[str, str]], str]:
    """(name, arguments) of the calls in one attempt, and what is wrong with it."""
    if attempt.problem:
        found = [] if truncated and "unclosed" in attempt.problem else read_block(attempt.raw)
        cut = "the reply reached its length limit before its end" if truncated else attempt.problem.replace("_", " ")
        return found, "" if found else cut
    arguments: Any = {} if attempt.arguments is None else attempt.arguments
    if isinstance(arguments, str):  # an object that is written as a JSON string
        found = read_block(json.dumps({"name": attempt.name, "arguments": arguments}, ensure_ascii=False))
        return found, "" if found else "its arguments are text that is no JSON object"
    if not isinstance(arguments, dict):
        return [], "its arguments are not an object"
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (attempt.name + written).encode()
    except (ValueError, RecursionError) as error:
        return [], f"its arguments are not JSON: {error}"
    return [(attempt.name, written)], ""


def _message(content: str, reasoning: str | None, calls: list[ToolCall]) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _names(tools: Tools) -> set[str]:
    return {tool["function"]["name"] for tool in tools}
