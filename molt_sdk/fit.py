"""``fit``: the whole training loop on a page.

Agents run as tasks of one event loop; the trainer has a thread of its own; the buffer stands between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from loguru import logger

from molt_sdk.agent import Agent, resolve_agent
from molt_sdk.buffer import Buffer
from molt_sdk.checkpoints import Checkpoints
from molt_sdk.config import RolloutConfig, check_sampling_type
from molt_sdk.database import CHECKPOINTS, MODEL
from molt_sdk.engines.base import Engine
from molt_sdk.engines.select import check_engine, check_renderer, running_engine
from molt_sdk.errors import (
    ConfigError,
    EngineError,
    ModelPathError,
    MoltError,
    RequestError,
    RunFailedError,
    StoreError,
    TrainingError,
    TrainingMemoryError,
)
from molt_sdk.evaluate import Evaluation, FirstFailures, run_tasks
from molt_sdk.fit_config import (
    FitConfig,
    changed_settings,
    merge_keywords,
    smaller_microbatches,
    trainer_config,
)
from molt_sdk.loop import blocking, plain_errors
from molt_sdk.model import check_trainable
from molt_sdk.progress import Display, Tracker, Trackers
from molt_sdk.rendering.renderer import Renderer
from molt_sdk.resume import ResumePoint, newest_checkpoint, recorded_groups, settle
from molt_sdk.rollout import Rollouts
from molt_sdk.run import Checkpoint, Run, open_run
from molt_sdk.store import Store
from molt_sdk.tasks import TaskSource
from molt_sdk.types import SamplingParams, Task, TrajectoryGroup
from molt_sdk.workers import Worker, WorkerPool
from trainer_backend.config import TrainerConfig

if TYPE_CHECKING:
    from trainer_backend.trainer import StepResult, Trainer


async def afit(
    policy_or_env: Any = None,
    env_or_tasks: Any = None,
    *,
    model: str | None = None,
    steps: int | None = None,
    tasks: Any = None,
    rewards: Sequence[Any] = (),
    tools: Sequence[Any] = (),
    sampling: SamplingParams | None = None,
    group_size: int | None = None,
    groups_per_step: int | None = None,
    learning_rate: float | None = None,
    max_staleness: int | None = None,
    engine: str | Engine | None = None,
    seed: int | None = None,
    timeout: float | None = None,
    max_concurrent: int | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    eval_tasks: Any = None,
    eval_every: int | None = None,
    trackers: Sequence[Tracker] = (),
    config: FitConfig | None = None,
) -> Run:
    """Train the model of a policy with reinforcement learning; returns the finished run.

    Args:
        policy_or_env: a policy, or an environment class (the built-in tool loop is then the policy).
        env_or_tasks: an environment class, or tasks.
        model: model directory (Hugging Face format).
        steps: total optimizer steps, those of a resumed run included.
        tasks: Task or dict rows; default: the environment's ``tasks(split, seed)``.
        rewards: functions (task, trajectory) -> number, added up with their weights.
        tools: functions for the built-in loop.
        engine: "auto", "torch", or an Engine object (it stays open; close it yourself).
        run_dir: where the run is kept; default ``runs/<time>-<policy>``.
        resume: go on with the run in ``run_dir`` if there is one, from its newest checkpoint. On a CPU, batches that
            were committed after it are trained again to the bit; on a GPU they are discarded. Only ``steps``,
            evaluation, checkpoints and trackers may differ.
        eval_tasks: held-out tasks, run before and after training with the same sampling, and every ``eval_every``.
        trackers: objects with ``start(run)``, ``log(step, metrics)``, ``finish()``.
        config: a :class:`FitConfig`. The other keywords set its fields (defaults: group_size 8, groups_per_step 8,
            learning_rate 1e-6, max_staleness 1, seed 0, engine "auto"); contradicting it is an error.

    Raises:
        MoltError: DefinitionError, ConfigError, ModelPathError, StoreError before anything is loaded; RunFailedError
            when every rollout fails; TrainingError from the trainer. What was recorded until then stays in the run.
    """
    if config is not None and not isinstance(config, FitConfig):
        raise ConfigError(f"config={config!r:.80} is {type(config).__name__}; give a FitConfig(...)")
    check_sampling_type(sampling)
    _check_trackers(trackers)
    if resume and run_dir is None:
        raise ConfigError("resume=True needs run_dir=...: which run shall go on?")
    config = merge_keywords(
        config or FitConfig(),
        learning_rate=learning_rate,
        rollout={"timeout": timeout, "max_concurrent": max_concurrent},
        model=model,
        steps=steps,
        sampling=sampling,
        group_size=group_size,
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        engine=engine if isinstance(engine, str) else None,
        seed=seed,
        eval_every=eval_every,
    )
    live = engine if engine is not None and not isinstance(engine, str) else config.engine
    agent = resolve_agent(
        policy_or_env,
        env_or_tasks,
        tasks=tasks,
        rewards=rewards,
        tools=tools,
        split="train",
        seed=config.seed,
        need_reward=True,
    )
    if config.group_size < 2:
        raise ConfigError(
            f"group_size={config.group_size}: rewards are compared within a group, so a single trajectory can teach "
            "nothing; use at least 2"
        )
    if config.steps < 1:
        raise ConfigError("steps is missing: give the number of optimizer steps as steps=...")
    try:
        check_trainable(config.sampling, "sampling")
    except RequestError as error:
        raise ConfigError(str(error)) from None
    trainer_config(config)
    config = msgspec.structs.replace(config, model=check_engine(live, config.model or None))
    renderer = Renderer(config.model, emulate_tools=config.rollout.tool_emulation)
    check_renderer(renderer, config.sampling, tools=agent.has_tools)
    held_out = await _eval_tasks(eval_tasks, config)
    await _first_task(agent.tasks)

    # absolute, because agents may change the working directory
    directory = (Path(run_dir) if run_dir is not None else _default_dir(agent)).absolute()
    store, resumed = _open_store(directory, resume, agent, config)
    job = None
    try:
        job = _Job(agent, config, renderer, store, held_out, trackers)
        try:
            with plain_errors():
                await job.run(live)
        except TrainingMemoryError as error:
            # One rank tries again by itself. Several cannot, as the others wait for it in the middle of a pass: the run
            # starts over from its newest checkpoint.
            if config.trainer.ranks == 1 or not agent.tasks.restartable:
                raise
            config = smaller_microbatches(config)
            job = _Job(agent, config, renderer, store, held_out, trackers)
            tokens = config.trainer.max_tokens_per_microbatch
            job.display.note(f"{error}\nresuming once with trainer.max_tokens_per_microbatch={tokens}")
            with plain_errors():
                await job.run(live)
    finally:
        with anyio.CancelScope(shield=True):
            await store.close()
        if (job is None or not job.started) and not resumed:  # nothing was recorded: leave no half-made run behind
            shutil.rmtree(directory, ignore_errors=True)
    return open_run(directory)


fit = blocking(
    afit,
    "fit",
    {
        "sampling=SamplingParams({})": SamplingParams,
        "config=FitConfig({})": FitConfig,
        "config=FitConfig(rollout=RolloutConfig({}))": RolloutConfig,
        "config=FitConfig(trainer=TrainerConfig({}))": TrainerConfig,
    },
)


class _Job:
    """One call of ``fit`` after everything was checked."""

    def __init__(
        self,
        agent: Agent,
        config: FitConfig,
        renderer: Renderer,
        store: Store,
        held_out: list[Task],
        trackers: Sequence[Tracker],
    ) -> None:
        self.agent = agent
        self.config = config
        self.renderer = renderer
        self.store = store
        self.held_out = held_out
        self.display = Display(config.steps)
        self.trackers = Trackers([self.display, *trackers])
        self.buffer = Buffer(config.groups_per_step, config.max_staleness)
        self.pool = WorkerPool(config.rollout.threads)
        self.trainer_thread = Worker("molt-trainer")
        self.started = False
        self.cancelled = False
        self.step = 0
        self.position = 0
        self.live_version: int | None = None
        self.skipped = 0
        self.done = ResumePoint()
        self.evaluated: set[int] = set()
        self.measured: dict[str, float] = {}
        self.unreported: tuple[list[TrajectoryGroup], StepResult] | None = None
        self.failures = FirstFailures(store.dir)
        self.statuses: Counter[str] = Counter()
        self.failed_in_a_row = 0
        self.groups_done = 0
        self.latest_error = "none recorded"
        self.uncertified = 0

    async def run(self, engine: str | Engine) -> None:
        from trainer_backend.state import remove_torn

        for folder in (self.store.dir, self.store.dir / CHECKPOINTS):
            remove_torn(folder)
        checkpoint = newest_checkpoint(open_run(self.store.dir))
        async with AsyncExitStack() as cleanup:  # each part is cleaned up whatever happens to the others
            cleanup.callback(self.pool.close)
            cleanup.callback(self.trainer_thread.close)
            cleanup.callback(self.trackers.finish)
            self.engine = await cleanup.enter_async_context(
                running_engine(engine, self.config.model, self.config.torch_engine)
            )
            if isinstance(engine, str):
                self.live_version = 0  # ours has just loaded the initial weights; the user's may hold any
            self.trainer = await self._start_trainer(checkpoint)
            cleanup.push_async_callback(self._on_trainer_thread, self.trainer.close)
            self.checkpoints = Checkpoints(
                self.store,
                self.trainer,
                self._on_trainer_thread,
                keep=self.config.keep_checkpoints,
                on_error=self.config.on_save_error,
                saved=self.step,
            )
            cleanup.push_async_exit(self._save_at_exit)
            cleanup.push_async_callback(self._abandon_step)
            try:
                await self._resume(checkpoint)
                await self._train()
            except (asyncio.CancelledError, KeyboardInterrupt):
                await self._abandon_step()
                self.display.note(
                    f"interrupted after step {self.step}; its weights are kept in {self.store.dir}; "
                    "go on with resume=True (--resume), or make a model of them with molt-sdk export"
                )
                raise

    async def _on_trainer_thread(self, fn: Callable[..., object], *args: Any) -> None:
        """Run to the end even if the run is cancelled meanwhile."""
        with anyio.CancelScope(shield=True):
            await self.trainer_thread.run(fn, *args)

    async def _abandon_step(self) -> None:
        """End the step that is under way, if any: between micro-batches, or when its optimizer step is complete."""
        self.cancelled = True
        await self._on_trainer_thread(int)
        await self._report()

    async def _save_at_exit(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Save the last completed weights; after an error, that error is the one to report."""
        if not self.trainer.alive or self.checkpoints.broken:
            return
        try:
            await self.checkpoints.finish(self.step, self.position)
        except MoltError as failure:
            if error is None or isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
                raise
            logger.error("{}", failure)

    async def _start_trainer(self, checkpoint: Checkpoint | None) -> Trainer:
        """Cancelled meanwhile, it leaves no process behind."""
        loading = asyncio.ensure_future(self.trainer_thread.run(self._load_trainer, checkpoint))
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            if self.config.trainer.ranks > 1:
                from trainer_backend.launch import abandon_starts

                abandon_starts()
                with anyio.CancelScope(shield=True), contextlib.suppress(MoltError):
                    await self._on_trainer_thread((await loading).close)
            raise

    def _load_trainer(self, checkpoint: Checkpoint | None) -> Trainer:
        from trainer_backend.trainer import Trainer

        config, seed = trainer_config(self.config), self.config.seed
        if config.ranks > 1:
            self.display.note(f"starting {config.ranks} trainer processes")
        if checkpoint is None:
            return Trainer(self.config.model, config, seed=seed)
        self.step = checkpoint.step
        try:
            return Trainer.load(checkpoint.path, config, seed=seed)
        except (TrainingError, ModelPathError) as error:
            earlier = [c.path.name for c in open_run(self.store.dir).checkpoints if c.step < checkpoint.step]
            back = f"remove {checkpoint.path} to go on from {earlier[-1]}" if earlier else "there is no earlier one"
            raise TrainingError(f"{error}. This is the newest checkpoint of the run; {back}") from error

    async def _resume(self, checkpoint: Checkpoint | None) -> None:
        """Go on where the records of this run end; those of a new run end where they begin."""
        fingerprint = self.trainer.fingerprint
        if fingerprint:  # the layout is chosen by measuring, and other weights may measure otherwise
            tokens = self.config.trainer.max_tokens_per_microbatch
            fingerprint = fingerprint | {"layout": self.trainer.layout, "max_tokens_per_microbatch": tokens}
        self.done = await settle(self.store, checkpoint, fingerprint)
        await self.checkpoints.prune()  # what a kill kept it from
        self.evaluated = set(self.done.evaluated)
        self.position = self.done.position
        self.buffer.start_at(self.position)
        if self.done.note:
            self.display.note(self.done.note)
        elif self.step:
            self.display.note(f"going on from step {self.step}")

    async def _train(self) -> None:
        first = self.step
        self.started = True
        self.trackers.start(open_run(self.store.dir))
        await self._between_steps()
        for step in self.done.tail:
            await self._train_again(step)
            await self._between_steps()
        await self._publish()
        async with anyio.create_task_group() as group:
            group.start_soon(self._produce)
            while self.step < self.config.steps and await self._one_step():
                await self._between_steps()
            group.cancel_scope.cancel()
        if self.step == first:
            self.display.note(f"already at step {first} of {self.config.steps}; nothing was trained")
        elif self.skipped == self.step - first:
            logger.warning("no step changed the weights; see the reasons above")
        await self._finish()

    async def _between_steps(self) -> None:
        """Save and evaluate where it is due; after the last step, :meth:`_finish` does."""
        await self.checkpoints.poll()
        if self.step >= self.config.steps:
            return
        every = self.config.eval_every
        evaluate = bool(self.held_out) and (self.step == 0 or (every is not None and self.step % every == 0))
        if evaluate or self.step % self.config.checkpoint_every == 0:
            await self.checkpoints.save(self.step, self.position)
        if evaluate:
            await self._evaluate()

    async def _finish(self) -> None:
        """Save, export and evaluate the trained model."""
        if self.step == 0:
            return
        await self.checkpoints.save(self.step, self.position)
        target = self.store.dir / MODEL
        try:
            await self._on_trainer_thread(self.trainer.export, target)
        except OSError as error:
            raise TrainingError(
                f"the trained model could not be written to {target}: {error}. Its checkpoint goes on: free some space "
                f"and write it with `molt-sdk export {self.store.dir} DIRECTORY`"
            ) from error
        await self._evaluate()
        await self.checkpoints.finish(self.step, self.position)

    async def _one_step(self) -> bool:
        """Take groups, commit the batch, train, publish the weights. False at the end of the task stream."""
        clock = time.perf_counter()
        groups = await self.buffer.take(self.config.groups_per_step, self.trainer.version)
        if not groups:
            if self.failed_in_a_row and self.failed_in_a_row == self.groups_done:
                raise RunFailedError(
                    f"the task stream ended after {self.groups_done} groups, none of which had a scored trajectory; "
                    f"the latest error was\n{self.latest_error}"
                )
            logger.warning("the task stream ended after step {} of {}", self.step, self.config.steps)
            return False
        self.measured = {"seconds/wait": time.perf_counter() - clock}
        await self.store.commit_batch(self.step + 1, [t.id for group in groups for t in group.trajectories if t.scored])
        await self._train_batch(groups)
        updating = time.perf_counter()
        await self._publish()
        self.measured["seconds/update"] = time.perf_counter() - updating
        self.measured["seconds"] = time.perf_counter() - clock
        await self._report()
        await self.buffer.release(len(groups))
        return True

    async def _train_again(self, step: int) -> None:
        """A step whose batch was committed by an earlier session of the run, and whose weights are lost."""
        self.measured = {}
        await self._train_batch(await self.pool.run(recorded_groups, open_run(self.store.dir), step))
        await self._report()

    async def _train_batch(self, groups: list[TrajectoryGroup]) -> None:
        from trainer_backend.trainer import SaveError

        oldest = [t.oldest_version for group in groups for t in group.scored if t.oldest_version is not None]
        self.measured["staleness"] = float(self.trainer.version - min(oldest, default=self.trainer.version))
        try:
            await self.trainer_thread.run(self._train_on, groups)
        except SaveError as error:  # of a checkpoint that was written meanwhile; nothing was trained yet
            self.checkpoints.failed(error)
            await self.trainer_thread.run(self._train_on, groups)

    async def _report(self) -> None:
        """Write the numbers of a completed step, once; also of one that was completed while the run was cancelled."""
        done, self.unreported = self.unreported, None
        if done is None:
            return
        groups, result = done
        if result.skipped:
            self.skipped += 1
            self.display.note(f"step {self.step} changed nothing: {result.skip_reason}")
        if self.step in self.done.trained:
            return
        with anyio.CancelScope(shield=True):
            seconds = self.measured | {"seconds/train": result.seconds}
            await self._log(step_metrics(groups, result) | seconds | self._counts())

    async def _publish(self) -> None:
        """Give the trainer's weights to the engine, whole, unless it has them: a cancelled run waits for it, since it
        reads the trainer."""
        version = self.trainer.version
        if self.live_version == version:
            return
        with anyio.CancelScope(shield=True):
            await self.engine.update_weights(self.trainer.weights(), version)
        if self.engine.version < version:  # it would sample nothing but stale groups, for ever
            raise EngineError(
                f"engine {type(self.engine).__name__} is at version {self.engine.version} after update_weights(..., "
                f"{version}); it must set its version when the weights are in force"
            )
        self.live_version = version

    def _train_on(self, groups: list[TrajectoryGroup]) -> None:
        """On the trainer's thread: the step counts as done when, and only when, the trainer has completed it."""
        result = self.trainer.step(groups, cancelled=lambda: self.cancelled)
        self.step += 1
        self.position = groups[-1].position + 1
        self.unreported = groups, result

    async def _produce(self) -> None:
        """Start groups as slots become free, in stream order."""
        rollouts = self._rollouts("train")
        first = self.buffer.next_position
        position = first - 1
        async with anyio.create_task_group() as running:

            async def one(position: int, epoch: int, task: Task) -> None:
                group = await rollouts.group(task, position, epoch, self.config.group_size)
                await self.store.add_group(group)
                problems = await self.pool.run(_uncertified, group)
                await self.buffer.put(self._certified(group, problems))

            async for position, epoch, task in self.agent.tasks.stream():
                if position >= first:
                    await self.buffer.acquire()
                    running.start_soon(one, position, epoch, task)
            await self.buffer.end(position + 1)

    def _certified(self, group: TrajectoryGroup, problems: dict[str, str]) -> TrajectoryGroup:
        """The group without what cannot be proven exact; stops the run when nothing works or too much is inexact."""
        self.statuses.update(t.status for t in group.trajectories)
        self._note_failures(group)
        exact = tuple(t for t in group.trajectories if t.id not in problems)
        for identity, problem in problems.items():
            self.uncertified += 1
            self.buffer.dropped["uncertified trajectory"] += 1
            logger.error("trajectory {} is not trained: {}", identity, problem)
        total = self.statuses.total()
        if self.uncertified > self.config.max_uncertified * max(100, total):
            raise RunFailedError(
                f"{self.uncertified} of {total} trajectories failed their certificate "
                f"(max_uncertified={self.config.max_uncertified}); see the log for the problems"
            )
        self.groups_done += 1
        self.failed_in_a_row = 0 if group.scored else self.failed_in_a_row + 1
        errors = [f"[{t.status}] {t.error}" for t in group.trajectories if t.error]
        self.latest_error = errors[-1] if errors else self.latest_error
        if self.failed_in_a_row >= self.config.max_failed_groups:
            raise RunFailedError(
                f"{self.failed_in_a_row} groups in a row had no scored trajectory; the latest error was\n"
                f"{self.latest_error}"
            )
        return msgspec.structs.replace(group, trajectories=exact)

    def _note_failures(self, group: TrajectoryGroup) -> None:
        """Show the first failure of each kind, with where to read more."""
        for line in self.failures.lines(group):
            self.display.note(line)

    async def _evaluate(self) -> None:
        """Run the held-out tasks with the trainer's weights, once after each step."""
        if not self.held_out or self.step in self.evaluated:
            return
        await self._publish()
        clock = time.perf_counter()
        rollouts = self._rollouts("eval")

        async def keep(group: TrajectoryGroup) -> None:
            await self.store.add_group(group, step=self.step)
            self._note_failures(group)

        groups = await run_tasks(rollouts, self.held_out, self.config.eval_group_size, keep)
        summary = Evaluation(groups=groups).summary() | {"seconds": time.perf_counter() - clock}
        await self._log({f"eval/{name}": value for name, value in summary.items()})
        self.evaluated.add(self.step)
        await self.checkpoints.prune()  # this one may be the best now

    def _rollouts(self, split: str) -> Rollouts:
        return Rollouts(
            self.agent,
            self.engine,
            self.renderer,
            self.pool,
            sampling=self.config.sampling,
            config=self.config.rollout,
            seed=self.config.seed,
            training=split == "train",
            split=split,
            finished=self.display.trajectory,
        )

    async def _log(self, metrics: dict[str, float]) -> None:
        await self.store.add_metrics(self.step, metrics)
        self.trackers.log(self.step, metrics)

    def _counts(self) -> dict[str, float]:
        """What did not reach the trainer so far, by reason."""
        failed = {f"failed/{s}": float(n) for s, n in self.statuses.items() if s not in ("ok", "truncated")}
        dropped = {f"dropped/{reason}": float(n) for reason, n in self.buffer.dropped.items()}
        return {"queue": float(self.buffer.waiting), **failed, **dropped}


