"""One training step: groups -> rows with advantages -> a plan for all ranks -> one optimizer step.

The ranks do the computing: one inside this process (``rank.py``), or several under torchrun (``launch.py``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Literal

from loguru import logger
from msgspec import Struct, field
from torch import Tensor

from molt_sdk.errors import MoltError, TrainingError, TrainingMemoryError
from molt_sdk.types import TrajectoryGroup
from trainer_backend.batch import Row, make_rows, plan
from trainer_backend.config import TrainerConfig
from trainer_backend.launch import ADVICE, Launched
from trainer_backend.loading import model_files, source_dtype
from trainer_backend.optim import learning_rate
from trainer_backend.parallel import pick_device
from trainer_backend.rank import Rank, out_of_memory
from trainer_backend.state import TrainerState, load_state
from trainer_backend.weights import write_model_folder
from trainer_backend.wire import Outcome, Setup, Work

NO_TRAINED_TOKENS = "no trained tokens"
NO_SIGNAL = "no signal: every advantage is 0"
NON_FINITE = "non-finite loss or gradient"


class StepCancelled(MoltError):
    """``step`` stopped because it was asked to; weights, optimizer and version are as before."""


class SaveError(TrainingError):
    """A checkpoint could not be written. Earlier checkpoints are whole, and training may go on."""


class StepResult(Struct, frozen=True, kw_only=True):
    """What one call of ``step`` did."""

    version: int
    """Completed optimizer steps in the weights now; a skipped step does not add one."""
    skipped: bool
    skip_reason: str = ""
    """Why weights, optimizer and version are unchanged; "" for a completed step."""
    loss: float
    """Sum of the token losses of the batch / its number of trained tokens."""
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    """Of this step; of a skipped one, what it would have been."""
    trained_tokens: int
    """Denominator of the loss: all trained tokens of the batch, those with advantage 0 included."""
    computed_tokens: int
    """Trained tokens that a forward pass computed; rows in which every advantage is 0 need none."""
    distinct_tokens: int
    """Nodes computed, context included, on all ranks; what two micro-batches share is computed by each."""
    flat_tokens: int
    """What ``distinct_tokens`` would be if no prefix were shared."""
    microbatches: int
    """Of all ranks together."""
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    """``reward_mean`` over scored trajectories, each weighing the same. Over computed tokens: ``entropy`` (nats), the
    loss's own (``ratio_mean``, ``clip_fraction``), and how far the sampler's logprobs are from these weights':
    ``logprob_diff_mean`` and ``logprob_diff_max`` (absolute, nats), ``mismatch_kl`` (estimate k3 of KL(sampler ||
    trainer))."""


def _never() -> bool:
    return False


class Trainer:
    """Owns weights and optimizer of one policy, on one rank in this process or on several in processes of their own.

    Not thread-safe: call it from one thread at a time, any thread.
    """

    def __init__(
        self, model: str | os.PathLike[str], config: TrainerConfig | None = None, *, seed: int = 0, version: int = 0
    ) -> None:
        """Load the model folder and shard it. ``seed`` feeds only the random tokens of the layout check.

        Raises ModelPathError, ConfigError for a device that is not there, and TrainingError when the model cannot be
        trained in the layout asked for.
        """
        self._start(Setup(model=os.path.abspath(model), config=config or TrainerConfig(), seed=seed))
        self.version = version

    @classmethod
    def load(cls, directory: str | os.PathLike[str], config: TrainerConfig | None = None, *, seed: int = 0) -> Trainer:
        """Go on from a checkpoint that ``save`` wrote: weights, AdamW's moments, version and counters, on any number of
        ranks. ``config`` defaults to the saved one. Raises TrainingError when the folder is not a whole checkpoint, and
        what ``__init__`` raises."""
        state = load_state(directory)
        trainer = cls.__new__(cls)
        folder = os.path.abspath(directory)
        trainer._start(Setup(model=folder, config=config or state.config, seed=seed, checkpoint=folder))
        trainer.version, trainer.skipped_steps = state.version, state.skipped_steps
        return trainer

    def _start(self, setup: Setup) -> None:
        # Before processes are started. Each rank picks its own; the last one shows whether there are enough.
        pick_device(setup.config.device, local_rank=setup.config.ranks - 1, local_ranks=setup.config.ranks)
        self.config = setup.config
        self._files = model_files(setup.model)  # kept, as a checkpoint is deleted when there are newer ones
        self.version = self.skipped_steps = 0
        self._budget = setup.config.max_tokens_per_microbatch
        self._ranks = Rank(setup) if setup.config.ranks == 1 else Launched(setup)
        ready = self._ranks.ready
        self.layout, self.vocab_size, self.fingerprint = ready.layout, ready.vocab_size, ready.fingerprint
        if ready.note:
            logger.warning("{}", ready.note)

    def step(self, groups: Sequence[TrajectoryGroup], *, cancelled: Callable[[], bool] = _never) -> StepResult:
        """Train once on whole groups; blocks until done.

        ``cancelled`` is asked before each forward pass and before the optimizer. A batch without signal or a non-finite
        loss or gradient are no errors: the step is skipped, with its reason. Only a completed step changes anything.

        Raises:
            StepCancelled: ``cancelled`` said so.
            TrainingError: the batch must not be trained on; names trajectory, turn and token.
            TrainingMemoryError: it does not fit into memory; on one rank, not in micro-batches of half the size either.
                Several ranks have ended then.
            SaveError: a background save failed. Raised once, before anything else is done.
        """
        started = time.perf_counter()
        self._raise_failed_save(wait=False)
        rows = make_rows(groups, self.config.advantage)
        self._check_rows(rows)
        trained_tokens = sum(row.trained_tokens for row in rows)
        zero_is_free = self.config.loss.zero_without_advantage
        needed = [row for row in rows if row.trained_tokens and (row.has_signal or not zero_is_free)]
        if needed:
            outcome = self._compute(needed, trained_tokens, cancelled)
            reason = "" if outcome.finite else NON_FINITE
        else:
            outcome, reason = Outcome(), NO_SIGNAL if trained_tokens else NO_TRAINED_TOKENS
        rate = learning_rate(self.config, self.version)
        self.version += not reason
        self.skipped_steps += bool(reason)
        rewards = [t.reward for group in groups for t in group.scored if t.reward is not None]
        return StepResult(
            version=self.version,
            skipped=bool(reason),
            skip_reason=reason,
            loss=outcome.loss_sum / max(1, trained_tokens),
            grad_norm=outcome.grad_norm,
            learning_rate=rate,
            trained_tokens=trained_tokens,
            computed_tokens=outcome.computed_tokens,
            distinct_tokens=outcome.distinct_tokens,
            flat_tokens=outcome.flat_tokens,
            microbatches=outcome.microbatches,
            seconds=time.perf_counter() - started,
            metrics=({"reward_mean": fmean(rewards)} if rewards else {}) | outcome.metrics,
        )

    def weights(self, dtype: Literal["float32", "bfloat16"] = "float32") -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole CPU tensor), gathered a bucket at a time; tied weights once. What is handed out is
        a copy that no later step changes. Read it to the end before anything else is asked of the trainer."""
        self._check_open()
        for bucket in self._ranks.buckets(dtype):
            yield from bucket

    def save(self, directory: str | os.PathLike[str], *, step: int = 0, position: int = 0) -> None:
        """Write a checkpoint, all or nothing: returns when the state is copied, and writes in the background.

        ``step`` and ``position`` (of the run and of its task stream) are noted in it. Raises SaveError when an earlier
        save failed; whether this one did is known after :meth:`wait_saved`, and to the next step.
        """
        self._raise_failed_save(wait=True)
        state = TrainerState(
            step=step,
            position=position,
            version=self.version,
            skipped_steps=self.skipped_steps,
            adam_steps=0.0,  # the ranks know
            fingerprint=self.fingerprint,
            config=self.config,
        )
        self._ranks.save(os.path.abspath(directory), state)

    def wait_saved(self) -> None:
        """Wait for the save under way, if any. Raises SaveError if it failed."""
        self._raise_failed_save(wait=True)

    def export(self, directory: str | os.PathLike[str]) -> None:
        """Write a model folder for transformers and vLLM, in the dtype that the source's config names; all or nothing.
        Raises OSError."""
        self._check_open()
        dtype = source_dtype(self._files)
        tensors = (named for bucket in self._ranks.buckets(str(dtype).removeprefix("torch.")) for named in bucket)
        write_model_folder(directory, self._files, tensors, dtype)

    @property
    def alive(self) -> bool:
        """Whether it can still be used: the processes of several ranks end when one of them dies."""
        return self._ranks.alive

    def close(self) -> None:
        """Free weights and optimizer, end the processes of the ranks; safe to call twice."""
        self._ranks.close()

    def _compute(self, rows: Sequence[Row], trained_tokens: int, cancelled: Callable[[], bool]) -> Outcome:
        outcome = None
        try:
            outcome = self._pass_on(rows, trained_tokens, cancelled)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not out_of_memory(error):
                raise
        if outcome is None:  # tried again only here, because the exception keeps what it was raised in alive
            self._budget = max(1, self._budget // 2)
            logger.warning("out of memory; trying again with micro-batches of {} tokens", self._budget)
            outcome = self._second_try(rows, trained_tokens, cancelled)
        if outcome.cancelled:
            raise StepCancelled("the training step was cancelled between micro-batches; nothing changed")
        return outcome

    def _second_try(self, rows: Sequence[Row], trained_tokens: int, cancelled: Callable[[], bool]) -> Outcome:
        try:
            return self._pass_on(rows, trained_tokens, cancelled)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            longest = max(len(row.inputs) for row in rows)
            raise TrainingMemoryError(
                f"out of memory even with micro-batches of {self._budget} tokens (the longest sample has {longest}). "
                f"{ADVICE}. {error}"
            ) from error

    def _pass_on(self, rows: Sequence[Row], trained_tokens: int, cancelled: Callable[[], bool]) -> Outcome:
        """Plan the batch for all ranks and have them compute it."""
        planned = plan(
            rows,
            ranks=self.config.ranks,
            max_tokens=self._budget,
            share=self.layout == "tree",
            padded=self.layout == "padded",
            cost=self._ranks.ready.cost,
        )
        passes = max(map(len, planned))
        works = [
            Work(
                microbatches=microbatches,
                passes=passes,
                trained_tokens=trained_tokens,
                learning_rate=learning_rate(self.config, self.version),
            )
            for microbatches in planned
        ]
        return self._ranks.step(works, cancelled)

    def _raise_failed_save(self, *, wait: bool) -> None:
        self._check_open()
        error = self._ranks.saved(wait=wait)
        if error:
            self._ranks.saved(wait=True)  # ranks learn of it one after the other: let all have told it
            raise SaveError(error)

    def _check_open(self) -> None:
        if not self.alive:
            raise TrainingError(
                "the trainer is closed, or its processes have ended; load the newest checkpoint into a new one"
            )

    def _check_rows(self, rows: Sequence[Row]) -> None:
        for row in filter(lambda row: len(row.token_ids), rows):
            low, high = row.token_ids.min(), row.token_ids.max()
            if low < 0 or high >= self.vocab_size:
                raise TrainingError(
                    f"trajectory {row.trajectory_id}: token ids from {low} to {high}, but the model has "
                    f"{self.vocab_size} embeddings; was it sampled from another model?"
                )
