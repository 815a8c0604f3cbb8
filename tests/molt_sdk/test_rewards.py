"""From what user code returns to one finite number, or to a reward_error that names the function; never to 0."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import molt_sdk as molt
from molt_sdk.engines.base import Engine
from molt_sdk.rendering.renderer import Renderer
from molt_sdk.rollout import Rollouts
from molt_sdk.testing import Script, ScriptedEngine
from molt_sdk.workers import WorkerPool

pytestmark = pytest.mark.anyio
TASKS = [{"prompt": "q", "answer": "a"}]


def echo(pocket: str) -> ScriptedEngine:
    return ScriptedEngine(pocket, lambda prompt, sampling: "a")


async def ask(task: molt.Task, model: molt.Model) -> None:
    await model.chat(task.prompt)


async def scored(pocket: str, rewards: Any, policy: Any = ask, **options: Any) -> molt.Trajectory:
    groups = await molt.arollout(policy, TASKS, engine=echo(pocket), rewards=rewards, **options)
    return groups[0].trajectories[0]


async def returned(pocket: str, value: Any) -> molt.Trajectory:
    async def policy(task: molt.Task, model: molt.Model) -> Any:
        return value

    groups = await molt.arollout(policy, TASKS, engine=echo(pocket))
    return groups[0].trajectories[0]


NUMBERS = [
    (True, 1.0),
    (False, 0.0),
    (3, 3.0),
    (-0.5, -0.5),
    (Decimal("0.1"), 0.1),
    (np.float32(0.5), 0.5),
    (np.float64(0.25), 0.25),
    (np.int64(2), 2.0),
    (np.bool_(True), 1.0),
    (np.array(1.5), 1.5),
    (np.array([2.0]), 2.0),
]
NO_NUMBERS = [
    (None, "None of type NoneType"),
    (float("nan"), "nan"),
    (float("inf"), "inf"),
    (float("-inf"), "-inf"),
    (Decimal("NaN"), "nan"),
    (Decimal("sNaN"), "not a float"),
    (np.float32("nan"), "nan"),
    ("1.0", "'1.0' of type str"),
    (np.str_("1"), "of type str_"),
    (b"1", "of type bytes"),
    ([1.0], "[1.0] of type list"),
    ((1.0,), "of type tuple"),
    (np.array([1.0, 2.0]), "of type ndarray"),
    (np.array([]), "of type ndarray"),
    (1j, "of type complex"),
    (np.complex64(1), "of type complex64"),
    (10**400, "not a float"),
    (Fraction(1, 2), "of type Fraction"),
    (object(), "of type object"),
]


@pytest.mark.parametrize(("value", "number"), NUMBERS, ids=repr)
async def test_numbers_become_floats(pocket: str, value: Any, number: float) -> None:
    """F152."""

    def part(task: molt.Task, trajectory: molt.Trajectory) -> Any:
        return value

    from_policy, from_function = await returned(pocket, value), await scored(pocket, [part])
    assert (from_policy.reward, from_policy.status) == (number, "ok")
    assert (from_function.reward, from_function.rewards) == (number, {"part": number})
    assert type(from_policy.reward) is type(from_function.reward) is float


@pytest.mark.parametrize(("value", "words"), NO_NUMBERS, ids=repr)
async def test_everything_else_is_a_reward_error_and_never_zero(pocket: str, value: Any, words: str) -> None:
    """F151, F152, F158."""

    def part(task: molt.Task, trajectory: molt.Trajectory) -> Any:
        return value

    trajectory = await scored(pocket, [part])
    assert (trajectory.status, trajectory.reward, trajectory.rewards) == ("reward_error", None, {})
    assert "RewardError: reward part gave" in str(trajectory.error)
    assert words in str(trajectory.error)
    assert len(trajectory.turns) == 1  # what was sampled is kept
    if value is not None:  # without training a policy need not return a reward
        from_policy = await returned(pocket, value)
        assert (from_policy.status, from_policy.reward) == ("reward_error", None)
        assert "RewardError: policy policy gave" in str(from_policy.error)


async def test_what_a_reward_raises_is_a_reward_error_with_its_traceback(pocket: str) -> None:
    def strict(task: molt.Task, trajectory: molt.Trajectory) -> float:
        raise KeyError("answer")

    async def exits(task: molt.Task, trajectory: molt.Trajectory) -> float:
        raise SystemExit(1)

    async def cancels(task: molt.Task, trajectory: molt.Trajectory) -> float:
        raise asyncio.CancelledError

    for reward, words in (
        (strict, "KeyError: 'answer'"),
        (exits, "SystemExit"),
        (cancels, "cancels let a CancelledError"),
    ):
        trajectory = await scored(pocket, [reward])
        assert (trajectory.status, trajectory.reward) == ("reward_error", None)
        assert words in str(trajectory.error)
        assert f"in {reward.__name__}" in str(trajectory.error)


async def test_a_judge_whose_engine_fails_is_the_infrastructures_fault(pocket: str) -> None:
    async def judged(task: molt.Task, trajectory: molt.Trajectory) -> float:
        raise molt.EngineError("judge is down")

    assert (await scored(pocket, [judged])).status == "infra_error"


# --- parts, weights, metrics ------------------------------------------------------------------------------------------


async def test_the_reward_is_the_weighted_sum_of_its_parts(pocket: str) -> None:
    @molt.reward(weight=0.25)
    def right(task: molt.Task, trajectory: molt.Trajectory) -> bool:
        return trajectory.text == task.answer

    @molt.reward(weight=-2, name="length")
    async def long(task: molt.Task, trajectory: molt.Trajectory) -> int:
        return len(trajectory.text)

    @molt.reward(weight=0)
    def watched(task: molt.Task, trajectory: molt.Trajectory) -> int:
        return 100

    def plain(task: molt.Task, trajectory: molt.Trajectory) -> float:
        return 0.5

    trajectory = await scored(pocket, [right, long, watched, plain])
    assert trajectory.rewards == {"right": 1.0, "length": 1.0, "watched": 100.0, "plain": 0.5}
    assert trajectory.reward == 0.25 * 1 - 2 * 1 + 0 * 100 + 0.5


async def test_one_function_may_return_several_named_parts(pocket: str) -> None:
    @molt.reward(weight=0.5)
    def rubric(task: molt.Task, trajectory: molt.Trajectory) -> dict[str, Any]:
        return {"style": 1, "facts": np.float32(0.5)}

    trajectory = await scored(pocket, rubric)  # one reward needs no list
    assert trajectory.rewards == {"style": 1.0, "facts": 0.5}
    assert trajectory.reward == 0.75


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "reward rubric gave an empty mapping"),
        ({"style": None}, "reward rubric['style'] gave None"),
        ({"plain": 1}, "reward rubric: there is already a part named 'plain'"),
    ],
)
async def test_a_mapping_that_cannot_be_parts_is_named(pocket: str, value: Any, words: str) -> None:
    def plain(task: molt.Task, trajectory: molt.Trajectory) -> float:
        return 0.5

    def rubric(task: molt.Task, trajectory: molt.Trajectory) -> Any:
        return value

    trajectory = await scored(pocket, [plain, rubric])
    assert (trajectory.status, trajectory.reward, trajectory.rewards) == ("reward_error", None, {})
    assert words in str(trajectory.error)


async def test_a_sum_that_is_not_finite_is_a_reward_error(pocket: str) -> None:
    @molt.reward(weight=1e300)
    def huge(task: molt.Task, trajectory: molt.Trajectory) -> float:
        return 1e300

    trajectory = await scored(pocket, [huge])
    assert (trajectory.status, trajectory.reward) == ("reward_error", None)


async def test_rewards_see_the_finished_trajectory(pocket: str) -> None:
    seen: list[molt.Trajectory] = []

    def look(task: molt.Task, trajectory: molt.Trajectory) -> float:
        seen.append(trajectory)
        return 1.0

    trajectory = await scored(pocket, [look])
    assert (seen[0].text, seen[0].status, seen[0].reward, seen[0].id) == ("a", "ok", None, trajectory.id)


async def test_a_sync_function_may_return_a_coroutine(pocket: str) -> None:
    class Judge:
        async def __call__(self, task: molt.Task, trajectory: molt.Trajectory) -> float:
            return 0.5

    async def later(task: molt.Task, trajectory: molt.Trajectory) -> float:
        return 0.25

    trajectory = await scored(pocket, [Judge(), lambda task, trajectory: later(task, trajectory)])
    assert trajectory.rewards == {"reward": 0.5, "<lambda>": 0.25}


# --- who says it ------------------------------------------------------------------------------------------------------


async def test_with_other_rewards_the_returned_value_is_the_output(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> dict[str, int]:
        return {"answer": 42}

    def correct(task: molt.Task, trajectory: molt.Trajectory) -> bool:
        return bool(trajectory.output["answer"] == 42)

    trajectory = await scored(pocket, [correct], policy)
    assert (trajectory.output, trajectory.reward) == ({"answer": 42}, 1.0)
    assert (await returned(pocket, 0.5)).output is None  # there it was the reward


async def test_model_reward_stands_for_a_returned_number(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        model.reward(0.25)
        model.reward(np.float32(0.75))  # the last one counts

    groups = await molt.arollout(policy, TASKS, engine=echo(pocket))
    assert groups[0].rewards == [0.75]


@pytest.mark.parametrize("with_function", [False, True])
async def test_two_sources_of_one_reward_are_a_conflict(pocket: str, with_function: bool) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> float:
        model.reward(0.25)
        return 1.0

    def correct(task: molt.Task, trajectory: molt.Trajectory) -> float:
        return 1.0

    trajectory = await scored(pocket, [correct] if with_function else [], policy)
    assert (trajectory.status, trajectory.reward) == ("reward_error", None)
    expected = (
        "called model.reward although rewards are defined (correct)" if with_function else "both returned 1.0 and"
    )
    assert f"policy policy {expected}" in str(trajectory.error)


async def test_without_a_reward_source_a_rollout_is_simply_not_scored(pocket: str) -> None:
    groups = await molt.arollout(ask, TASKS, engine=echo(pocket))
    trajectory = groups[0].trajectories[0]
    assert (trajectory.status, trajectory.reward, trajectory.scored) == ("ok", None, False)


def training(engine: ScriptedEngine, policy: Any, **sampling: Any) -> Rollouts:
    """Rollouts as ``fit`` runs them."""
    from molt_sdk.agent import resolve_agent

    agent = resolve_agent(policy, TASKS, tasks=None, rewards=(), tools=(), split="train", seed=0, need_reward=True)
    assert isinstance(engine, Engine)
    return Rollouts(
        agent,
        engine,
        Renderer(engine.model),
        WorkerPool(2),
        sampling=molt.SamplingParams(**sampling),
        config=molt.RolloutConfig(),
        seed=0,
        training=True,
        split="train",
    )


@pytest.mark.parametrize("cut", [False, True])
async def test_in_training_a_missing_return_is_an_error(pocket: str, cut: bool) -> None:
    """Also where the last reply was cut: nobody else gives that trajectory a reward."""

    async def forgot(task: molt.Task, model: molt.Model):  # type: ignore[no-untyped-def]
        await model.chat("q")

    engine = ScriptedEngine(pocket, [Script(text="a", finish_reason="length" if cut else "stop")])
    trajectory = await training(engine, forgot).trajectory(molt.Task("q"))
    assert trajectory.status == "reward_error"
    assert "policy forgot gave None" in str(trajectory.error)
    assert "did it miss a return statement?" in str(trajectory.error)


async def test_in_training_greedy_sampling_is_the_agents_error(pocket: str) -> None:
    async def greedy(task: molt.Task, model: molt.Model) -> float:
        await model.chat("q", temperature=0)
        return 1.0

    engine = echo(pocket)
    trajectory = await training(engine, greedy).trajectory(molt.Task("q"))
    assert (trajectory.status, trajectory.reward, engine.requests) == ("agent_error", None, [])
    assert "temperature=0 cannot be trained on" in str(trajectory.error)


# --- groups -----------------------------------------------------------------------------------------------------------


def ranking(value: Callable[[list[molt.Trajectory]], Any]) -> Any:
    @molt.reward(weight=0.5, group=True)
    def rank(task: molt.Task, group: list[molt.Trajectory]) -> Any:
        return value(group)

    return rank


async def grouped(pocket: str, *rewards: Any) -> molt.TrajectoryGroup:
    engine = ScriptedEngine(pocket, ["a", "bb", "ccc"])
    groups = await molt.arollout(ask, TASKS, engine=engine, rewards=rewards, group_size=3, max_concurrent=1)
    return groups[0]


def length(task: molt.Task, trajectory: molt.Trajectory) -> int:
    return len(trajectory.text)


@pytest.mark.parametrize("make", [list, tuple, np.array])
async def test_a_group_reward_compares_siblings(pocket: str, make: Any) -> None:
    group = await grouped(pocket, length, ranking(lambda group: make([len(t.text) - 2 for t in group])))
    assert group.rewards == [1 - 0.5, 2, 3 + 0.5]
    assert [t.rewards for t in group] == [{"length": n, "rank": n - 2} for n in (1.0, 2.0, 3.0)]


async def test_a_group_reward_may_be_async_and_the_only_one(pocket: str) -> None:
    @molt.reward(group=True)
    async def rank(task: molt.Task, group: list[molt.Trajectory]) -> list[float]:
        return [t.text == task.answer for t in group]

    assert (await grouped(pocket, rank)).rewards == [1.0, 0.0, 0.0]


async def test_a_group_reward_sees_the_scored_siblings_alone(pocket: str) -> None:
    def picky(task: molt.Task, trajectory: molt.Trajectory) -> float:
        if trajectory.text == "bb":
            raise ValueError("no")
        return 0.0

    group = await grouped(pocket, picky, ranking(lambda group: [len(t.text) for t in group]))
    assert group.rewards == [0.5, None, 1.5]
    assert [t.status for t in group] == ["ok", "reward_error", "ok"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda group: [1.0], "group reward rank gave [1.0]; expected 3 numbers"),
        (lambda group: 1.0, "expected 3 numbers"),
        (lambda group: "abc", "expected 3 numbers"),
        (lambda group: None, "expected 3 numbers"),
        (lambda group: [1.0, None, 1.0], "group reward rank[1] gave None"),
        (lambda group: {}["x"], "KeyError"),
    ],
)
async def test_a_group_reward_that_fails_leaves_no_half_a_reward(pocket: str, value: Any, words: str) -> None:
    group = await grouped(pocket, length, ranking(value))
    assert group.rewards == [None] * 3
    assert [t.status for t in group] == ["reward_error"] * 3
    assert all(words in str(t.error) for t in group)


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["async", "sync", "group"])
async def test_a_reward_has_its_own_timeout(pocket: str, kind: str) -> None:
    hang = threading.Event()

    @molt.reward(timeout=0.05)
    async def slow(task: molt.Task, trajectory: molt.Trajectory) -> float:
        await asyncio.Event().wait()
        return 1.0

    @molt.reward(timeout=0.05, name="slow")
    def slow_sync(task: molt.Task, trajectory: molt.Trajectory) -> float:
        hang.wait()
        return 1.0

    @molt.reward(timeout=0.05, name="slow", group=True)
    async def slow_group(task: molt.Task, group: Any) -> list[float]:
        await asyncio.Event().wait()
        return [1.0]

    try:
        trajectory = await scored(pocket, [{"async": slow, "sync": slow_sync, "group": slow_group}[kind]])
    finally:
        hang.set()
    assert (trajectory.status, trajectory.reward) == ("reward_error", None)
    assert "reward slow took longer than its timeout of 0.05 s" in str(trajectory.error)


async def test_tasks_are_not_shared_between_rewards_and_siblings(pocket: str) -> None:
    """What one trajectory's policy or reward does to the task no other one sees."""
    seen: list[Any] = []

    async def policy(task: molt.Task, model: molt.Model) -> None:
        seen.append((len(task.prompt), *task.metadata["notes"]))
        history: Any = task.prompt
        history.append((await model.chat(history)).message)
        task.metadata["notes"].append("mine")

    def reward(task: molt.Task, trajectory: molt.Trajectory) -> float:
        seen.append((len(task.prompt), *task.metadata["notes"]))
        task.metadata["notes"].append("reward")
        return 1.0

    row = {"prompt": [{"role": "user", "content": "q"}], "notes": ["given"]}
    groups = await molt.arollout(policy, [row] * 2, engine=echo(pocket), rewards=[reward], group_size=2)
    assert groups[0].rewards == [1.0, 1.0]
    assert seen == [(1, "given")] * 8
    assert {t.task.id for group in groups for t in group} == {groups[0].task.id}
    assert [t.task for t in groups[0]] == [groups[0].task] * 2
    assert row == {"prompt": [{"role": "user", "content": "q"}], "notes": ["given"]}
