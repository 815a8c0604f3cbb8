"""Running a policy: the four ways to write an agent, and how each kind of failure is recorded as what it is."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sqlite3
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from loguru import logger

import molt_sdk as molt
from molt_sdk.testing import Script, ScriptedEngine

pytestmark = pytest.mark.anyio
TASKS = [{"prompt": "q", "answer": "a"}]


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def constant(pocket: str, text: str = "a") -> ScriptedEngine:
    return ScriptedEngine(pocket, lambda prompt, sampling: text)


async def one(*what: Any, engine: ScriptedEngine, **options: Any) -> molt.Trajectory:
    groups = await molt.arollout(*what, engine=engine, **options)
    (trajectory,) = groups[0].trajectories
    return trajectory


# --- four ways --------------------------------------------------------------------------------------------------------


def correct(task: molt.Task, trajectory: molt.Trajectory) -> bool:
    return trajectory.text == task.answer


async def correct_async(task: molt.Task, trajectory: molt.Trajectory) -> bool:
    await asyncio.sleep(0)
    return trajectory.text == task.answer


def calculator(expression: str) -> str:
    """Evaluate an expression such as "1 + 1"."""
    return str(sum(int(term) for term in expression.split("+")))


async def calculator_async(expression: str) -> str:
    """Evaluate an expression such as "1 + 1"."""
    await asyncio.sleep(0)
    return calculator(expression)


@pytest.mark.parametrize("reward", [correct, correct_async])
async def test_rows_and_a_reward_function(pocket: str, reward: Any) -> None:
    trajectory = await one(tasks=TASKS, rewards=[reward], engine=constant(pocket))
    assert (trajectory.reward, trajectory.policy, trajectory.environment) == (1.0, "built_in_loop", "")
    assert trajectory.rewards == {reward.__name__: 1.0}


@pytest.mark.parametrize("tool", [calculator, calculator_async])
async def test_rows_a_reward_function_and_tools(pocket: str, tool: Any) -> None:
    marked = molt.tool(name="calculator")(tool)
    engine = ScriptedEngine(pocket, [call("calculator", '{"expression": "20 + 22"}'), "42"])
    rows = [{"prompt": "20 + 22?", "answer": "42"}]
    trajectory = await one(tasks=rows, rewards=[correct], tools=[marked], engine=engine)
    assert trajectory.reward == 1.0
    assert [e.message["content"] for e in trajectory.tool_executions] == ["42"]


async def test_a_policy_that_returns_its_reward(pocket: str) -> None:
    @molt.policy(name="solver")
    async def solve(task: molt.Task, model: molt.Model) -> float:
        reply = await model.chat([{"role": "user", "content": task.prompt}])
        return float(reply.text == task.answer)

    trajectory = await one(solve, TASKS, engine=constant(pocket))
    assert (trajectory.reward, trajectory.policy, trajectory.status) == (1.0, "solver", "ok")


@molt.environment
class Ledger:
    """State in sqlite3, which insists on one thread for all of its life; everything here is sync."""

    closed: list[str] = []  # noqa: RUF012

    def __init__(self, task: molt.Task) -> None:
        self.task = task
        self.db = sqlite3.connect(":memory:")

    def setup(self) -> None:
        self.db.execute("create table entries (amount)")

    def close(self) -> None:
        (count,) = self.db.execute("select count(*) from entries").fetchone()
        self.db.close()
        self.closed.append(f"{self.task.prompt} {count}")

    @staticmethod
    def tasks(split: str = "train", seed: int = 0) -> list[dict[str, Any]]:
        return [{"prompt": f"{split}{i}", "answer": 3} for i in range(4)]

    @molt.tool
    def book(self, amount: int) -> str:
        """Book an amount."""
        self.db.execute("insert into entries values (?)", (amount,))
        return "booked"

    @molt.reward
    def total(self, trajectory: molt.Trajectory) -> float:
        (total,) = self.db.execute("select sum(amount) from entries").fetchone()
        return float(total == self.task.answer)


@molt.environment
class AsyncLedger:
    """The same with async methods and the environment's task set by the SDK."""

    task: molt.Task
    closed: list[str] = []  # noqa: RUF012

    async def setup(self) -> None:
        self.entries: list[int] = []

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed.append(f"{self.task.prompt} {len(self.entries)}")

    tasks = Ledger.tasks

    @molt.tool
    async def book(self, amount: int) -> str:
        """Book an amount."""
        self.entries.append(amount)
        return "booked"

    @molt.reward
    async def total(self, trajectory: molt.Trajectory) -> float:
        return float(sum(self.entries) == self.task.answer)


