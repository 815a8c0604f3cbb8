"""Replies that no model should write: every reader gives a well-formed message for any ids, in bounded work."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import molt_sdk as molt
from molt_sdk.errors import TemplateError
from molt_sdk.messages import normalize
from molt_sdk.rendering.renderer import ParsedCompletion, Renderer
from molt_sdk.types import FinishReason
from tests.families import FAMILIES, write_model

READERS = (
    *("chatml", "qwen2.5", "llama3.1", "mistral-nemo", "ministral-3", "nemotron-nano-2", "qwen3-thinking"),
    *("qwen3", "qwen3-coder", "qwen3.6", "gemma4", "glm-4.5", "glm-5", "kimi-k2", "gpt-oss", "nemotron-3-nano"),
    "minimax-m2",
)
"""One family for each way in which replies are read: tags, plain JSON, forms learned from a template, and each parser
of the library ``renderers`` that one of the families uses; with and without reasoning that the prompt began."""
XML = ("qwen3-coder", "qwen3.6", "nemotron-3-nano")
CALL_FORMS = {
    **dict.fromkeys(
        ("chatml", "qwen2.5", "qwen3-thinking", "qwen3"), '<tool_call>{"name": "NAME", "arguments": {}}</tool_call>'
    ),
    **dict.fromkeys(XML, "<tool_call>\n<function=NAME>\n</function>\n</tool_call>"),
    **dict.fromkeys(("glm-4.5", "glm-5"), "<tool_call>NAME\n</tool_call>"),
    "nemotron-nano-2": '<TOOLCALL>[{"name": "NAME", "arguments": {}}]</TOOLCALL>',
    "minimax-m2": '<minimax:tool_call>\n<invoke name="NAME">\n</invoke>\n</minimax:tool_call>',
    "kimi-k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "gemma4": "<|tool_call>call:NAME{}<tool_call|>",
}
"""How the families that mark calls with tags write one without arguments."""
THINKING = ("nemotron-nano-2", "qwen3-thinking", "qwen3.6", "glm-5", "nemotron-3-nano", "minimax-m2")
PLAIN_ANSWERS = tuple(name for name in READERS if name not in THINKING)
"""Families whose generation prompt opens no reasoning."""
PARAMETERS = {"n": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "object"}, "x": {}}


def offered(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": PARAMETERS, "required": []}
    return {"type": "function", "function": {"name": name, "description": "Act.", "parameters": schema}}


TOOLS = [offered("add"), offered("drop")]


def calling(*arguments: dict[str, Any], **more: Any) -> molt.Message:
    calls: list[molt.ToolCall] = [
        {"id": f"call_0_{i}", "type": "function", "function": {"name": "add", "arguments": json.dumps(value)}}
        for i, value in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}  # type: ignore[typeddict-item]


class Reader:
    """The renderer of one family, with valid replies to start from."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.family = next(family for family in FAMILIES if family.name == name)
        self.renderer = Renderer(path)
        self.size = self.renderer.files.tokenizer.get_vocab_size()
        self.prompt = self.renderer.prompt([{"role": "user", "content": "Q"}], TOOLS)[-512:]
        self.control = sorted(self.renderer.tokens.control_ids.values())
        self.valid = [self.ids(FRAGMENTS[0])]
        for reply in VALID:
            try:
                self.valid.append(self.renderer.write_reply(reply, TOOLS))
            except TemplateError:  # such as several calls in one reply
                continue

    def ids(self, text: str) -> list[int]:
        return self.renderer.tokens.encode(text)

    def parse(self, ids: Sequence[int], reason: FinishReason = "stop", tools: Any = TOOLS) -> ParsedCompletion:
        return self.renderer.parse(ids, reason, tools, "call_0_", prompt=self.prompt)

    def calls(self, ids: Sequence[int], reason: FinishReason = "stop") -> list[tuple[str, Any]]:
        return said(self.parse(ids, reason).message)[2]

    def check(self, ids: Sequence[int], reason: FinishReason, tools: Any = TOOLS) -> ParsedCompletion:
        """Parse, and check all that holds for any ids."""
        parsed = self.parse(ids, reason, tools)
        message = parsed.message
        assert message["role"] == "assistant"
        assert isinstance(message["content"], str)
        assert isinstance(message.get("reasoning", ""), str)
        assert message.keys() <= {"role", "content", "reasoning", "tool_calls"}
        json.dumps([message, parsed.tool_errors, list(parsed.remarks)], ensure_ascii=False).encode()
        calls = message.get("tool_calls", [])
        assert bool(calls) == ("tool_calls" in message)
        assert len({call["id"] for call in calls} - {""}) == len(calls)
        for call in calls:
            assert call["function"]["name"]
            assert isinstance(json.loads(call["function"]["arguments"], parse_constant=no_constant), dict)
        if not tools:
            assert not calls
            assert not parsed.tool_errors
        assert len(parsed.tool_errors) <= 17
        assert normalize([{"role": "user", "content": "Q"}, message], "reply")[1] == message
        assert self.parse(ids, reason, tools) == parsed
        return parsed


