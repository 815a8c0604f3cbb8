"""One training step: groups -> rows with advantages -> forests -> forward and backward -> one optimizer step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any, Literal

import torch
from loguru import logger
from msgspec import Struct, field
from torch import Tensor

from molt_sdk.errors import MoltError, TrainingError
from molt_sdk.types import TrajectoryGroup
from trainer_backend import checkpoint
from trainer_backend.batch import Forest, Row, build_forest, make_rows, pack
from trainer_backend.config import TrainerConfig
from trainer_backend.logprobs import target_stats
from trainer_backend.model import attention_chunk, check_layouts, decoder_blocks, load_model
from trainer_backend.optim import clip_gradient, gradient_norm, make_optimizer
from trainer_backend.parallel import inline_mesh, pick_device, reshard, shard

NO_TRAINED_TOKENS = "no trained tokens"
NO_SIGNAL = "no signal: every advantage is 0"
NON_FINITE = "non-finite loss or gradient"


class StepCancelled(MoltError):
    """``step`` stopped because it was asked to; weights, optimizer and version are as before."""


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
    trained_tokens: int
    """Denominator of the loss: all trained tokens of the batch, those with advantage 0 included."""
    computed_tokens: int
    """Trained tokens that a forward pass computed; rows in which every advantage is 0 need none."""
    distinct_tokens: int
    """Nodes computed, context included."""
    flat_tokens: int
    """What ``distinct_tokens`` would be if no prefix were shared."""
    microbatches: int
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    """``reward_mean`` over scored trajectories, each weighing the same. Over computed tokens: ``entropy`` (nats), the
    loss's own (``ratio_mean``, ``clip_fraction``), and how far the sampler's logprobs are from these weights':
    ``logprob_diff_mean`` and ``logprob_diff_max`` (absolute, nats), ``mismatch_kl`` (estimate k3 of KL(sampler ||
    trainer))."""


def _never() -> bool:
    return False


class Trainer:
    """Owns weights and optimizer of one policy. Not thread-safe: call it from one thread at a time, any thread.

    Training draws no random numbers: on a CPU, the same input gives the same bits at the same number of threads.
    """

    def __init__(
        self, model: str | os.PathLike[str], config: TrainerConfig | None = None, *, seed: int = 0, version: int = 0
    ) -> None:
        """Load the model folder and shard it. ``seed`` feeds only the random tokens of the layout check.

        Raises ModelPathError, ConfigError for a device that is not there, and TrainingError when the model cannot be
        trained in the layout asked for.
        """
        self.config = config or TrainerConfig()
        self.source = os.fspath(model)
        self.version = version
        self.skipped_steps = 0
        self.device = pick_device(self.config.device)
        self._model: Any = load_model(model, self.device)
        self.vocab_size: int = self._model.get_input_embeddings().num_embeddings
        self._chunk = attention_chunk(self._model)
        dtype: torch.dtype = getattr(torch, self.config.compute_dtype)
        shard(self._model, decoder_blocks(self._model), inline_mesh(self.device), dtype)
        self._optimizer = make_optimizer(self._model.parameters(), self.config)
        self.layout: Literal["tree", "chain"] = self._pick_layout(seed)

    @classmethod
    def load(cls, directory: str | os.PathLike[str], config: TrainerConfig | None = None, *, seed: int = 0) -> Trainer:
        """Go on from what ``save`` wrote: weights, AdamW's moments, version and counters. ``config`` defaults to the
        saved one. Raises TrainingError when the folder is not a checkpoint, and what ``__init__`` raises."""
        state = checkpoint.load_state(directory)
        trainer = cls(directory, config or state.config, seed=seed, version=state.version)
        trainer.skipped_steps = state.skipped_steps
        checkpoint.load_optimizer(directory, trainer._model, trainer._optimizer, state.adam_steps)
        return trainer

    def step(self, groups: Sequence[TrajectoryGroup], *, cancelled: Callable[[], bool] = _never) -> StepResult:
        """Train once on whole groups; blocks until done.

        ``cancelled`` is asked before each forward pass and before the optimizer. Raises StepCancelled if it says so,
        and TrainingError, naming trajectory, turn and token, for a batch that must not be trained on. A batch without
        signal and a non-finite loss or gradient are no errors: the step is skipped, with its reason. Only a completed
        step changes anything.
        """
        started = time.perf_counter()
        rows = make_rows(groups, self.config.advantage)
        self._check_rows(rows)
        tally = _Tally(rows, groups)
        if tally.trained_tokens == 0:
            return self._result(started, tally, skip_reason=NO_TRAINED_TOKENS)
        zero_is_free = self.config.loss.zero_without_advantage
        needed = [row for row in rows if row.trained_tokens and (row.has_signal or not zero_is_free)]
        if not needed:
            return self._result(started, tally, skip_reason=NO_SIGNAL)
        try:
            for forest in self._forests(needed):
                if cancelled():
                    raise StepCancelled("the training step was cancelled between micro-batches; nothing changed")
                self._backward(forest, tally)
            norm = gradient_norm(self._model.parameters())
            tally.grad_norm = float(norm)
            finite = bool(torch.isfinite(tally.loss_sum + norm))
            if cancelled():
                raise StepCancelled("the training step was cancelled before the optimizer; nothing changed")
            if finite:
                clip_gradient(self._model.parameters(), norm, self.config.grad_clip)
                self._optimizer.step()
                self.version += 1
        finally:
            reshard(self._model)
            self._optimizer.zero_grad(set_to_none=True)
        return self._result(started, tally, skip_reason="" if finite else NON_FINITE)

    def weights(self, dtype: Literal["float32", "bfloat16"] = "float32") -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole CPU tensor) one at a time; tied weights once, under their first name."""
        return checkpoint.full_weights(self._model, getattr(torch, dtype))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write a Hugging Face model folder (float32) with the trainer's own state, all or nothing; see checkpoint.py.
        Raises OSError."""
        state = checkpoint.TrainerState(
            version=self.version,
            skipped_steps=self.skipped_steps,
            adam_steps=checkpoint.adam_steps(self._optimizer),
            config=self.config,
        )
        checkpoint.save_checkpoint(directory, self.source, self._model, self._optimizer, state)

    def close(self) -> None:
        """Free weights and optimizer; safe to call twice. The process group stays for the next trainer."""
        self._model = self._optimizer = None  # type: ignore[assignment]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _pick_layout(self, seed: int) -> Literal["tree", "chain"]:
        check = check_layouts(self._model, self.device, seed)
        reshard(self._model)
        detail = f"rms differences in nats: tree {check.tree:.2e}, chain {check.chain:.2e}, wrong {check.wrong:.2e}"
        if not check.chain_agrees:
            raise TrainingError(
                f"{type(self._model).__name__} computes other probabilities for packed rows than for single ones "
                f"({detail}); this architecture cannot be trained here"
            )
        if self.config.layout == "chain":
            return "chain"
        if check.tree_agrees:
            return "tree"
        if self.config.layout == "tree":
            raise TrainingError(
                f"layout='tree', but {type(self._model).__name__} computes other probabilities for shared prefixes "
                f"than for single rows ({detail}); use layout='chain'"
            )
        logger.warning(
            "prefixes are not shared in training, because this model then computes something else ({})", detail
        )
        return "chain"

    def _check_rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            low, high = row.token_ids.min(), row.token_ids.max()
            if low < 0 or high >= self.vocab_size:
                raise TrainingError(
                    f"trajectory {row.trajectory_id}: token ids from {low} to {high}, but the model has "
                    f"{self.vocab_size} embeddings; was it sampled from another model?"
                )
            if self._chunk is not None and len(row.token_ids) > self._chunk:
                raise TrainingError(
                    f"trajectory {row.trajectory_id}: {len(row.token_ids)} tokens, but this model attends within "
                    f"chunks of {self._chunk}, which the trainer does not support; train on shorter trajectories"
                )

    def _forests(self, rows: Sequence[Row]) -> Iterator[Forest]:
        share = self.layout == "tree"
        for batch in pack(rows, self.config.max_tokens_per_microbatch, share=share):
            yield build_forest(batch, share=share)

    def _backward(self, forest: Forest, tally: _Tally) -> None:
        """Add one micro-batch's share of the gradient: its sum of losses / the trained tokens of the whole batch."""
        stats = target_stats(self._model, forest, self.device)
        rollout = torch.from_numpy(forest.rollout_logprobs).to(self.device)
        advantages = torch.from_numpy(forest.advantages).to(self.device)
        losses, metrics = self.config.loss(stats.logprobs, rollout, advantages)
        loss_sum = losses.sum()
        (loss_sum / tally.trained_tokens).backward()  # type: ignore[no-untyped-call]
        difference = stats.logprobs.detach() - rollout
        metrics["entropy"] = stats.entropy
        metrics["logprob_diff_mean"] = difference.abs()
        metrics["mismatch_kl"] = difference.expm1() - difference
        tally.add(forest, loss_sum.detach(), metrics, difference.abs().max())

    def _result(self, started: float, tally: _Tally, *, skip_reason: str) -> StepResult:
        self.skipped_steps += bool(skip_reason)
        return StepResult(
            version=self.version,
            skipped=bool(skip_reason),
            skip_reason=skip_reason,
            loss=float(tally.loss_sum) / max(1, tally.trained_tokens),
            grad_norm=tally.grad_norm,
            learning_rate=self.config.learning_rate,
            trained_tokens=tally.trained_tokens,
            computed_tokens=tally.computed_tokens,
            distinct_tokens=tally.distinct_tokens,
            flat_tokens=tally.flat_tokens,
            microbatches=tally.microbatches,
            seconds=time.perf_counter() - started,
            metrics=tally.metrics(),
        )


