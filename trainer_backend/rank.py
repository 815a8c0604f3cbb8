"""One rank of the trainer: its shard of weights and optimizer, and its part of each step.

Every method is a collective: all ranks call it with the same arguments (``step`` with their own part of the batch). A
trainer of one rank calls it in its own process; otherwise ``python -m trainer_backend.rank`` runs under torchrun and
does what the driver says over a socket (see ``launch.py``).
"""

from __future__ import annotations

import gc
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from molt_sdk.errors import TrainingError
from trainer_backend import checkpoint, optim, wire
from trainer_backend.batch import CostModel, Forest, Row, build_forest, cost_model
from trainer_backend.loading import empty_model, load_weights, materialize, model_files
from trainer_backend.model import Policy, choose_layout, decoder_blocks, make_inputs
from trainer_backend.parallel import (
    PATIENCE,
    checkpoint_activations,
    make_mesh,
    max_over_ranks,
    pick_device,
    recover,
    reshard,
    shard,
    sum_over_ranks,
)
from trainer_backend.state import TrainerState
from trainer_backend.weights import weight_buckets
from trainer_backend.wire import Outcome, Ready, Setup, Work


class Rank:
    """Not thread-safe: call it from one thread at a time, any thread.

    Training draws no random numbers: on a CPU, the same input gives the same bits at the same ranks and threads.
    """

    def __init__(self, setup: Setup, *, launched: bool = False) -> None:
        """Load the model's shard, or that of a checkpoint. Raises ModelPathError, ConfigError for a device that is not
        there, and TrainingError when the model or the checkpoint cannot be trained on."""
        config = self.config = setup.config
        local_rank = int(os.environ["LOCAL_RANK"]) if launched else 0
        self.device = pick_device(config.device, local_rank=local_rank, local_ranks=config.ranks)
        mesh = make_mesh(self.device, launched=launched)
        folder = setup.checkpoint or setup.model
        self._lm: Any = empty_model(folder)
        blocks = decoder_blocks(self._lm)
        if config.activation_checkpointing:
            checkpoint_activations(blocks)
        self._policy = Policy(self._lm, fp32_head=config.fp32_head)
        offloaded = config.offload == "parameters"
        shard(self._policy, blocks, mesh, getattr(torch, config.compute_dtype), offload=offloaded)
        memory = torch.device("cpu") if offloaded else self.device
        if setup.checkpoint is None:
            load_weights(self._lm, folder, memory, self.device)
        else:
            materialize(self._lm, memory, self.device)
        self._optimizer: Any = optim.make_optimizer(self._lm.parameters(), config)
        if setup.checkpoint is not None:
            checkpoint.load(folder, self._lm, self._optimizer)
        alone = dist.get_world_size() == 1
        group = None if alone else dist.new_group(backend="gloo", timeout=PATIENCE)
        self._saver = checkpoint.Saver(group, model_files(folder))
        choice = choose_layout(self._policy, config.layout, self.device, setup.seed)
        reshard(self._policy)
        self.layout = choice.layout
        self.ready = Ready(
            layout=choice.layout,
            note=choice.note,
            vocab_size=self._lm.get_input_embeddings().num_embeddings,
            cost=_cost(self._lm),
            fingerprint=_fingerprint(self.device),
        )

    def step(self, works: Sequence[Work], cancelled: Callable[[], bool]) -> Outcome:
        """Forward and backward of this rank's micro-batches (the only one of ``works``), then one optimizer step of all
        ranks. ``cancelled`` is asked before each pass and before the optimizer. Only a completed step with a finite
        gradient changes anything."""
        (work,) = works
        self._use_device()
        tally = _Tally()
        try:
            for index in range(work.passes):
                if self._any(cancelled()):
                    return Outcome(cancelled=True)
                if index < len(work.microbatches):
                    rows = work.microbatches[index]
                    self._backward(build_forest(rows, share=self.layout == "tree"), tally, work.trained_tokens)
                else:
                    self._backward(_idle_forest(), tally, work.trained_tokens, idle=True)
            norm = optim.gradient_norm(self._lm.parameters())
            outcome = tally.outcome(norm)
            if self._any(cancelled()):
                return Outcome(cancelled=True)
            if not outcome.finite:
                return outcome
            optim.clip_gradient(self._lm.parameters(), norm, self.config.grad_clip)
            for group in self._optimizer.param_groups:
                group["lr"] = work.learning_rate
            self._optimizer.step()
            return outcome
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold the activations of the pass that failed
            if dist.get_world_size() == 1:
                recover(self._policy)
            raise
        finally:
            reshard(self._policy)
            self._optimizer.zero_grad(set_to_none=True)

    def buckets(self, dtype: str) -> Iterator[list[tuple[str, Tensor]]]:
        """Whole weights under their Hugging Face names; see weights.py. Only the first rank gets them."""
        self._use_device()
        return weight_buckets(self._lm, getattr(torch, dtype))

    def save(self, directory: str, state: TrainerState) -> None:
        """Copy the state and write it in the background, after an earlier save has ended."""
        self._use_device()
        state = msgspec.structs.replace(state, adam_steps=checkpoint.adam_steps(self._optimizer))
        self._saver.start(directory, checkpoint.stage(self._lm, self._optimizer), state)

    def saved(self, *, wait: bool) -> str:
        """The error of a save that failed, told once; "" if none did. With ``wait``, after the save under way."""
        if wait:
            self._saver.wait()
        return self._saver.failure()

    @property
    def alive(self) -> bool:
        return self._lm is not None

    def close(self) -> None:
        """Free weights and optimizer. The process group stays for the next trainer of this process."""
        self._saver.wait()
        self._lm = self._policy = self._optimizer = None  # type: ignore[assignment]
        gc.collect()  # modules with hooks are cycles
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _use_device(self) -> None:
        """CUDA's current device belongs to the thread, and any thread may call."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _backward(self, forest: Forest, tally: _Tally, trained_tokens: int, *, idle: bool = False) -> None:
        """Add one micro-batch's share of the gradient: its sum of losses / the trained tokens of the whole batch.

        ``idle``: a pass that adds exactly zero, of a rank that has nothing left while others still compute.
        """
        stats = self._policy(make_inputs(forest, self.layout, self.device))
        rollout = torch.from_numpy(forest.rollout_logprobs).to(self.device)
        if idle:
            rollout = stats.logprobs.detach()  # a ratio of 1, as any other could overflow
        advantages = torch.from_numpy(forest.advantages).to(self.device)
        losses, metrics = self.config.loss(stats.logprobs, rollout, advantages)
        loss_sum = losses.sum()
        share = loss_sum * (0.0 if idle else 1.0 / trained_tokens)
        share.backward()  # type: ignore[no-untyped-call]
        difference = stats.logprobs.detach() - rollout
        metrics["entropy"] = stats.entropy
        metrics["logprob_diff_mean"] = difference.abs()
        metrics["mismatch_kl"] = difference.expm1() - difference
        tally.add(None if idle else forest, loss_sum.detach(), metrics, difference.abs().max())

    def _any(self, flag: bool) -> bool:
        """Whether any rank says so. The driver's cancellation reaches the ranks at different moments."""
        return bool(max_over_ranks(torch.tensor(float(flag))))