def no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def said(message: molt.Message) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, reasoning and calls."""
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", ())
    ]
    return str(message.get("content")).strip(), message.get("reasoning", "").strip(), calls


VALID: tuple[molt.Message, ...] = (
    {"role": "assistant", "content": "Hello."},
    {"role": "assistant", "content": "Hello.", "reasoning": "Hm."},
    calling({"n": 12, "s": 'two\nlines "é"', "o": {"k": [1.5, None, "z"]}}),
    calling({"n": 1}, {"s": "x", "x": True}, content="Let me.", reasoning="Hm."),
)
DEEP = 2000
FRAGMENTS = (
    *(
        "Hello.",
        " ",
        "\n",
        "é 日 \U0001f469",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
    ),
    *(
        "<TOOLCALL>",
        "</TOOLCALL>",
        "<|tool_call>",
        "<tool_call|>",
        "<|channel>thought\n",
        "<channel|>",
        "call:add{",
        "}",
    ),
    *(
        "<function=add>",
        "</function>",
        "<parameter=n>",
        "</parameter>",
        "<arg_key>n</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    *("<|channel|>commentary to=functions.add<|message|>", "<|channel|>analysis<|message|>", "<|start|>assistant"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"),
    *("<minimax:tool_call>", '<invoke name="add">', '<parameter name="n">', "</invoke>", "</minimax:tool_call>"),
    *('{"name": "add", "arguments": {}}', '{"name": "add", "parameters": {"n": 1}}', '{"name": 5, "arguments": {}}'),
    *(
        '{"name": ["add"], "arguments": {"n": 1}}',
        '{"name": null}',
        '{"name": {"n": 1}, "arguments": "{}"}',
        "[]",
        "null",
    ),
    *(
        '{"name": "add", "arguments": "{\\"n\\": 1}"}',
        '{"name": "add", "arguments": "\\"{}\\""}',
        '"add"',
        '{"name": "add"',
    ),
    *('{"name": "add", "arguments": {"n": NaN}}', '{"name": "add", "arguments": {"n": 1e999}}', "-Infinity", "1e999"),
    *('{"name": "\\ud83d", "arguments": {}}', '{"name": "add", "arguments": {"\\udc00": "\\ud800"}}', '"\\ud83d"'),
    *('{"name": "nobody", "arguments": {}}', '{"name": "add", "arguments": {}, "arguments": {"n": 2}}', '{"name": ""}'),
    *('{"name": "add", "arguments": [1]}', '{"name": "add", "arguments": {"n": ' + "9" * 5000 + "}}", "9" * 5000),
    *('{"name": "add", "arguments": {"o": ' + "[" * DEEP, "{" * DEEP, '{"o":' * DEEP + "1" + "}" * DEEP),
    *('{"name": "add", "id": "call_0_1", "arguments": {}}', '{"name": "add", "id": 7, "arguments": {}}', ",", "]"),
)


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reader]:
    made: dict[str, Reader] = {}

    def reader(name: str) -> Reader:
        if name not in made:
            family = next(family for family in FAMILIES if family.name == name)
            made[name] = Reader(name, write_model(family, tmp_path_factory.mktemp("fuzz") / name))
        return made[name]

    return reader


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, make: Callable[[str], Reader]) -> Reader:
    return make(request.param)


def fuzzing(examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


REASONS = st.sampled_from(["stop", "length"])
PIECES = st.lists(
    st.tuples(st.sampled_from(["any", "control", "text", "valid"]), st.integers(0, 10**6)), min_size=1, max_size=12
)
EDITS = st.lists(
    st.tuples(st.sampled_from(["delete", "double", "swap", "control", "text", "cut"]), *[st.integers(0, 10**6)] * 2),
    max_size=5,
)


@fuzzing(25)
@given(pieces=PIECES, reason=REASONS, tools=st.sampled_from([TOOLS, TOOLS, ()]))
def test_any_ids_are_read_as_a_well_formed_message(
    reader: Reader, pieces: Any, reason: FinishReason, tools: Any
) -> None:
    ids: list[int] = []
    for kind, number in pieces:
        if kind == "any":
            ids.append(number % reader.size)
        elif kind == "control":
            ids.append(reader.control[number % len(reader.control)])
        elif kind == "text":
            ids += reader.ids(FRAGMENTS[number % len(FRAGMENTS)])
        else:
            ids += reader.valid[number % len(reader.valid)]
    reader.check(ids, reason, tools)


@fuzzing(40)
@given(base=st.integers(0, 9), edits=EDITS, reason=REASONS)
def test_a_damaged_reply_is_read_as_a_well_formed_message(
    reader: Reader, base: int, edits: Any, reason: FinishReason
) -> None:
    ids = list(reader.valid[base % len(reader.valid)])
    for kind, a, b in edits:
        i, j = sorted((a % (len(ids) + 1), b % (len(ids) + 1)))
        if kind == "delete":
            del ids[i : min(j, i + 8)]
        elif kind == "double":
            ids[j:j] = ids[i:j]
        elif kind == "swap":
            ids = [*ids[i:j], *ids[:i], *ids[j:]]
        elif kind == "control":
            ids.insert(i, reader.control[b % len(reader.control)])
        elif kind == "text":
            ids[i:i] = reader.ids(FRAGMENTS[b % len(FRAGMENTS)])
        else:
            del ids[i:]
    reader.check(ids or [reader.size - 1], reason)


def test_whatever_stands_where_a_call_is_expected(reader: Reader) -> None:
    """The content of a block, of an argument and of a name: each fragment in each of these places."""
    form = CALL_FORMS.get(reader.name, "NAME")
    opening = form[: form.index("NAME")].partition('{"name"')[0]
    wrong: dict[str, str] = {}
    for text in FRAGMENTS:
        value = form.replace("{}", text) if "{}" in form else form.replace("NAME", "NAME" + argument(reader.name, text))
        for whole in (text, form.replace("NAME", text), value.replace("NAME", "add"), opening + text + form[-12:]):
            ids = reader.ids(f"{reader.family.between}{whole}{reader.family.end}")
            try:
                reader.check(ids, "stop")
                reader.check(ids, "length")
            except Exception as error:
                wrong[whole[:80]] = repr(error)[:80]
    assert wrong == {}


def argument(name: str, text: str) -> str:
    """The argument ``x`` in a family's own form."""
    if name in XML:
        return f">\n<parameter=x>\n{text}\n</parameter"
    if name == "minimax-m2":
        return f'">\n<parameter name="x">{text}</parameter'
    return f"\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>"


