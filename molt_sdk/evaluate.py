"""``rollout`` and ``evaluate``: run a policy without a trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
from loguru import logger
from msgspec import Struct

from molt_sdk.agent import Agent, resolve_agent
from molt_sdk.config import RolloutConfig, check_sampling_type, checked, with_keywords
from molt_sdk.engines.base import Engine
from molt_sdk.engines.select import check_engine, check_renderer, running_engine
from molt_sdk.engines.torch_config import TorchEngineConfig
from molt_sdk.errors import ConfigError
from molt_sdk.loop import blocking, plain_errors
from molt_sdk.progress import visible
from molt_sdk.rendering.renderer import Renderer
from molt_sdk.rollout import Rollouts
from molt_sdk.store import Store
from molt_sdk.types import SamplingParams, Task, Trajectory, TrajectoryGroup
from molt_sdk.workers import WorkerPool

MOST_FAILURES_SHOWN = 20


class Evaluation(Struct, frozen=True, kw_only=True):
    """Result of running a policy on tasks; every mean is over trajectories, never over turns or tokens."""

    groups: list[TrajectoryGroup]

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={value:.4g}" for name, value in self.summary().items())
        return f"Evaluation({numbers})"

    @property
    def trajectories(self) -> list[Trajectory]:
        return [t for group in self.groups for t in group.trajectories]

    @property
    def reward(self) -> float | None:
        """Mean reward of the scored trajectories; None if there are none."""
        return _mean(t.reward for t in self.trajectories if t.scored)

    @property
    def rewards(self) -> dict[str, float]:
        """Mean of each named reward part over the scored trajectories."""
        return _means(t.rewards for t in self.trajectories if t.scored)

    @property
    def metrics(self) -> dict[str, float]:
        """Mean of what the policy logged, over the trajectories that logged it."""
        return _means(t.metrics for t in self.trajectories)

    @property
    def failures(self) -> dict[str, int]:
        """Number of trajectories by status, those that ended ``ok`` or ``truncated`` left out."""
        return dict(Counter(t.status for t in self.trajectories if t.status not in ("ok", "truncated")))

    @property
    def truncated(self) -> int:
        return sum(t.status == "truncated" for t in self.trajectories)

    @property
    def tool_errors(self) -> int:
        """Tool calls that ended in an error, which the model was shown."""
        return sum(execution.error is not None for t in self.trajectories for execution in t.tool_executions)

    @property
    def segments(self) -> float | None:
        """Mean number of roots in the turn forest of a trajectory that called the model: 1 where each call continues an
        earlier one. ``trajectory.explain()`` says why there are more."""
        return _mean(sum(turn.parent is None for turn in t.turns) for t in self.trajectories if t.turns)

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return sampled_tokens(self.trajectories)

    def summary(self) -> dict[str, float]:
        """Flat numbers for tables and trackers."""
        flat: dict[str, float] = {"trajectories": len(self.trajectories), "failures": sum(self.failures.values())}
        if self.reward is not None:
            flat["reward"] = self.reward
        flat |= {f"reward/{name}": value for name, value in self.rewards.items()}
        if self.segments is not None:
            flat["segments"] = self.segments
        return flat | {"truncated": self.truncated, "tool_errors": self.tool_errors, "tokens": self.tokens}


def sampled_tokens(trajectories: Iterable[Trajectory]) -> int:
    """Tokens that the model sampled, trained or not."""
    return sum(len(turn.completion_i32) // 4 for t in trajectories for turn in t.turns)


class FirstFailures:
    """A line for the first failure of each kind, and for an agent that never called the model."""

    def __init__(self, run_dir: str | Path | None) -> None:
        self._run_dir = run_dir
        self._seen: set[tuple[str, str]] = set()

    def lines(self, group: TrajectoryGroup) -> list[str]:
        """What of this group was not seen before, in one line each."""
        lines: list[str] = []
        for t in group.trajectories:
            if t.status == "ok" and not t.turns:
                kind, what = "episode without a turn", f"{t.policy} never called the model; is an `await` missing?"
            elif t.status not in ("ok", "truncated"):
                kind, what = t.status, _last_line(t.error or "")
            else:
                continue
            if (kind, what) not in self._seen and len(self._seen) < MOST_FAILURES_SHOWN:
                self._seen.add((kind, what))
                where = f"  (molt-sdk show {self._run_dir} {t.id[:8]})" if self._run_dir is not None else ""
                lines.append(f"first {kind}: {visible(what, 200)}{where}")
        return lines


def _last_line(error: str) -> str:
    """The last line of a traceback that says something; the frame that is drawn around a group's errors does not."""
    said = (line.strip(" |") for line in reversed(error.splitlines()) if line.strip(" |+-"))
    return next(said, "no reason was given")


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [v for v in values if v is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _means(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            by_name.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in by_name.items()}


async def run_tasks(
    rollouts: Rollouts,
    tasks: Sequence[Task],
    group_size: int,
    done: Callable[[TrajectoryGroup], Awaitable[None]] | None = None,
) -> list[TrajectoryGroup]:
    """All groups, concurrently, in task order; ``done`` is awaited for each as it finishes."""
    groups: list[TrajectoryGroup | None] = [None] * len(tasks)

    async def one(i: int) -> None:
        group = await rollouts.group(tasks[i], i, 0, group_size)
        groups[i] = group
        if done is not None:
            await done(group)

    with plain_errors():
        async with anyio.create_task_group() as task_group:
            for i in range(len(tasks)):
                await rollouts.turnstile.turn()
                task_group.start_soon(one, i)
    return [group for group in groups if group is not None]


async def arollout(
    policy_or_env: Any = None,
    env_or_tasks: Any = None,
    *,
    model: str | None = None,
    engine: str | Engine = "auto",
    tasks: Any = None,
    rewards: Sequence[Any] = (),
    tools: Sequence[Any] = (),
    sampling: SamplingParams | None = None,
    group_size: int = 1,
    limit: int | None = None,
    max_concurrent: int | None = None,
    timeout: float | None = None,
    seed: int = 0,
    split: str = "train",
    run_dir: str | Path | None = None,
    config: RolloutConfig | None = None,
    torch_engine: TorchEngineConfig | None = None,
) -> list[TrajectoryGroup]:
    """Run a policy on tasks and return the recorded groups, in task order. Nothing is trained.

    Args:
        policy_or_env, env_or_tasks, tasks, rewards, tools: as in :func:`fit`; rewards are optional here.
        model: model directory; not needed with an Engine object.
        engine: "auto", "torch", or an Engine object (it stays open; close it yourself).
        group_size: trajectories per task.  limit: most tasks.  split: passed to the environment's ``tasks``.
        max_concurrent, timeout: set the fields of ``config`` (:class:`RolloutConfig`).
        run_dir: also store the trajectories there, readable with ``open_run``; a new folder or an empty one.

    Raises:
        MoltError: for what is wrong with the arguments, before anything is loaded. What goes wrong inside a trajectory
            is a status, never an exception; the first failure of each kind is logged as a warning, and
            ``trajectory.error`` has the traceback.
    """
    agent = resolve_agent(
        policy_or_env,
        env_or_tasks,
        tasks=tasks,
        rewards=rewards,
        tools=tools,
        split=split,
        seed=seed,
        need_reward=False,
    )
    check_sampling_type(sampling)
    config = with_keywords(config or RolloutConfig(), "config", max_concurrent=max_concurrent, timeout=timeout)
    return await _run(
        agent,
        model,
        engine,
        sampling or SamplingParams(),
        config,
        torch_engine or TorchEngineConfig(),
        group_size=group_size,
        limit=limit,
        seed=seed,
        split=split,
        run_dir=run_dir,
    )


async def _run(
    agent: Agent,
    model: str | None,
    engine: str | Engine,
    sampling: SamplingParams,
    config: RolloutConfig,
    torch_engine: TorchEngineConfig,
    *,
    group_size: int,
    limit: int | None,
    seed: int,
    split: str,
    run_dir: str | Path | None,
) -> list[TrajectoryGroup]:
    group_size, limit = checked(group_size, int, "group_size"), checked(limit, int | None, "limit")
    seed = checked(seed, int, "seed")
    if group_size < 1:
        raise ConfigError(f"group_size={group_size} must be at least 1")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit} must be at least 1")
    path = check_engine(engine, model)
    renderer = Renderer(path, emulate_tools=config.tool_emulation)
    check_renderer(renderer, sampling, tools=agent.has_tools)
    rows = await agent.tasks.once(limit)
    settings = {"sampling": sampling, "rollout": config, "group_size": group_size, "seed": seed, "model": path}
    meta = {"kind": "rollout", "policy": agent.policy_name, "environment": agent.environment_name}
    store = Store.create(run_dir, meta=meta, config=msgspec.to_builtins(settings)) if run_dir is not None else None
    pool = WorkerPool(config.threads)
    failures = FirstFailures(run_dir)

    async def done(group: TrajectoryGroup) -> None:
        for line in failures.lines(group):
            logger.warning("{}", line)
        if store is not None:
            await store.add_group(group)

    try:
        async with running_engine(engine, path, torch_engine) as live:
            rollouts = Rollouts(
                agent, live, renderer, pool, sampling=sampling, config=config, seed=seed, training=False, split=split
            )
            return await run_tasks(rollouts, rows, group_size, done)
    finally:
        pool.close()
        if store is not None:
            with anyio.CancelScope(shield=True):
                await store.close()


