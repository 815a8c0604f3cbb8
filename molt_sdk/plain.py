"""Any object of a user as plain data: what msgpack and JSON hold.

Numpy and torch values, Decimals, dataclasses, sets and tuples become plain data, anything else becomes
``{"__repr__": ..., "type": ...}``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.msgpack import Ext

_BIG_INT, _SURROGATE_TEXT, _PAIRS = 1, 2, 3
_MAX_DEPTH = 200
_MAX_ARRAY = 10_000
_MAX_REPR = 10_000


def to_plain(value: Any) -> Any:
    """``value`` as None, bool, int, float, str, bytes, datetime, list and dict, or the msgpack extensions that stand
    for integers beyond 64 bits and text with lone surrogates. Objects that are none of these become their repr."""
    return _plain(value, set())


def plain_object(value: object) -> Any:
    """One step from an object that msgspec and json do not know towards plain data, for use as an ``enc_hook``."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    try:
        if callable(getattr(type(value), "tolist", None)):  # numpy and torch scalars and arrays, array.array
            return _array(value)
        if callable(getattr(type(value), "model_dump", None)):  # pydantic
            return value.model_dump()  # type: ignore[attr-defined]
        return msgspec.to_builtins(value, builtin_types=(bytes, datetime), enc_hook=_as_repr)
    except Exception:  # the object's own code failed: its repr is all that can be kept of it
        return _as_repr(value)


def _array(value: Any) -> Any:
    size = getattr(value, "size", None)  # an int in numpy, a method in torch (whose element count is numel())
    count = value.numel() if callable(getattr(value, "numel", None)) else size if isinstance(size, int) else len(value)
    if count > _MAX_ARRAY:
        return _as_repr(value)
    plain = value.tolist()
    return plain if isinstance(plain, bool | int | float | str | bytes | list) else _as_repr(value)


def _as_repr(value: object) -> dict[str, str]:
    kind = type(value)
    try:
        text = repr(value)
    except Exception as error:  # user code: a repr that fails is recorded as that
        text = f"<repr failed: {type(error).__name__}: {error}>"
    return {"__repr__": text[:_MAX_REPR], "type": f"{kind.__module__}.{kind.__qualname__}"}


def _plain(value: Any, path: set[int]) -> Any:
    """``path`` holds the ids of the objects that contain ``value``."""
    kind = type(value)
    if kind is str:
        return _text(value)
    if value is None or kind is bool or kind is float or kind is bytes or kind is datetime:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else Ext(_BIG_INT, hex(value).encode())
    if id(value) in path or len(path) > _MAX_DEPTH:
        return _plain(_as_repr(value), set())
    path.add(id(value))
    try:
        if kind is dict:
            return _pairs([(_key(key), _plain(item, path)) for key, item in list(value.items())])
        if kind is list or kind is tuple:
            return [_plain(item, path) for item in list(value)]
        return _plain(_container(value), path)
    finally:
        path.discard(id(value))


def _container(value: Any) -> Any:
    """The dict or list that a container is in plain terms; other objects by :func:`plain_object`."""
    try:
        if isinstance(value, Mapping):
            return dict(value.items())
        if isinstance(value, Set):
            return sorted(value, key=repr)
        if isinstance(value, Struct):
            return msgspec.structs.asdict(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = (field.name for field in dataclasses.fields(value))
            return {name: getattr(value, name) for name in names if hasattr(value, name)}
        if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview | range):
            return list(value)
    except Exception:  # the object's own code failed: its repr is all that can be kept of it
        return _as_repr(value)
    return plain_object(value)


def _key(key: Any) -> Any:
    """A mapping's key: scalars and tuples of scalars stay what they are, the rest becomes text."""
    if isinstance(key, tuple):
        return tuple(_key(part) for part in key)
    plain = _plain(key, set())
    return _text(repr(key)) if isinstance(plain, list | dict) else plain


def _pairs(pairs: list[tuple[Any, Any]]) -> Any:
    try:
        return dict(pairs)
    except TypeError:  # a key that is an extension (a big integer, a lone surrogate) cannot be hashed
        return Ext(_PAIRS, msgspec.msgpack.encode(pairs))


def _text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        return Ext(_SURROGATE_TEXT, value.encode("utf-8", "surrogatepass"))
    return value


def read_extension(code: int, data: memoryview) -> Any:
    """What an extension stands for, for use as an ``ext_hook``. Raises ValueError."""
    if code == _BIG_INT:
        return int(bytes(data), 16)
    if code == _SURROGATE_TEXT:
        return bytes(data).decode("utf-8", "surrogatepass")
    if code == _PAIRS:
        pairs = msgspec.msgpack.decode(data, ext_hook=read_extension)
        return {_hashable(key): item for key, item in pairs}
    raise ValueError(f"unknown msgpack extension type {code}")


def _hashable(key: Any) -> Any:
    return tuple(_hashable(part) for part in key) if isinstance(key, list) else key
