"""Conversations tried out without weights: replies as a model would sample them, whether they are continued, and what
about a chat template keeps all replies from being continued."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from molt_sdk.errors import TemplateError
from molt_sdk.messages import first_difference, parsed_arguments, shown_difference
from molt_sdk.rendering.abilities import Tools
from molt_sdk.rendering.bridge import Bridge, History, NoBridge
from molt_sdk.rendering.known import TAIL
from molt_sdk.rendering.renderer import Renderer
from molt_sdk.rendering.toolcalls import CLOSE, OPEN
from molt_sdk.types import Message

USER: Message = {"role": "user", "content": "Which box holds the ball?"}
ANSWER: Message = {"role": "assistant", "content": "The second one."}
NEXT: Message = {"role": "user", "content": "And where is the key?"}
ROUNDS = 10
"""Of a conversation that is rehearsed."""


class Flaw(NamedTuple):
    """Why no conversation goes on in one segment, whatever is said."""

    kind: Literal["replies left out", "beginning rewritten", "no generation prompt", "no end", "other end"]
    shown: str = ""
    """The difference, the header that is missing, or the token that is written instead."""


class ReplyWriter:
    """Writes replies in a template's own form of content, reasoning and calls, as the model would sample them.

    Raises TemplateError for a model without a chat template.
    """

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.flaws = list(_flaws(renderer))
        kinds = {flaw.kind for flaw in self.flaws}
        self.cuts = kinds <= {"other end"}
        """Whether a reply can be told from what stands around it in a rendered conversation."""
        self._end = next(iter(renderer.files.eos_token_ids), None) if kinds & {"no end", "other end"} else None
        self.reasons = self._reasons()
        """Whether replies hold reasoning, as far as the template tells: it knows reasoning, and the generation prompt
        does not close it at once."""

    def _reasons(self) -> bool:
        chat = self.renderer.chat
        if not chat.abilities.reasoning_key:
            return chat.opens_thinking
        try:
            prompt = self.renderer.prompt([USER])
        except TemplateError:
            return False
        return not self.renderer.tokens.decode(prompt[-TAIL:]).rstrip().endswith("</think>")

    def write(self, message: Message, tools: Tools = ()) -> list[int]:
        """Ids of a reply, with content and reasoning also where the template drops them.

        Raises TemplateError where there is no telling how the model would write it.
        """
        ids = self._written(message, tools)
        if self._end is None:
            return ids
        return [*ids[: len(ids) - (ids[-1:] == [self.renderer.chat.end_of_turn])], self._end]

    def _written(self, message: Message, tools: Tools) -> list[int]:
        renderer, chat = self.renderer, self.renderer.chat
        content, reasoning = str(message.get("content") or ""), message.get("reasoning", "")
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        if not self.cuts:
            if functions and not chat.emulates_tools:
                raise TemplateError(f"{chat.template.place}: a call cannot be told from what stands around it")
            calls = [{"name": f["name"], "arguments": parsed_arguments(f["arguments"])} for f in functions]
            texts = [f"{OPEN}{json.dumps(call, ensure_ascii=False)}{CLOSE}" for call in calls]
            return renderer.encode_reply("\n".join(filter(None, [content, *texts])), end=True)
        ids = renderer.write_reply(message, tools)
        if functions and not ids:
            raise TemplateError(f"{chat.template.place} leaves out calls")
        if not functions and content not in renderer.tokens.decode(ids):
            ids = renderer.encode_reply(content, end=True)
        text = renderer.tokens.decode(ids)
        if not reasoning or reasoning in text:
            return ids
        if "<think></think>" in text:
            return renderer.tokens.encode(text.replace("<think></think>", f"<think>{reasoning}</think>", 1))
        if chat.abilities.reasoning_key:
            return ids
        return renderer.tokens.encode(f"<think>\n{reasoning}\n</think>\n\n{text}")


def _flaws(renderer: Renderer) -> Iterator[Flaw]:
    chat, tokens = renderer.chat, renderer.tokens

    def render(*messages: Message, opened: bool) -> str:
        shown, schemas = chat.shape(list(messages), (), "")
        return chat.template.text(shown, schemas, generation_prompt=opened)

    try:
        closed, prompt = render(USER, opened=False), render(USER, opened=True)
        full = render(USER, ANSWER, NEXT, opened=True)
    except TemplateError:  # told where these messages are tried
        return
    asked, said = str(USER["content"]), str(ANSWER["content"])
    same = tokens.first_difference(prompt, full)
    header, shown, after = full[same:].partition(said)
    if not shown:
        yield Flaw("replies left out")
    elif same < prompt.rfind(asked) + len(asked):
        yield Flaw("beginning rewritten", shown_difference(prompt, full, same))
    else:
        if prompt == closed and header.strip():
            yield Flaw("no generation prompt", header)
        end, own = chat.end_of_turn, renderer.files.eos_token_ids
        follows = tokens.control.match(after.lstrip())
        known = end in own or (follows is not None and tokens.control_ids[follows[0]] in own)
        if own and end is None and not known:
            yield Flaw("no end")
        elif own and end is not None and not known:
            yield Flaw("other end", str(tokens.tokenizer.id_to_token(end)))


class Rehearsal(NamedTuple):
    """What became of a conversation of ``ROUNDS`` rounds."""

    reason: str
    """Why its first new segment started; "" if it is one."""
    unseen: bool
    """A prompt left out a reply."""
    segments: int
    factor: float
    """Distinct tokens of its segments, which is what is trained on, by those of one segment that would have gone on."""


def rehearse(
    writer: ReplyWriter, before: Sequence[Message], replies: Sequence[Message], tools: Tools = (), *, cut: bool = False
) -> Rehearsal:
    """A conversation in which rounds of ``replies`` follow ``before``, after each of them the results of its calls or
    a user message. ``cut``: the replies are cut in the middle. Raises TemplateError."""
    renderer = writer.renderer
    written = [writer.write(reply, tools) for reply in replies]
    if cut:
        written = [renderer.encode_reply(renderer.text(ids), end=False) for ids in written]
        written = [ids[: max(1, len(ids) // 2)] for ids in written]
    added = [_added(writer, before, reply, tools) for reply in replies]
    messages, prompt = list(before), renderer.prompt(before, tools)
    single = len(prompt) + ROUNDS * (sum(map(len, written)) + sum(added)) - added[-1]
    rows: list[list[int]] = []
    reason, unseen, segments, root = "", False, 0, True
    for number, ids in enumerate(written * ROUNDS, 1):
        read = renderer.parse(ids, "length" if cut else "stop", tools, prompt=prompt[-TAIL:]).message
        new, history = results_of(read) or [_question(number)], History(list(messages), range(len(messages) + 1))
        bridge = renderer.bridge(history, read, ids, new, tools, prompt=prompt[-TAIL:])
        messages += [read, *new]
        rows.append([*prompt, *ids])
        segments, root = segments + root, isinstance(bridge, NoBridge)
        if isinstance(bridge, Bridge):
            prompt = [*rows[-1], *bridge.token_ids]
            continue
        reason, prompt = reason or bridge.reason, renderer.prompt(messages, tools)
        unseen = unseen or str(read.get("content") or "").strip() not in renderer.tokens.decode(prompt)
    rows.sort()
    shared = sum(first_difference(one, other) for one, other in itertools.pairwise(rows))
    return Rehearsal(reason, unseen, segments, (sum(map(len, rows)) - shared) / single)


def _added(writer: ReplyWriter, before: Sequence[Message], reply: Message, tools: Tools) -> int:
    """Tokens that stand between a reply and the next one. It is shown without reasoning, which no template drops."""
    plain: Message = {"role": "assistant", "content": reply["content"]}
    if "tool_calls" in reply:
        plain["tool_calls"] = reply["tool_calls"]
    prompt = writer.renderer.prompt
    longer = prompt([*before, plain, *(results_of(plain) or [_question(1)])], tools)
    return max(0, len(longer) - len(prompt(before, tools)) - len(writer.write(plain, tools)))


def _question(number: int) -> Message:
    """No two are the same: a template may look for the last user message by comparing it with each."""
    return {"role": "user", "content": f"And where is key {number}?"}


def results_of(reply: Message, text: str = "box 2") -> list[Message]:
    """A result for each call of a reply."""
    return [
        {"role": "tool", "content": text, "tool_call_id": call["id"], "name": call["function"]["name"]}
        for call in reply.get("tool_calls") or ()
    ]