@pytest.mark.parametrize("environment", [Ledger, AsyncLedger])
@pytest.mark.parametrize("own_loop", [False, True])
async def test_an_environment_with_tools_rewards_setup_and_close(pocket: str, environment: Any, own_loop: bool) -> None:
    async def policy(env: Any, model: molt.Model) -> None:
        history: Any = [{"role": "user", "content": env.task.prompt}]
        reply = await model.chat(history, tools=env)
        while reply.tool_calls:
            history = reply.messages + [await model.call_tool(c, env) for c in reply.tool_calls]
            reply = await model.chat(history, tools=env)

    def reply(prompt: list[int], sampling: molt.SamplingParams) -> str:
        # two tool results are in the conversation when it ends
        booked = bytes(i for i in prompt if i < 256).count(b"booked")
        return "done" if booked == 2 else call("book", f'{{"amount": {booked + 1}}}')

    environment.closed.clear()
    what = (policy, environment) if own_loop else (environment,)
    groups = await molt.arollout(*what, engine=ScriptedEngine(pocket, reply), group_size=2, split="dev", limit=3)
    assert [group.rewards for group in groups] == [[1.0, 1.0]] * 3
    trajectories = [t for group in groups for t in group]
    assert {t.certify().ok for t in trajectories} == {True}
    assert {len(t.samples()) for t in trajectories} == {1}
    assert {(t.environment, t.policy) for t in trajectories} == {
        (environment.__name__, "policy" if own_loop else "built_in_loop")
    }
    assert sorted(environment.closed) == [f"dev{i} 2" for i in range(3) for _ in range(2)]
    assert [(t.position, t.index, t.split) for t in trajectories] == [(p, i, "dev") for p in range(3) for i in range(2)]


