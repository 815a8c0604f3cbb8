"""Run a policy on tasks: trajectories, groups, rewards. A bad rollout is data with a status, never a crash."""

from __future__ import annotations

import asyncio
import inspect
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
from molt_sdk.errors import ContextLengthError, DefinitionError, RewardError
from molt_sdk.loop import Turnstile
from molt_sdk.model import (
    Model,
    Reject,
    SamplingRules,
    Session,
    Stop,
    blames_engine,
    call_user_code,
    errors_inside,
    to_reward,
)
from molt_sdk.recorder import Recorder
from molt_sdk.rendering.renderer import Renderer
from molt_sdk.tools import error_text, result_text
from molt_sdk.types import MAIN_AGENT, SamplingParams, Status, Task, Trajectory, TrajectoryGroup
from molt_sdk.workers import WorkerPool, contained

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
        self.turnstile = Turnstile()

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
        await self.turnstile.turn()
        seed = zlib.crc32(f"{self.seed}:{self.split}:{epoch}:{position}:{index}".encode())
        identity = uuid.uuid4().hex
        recorder = Recorder(identity, self.engine, self.renderer, self.turnstile, seed=seed)
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
                    await self.turnstile.turn()
                    if outcome.status in ("ok", "truncated"):
                        await self._score(session, task, record, outcome)
            if limit.cancel_called:  # also where the agent swallowed the cancellation and went on
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
        session.opening = asyncio.create_task(_open(session, self.agent.environment, task.copy()))
        try:
            error = await asyncio.shield(session.opening)
            if error is not None:
                raise error
            setup = _setup_of(session)
            if setup is not None and inspect.iscoroutinefunction(setup):
                await session.call(setup, pinned=True)
        except USER_ERRORS as raised:
            outcome.fail("infra_error" if blames_engine(raised) else "env_error")
            return False
        return True

    async def _act(self, session: Session, task: Task, outcome: Outcome) -> None:
        recorder = session.recorder
        model = Model(session, recorder.root)
        subject = session.environment if session.environment is not None else task.copy()
        try:
            outcome.output = await contained(self.agent.policy(subject, model), f"policy {self.agent.policy_name}")
            if inspect.iscoroutine(outcome.output):
                forgotten, outcome.output = outcome.output, None
                forgotten.close()
                raise DefinitionError(
                    f"policy {self.agent.policy_name} returned the coroutine {forgotten.__qualname__}, which never "
                    "ran; write `await` before the call"
                )
        except USER_ERRORS as error:
            _end_with(error, outcome)
        else:
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
                elif self.training and outcome.error is None and session.recorder.agent_rewards:
                    raise RewardError(
                        f"policy {name}: agents {', '.join(session.recorder.agent_rewards)} have rewards, but the "
                        "trajectory has none; return a number too, or call model.reward(...)"
                    )
                elif self.training and outcome.error is None:
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
            outcome.reward, outcome.rewards = to_reward(total, "the weighted sum of the rewards"), parts
        except USER_ERRORS as error:
            outcome.reward = None
            outcome.fail("infra_error" if blames_engine(error) else "reward_error")

    async def _reward(self, session: Session, spec: RewardSpec, task: Task, trajectory: Trajectory) -> Any:
        with anyio.move_on_after(spec.timeout):
            if spec.method:
                return await session.call(getattr(session.environment, spec.fn), trajectory, pinned=True)
            return await session.call(spec.fn, task.copy(), trajectory, pinned=False)
        raise RewardError(f"reward {spec.name} took longer than its timeout of {spec.timeout} s")

    async def _tear_down(self, session: Session, outcome: Outcome) -> None:
        """``close`` runs whatever happened before, shielded from cancellation."""
        try:
            if session.opening is not None:
                with anyio.CancelScope(shield=True), anyio.move_on_after(self.config.close_timeout) as limit:
                    await session.opening
                    close = getattr(session.environment, "close", None)
                    if close is not None:
                        await session.call(close, pinned=True)
                if limit.cancelled_caught:
                    raise TimeoutError(f"close() took longer than rollout.close_timeout={self.config.close_timeout} s")
        except USER_ERRORS as error:
            logger.warning("environment {} failed in close(): {}", self.agent.environment_name, error_text(error))
            if outcome.status in ("ok", "truncated"):
                outcome.reward = None
                outcome.fail("env_error")
        finally:
            session.thread.release()

    async def _group_values(self, spec: RewardSpec, task: Task, scored: list[Trajectory]) -> Any:
        with anyio.move_on_after(spec.timeout):
            return await call_user_code(self.pool, spec.fn, task.copy(), list(scored))
        raise RewardError(f"group reward {spec.name} took longer than its timeout of {spec.timeout} s")

    async def _group_rewards(self, task: Task, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Add rewards that compare siblings; they see the scored trajectories of the group in order."""
        specs = [spec for spec in self.agent.rewards if spec.group]
        if not specs:
            return trajectories
        scored = [t for t in trajectories if t.reward is not None and t.status in ("ok", "truncated")]
        updated = {t.id: t for t in trajectories}
        for spec in specs:
            try:
                values = await self._group_values(spec, task, scored) if scored else []
                if not isinstance(values, Sequence) and hasattr(values, "tolist"):
                    values = values.tolist()
                if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != len(scored):
                    raise RewardError(
                        f"group reward {spec.name} gave {values!r:.80}; expected {len(scored)} numbers, one each"
                    )
                numbers = [to_reward(v, f"group reward {spec.name}[{i}]") for i, v in enumerate(values)]
                sums = [(updated[t.id].reward or 0.0) + spec.weight * n for t, n in zip(scored, numbers, strict=True)]
                totals = [to_reward(total, f"the sum of the rewards with {spec.name}") for total in sums]
            except USER_ERRORS as raised:
                status = "infra_error" if blames_engine(raised) else "reward_error"
                failed = {"status": status, "reward": None, "error": traceback.format_exc()}
                for t in scored:
                    updated[t.id] = msgspec.structs.replace(updated[t.id], **failed)
                break
            for t, number, total in zip(scored, numbers, totals, strict=True):
                now = updated[t.id]
                updated[t.id] = msgspec.structs.replace(now, reward=total, rewards={**now.rewards, spec.name: number})
        return [updated[t.id] for t in trajectories]


async def _open(session: Session, environment: type, task: Task) -> BaseException | None:
    """Make the environment and run a ``setup`` that is not async; returns what user code raised."""
    try:
        session.environment = await session.call(make_environment, environment, task, pinned=True)
        setup = _setup_of(session)
        if setup is not None and not inspect.iscoroutinefunction(setup):
            await session.call(setup, pinned=True)
    except USER_ERRORS as error:
        return error
    return None


def _setup_of(session: Session) -> Callable[[], Any] | None:
    return getattr(session.environment, "setup", None)


def _end_with(error: BaseException, outcome: Outcome) -> None:
    """What an exception that the policy let through says about the trajectory."""
    errors = list(errors_inside(error))
    first = errors[0]
    if blames_engine(error):
        outcome.fail("infra_error")
    elif all(isinstance(e, ContextLengthError) for e in errors):
        outcome.fail("truncated")
    elif isinstance(first, Reject) and all(isinstance(e, Reject) for e in errors):
        outcome.fail("rejected", result_text(first.reason))
    elif isinstance(first, Stop) and all(isinstance(e, Stop) for e in errors):
        outcome.output = first.result
    else:
        outcome.fail("agent_error")


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