def step_metrics(groups: Sequence[TrajectoryGroup], result: StepResult) -> dict[str, float]:
    """Numbers of one step; rewards are means over trajectories."""
    summary = Evaluation(groups=list(groups))
    flat: dict[str, float] = summary.summary()
    flat |= {f"log/{name}": value for name, value in summary.metrics.items()}
    numbers = {
        "version": result.version,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "trained_tokens": result.trained_tokens,
        "distinct_tokens": result.distinct_tokens,
        "flat_tokens": result.flat_tokens,
        "skipped": float(result.skipped),
    }
    return flat | numbers | result.metrics


def _uncertified(group: TrajectoryGroup) -> dict[str, str]:
    """What is wrong with the trajectories that do not certify, by id."""
    certificates = {t.id: t.certify() for t in group.trajectories}
    return {identity: "; ".join(c.problems) for identity, c in certificates.items() if not c.ok}


async def _eval_tasks(tasks: Any, config: FitConfig) -> list[Task]:
    if tasks is None:
        return []
    return await TaskSource(tasks, split="eval", seed=config.seed, place="eval_tasks").once(None)


async def _first_task(tasks: TaskSource) -> None:
    """Fail now if there is no task; a one-shot iterator is left alone, since looking would use it up."""
    if tasks.restartable:
        await tasks.once(1)


