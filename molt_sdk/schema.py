"""Parameters of a Python function as JSON schema, and JSON values back as the annotated types.

msgspec does the work for plain types, dataclasses, ``msgspec.Struct``, ``TypedDict``, ``NamedTuple`` and ``Enum``;
pydantic models bring their own schema and validation (pydantic is never imported here: whoever defines such a model
has done so). ``$ref`` is inlined, because chat templates print schemas as they are; only a type that contains itself
keeps its ``$ref`` and a ``$defs`` beside the parameters.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
from msgspec import Struct

from molt_sdk.decorators import where
from molt_sdk.errors import DefinitionError

REF = "#/$defs/"
_NAMED = ("properties", "patternProperties", "$defs")
"""Schema keywords whose value maps names to schemas."""
_VERBATIM = ("default", "const", "enum", "examples", "required")
"""Schema keywords whose value is data, not a schema."""
_SIMPLE = {"type", "enum", "description", "default", "anyOf", "items", "uniqueItems", "minimum", "maximum", "examples"}
"""Schema keywords that :func:`type_text` can say in a few words."""

_CONVERSION_ERRORS = (ValueError, TypeError, OverflowError, RecursionError)
"""msgspec's is a ValueError; the others: unhashable members of a set, an int too large for a float, depth."""

SUPPORTED = (
    "str, int, float, bool, None, list, tuple, set, dict, Literal, Enum, Optional, dataclass, TypedDict, "
    "msgspec.Struct, pydantic model, Annotated"
)


class Parameter(Struct, frozen=True):
    """One parameter of a tool."""

    name: str
    type: Any
    """The resolved annotation."""
    schema: dict[str, Any]
    required: bool


def parameters_of(
    fn: Callable[..., Any], *, skip_first: bool, descriptions: Mapping[str, str]
) -> tuple[tuple[Parameter, ...], dict[str, Any]]:
    """The parameters of ``fn`` and the ``$defs`` that their schemas refer to (empty unless a type contains itself).

    Args:
        fn: a function; its signature and annotations are read, it is not called.
        skip_first: leave out the first parameter (``self`` or ``cls``).
        descriptions: text per parameter, from the docstring; ``Annotated[..., "text"]`` wins over it.

    Raises:
        DefinitionError: a parameter has no annotation, one that cannot be resolved, or one without a JSON schema; it is
            positional-only, ``*args`` or ``**kwargs``.
    """
    place = f"tool {where(fn)}"
    found = list(inspect.signature(fn).parameters.values())[1 if skip_first else 0 :]
    annotations = [_annotation(fn, parameter, place) for parameter in found]
    types = [kind | None if p.default is None else kind for kind, p in zip(annotations, found, strict=True)]
    schemas, defs = _schemas(types, [parameter.name for parameter in found], place)
    made = []
    for parameter, annotation, kind, schema in zip(found, annotations, types, schemas, strict=True):
        described = _annotated_text(annotation, parameter.name, place) or descriptions.get(parameter.name)
        schema = schema | ({"description": " ".join(described.split())} if described else {})
        required = parameter.default is parameter.empty
        if not required:
            schema |= _default(parameter.default, parameter.name, place)
        made.append(Parameter(parameter.name, kind, schema, required))
    return tuple(made), defs


def convert(value: Any, kind: Any) -> Any:
    """A JSON value as the annotated type; raises ValueError with msgspec's or pydantic's words.

    Exact types first. Where they do not fit, the lax rules that models need: a number written as a string ("3" for
    int), 3.0 for int, "true" and 1 for bool, "null" for None. Never a bool for a number, never a number for a str.
    """
    try:
        return msgspec.convert(value, kind, dec_hook=_validate_custom)
    except _CONVERSION_ERRORS as error:
        strict_error = error
    try:
        return msgspec.convert(value, kind, strict=False, dec_hook=_validate_custom)
    except _CONVERSION_ERRORS:
        raise ValueError(str(strict_error)) from strict_error


