"""The bridge: what follows a sampled reply in the next prompt, derived from the chat template and proved on it.

Two renderings decide, one of the conversation up to the reply, one with the reply and the new messages:

1. The first is a prefix of the second: the template rewrote nothing that was shown before.
2. What stands between is the reply as it was sampled: the same text but for white space at its ends and around tags, or
   text that parses to the same message.
3. After it comes a control token (the *seam*), so no merge of the tokenizer reaches across; if the reply ended with a
   control token of its own, it is that one.

Then everything after the seam continues the sampled ids. Otherwise there is no bridge, and the reason says what failed.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from molt_sdk.errors import TemplateError
from molt_sdk.messages import parsed_arguments, shown_difference
from molt_sdk.rendering.abilities import Shaper, Tools
from molt_sdk.rendering.template import ChatTemplate
from molt_sdk.rendering.tokens import Tokens
from molt_sdk.types import Message

_SWITCH = re.compile(r"/(?:no_?)?think")
MAX_SEAMS = 32
"""Control tokens that are tried as the end of a reply."""
MAX_READ = 2
"""Of them, those up to which the text is parsed."""


class Bridge(NamedTuple):
    """Untrained ids that follow a sampled completion."""

    token_ids: list[int]


class NoBridge(NamedTuple):
    """Why the request cannot continue the sampled ids."""

    reason: str
    form: bool = False
    """The template refuses the reply, or writes it in another form: it may take the reply's own text."""


class SampledReply(NamedTuple):
    """A reply as the bridge sees it."""

    text: str
    """Decoded without its closing token."""
    message: Message
    """The same, parsed."""
    ended_with: int | None
    """Id of the EOS token that the model sampled; None if it was cut or stopped by a string."""


class History(NamedTuple):
    """The messages before a reply, or those of them that decide how a template continues."""

    messages: Sequence[Message]
    numbers: Sequence[int]
    """Index of each in the whole conversation, the reply's last."""