# --- what is executed -------------------------------------------------------------------------------------------------


def test_every_call_that_the_template_writes_is_read(reader: Reader) -> None:
    (first,) = [said(reply)[2] for reply in VALID[2:3]]
    ids = reader.renderer.write_reply(VALID[2], TOOLS)
    assert reader.calls(ids) == first


@pytest.mark.parametrize("number", [2, 3])
def test_a_call_is_executed_whole_or_not_at_all(reader: Reader, number: int) -> None:
    """A reply cut by its length limit at any token: no call with half of its arguments, no call without its end."""
    try:
        ids = reader.renderer.write_reply(VALID[number], TOOLS)
    except TemplateError:
        return  # the template shows no text in front of a call
    every = reader.calls(ids)
    seen = 0
    for end in range(1, len(ids)):
        calls = reader.calls(ids[:end], "length")
        assert calls == every[: len(calls)]
        assert seen <= len(calls)
        seen = len(calls)


SECRET = ("THINK{call}/THINKDone.", "Well. THINK{call}/THINKDone.", "THINKa/THINK b THINK{call}/THINK", "THINK{call}")


@pytest.mark.parametrize("reader", tuple(CALL_FORMS), indirect=True)
@pytest.mark.parametrize("text", SECRET)
def test_f44_a_call_that_was_only_thought_is_not_executed(reader: Reader, text: str) -> None:
    """At the start, after text, in a second thought, and in a thought without an end."""
    marks = ("<|channel>thought\n", "<channel|>") if reader.name == "gemma4" else ("<think>", "</think>")
    opened = reader.renderer.tokens.decode(reader.prompt).rstrip().endswith("<think>")
    text = text.removeprefix("THINK") if opened and text.startswith("THINK") else text
    shown = text.replace("/THINK", marks[1]).replace("THINK", marks[0])
    if opened and text.startswith("Well"):
        shown = marks[1] + shown
    ids = reader.ids(shown.format(call=CALL_FORMS[reader.name].replace("NAME", "drop")))
    for reason in ("stop", "length"):
        assert reader.check(ids, reason).message.get("tool_calls", []) == []


