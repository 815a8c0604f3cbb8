"""Sampled ids to an assistant message: reasoning, content, tool calls, and what was wrong with calls.

Our own reader understands Hermes-style blocks, a form learned from the template, and a reply that is one JSON object;
other formats are read by the ``renderers`` library. Whichever reads, a call that was only thought, that was cut by the
length limit or that cannot be read is not executed; the model is told why. The sampled ids stay what they are.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from molt_sdk.messages import parsed_arguments, too_deep
from molt_sdk.rendering.known import KnownCall, KnownModel
from molt_sdk.rendering.tokens import Tokens
from molt_sdk.rendering.toolcalls import (
    HERMES,
    MAX_ERRORS,
    CallForm,
    parse_plain_json,
    parse_tool_calls,
    split_reasoning,
    tool_call,
)
from molt_sdk.types import FinishReason, Message, ToolCall

Tools = Sequence[Mapping[str, Any]]
THOUGHT_TAGS = (("<think>", "</think>"), ("<|channel>", "<channel|>"))
"""Control tokens around reasoning."""
OPENING = 16
"""Latest ids of a prompt in which ``<think>`` is looked for."""


class ParsedCompletion(NamedTuple):
    message: Message
    tool_errors: list[str]
    """What was wrong with tool calls that could not be read, in words for the model."""
    remarks: Sequence[str] = ()
    """What was repaired or given up, for the record."""


class _Thoughts(NamedTuple):
    """A reply without its reasoning."""

    texts: list[str]
    rest: list[int]
    last: list[int]
    """Ids of reasoning without an end; empty if it has one."""


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
        pairs = ([tokens.tokenizer.token_to_id(tag) for tag in tags] for tags in THOUGHT_TAGS)
        found = ([i for i in pair if i is not None] for pair in pairs)
        self._thought_ids = next((pair for pair in found if len(pair) == 2), [])
        self._thinks_in_tags = self._thought_ids == [tokens.tokenizer.token_to_id(tag) for tag in THOUGHT_TAGS[0]]

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of a completion without its closing EOS; other special tokens stay visible."""
        return self._tokens.text(token_ids, self._eos)

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
            parsed = self._parse_known(self._known, list(token_ids), truncated, tools, call_prefix, prompt)
            if parsed is not None:
                return parsed
        text, thinking = self.text(token_ids), self._begins_thinking(prompt)
        if not (truncated or thinking):  # first: tags in its arguments are text
            calls, _ = _bare_call(text, tools, call_prefix)
            if calls:
                return ParsedCompletion(_message("", None, calls), [])
        if not tools:
            reasoning, content = split_reasoning(text, thinking=thinking)
            return ParsedCompletion(_message(content, reasoning, []), [])
        read = parse_tool_calls(text, truncated=truncated, id_prefix=call_prefix, thinking=thinking, form=self._form)
        calls, content = read.tool_calls, read.content
        if not truncated and not calls and not read.errors:
            calls, content = _bare_call(content, tools, call_prefix)
        return ParsedCompletion(_message(content, read.reasoning, calls), read.errors, read.remarks)

    def _begins_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt opened reasoning; templates may do so in some turns only."""
        if not prompt or not self._opens_thinking:
            return self._opens_thinking
        return self._tokens.decode(prompt[-OPENING:]).rstrip().endswith("<think>")

    def _parse_known(
        self,
        known: KnownModel,
        token_ids: list[int],
        truncated: bool,
        tools: Tools,
        call_prefix: str,
        prompt: Sequence[int],
    ) -> ParsedCompletion | None:
        if token_ids and token_ids[-1] in self._eos and token_ids[-1] not in known.stop_token_ids:
            token_ids = token_ids[:-1]
        if known.channels:
            reply = known.parse(token_ids, prompt, tools)
            if reply is None:
                return None
            content, reasoning = reply.content, reply.reasoning
            said = [i for i in token_ids if i not in self._eos]
            if said and self._tokens.control_id_set.isdisjoint(said):  # outside of any channel
                content, reasoning = self._tokens.decode(said), None
            drafts = reply.calls if reply.thinking else []
        else:
            thoughts = self._without_thoughts(token_ids, self._begins_thinking(prompt))
            rest = self._as_answer(thoughts.rest)
            reply = known.parse(rest, (), tools)
            if reply is None:
                return None
            content = self._outside_calls(rest, reply.calls)
            reasoning = "\n".join(filter(None, thoughts.texts)) if thoughts.texts else None
            draft = known.parse(self._as_answer(thoughts.last), (), tools) if thoughts.last and not truncated else None
            drafts = draft.calls if draft else []
        if not tools:
            shown = content if not reply.calls else self.text(token_ids)  # nothing was offered: it is what it says
            return ParsedCompletion(_message(shown, reasoning, []), [])
        if drafts:
            told = "A tool call was not executed: it is inside your reasoning; end that first."
            return ParsedCompletion(_message(content, reasoning, []), [told])
        calls, errors, remarks = _executable(reply.calls, call_prefix, truncated)
        if not (truncated or reply.calls):
            calls, content = _bare_call(content, tools, call_prefix)
        return ParsedCompletion(_message(content, reasoning, calls), errors, remarks)

    def _as_answer(self, token_ids: list[int]) -> list[int]:
        """The ids behind an empty thought, so that the library looks for no other."""
        return [*self._thought_ids, *token_ids] if self._thinks_in_tags else token_ids

    def _without_thoughts(self, token_ids: list[int], thinking: bool) -> _Thoughts:
        """Split off each piece of reasoning: from its opening tag, or from the start if the prompt had it, to its
        closing tag or the end. A closing tag without an opening one ends reasoning that the prompt began."""
        if not self._thought_ids:  # the tags are plain text
            text = self._tokens.decode(token_ids)
            if not thinking and "think>" not in text:
                return _Thoughts([], token_ids, [])
            reasoning, content = split_reasoning(text, thinking=thinking)
            last = self._tokens.encode(reasoning) if reasoning and "</think>" not in text else []
            return _Thoughts([] if reasoning is None else [reasoning], self._tokens.encode(content), last)
        opens, closes = self._thought_ids
        texts: list[str] = []
        rest: list[int] = []
        at, inside, piece = 0, thinking, list[int]()
        for i, token in enumerate([*token_ids, None]):
            if token is not None and token not in (opens, closes):
                continue
            piece = token_ids[at:i]
            at = i + 1
            if inside or (token == closes and not texts):
                texts.append(self._tokens.decode([*rest, *piece] if not inside else piece).strip())
                rest = rest if inside else []
            else:
                rest += piece
            if token is not None:
                inside = token == opens
        if not self._thinks_in_tags:  # the tag is followed by the name of the channel
            texts = [text.removeprefix("thought").strip() for text in texts]
        return _Thoughts(texts, rest, piece if inside else [])

    def _outside_calls(self, token_ids: list[int], calls: Sequence[KnownCall]) -> str:
        """Text of what is no part of a call; tags around calls are left out with them."""
        inside = {i for call in calls if call.span for i in range(*call.span)}
        outside = [i for at, i in enumerate(token_ids) if at not in inside]
        markup = self._tokens.control_id_set if calls else self._eos
        return self._tokens.decode([i for i in outside if i not in markup and i not in self._thought_ids]).strip()


def _bare_call(content: str, tools: Tools, call_prefix: str) -> tuple[list[ToolCall], str]:
    """The call that a text is, if it is one, and the text that is left."""
    bare = parse_plain_json(content, _names(tools), call_id=f"{call_prefix}0")
    return ([bare], "") if bare is not None else ([], content)


def _executable(
    attempts: Sequence[KnownCall], call_prefix: str, truncated: bool
) -> tuple[list[ToolCall], list[str], list[str]]:
    """Calls to execute, errors for the model, remarks for the record."""
    calls: list[ToolCall] = []
    errors: list[str] = []
    remarks: list[str] = []
    taken = {attempt.id for attempt in attempts}
    used: set[str] = set()
    for attempt in attempts:
        arguments, problem = _arguments(attempt, truncated)
        if problem:
            if len(errors) < MAX_ERRORS:
                near = attempt.raw.strip()[:60]
                told = f"A tool call was not executed: {problem}. It was near {near!r}. Write it in your own format."
                errors.append(told)
            continue
        call_id = attempt.id
        if not call_id or call_id in used:
            call_id = next(i for n in itertools.count(len(calls)) if (i := f"{call_prefix}{n}") not in taken)
            if attempt.id:
                remarks.append(f"the id {attempt.id!r} of a tool call was used twice and renamed to {call_id}")
        taken.add(call_id)
        used.add(call_id)
        calls.append(tool_call(call_id, attempt.name, arguments))
        if isinstance(attempt.arguments, str):
            remarks.append(f"the arguments of {call_id} were a JSON string and were unwrapped")
    return calls, errors, remarks


def _arguments(attempt: KnownCall, truncated: bool) -> tuple[str, str]:
    """The arguments of one attempt as JSON text of an object, and what is wrong with it."""
    if attempt.problem or not attempt.name:
        cut = truncated and "unclosed" in attempt.problem
        return "", "the reply reached its length limit before its end" if cut else attempt.problem or "it has no name"
    arguments: Any = {} if attempt.arguments is None else attempt.arguments
    if isinstance(arguments, str):  # an object that is written as a JSON string
        arguments = parsed_arguments(arguments)
    if not isinstance(arguments, dict):
        return "", "its arguments are not an object"
    if too_deep(arguments):
        return "", "its arguments are nested too deeply"
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (attempt.name + written).encode()
    except ValueError as error:
        return "", f"its arguments are not JSON: {error}"
    return written, ""


def _message(content: str, reasoning: str | None, calls: list[ToolCall]) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _names(tools: Tools) -> set[str]:
    return {tool["function"]["name"] for tool in tools}
