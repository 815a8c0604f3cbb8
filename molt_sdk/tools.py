"""A user's function or method as a tool: schema, arguments and result.

``tools_from`` takes an environment (instance or class), a function, a ``Tool``, or a list that mixes them. Everything
that can be wrong with a definition is found here, before a model is loaded. What is wrong with a *call* is a
``ToolArgumentsError``, whose message is written for the model to read.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import docstring_parser
import msgspec
from msgspec import Struct

from molt_sdk.decorators import EnvironmentMark, ToolMark, mark_of, where
from molt_sdk.errors import DefinitionError, RequestError
from molt_sdk.schema import Parameter, convert, parameters_of, type_text

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""What inference servers accept as the name of a tool."""


class ToolArgumentsError(RequestError):
    """The arguments of a tool call do not fit the tool. The message tells the model what to write instead."""


class _Description(Struct, frozen=True):
    """What a function says of itself."""

    text: str
    parameters: tuple[Parameter, ...]
    schema: dict[str, Any]


class Tool(Struct, frozen=True, kw_only=True):
    """One tool, ready to be offered to a model and to be called."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments object."""
    fn: Callable[..., Any]
    """Called as ``fn(**tool.bind(arguments))``. Bound, unless the tool was collected from a class, not an instance."""
    timeout: float | None = None
    """Seconds, or None for no limit."""
    parallel: bool = False
    """May run at the same time as other tools of the same environment."""
    signature: tuple[Parameter, ...] = ()

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's shape."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def bind(self, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments for ``fn``, converted to the annotated types. Defaults are left to the function.

        ``arguments`` is JSON text of one object (also text that is itself inside a JSON string: models do that), or a
        mapping. Types are strict first, then lax for what models write: see :func:`molt_sdk.schema.convert`.

        Raises:
            ToolArgumentsError: not a JSON object, an unknown or missing argument, a value of the wrong type.
        """
        values = _object(self.name, arguments)
        known = {parameter.name: parameter for parameter in self.signature}
        listed = ", ".join(known) or "none"
        if unknown := [name for name in values if name not in known]:
            raise ToolArgumentsError(f'{self.name}: unknown argument "{unknown[0]}"; the arguments are: {listed}')
        if missing := [p for p in self.signature if p.required and p.name not in values]:
            shown = ", ".join(f'"{p.name}" ({type_text(p.schema)})' for p in missing)
            raise ToolArgumentsError(f"{self.name}: missing argument {shown}; given: {', '.join(values) or 'none'}")
        return {name: _value(self.name, known[name], value) for name, value in values.items()}


def tool_from(fn: Any) -> Tool:
    """The tool that a function (marked with ``@tool`` or not) or bound method is.

    Raises:
        DefinitionError: it is a lambda, not a function, a generator; it has no docstring, a bad name, or a parameter
            that a JSON schema cannot describe.
    """
    if isinstance(fn, Tool):
        return fn
    if isinstance(fn, staticmethod | classmethod):
        raise DefinitionError(f"tool {where(fn)} is a bare {type(fn).__name__}; pass it as an attribute of its class")
    bound = isinstance(fn, MethodType)
    return _make(fn, fn.__func__ if bound else fn, skip_first=bound)


def tools_from(source: Any) -> list[Tool]:
    """All tools of an environment (instance or class), a function, a ``Tool``, or an iterable that mixes them.

    Tools of a class come in definition order, those of base classes first; an override keeps the place of what it
    overrides. From a class, methods stay unbound: good for schemas and checks, not for calls.

    Raises:
        DefinitionError: two tools have one name, or one tool is defined in a way that cannot work.
    """
    tools = list(_collect(source))
    by_name: dict[str, Tool] = {}
    for tool in tools:
        if (other := by_name.setdefault(tool.name, tool)) is not tool:
            raise DefinitionError(
                f"two tools are named {tool.name!r}: {where(other.fn)} and {where(tool.fn)}; "
                'rename one with @tool(name="...")'
            )
    return tools


def result_text(value: Any) -> str:
    """What the model reads as the result of a tool. Total: there is text for every value.

    A str is taken as it is, None is "", everything else is JSON (dataclasses, structs, pydantic models, arrays through
    ``tolist()``, dates and Decimals as strings; a top-level string without its quotes; sets sorted), and what has no
    JSON form is ``str(value)``, without the address that Python shows of an object: it differs from run to run. Bytes
    are their UTF-8 text if they are that, else Base64, as they are inside of other values. Lone surrogates, which no
    tokenizer can encode, become U+FFFD.
    """
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError:
            pass
    return _encodable(value if isinstance(value, str) else _json_text(value))


def error_text(error: BaseException) -> str:
    """``Class: message`` of any exception, also of one whose ``str`` fails or holds what no tokenizer can encode."""
    return _encodable(f"{type(error).__name__}: {_str(error)}")


def _collect(source: Any) -> Iterator[Tool]:
    cls = source if inspect.isclass(source) else type(source)
    if isinstance(source, Tool) or inspect.isroutine(source):
        yield tool_from(source)
    elif isinstance(mark_of(cls), EnvironmentMark) or _marked(cls):
        yield from _class_tools(cls, None if cls is source else source)
    elif isinstance(source, Iterable) and not isinstance(source, str | bytes | Mapping):
        for item in source:
            yield from _collect(item)
    else:
        raise DefinitionError(
            f"tools cannot come from {source!r}; give functions, or an instance or class that has @tool methods"
        )


def _marked(cls: type) -> dict[str, Any]:
    """Attributes marked with ``@tool``, raw as the classes define them, base classes first."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        for name, raw in vars(base).items():
            if isinstance(mark_of(raw), ToolMark):
                found[name] = raw
            elif name in found and raw is None:
                del found[name]
            elif name in found:
                raise DefinitionError(
                    f"{where(raw)} in class {base.__qualname__} overrides the tool {where(found[name])} without @tool; "
                    f"add the decorator, or write `{name} = None` to drop the tool"
                )
    return found