@pytest.mark.parametrize("reader", ["gpt-oss", "kimi-k2", "ministral-3"], indirect=True)
@pytest.mark.parametrize(
    "body", ['{"name": "drop", "arguments": {}} {"name": "drop", "arguments": {}}', "{} {}", "[{}]"]
)
def test_a_call_goes_to_the_tool_that_it_names(reader: Reader, body: str) -> None:
    """Arguments that look like a call of another tool are arguments."""
    frame = {
        "gpt-oss": "<|channel|>commentary to=functions.add<|message|>{}<|call|>",
        "kimi-k2": CALL_FORMS["kimi-k2"].replace("NAME", "add"),
        "ministral-3": "[TOOL_CALLS]add[ARGS]{}</s>",
    }[reader.name]
    for reason in ("stop", "length"):
        assert {name for name, _ in reader.calls(reader.ids(frame.replace("{}", body)), reason)} <= {"add"}


@pytest.mark.parametrize("reader", XML, indirect=True)
@pytest.mark.parametrize("tail", ["", "</function>\n"])
def test_a_call_with_an_argument_that_has_no_end_is_not_executed(reader: Reader, tail: str) -> None:
    """Without that argument it would be another call than the one that the model wrote."""
    text = f"<tool_call>\n<function=add>\n<parameter=n>\n1\n</parameter>\n<parameter=s>\nhalf{tail}\n</tool_call>"
    for reason in ("stop", "length"):
        parsed = reader.check(reader.ids(reader.family.between + text), reason)
        assert parsed.message.get("tool_calls", []) == []
        assert parsed.tool_errors


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "mistral-nemo",
            '[TOOL_CALLS][{"name": "add", "arguments": {}, "id": "ID"}, {"name": "add", "arguments": {}}]',
        ),
        ("mistral-nemo", '[TOOL_CALLS][{"name": "add", "arguments": {}, "id": "ID"}, {"name": "drop", "id": "ID"}]'),
        (
            "kimi-k2",
            f"<|tool_calls_section_begin|>{2 * '<|tool_call_begin|>ID<|tool_call_argument_begin|>{}<|tool_call_end|>'}",
        ),
    ],
    ids=["none", "twice", "twice-kimi"],
)
def test_f38_ids_that_a_model_writes_stay_unique(make: Callable[[str], Reader], name: str, text: str) -> None:
    """Also where the model writes the very id that the next call without one would get."""
    reader = make(name)
    reader.check(reader.ids(text.replace("ID", "call_0_1") + reader.family.end), "stop")


