"""Run a policy on tasks: trajectories, groups, rewards. A bad rollout is data with a status, never a crash."""

from __future__ import annotations

import asyncio
import time
import traceback
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import msgspec
from loguru import logger

from molt_sdk.agent import Agent, RewardSpec, make_environment
from molt_sdk.config import RolloutConfig
from molt_sdk.engines.base import Engine
from molt_sdk.errors import ContextLengthError, EngineError, RewardError
from molt_sdk.model import Model, Reject, SamplingRules, Session, Stop, to_reward
from molt_sdk.recorder import Recorder
from molt_sdk.rendering.renderer import Renderer
from molt_sdk.types import MAIN_AGENT, SamplingParams, Status, Task, Trajectory, TrajectoryGroup
from molt_sdk.workers import WorkerPool

USER_ERRORS = (Exception, SystemExit)
"""What user code may raise without ending the run; KeyboardInterrupt and cancellation pass."""


class Outcome(msgspec.Struct):
    """How a trajectory ended, filled in as it runs."""

    status: Status = "ok"
    error: str | None = None
    output: Any = None
    reward: float | None = None
    rewards: dict[str, float] = {}

    def fail(self, status: Status, error: str | None = None) -> None:
        self.status = status
        self.error = error if error is not None else traceback.format_exc()