async def test_the_task_reaches_an_environment_in_any_way_it_is_written(pocket: str) -> None:
    class Base:
        def __init__(self, task: molt.Task) -> None:
            self.task = task

    @molt.environment
    class Forwards(Base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    @molt.environment
    class Declares:
        task: molt.Task | None = None

    @molt.environment
    class Keeps:
        def __init__(self, question: molt.Task) -> None:
            self.question = question

    @molt.environment
    class Bare:
        pass

    async def policy(env: Any, model: molt.Model) -> float:
        assert env.task.prompt == "q"
        return 1.0

    for environment in (Forwards, Declares, Keeps, Bare):
        trajectory = await one(policy, environment, tasks=TASKS, engine=constant(pocket))
        assert trajectory.error is None, trajectory.error


async def test_a_subclass_of_an_environment_has_its_own_name(pocket: str) -> None:
    class Bigger(Ledger):
        pass

    trajectory = await one(Bigger, engine=ScriptedEngine(pocket, [call("book", '{"amount": 3}'), "done"]), limit=1)
    assert (trajectory.environment, trajectory.reward) == ("Bigger", 1.0)


async def test_closures_see_their_notebook(pocket: str) -> None:
    calls = 0

    async def policy(task: molt.Task, model: molt.Model) -> float:
        nonlocal calls
        calls += 1
        return calls

    groups = await molt.arollout(policy, TASKS * 3, engine=constant(pocket), max_concurrent=1)
    assert sorted(r for group in groups for r in group.rewards if r) == [1.0, 2.0, 3.0]


# --- sync code and the event loop -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["tool", "reward", "setup", "init", "close"])
async def test_sync_code_that_blocks_does_not_block_the_loop(pocket: str, where: str) -> None:
    """Each piece of sync code waits until the loop has run something; a blocked loop would never let it go."""
    loop = asyncio.get_running_loop()

    def needs_the_loop() -> None:
        beat = threading.Event()
        loop.call_soon_threadsafe(beat.set)
        assert beat.wait(timeout=30), "the event loop is blocked"

    @molt.environment
    class Env:
        def __init__(self, task: molt.Task) -> None:
            self.task = task
            if where == "init":
                needs_the_loop()

        def setup(self) -> None:
            if where == "setup":
                needs_the_loop()

        def close(self) -> None:
            if where == "close":
                needs_the_loop()

        @molt.tool
        def wait(self) -> str:
            """Wait."""
            if where == "tool":
                needs_the_loop()
            return "waited"

        @molt.reward
        def free(self, trajectory: molt.Trajectory) -> float:
            if where == "reward":
                needs_the_loop()
            return 1.0

    trajectory = await one(Env, tasks=TASKS, engine=ScriptedEngine(pocket, [call("wait"), "done"]))
    assert (trajectory.error, trajectory.reward) == (None, 1.0)


async def test_an_environment_stays_on_one_thread_and_siblings_run_at_the_same_time(pocket: str) -> None:
    meeting = threading.Barrier(3)
    threads: list[set[int]] = []

    @molt.environment
    class Env:
        def __init__(self, task: molt.Task) -> None:
            self.task = task
            self.threads = {threading.get_ident()}

        @molt.tool
        def meet(self) -> str:
            """Wait for the siblings."""
            self.threads.add(threading.get_ident())
            meeting.wait(timeout=30)  # only passes when all three are in it
            return "met"

        @molt.reward
        def apart(self, trajectory: molt.Trajectory) -> float:
            self.threads.add(threading.get_ident())
            return 1.0

        def close(self) -> None:
            self.threads.add(threading.get_ident())
            threads.append(self.threads)

    def reply(prompt: list[int], sampling: molt.SamplingParams) -> str:
        return "done" if b"met" in bytes(i for i in prompt if i < 256) else call("meet")

    groups = await molt.arollout(Env, tasks=TASKS, engine=ScriptedEngine(pocket, reply), group_size=3)
    assert groups[0].rewards == [1.0] * 3
    assert [len(idents) for idents in threads] == [1, 1, 1]
    assert len(set.union(*threads)) == 3
    assert threading.get_ident() not in set.union(*threads)


async def test_context_variables_of_the_caller_are_visible_everywhere(pocket: str) -> None:
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")
    seen: list[str] = []

    @molt.environment
    class Env:
        def setup(self) -> None:
            seen.append(request.get())

        @molt.reward
        def score(self, trajectory: molt.Trajectory) -> float:
            seen.append(request.get())
            return 1.0

    request.set("r1")
    await one(Env, tasks=TASKS, engine=constant(pocket))
    assert seen == ["r1", "r1"]


# --- statuses ---------------------------------------------------------------------------------------------------------


class UserError(Exception):
    pass


async def in_a_group(error: BaseException) -> None:
    async with asyncio.TaskGroup() as group:

        async def fail() -> None:
            raise error

        group.create_task(fail())
        group.create_task(asyncio.Event().wait())


async def cancels_itself() -> None:
    task = asyncio.ensure_future(asyncio.Event().wait())
    task.cancel()
    await task


async def wraps(error: Exception) -> None:
    try:
        raise error
    except Exception as inner:
        raise UserError("the agent could not go on") from inner


CONTEXT = molt.ContextLengthError("too long")
OUTCOMES: dict[str, tuple[Any, str, str]] = {
    "returns": (lambda: None, "ok", ""),
    "raises": (UserError("mine"), "agent_error", "UserError: mine"),
    "exits": (SystemExit(2), "agent_error", "SystemExit: 2"),
    "exits quietly": (lambda: sys.exit(), "agent_error", "sys.exit()"),
    "in a task group": (lambda: in_a_group(UserError("mine")), "agent_error", "UserError: mine"),
    "in anyio's group": (ExceptionGroup("g", [UserError("mine")]), "agent_error", "UserError: mine"),
    "cancels itself": (cancels_itself, "agent_error", "policy policy let a CancelledError of its own escape"),
    "rejects": (molt.Reject("no such page"), "rejected", "no such page"),
    "rejects in a task group": (lambda: in_a_group(molt.Reject("no such page")), "rejected", "no such page"),
    "rejects and fails": (ExceptionGroup("g", [molt.Reject("x"), UserError("mine")]), "agent_error", "UserError: mine"),
    "stops": (molt.Stop("done"), "ok", ""),
    "engine": (molt.EngineError("down"), "infra_error", "EngineError: down"),
    "engine in a task group": (lambda: in_a_group(molt.EngineError("down")), "infra_error", "EngineError: down"),
    "engine, wrapped": (lambda: wraps(molt.EngineError("down")), "infra_error", "EngineError: down"),
    "engine's reply": (molt.EngineReplyError("no logprobs"), "infra_error", "EngineReplyError: no logprobs"),
    "context": (CONTEXT, "truncated", "ContextLengthError: too long"),
    "context in a task group": (lambda: in_a_group(CONTEXT), "truncated", "ContextLengthError: too long"),
    "context and a failure": (ExceptionGroup("g", [CONTEXT, UserError("mine")]), "agent_error", "UserError: mine"),
    "bad request": (molt.RequestError("bad"), "agent_error", "RequestError: bad"),
}


@pytest.mark.parametrize("name", OUTCOMES)
async def test_how_a_policy_ends_is_its_status(pocket: str, name: str) -> None:
    what, status, words = OUTCOMES[name]

    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.chat("q")
        if isinstance(what, BaseException):
            raise what
        result = what()
        if result is not None:
            await result

    trajectory = await one(policy, TASKS, engine=constant(pocket), rewards=[correct])
    assert trajectory.status == status
    assert words in (trajectory.error or "")
    assert (trajectory.error is None) == (words == "")
    assert len(trajectory.turns) == 1
    # only what ended on its own terms is scored; nothing else has a reward, and never one of 0
    assert trajectory.reward == (1.0 if status in ("ok", "truncated") else None)
    assert trajectory.scored == (status in ("ok", "truncated"))
    if status.endswith("_error"):
        assert "Traceback" in (trajectory.error or "")
        assert "in policy" in (trajectory.error or "")


async def test_what_stop_carries_is_the_output(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        raise molt.Stop("done")

    trajectory = await one(policy, TASKS, engine=constant(pocket), rewards=[lambda task, t: t.output == "done"])
    assert (trajectory.output, trajectory.reward) == ("done", 1.0)


async def test_an_error_of_the_agent_may_be_scored_on_request(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        raise UserError("mine")

    config = molt.RolloutConfig(agent_error_reward=-1.0)
    trajectory = await one(policy, TASKS, engine=constant(pocket), rewards=[correct], config=config)
    assert (trajectory.status, trajectory.reward, trajectory.scored) == ("agent_error", -1.0, True)


async def test_a_last_reply_that_was_cut_is_truncated_and_scored(pocket: str) -> None:
    engine = ScriptedEngine(pocket, [Script(text="a", finish_reason="length")])
    trajectory = await one(tasks=TASKS, rewards=[correct], engine=engine)
    assert (trajectory.status, trajectory.reward, trajectory.error) == ("truncated", 1.0, None)


async def test_what_was_sampled_before_the_context_was_full_trains_with_the_environments_reward(pocket: str) -> None:
    @molt.environment
    class Talk:
        @molt.reward
        def turns(self, trajectory: molt.Trajectory) -> float:
            return len(trajectory.turns)

    async def policy(env: Any, model: molt.Model) -> None:
        history: Any = [{"role": "user", "content": "q" * 20}]
        while True:
            history = [*(await model.chat(history)).messages, {"role": "user", "content": "q" * 20}]

    # <|im_start|>user\n + 20 + <|im_end|>\n = 28 and <|im_start|>assistant\n = 11, then a<|im_end|> and \n: 42 a turn
    engine = ScriptedEngine(pocket, lambda prompt, sampling: "a", context_length=100)
    trajectory = await one(policy, Talk, tasks=TASKS, engine=engine)
    assert (trajectory.status, trajectory.reward, trajectory.scored) == ("truncated", 2.0, True)
    assert [len(request.prompt_token_ids) for request in engine.requests] == [39, 81]
    assert trajectory.certify().trained_tokens == 4


async def test_an_engine_error_that_the_agent_handles_is_no_failure(pocket: str) -> None:
    engine = ScriptedEngine(pocket, [Script(error=molt.EngineError("hiccup")), "a"])

    async def policy(task: molt.Task, model: molt.Model) -> float:
        try:
            await model.chat("q")
        except molt.EngineError:
            return float((await model.chat("q")).text == "a")
        return 0.0

    trajectory = await one(policy, TASKS, engine=engine)
    assert (trajectory.status, trajectory.reward, len(trajectory.turns)) == ("ok", 1.0, 1)


async def test_one_bad_trajectory_costs_nobody_else_theirs(pocket: str) -> None:
    """F89."""

    async def policy(task: molt.Task, model: molt.Model) -> float:
        await model.chat("q")
        if task.prompt == "3":
            raise KeyError("x")
        return 1.0

    rows = [{"prompt": str(i)} for i in range(8)]
    groups = await molt.arollout(policy, rows, engine=constant(pocket))
    assert [group.rewards for group in groups] == [[None if i == 3 else 1.0] for i in range(8)]
    failed = groups[3].trajectories[0]
    assert "KeyError: 'x'" in str(failed.error)
    assert "CancelledError" not in str(failed.error)
    evaluation = molt.Evaluation(groups=groups)
    assert (evaluation.reward, evaluation.failures) == (1.0, {"agent_error": 1})


# --- setup and close --------------------------------------------------------------------------------------------------


def environment_that(**raises: BaseException) -> Any:
    """An environment whose methods raise what they are told to, and that notes each close."""

    @molt.environment
    class Env:
        closed = 0

        def __init__(self, task: molt.Task) -> None:
            self.fail("init")

        def setup(self) -> None:
            self.fail("setup")

        def close(self) -> None:
            Env.closed += 1
            self.fail("close")

        @molt.reward
        def score(self, trajectory: molt.Trajectory) -> float:
            self.fail("reward")
            return 1.0

        def fail(self, place: str) -> None:
            if place in raises:
                raise raises[place]

    return Env


@pytest.mark.parametrize("error", [UserError("mine"), SystemExit(2), asyncio.CancelledError()], ids=repr)
@pytest.mark.parametrize(
    ("place", "status", "closed"),
    [("init", "env_error", 0), ("setup", "env_error", 1), ("close", "env_error", 1), ("reward", "reward_error", 1)],
)
async def test_a_failure_of_the_environment_is_recorded_as_that(
    pocket: str, place: str, status: str, closed: int, error: BaseException
) -> None:
    environment = environment_that(**{place: error})
    engine = constant(pocket)
    trajectory = await one(environment, tasks=TASKS, engine=engine)
    assert (trajectory.status, trajectory.reward) == (status, None)
    assert f"in {'__init__' if place == 'init' else 'score' if place == 'reward' else place}" in str(trajectory.error)
    assert environment.closed == closed
    assert len(engine.requests) == (0 if place in ("init", "setup") else 1)


async def test_an_engine_that_fails_in_setup_is_the_infrastructures_fault(pocket: str) -> None:
    environment = environment_that(setup=molt.EngineError("down"))
    trajectory = await one(environment, tasks=TASKS, engine=constant(pocket))
    assert (trajectory.status, environment.closed) == ("infra_error", 1)


@pytest.mark.parametrize(
    "error", [UserError("mine"), SystemExit(2), molt.Reject("no"), molt.EngineError("down")], ids=repr
)
async def test_close_runs_once_however_the_policy_ends(pocket: str, error: BaseException) -> None:
    """F161. And what close raises does not hide what came first."""
    environment = environment_that(close=UserError("in close"))

    async def policy(env: Any, model: molt.Model) -> None:
        raise error

    trajectory = await one(policy, environment, tasks=TASKS, engine=constant(pocket))
    assert environment.closed == 1
    assert trajectory.status in ("agent_error", "rejected", "infra_error")
    assert "in close" not in str(trajectory.error)


async def test_close_may_not_take_for_ever(pocket: str) -> None:
    @molt.environment
    class Env:
        async def close(self) -> None:
            await asyncio.Event().wait()

    async def policy(env: Any, model: molt.Model) -> float:
        return 1.0

    config = molt.RolloutConfig(close_timeout=0.05)
    trajectory = await one(policy, Env, tasks=TASKS, engine=constant(pocket), config=config)
    assert (trajectory.status, trajectory.reward) == ("env_error", None)
    assert "close() took longer than rollout.close_timeout=0.05 s" in str(trajectory.error)


# --- timeouts and cancellation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["call", "policy", "setup", "reward", "swallowed"])
async def test_a_trajectory_that_takes_too_long_is_a_timeout(pocket: str, place: str) -> None:
    """F92: and the engine is not left with its request."""
    closed: list[str] = []

    @molt.environment
    class Env:
        async def setup(self) -> None:
            await self.hang("setup")

        async def close(self) -> None:
            await asyncio.sleep(0)
            closed.append(place)

        @molt.reward
        async def score(self, trajectory: molt.Trajectory) -> float:
            await self.hang("reward")
            return 1.0

        async def hang(self, where: str) -> None:
            if where == place:
                await asyncio.Event().wait()

    async def policy(env: Env, model: molt.Model) -> None:
        try:
            await model.chat("q")
            await env.hang("policy")
        except asyncio.CancelledError:
            if place != "swallowed":
                raise

    hangs = place in ("call", "swallowed")
    engine = ScriptedEngine(pocket, [Script(text="a", delay=60 if hangs else 0)])
    trajectory = await one(policy, Env, tasks=TASKS, engine=engine, timeout=0.3)
    assert (trajectory.status, trajectory.reward, trajectory.rewards) == ("timeout", None, {})
    assert trajectory.error == "the trajectory took longer than rollout.timeout=0.3 s"
    assert len(trajectory.turns) == (0 if hangs or place == "setup" else 1)
    assert (closed, engine.open_requests) == ([place], 0)


async def test_cancelling_a_rollout_closes_every_environment_and_leaves_no_request(pocket: str) -> None:
    """F91, F92, F161."""
    closed: list[str] = []

    @molt.environment
    class Env:
        def __init__(self, task: molt.Task) -> None:
            self.task = task
            self.db = sqlite3.connect(":memory:")

        def close(self) -> None:
            self.db.execute("select 1")
            self.db.close()
            closed.append(self.task.prompt)

    async def policy(env: Env, model: molt.Model) -> float:
        await model.chat("q")
        return 1.0

    engine = ScriptedEngine(pocket, lambda prompt, sampling: Script(text="a", delay=60))
    rows = [{"prompt": str(i)} for i in range(8)]
    rollout = asyncio.create_task(molt.arollout(policy, Env, tasks=rows, engine=engine))
    with anyio.fail_after(30):
        while engine.open_requests < 8:
            await asyncio.sleep(0.001)  # environments open on threads, which nothing here can await
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert sorted(closed) == [str(i) for i in range(8)]
    assert engine.open_requests == 0


@pytest.mark.parametrize("place", ["init", "setup"])
async def test_what_is_still_being_opened_when_time_is_up_is_closed_too(pocket: str, place: str) -> None:
    """A constructor on a thread cannot be interrupted: the environment that comes out of it late must not leak."""
    log: list[str] = []
    release = threading.Event()
    loop = asyncio.get_running_loop()

    @molt.environment
    class Env:
        def __init__(self, task: molt.Task) -> None:
            if place == "init":
                self.open()

        def setup(self) -> None:
            if place == "setup":
                self.open()

        def open(self) -> None:
            loop.call_soon_threadsafe(loop.call_later, 0.1, release.set)  # after the timeout, which is due earlier
            assert release.wait(timeout=30)
            self.db = sqlite3.connect(":memory:")
            log.append("opened")

        def close(self) -> None:
            self.db.close()
            log.append("closed")

    async def policy(env: Env, model: molt.Model) -> float:
        return 1.0

    trajectory = await one(policy, Env, tasks=TASKS, engine=constant(pocket), timeout=0.02)
    assert trajectory.status == "timeout"
    assert log == ["opened", "closed"]
    gc.collect()  # a connection that nobody closed would warn here


async def test_a_tool_that_outlives_the_trajectory_is_waited_for_before_close(pocket: str) -> None:
    """close runs on the environment's own thread, after what still runs there, not beside it."""
    log: list[str] = []
    started, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    @molt.environment
    class Env:
        def __init__(self, task: molt.Task) -> None:
            self.db = sqlite3.connect(":memory:")

        @molt.tool
        def slow(self) -> str:
            """Slow."""
            loop.call_soon_threadsafe(started.set)
            assert release.wait(timeout=30)
            self.db.execute("select 1")
            log.append("tool")
            return "late"

        def close(self) -> None:
            self.db.close()
            log.append("close")

    rollout = asyncio.create_task(one(Env, tasks=TASKS, engine=ScriptedEngine(pocket, [call("slow")])))
    await started.wait()
    rollout.cancel()
    loop.call_later(0.05, release.set)
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert log == ["tool", "close"]


async def test_cancellation_reaches_an_agent_that_would_not_hear_it(pocket: str) -> None:
    """An agent that catches CancelledError and goes on is cancelled again at its next await."""
    swallowed = 0

    async def policy(task: molt.Task, model: molt.Model) -> float:
        nonlocal swallowed
        for _ in range(3):
            try:
                await model.chat("q")
            except asyncio.CancelledError:
                swallowed += 1
        return 0.0

    engine = ScriptedEngine(pocket, lambda prompt, sampling: Script(text="a", delay=60))
    trajectory = await one(policy, TASKS, engine=engine, timeout=0.02)
    assert (trajectory.status, trajectory.reward, swallowed) == ("timeout", None, 3)
    assert engine.open_requests == 0


# --- how many at once -------------------------------------------------------------------------------------------------


async def test_max_concurrent_bounds_what_runs_at_once(pocket: str) -> None:
    running = peak = 0

    async def policy(task: molt.Task, model: molt.Model) -> float:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await model.chat("q")
        running -= 1
        return 1.0

    await molt.arollout(policy, TASKS * 10, engine=constant(pocket), group_size=2, max_concurrent=3)
    assert peak == 3


async def test_a_keyword_that_contradicts_the_config_is_an_error(pocket: str) -> None:
    engine = constant(pocket)
    for options in ({"timeout": 1.0, "config": molt.RolloutConfig(timeout=2.0)}, {"group_size": 0}, {"limit": 0}):
        with pytest.raises(molt.ConfigError, match=next(iter(options))):
            await molt.arollout(tasks=TASKS, engine=engine, **options)  # type: ignore[arg-type]
    assert engine.requests == []


# --- evaluation -------------------------------------------------------------------------------------------------------


async def test_an_evaluation_averages_over_trajectories_not_over_turns(pocket: str) -> None:
    """F49, F50: one trajectory of three turns with reward 0, one of one turn with reward 1: the mean is 0.5."""

    async def policy(task: molt.Task, model: molt.Model) -> float:
        for _ in range(3 if task.prompt == "long" else 1):
            await model.chat("q")
        model.log(calls=1)
        if task.prompt == "fails":
            raise UserError("mine")
        return float(task.prompt == "short")

    rows = [{"prompt": "long"}, {"prompt": "short"}, {"prompt": "fails"}]
    evaluation = await molt.aevaluate(policy, rows, engine=constant(pocket))
    assert evaluation.reward == 0.5
    assert evaluation.tokens == 5 * 2
    assert evaluation.metrics == {"calls": 1.0}
    assert evaluation.failures == {"agent_error": 1}
    assert {t.split for t in evaluation.trajectories} == {"eval"}
    assert evaluation.summary() == {
        "trajectories": 3,
        "failures": 1,
        "reward": 0.5,
        "segments": 5 / 3,
        "truncated": 0,
        "tool_errors": 0,
        "tokens": 10,
    }


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    seen: list[str] = []
    sink = logger.add(lambda message: seen.append(message.record["message"]), level="WARNING")
    yield seen
    logger.remove(sink)


async def test_the_first_failure_of_each_kind_is_logged(pocket: str, tmp_path: Path, warnings: list[str]) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> float:
        await model.chat("q")
        if task.prompt == "reject":
            raise molt.Reject("no {braces}")
        if task.prompt == "group":
            raise ExceptionGroup("g", [UserError("mine")])
        raise UserError(f"mine\x1b, {str(task.prompt)[:3]}")

    rows = [{"prompt": prompt} for prompt in ("one 1", "one 2", "two", "reject", "group")]
    evaluation = await molt.aevaluate(policy, rows, engine=constant(pocket), max_concurrent=1)
    assert evaluation.failures == {"agent_error": 4, "rejected": 1}
    expected = [
        "first agent_error: UserError: mine\\x1b, one",
        "first agent_error: UserError: mine\\x1b, two",
        "first rejected: no {braces}",
        "first agent_error: UserError: mine",
    ]
    assert [line.replace(f"{UserError.__module__}.", "") for line in warnings] == expected
    warnings.clear()
    (group,) = await molt.arollout(policy, rows[:1], engine=constant(pocket), run_dir=tmp_path / "run")
    assert warnings[0].endswith(f"  (molt-sdk show {tmp_path / 'run'} {group.trajectories[0].id[:8]})")


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
async def test_a_forgotten_await_is_logged_once(pocket: str, warnings: list[str]) -> None:
    async def forgetful(task: molt.Task, model: molt.Model) -> float:
        model.chat("q")  # type: ignore[unused-coroutine]
        return 1.0

    await molt.arollout(forgetful, TASKS * 3, engine=constant(pocket))
    assert warnings == ["first episode without a turn: forgetful never called the model; is an `await` missing?"]


def test_the_blocking_functions_run_a_loop_of_their_own(pocket: str) -> None:
    groups = molt.rollout(tasks=TASKS, rewards=[correct], engine=constant(pocket))
    evaluation = molt.evaluate(tasks=TASKS, rewards=[correct], engine=constant(pocket))
    assert groups[0].rewards == [evaluation.reward] == [1.0]