async def aevaluate(
    policy_or_env: Any = None,
    env_or_tasks: Any = None,
    *,
    model: str | None = None,
    engine: str | Engine = "auto",
    tasks: Any = None,
    rewards: Sequence[Any] = (),
    tools: Sequence[Any] = (),
    sampling: SamplingParams | None = None,
    group_size: int = 1,
    limit: int | None = None,
    max_concurrent: int | None = None,
    timeout: float | None = None,
    seed: int = 0,
    split: str = "eval",
    run_dir: str | Path | None = None,
    config: RolloutConfig | None = None,
    torch_engine: TorchEngineConfig | None = None,
) -> Evaluation:
    """Run a policy on held-out tasks and sum up. Arguments, errors and warnings as in :func:`arollout`."""
    groups = await arollout(
        policy_or_env,
        env_or_tasks,
        model=model,
        engine=engine,
        tasks=tasks,
        rewards=rewards,
        tools=tools,
        sampling=sampling,
        group_size=group_size,
        limit=limit,
        max_concurrent=max_concurrent,
        timeout=timeout,
        seed=seed,
        split=split,
        run_dir=run_dir,
        config=config,
        torch_engine=torch_engine,
    )
    return Evaluation(groups=groups)


_SETTINGS: dict[str, type[Struct]] = {
    "sampling=SamplingParams({})": SamplingParams,
    "config=RolloutConfig({})": RolloutConfig,
}
rollout = blocking(arollout, "rollout", _SETTINGS)
evaluate = blocking(aevaluate, "evaluate", _SETTINGS)
