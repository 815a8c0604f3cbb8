"""What a user hands over is checked and put into one shape before anything is loaded; tasks come from anywhere."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import molt_sdk as molt
from molt_sdk.agent import resolve_agent
from molt_sdk.tasks import TaskSource
from molt_sdk.testing import ScriptedEngine

pytestmark = pytest.mark.anyio
ROWS = [{"prompt": str(i)} for i in range(6)]


async def solve(task: molt.Task, model: molt.Model) -> float:
    return 1.0


async def prompts_of(source: TaskSource, count: int) -> list[tuple[int, int, str]]:
    """The first (position, epoch, prompt) of the stream."""
    taken = []
    stream = source.stream()
    async for position, epoch, task in stream:
        taken.append((position, epoch, str(task.prompt)))
        if len(taken) == count:
            break
    await stream.aclose()  # type: ignore[attr-defined]
    return taken


def source(rows: Any, *, seed: int = 0) -> TaskSource:
    return TaskSource(rows, split="train", seed=seed, place="tasks")


# --- streams ----------------------------------------------------------------------------------------------------------


async def test_a_list_is_shuffled_anew_and_the_same_way_each_epoch() -> None:
    first = await prompts_of(source(ROWS), 18)
    assert await prompts_of(source(ROWS), 18) == first
    assert await prompts_of(source(ROWS, seed=1), 18) != first
    assert [position for position, _, _ in first] == list(range(18))
    epochs = [[prompt for _, epoch, prompt in first if epoch == number] for number in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [[str(i) for i in range(6)]] * 3
    assert epochs[0] != epochs[1] != epochs[2]


async def test_shuffling_leaves_the_users_list_alone() -> None:
    rows = list(ROWS)
    await prompts_of(source(rows), 12)
    assert rows == ROWS


async def test_tasks_of_an_environment_are_asked_for_the_next_seed_when_they_end() -> None:
    asked: list[tuple[str, int]] = []

    def tasks(split: str, seed: int) -> Iterator[dict[str, Any]]:
        asked.append((split, seed))
        for i in range(2):
            yield {"prompt": f"{seed}.{i}"}

    assert await prompts_of(source(tasks, seed=5), 5) == [
        (0, 0, "5.0"),
        (1, 0, "5.1"),
        (2, 1, "6.0"),
        (3, 1, "6.1"),
        (4, 2, "7.0"),
    ]
    assert asked == [("train", 5), ("train", 6), ("train", 7)]


async def test_tasks_may_be_async_endless_or_take_less() -> None:
    async def endless(seed: int) -> AsyncIterator[molt.Task]:
        while True:
            seed += 1
            yield molt.Task(str(seed))

    async def fetched() -> list[Any]:
        return [{"prompt": "a"}]

    def anything(**options: Any) -> list[Any]:
        return [{"prompt": str(sorted(options))}]

    assert await prompts_of(source(endless), 3) == [(0, 0, "1"), (1, 0, "2"), (2, 0, "3")]
    assert await prompts_of(source(fetched), 2) == [(0, 0, "a"), (1, 1, "a")]
    assert await prompts_of(source(anything), 1) == [(0, 0, "['seed', 'split']")]


async def test_a_one_shot_iterator_ends_the_stream() -> None:
    once = source(iter(ROWS))
    assert not once.restartable
    assert [prompt for _, _, prompt in await prompts_of(once, 100)] == [str(i) for i in range(6)]

    async def rows() -> AsyncIterator[Any]:
        for row in ROWS:
            yield row

    assert len(await prompts_of(source(rows()), 100)) == 6
    assert source(rows).restartable


async def test_an_epoch_without_tasks_is_an_error_not_an_endless_loop() -> None:
    def runs_dry(seed: int) -> list[Any]:
        return [{"prompt": "a"}] if seed == 0 else []

    with pytest.raises(molt.ConfigError, match=r"tasks gave no task in epoch 1 \(split 'train'\)"):
        await prompts_of(source(runs_dry), 5)


async def test_once_takes_tasks_in_their_own_order() -> None:
    assert [task.prompt for task in await source(ROWS).once(3)] == ["0", "1", "2"]
    assert len(await source(ROWS).once(None)) == 6
    assert len(await source(ROWS).once(100)) == 6


# --- rows -------------------------------------------------------------------------------------------------------------


async def test_other_keys_of_a_row_become_metadata() -> None:
    row = {"prompt": "q", "answer": 4, "id": 7, "level": 2, "metadata": {"from": "here"}}
    (task,) = await source([row]).once(None)
    assert task == molt.Task("q", 4, "7", {"level": 2, "from": "here"})


@pytest.mark.parametrize("row", [{"prompt": "q"}, {"prompt": "q", "id": None, "metadata": None, "answer": None}])
async def test_missing_and_null_fields_are_the_same(row: Any) -> None:
    (task,) = await source([row]).once(None)
    assert task == molt.Task("q")
    assert len(task.id) == 12


def test_ids_depend_on_the_content_alone() -> None:
    """Equal content gives equal ids in every process: no order of a set, no address of an object, no error."""

    class Thing:
        pass

    first, second = (
        molt.Task("q", {"b", "a", "c"}, metadata={"x": Thing(), 1: (2, 3), "lone": "\ud800", "big": 10**40})
        for _ in range(2)
    )
    assert first.id == second.id
    others = [molt.Task("q"), molt.Task("q", 1), molt.Task("q", "1"), molt.Task("q", metadata={"a": 1}), molt.Task("Q")]
    assert len({task.id for task in (first, *others)}) == 6


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "tasks is empty"),
        ((), "tasks is empty"),
        ([{"prompt": "q"}, {"question": "q"}], r'tasks\[1\]: the row has no "prompt" \(keys: question\)'),
        ([{"prompt": 3}], r'tasks\[0\]: "prompt" is int'),
        ([{"prompt": "q", "metadata": "x"}], r'tasks\[0\]: "metadata" is str'),
        (["q"], r"tasks\[0\] is str"),
        ("q", "got str"),
        ({"prompt": "q"}, "got dict"),
        (3, "got int"),
    ],
)
@pytest.mark.parametrize("second", [False, True])
async def test_bad_tasks_are_refused_before_anything_is_loaded(rows: Any, words: str, second: bool) -> None:
    """F154, F155: each row is named."""
    what, options = ((solve, rows), {}) if second else ((solve,), {"tasks": rows})
    with pytest.raises(molt.ConfigError, match=words):
        await molt.arollout(*what, model="/does/not/exist", **options)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (lambda: (), r"<lambda>\(\) is empty \(split 'train'\)"),
        (lambda: iter([{"prompt": "q"}, {"x": 1}]), r'<lambda>\(\) row 1: the row has no "prompt"'),
        (lambda: None, r"<lambda>\(\) gave NoneType"),
        (iter(()), "tasks is empty"),
    ],
)
async def test_bad_streams_are_refused_before_the_engine_starts(pocket: str, rows: Any, words: str) -> None:
    class Refuses(ScriptedEngine):
        async def start(self) -> None:
            raise AssertionError("started")

    with pytest.raises(molt.ConfigError, match=words):
        await molt.arollout(solve, tasks=rows, engine=Refuses(pocket, []))


# --- what goes together -----------------------------------------------------------------------------------------------


@molt.environment
class Env:
    @staticmethod
    def tasks(split: str, seed: int) -> list[dict[str, Any]]:
        return [{"prompt": f"{split} {seed}"}]


def score(task: molt.Task, trajectory: molt.Trajectory) -> float:
    return 1.0


def add(a: int) -> int:
    """Add."""
    return a


@pytest.mark.parametrize(
    ("what", "options", "words"),
    [
        ((), {}, "there are no tasks"),
        ((solve,), {}, "there are no tasks"),
        ((solve, ROWS), {"tasks": ROWS}, "tasks were given twice"),
        ((Env, Env), {}, "two environments were given: Env and Env"),
        ((ROWS,), {}, "the first argument is list.*tasks="),
        ((Env,), {"tools": [add]}, r"tools=.*Env.*@molt\.tool"),
        ((solve, ROWS), {"tools": add}, r"belongs to the built-in loop.*model\.run"),
        ((solve, ROWS), {"model": None}, "model is missing"),
        ((solve, ROWS), {"engine": "trch", "model": "x"}, "engine='trch'.*did you mean 'torch'"),
        ((solve, ROWS), {"engine": object()}, "neither a name"),
    ],
)
async def test_what_does_not_go_together_is_refused(what: Any, options: Any, words: str) -> None:
    with pytest.raises(molt.ConfigError, match=words):
        await molt.arollout(*what, **options)


async def test_a_model_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(molt.ModelPathError, match="nowhere"):
        await molt.arollout(solve, ROWS, model=str(tmp_path / "nowhere"))


async def test_more_tokens_than_the_context_holds_are_refused(pocket: str) -> None:
    engine = ScriptedEngine(pocket, [])
    with pytest.raises(molt.ConfigError, match=r"sampling\.max_tokens=2048.*context of 2048"):
        await molt.arollout(solve, ROWS, engine=engine, sampling=molt.SamplingParams(max_tokens=2048))


def test_tasks_that_need_an_instance_are_refused() -> None:
    @molt.environment
    class Method:
        def tasks(self, split: str) -> list[Any]:
            return []

    @molt.environment
    class Extra:
        @staticmethod
        def tasks(split: str, difficulty: int) -> list[Any]:
            return []

    for environment, name in ((Method, "self"), (Extra, "difficulty")):
        with pytest.raises(
            molt.DefinitionError, match=rf"{environment.__name__}\.tasks.*takes '{name}'.*@staticmethod"
        ):
            molt.rollout(solve, environment)


def test_one_tool_or_reward_needs_no_brackets_and_none_is_nothing() -> None:
    def resolved(**options: Any) -> Any:
        arguments = {"rewards": (), "tools": (), **options}
        return resolve_agent(None, None, tasks=ROWS, split="train", seed=0, need_reward=False, **arguments)

    assert len(resolved(rewards=score, tools=add).rewards) == 1
    assert resolved(rewards=score, tools=add).tools == (add,)
    assert resolved(rewards=None, tools=None).rewards == ()


def test_training_needs_a_reward_source() -> None:
    async def silent(task: molt.Task, model: molt.Model) -> None: ...

    async def unannotated(task, model): ...  # type: ignore[no-untyped-def]

    def resolved(policy: Any, **options: Any) -> Any:
        arguments = {"rewards": (), "tools": (), **options}
        return resolve_agent(policy, ROWS, tasks=None, split="train", seed=0, need_reward=True, **arguments)

    with pytest.raises(molt.ConfigError, match=r"no reward source: policy .*silent.*annotated to return None"):
        resolved(silent)
    with pytest.raises(molt.ConfigError, match=r"no reward source: give rewards=\[fn\]"):
        resolve_agent(None, None, tasks=ROWS, rewards=(), tools=(), split="train", seed=0, need_reward=True)
    assert resolved(silent, rewards=[score]).rewards[0].name == "score"
    assert resolved(unannotated).rewards == resolved(solve).rewards == ()  # what they return is the reward


def test_rewards_of_an_environment_and_of_the_call_come_together() -> None:
    @molt.environment
    class Base:
        @molt.reward
        def first(self, trajectory: Any) -> float:
            return 1.0

        @molt.reward
        def second(self, trajectory: Any) -> float:
            return 1.0

    @molt.environment
    class Derived(Base):
        @molt.reward(weight=2)
        def first(self, trajectory: Any) -> float:
            return 1.0

    agent = resolve_agent(None, Derived, tasks=ROWS, rewards=[score], tools=(), split="train", seed=0, need_reward=True)
    assert [(spec.name, spec.weight) for spec in agent.rewards] == [("first", 2.0), ("second", 1.0), ("score", 1.0)]
    assert inspect.isfunction(agent.rewards[2].fn)