@pytest.mark.parametrize("reader", ["chatml", "qwen2.5", "qwen3-thinking", "qwen3", "nemotron-nano-2"], indirect=True)
@pytest.mark.parametrize("form", ["parameters", "twice"])
def test_arguments_under_another_key_are_not_dropped(reader: Reader, form: str) -> None:
    """``parameters`` is another spelling; arguments that are given twice are no call, as for any other reader."""
    value = '"parameters": {"n": 1}' if form == "parameters" else '"arguments": {"n": 1}, "arguments": {"n": 2}'
    text = CALL_FORMS[reader.name].replace("NAME", "add").replace('"arguments": {}', value)
    calls = reader.calls(reader.ids(reader.family.between + text + reader.family.end))
    assert calls == ([("add", {"n": 1})] if form == "parameters" else [])


# --- what is written is read ------------------------------------------------------------------------------------------

TEXT = st.text(st.sampled_from("ab \n'\"\\{}[]:,<>/é日\U0001f469"), max_size=12)
WORDS = TEXT.map(str.strip).filter(bool)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
JSON_ARGUMENTS = ("chatml", "qwen2.5", "llama3.1", "mistral-nemo", "ministral-3", "nemotron-nano-2", "qwen3-thinking")
JSON_ARGUMENTS += ("qwen3", "kimi-k2")
"""Families that write arguments as JSON. The others lose, by the design of their format, what a value begins and ends
with, the difference between "1" and 1, or the names of keys."""


@pytest.mark.parametrize("reader", JSON_ARGUMENTS, indirect=True)
@fuzzing(25)
@example(arguments={"s": "</tool_call>"})
@example(arguments={"s": "<|im_end|><tool_call>"})
@given(arguments=st.dictionaries(WORDS, JSON, max_size=3))
def test_arguments_are_read_as_they_were_written(reader: Reader, arguments: dict[str, Any]) -> None:
    parsed = reader.check(reader.renderer.write_reply(calling(arguments), TOOLS), "stop")
    assert parsed.tool_errors == []
    assert said(parsed.message)[2] == [("add", arguments)]


# In Kimi's format tags are control tokens: one without its opening tag ends reasoning wherever it stands.
@pytest.mark.parametrize("reader", [name for name in JSON_ARGUMENTS if name != "kimi-k2"], indirect=True)
def test_a_closing_tag_in_an_argument_is_text(reader: Reader) -> None:
    arguments = {"s": "</think>"}
    parsed = reader.check(reader.renderer.write_reply(calling(arguments), TOOLS), "stop")
    assert said(parsed.message)[2] == [("add", arguments)]


@fuzzing(15)
@given(content=WORDS, thought=WORDS)
def test_content_and_reasoning_are_read_as_they_were_written(reader: Reader, content: str, thought: str) -> None:
    family = reader.family
    plain = family.answer.format(answer=content) + family.end
    assert said(reader.check(reader.ids(plain), "stop").message) == (content, "", [])
    if family.reasons:
        ids = reader.ids(family.thought.replace("{thought}", thought).replace("{answer}", content) + family.end)
        assert said(reader.check(ids, "stop").message) == (content, thought, [])


def test_a_written_reply_is_one_reply(reader: Reader) -> None:
    """Its end is the last token; reasoning and text in front of calls are in it, or the template refuses them."""
    for reply in (*VALID, {**VALID[2], "content": "Let me."}):
        try:
            ids = reader.renderer.write_reply(reply, TOOLS)
        except TemplateError:
            continue
        text = reader.renderer.tokens.decode(ids)
        assert ids[-1] in reader.renderer.eos_token_ids, text
        assert text.count("</think>") <= 1
        assert str(reply["content"]) in text
        assert reply.get("reasoning", "") in text
    try:
        ids = reader.renderer.write_reply({"role": "assistant", "content": ""}, TOOLS)
    except TemplateError:
        return
    assert reader.check(ids, "stop").message["content"].strip() == ""