class _Tally:
    """Sums over the micro-batches of one step; tensors stay on their device until the end."""

    def __init__(self, rows: Sequence[Row], groups: Sequence[TrajectoryGroup]) -> None:
        self.trained_tokens = sum(row.trained_tokens for row in rows)
        self.rewards = [t.reward for group in groups for t in group.scored if t.reward is not None]
        self.computed_tokens = self.distinct_tokens = self.flat_tokens = self.microbatches = 0
        self.grad_norm = 0.0
        self.loss_sum = torch.zeros(())
        self.max_difference = torch.zeros(())
        self.sums: dict[str, Tensor] = {}

    def add(self, forest: Forest, loss_sum: Tensor, metrics: dict[str, Tensor], max_difference: Tensor) -> None:
        self.microbatches += 1
        self.computed_tokens += len(forest.target_token)
        self.distinct_tokens += len(forest.token_ids)
        self.flat_tokens += forest.flat_tokens
        self.loss_sum = self.loss_sum.to(loss_sum) + loss_sum
        self.max_difference = torch.maximum(self.max_difference.to(max_difference), max_difference)
        for name, values in metrics.items():
            total = values.sum()
            self.sums[name] = self.sums[name] + total if name in self.sums else total

    def metrics(self) -> dict[str, float]:
        """Means over computed tokens, and of the rewards over trajectories."""
        result = {"reward_mean": fmean(self.rewards)} if self.rewards else {}
        if self.computed_tokens:
            result |= {name: float(total) / self.computed_tokens for name, total in self.sums.items()}
            result["logprob_diff_max"] = float(self.max_difference)
        return result