def _class_tools(cls: type, instance: Any) -> Iterator[Tool]:
    for name, raw in _marked(cls).items():
        fn = getattr(cls if instance is None else instance, name)
        static = isinstance(raw, staticmethod)
        yield _make(fn, raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw, skip_first=not static)


def _make(fn: Callable[..., Any], function: Any, *, skip_first: bool) -> Tool:
    """The tool of ``function``, to be called as ``fn`` (the same, or bound)."""
    if inspect.isclass(function) or not inspect.isfunction(inspect.unwrap(function)):
        raise DefinitionError(f"{function!r} is no tool; a tool is a function or method that is written with `def`")
    mark = mark_of(function)
    mark = mark if isinstance(mark, ToolMark) else ToolMark(None, None, False)
    name = mark.name or function.__name__
    if name == "<lambda>":
        raise DefinitionError(f"tool {where(function)} is a lambda; write it with `def`, annotations and a docstring")
    if not NAME.fullmatch(name):
        raise DefinitionError(
            f"tool {where(function)} is named {name!r}; use 1 to 64 letters, digits, _ or -: "
            '@tool(name="...") gives another name'
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise DefinitionError(f"tool {where(function)} is a generator; use `return`: a tool gives one result")
    described = _describe(function, skip_first)
    return Tool(
        name=name,
        description=described.text,
        parameters=described.schema,
        fn=fn,
        timeout=mark.timeout,
        parallel=mark.parallel,
        signature=described.parameters,
    )


_described: WeakKeyDictionary[Any, dict[bool, _Description]] = WeakKeyDictionary()
"""An environment is instantiated for each trajectory; its schemas are made once."""


def _describe(function: Any, skip_first: bool) -> _Description:
    """Description and parameters from docstring and signature."""
    known = _described.setdefault(function, {})
    if skip_first not in known:
        text, descriptions = _docstring(function)
        parameters, defs = parameters_of(function, skip_first=skip_first, descriptions=descriptions)
        schema: dict[str, Any] = {"type": "object", "properties": {p.name: p.schema for p in parameters}}
        if required := [p.name for p in parameters if p.required]:
            schema["required"] = required
        if defs:
            schema["$defs"] = defs
        known[skip_first] = _Description(text, parameters, schema)
    return known[skip_first]


def _docstring(function: Any) -> tuple[str, dict[str, str]]:
    """Description of the tool and of each parameter, from a Google, NumPy or ReST docstring."""
    text = inspect.getdoc(function) or ""
    try:
        parsed = docstring_parser.parse(text)
    except docstring_parser.ParseError:  # the text does not follow the style it looks like: then it is all description
        return text, {}
    description = (parsed.description or "").strip()
    if not description:
        raise DefinitionError(
            f"tool {where(function)} has no docstring that says what it does; add one: the model chooses tools by it"
        )
    return description, {p.arg_name: p.description for p in parsed.params if p.description}


def _object(tool: str, arguments: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments object of a call, parsed."""
    value: Any = arguments
    for _ in range(2):  # the second time for an object that is written as a JSON string
        if isinstance(value, str):
            value = _parse(tool, value)
    if not isinstance(value, Mapping):
        raise ToolArgumentsError(f"{tool}: the arguments must be one JSON object, given {_shown(value)}")
    return value


def _parse(tool: str, text: str) -> Any:
    try:
        value = json.loads(text.strip() or "{}", parse_constant=_no_constant)
        if "\\ud" in text.lower():  # an escaped surrogate may lack its other half
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = "it holds half of a surrogate pair" if isinstance(error, UnicodeError) else str(error)
        raise ToolArgumentsError(f"{tool}: the arguments are not valid JSON ({reason}): {_short(text)}") from error
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _value(tool: str, parameter: Parameter, value: Any) -> Any:
    try:
        return convert(value, parameter.type)
    except ValueError as error:
        detail = str(error).replace("`", "").replace(" - at $", " at ")
        expected = type_text(parameter.schema)
        raise ToolArgumentsError(
            f'{tool}: argument "{parameter.name}" must be {expected}, given {_shown(value)} ({detail})'
        ) from error


def _shown(value: Any) -> str:
    """A value as short JSON."""
    return _short(json.dumps(value, ensure_ascii=False, default=repr))


def _short(text: str) -> str:
    return _encodable(text if len(text) <= 100 else text[:100] + "…")


def _encodable(text: str) -> str:
    """The text with U+FFFD in place of lone surrogates, which neither a tokenizer nor a store can encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _json_text(value: Any) -> str:
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)  # the order of a set changes from process to process; a result must not
    try:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_plain)
        return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
    except Exception:  # any code of the value's class may have run
        return _str(value)


def _str(value: Any) -> str:
    try:
        return str(value).replace(f" at {id(value):#x}", "")
    except Exception as error:
        return f"<{type(value).__name__} whose str() raises {type(error).__name__}>"


def _plain(value: Any) -> Any:
    """What msgspec does not know: pydantic models, numpy and torch values; anything else as its text."""
    if callable(dump := getattr(value, "model_dump", None)):
        return dump(mode="json")
    if callable(tolist := getattr(value, "tolist", None)):
        return tolist()
    return _str(value)
