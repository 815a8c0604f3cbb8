"""What start-up finds out about a model: how its chat template continues, and who can read its replies."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from loguru import logger

from molt_sdk.errors import TemplateError
from molt_sdk.messages import parsed_arguments
from molt_sdk.rendering.abilities import PROBE_TOOL, Abilities, Shaper, Tools, find_abilities
from molt_sdk.rendering.bridge import Bridge, Bridger, History, NoBridge, SampledReply
from molt_sdk.rendering.known import KnownModel, candidates
from molt_sdk.rendering.replies import ReplyParser
from molt_sdk.rendering.template import ChatTemplate, ModelFiles
from molt_sdk.rendering.toolcalls import HERMES, CallForm, learned_form, split_reasoning, tool_call
from molt_sdk.rendering.window import window_of
from molt_sdk.types import Message


class Chat:
    """A chat template with what start-up found out about it."""

    def __init__(self, files: ModelFiles) -> None:
        self.files = files
        _ = files.tokens.plain  # made now: a large vocabulary takes a second, which no call should wait for
        self.template = ChatTemplate(files)
        self.abilities: Abilities = find_abilities(self.template)
        self.end_of_turn = self._find_end_of_turn()
        """Id of the control token that the template writes right after a reply; None if it writes none."""
        opening, self._generation_prompt = self._opening()
        self._opening_ids = files.tokens.encode(opening)
        self.opens_thinking = opening.rstrip().endswith("<think>")
        self.emulates_tools = not self.abilities.tools
        self.why_emulated = "does not show tools, their calls and their results" if self.emulates_tools else ""
        self.known: KnownModel | None = None
        """The model of the ``renderers`` library that this is."""
        self._build(None)
        if self.abilities.tools or self.abilities.reasoning_key:  # else the library adds nothing
            self.known = next(filter(self._agrees, self._candidates()), None)
            self._build(None)
        if self.abilities.tools and not self.reads_its_calls() and not self._find_reader():
            self.emulates_tools = True
            self.why_emulated = "writes tool calls in a form that cannot be read back"
            self._build(None)
        self.windowed = self._windows_suffice()
        """Whether long probe conversations are continued alike from all of their messages and from a window."""
        self.known_bridges = self.known is not None and self._same_bridge(self.known)
        """Whether the library's bridge may stand in for ours."""

    def _windows_suffice(self) -> bool:
        bridged = False
        for conversation, tools in LONG_PROBES:
            *before, reply, new = conversation
            numbers = window_of(before).numbers
            everything = History(before, range(len(before) + 1))
            shown = History([before[i] for i in numbers], [*numbers, len(before)])
            try:
                sampled = SampledReply(self.parser.text(self.written(reply, tools)), reply, None)
            except TemplateError:
                continue
            whole, part = (self.bridger.bridge(history, sampled, [new], tools) for history in (everything, shown))
            if isinstance(whole, Bridge) or isinstance(part, Bridge):
                bridged = True
                if whole != part:
                    return False
        return bridged

    def _build(self, reader: KnownModel | None, form: CallForm = HERMES) -> None:
        """Everything that depends on who reads the replies."""
        self.reader = reader
        """What reads the replies; None for our own reader."""
        self.form = form
        eos = [*self.files.eos_token_ids, *([] if self.end_of_turn is None else [self.end_of_turn])]
        for known in (self.known, reader):  # not those of a family whose reader alone is borrowed
            eos += known.stop_token_ids if known and (known is self.known or known.channels) else []
        self.eos_token_ids = tuple(dict.fromkeys(eos))
        tokens = self.files.tokens
        self.shape = Shaper(self.abilities, tokens, emulate=self.emulates_tools)
        self.parser = ReplyParser(tokens, self.eos_token_ids, reader, form, opens_thinking=self.opens_thinking)
        self.bridger = Bridger(
            self.template, tokens, self.shape, self.eos_token_ids, self._parse_text, self._generation_prompt
        )

    def _parse_text(self, text: str, tools: Tools) -> Message:
        return self.parser.parse(self.files.tokens.encode(text), "stop", tools, prompt=self._opening_ids).message

    def _candidates(self) -> Iterator[KnownModel]:
        dates = {form: self.template.now.strftime(form) for form in ("%d %b %Y", "%Y-%m-%d")}
        return candidates(self.files.tokens, self.files.hub_name, dates)

    def _find_end_of_turn(self) -> int | None:
        try:
            rendered = self.template.text([USER, PLAIN_REPLY], (), generation_prompt=False)
        except TemplateError:
            return None
        _, shown, after = rendered.rpartition(PLAIN_TEXT)
        match = self.files.tokens.control.match(after.lstrip()) if shown else None
        return self.files.tokens.control_ids[match[0]] if match else None

    def _opening(self) -> tuple[str, str]:
        """The probe's prompt, and the generation prompt at its end."""
        try:
            prompt = self.template.text([USER], (), generation_prompt=True)
            without = self.template.text([USER], (), generation_prompt=False)
        except TemplateError:
            return "", ""
        return prompt, prompt.removeprefix(without) if prompt.startswith(without) else ""

    def _agrees(self, known: KnownModel) -> bool:
        """Whether the library renders the probes as the template does, token for token."""
        if known.channels:  # taken for its reader alone
            return False
        try:
            return all(
                known.prompt(messages, tools) == self.files.tokens.encode(self.bridger.render(messages, tools, ""))
                for messages, tools in PROBES
                if self._can_show(messages, tools)
            )
        except Exception as error:  # a library's refusal of a conversation, or the template's
            logger.trace("renderers: {} is not {}: {!r}", self.template.place, known.name, error)
            return False

    def _can_show(self, messages: Sequence[Message], tools: Tools) -> bool:
        """Whether the template itself shows a probe, no part of it in another form."""
        can = self.abilities
        reasons = any("reasoning" in message for message in messages)
        starts_with_system = messages[0]["role"] == "system"
        return (
            (can.system or not starts_with_system)
            and (can.tools or not tools)
            and bool(can.reasoning_key or not reasons)
        )

    def _same_bridge(self, known: KnownModel) -> bool:
        """Whether the library continues a plain reply as the template does, where both can."""
        if self.end_of_turn is None:
            return False
        completion = [*self.files.tokens.encode(PLAIN_TEXT), self.end_of_turn]
        reply = SampledReply(PLAIN_TEXT, PLAIN_REPLY, self.end_of_turn)
        own = self.bridger.bridge(History([USER], [0, 1]), reply, [USER], ())
        theirs = known.bridge(self._opening_ids, completion, [USER], ())
        return theirs is None or isinstance(own, NoBridge) or own.token_ids == theirs

    def reads_its_calls(self) -> bool:
        """Whether a call that the template writes is read back from its ids."""
        try:
            ids = self.written(CALL, [PROBE_TOOL])
        except TemplateError:
            return False
        message = self.parser.parse(ids, "stop", [PROBE_TOOL], prompt=self._opening_ids).message
        read = [
            (call["function"]["name"], parsed_arguments(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        ]
        return read == [("MOLTTOOL", ARGUMENTS)]

    def _find_reader(self) -> bool:
        """Take a reader of the library, the known model's first, else a form learned from the template, if it reads its
        calls."""
        known = [self.known] if self.known else []
        for reader in itertools.chain(known, self._candidates()):
            self._build(reader)
            if self.reads_its_calls():
                return True
        self._build(None)
        try:
            text = self.parser.text(self.written(CALL, [PROBE_TOOL]))
        except TemplateError:
            return False
        _, content = split_reasoning(text, thinking=self.opens_thinking)
        learned = learned_form(content, "MOLTTOOL", ARGUMENTS, CALL["tool_calls"][0]["id"])
        self._build(None, learned or HERMES)
        return learned is not None and self.reads_its_calls()

    def written(self, reply: Message, tools: Tools) -> list[int]:
        """Ids of a reply as the template shows it right after its request: what a model would have to sample."""
        tokens = self.files.tokens
        results: list[Message] = [
            {"role": "tool", "content": "MOLTRESULT", "tool_call_id": call["id"], "name": call["function"]["name"]}
            for call in reply.get("tool_calls") or ()
        ]
        if len(results) > 1 and not (self.emulates_tools or self.abilities.parallel_calls):
            raise TemplateError(f"{self.template.place} shows one call per reply")
        marker = self.shape.marker_for([reply], tools)
        head = self.bridger.render([USER], tools, marker)
        full = self.bridger.render([USER, reply, *(results or [USER])], tools, marker)
        rest, closing = self._reply_in(full, head, "MOLTRESULT" if results else "MOLTUSER")
        if self.bridger.missing(rest, [reply], marker) is not None:
            beside = " beside tool calls" if results else ""
            raise TemplateError(f"{self.template.place} leaves out what a reply says{beside}")
        if not results:  # once a user message follows, some templates drop the reasoning or write another end
            shown, schemas = self.shape([USER, reply], tools, marker)
            last = self.template.text(shown, schemas, generation_prompt=False)
            rest, own_closing = self._reply_in(last, head, "")
            rest = rest if own_closing else rest.rstrip() + closing
        if self.opens_thinking:  # in the prompt, and some templates leave it out of history
            rest = rest.removeprefix("<think>")
            if rest.count("</think>") <= json.dumps(reply, ensure_ascii=False).count("</think>"):
                rest = f"{reply.get('reasoning', '')}\n</think>\n\n{rest}"
        return tokens.encode(rest, marker)

    def _reply_in(self, full: str, head: str, until: str) -> tuple[str, str]:
        """What follows ``head`` in ``full`` up to the first EOS token, and that token; else up to ``until``."""
        tokens = self.files.tokens
        rest = full[tokens.first_difference(head, full) :]
        after = rest.find(until) if until else -1
        rest = rest[:after] if after >= 0 else rest
        ends = (m for m in tokens.control.finditer(rest) if tokens.control_ids[m[0]] in self.eos_token_ids)
        end = next(ends, None)
        return (rest[: end.end()], end[0]) if end else (rest, "")


USER: Message = {"role": "user", "content": "MOLTUSER"}
SYSTEM: Message = {"role": "system", "content": "MOLTSYSTEM"}
PLAIN_TEXT = "MOLTREPLY"
PLAIN_REPLY: Message = {"role": "assistant", "content": PLAIN_TEXT}
ARGUMENTS = {"x": "MOLTVALUE", "n": 3, "deep": {"list": ["a", "b"]}}


def _calling(arguments: dict[str, Any]) -> Message:
    call = tool_call("call00000", "MOLTTOOL", json.dumps(arguments))
    return {"role": "assistant", "content": "", "tool_calls": [call]}


CALL = _calling(ARGUMENTS)
THOUGHTFUL_CALL: Message = {**CALL, "reasoning": "MOLTTHOUGHT"}
ALL_KINDS = _calling({**ARGUMENTS, "yes": True})
"""Not read back: some templates write True, which no model does."""
RESULT: Message = {"role": "tool", "content": "MOLTRESULT", "tool_call_id": "call00000", "name": "MOLTTOOL"}
THOUGHT: Message = {**PLAIN_REPLY, "reasoning": "MOLTTHOUGHT"}
PROBES: tuple[tuple[list[Message], Tools], ...] = (
    ([USER], ()),
    ([SYSTEM, USER], ()),
    ([USER, PLAIN_REPLY, USER], ()),
    ([USER, THOUGHT, USER], ()),
    ([SYSTEM, USER, ALL_KINDS, RESULT], [PROBE_TOOL]),
    ([USER, {**ALL_KINDS, "reasoning": "MOLTTHOUGHT"}, RESULT], [PROBE_TOOL]),
)

LONG_PROBES: tuple[tuple[list[Message], Tools], ...] = (
    ([SYSTEM, USER, *[PLAIN_REPLY, USER] * 12], ()),
    ([USER, *[CALL, RESULT] * 12], [PROBE_TOOL]),
    ([USER, *[CALL, RESULT] * 12, PLAIN_REPLY, USER], [PROBE_TOOL]),
    ([USER, *[CALL, RESULT, PLAIN_REPLY, USER] * 6], [PROBE_TOOL]),
    ([USER, THOUGHT, USER, *[PLAIN_REPLY, USER] * 12], ()),
    ([USER, *[THOUGHTFUL_CALL, RESULT] * 12], [PROBE_TOOL]),
    ([USER, THOUGHTFUL_CALL, RESULT, *[CALL, RESULT] * 12, PLAIN_REPLY, USER], [PROBE_TOOL]),
)
