"""All conversions between messages and token ids for one model directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from loguru import logger

from molt_sdk.errors import TemplateError
from molt_sdk.messages import parsed_arguments
from molt_sdk.rendering.abilities import PROBE_TOOL, Abilities, Shaper, Tools, find_abilities
from molt_sdk.rendering.bridge import Bridge, Bridger, History, NoBridge, SampledReply, shows_content
from molt_sdk.rendering.known import KnownModel, candidates
from molt_sdk.rendering.replies import ParsedCompletion, ReplyParser
from molt_sdk.rendering.template import ChatTemplate, ModelFiles
from molt_sdk.rendering.toolcalls import HERMES, learned_form, split_reasoning, tool_call
from molt_sdk.rendering.window import window_of
from molt_sdk.types import FinishReason, Message

__all__ = ["Bridge", "History", "NoBridge", "ParsedCompletion", "Renderer"]


class Renderer:
    """Prompts, bridges and parsed replies. Stateless after construction; safe to share between threads.

    Raises:
        ModelPathError: the directory is not a model with a tokenizer.
        TemplateError: its chat template does not compile.
    """

    def __init__(self, model: str, *, emulate_tools: bool = True) -> None:
        self.files = ModelFiles(model)
        self._emulate_tools = emulate_tools
        self.tokens = self.files.tokens
        self._chat = _Chat(self.files) if self.files.chat_template is not None else None

    @property
    def chat(self) -> _Chat:
        """Raises TemplateError for a model without a chat template."""
        return self._chat if self._chat is not None else _Chat(self.files)

    def require_tools(self) -> None:
        """Raise TemplateError if tools can only be emulated and that is switched off."""
        if self.chat.emulates_tools and not self._emulate_tools:
            raise TemplateError(
                f"{self.chat.template.place} {self.chat.why_emulated}; use another model, or allow tools in plain text "
                "with RolloutConfig(tool_emulation=True)"
            )

    @property
    def context_length(self) -> int:
        return self.files.context_length

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply: those of the model's config, the end of turn of its template, its family's own."""
        return self._chat.eos_token_ids if self._chat is not None else self.files.eos_token_ids

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids of a new root: the rendered conversation with the generation prompt.

        Raises TemplateError where the template refuses the messages or leaves one out.
        """
        if tools:
            self.require_tools()
        bridger, shape = self.chat.bridger, self.chat.shape
        marker = self.tokens.marker_for(messages, tools)
        text = bridger.render(messages, tools, marker)
        for i, message in enumerate(messages):
            if message["role"] != "assistant" and not shows_content(text, shape.content(message, marker)):
                raise TemplateError(f"{self.chat.template.place} leaves out message {i} ({message['role']})")
        return self.tokens.encode(text, marker)

    def raw_prompt(self, text: str) -> list[int]:
        """Ids of raw text for ``model.complete``: BOS exactly once, if tokenizer.json or ``add_bos_token`` says so.
        Special tokens in the text are control tokens here: whoever writes raw text writes the whole prompt."""
        ids = list(self.files.tokenizer.encode(text, add_special_tokens=True).ids)
        bos = self.tokens.special_ids.get(self.files.special_map.get("bos_token", ""))
        if bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        if bos is not None and self.files.tokenizer_config.get("add_bos_token") is True and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def bridge(
        self,
        history: History,
        reply: Message,
        completion_token_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Tools = (),
        *,
        prompt: Sequence[int] = (),
    ) -> Bridge | NoBridge:
        """What follows ``history`` + completion so that ``new_messages`` continue it.

        Args:
            history: the conversation before the reply; :func:`window` says which part is enough.
            reply: the completion, parsed.
            completion_token_ids: the completion as it was sampled.
            new_messages: what came after it.
            tools: schemas offered, the same as for the reply.
            prompt: the latest ids of the prompt of the reply.
        """
        chat = self.chat
        ended = completion_token_ids[-1] if completion_token_ids[-1] in chat.eos_token_ids else None
        sampled = SampledReply(chat.parser.text(completion_token_ids), reply, ended)
        bridge = chat.bridger.bridge(history, sampled, new_messages, tools)
        if isinstance(bridge, NoBridge) and bridge.form and ended == chat.end_of_turn:
            ids = self._known_bridge(completion_token_ids, new_messages, tools, prompt)
            return bridge if ids is None else Bridge(ids)
        return bridge

    def _known_bridge(
        self, completion: Sequence[int], new: Sequence[Message], tools: Tools, prompt: Sequence[int]
    ) -> list[int] | None:
        """The library's bridge, for a reply whose form alone kept ours from being proved; it must lose no message."""
        chat = self.chat
        if chat.known is None or not chat.known_bridges or any(m["role"] not in ("user", "tool") for m in new):
            return None
        ids = chat.known.bridge(prompt, completion, new, tools)
        text = self.tokens.decode(ids or ())
        return ids if all(shows_content(text, str(message.get("content") or "")) for message in new) else None

    @property
    def windowed(self) -> bool:
        """Whether the messages that a :class:`~molt_sdk.rendering.window.Window` keeps decide how the template
        continues."""
        return self.chat.windowed

    def encode_reply(self, text: str, *, end: bool) -> list[int]:
        """Ids of a reply as a model would sample it, closed by the template's end-of-turn token if ``end``."""
        ids = self.tokens.encode(text)
        if end and self.eos_token_ids:
            closing = self._chat.end_of_turn if self._chat is not None else None
            ids.append(closing if closing is not None else self.eos_token_ids[0])
        return ids

    def write_reply(self, reply: Message, tools: Tools = ()) -> list[int]:
        """Ids of an assistant message as a model would sample it, in the template's own form of reasoning and calls.

        Raises TemplateError where the template refuses it.
        """
        return self.chat.written(reply, tools)

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of a completion without its closing EOS; other special tokens stay visible."""
        ended = bool(token_ids) and token_ids[-1] in self.eos_token_ids
        return self.tokens.decode(token_ids[:-1] if ended else token_ids)

    def parse(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason,
        tools: Tools = (),
        call_prefix: str = "call_",
        *,
        prompt: Sequence[int] = (),
    ) -> ParsedCompletion:
        """The assistant message of a completion: content, reasoning, tool calls (only if tools were offered)."""
        return self.chat.parser.parse(token_ids, finish_reason, tools, call_prefix, prompt)


class _Chat:
    """A chat template with what start-up found out about it."""

    def __init__(self, files: ModelFiles) -> None:
        self.files = files
        _ = files.tokens.plain  # made now: a large vocabulary takes a second, which no call should wait for
        self.template = ChatTemplate(files)
        self.abilities: Abilities = find_abilities(self.template)
        self.end_of_turn = self._find_end_of_turn()
        """Id of the control token that the template writes right after a reply; None if it writes none."""
        self._opening_ids = files.tokens.encode(self._opening())
        self.opens_thinking = self._opening().rstrip().endswith("<think>")
        self.known: KnownModel | None = None
        self.form = HERMES
        self.emulates_tools = not self.abilities.tools
        self.why_emulated = "does not show tools, their calls and their results" if self.emulates_tools else ""
        self._build(None)
        if self.abilities.tools or self.abilities.reasoning_key:  # else the library adds nothing
            self._build(next(filter(self._agrees, self._candidates()), None))
        if self.abilities.tools and not self.reads_its_calls() and not self._find_reader():
            self.emulates_tools = True
            self.why_emulated = "writes tool calls in a form that cannot be read back"
            self._build(None)
        self.windowed = all(self._same_from_window(conversation, tools) for conversation, tools in LONG_PROBES)
        """Whether long probe conversations are continued alike from all of their messages and from a window."""
        self.known_bridges = self.known is not None and self._agrees(self.known) and self._same_bridge(self.known)
        logger.trace(
            "{}: replies read by {}",
            self.template.place,
            f"renderers ({self.known.name})" if self.known else "molt_sdk",
        )

    def _same_from_window(self, conversation: list[Message], tools: Tools) -> bool:
        reply, new = conversation[-2:]
        before = conversation[:-2]
        sampled = SampledReply(PLAIN_TEXT, reply, None)
        numbers = window_of(before).numbers
        shown = History([before[i] for i in numbers], [*numbers, len(before)])
        everything = History(before, range(len(before) + 1))
        whole, part = (self.bridger.bridge(history, sampled, [new], tools) for history in (everything, shown))
        return whole == part or (isinstance(whole, NoBridge) and isinstance(part, NoBridge))

    def _build(self, known: KnownModel | None) -> None:
        eos = [*self.files.eos_token_ids, *([self.end_of_turn] if self.end_of_turn is not None else [])]
        self.eos_token_ids = tuple(dict.fromkeys([*eos, *(known.stop_token_ids if known else ())]))
        tokens = self.files.tokens
        self.known = known
        self.shape = Shaper(self.abilities, tokens, emulate=self.emulates_tools)
        self.parser = ReplyParser(tokens, self.eos_token_ids, known, self.form, opens_thinking=self.opens_thinking)
        self.bridger = Bridger(self.template, tokens, self.shape, self.eos_token_ids, self._parse_text)

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
        after = rendered[rendered.rfind(PLAIN_TEXT) + len(PLAIN_TEXT) :]
        match = self.files.tokens.control.match(after.lstrip())
        return self.files.tokens.control_ids[match[0]] if match else None

    def _opening(self) -> str:
        try:
            return self.template.text([USER], (), generation_prompt=True)
        except TemplateError:
            return ""

    def _agrees(self, known: KnownModel) -> bool:
        """Whether the library renders the probes as the template does, token for token."""
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
            return True
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
        """Take a reader of the library, else a form learned from the template, that reads its calls."""
        for known in self._candidates():
            self._build(known)
            if self.reads_its_calls():
                return True
        self._build(None)
        try:
            text = self.parser.text(self.written(CALL, [PROBE_TOOL]))
        except TemplateError:
            return False
        _, content = split_reasoning(text, thinking=self.opens_thinking)
        learned = learned_form(content, "MOLTTOOL", ARGUMENTS, CALL["tool_calls"][0]["id"])
        self.form = learned or HERMES
        self._build(None)
        return learned is not None and self.reads_its_calls()

    def written(self, reply: Message, tools: Tools) -> list[int]:
        """Ids of a reply as the template shows it right after its request: what a model would have to sample."""
        tokens = self.files.tokens
        results: list[Message] = [
            {"role": "tool", "content": "MOLTRESULT", "tool_call_id": call["id"], "name": call["function"]["name"]}
            for call in reply.get("tool_calls") or ()
        ]
        marker = tokens.marker_for([reply], tools)
        head = self.bridger.render([USER], tools, marker)
        full = self.bridger.render([USER, reply, *(results or [USER])], tools, marker)
        rest, closing = self._reply_in(full, head, "MOLTRESULT" if results else "MOLTUSER")
        if not results:  # once a user message follows, some templates drop the reasoning or write another end
            shown, schemas = self.shape([USER, reply], tools, marker)
            last = self.template.text(shown, schemas, generation_prompt=False)
            rest, own_closing = self._reply_in(last, head, "")
            rest = rest if own_closing else rest.rstrip() + closing
        if self.opens_thinking:  # in the prompt, and some templates leave it out of history
            rest = rest.removeprefix("<think>")
            if "</think>" not in rest:
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
    ([USER, *[CALL, RESULT] * 12, PLAIN_REPLY, USER], [PROBE_TOOL]),
    ([USER, *[CALL, RESULT, PLAIN_REPLY, USER] * 6], [PROBE_TOOL]),
    ([USER, THOUGHT, USER, *[PLAIN_REPLY, USER] * 12], ()),
    ([USER, {**CALL, "reasoning": "MOLTTHOUGHT"}, RESULT, *[CALL, RESULT] * 12, PLAIN_REPLY, USER], [PROBE_TOOL]),
)