def type_text(schema: Mapping[str, Any]) -> str:
    """A schema in a few words: ``integer >= 0``, ``"c" | "f"``, ``array of string``, ``object``, ``any``."""
    if "enum" in schema:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"], ensure_ascii=False)
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(type_text(option) for option in schema["anyOf"]))
    if schema.get("type") == "array" and schema.get("items"):
        item = type_text(schema["items"])
        return f"array of ({item})" if "|" in item else f"array of {item}"
    kind = schema.get("type", "object" if "$ref" in schema else "any")
    limits = "".join(f" {sign} {schema[key]}" for key, sign in (("minimum", ">="), ("maximum", "<=")) if key in schema)
    return (" | ".join(kind) if isinstance(kind, list) else str(kind)) + limits


def is_simple(schema: Mapping[str, Any]) -> bool:
    """Does :func:`type_text` say all there is to know?"""
    if not _SIMPLE.issuperset(schema):
        return False
    inner = [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])]
    return all(isinstance(part, dict) and is_simple(part) for part in inner)


def _annotation(fn: Callable[..., Any], parameter: inspect.Parameter, place: str) -> Any:
    """The resolved annotation of one parameter."""
    name = parameter.name
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
        raise DefinitionError(f"{place} takes {stars}{name}; a model needs named parameters: list them one by one")
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise DefinitionError(f"{place}: parameter {name!r} is positional-only; remove the `/`, arguments have names")
    if parameter.annotation is parameter.empty:
        hint = "pass an instance or its bound method" if name in ("self", "cls") else f"write for example `{name}: str`"
        raise DefinitionError(f"{place}: parameter {name!r} has no type annotation; {hint}")
    holder = SimpleNamespace(__annotations__={name: parameter.annotation})
    try:
        return typing.get_type_hints(holder, globalns=_names(fn), localns={}, include_extras=True)[name]
    except Exception as error:  # evaluating an annotation runs whatever the user wrote in it
        raise DefinitionError(
            f"{place}: the annotation {parameter.annotation!r} of parameter {name!r} cannot be resolved ({error}); "
            "define the type at module level, or drop `from __future__ import annotations` in that file"
        ) from error


def _names(fn: Callable[..., Any]) -> dict[str, Any]:
    """What the annotations of ``fn`` may refer to: globals of its module and the variables that it closes over."""
    inner = inspect.unwrap(fn)
    names = dict(getattr(inner, "__globals__", {}))
    code, closure = getattr(inner, "__code__", None), getattr(inner, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars if code else (), closure, strict=True):
        with contextlib.suppress(ValueError):  # a variable that is not assigned yet
            names[name] = cell.cell_contents
    return names