class Bridger:
    """Derives bridges for one chat template."""

    def __init__(
        self,
        template: ChatTemplate,
        tokens: Tokens,
        shape: Shaper,
        eos_token_ids: Sequence[int],
        parse: Callable[[str, Tools], Message],
        generation_prompt: str,
    ) -> None:
        self._template = template
        self._tokens = tokens
        self._shape = shape
        self._eos = frozenset(eos_token_ids)
        self._parse = parse
        self._generation_prompt = generation_prompt

    def bridge(self, history: History, reply: SampledReply, new: Sequence[Message], tools: Tools) -> Bridge | NoBridge:
        """The bridge, from the reply as the parsed message that a client would send back; where only its form differs
        from what was sampled, or where it was cut, from its own text."""
        first = self._derive(history, reply, reply.message, new, tools)
        raw: Message = {"role": "assistant", "content": reply.text}
        if isinstance(first, Bridge) or raw == reply.message or not (first.form or reply.ended_with is None):
            return first
        second = self._derive(history, reply, raw, new, tools)
        return second if isinstance(second, Bridge) else first

    def _derive(
        self, history: History, reply: SampledReply, shown_as: Message, new: Sequence[Message], tools: Tools
    ) -> Bridge | NoBridge:
        conversation = [*history.messages, shown_as, *new]
        marker = self._shape.marker_for(conversation, tools, reply.text)
        try:
            head = self.render(history.messages, tools, marker)
            full = self.render(conversation, tools, marker)
        except TemplateError as error:
            return NoBridge(str(error), form=True)
        if not full.startswith(head):
            return NoBridge(self._rewritten(head, full, history, reply, marker))
        rest = full[len(head) :]
        seams = self._seams(rest)
        for seam in seams:
            if _same_text(_plain(rest[: seam.start()], marker), reply.text):
                return self._after(rest, seam, reply, new, marker)
        for seam in seams[:MAX_READ]:
            if _content(self._parse(_plain(rest[: seam.end()], marker), tools)) == _content(reply.message):
                return self._after(rest, seam, reply, new, marker)
        return self._unlike(_plain(rest, marker), reply, history)

    def render(self, messages: Sequence[Message], tools: Tools, marker: str) -> str:
        shown, schemas = self._shape(messages, tools, marker)
        return self._template.text(shown, schemas, generation_prompt=True)

    def _seams(self, rest: str) -> list[Any]:
        """Where the reply may end: at one of the first EOS tokens that the template wrote, or at one of the first
        control tokens where it writes none."""
        find = self._tokens.control.finditer
        ends = (match for match in find(rest) if self._tokens.control_ids[match[0]] in self._eos)
        return list(itertools.islice(ends, MAX_SEAMS)) or list(itertools.islice(find(rest), MAX_SEAMS))

    def _after(
        self, rest: str, seam: Any, reply: SampledReply, new: Sequence[Message], marker: str
    ) -> Bridge | NoBridge:
        tokens = self._tokens
        closing, suffix = seam[0], rest[seam.end() :]
        lost = self.missing(suffix, new, marker)
        if lost is not None:
            return NoBridge(f"the chat template leaves out the new {new[lost]['role']} message")
        ids = tokens.encode(suffix, marker, after=closing)
        seam_id = tokens.control_ids[closing]
        if reply.ended_with is None:
            return Bridge([seam_id, *ids])
        if reply.ended_with != seam_id:
            ended = tokens.tokenizer.id_to_token(reply.ended_with)
            return NoBridge(f"the reply ended with {ended!r}, but the template closes it with {closing!r}")
        return Bridge(ids)

    def missing(self, text: str, messages: Sequence[Message], marker: str) -> int | None:
        """Index of the first message whose content is not in a rendered text, before the generation prompt and outside
        of control tokens. A template may trim it, change its white space or write it as a JSON string."""
        without_control = functools.partial(self._tokens.control.sub, "\0")
        shown = _Shown(without_control(text.removesuffix(self._generation_prompt)))
        contents = (without_control(self._shape.content(message, marker)) for message in messages)
        return next((i for i, content in enumerate(contents) if content not in shown), None)

    def _rewritten(self, head: str, full: str, history: History, reply: SampledReply, marker: str) -> str:
        """Why the conversation before the reply is not shown as it was."""
        before = head + self._tokens.guard(reply.text, marker)
        for message, number in zip([*history.messages, reply.message], history.numbers, strict=True):
            reasoning = self._tokens.guard(message.get("reasoning", ""), marker).strip()
            if reasoning and reasoning in before and reasoning not in full:
                return f"the chat template dropped the reasoning of message {number}"
        at = self._tokens.first_difference(head, full)
        try:
            shown, _ = self._shape(history.messages, (), marker)
            start = len(head) - len(self._opening(shown))
        except TemplateError:
            start = len(head)
        if at >= start:
            tags = [match.start() for match in self._tokens.control.finditer(head, start)]
            ends = head[max([i for i in tags if i <= at], default=at) :]
            return f"the generation prompt ends with {ends!r}, which the chat template leaves out of history"
        return f"the chat template rewrote earlier text at character {at}: {shown_difference(head, full, at)}"

    def _opening(self, shown: Sequence[Mapping[str, Any]]) -> str:
        """The generation prompt."""
        without = self._template.text(shown, (), generation_prompt=False)
        return self._template.text(shown, (), generation_prompt=True).removeprefix(without)

    def _unlike(self, rest: str, reply: SampledReply, history: History) -> NoBridge:
        """Why the template's text of the reply is not the reply."""
        reasoning = reply.message.get("reasoning", "").strip()
        if reasoning and reasoning not in rest:
            return NoBridge(f"the chat template dropped the reasoning of message {history.numbers[-1]}")
        if not self._tokens.control.search(rest):
            return NoBridge("the chat template writes no control token after a reply")
        at = self._tokens.first_difference(reply.text, rest)
        shown = shown_difference(reply.text, rest, at)
        return NoBridge(f"the chat template rewrote the model's own reply: {shown}", form=True)


def _plain(text: str, marker: str) -> str:
    return text.replace(marker, "") if marker else text


def _same_text(region: str, sampled: str) -> bool:
    """Whether both are the same but for white space."""
    return region.strip() == sampled.strip() or "".join(region.split()) == "".join(sampled.split())


class _Shown:
    """A rendered text, in which contents are looked for."""

    def __init__(self, text: str) -> None:
        self._text = text

    @functools.cached_property
    def _squashed(self) -> str:
        return _squash(self._text)

    def __contains__(self, content: str) -> bool:
        content = content.strip()
        if content in self._text:
            return True
        escaped = _json_inner(content, ascii_only=False), _json_inner(content, ascii_only=True)
        return any(part in self._text for part in escaped) or _squash(content) in self._squashed


def _squash(text: str) -> str:
    """Without white space, and without the switches that some templates take out of what users say."""
    return _SWITCH.sub("", "".join(text.split()))


def _json_inner(text: str, *, ascii_only: bool) -> str:
    return json.dumps(text, ensure_ascii=ascii_only)[1:-1]


def _content(message: Message) -> tuple[str, str, list[tuple[str, Any]]]:
    """What a reply says, apart from white space at its ends and from how its arguments are written."""
    calls = [
        (call["function"]["name"], parsed_arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return str(message.get("content") or "").strip(), message.get("reasoning", "").strip(), calls
