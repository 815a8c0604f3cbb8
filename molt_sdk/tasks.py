"""Where tasks come from: lists, iterables, an environment's ``tasks``; each row checked where it is read."""

from __future__ import annotations

import inspect
import random
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from typing import Any

from molt_sdk.errors import ConfigError, DefinitionError, MoltError, RequestError
from molt_sdk.messages import normalize
from molt_sdk.types import Task

MOST_TASKS = 1_000_000
"""Of one rollout or evaluation without a limit; more are taken for an endless stream."""


class TaskSource:
    """Where tasks come from; each epoch is asked for anew.

    A finite list is reshuffled every epoch (seeded) if ``shuffle``; an environment's ``tasks(split, seed)`` is streamed
    as it is and asked for ``seed + 1`` when it ends; a one-shot iterator ends the stream.
    """

    def __init__(self, source: Any, *, split: str, seed: int, place: str) -> None:
        self._source = source
        self._split = split
        self._seed = seed
        self._place = place
        if isinstance(source, Sequence) and not isinstance(source, str | bytes):
            if not source:
                raise ConfigError(f"{place} is empty; give at least one task")
            for i, row in enumerate(source):
                to_task(row, f"{place}[{i}]")
        elif isinstance(source, str | bytes | Mapping) or not (
            callable(source) or isinstance(source, Iterable | AsyncIterable)
        ):
            raise ConfigError(f"{place} must be an iterable of Task or dict rows, got {type(source).__name__}")

    @property
    def restartable(self) -> bool:
        """Whether it can be asked again from the start; a one-shot iterator cannot."""
        return not isinstance(self._source, Iterator | AsyncIterator)

    async def epoch(self, number: int, *, shuffle: bool) -> AsyncGenerator[Task, None]:
        """Tasks of one epoch. Raises ConfigError for a row that is no task, DefinitionError where user code raises."""
        i = 0
        try:
            async for row in self._rows(number, shuffle=shuffle):
                yield to_task(row, f"{self._place} row {i}")
                i += 1
        except MoltError:
            raise
        except Exception as error:
            raise DefinitionError(
                f"{self._place} raised {type(error).__name__} after {i} tasks (split {self._split!r}): {error}"
            ) from error

    async def _rows(self, number: int, *, shuffle: bool) -> AsyncIterator[Any]:
        rows = self._source
        if callable(rows):
            rows = _call_tasks(rows, self._split, self._seed + number)
            if inspect.isawaitable(rows):
                rows = await rows
        elif isinstance(rows, Sequence) and shuffle:
            rows = random.Random(f"{self._seed}:{number}").sample(list(rows), len(rows))
        if isinstance(rows, AsyncIterable):
            async for row in rows:
                yield row
        elif isinstance(rows, Iterable):
            for row in rows:
                yield row
        else:
            raise ConfigError(f"{self._place} gave {type(rows).__name__}; expected an iterable of Task or dict rows")

    async def stream(self) -> AsyncIterator[tuple[int, int, Task]]:
        """(position, epoch, task) without end, or until a one-shot iterator is used up."""
        position = 0
        epoch = 0
        while True:
            before = position
            async for task in self.epoch(epoch, shuffle=True):
                yield position, epoch, task
                position += 1
            if position == before and self.restartable:
                raise ConfigError(f"{self._place} gave no task in epoch {epoch} (split {self._split!r})")
            if not self.restartable:
                return
            epoch += 1

    async def once(self, limit: int | None) -> list[Task]:
        """The first ``limit`` tasks in their own order. Raises ConfigError if there is none, or no end."""
        tasks: list[Task] = []
        async with aclosing(self.epoch(0, shuffle=False)) as rows:
            async for task in rows:
                tasks.append(task)
                if limit is not None and len(tasks) >= limit:
                    break
                if len(tasks) > MOST_TASKS:
                    raise ConfigError(f"{self._place} gave more than {MOST_TASKS} tasks; set a limit if it is endless")
        if not tasks:
            raise ConfigError(f"{self._place} is empty (split {self._split!r}); give at least one task")
        return tasks


def _call_tasks(fn: Callable[..., Any], split: str, seed: int) -> Any:
    parameters = inspect.signature(fn).parameters
    offered = {"split": split, "seed": seed}
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return fn(**offered)
    return fn(**{name: value for name, value in offered.items() if name in parameters})


def to_task(row: Any, place: str) -> Task:
    """A Task from a Task or a dict row with "prompt"; other keys become metadata. Raises ConfigError."""
    if isinstance(row, Task):
        _check_prompt(row.prompt, place)
        return row
    if isinstance(row, Mapping):
        if "prompt" not in row:
            raise ConfigError(f'{place}: the row has no "prompt" (keys: {", ".join(map(str, row))})')
        rest = {str(k): v for k, v in row.items() if k not in ("prompt", "answer", "id", "metadata")}
        prompt = row["prompt"]
        _check_prompt(prompt, place)
        metadata = row.get("metadata")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise ConfigError(f'{place}: "metadata" is {type(metadata).__name__}; use a dict, or another key')
        identity = "" if row.get("id") is None else str(row["id"])
        return Task(prompt=prompt, answer=row.get("answer"), id=identity, metadata={**rest, **(metadata or {})})
    raise ConfigError(f'{place} is {type(row).__name__}; use Task or a dict with "prompt"')


def _check_prompt(prompt: Any, place: str) -> None:
    """An empty prompt is the environment's business; anything else must be messages."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        raise ConfigError(f'{place}: "prompt" is {type(prompt).__name__}; use a string or a list of messages')
    try:
        normalize(prompt, f'{place}: "prompt"')
    except RequestError as error:
        raise ConfigError(str(error)) from None