class _Tally:
    """Sums over the micro-batches of one step on one rank; tensors stay on their device until the end."""

    def __init__(self) -> None:
        self.counts = np.zeros(4, dtype=np.int64)
        self.sums: dict[str, Tensor] = {}
        self.max_difference: Tensor | None = None

    def add(self, forest: Forest | None, loss_sum: Tensor, metrics: dict[str, Tensor], max_difference: Tensor) -> None:
        """None: an idle pass, of which nothing counts."""
        share = 0.0 if forest is None else 1.0
        if forest is not None:
            self.counts += [len(forest.target_token), len(forest.token_ids), forest.flat_tokens, 1]
        for name, values in ({"loss": loss_sum} | metrics).items():
            total = values.sum().double() * share
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        biggest = max_difference * share
        self.max_difference = biggest if self.max_difference is None else torch.maximum(self.max_difference, biggest)

    def outcome(self, norm: Tensor) -> Outcome:
        """Of all ranks together (collective). Means are over computed tokens."""
        assert self.max_difference is not None
        names = sorted(self.sums)
        local = torch.stack([self.sums[name].cpu() for name in names])
        total = sum_over_ranks(torch.cat([local, torch.from_numpy(self.counts).double()])).tolist()
        sums = dict(zip(names, total, strict=False))
        computed, distinct, flat, microbatches = (int(count) for count in total[len(names) :])
        loss_sum = sums.pop("loss")
        metrics = {name: value / max(1, computed) for name, value in sums.items()}
        return Outcome(
            finite=bool(np.isfinite(loss_sum)) and bool(torch.isfinite(norm)),
            loss_sum=loss_sum,
            grad_norm=float(norm),
            computed_tokens=computed,
            distinct_tokens=distinct,
            flat_tokens=flat,
            microbatches=microbatches,
            metrics=metrics | {"logprob_diff_max": float(max_over_ranks(self.max_difference))},
        )


