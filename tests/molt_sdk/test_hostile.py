"""Mistakes and malice that must neither end a run, nor hang it, nor pass for something else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import molt_sdk as molt
from molt_sdk.config import RolloutConfig
from molt_sdk.testing import Script, ScriptedEngine
from molt_sdk.tools import result_text

ROWS = [{"prompt": f"question {i}"} for i in range(4)]
CALL = '<tool_call>{"name": "act", "arguments": {}}</tool_call>'


class Mute(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


def even(task: molt.Task, trajectory: molt.Trajectory) -> bool:
    return len(trajectory.text) % 2 == 0


@molt.policy
async def parity(task: molt.Task, model: molt.Model) -> float:
    return float(len((await model.chat(task.prompt)).text) % 2)


def by_seed(prompt: list[int], sampling: molt.SamplingParams) -> str:
    return "ab"[: 1 + (sampling.seed or 0) % 2]


def fit(model: str, run_dir: Path | None, policy: Any = parity, tasks: Any = ROWS, /, **changes: Any) -> molt.Run:
    arguments: dict[str, Any] = {
        "model": model,
        "engine": ScriptedEngine(model, by_seed),
        "steps": 2,
        "group_size": 4,
        "groups_per_step": 2,
        "max_staleness": 0,
        "run_dir": run_dir,
    }
    return molt.fit(policy, tasks, **arguments | changes)


# What user code raises and returns


def test_a_close_whose_error_has_no_text_is_an_env_error_like_any_other(pocket: str) -> None:
    @molt.environment
    class Closing:
        def close(self) -> None:
            raise Mute

    (group,) = molt.rollout(Closing, tasks=ROWS[:1], engine=ScriptedEngine(pocket, "hello"))
    assert [t.status for t in group] == ["env_error"]


def acting(error: Exception) -> type:
    @molt.environment
    class Acting:
        @molt.tool
        def act(self) -> str:
            """Act."""
            raise error

    return Acting


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("no file \udcff"), "Error: ValueError: no file \ufffd"),  # as os.fsdecode gives file names
        (Mute(), "Error: Mute: <Mute whose str() raises ValueError>"),
        (molt.Stop(Mute()), "<Mute whose str() raises ValueError>"),
    ],
)
def test_whatever_a_tool_raises_becomes_text_that_the_model_can_read(pocket: str, error: Exception, shown: str) -> None:
    engine = ScriptedEngine(pocket, [CALL, "done"])
    (group,) = molt.rollout(acting(error), tasks=ROWS[:1], engine=engine)
    (trajectory,) = group
    assert trajectory.status == "ok"
    assert [run.message["content"] for run in trajectory.tool_executions] == [shown]


def test_a_result_has_text_whatever_its_class_does() -> None:
    assert result_text(Mute()) == "<Mute whose str() raises ValueError>"


def test_a_forgotten_await_is_the_agents_error_and_no_reward(pocket: str) -> None:
    @molt.policy
    async def forgets(task: molt.Task, model: molt.Model) -> Any:
        return model.chat(task.prompt)

    (group,) = molt.rollout(forgets, ROWS[:1], rewards=[even], engine=ScriptedEngine(pocket, "hello"))
    (trajectory,) = group
    assert (trajectory.status, trajectory.reward) == ("agent_error", None)
    assert "write `await` before the call" in (trajectory.error or "")


@pytest.mark.parametrize(("reason", "shown"), [(5, "5"), (Mute(), "<Mute whose str() raises ValueError>")])
def test_the_reason_of_a_rejection_is_text(pocket: str, reason: Any, shown: str) -> None:
    @molt.policy
    async def rejects(task: molt.Task, model: molt.Model) -> float:
        raise molt.Reject(reason)

    (group,) = molt.rollout(rejects, ROWS[:1], engine=ScriptedEngine(pocket, []))
    assert [(t.status, t.error) for t in group] == [("rejected", shown)]


def test_an_environment_without_room_for_its_task_is_told_what_to_add(pocket: str) -> None:
    @molt.environment
    class Slotted:
        __slots__ = ("state",)

    (group,) = molt.rollout(Slotted, tasks=ROWS[:1], engine=ScriptedEngine(pocket, "hello"))
    (trajectory,) = group
    assert trajectory.status == "env_error"
    assert "no room for its task" in (trajectory.error or "")


# Numbers that leave the range


@molt.policy
async def pays_too_much(task: molt.Task, model: molt.Model) -> float:
    return 1.5e308 if len((await model.chat(task.prompt)).text) % 2 else 0.0


@molt.policy
async def credits_too_much(task: molt.Task, model: molt.Model) -> float:
    reply = await model.chat(task.prompt)
    if len(reply.text) % 2:
        reply.reward(1.7e308)  # with the policy's own reward, the sum would be infinite
    return 1.7e20


@pytest.mark.parametrize(("policy", "status"), [(pays_too_much, "reward_error"), (credits_too_much, "agent_error")])
def test_a_reward_beyond_the_range_costs_its_trajectory_and_not_the_run(
    pocket: str, tmp_path: Path, policy: Any, status: str
) -> None:
    run = fit(pocket, tmp_path / "run", policy)
    assert sorted(run.batches) == [1, 2]
    assert run.status[status] > 0
    assert run.status["ok"] > 0


@pytest.mark.parametrize("temperature", [1e-60, 1e300])
def test_a_temperature_that_float32_cannot_hold_is_refused_in_training(
    pocket: str, tmp_path: Path, temperature: float
) -> None:
    @molt.policy
    async def extreme(task: molt.Task, model: molt.Model) -> float:
        return float(len((await model.chat(task.prompt, temperature=temperature)).text) % 2)

    with pytest.raises(molt.RunFailedError, match=r"temperature=1e.* cannot be trained on"):
        fit(pocket, tmp_path / "run", extreme)
    with pytest.raises(molt.ConfigError, match=r"temperature=1e.* cannot be trained on"):
        fit(pocket, tmp_path / "other", sampling=molt.SamplingParams(temperature=temperature))


def test_a_sum_of_group_rewards_beyond_the_range_is_a_reward_error(pocket: str) -> None:
    @molt.reward(group=True, weight=1e25)
    def ranks(task: molt.Task, group: list[molt.Trajectory]) -> list[float]:
        return [1e10] * len(group)  # 1e25 x 1e10 = 1e35

    (group,) = molt.rollout(tasks=ROWS[:1], rewards=[even, ranks], engine=ScriptedEngine(pocket, "hello"))
    assert [(t.status, t.reward) for t in group] == [("reward_error", None)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_agent_error_reward_must_be_finite(value: float) -> None:
    with pytest.raises(molt.ConfigError, match="agent_error_reward"):
        RolloutConfig(agent_error_reward=value)


# Runs that get nowhere


def test_a_stream_that_ends_after_nothing_but_failures_is_a_failed_run(pocket: str, tmp_path: Path) -> None:
    @molt.policy
    async def breaks(task: molt.Task, model: molt.Model) -> float:
        raise ValueError("always")

    with pytest.raises(molt.RunFailedError, match=r"ended after 4 groups(?s:.)*ValueError: always"):
        fit(pocket, tmp_path / "run", breaks, iter(ROWS))


def test_an_engine_that_keeps_its_version_is_found_out(pocket: str, tmp_path: Path) -> None:
    class Stuck(ScriptedEngine):
        async def update_weights(self, weights: Any, version: int) -> None:
            """Takes nothing."""

    with pytest.raises(molt.EngineError, match="at version 0 after update_weights"):
        fit(pocket, tmp_path / "run", engine=Stuck(pocket, by_seed))


def test_a_background_task_that_never_gives_up_does_not_block_the_loop(pocket: str) -> None:
    import asyncio

    stubborn: list[asyncio.Task[None]] = []

    @molt.policy
    async def leaves_it_running(task: molt.Task, model: molt.Model) -> None:
        async def again_and_again() -> None:
            while True:
                with contextlib.suppress(molt.MoltError):
                    await model.complete("more")

        stubborn.append(asyncio.create_task(again_and_again()))
        await model.chat(task.prompt)

    engine = ScriptedEngine(pocket, lambda prompt, sampling: Script(text="a", delay=0.01))
    (group,) = molt.rollout(leaves_it_running, ROWS[:1], engine=engine)
    assert [t.status for t in group] == ["ok"]
    assert stubborn[0].cancelled()


# Places


def test_an_agent_may_change_the_working_directory(
    pocket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    @molt.policy
    async def wanders(task: molt.Task, model: molt.Model) -> float:
        os.chdir(elsewhere)
        return float(len((await model.chat(task.prompt)).text) % 2)

    run = fit(pocket, Path("run"), wanders)
    assert run.dir == tmp_path / "run"
    assert [c.step for c in run.checkpoints] == [2]


def test_two_runs_of_one_second_have_folders_of_their_own(
    pocket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20300101-000000")
    first, second = fit(pocket, None, steps=1), fit(pocket, None, steps=1)
    assert [r.dir.name for r in (first, second)] == ["20300101-000000-parity", "20300101-000000-parity-2"]


# What a user may write by mistake: named before anything is loaded


@molt.environment
class Calculator:
    @molt.tool
    def act(self) -> str:
        """Act."""
        return ""

    @molt.reward
    def good(self, trajectory: molt.Trajectory) -> float:
        return 1.0


class Half:
    def start(self, run: molt.Run) -> None:
        """Has no other method."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": "3"}, "steps='3' is not valid"),
        ({"steps": 2.5}, r"steps=2\.5 is not valid"),
        ({"steps": True}, "steps=True is not valid"),
        ({"group_size": 2.5}, r"group_size=2\.5 is not valid"),
        ({"learning_rate": "1e-5"}, "learning_rate='1e-5' is not valid"),
        ({"timeout": "5"}, "timeout='5' is not valid"),
        ({"seed": "a"}, "seed='a' is not valid"),
        ({"model": 5}, "model=5 is not valid"),
        ({"sampling": {"temperature": 1.0}}, r"sampling=.* is dict; write SamplingParams"),
        ({"config": {"steps": 2}}, r"config=.* is dict; give a FitConfig"),
        ({"trackers": object()}, "give a list of trackers"),
        ({"trackers": "wandb"}, "give a list of trackers"),
        ({"trackers": [Half()]}, "has no method log"),
        ({"run_dir": None, "resume": True}, "resume=True needs run_dir"),
    ],
)
def test_a_keyword_of_the_wrong_kind_is_named(
    pocket: str, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(molt.ConfigError, match=message):
        fit(pocket, changes.pop("run_dir", tmp_path / "run"), **changes)
    assert not list(tmp_path.iterdir())


untyped_fit: Any = molt.fit
untyped_rollout: Any = molt.rollout


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: untyped_fit(Calculator, parity), molt.ConfigError, "stands where tasks belong"),
        (lambda: untyped_fit(parity, parity), molt.ConfigError, "stands where tasks belong"),
        (lambda: untyped_fit(parity, Calculator()), molt.ConfigError, "pass the class"),
        (lambda: untyped_fit(tasks=ROWS, rewards=[even], tools=Calculator), molt.DefinitionError, "need an instance"),
        (lambda: untyped_fit(tasks=ROWS, rewards=[even], tools=[Calculator]), molt.DefinitionError, "need an instance"),
        (lambda: untyped_rollout(parity, ROWS, group_size="2"), molt.ConfigError, "group_size='2' is not valid"),
        (lambda: untyped_rollout(parity, ROWS, limit="2"), molt.ConfigError, "limit='2' is not valid"),
        (lambda: untyped_rollout(parity, ROWS, sampling={}), molt.ConfigError, "write SamplingParams"),
    ],
)
def test_things_in_the_wrong_place_are_named(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_model_may_be_given_as_a_path(pocket: str, tmp_path: Path) -> None:
    assert fit(pocket, tmp_path / "run", model=Path(pocket), steps=1).config["model"] == pocket
