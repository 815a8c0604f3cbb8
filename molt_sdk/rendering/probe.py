"""What a model directory makes of an agent's conversations: tried on short ones, with the code that a rollout uses.

Tokenizer and chat template decide it; no weights are looked at.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from molt_sdk.errors import TemplateError
from molt_sdk.messages import parsed_arguments
from molt_sdk.rendering.abilities import Tools
from molt_sdk.rendering.bridge import Bridge, History
from molt_sdk.rendering.jinja import compile_template
from molt_sdk.rendering.known import TAIL
from molt_sdk.rendering.renderer import Renderer
from molt_sdk.rendering.template import UNKNOWN_LENGTH
from molt_sdk.rendering.toolcalls import tool_call
from molt_sdk.report import Finding
from molt_sdk.types import Message

MODEL = "Model"
PREFIX = "Prefix stability: does a conversation go on in one segment?"
TOOLS = "Tools"
REPLIES = "Replies: does reading them give back what was written?"
ROLES = "Roles"

SYSTEM: Message = {"role": "system", "content": "Answer in one word."}
USER: Message = {"role": "user", "content": "Which box holds the ball?"}
ANSWER: Message = {"role": "assistant", "content": "The second one."}
NEXT: Message = {"role": "user", "content": "And where is the key?"}
REASONING = "It was moved from the first."
LOOK_UP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "count": {"type": "integer"},
                "filter": {
                    "type": "object",
                    "properties": {
                        "tags": {"type": "array", "items": {"type": "string"}},
                        "range": {"type": "array", "items": {"type": "number"}},
                    },
                },
            },
        },
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


def model_findings(renderer: Renderer) -> list[Finding]:
    """All about one model directory."""
    if renderer.files.chat_template is None:
        missing = Finding(
            area=MODEL,
            name="chat template",
            verdict="problem",
            text="the model directory has none, so model.chat and model.run cannot be used",
            advice="save the model with a chat_template.jinja, or write the agent with model.complete on raw text",
        )
        return [_context(renderer), _end_tokens(renderer), missing]
    return [
        _context(renderer),
        _end_tokens(renderer),
        _end_of_turn(renderer),
        _begin_token(renderer),
        _special_tokens(renderer),
        _date(renderer),
        *_prefix_stability(renderer),
        *_tools(renderer),
        *_replies(renderer),
        *_roles(renderer),
    ]


# --- the model --------------------------------------------------------------------------------------------------------


def _context(renderer: Renderer) -> Finding:
    length = renderer.context_length
    if length == UNKNOWN_LENGTH:
        return Finding(
            area=MODEL,
            name="context",
            verdict="warning",
            text="config.json names no context length",
            advice="add max_position_embeddings to config.json, so that a conversation that is too long is noticed",
        )
    return Finding(area=MODEL, name="context", text=f"{length:,} tokens for prompt and reply")


def _end_tokens(renderer: Renderer) -> Finding:
    ids = renderer.eos_token_ids
    if not ids:
        return Finding(
            area=MODEL,
            name="EOS",
            verdict="problem",
            text="no token is known that ends a reply, so every reply runs until max_tokens",
            advice="set eos_token_id in generation_config.json or config.json",
        )
    if unknown := [i for i in ids if renderer.tokens.tokenizer.id_to_token(i) is None]:
        return Finding(
            area=MODEL,
            name="EOS",
            verdict="problem",
            text=f"eos_token_id {_listed(unknown)} of the model's configs is no id of its tokenizer",
            advice="tokenizer and configs are of different models; save them together",
        )
    return Finding(area=MODEL, name="EOS", text=f"a reply ends with {_named(renderer, ids)}")


def _end_of_turn(renderer: Renderer) -> Finding:
    end = renderer.chat.end_of_turn
    if end is None:
        text = "the chat template writes no token of its own after a reply; what begins the next message ends it"
        return Finding(area=MODEL, name="end of turn", text=text)
    added = (
        "" if end in renderer.files.eos_token_ids else "; no config names it as EOS, but replies end there all the same"
    )
    return Finding(area=MODEL, name="end of turn", text=f"{_named(renderer, [end])}{added}")


def _begin_token(renderer: Renderer) -> Finding:
    name = renderer.files.special_map.get("bos_token")
    bos = renderer.tokens.special_ids.get(name) if name else None
    prompt = _prompt_or_none(renderer, [USER])
    if bos is None or prompt is None:
        return Finding(area=MODEL, name="BOS", text="none" if bos is None else _named(renderer, [bos]))
    if prompt[:2] == [bos, bos]:
        return Finding(
            area=MODEL,
            name="BOS",
            verdict="warning",
            text=f"the chat template writes {_named(renderer, [bos])} twice",
            advice="take one of them out of the template: the model was not trained on two",
        )
    begins = "begins" if prompt[0] == bos else "does not begin"
    return Finding(area=MODEL, name="BOS", text=f"{_named(renderer, [bos])}; the chat template {begins} with it")


def _special_tokens(renderer: Renderer) -> Finding:
    tokens = renderer.tokens
    source = renderer.files.chat_template or ""
    own = [text for text in tokens.control_ids if text in source]
    shown = f"the chat template writes {_listed(own)}" if own else "the chat template spells out none of them"
    return Finding(area=MODEL, name="special tokens", text=f"{len(tokens.special_ids)} in the tokenizer; {shown}")


def _date(renderer: Renderer) -> Finding:
    """Whether the template writes the date, found by rendering it on two days."""
    source, place = renderer.files.chat_template or "", renderer.chat.template.place
    texts = set()
    for day in (datetime.datetime(2001, 2, 3, 4, 5, 6), datetime.datetime(2019, 8, 17, 16, 15, 14)):
        shown, schemas = renderer.chat.shape([USER], (), "")
        try:
            render = compile_template(source, place, day)
            texts.add(
                render(messages=shown, tools=schemas or None, add_generation_prompt=True, **renderer.files.special_map)
            )
        except TemplateError:  # told under the roles
            break
    text = "the chat template writes none"
    if len(texts) == 2:
        text = "the chat template writes it: it stands still during a run, but a run on another day has other prompts"
    return Finding(area=MODEL, name="date", text=text)


# --- prefix stability -------------------------------------------------------------------------------------------------


def _prefix_stability(renderer: Renderer) -> list[Finding]:
    thought: Message = {**ANSWER, "reasoning": REASONING}
    call, answer = _calling(ARGUMENTS["text and numbers"]), ANSWER
    after_reasoning = _continued(renderer, "after reasoning", [USER], thought)
    if reasons(renderer):
        call, answer = {**call, "reasoning": REASONING}, thought
    elif renderer.chat.abilities.reasoning_key:
        never = "does not come up: the generation prompt closes the reasoning before it begins"
        after_reasoning = Finding(area=PREFIX, name="after reasoning", text=never)
    return [
        _continued(renderer, "plain chat", [SYSTEM, USER], ANSWER),
        after_reasoning,
        _continued(renderer, "tool cycle", [USER], call, [LOOK_UP]),
        _continued(renderer, "user after a tool cycle", [USER, call, *_results_of(call)], answer, [LOOK_UP]),
        _continued(renderer, "reply cut by length", [USER], ANSWER, cut=True),
    ]


def _continued(
    renderer: Renderer, name: str, before: list[Message], reply: Message, tools: Tools = (), *, cut: bool = False
) -> Finding:
    """Whether a reply is continued by what comes after it (the results of its calls, else a user message); if not,
    whether the model still sees all of the conversation."""
    try:
        prompt = renderer.prompt(before, tools)
        ids = sampled_reply(renderer, reply, tools)
        if cut:
            ids = renderer.encode_reply(renderer.text(ids), end=False)
            ids = ids[: max(1, len(ids) // 2)]
        tail = prompt[-TAIL:]
        read = renderer.parse(ids, "length" if cut else "stop", tools, prompt=tail).message
        new = _results_of(read) or [NEXT]
        history = History(before, range(len(before) + 1))
        bridge = renderer.bridge(history, read, ids, new, tools, prompt=tail)
        if isinstance(bridge, Bridge):
            return Finding(area=PREFIX, name=name, text="yes")
        again = renderer.prompt([*before, read, *new], tools)
    except TemplateError as error:
        return _refused(PREFIX, name, error)
    said = str(read.get("content") or "").strip()
    if said not in renderer.tokens.decode(again):
        return Finding(
            area=PREFIX,
            name=name,
            verdict="problem",
            text="the chat template leaves out the assistant's earlier reply: the model does not see what it said",
            advice="use a chat template that shows every message",
        )
    advice = "nothing to do: training stays exact, but the conversation up to there is computed once more"
    if name == "plain chat":
        advice = (
            "training stays exact, but every turn starts a segment of its own and computes the conversation so far "
            "again: an episode of 10 turns has about 5 times the tokens. Prefer a chat template that only appends"
        )
    return Finding(area=PREFIX, name=name, verdict="warning", text=f"no, {bridge.reason}", advice=advice)


# --- tools ------------------------------------------------------------------------------------------------------------


def _tools(renderer: Renderer) -> list[Finding]:
    try:
        renderer.require_tools()
    except TemplateError as error:
        return [_refused(TOOLS, "form", error)]
    return [_form(renderer), _several_calls(renderer), _round_trip(renderer), _results(renderer), _forgery(renderer)]


def _form(renderer: Renderer) -> Finding:
    chat = renderer.chat
    if not chat.emulates_tools:
        reader = f"the library renderers ({chat.known.name})" if chat.known is not None else "molt_sdk"
        given = "JSON text" if chat.abilities.arguments_as_text else "data"
        text = (
            f"native: the chat template shows tools, calls (arguments as {given}) and results; {reader} reads the calls"
        )
        return Finding(area=TOOLS, name="form", text=text)
    emulated = (
        f"emulated, as the chat template {chat.why_emulated}: tools are described in the system message, calls are "
        f"read as {chat.form.shown}"
    )
    if not chat.abilities.tools:
        return Finding(area=TOOLS, name="form", text=emulated)
    return Finding(
        area=TOOLS,
        name="form",
        verdict="warning",
        text=emulated,
        advice="the model was trained on another form: expect few calls at first; an example call in the prompt helps",
    )


def _several_calls(renderer: Renderer) -> Finding:
    two = _calling({"query": "ball"}, {"query": "key"})
    try:
        read = _read(renderer, two, [LOOK_UP])
        renderer.prompt([USER, two, *_results_of(two)], [LOOK_UP])
    except TemplateError as error:
        problem = f"cannot be shown: {error}"
    else:
        if _content(read)[2] == _content(two)[2]:
            return Finding(area=TOOLS, name="several calls in a reply", text="shown and read")
        problem = f"of two, {len(read.get('tool_calls') or ())} are read"
    return Finding(
        area=TOOLS,
        name="several calls in a reply",
        verdict="warning",
        text=problem,
        advice="the chat template knows one call per reply; keep to that in example conversations",
    )


def _round_trip(renderer: Renderer) -> Finding:
    lost = []
    for kind, arguments in ARGUMENTS.items():
        try:
            read = _content(_read(renderer, _calling(arguments), [LOOK_UP]))[2]
        except TemplateError as error:
            return _refused(TOOLS, "round trip", error)
        if read != [("look_up", arguments)]:
            lost.append(f"{kind}: {_shown(arguments)} is read as {_shown([given for _, given in read])}")
    if not lost:
        return Finding(area=TOOLS, name="round trip", text=f"{', '.join(ARGUMENTS)} come back unchanged")
    return Finding(
        area=TOOLS,
        name="round trip",
        verdict="problem",
        text=f"tools get other arguments than the model wrote ({len(lost)} of {len(ARGUMENTS)} kinds)",
        advice="use the chat template that the model was published with",
        details=tuple(lost),
    )


def _results(renderer: Renderer) -> Finding:
    call = _calling({"query": "ball"})
    try:
        renderer.prompt([USER, call, *_results_of(call)], [LOOK_UP])
    except TemplateError as error:
        return _refused(TOOLS, "results", error)
    as_user = renderer.chat.emulates_tools and not renderer.chat.abilities.tool_role
    where = "user messages in <tool_response> tags" if as_user else "messages of their own"
    return Finding(area=TOOLS, name="results", text=f"shown whole, as {where}")


def _forgery(renderer: Renderer) -> Finding:
    """Whether text in a tool result can become a control token."""
    name = "control tokens in a result"
    tokens = renderer.tokens
    call = _calling({"query": "ball"})
    counts: list[Counter[int]] = []
    try:
        for text in ("box", "".join(["box", *tokens.control_ids])):
            ids = renderer.prompt([USER, call, *_results_of(call, f"{text} end")], [LOOK_UP])
            counts.append(Counter(i for i in ids if i in tokens.control_id_set))
    except TemplateError as error:
        return _refused(TOOLS, name, error)
    if counts[0] == counts[1]:
        return Finding(area=TOOLS, name=name, text="stay text, so a result cannot forge a message")
    return Finding(
        area=TOOLS,
        name=name,
        verdict="problem",
        text=f"text becomes {_named(renderer, list(counts[1] - counts[0]))}, so a result can forge a message",
        advice="let your tools take such text out of their results",
    )


# --- replies ----------------------------------------------------------------------------------------------------------


def _replies(renderer: Renderer) -> list[Finding]:
    call = _calling(ARGUMENTS["text and numbers"])
    kinds: dict[str, tuple[Message, Tools]] = {"content": (ANSWER, ()), "a call": (call, [LOOK_UP])}
    if reasons(renderer):
        kinds["reasoning and content"] = {**ANSWER, "reasoning": REASONING}, ()
        kinds["reasoning and a call"] = {**call, "reasoning": REASONING}, [LOOK_UP]
    kinds["content and a call"] = {**call, "content": "I look it up."}, [LOOK_UP]
    return [_inverted(renderer, kind, message, tools) for kind, (message, tools) in kinds.items()]


def _inverted(renderer: Renderer, kind: str, message: Message, tools: Tools) -> Finding:
    """Whether reading a reply of this kind gives back what was written."""
    try:
        prompt = renderer.prompt([USER], tools)
        ids = sampled_reply(renderer, message, tools)
    except TemplateError as error:
        return _refused(REPLIES, kind, error)
    read = renderer.parse(ids, "stop", tools, prompt=prompt[-TAIL:]).message
    (content, reasoning, calls), expected = _content(read), _content(message)
    if (content, reasoning, calls) == expected:
        return Finding(area=REPLIES, name=kind, text="yes")
    written = renderer.tokens.decode(ids)
    if lost := [part for part in ("reasoning", "content") if str(message.get(part) or "") not in written]:
        return Finding(
            area=REPLIES,
            name=kind,
            verdict="warning",
            text=f"the chat template leaves out the {' and '.join(lost)} of such a reply in history",
            advice="nothing to do: what the model samples is trained on, but such a reply ends its segment",
        )
    if calls == expected[2] and {content, reasoning} == set(expected[:2]):
        parts = ("content", "reasoning") if reasoning else ("reasoning", "content")
        return Finding(
            area=REPLIES,
            name=kind,
            verdict="warning",
            text=f"the chat template writes the {parts[0]} of such a reply as {parts[1]}",
            advice="let the agent look at both reply.text and reply.reasoning",
        )
    return Finding(
        area=REPLIES,
        name=kind,
        verdict="problem",
        text=f"no, {written!r:.200} is read as {_shown({'content': content, 'reasoning': reasoning, 'calls': calls})}",
        advice="use the chat template that the model was published with; agents would see wrong replies",
    )


# --- roles ------------------------------------------------------------------------------------------------------------


def _roles(renderer: Renderer) -> list[Finding]:
    can = renderer.chat.abilities
    developer: Message = {**SYSTEM, "role": "developer"}
    folded = "in front of the first user message"
    as_system = "as a system message" if can.system else folded
    cases: list[tuple[str, list[Message], str]] = [
        ("system", [SYSTEM, USER], "as it is" if can.system else folded),
        ("system later on", [USER, ANSWER, SYSTEM, NEXT], "as it is" if can.later_system else "as a user message"),
        ("developer", [developer, USER], "as it is" if can.developer else as_system),
        ("user messages in a row", [USER, NEXT], "one by one" if can.repeated_roles else "joined to one"),
    ]
    return [_shown_role(renderer, name, messages, how) for name, messages, how in cases]


def _shown_role(renderer: Renderer, name: str, messages: list[Message], how: str) -> Finding:
    try:
        renderer.prompt(messages)
    except TemplateError as error:
        return _refused(ROLES, name, error)
    return Finding(area=ROLES, name=name, text=f"shown {how}")


# --- what several of them need ----------------------------------------------------------------------------------------


def reasons(renderer: Renderer) -> bool:
    """Whether the model's replies hold reasoning, as far as the template tells: it knows reasoning, and the generation
    prompt does not close it at once."""
    if not renderer.chat.abilities.reasoning_key:
        return renderer.chat.opens_thinking
    prompt = _prompt_or_none(renderer, [USER])
    return prompt is not None and not renderer.tokens.decode(prompt[-TAIL:]).rstrip().endswith("</think>")


def sampled_reply(renderer: Renderer, message: Message, tools: Tools) -> list[int]:
    """Ids of a reply as the model would sample it, with content and reasoning also where the template drops them.

    Raises TemplateError.
    """
    ids = renderer.write_reply(message, tools)
    text = renderer.tokens.decode(ids)
    content, reasoning = str(message.get("content") or ""), message.get("reasoning", "")
    if "tool_calls" not in message and content not in text:
        ids = renderer.encode_reply(content, end=True)
    elif not ids:
        raise TemplateError(f"{renderer.chat.template.place} leaves out calls")
    if not reasoning or reasoning in text:
        return ids
    if "<think></think>" in text:
        return renderer.tokens.encode(text.replace("<think></think>", f"<think>{reasoning}</think>", 1))
    if renderer.chat.abilities.reasoning_key:
        return ids
    return renderer.tokens.encode(f"<think>\n{reasoning}\n</think>\n\n{text}")


def _prompt_or_none(renderer: Renderer, messages: list[Message]) -> list[int] | None:
    """None where the template refuses them, which is told under the roles."""
    try:
        return renderer.prompt(messages)
    except TemplateError:
        return None


def _calling(*arguments: dict[str, Any]) -> Message:
    calls = [
        tool_call(f"call_0_{i}", "look_up", json.dumps(given, ensure_ascii=False)) for i, given in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _results_of(reply: Message, text: str = "box 2") -> list[Message]:
    return [
        {"role": "tool", "content": text, "tool_call_id": call["id"], "name": call["function"]["name"]}
        for call in reply.get("tool_calls") or ()
    ]


def _read(renderer: Renderer, message: Message, tools: Tools) -> Message:
    """A reply, written and read."""
    prompt = renderer.prompt([USER], tools)
    return renderer.parse(renderer.write_reply(message, tools), "stop", tools, prompt=prompt[-TAIL:]).message


def _content(message: Message) -> tuple[str, str, list[tuple[str, Any]]]:
    """What a reply says, apart from white space at its ends, from how arguments are written, and from ids."""
    calls = [
        (call["function"]["name"], parsed_arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return str(message.get("content") or "").strip(), message.get("reasoning", "").strip(), calls


def _refused(area: str, name: str, error: TemplateError) -> Finding:
    return Finding(
        area=area,
        name=name,
        verdict="problem",
        text=str(error),
        advice="an agent that needs this fails; use another chat template, or an agent that does without",
    )


def _named(renderer: Renderer, ids: Sequence[int]) -> str:
    return _listed([f"{renderer.tokens.tokenizer.id_to_token(i)} ({i})" for i in ids])


def _listed(values: Sequence[Any]) -> str:
    more = f" and {len(values) - MOST_LISTED} more" if len(values) > MOST_LISTED else ""
    return ", ".join(map(str, values[:MOST_LISTED])) + more


def _shown(value: Any) -> str:
    return f"{json.dumps(value, ensure_ascii=False):.200}"