def out_of_memory(error: BaseException) -> bool:
    """On the CPU it is a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _idle_forest() -> Forest:
    """The least that runs through every parameter: one token from which another one is predicted, without advantage."""
    zero, one = np.zeros(2, dtype=np.float32), np.ones(2, dtype=np.float32)
    row = Row(
        trajectory_id="",
        token_ids=np.zeros(2, dtype=np.int64),
        trained=np.array([False, True]),
        turn_ids=np.zeros(2, dtype=np.int64),
        rollout_logprobs=zero,
        temperatures=one,
        advantages=zero,
    )
    return build_forest([row], share=False)


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What architectures call the number of experts in their configs."""


def _cost(lm: Any) -> CostModel:
    config = lm.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 0
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    experts = next((n for name in EXPERTS if (n := getattr(config, name, None))), 1)
    used = getattr(config, "num_experts_per_tok", None) or experts
    parameters = sum(
        parameter.numel() * (used / experts if ".experts." in name else 1.0)
        for name, parameter in decoder_blocks(lm).named_parameters()
    )
    return cost_model(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        attention_width=heads * head_dim,
        vocab=config.vocab_size,
        parameters=int(parameters),
    )


def _fingerprint(device: torch.device) -> dict[str, str | int]:
    """Where it is equal, the same batches give the same bits; empty where no such promise is made (CUDA)."""
    if device.type != "cpu":
        return {}
    return {
        "ranks": dist.get_world_size(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def main() -> None:
    """A rank process: obey the driver until it says ``Close`` or is gone."""
    host, port = os.environ[wire.ADDRESS].rsplit(":", 1)
    channel = wire.Channel(socket.create_connection((host, int(port))))
    channel.send(wire.Hello(key=os.environ.pop(wire.KEY), rank=int(os.environ["RANK"]), pid=os.getpid()))
    cancel = threading.Event()
    commands: queue.SimpleQueue[wire.Command] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                message = channel.receive(wire.Command)
                if isinstance(message, wire.Cancel):
                    cancel.set()
                    continue
                if isinstance(message, Work):
                    cancel.clear()  # here, since one for the step before may come late
                commands.put(message)
        except BaseException as error:
            if not isinstance(error, EOFError):
                traceback.print_exc()
            os._exit(1)  # the driver is gone; a rank must not outlive it, not even inside a collective

    threading.Thread(target=read, name="molt-driver", daemon=True).start()
    try:
        _serve(channel, commands.get, cancel)
    except BaseException as error:
        by_peer = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
        channel.send(
            wire.Failed(
                error=type(error).__name__,
                message=str(error),
                traceback=traceback.format_exc(),
                out_of_memory=out_of_memory(error),
                by_peer=by_peer,
            )
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # without the destructors of a group whose other members are gone
    dist.destroy_process_group()


def _serve(channel: wire.Channel, next_command: Callable[[], wire.Command], cancel: threading.Event) -> None:
    setup = next_command()
    assert isinstance(setup, Setup)
    rank = Rank(setup, launched=True)
    channel.send(wire.Done(result=rank.ready))
    while True:
        command = next_command()
        result: Outcome | str | None = None
        match command:
            case Work():
                result = rank.step([command], cancel.is_set)
            case wire.SendWeights():
                for bucket in rank.buckets(command.dtype):
                    if bucket:
                        channel.send_bucket(bucket)
            case wire.Save():
                rank.save(command.directory, command.state)
            case wire.Saved():
                result = rank.saved(wait=command.wait)
            case wire.Close():
                rank.close()
                channel.send(wire.Done())
                return
            case _:
                raise TrainingError(f"the driver sent {type(command).__name__} out of turn")
        channel.send(wire.Done(result=result))


if __name__ == "__main__":
    main()
