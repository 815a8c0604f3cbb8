"""What a model directory makes of an agent's conversations: tried on short ones, with the code that a rollout uses.

Tokenizer and chat template decide it; no weights are looked at.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from molt_sdk.errors import TemplateError
from molt_sdk.messages import parsed_arguments
from molt_sdk.rendering.abilities import ID_FORMS, Shaper, Tools
from molt_sdk.rendering.known import TAIL
from molt_sdk.rendering.probe import ANSWER, NEXT, ROUNDS, USER, Flaw, Rehearsal, ReplyWriter, rehearse, results_of
from molt_sdk.rendering.renderer import Renderer
from molt_sdk.rendering.template import UNKNOWN_LENGTH
from molt_sdk.rendering.toolcalls import OPEN, tool_call
from molt_sdk.report import Finding, Verdict
from molt_sdk.types import Message

SYSTEM: Message = {"role": "system", "content": "Answer in one word."}
DEVELOPER: Message = {**SYSTEM, "role": "developer"}
REASONING = "It was moved from the first."
THOUGHT: Message = {**ANSWER, "reasoning": REASONING}
PARAMETERS = {"query": {"type": "string"}, "count": {"type": "integer"}, "filter": {"type": "object"}}
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": PARAMETERS},
    },
}
ARGUMENTS: Mapping[str, dict[str, Any]] = {
    "text and numbers": {"query": "ball", "count": 3},
    "nested data": {"filter": {"tags": ["red", "round"], "range": [1, 2.5]}},
    "other scripts": {"query": "Zürich, 日本, \U0001f469\u200d\U0001f467"},
    "quotes, escapes and line breaks": {"query": 'say "a\\b" <c> & {d}\n\te'},
}
"""Arguments that must survive being written and read. No booleans: some templates write True, which no model does."""
MOST_LISTED = 12
"""Tokens that one sentence names."""
COSTLY = 1.25
"""Times the tokens of one segment, from which on several are worth a warning."""
REFUSED = "an agent that needs this fails; use another chat template, or an agent that does without"
PUBLISHED = "use the chat template that the model was published with"
FLAWS: Mapping[str, tuple[str, str]] = {
    "beginning rewritten": (
        "writes the beginning anew when the conversation goes on: {shown}",
        "take what changes out of the template",
    ),
    "no generation prompt": (
        "ignores add_generation_prompt: a prompt ends before {shown!r}, which the model itself would have to write",
        "end the template with {{% if add_generation_prompt %}}, that text and {{% endif %}}",
    ),
    "no end": (
        "writes no end token after a reply",
        "add one: let the template write {eos}, with which the model ends its replies, after each of them",
    ),
    "other end": (
        "closes a reply with {shown!r}, but the model's configs name {eos}: a reply that ends so starts a new segment",
        "let the template write the token with which the model ends its replies; if that is {shown!r}, add its id to "
        "eos_token_id in generation_config.json",
    ),
}
"""What the chat template does, and the next step."""


class Told(NamedTuple):
    """A finding without its heading and its name."""

    text: str
    verdict: Verdict = "ok"
    advice: str = ""
    details: tuple[str, ...] = ()


UNSEEN = Told(
    "the chat template leaves out the assistant's earlier reply: the model does not see what it said",
    "problem",
    "use a chat template that shows every message",
)
Section = Mapping[str, Callable[[], Told]]


def model_findings(renderer: Renderer) -> list[Finding]:
    """All about one model directory; what says the same is one finding."""
    findings = []
    for area, section in _sections(renderer).items():
        names: dict[Told, list[str]] = {}
        for name, tell in section.items():
            try:
                told = tell()
            except TemplateError as error:
                told = Told(str(error), "problem", REFUSED)
            names.setdefault(told, []).append(name)
        findings += [Finding(area=area, name=", ".join(alike), **told._asdict()) for told, alike in names.items()]
    return findings


def _sections(renderer: Renderer) -> Mapping[str, Section]:
    if renderer.files.chat_template is None:
        missing = "the model directory has none, so model.chat and model.run cannot be used"
        step = "save the model with a chat_template.jinja, or write the agent with model.complete on raw text"
        template: Section = {"chat template": lambda: Told(missing, "problem", step)}
        return {"Model": {**_limits(renderer), **template}}
    check = _ChatCheck(renderer)
    return {
        "Model": {**_limits(renderer), **check.tokens()},
        "Prefix stability: does a conversation go on in one segment?": check.prefix_stability(),
        "Tools": check.tools(),
        "Replies: does reading them give back what was written?": check.replies(),
        "Roles": check.roles(),
    }


def _limits(renderer: Renderer) -> Section:
    def context() -> Told:
        if renderer.context_length == UNKNOWN_LENGTH:
            step = "add max_position_embeddings to config.json, so that a conversation that is too long is noticed"
            return Told("config.json names no context length", "warning", step)
        return Told(f"{renderer.context_length:,} tokens for prompt and reply")

    def end_tokens() -> Told:
        ids = renderer.eos_token_ids
        if not ids:
            step = "set eos_token_id in generation_config.json or config.json"
            return Told("no token is known that ends a reply, so every reply runs until max_tokens", "problem", step)
        if unknown := [i for i in ids if renderer.tokens.tokenizer.id_to_token(i) is None]:
            text = f"eos_token_id {_listed(unknown)} of the model's configs is no id of its tokenizer"
            return Told(text, "problem", "tokenizer and configs are of different models; save them together")
        return Told(f"a reply ends with {_named(renderer, ids)}")

    return {"context": context, "EOS": end_tokens}


class _ChatCheck:
    """What is tried on a chat template: each method gives one finding, or a section of them. TemplateError, which any
    may raise, is a finding too."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.chat = renderer.chat
        self.writer = ReplyWriter(renderer)
        self.source = renderer.files.chat_template or ""
        self.decode = renderer.tokens.decode
        self.no_tools: Told | None = None
        """Why they cannot be used at all."""
        try:
            renderer.require_tools()
        except TemplateError as error:
            self.no_tools = Told(str(error), "problem", REFUSED)

    # --- tokens -------------------------------------------------------------------------------------------------------

    def tokens(self) -> Section:
        names = ("end of turn", "BOS", "special tokens", "date")
        return dict(zip(names, (self.end_of_turn, self.begin, self.special, self.date), strict=True))

    def end_of_turn(self) -> Told:
        end = self.chat.end_of_turn
        if end is None:
            return Told("the chat template writes no token of its own after a reply")
        known = end in self.renderer.files.eos_token_ids
        added = "" if known else "; no config names it as EOS, but replies end there all the same"
        return Told(f"{_named(self.renderer, [end])}{added}")

    def begin(self) -> Told:
        bos = self.renderer.tokens.special_ids.get(self.renderer.files.special_map.get("bos_token", ""))
        if bos is None:
            return Told("none")
        prompt, name = self.renderer.prompt([USER]), _named(self.renderer, [bos])
        if prompt[:2] == [bos, bos]:
            step = "take one of them out of the template: the model was not trained on two"
            return Told(f"the chat template writes {name} twice", "warning", step)
        return Told(f"{name}; the chat template {'begins' if prompt[0] == bos else 'does not begin'} with it")

    def special(self) -> Told:
        own = [text for text in self.renderer.tokens.control_ids if text in self.source]
        shown = f"the chat template writes {_listed(own)}" if own else "the chat template spells out none of them"
        return Told(f"{len(self.renderer.tokens.special_ids)} in the tokenizer; {shown}")

    def date(self) -> Told:
        year = self.chat.template.now.strftime("%Y")
        if "strftime_now" in self.source and year in self.decode(self.renderer.prompt([USER])):
            still = "it stands still during a run, but a run on another day has other prompts"
            return Told(f"the chat template writes it: {still}")
        return Told("the chat template writes none")

    # --- prefix stability ---------------------------------------------------------------------------------------------

    def prefix_stability(self) -> Section:
        if self.writer.flaws:  # what is wrong with all conversations says nothing new about each
            kinds = {flaw.kind: functools.partial(self.flawed, flaw) for flaw in self.writer.flaws}
            return {f"every conversation ({kind})": tell for kind, tell in kinds.items()}
        call, answer = _calling(ARGUMENTS["text and numbers"]), ANSWER
        if self.writer.reasons:
            call, answer = {**call, "reasoning": REASONING}, THOUGHT
        conversations: dict[str, tuple[list[Message], list[Message], Tools]] = {
            "plain chat": ([SYSTEM, USER], [ANSWER], ()),
            "after reasoning": ([USER], [THOUGHT], ()),
            "tool cycle": ([USER], [call], [LOOK_UP]),
            "user after a tool cycle": ([USER], [call, answer], [LOOK_UP]),
            "reply cut by length": ([USER], [ANSWER], ()),
        }
        return {
            name: functools.partial(self.continued, name, before, replies, tools)
            for name, (before, replies, tools) in conversations.items()
            if not (tools and self.no_tools)
        }

    def flawed(self, flaw: Flaw) -> Told:
        if flaw.kind == "replies left out":
            return UNSEEN
        eos = _listed([repr(self.renderer.tokens.tokenizer.id_to_token(i)) for i in self.renderer.files.eos_token_ids])
        text, step = (told.format(shown=flaw.shown, eos=eos) for told in FLAWS[flaw.kind])
        until = f"Until then {_cost(rehearse(self.writer, [USER], [ANSWER]))}"
        return Told(f"no, the chat template {text}", "warning", f"{step}. {until}")

    def continued(self, name: str, before: list[Message], replies: list[Message], tools: Tools) -> Told:
        """Whether replies are continued by what comes after them; if not, whether the model still sees all of the
        conversation, and what it costs."""
        knows_reasoning = bool(self.chat.abilities.reasoning_key) or self.chat.opens_thinking
        if name == "after reasoning" and knows_reasoning and not self.writer.reasons:
            return Told("does not come up: the generation prompt closes the reasoning before it begins")
        done = rehearse(self.writer, before, replies, tools, cut=name == "reply cut by length")
        if not done.reason or done.unseen:
            return UNSEEN if done.unseen else Told("yes")
        normal = name == "after reasoning" or (knows_reasoning and name != "tool cycle")
        if normal or done.factor < COSTLY:
            why = "Normal for models that reason: training" if knows_reasoning else "Training"
            return Told(f"no, {done.reason}. {why} stays exact, and what segments share is computed once")
        step = f"{_cost(done)}. A chat template that only appends avoids it"
        return Told(f"no, {done.reason}", "warning", step)

    # --- tools --------------------------------------------------------------------------------------------------------

    def tools(self) -> Section:
        if (refused := self.no_tools) is not None:
            return {"form": lambda: refused}
        shown: Section = {
            "form": self.emulated if self.chat.emulates_tools else self.native,
            "results": self.results,
            "an unreadable call": self.unreadable,
            "control tokens in a result": self.forgery,
        }
        if not self.writer.cuts:
            return shown
        return {**shown, "several calls in a reply": self.several_calls, "round trip": self.round_trip}

    def native(self) -> Told:
        reader = f"the library renderers ({self.chat.reader.name})" if self.chat.reader is not None else "molt_sdk"
        given = "JSON text" if self.chat.abilities.arguments_as_text else "data"
        shown = f"native: the chat template shows tools, calls (arguments as {given}) and results"
        return Told(f"{shown}; {reader} reads the calls")

    def emulated(self) -> Told:
        text = f"emulated, as the chat template {self.why_emulated()}: tools are described in the system message, "
        text += f"calls are read as {self.chat.form.shown}"
        if not re.search(r"\btools\b", self.source):
            return Told(text)
        step = "the model was trained on another form: expect few calls at first. An example call in the prompt helps, "
        return Told(text, "warning", f"{step}or a chat template that shows all of it")

    def why_emulated(self) -> str:
        """What of tools the chat template does not show, in the form in which it shows most."""
        if self.chat.abilities.tools:
            return "writes tool calls in a form that cannot be read back"
        call = _calling({"query": "key"})
        missing: list[list[str]] = []
        refusal = ""
        for ids, as_text in itertools.product(ID_FORMS, (False, True)):
            can = msgspec.structs.replace(self.chat.abilities, call_ids=ids, arguments_as_text=as_text)
            shape = Shaper(can, self.renderer.tokens, emulate=False)
            shown, schemas = shape([USER, call, *results_of(call)], [LOOK_UP], "")
            try:
                text = self.chat.template.text(shown, schemas, generation_prompt=True)
            except TemplateError as error:
                refusal = str(error)
                continue
            said = text.partition(str(USER["content"]))[2]
            called = "look_up" in said.partition("key")[0] and "key" in said
            parts = {"schemas": "Look something up." in text, "calls": called, "results": "box 2" in said}
            missing.append([part for part, is_shown in parts.items() if not is_shown])
        if not missing:
            return f"refuses a tool call and its result ({refusal})"
        least = min(missing, key=len)
        return f"does not show {' and '.join(least)}" if least else "shows tool calls in a way that changes them"

    def several_calls(self) -> Told:
        two, step = _calling({"query": "ball"}, {"query": "key"}), "keep to one call per reply in example conversations"
        try:
            read = self.read_back(two)[1]
            self.renderer.prompt([USER, two, *results_of(two)], [LOOK_UP])
        except TemplateError as error:
            return Told(f"cannot be shown: {error}", "warning", step)
        if read["calls"] != _said(two)["calls"]:
            return Told(f"of two, {len(read['calls'])} are read", "warning", step)
        if not (self.chat.emulates_tools or self.chat.abilities.parallel_calls):
            return Told("the chat template knows one call per reply: several are shown as text", "warning", step)
        return Told("shown and read")

    def round_trip(self) -> Told:
        lost = []
        for kind, arguments in ARGUMENTS.items():
            read = self.read_back(_calling(arguments))[1]["calls"]
            if read != [("look_up", arguments)]:
                lost.append(f"{kind}: {_shown(arguments)} is read as {_shown([given for _, given in read])}")
        if not lost:
            return Told(f"{', '.join(ARGUMENTS)} come back unchanged")
        text = f"tools get other arguments than the model wrote ({len(lost)} of {len(ARGUMENTS)} kinds)"
        return Told(text, "problem", PUBLISHED, tuple(lost))

    def results(self) -> Told:
        call = _calling({"query": "ball"})
        self.renderer.prompt([USER, call, *results_of(call)], [LOOK_UP])
        as_user = self.chat.emulates_tools and not self.chat.abilities.tool_role
        form = "user messages in <tool_response> tags" if as_user else "messages of their own"
        return Told(f"shown whole, as {form}")

    def unreadable(self) -> Told:
        """What ``model.run`` sends after a reply whose only call cannot be read."""
        broken: Message = {"role": "assistant", "content": f'{OPEN}{{"name": "look_up", "arg'}
        told: Message = {"role": "tool", "content": "Error: A tool call was not executed: it is not complete."}
        try:
            self.renderer.prompt([USER, broken, told], [LOOK_UP])
        except TemplateError as error:
            step = "an episode in which the model writes one fails; use another chat template"
            return Told(f"what is wrong with it cannot be told to the model: {error}", "problem", step)
        return Told("the model is told what is wrong with it")

    def forgery(self) -> Told:
        """Whether text in a tool result can become a control token."""
        tokens, call = self.renderer.tokens, _calling({"query": "ball"})
        counts: list[Counter[int]] = []
        for text in ("box", "".join(["box", *tokens.control_ids])):
            ids = self.renderer.prompt([USER, call, *results_of(call, f"{text} end")], [LOOK_UP])
            counts.append(Counter(i for i in ids if i in tokens.control_id_set))
        if counts[0] == counts[1]:
            return Told("stay text, so a result cannot forge a message")
        forged = _named(self.renderer, list(counts[1] - counts[0]))
        step = "let your tools take such text out of their results"
        return Told(f"text becomes {forged}, so a result can forge a message", "problem", step)

    # --- replies ------------------------------------------------------------------------------------------------------

    def replies(self) -> Section:
        if not self.writer.cuts:
            untried = Told("not tried: where a reply begins and ends in a conversation cannot be told, see above")
            return {"all": lambda: untried}
        call = _calling(ARGUMENTS["text and numbers"])
        kinds: dict[str, Message] = {
            "content": ANSWER,
            "a call": call,
            "reasoning and content": THOUGHT,
            "reasoning and a call": {**call, "reasoning": REASONING},
            "content and a call": {**call, "content": "I look it up."},
        }
        return {
            kind: functools.partial(self.inverted, message)
            for kind, message in kinds.items()
            if not (self.no_tools and "tool_calls" in message) and (self.writer.reasons or "reasoning" not in message)
        }

    def inverted(self, message: Message) -> Told:
        """Whether reading a reply of this kind gives back what was written."""
        wanted = _said(message)
        try:
            written, read = self.read_back(message)
        except TemplateError:
            if not (wanted["content"] and wanted["calls"]):
                raise
            written, read = self.read_back({**message, "content": ""})
        if read == wanted:
            return Told("yes")
        if lost := [part for part in ("reasoning", "content") if wanted[part] not in written]:
            text = f"the chat template leaves out the {' and '.join(lost)} of such a reply in history"
            step = "what the model samples is trained on, but such a reply ends its segment, and later prompts do not "
            return Told(text, "warning", f"{step}show that part")
        swapped = {**read, "content": read["reasoning"], "reasoning": read["content"]}
        if swapped == wanted:
            parts = ("content", "reasoning") if read["reasoning"] else ("reasoning", "content")
            text = f"the chat template writes the {parts[0]} of such a reply as {parts[1]}"
            return Told(text, "warning", "let the agent look at both reply.text and reply.reasoning")
        text = f"no, {written!r:.200} is read as {_shown(read)}"
        return Told(text, "problem", f"{PUBLISHED}; agents would see wrong replies")

    def read_back(self, message: Message) -> tuple[str, dict[str, Any]]:
        """A reply as it is written, and what it says when that is read."""
        tools: Tools = [LOOK_UP] if "tool_calls" in message else ()
        prompt = self.renderer.prompt([USER], tools)
        ids = self.writer.write(message, tools)
        read = self.renderer.parse(ids, "stop", tools, prompt=prompt[-TAIL:])
        return self.decode(ids), _said(read.message)

    # --- roles --------------------------------------------------------------------------------------------------------

    def roles(self) -> Section:
        can = self.chat.abilities
        folded = "in front of the first user message"
        as_system = "as a system message" if can.system else folded
        cases: dict[str, tuple[list[Message], str]] = {
            "system": ([SYSTEM, USER], "as it is" if can.system else folded),
            "system later on": ([USER, ANSWER, SYSTEM, NEXT], "as it is" if can.later_system else "as a user message"),
            "developer": ([DEVELOPER, USER], "as it is" if can.developer else as_system),
            "user messages in a row": ([USER, NEXT], "one by one" if can.repeated_roles else "joined to one"),
        }

        def shown(messages: list[Message], how: str) -> Told:
            self.renderer.prompt(messages)
            return Told(f"shown {how}")

        return {name: functools.partial(shown, *case) for name, case in cases.items()}