def _check_trackers(trackers: Any) -> None:
    """Raise ConfigError unless it is a list of objects that have a tracker's methods."""
    if not isinstance(trackers, Sequence) or isinstance(trackers, str):
        raise ConfigError(f"trackers={trackers!r:.80} is {type(trackers).__name__}; give a list of trackers")
    for tracker in trackers:
        for name in ("start", "log", "finish"):
            if not callable(getattr(tracker, name, None)):
                raise ConfigError(f"tracker {tracker!r:.80} has no method {name}; a tracker has start, log and finish")


def _default_dir(agent: Agent) -> Path:
    """A folder that does not exist: the second run of one second gets a number."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{agent.policy_name}"
    names = (name, *(f"{name}-{number}" for number in range(2, 1000)))
    return next(path for path in (Path("runs") / n for n in names) if not path.exists())


def _open_store(directory: Path, resume: bool, agent: Agent, config: FitConfig) -> tuple[Store, bool]:
    settings = msgspec.to_builtins(config)
    if resume and Store.is_run(directory):
        before = open_run(directory).config
        changed = changed_settings(before, settings)
        if changed:
            raise ConfigError(
                f"{directory} cannot be resumed with other settings: {'; '.join(changed)}. Use another run_dir"
            )
        return Store.resume(directory, config=settings), True
    if resume:
        logger.warning("resume: there is no run in {} yet; starting one", directory)
    if Store.is_run(directory):
        raise StoreError(f"{directory} holds another run; give resume=True to go on with it, or another run_dir")
    meta = {"kind": "fit", "policy": agent.policy_name, "environment": agent.environment_name}
    return Store.create(directory, meta=meta, config=settings), False