class Rollouts:
    """Runs trajectories against one engine with one set of rules."""

    def __init__(
        self,
        agent: Agent,
        engine: Engine,
        renderer: Renderer,
        pool: WorkerPool,
        *,
        sampling: SamplingParams,
        config: RolloutConfig,
        seed: int,
        training: bool,
        split: str,
        finished: Callable[[Trajectory], None] | None = None,
    ) -> None:
        self.agent = agent
        self.engine = engine
        self.renderer = renderer
        self.pool = pool
        self.config = config
        self.seed = seed
        self.training = training
        self.split = split
        self._finished = finished
        self._rules = SamplingRules(sampling, training, config.sampling_from == "config")
        self._limiter = anyio.Semaphore(config.max_concurrent)

    async def group(self, task: Task, position: int, epoch: int, size: int) -> TrajectoryGroup:
        """``size`` trajectories of one task, scored together."""
        results: list[Trajectory | None] = [None] * size

        async def one(index: int) -> None:
            async with self._limiter:
                results[index] = await self.trajectory(task, position, epoch, index)

        async with anyio.create_task_group() as group:
            for index in range(size):
                group.start_soon(one, index)
        trajectories = [t for t in results if t is not None]
        scored = await self._group_rewards(task, trajectories)
        return TrajectoryGroup(task=task, position=position, epoch=epoch, trajectories=tuple(scored))

    async def trajectory(self, task: Task, position: int = 0, epoch: int = 0, index: int = 0) -> Trajectory:
        """One run of the policy. Never raises for what user code or the engine does."""
        seed = zlib.crc32(f"{self.seed}:{self.split}:{epoch}:{position}:{index}".encode())
        identity = uuid.uuid4().hex
        recorder = Recorder(identity, self.engine, self.renderer, seed=seed, training=self.training)
        session = Session(recorder, self._rules, self.pool, self.agent.max_turns)
        outcome = Outcome()
        started, clock = time.time(), time.perf_counter()

        def record() -> Trajectory:
            return Trajectory(
                id=identity,
                task=task,
                turns=recorder.frozen_turns(),
                status=outcome.status,
                reward=outcome.reward,
                rewards=outcome.rewards,
                agent_rewards={k: v for k, v in recorder.agent_rewards.items() if k != MAIN_AGENT},
                output=outcome.output,
                metrics=dict(recorder.metrics),
                tool_executions=tuple(recorder.executions),
                error=outcome.error,
                policy=self.agent.policy_name,
                environment=self.agent.environment_name,
                position=position,
                index=index,
                split=self.split,
                started=started,
                seconds=time.perf_counter() - clock,
            )

        try:
            with anyio.move_on_after(self.config.timeout) as limit:
                if await self._set_up(session, task, outcome):
                    await self._act(session, task, outcome)
                    recorder.close()
                    if outcome.status in ("ok", "truncated"):
                        await self._score(session, task, record, outcome)
            if limit.cancelled_caught:
                outcome.reward, outcome.rewards = None, {}
                outcome.fail("timeout", f"the trajectory took longer than rollout.timeout={self.config.timeout} s")
        finally:
            recorder.close()
            await self._tear_down(session, outcome)
        if outcome.status == "agent_error" and self.config.agent_error_reward is not None:
            outcome.reward = self.config.agent_error_reward
        trajectory = record()
        if self._finished is not None:
            self._finished(trajectory)
        return trajectory

    async def _set_up(self, session: Session, task: Task, outcome: Outcome) -> bool:
        if self.agent.environment is None:
            return True
        try:
            session.environment = await session.call(make_environment, self.agent.environment, task, pinned=True)
            setup = getattr(session.environment, "setup", None)
            if setup is not None:
                await session.call(setup, pinned=True)
        except USER_ERRORS as error:
            outcome.fail("infra_error" if _holds(error, EngineError) else "env_error")
            return False
        return True

    async def _act(self, session: Session, task: Task, outcome: Outcome) -> None:
        recorder = session.recorder
        model = Model(session, recorder.root)
        try:
            output = await self.agent.policy(session.environment if session.environment is not None else task, model)
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
            outcome.fail("agent_error", f"the policy let a CancelledError of its own escape\n{traceback.format_exc()}")
        except Reject as rejection:
            outcome.fail("rejected", rejection.reason)
        except Stop as stop:
            outcome.output = stop.result
        except USER_ERRORS as error:
            if _holds(error, EngineError):
                outcome.fail("infra_error")
            elif _holds(error, ContextLengthError):
                outcome.fail("truncated")
            else:
                outcome.fail("agent_error")
        else:
            outcome.output = output
            if recorder.turns and recorder.turns[-1].finish_reason == "length":
                outcome.status = "truncated"

    async def _score(self, session: Session, task: Task, record: Callable[[], Trajectory], outcome: Outcome) -> None:
        """Fill in the reward: from marked or given rewards, else from what the policy returned or set."""
        asked = session.recorder.agent_rewards.get(MAIN_AGENT)
        name = self.agent.policy_name
        try:
            if not self.agent.rewards:
                returned, outcome.output = outcome.output, None
                if asked is not None and returned is not None:
                    raise RewardError(f"policy {name} both returned {returned!r:.80} and called model.reward; use one")
                if asked is not None or returned is not None:
                    outcome.reward = asked if returned is None else to_reward(returned, f"policy {name}")
                elif self.training and outcome.status == "ok":
                    to_reward(None, f"policy {name}")
                return
            if asked is not None:
                raise RewardError(
                    f"policy {name} called model.reward although rewards are defined ({_names(self.agent.rewards)}); "
                    "use one of the two"
                )
            trajectory = record()
            total = 0.0
            parts: dict[str, float] = {}
            for spec in self.agent.rewards:
                if not spec.group:
                    total += spec.weight * _add_parts(parts, spec, await self._reward(session, spec, task, trajectory))
            outcome.reward, outcome.rewards = total, parts
        except USER_ERRORS as error:
            outcome.reward = None
            outcome.fail("infra_error" if _holds(error, EngineError) else "reward_error")

    async def _reward(self, session: Session, spec: RewardSpec, task: Task, trajectory: Trajectory) -> Any:
        with anyio.move_on_after(spec.timeout):
            if spec.method:
                return await session.call(getattr(session.environment, spec.fn), trajectory, pinned=True)
            return await session.call(spec.fn, task, trajectory, pinned=False)
        raise RewardError(f"reward {spec.name} took longer than its timeout of {spec.timeout} s")

    async def _tear_down(self, session: Session, outcome: Outcome) -> None:
        """``close`` runs whatever happened before, shielded from cancellation."""
        environment = session.environment
        close = getattr(environment, "close", None) if environment is not None else None
        try:
            if close is not None:
                with anyio.CancelScope(shield=True), anyio.move_on_after(self.config.close_timeout) as limit:
                    await session.call(close, pinned=True)
                if limit.cancelled_caught:
                    raise TimeoutError(f"close() took longer than rollout.close_timeout={self.config.close_timeout} s")
        except USER_ERRORS as error:
            logger.warning("environment {} failed in close(): {}", self.agent.environment_name, error)
            if outcome.status in ("ok", "truncated"):
                outcome.reward = None
                outcome.fail("env_error")
        finally:
            session.thread.release()

    async def _group_rewards(self, task: Task, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Add rewards that compare siblings; they see the scored trajectories of the group in order."""
        specs = [spec for spec in self.agent.rewards if spec.group]
        if not specs:
            return trajectories
        scored = [t for t in trajectories if t.reward is not None and t.status in ("ok", "truncated")]
        updated = {t.id: t for t in trajectories}
        for spec in specs:
            try:
                with anyio.fail_after(spec.timeout):
                    values = await _call(self.pool, spec.fn, task, list(scored)) if scored else []
                if not isinstance(values, Sequence) and hasattr(values, "tolist"):
                    values = values.tolist()
                if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != len(scored):
                    raise RewardError(
                        f"group reward {spec.name} gave {values!r:.80}; expected {len(scored)} numbers, one per trajectory"
                    )
                numbers = [to_reward(v, f"group reward {spec.name}[{i}]") for i, v in enumerate(values)]
            except USER_ERRORS:
                error = traceback.format_exc()
                for t in scored:
                    failed = {"status": "reward_error", "reward": None, "error": error}
                    updated[t.id] = msgspec.structs.replace(updated[t.id], **failed)
                break
            for t, number in zip(scored, numbers, strict=True):
                now = updated[t.id]
                updated[t.id] = msgspec.structs.replace(
                    now, reward=(now.reward or 0.0) + spec.weight * number, rewards={**now.rewards, spec.name: number}
                )
        return [updated[t.id] for t in trajectories]


async def _call(pool: WorkerPool, fn: Callable[..., Any], *args: Any) -> Any:
    return await fn(*args) if asyncio.iscoroutinefunction(fn) else await pool.run(fn, *args)


def _add_parts(parts: dict[str, float], spec: RewardSpec, value: Any) -> float:
    """Enter the named parts of one reward; returns their unweighted sum."""
    if isinstance(value, Mapping):
        new = {str(name): to_reward(v, f"reward {spec.name}[{name!r}]") for name, v in value.items()}
        if not new:
            raise RewardError(f"reward {spec.name} gave an empty mapping; return at least one named number")
    else:
        new = {spec.name: to_reward(value, f"reward {spec.name}")}
    for name in new:
        if name in parts:
            raise RewardError(f"reward {spec.name}: there is already a part named {name!r}; rename one of them")
    parts.update(new)
    return sum(new.values())


def _names(specs: Sequence[RewardSpec]) -> str:
    return ", ".join(spec.name for spec in specs)


def _holds(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether the error is of a kind, or a group that holds one."""
    if isinstance(error, BaseExceptionGroup):
        return any(_holds(inner, kind) for inner in error.exceptions)
    return isinstance(error, kind)


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