def _cost(done: Rehearsal) -> str:
    more = f"{ROUNDS} rounds become {done.segments} segments and {done.factor:.1f} times the tokens"
    return f"training stays exact, but {more} (what segments share is computed once)"


def _calling(*arguments: dict[str, Any]) -> Message:
    texts = [json.dumps(given, ensure_ascii=False) for given in arguments]
    calls = [tool_call(f"call_0_{i}", "look_up", text) for i, text in enumerate(texts)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _said(message: Message) -> dict[str, Any]:
    """What a reply says, apart from white space at its ends, from how arguments are written, and from ids."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return {
        "content": str(message.get("content") or "").strip(),
        "reasoning": message.get("reasoning", "").strip(),
        "calls": [(function["name"], parsed_arguments(function["arguments"])) for function in functions],
    }


def _named(renderer: Renderer, ids: Sequence[int]) -> str:
    return _listed([f"{renderer.tokens.tokenizer.id_to_token(i)} ({i})" for i in ids])


def _listed(values: Sequence[Any]) -> str:
    more = f" and {len(values) - MOST_LISTED} more" if len(values) > MOST_LISTED else ""
    return ", ".join(map(str, values[:MOST_LISTED])) + more


def _shown(value: Any) -> str:
    return f"{json.dumps(value, ensure_ascii=False):.200}"
