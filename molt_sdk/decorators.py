"""``@policy``, ``@environment``, ``@tool``, ``@reward``: they mark and never wrap.

A decorated function or class is the same object as before, with one attribute that holds its mark. It stays callable,
typed and testable without the SDK.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

from msgspec import Struct

from molt_sdk.errors import DefinitionError

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

MARK = "__molt_mark__"


class PolicyMark(Struct, frozen=True):
    name: str


class EnvironmentMark(Struct, frozen=True):
    name: str
    max_turns: int | None


class ToolMark(Struct, frozen=True):
    name: str | None
    timeout: float | None
    """Seconds, or None for no limit."""
    parallel: bool
    """May run at the same time as other tools of the same environment."""


class RewardMark(Struct, frozen=True):
    name: str
    weight: float
    timeout: float | None
    """Seconds, or None for no limit."""
    group: bool


def mark_of(obj: object) -> Any:
    """The mark of a decorated object (methods and static methods included), or None."""
    if isinstance(obj, staticmethod | classmethod):
        obj = obj.__func__
    return getattr(obj, MARK, None)


def where(obj: object) -> str:
    """``name (file:line)`` of a function or class, for error messages."""
    if isinstance(obj, staticmethod | classmethod):
        obj = obj.__func__
    name = getattr(obj, "__qualname__", repr(obj))
    code = getattr(inspect.unwrap(obj) if callable(obj) else obj, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else str(name)


def _set_mark(obj: Any, mark: Struct) -> None:
    target = obj.__func__ if isinstance(obj, staticmethod | classmethod) else obj
    try:
        setattr(target, MARK, mark)
    except (AttributeError, TypeError):
        raise DefinitionError(
            f"{where(obj)} cannot carry a mark (it is a {type(obj).__name__}); decorate the function that is written "
            "with `def`"
        ) from None


@overload
def policy(fn: F, *, name: str | None = None) -> F: ...
@overload
def policy(fn: None = None, *, name: str | None = None) -> Callable[[F], F]: ...
def policy(fn: F | None = None, *, name: str | None = None) -> F | Callable[[F], F]:
    """Mark an async function ``(task or environment, model)`` as a policy.

    Raises:
        DefinitionError: it is a lambda, not ``async def``, or does not take exactly two positional parameters.
    """

    def mark(fn: F) -> F:
        check_policy(fn)
        _set_mark(fn, PolicyMark(name or fn.__name__))
        return fn

    return mark if fn is None else mark(fn)


def check_policy(fn: Any) -> None:
    """Raise DefinitionError unless ``fn`` is an async function of exactly two positional parameters."""
    if getattr(fn, "__name__", "") == "<lambda>":
        raise DefinitionError(f"policy {where(fn)} is a lambda; write it as `async def name(task, model): ...`")
    if inspect.isasyncgenfunction(fn):
        raise DefinitionError(f"policy {where(fn)} is an async generator; use `return`, not `yield`")
    if not inspect.iscoroutinefunction(fn):
        raise DefinitionError(
            f"policy {where(fn)} is not async; write `async def {getattr(fn, '__name__', 'policy')}(task, model)` "
            "and await the model's calls inside"
        )
    parameters = list(inspect.signature(fn).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(required) != 2 or len(positional) != 2 or keyword_only:
        raise DefinitionError(
            f"policy {where(fn)} takes ({', '.join(p.name for p in parameters)}); a policy takes exactly two "
            "positional parameters, (task, model) or (environment, model)"
        )


@overload
def environment(cls: C, *, name: str | None = None, max_turns: int | None = None) -> C: ...
@overload
def environment(cls: None = None, *, name: str | None = None, max_turns: int | None = None) -> Callable[[C], C]: ...
def environment(cls: C | None = None, *, name: str | None = None, max_turns: int | None = None) -> C | Callable[[C], C]:
    """Mark a class as an environment: state, tools and rewards of one episode; one instance per trajectory.

    ``max_turns`` bounds the tool loop of ``model.run`` for this environment.
    """

    def mark(cls: C) -> C:
        if not inspect.isclass(cls):
            raise DefinitionError(f"@environment is for classes, got {where(cls)}; use @policy for an async function")
        if max_turns is not None and max_turns < 1:
            raise DefinitionError(f"@environment {cls.__qualname__}: max_turns={max_turns} must be at least 1")
        _set_mark(cls, EnvironmentMark(name or cls.__name__, max_turns))
        return cls

    return mark if cls is None else mark(cls)


@overload
def tool(fn: F, *, name: str | None = None, timeout: float | None = None, parallel: bool = False) -> F: ...
@overload
def tool(
    fn: None = None, *, name: str | None = None, timeout: float | None = None, parallel: bool = False
) -> Callable[[F], F]: ...
def tool(
    fn: F | None = None, *, name: str | None = None, timeout: float | None = None, parallel: bool = False
) -> F | Callable[[F], F]:
    """Mark a function or method as a tool. Its JSON schema comes from the signature and the docstring.

    ``timeout`` is in seconds. ``parallel=True`` lets it run beside other tools of the same environment.
    """

    def mark(fn: F) -> F:
        if timeout is not None and not timeout > 0:
            raise DefinitionError(f"@tool {where(fn)}: timeout={timeout} must be a positive number of seconds")
        _set_mark(fn, ToolMark(name, timeout, parallel))
        return fn

    return mark if fn is None else mark(fn)


@overload
def reward(
    fn: F, *, weight: float = 1.0, name: str | None = None, timeout: float | None = None, group: bool = False
) -> F: ...
@overload
def reward(
    fn: None = None, *, weight: float = 1.0, name: str | None = None, timeout: float | None = None, group: bool = False
) -> Callable[[F], F]: ...
def reward(
    fn: F | None = None,
    *,
    weight: float = 1.0,
    name: str | None = None,
    timeout: float | None = None,
    group: bool = False,
) -> F | Callable[[F], F]:
    """Mark a reward: method ``(self, trajectory)`` or function ``(task, trajectory)``, sync or async.

    It returns a number, or a mapping of named numbers. ``weight=0`` makes it a metric. ``group=True`` marks a static
    ``(task, group)`` that returns one number per trajectory. ``timeout`` is in seconds.
    """

    def mark(fn: F) -> F:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not abs(weight) < float("inf"):
            raise DefinitionError(f"@reward {where(fn)}: weight={weight!r} must be a finite number")
        if timeout is not None and not timeout > 0:
            raise DefinitionError(f"@reward {where(fn)}: timeout={timeout} must be a positive number of seconds")
        target: Any = fn.__func__ if isinstance(fn, staticmethod | classmethod) else fn
        _set_mark(fn, RewardMark(name or target.__name__, float(weight), timeout, group))
        return fn

    return mark if fn is None else mark(fn)
