"""Tool calls in plain text: reading them from a completion, and teaching the format to a model whose template has none.

The format is the one that Hermes and Qwen models are trained on, one JSON object in a pair of tags:

    <tool_call>{"name": "calculator", "arguments": {"expression": "12 * 7"}}</tool_call>

Models that write JSON between other tags are read alike, with the form learned from how their template writes a call.
Rules:

- Any number of blocks, and of objects in one block; text around the blocks is the content of the message.
- ``parameters`` is another spelling of ``arguments``; missing or null arguments are an empty object; an object that is
  written as a JSON string is unwrapped. Otherwise the arguments are the model's own JSON text, character by character:
  key order, spacing and escapes stay as they were sampled.
- Other keys are ignored. Ids are ours, so that they are unique, but where the model is trained to write its own.
- ``<think>...</think>`` is reasoning: a call in it is a thought and not executed. A ``</think>`` without ``<think>``
  ends reasoning that the prompt began; a ``<think>`` without ``</think>`` lasts to the end.
- A block without its closing tag counts if the model stopped there by itself, not if the reply was cut.
- A block that cannot be read is an error, in words for the model, and its text stays in the content.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from molt_sdk.messages import too_deep
from molt_sdk.schema import is_simple, type_text
from molt_sdk.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_NAME = 200
"""Characters of a name that is not in quotes."""
MAX_ERRORS = 16
"""After so many unreadable blocks the rest of a reply is plain text; keeps the time linear in its length."""

_SPACE = re.compile(r"[ \t\r\n]*")
_EXAMPLE = re.compile(
    r"""(?:such\ as|e\.g\.|for\ example|like)[,:]?\s*
        (?: `([^`\n]+)` | "([^"\n]+)" | '([^'\n]+)' | (-?\d+(?:\.\d+)?) )""",
    re.IGNORECASE | re.VERBOSE,
)
"""An example value in a description: a quoted text, or a number."""


class CallForm(Struct, frozen=True):
    """How a model writes a call: ``open``, then a JSON object with name and arguments or an array of such objects, then
    ``close``; or ``open``, the name, ``between``, the arguments, ``close``."""

    open: str = OPEN
    close: str = CLOSE
    """"" where nothing marks the end of a call."""
    between: str = ""
    array: bool = False
    """The objects are in an array, also a single one; both are read."""
    ids: bool = False
    """The objects hold ids of the model's own, by which it expects the results."""

    @property
    def shown(self) -> str:
        """The form, for a model that did not keep to it."""
        call = '{"name": "...", "arguments": {...}}' if not self.between else "NAME" + self.between + "{...}"
        return self.open + (f"[{call}]" if self.array else call) + self.close


HERMES = CallForm()


def learned_form(written: str, name: str, arguments: Mapping[str, Any], call_id: str) -> CallForm | None:
    """The form of a call of ``name`` with ``arguments`` as a template writes it; None if it is not of JSON."""
    for match in re.finditer(r"\{", written):
        start = match.start()
        try:
            value, end = _decode(written, start)
        except _MalformedError:
            continue
        if not isinstance(value, dict):
            continue
        before, after = written[:start].rstrip(), written[end:].lstrip()
        if value == arguments and name in before:
            head, _, between = before.rpartition(name)
            form = CallForm(head.strip(), after.strip(), between.strip())
            return form if form.open and form.between else None
        if value.get("name") == name:
            array = before.endswith("[") and after.startswith("]")
            before, after = before.removesuffix("[").strip(), after.removeprefix("]").strip()
            return CallForm(before, after, array=array, ids=value.get("id") == call_id) if before else None
    return None


class ParsedReply(Struct, frozen=True):
    """What a completion says."""

    content: str
    """Text outside reasoning and calls: stripped if there are any of these, else the completion as it is."""
    reasoning: str | None
    """Text inside ``<think>``, stripped; several pieces are joined by a line break. None where there is none."""
    tool_calls: list[ToolCall]
    errors: list[str]
    """What was wrong with calls that could not be read, in words for the model."""
    remarks: list[str] = []
    """What was repaired in calls that could be read."""


class _Call(NamedTuple):
    """One call as it was read."""

    name: str
    arguments: str
    """JSON text of an object, as sampled."""
    unwrapped: bool
    """The arguments were a JSON string that holds the object."""
    id: str
    """As sampled; "" if there is none."""


class _MalformedError(Exception):
    """Text that is no tool call; says why."""


def parse_tool_calls(
    text: str, *, truncated: bool, id_prefix: str = "call_", thinking: bool = False, form: CallForm = HERMES
) -> ParsedReply:
    """Read content, reasoning and tool calls from a completion. Never raises; takes time linear in ``len(text)``.

    Args:
        text: the completion, decoded, without its end-of-turn token.
        truncated: the reply was cut by a length limit, so its last block may be incomplete.
        id_prefix: ids of the calls are ``f"{id_prefix}{n}"`` with n counted from 0.
        thinking: the prompt ended inside ``<think>``.
        form: how the model writes calls.
    """
    return _Reader(text, truncated, id_prefix, form).read(thinking)


def parse_plain_json(text: str, names: Collection[str], *, call_id: str = "call_0") -> ToolCall | None:
    """The call that a text is, if all of it is one JSON object with the name of a known tool and arguments; else None.

    For models that leave out the tags. Anything else is an ordinary answer.
    """
    start = _skip(text, 0)
    try:
        call, end = _read_call(text, start, arguments_required=True)
    except _MalformedError:
        return None
    whole = call.name in names and _skip(text, end) == len(text)
    return tool_call(call_id, call.name, call.arguments) if whole else None


def thinks(text: str) -> bool:
    """Whether a reply begins with reasoning."""
    return text[:100].lstrip().startswith("<think>")


def split_reasoning(text: str, *, thinking: bool) -> tuple[str | None, str]:
    """(reasoning, content) of a completion in which no tools were offered.

    ``thinking``: the prompt ended inside ``<think>``. Reasoning without its end lasts to the end of the text; a text
    that does not begin with reasoning is content as it is.
    """
    if not thinking and not thinks(text):
        return None, text
    inside = text.partition("<think>")[2] if thinks(text) else text
    reasoning, _, content = inside.partition("</think>")
    return reasoning.strip(), content.strip()


def emulation_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    """System text that offers ``tools`` (in OpenAI's shape) to a model whose chat template cannot.

    One line per tool, with types as in a signature; only parameters that hold other parameters show their JSON schema.
    The worked example is a call of the first tool with values from its docstring (``such as "12 * 7"``) or plausible
    for the types. Empty without tools.
    """
    if not tools:
        return ""
    functions = [tool["function"] for tool in tools]
    shown = {"name": functions[0]["name"], "arguments": example_arguments(functions[0])}
    lines = ["You can call these tools:"]
    for function in functions:
        lines += _described(function)
    lines += [f"To call one, reply {HERMES.shown}", f"Example: {OPEN}{json.dumps(shown, ensure_ascii=False)}{CLOSE}"]
    return "\n".join(lines)


class _Reader:
    """One pass over a completion, from tag to tag."""

    def __init__(self, text: str, truncated: bool, id_prefix: str, form: CallForm) -> None:
        self.text, self.truncated = text, truncated
        self.id_prefix, self.form = id_prefix, form
        self.tags = re.compile("|".join(map(re.escape, filter(None, ["<think>", "</think>", form.open, form.close]))))
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[ToolCall] = []
        self.ids: set[str] = set()
        self.errors: list[str] = []
        self.remarks: list[str] = []

    def read(self, thinking: bool) -> ParsedReply:
        at = kept = self._think(0, 0) if thinking else 0  # what lies before `kept` is dealt with
        while (tag := self.tags.search(self.text, at)) and len(self.errors) < MAX_ERRORS:
            start, at = tag.span()
            if tag[0] == "<think>":
                self.content.append(self.text[kept:start])
                at = kept = self._think(start, at)
            elif tag[0] == "</think>" and not self.reasoning:  # all of it was reasoning that the prompt began
                self.content, self.calls, self.errors, self.remarks = [], [], [], []
                self.reasoning.append(self.text[:start])
                kept = at
            elif tag[0] == self.form.open:
                self.content.append(self.text[kept:start])
                kept, at = self._block(start, at)
            elif tag[0] == self.form.close:
                problem = f"{self.form.close} without {self.form.open} before it"
                self._error(problem, self.text[max(0, at - 60) : at])
        content = "".join([*self.content, self.text[kept:]])
        reasoning = "\n".join(filter(None, map(str.strip, self.reasoning))) if self.reasoning else None
        if self.calls or reasoning is not None:
            content = content.strip()
        return ParsedReply(content, reasoning, self.calls, self.errors, self.remarks)

    def _think(self, start: int, inside: int) -> int:
        """Take the reasoning that began at ``start``; returns where the text goes on."""
        end = self.text.find("</think>", inside)
        if end < 0:
            end = len(self.text)
            if not self.truncated and self.text.find(self.form.open, inside) >= 0:
                self._error("it is inside <think>; write </think> first", self.text[start : start + 60])
        self.reasoning.append(self.text[inside:end])
        return min(end + len("</think>"), len(self.text))

    def _block(self, start: int, inside: int) -> tuple[int, int]:
        """Read the block whose tag is at ``start``; returns up to where text is dealt with, and where to read on."""
        try:
            found, end = _read_block(self.text, inside, self.form, self.truncated)
        except _MalformedError as problem:
            close = self.form.close
            tag = self.tags.search(self.text, inside)
            cut = self.truncated and (not close or self.text.find(close, inside) < 0)
            reason = f"the reply reached its length limit before {close or 'its end'}" if cut else str(problem)
            self._error(reason, self.text[start : start + 60])
            return start, tag.end() if tag and tag[0] == close else inside
        for call in found:
            call_id = self._unique_id(call)
            self.calls.append(tool_call(call_id, call.name, call.arguments))
            if call.unwrapped:
                self.remarks.append(f"the arguments of {call_id} were a JSON string and were unwrapped")
        return end, end

    def _unique_id(self, call: _Call) -> str:
        wanted = call.id if self.form.ids else ""
        if not wanted or wanted in self.ids:
            numbers = itertools.count(len(self.calls))
            wanted = next(i for n in numbers if (i := f"{self.id_prefix}{n}") not in self.ids)
        self.ids.add(wanted)
        return wanted

    def _error(self, problem: str, near: str) -> None:
        told = f"A tool call was not executed: {problem}. It was near {near!r}. Write it as {self.form.shown}"
        self.errors.append(told)
        if len(self.errors) == MAX_ERRORS:
            self.errors.append(f"What follows was not read: {MAX_ERRORS} tool calls could not be understood.")


def _read_block(text: str, at: int, form: CallForm, truncated: bool) -> tuple[list[_Call], int]:
    """The calls from ``at`` to the closing tag or the end of the text; the end of the block."""
    found: list[_Call] = []
    at = _skip(text, at)
    if form.between:
        call, at = _read_named(text, at, form.between)
        found.append(call)
        at = _skip(text, at)
    else:
        array = text.startswith("[", at)
        at = _skip(text, at + 1) if array else at
        while at < len(text) and not _ends(text, at, form, array):
            if array and found:
                _expect(text, at, ",")
                at = _skip(text, at + 1)
            call, at = _read_call(text, at)
            found.append(call)
            at = _skip(text, at)
        if array:
            _expect(text, at, "]")
            at = _skip(text, at + 1)
    if not found:
        raise _MalformedError("it is empty")
    if truncated and at == len(text):
        raise _MalformedError("it is not complete")
    if form.close and at < len(text):
        _expect(text, at, form.close)
        at += len(form.close)
    return found, at


def _ends(text: str, at: int, form: CallForm, array: bool) -> bool:
    """Whether no further call is in the block."""
    if array:
        return text.startswith("]", at)
    return text.startswith(form.close, at) if form.close else not text.startswith("{", at)


def _read_named(text: str, at: int, between: str) -> tuple[_Call, int]:
    """A call that is written as its name and its arguments, and its end."""
    middle = text.find(between, at, at + MAX_NAME + len(between))
    name = text[at:middle].strip() if middle >= 0 else ""
    if not name:
        raise _MalformedError(f"it has no name in front of {between}")
    start = _skip(text, middle + len(between))
    value, end = _decode(text, start)
    if not isinstance(value, dict):
        raise _MalformedError('its "arguments" are not an object')
    if too_deep(value):
        raise _MalformedError("it is nested too deeply")
    return _Call(*_encodable(name, text[start:end]), False, ""), end


def _read_call(text: str, at: int, *, arguments_required: bool = False) -> tuple[_Call, int]:
    """The call object at ``at``, and its end."""
    fields, end = _read_object(text, at)
    name, _ = fields.get("name", (None, ""))
    if not isinstance(name, str) or not name:
        raise _MalformedError('it has no "name"')
    if "arguments" in fields and "parameters" in fields:
        raise _MalformedError('it has both "arguments" and "parameters"')
    value, raw = fields.get("arguments") or fields.get("parameters") or (None, "")
    if arguments_required and not raw:
        raise _MalformedError('it has no "arguments"')
    unwrapped = isinstance(value, str)
    if isinstance(value, str):  # an object that is written as a JSON string
        raw = value.strip()
        value, used = _decode(raw, 0) if raw else (None, 0)
        if used < len(raw):
            raise _MalformedError('its "arguments" are a string that holds more than one object')
    if not isinstance(value, dict | None):
        raise _MalformedError('its "arguments" are not an object')
    if too_deep(value):
        raise _MalformedError("it is nested too deeply")
    call_id, _ = fields.get("id", ("", ""))
    own = call_id if isinstance(call_id, str) and call_id.isprintable() and call_id.isascii() else ""
    return _Call(*_encodable(name, "{}" if value is None else raw), unwrapped, own), end


def _encodable(name: str, arguments: str) -> tuple[str, str]:
    try:
        (name + arguments).encode()
    except UnicodeEncodeError:
        raise _MalformedError("it holds half of a surrogate pair") from None
    return name, arguments


def _read_object(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """The JSON object at ``at``: each value with its text as written, and the end of the object."""
    fields: dict[str, tuple[Any, str]] = {}
    _expect(text, at, "{")
    at = _skip(text, at + 1)
    while not text.startswith("}", at):
        if fields:
            _expect(text, at, ",")
            at = _skip(text, at + 1)
        _expect(text, at, '"')
        key, at = _decode(text, at)
        at = _skip(text, at)
        _expect(text, at, ":")
        start = _skip(text, at + 1)
        value, end = _decode(text, start)
        if key in fields:
            raise _MalformedError(f"it has {json.dumps(key)} twice")
        fields[key] = value, text[start:end]
        at = _skip(text, end)
    return fields, at + 1


def _no_constant(name: str) -> Any:
    raise _MalformedError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _decode(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise _MalformedError(f"{error.msg} at {text[error.pos : error.pos + 20]!r}") from None
    except RecursionError:
        raise _MalformedError("it is nested too deeply") from None
    except ValueError as error:  # a number with thousands of digits
        raise _MalformedError(str(error)) from None


def _expect(text: str, at: int, part: str) -> None:
    if not text.startswith(part, at):
        raise _MalformedError(f"expected {part} at {text[at : at + 20]!r}")


def _skip(text: str, at: int) -> int:
    """Position of the first character from ``at`` on that is not JSON white space."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def tool_call(call_id: str, name: str, arguments: str) -> ToolCall:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _described(function: Mapping[str, Any]) -> list[str]:
    """One tool: a line like a signature, then a line for each parameter that needs more words."""
    parameters = function.get("parameters") or {}
    head, tail = function["name"], " ".join(str(function.get("description") or "").split())
    if "$defs" in parameters:  # its types contain themselves: only the whole schema says it
        return [f"{head}: {tail}", f"  arguments: {_compact(parameters)}"]
    signature, details = [], []
    for name, schema in parameters.get("properties", {}).items():
        optional = name not in parameters.get("required", ())
        default = f" = {json.dumps(schema['default'], ensure_ascii=False)}" if "default" in schema else ""
        signature.append(f"{name}{'?' if optional and not default else ''}: {type_text(schema)}{default}")
        shape = {key: value for key, value in schema.items() if key not in ("description", "default")}
        words = [str(schema.get("description") or ""), "" if is_simple(schema) else _compact(shape)]
        if any(words):
            details.append(f"  {name}: {' '.join(filter(None, words))}")
    return [f"{head}({', '.join(signature)}): {tail}".rstrip(": "), *details]


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def example_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """A value for each required parameter; the example in the tool's description is for the first string."""
    parameters = function.get("parameters") or {}
    required = {n: s for n, s in parameters.get("properties", {}).items() if n in parameters.get("required", ())}
    first_string = next((name for name, schema in required.items() if schema.get("type") == "string"), None)
    general = str(function.get("description") or "")
    return {name: _example_value(schema, general if name == first_string else "") for name, schema in required.items()}


def _example_value(schema: Mapping[str, Any], fallback: str = "") -> Any:
    """A value that fits the schema, taken from its examples, description or ``fallback`` text where they hold one."""
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    if options := schema.get("anyOf"):
        return _example_value(next((option for option in options if option.get("type") != "null"), options[0]))
    kind = schema.get("type")
    told = next(filter(None, map(_EXAMPLE.search, (str(schema.get("description") or ""), fallback))), None)
    if kind == "string":
        return next(filter(None, told.groups()), "text") if told else "text"
    if kind in ("integer", "number"):
        value = json.loads(told[4]) if told and told[4] and (kind == "number" or told[4].lstrip("-").isdigit()) else 1
        value = max(value, schema.get("minimum", value))
        return min(value, schema.get("maximum", value))
    if kind == "array":
        return [_example_value(schema["items"])] if schema.get("items") else []
    if kind == "object":
        properties, required = schema.get("properties", {}), schema.get("required", ())
        return {name: _example_value(inner) for name, inner in properties.items() if name in required}
    return {"boolean": True, "null": None}.get(str(kind), {} if "$ref" in schema else "text")
