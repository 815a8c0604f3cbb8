"""Decorators mark and never wrap; what cannot work is refused where it is written, by name."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import pytest

import molt_sdk as molt
from molt_sdk.decorators import mark_of

TASKS = [{"prompt": "q"}]


async def two(task: molt.Task, model: molt.Model) -> float:
    return 1.0


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def correct(task: molt.Task, trajectory: molt.Trajectory) -> float:
    return 1.0


class Bare:
    def __init__(self, task: molt.Task) -> None:
        self.task = task


# --- marking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "decorate",
    [molt.policy, molt.policy(), molt.policy(name="other")],
    ids=["bare", "called", "named"],
)
def test_a_decorated_policy_is_the_same_coroutine_function(decorate: Any) -> None:
    async def fresh(task: molt.Task, model: molt.Model) -> float:
        return 1.0

    assert decorate(fresh) is fresh
    assert inspect.iscoroutinefunction(fresh)
    assert fresh.__name__ == "fresh"


@pytest.mark.parametrize(
    "decorate", [molt.tool, molt.tool(timeout=1.0, parallel=True), molt.reward, molt.reward(weight=0.5, name="x")]
)
def test_decorated_functions_are_the_same_objects_and_can_be_called(decorate: Any) -> None:
    def fresh(a: int, b: int) -> int:
        """Add."""
        return a + b

    assert decorate(fresh) is fresh
    assert fresh(1, 2) == 3


def test_a_decorated_class_is_the_same_class() -> None:
    class Plain:
        def __init__(self, task: molt.Task) -> None:
            self.task = task

        def method(self) -> str:
            return "mine"

    assert molt.environment(Plain) is Plain
    assert molt.environment(max_turns=3)(Plain) is Plain
    made = Plain(molt.Task("q"))
    assert isinstance(made, Plain)
    assert made.method() == "mine"


def test_static_methods_are_marked_on_either_side() -> None:
    class Env:
        @molt.tool
        @staticmethod
        def outer(a: int) -> int:
            """Outer."""
            return a

        @staticmethod
        @molt.tool
        def inner(a: int) -> int:
            """Inner."""
            return a

    assert Env.outer(1) == Env.inner(1) == 1
    assert mark_of(Env.outer) is not None
    assert mark_of(Env.inner) is not None


def test_a_marked_environment_can_be_used_without_the_sdk() -> None:
    @molt.environment
    class Counter:
        def __init__(self, task: molt.Task) -> None:
            self.count = 0

        @molt.tool
        def up(self, by: int) -> int:
            """Count up."""
            self.count += by
            return self.count

    counter = Counter(molt.Task("q"))
    assert [counter.up(2), counter.up(3)] == [2, 5]


# --- refused definitions, each with the name of what is wrong ---------------------------------------------------------


def not_async(task: Any, model: Any) -> float:
    return 1.0


async def one_parameter(task: Any) -> float:
    return 1.0


async def three_parameters(task: Any, model: Any, extra: Any) -> float:
    return 1.0


async def default_parameter(task: Any, model: Any, extra: int = 1) -> float:
    return 1.0


async def keyword_only(task: Any, model: Any, *, extra: Any) -> float:
    return 1.0


async def generator(task: Any, model: Any) -> Any:
    yield 1.0


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (not_async, ["not_async", "not async", "async def not_async(task, model)"]),
        (lambda task, model: 1.0, ["lambda", "async def"]),
        (generator, ["generator", "async generator", "return"]),
        (one_parameter, ["one_parameter", "(task)", "exactly two"]),
        (three_parameters, ["three_parameters", "(task, model, extra)", "exactly two"]),
        (default_parameter, ["default_parameter", "exactly two"]),
        (keyword_only, ["keyword_only", "exactly two"]),
    ],
)
def test_a_policy_that_cannot_work_is_refused_by_name(fn: Any, words: list[str]) -> None:
    with pytest.raises(molt.DefinitionError) as marked:
        molt.policy(fn)
    with pytest.raises(molt.DefinitionError) as unmarked:
        molt.rollout(fn, TASKS)
    for error in (marked, unmarked):
        assert [word for word in words if word not in str(error.value)] == []
        assert "test_decorators.py" in str(error.value)


def test_a_partial_and_a_bound_method_are_policies_too() -> None:
    class Agent:
        async def act(self, task: Any, model: Any) -> float:
            return 1.0

    async def three(extra: int, task: Any, model: Any) -> float:
        return 1.0

    for fn in (Agent().act, functools.partial(three, 1)):
        with pytest.raises(molt.ConfigError, match="model is missing"):  # the definition was accepted
            molt.rollout(fn, TASKS)


def test_what_cannot_carry_a_mark_is_a_definition_error() -> None:
    class Agent:
        async def act(self, task: Any, model: Any) -> float:
            return 1.0

    with pytest.raises(molt.DefinitionError, match=r"Agent\.act.*cannot carry a mark"):
        molt.policy(Agent().act)


def untyped(a, b):  # type: ignore[no-untyped-def]
    """Add."""
    return a + b


def undocumented(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([untyped], ["untyped", "a"]),
        ([undocumented], ["undocumented", "docstring"]),
        ([lambda a: a], ["lambda"]),
        ([add, add], ["two tools are named 'add'"]),
        ([3], ["3"]),
    ],
)
def test_tools_that_cannot_work_are_refused_before_anything_is_loaded(tools: list[Any], words: list[str]) -> None:
    with pytest.raises(molt.DefinitionError) as error:
        molt.rollout(tasks=TASKS, tools=tools, model="/does/not/exist")
    assert [word for word in words if word not in str(error.value)] == []


def test_an_unmarked_class_is_refused_by_name() -> None:
    with pytest.raises(molt.DefinitionError, match=r"class Bare is not an environment.*@molt\.environment"):
        molt.rollout(two, Bare)


@pytest.mark.parametrize("kind", ["positional", "keyword"])
def test_an_environment_is_made_with_the_task_alone(kind: str) -> None:
    @molt.environment
    class Positional(Bare):
        def __init__(self, task: molt.Task, size: int) -> None:
            super().__init__(task)

    @molt.environment
    class Keyword(Bare):
        def __init__(self, task: molt.Task, *, size: int) -> None:
            super().__init__(task)

    environment = {"positional": Positional, "keyword": Keyword}[kind]
    with pytest.raises(molt.DefinitionError, match=rf"{environment.__name__}.__init__ takes \(task, size\)"):
        molt.rollout(two, environment, tasks=TASKS)


def test_environment_is_for_classes() -> None:
    with pytest.raises(molt.DefinitionError, match=r"two.*@policy"):
        molt.environment(two)


def test_a_group_reward_must_be_static() -> None:
    @molt.environment
    class Env(Bare):
        @molt.reward(group=True)
        def ranked(self, group: Any) -> list[float]:
            return []

    with pytest.raises(molt.DefinitionError, match=r"ranked.*@staticmethod \(task, group\)"):
        molt.rollout(two, Env, tasks=TASKS)


def test_a_static_reward_that_is_not_for_groups_is_refused() -> None:
    @molt.environment
    class Env(Bare):
        @molt.reward
        @staticmethod
        def lonely(task: Any, trajectory: Any) -> float:
            return 1.0

    with pytest.raises(molt.DefinitionError, match=r"lonely.*method \(self, trajectory\)"):
        molt.rollout(two, Env, tasks=TASKS)


@pytest.mark.parametrize(
    ("fn", "takes"),
    [
        (lambda task: 1.0, "(task)"),
        (lambda task, trajectory, more: 1.0, "(task, trajectory, more)"),
        (lambda task, *, trajectory: 1.0, "(task, trajectory)"),
    ],
)
def test_a_reward_function_takes_task_and_trajectory(fn: Any, takes: str) -> None:
    with pytest.raises(molt.DefinitionError) as error:
        molt.rollout(two, TASKS, rewards=[fn])
    assert f"takes {takes}; it must take (task, trajectory)" in str(error.value)


def test_a_reward_method_takes_the_trajectory() -> None:
    @molt.environment
    class Env(Bare):
        @molt.reward
        def blind(self) -> float:
            return 1.0

    with pytest.raises(molt.DefinitionError, match=r"blind.*takes \(self\); it must take \(self, trajectory\)"):
        molt.rollout(two, Env, tasks=TASKS)


def test_two_rewards_of_one_name_are_refused() -> None:
    @molt.environment
    class Env(Bare):
        @molt.reward(name="correct")
        def mine(self, trajectory: Any) -> float:
            return 1.0

    with pytest.raises(molt.DefinitionError, match="two rewards are named 'correct'"):
        molt.rollout(two, Env, tasks=TASKS, rewards=[correct])


def test_an_override_without_the_decorator_does_not_lose_a_reward_silently() -> None:
    @molt.environment
    class Base(Bare):
        @molt.reward
        def score(self, trajectory: Any) -> float:
            return 1.0

    @molt.environment
    class Forgot(Base):
        def score(self, trajectory: Any) -> float:
            return 0.5

    @molt.environment
    class Dropped(Base):
        score = None  # type: ignore[assignment]

    with pytest.raises(molt.DefinitionError, match=r"Forgot\.score.*overrides the reward.*Base\.score.*score = None"):
        molt.rollout(two, Forgot, tasks=TASKS)
    with pytest.raises(molt.ConfigError, match="model is missing"):  # dropping it on purpose is fine
        molt.rollout(two, Dropped, tasks=TASKS)


@pytest.mark.parametrize("weight", [True, "1", float("nan"), float("inf"), None])
def test_a_weight_is_a_finite_number(weight: Any) -> None:
    with pytest.raises(molt.DefinitionError, match=f"correct.*weight={re.escape(repr(weight))}"):
        molt.reward(weight=weight)(correct)


@pytest.mark.parametrize("decorate", [molt.tool, molt.reward])
@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_timeout_is_a_positive_number_of_seconds(decorate: Any, timeout: float) -> None:
    with pytest.raises(molt.DefinitionError, match=r"add.*timeout="):
        decorate(timeout=timeout)(add)


def test_max_turns_of_an_environment_is_positive() -> None:
    with pytest.raises(molt.DefinitionError, match="Bare: max_turns=0"):
        molt.environment(max_turns=0)(Bare)
