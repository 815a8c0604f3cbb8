"""The event loop: blocking twins of async functions, plain errors out of task groups, fair turns for many tasks."""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import msgspec

from molt_sdk.errors import ConfigError, MoltError

P = ParamSpec("P")
T = TypeVar("T")


def in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def blocking(
    twin: Callable[P, Coroutine[Any, Any, T]], name: str, settings: Mapping[str, type[msgspec.Struct]] | None = None
) -> Callable[P, T]:
    """The blocking form of an async function, with its signature: it runs on a loop of its own.

    Inside a running event loop it raises MoltError, naming the twin to await instead. An unknown keyword is a
    ConfigError with the nearest one, or with the way to give it that ``settings`` names for the fields of a struct.
    """

    @functools.wraps(twin)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if in_event_loop():
            raise MoltError(f"{name}() was called inside a running event loop; use `await {twin.__name__}(...)` there")
        try:
            inspect.signature(twin).bind(*args, **kwargs)
        except TypeError as error:
            known = inspect.signature(twin).parameters
            unknown = next((k for k in kwargs if k not in known), "")
            raise ConfigError(f"{name}(): {error}{_keyword_hint(unknown, [*known], settings or {})}") from None
        return asyncio.run(twin(*args, **kwargs))

    run.__name__ = run.__qualname__ = name
    del run.__wrapped__  # else inspect takes it for the coroutine function
    run.__signature__ = inspect.signature(twin)  # type: ignore[attr-defined]
    return run


def _keyword_hint(unknown: str, known: list[str], settings: Mapping[str, type[msgspec.Struct]]) -> str:
    for way, struct in settings.items():
        if unknown in struct.__struct_fields__:
            return f"; write {way.format(f'{unknown}=...')}"
    near = difflib.get_close_matches("learning_rate" if unknown == "lr" else unknown, known, 1)
    return f"; did you mean {near[0]}=?" if near else ""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise the first error of a task group by itself, its cause kept, so that users see a plain exception."""
    try:
        yield
    except BaseExceptionGroup as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__


class Turnstile:
    """Keeps the loop responsive when thousands of trajectories become ready at once: it lets ``per_tick`` passers
    through in one iteration of the loop; the others wait their turn in order.

    Rendering and recording a call takes a fraction of a millisecond of pure Python. asyncio runs everything that is
    ready before it looks at timers and sockets again, so 2,000 ready calls would stall them for a second.
    """

    def __init__(self, per_tick: int = 32) -> None:
        self._per_tick = per_tick
        self._passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._reset_planned = False

    async def turn(self) -> None:
        """Return at once if this iteration has room, else in a later one."""
        if self._passed < self._per_tick and not self._waiting:
            self._passed += 1
            self._plan_reset()
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._plan_reset()
        await future

    def _plan_reset(self) -> None:
        if not self._reset_planned:
            self._reset_planned = True
            asyncio.get_running_loop().call_soon(self._reset)

    def _reset(self) -> None:
        self._reset_planned = False
        self._passed = 0
        while self._waiting and self._passed < self._per_tick:
            future = self._waiting.popleft()
            if not future.done():  # a cancelled passer takes no room
                future.set_result(None)
                self._passed += 1
        if self._passed:
            self._plan_reset()