def _schemas(types: Sequence[Any], names: Sequence[str], place: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Inlined schemas of ``types`` and the ``$defs`` of those that contain themselves."""
    defs: dict[str, Any] = {}

    def custom(kind: Any) -> dict[str, Any]:
        if not _is_pydantic(kind):
            raise TypeError(f"type {getattr(kind, '__qualname__', kind)} has no JSON schema")
        schema: dict[str, Any] = kind.model_json_schema(ref_template=f"{REF}{kind.__name__}.{{model}}")
        for name, definition in schema.pop("$defs", {}).items():
            if defs.setdefault(f"{kind.__name__}.{name}", definition) != definition:
                raise TypeError(f"two pydantic models are named {kind.__name__}; rename one")
        return schema

    for kind, name in zip(types, names, strict=True):
        try:
            msgspec.json.schema_components([kind], schema_hook=custom)
        except Exception as error:  # msgspec and pydantic raise many classes for a type that they cannot describe
            reason = str(error).splitlines()[0]
            shown = getattr(kind, "__qualname__", kind)
            raise DefinitionError(
                f"{place}: parameter {name!r} has type {shown}, which has no JSON schema ({reason}); use {SUPPORTED}"
            ) from error
    raw, components = msgspec.json.schema_components(types, schema_hook=custom, ref_template=REF + "{name}")
    defs |= components
    recursive = {name for name in defs if name in _reachable(defs[name], defs)}
    schemas = [_inline(schema, defs, recursive) for schema in raw]
    kept = sorted(recursive & {name for schema in schemas for name in _reachable(schema, defs)})
    return schemas, {name: _inline(defs[name], defs, recursive) for name in kept}


def _references(node: Any) -> set[str]:
    """Names that the ``$ref``s in a schema point to."""
    if isinstance(node, list | tuple):
        return {name for item in node for name in _references(item)}
    if not isinstance(node, dict):
        return set()
    own = {node["$ref"].removeprefix(REF)} if isinstance(node.get("$ref"), str) else set()
    return own | {name for item in node.values() for name in _references(item)}


def _reachable(node: Any, defs: Mapping[str, Any]) -> set[str]:
    seen: set[str] = set()
    todo = _references(node)
    while todo:
        name = todo.pop()
        if name not in seen and name in defs:
            seen.add(name)
            todo |= _references(defs[name])
    return seen


def _inline(schema: Any, defs: Mapping[str, Any], recursive: set[str]) -> Any:
    """A schema with its ``$ref``s replaced and without titles, which only repeat names."""
    if isinstance(schema, list | tuple):
        return [_inline(item, defs, recursive) for item in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).removeprefix(REF)
    if name in defs and name not in recursive:
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        return _inline({**defs[name], **beside}, defs, recursive)
    clean: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _VERBATIM:
            clean[key] = value
        elif key in _NAMED:
            clean[key] = {inner: _inline(item, defs, recursive) for inner, item in value.items()}
        elif key not in ("title", "discriminator"):
            clean[key] = _inline(value, defs, recursive)
    return clean


def _annotated_text(kind: Any, name: str, place: str) -> str | None:
    """The description in ``Annotated[..., "text"]``; msgspec puts that of ``msgspec.Meta`` into the schema itself."""
    text = None
    for extra in getattr(kind, "__metadata__", ()):
        _refuse_pydantic_field(extra, name, place)
        if isinstance(extra, msgspec.Meta):
            text = extra.description or text
        elif isinstance(extra, str):
            text = extra
    return text


def _default(value: Any, name: str, place: str) -> dict[str, Any]:
    """``{"default": JSON value}``; empty where the default has no JSON form: the parameter is optional all the same."""
    _refuse_pydantic_field(value, name, place)
    try:
        plain = msgspec.to_builtins(value, str_keys=True, order="deterministic", enc_hook=_dump_custom)
        json.dumps(plain, allow_nan=False)
    except (TypeError, ValueError, NotImplementedError):
        return {}
    return {"default": plain}


def _refuse_pydantic_field(value: Any, name: str, place: str) -> None:
    """Its constraints would not be checked, so it must not look as if they were."""
    if type(value).__name__ == "FieldInfo" and type(value).__module__.startswith("pydantic"):
        raise DefinitionError(
            f"{place}: parameter {name!r} uses pydantic.Field, which only works inside a pydantic model; "
            'write `Annotated[int, msgspec.Meta(description="...", ge=0)]`, or take the model as the parameter'
        )


def _is_pydantic(kind: Any) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


def _validate_custom(kind: type, value: Any) -> Any:
    """msgspec's hook for a type that it does not know: a pydantic model, as ``_schemas`` made sure of."""
    if isinstance(value, kind):
        return value
    if not _is_pydantic(kind):
        raise NotImplementedError(f"{kind} has no conversion from JSON")
    try:
        return kind.model_validate(value)  # type: ignore[attr-defined]
    except ValueError as error:
        details = error.errors() if hasattr(error, "errors") else []
        text = "; ".join(f"{'.'.join(map(str, d['loc'])) or 'value'}: {d['msg']}" for d in details)
        raise ValueError(text or str(error)) from error


def _dump_custom(value: Any) -> Any:
    """msgspec's hook for a value that it does not know; NotImplementedError is how such a hook says "nor do I"."""
    if _is_pydantic(type(value)):
        return value.model_dump(mode="json")
    raise NotImplementedError(f"{type(value)} has no JSON form")