@pytest.mark.parametrize("reader", tuple(CALL_FORMS), indirect=True)
def test_text_around_calls_is_not_lost(reader: Reader) -> None:
    """What a model says between and after its calls is part of what it says."""
    call = CALL_FORMS[reader.name].replace("NAME", "add")
    ids = reader.ids(f"{reader.family.between}Before.{call}Between.{call}After.{reader.family.end}")
    content = str(reader.check(ids, "stop").message["content"])
    assert [part for part in ("Before.", "Between.", "After.") if part not in content] == []


@pytest.mark.parametrize("reader", PLAIN_ANSWERS, indirect=True)
def test_an_answer_without_any_markup_is_content(reader: Reader) -> None:
    """A model that leaves out its markup, as one does that is being trained, has still said something."""
    for tools in (TOOLS, ()):
        message = reader.check(reader.ids("Hello." + reader.family.end), "stop", tools).message
        assert said(message) == ("Hello.", "", [])


# --- work -------------------------------------------------------------------------------------------------------------

FLOODS = {
    **{
        text: ("", text, "")
        for text in ("<think>", "</think>", "[", "{", '{"n":', '"', "\\", "9", " ", "\n", "[TOOL_CALLS]")
    },
    **{
        text: ("", text, "")
        for text in ("<tool_call>", "</tool_call>", "<|tool_call>", "<TOOLCALL>", "<minimax:tool_call>")
    },
    **{
        text: ("", text, "")
        for text in ("<|start|>", "<|message|>", "<|tool_call_begin|>", "<arg_key>", "<|channel>thought")
    },
    "parameters": ("<tool_call>\n<function=add>\n", "<parameter=n>", "</tool_call>"),
    "ends before beginnings": (
        "<tool_call>\n<function=add>\n" + 2000 * "</parameter>",
        "<parameter=n>",
        "</tool_call>",
    ),
    "half parameters": ("<tool_call>\n<function=add>\n", "<parameter=", "</tool_call>"),
    "functions": ("<tool_call>\n", "<function=add", "</tool_call>"),
    "invokes": ("<minimax:tool_call>\n", '<invoke name="add">', "</minimax:tool_call>"),
    "invoke parameters": (
        '<minimax:tool_call>\n<invoke name="add">',
        '<parameter name="n">',
        "</invoke></minimax:tool_call>",
    ),
    "half invokes": ("<minimax:tool_call>\n", "<invoke name=", "</minimax:tool_call>"),
    "arguments": ("<tool_call>add", "<arg_key>n</arg_key><arg_value>", "</tool_call>"),
    "objects": ("<tool_call>", '{"name": "add", "arguments": {}}', "</tool_call>"),
    "numbered": ("[TOOL_CALLS][", '{"name": "add", "arguments": {}, "id": "000000000"}, ', "]"),
    "short numbered": ("[TOOL_CALLS]", '{"name": "a", "id": "b"}', ""),
    "calls": ("", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', ""),
    "recipients": ("<|channel|>commentary", " to=", "functions.add<|message|>{}<|call|>"),
    "sections": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.add:0", "<|tool_calls_section_end|>"),
    "gemma objects": ("<|tool_call>call:add", "{a:", "<tool_call|>"),
}


@pytest.mark.timeout(30)
def test_work_grows_no_faster_than_the_reply(reader: Reader) -> None:
    """Replies that repeat one thing for ever. All of them are read in a second or two; work in proportion to the square
    of a length would take minutes, and so run into the time limit."""
    for head, seed, tail in FLOODS.values():
        reader.parse(reader.ids(f"{reader.family.between}{head}{seed * (LONG // len(seed))}{tail}"), "stop")


LONG = 100_000
"""Characters of each."""


@pytest.mark.timeout(30)
@pytest.mark.parametrize("reader", ["mistral-nemo"], indirect=True)
def test_many_calls_with_ids_of_their_own_are_read(reader: Reader) -> None:
    """31,000 calls in a megabyte, each with another id; looking through all ids for each took 25 s."""
    calls = ", ".join(f'{{"name": "add", "id": "{i:09}"}}' for i in range(31_000))
    assert len(reader.calls(reader.ids(f"[TOOL_CALLS][{calls}]{reader.family.end}"))) == 31_000
