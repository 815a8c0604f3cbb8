from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from molt_sdk.errors import ConfigError, ModelPathError, TrainingError
from molt_sdk.types import Trajectory, TrajectoryGroup
from tests.trainer_backend.reference import EXACT, READABLE, assert_gradients, gradient_of, hash_of, norm_of, reference
from trainer_backend.advantage import GRPO
from trainer_backend.config import TrainerConfig
from trainer_backend.loss import PPOClip
from trainer_backend.model import decoder_blocks
from trainer_backend.optim import OffloadedAdamW
from trainer_backend.rank import Rank
from trainer_backend.trainer import NO_SIGNAL, NO_TRAINED_TOKENS, NON_FINITE, SaveError, StepCancelled, Trainer

MakeTrajectory = Callable[..., Trajectory]
MakeGroup = Callable[..., TrajectoryGroup]
MakeGroups = Callable[..., list[TrajectoryGroup]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", ["tree", "chain"])
@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_loss_and_gradient_equal_an_unpacked_float64_reference(
    pocket: str, make_groups: MakeGroups, tmp_path: Path, seed: int, layout: Any, budget: int
) -> None:
    """Whatever the layout, the split in micro-batches and the order of groups."""
    groups = make_groups(seed)
    loss, gradients, count = reference(pocket, groups)
    config = TrainerConfig(betas=(0.0, 0.999), layout=layout, max_tokens_per_microbatch=budget, **EXACT)
    random.Random(seed).shuffle(groups)
    result, found = gradient_of(Trainer(pocket, config), groups, tmp_path / "out")
    assert result.trained_tokens == result.computed_tokens == count
    assert result.loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert result.grad_norm == pytest.approx(norm_of(gradients), rel=1e-5)
    assert_gradients(found, gradients)


def test_tree_and_chain_differ_only_in_what_they_compute(pocket: str, make_groups: MakeGroups) -> None:
    groups = make_groups()
    tree, chain = (Trainer(pocket, TrainerConfig(layout=layout, **EXACT)).step(groups) for layout in ("tree", "chain"))
    assert tree.loss == pytest.approx(chain.loss, rel=1e-5)
    assert tree.grad_norm == pytest.approx(chain.grad_norm, rel=1e-5)
    assert tree.metrics == pytest.approx(chain.metrics, rel=1e-4)
    assert tree.flat_tokens == chain.flat_tokens == chain.distinct_tokens > tree.distinct_tokens


def test_bfloat16_is_close_to_float32(pocket: str, make_groups: MakeGroups) -> None:
    """Rounding to 8 bits: within a few percent. (Bounds that never bind, as rounding may carry a ratio across one.)"""
    groups, loss = make_groups(), PPOClip(clip_low=0.99, clip_high=1e6)
    low, high = (
        Trainer(pocket, TrainerConfig(compute_dtype=dtype, loss=loss)).step(groups) for dtype in ("bfloat16", "float32")
    )
    assert low.loss == pytest.approx(high.loss, abs=0.01)
    assert low.grad_norm == pytest.approx(high.grad_norm, rel=0.05)


def test_f55_the_mean_is_over_the_tokens_of_the_whole_batch(
    pocket: str, make_trajectory: MakeTrajectory, make_group: MakeGroup
) -> None:
    """Two tokens of loss +a and eight of loss -b, in micro-batches of their own: (2a - 8b) / 10, not (a - b) / 2. The
    sampler's logprobs are the model's own, so that every ratio is 1 and the losses are the negative advantages, here
    -1 and +1 (rewards 1 and 0): (8 - 2) / 10 = 0.6."""
    long = {"context": [7, 7, 7], "completion": [1, 2, 3, 4, 5, 6, 7, 8]}
    short = {"context": [9], "completion": [1, 2]}
    for spec in (long, short):
        spec["logprobs"] = own_logprobs(pocket, spec["context"], spec["completion"])
    group = make_group([make_trajectory("short", [short], 1.0), make_trajectory("long", [long], 0.0)])
    for budget in (1, 1000):
        result = Trainer(pocket, TrainerConfig(max_tokens_per_microbatch=budget, **EXACT)).step([group])
        assert result.microbatches == (2 if budget == 1 else 1)
        assert result.loss == pytest.approx(0.6, abs=1e-5)
        assert result.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert result.metrics["logprob_diff_max"] == pytest.approx(0.0, abs=1e-5)


def own_logprobs(model: str, context: list[int], completion: list[int]) -> list[float]:
    policy = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        logprobs = policy(torch.tensor([context + completion])).logits[0].log_softmax(-1)
    return [float(logprobs[len(context) + i - 1, token]) for i, token in enumerate(completion)]


def test_f56_gradient_norm_does_not_depend_on_the_number_of_micro_batches(pocket: str, make_groups: MakeGroups) -> None:
    results = [
        Trainer(pocket, TrainerConfig(max_tokens_per_microbatch=budget, **EXACT)).step(make_groups(5, groups=4))
        for budget in (10_000, 80, 40, 1)
    ]
    assert [result.microbatches for result in results] == sorted({result.microbatches for result in results})
    assert [result.grad_norm for result in results] == pytest.approx([results[0].grad_norm] * 4, rel=1e-4)


def test_f47_groups_without_signal_count_in_the_denominator_and_pull_nothing(
    pocket: str, make_trajectory: MakeTrajectory, make_group: MakeGroup, tmp_path: Path
) -> None:
    """Group A: equal rewards, 8 tokens. Group B: rewards 1 and 0, 4 tokens. Loss and gradient of both together are
    those of B alone times 4 / 12, and nothing of A is computed."""
    rng = random.Random(1)
    group_a = make_group(
        [
            make_trajectory(i, [{"context": [5], "completion": [rng.randrange(256) for _ in range(4)]}], 1.0)
            for i in "ab"
        ]
    )
    group_b = make_group(
        [
            make_trajectory(
                i, [{"context": [6], "completion": [rng.randrange(256) for _ in range(2)]}], float(i == "c")
            )
            for i in "cd"
        ]
    )
    config = TrainerConfig(betas=(0.0, 0.999), **EXACT)
    both, both_gradient = gradient_of(Trainer(pocket, config), [group_a, group_b], tmp_path / "both")
    alone, alone_gradient = gradient_of(Trainer(pocket, config), [group_b], tmp_path / "alone")
    assert (both.trained_tokens, both.computed_tokens, both.distinct_tokens) == (12, 4, alone.distinct_tokens)
    assert both.loss == pytest.approx(alone.loss / 3, rel=1e-5)
    for name, gradient in alone_gradient.items():
        torch.testing.assert_close(both_gradient[name], gradient / 3, rtol=1e-5, atol=1e-8)


def test_f50_reward_mean_counts_trajectories_not_turns(
    pocket: str, make_trajectory: MakeTrajectory, make_group: MakeGroup
) -> None:
    """A: three turns, reward 0. B: one turn, reward 1. Mean 1/2. What failed has no reward and does not count."""
    turn = {"context": [1], "completion": [2]}
    members = [make_trajectory("A", [turn] * 3, 0.0), make_trajectory("B", [turn], 1.0)]
    members.append(make_trajectory("C", [turn], None, status="infra_error"))
    assert Trainer(pocket, TrainerConfig(**EXACT)).step([make_group(members)]).metrics["reward_mean"] == 0.5


def test_f62_a_batch_without_trained_tokens_changes_nothing(
    pocket: str, make_trajectory: MakeTrajectory, make_group: MakeGroup
) -> None:
    """No 0 / 0: loss 0, no NaN, the reason is given, also when there is no trajectory at all."""
    trainer = Trainer(pocket, TrainerConfig(learning_rate=0.1))
    before = hash_of(trainer)
    turn = {"context": [1], "completion": [2], "trainable": False}
    masked = make_group([make_trajectory("a", [turn], 1.0), make_trajectory("b", [turn], 0.0)])
    for groups in ([masked], [make_group([])], []):
        result = trainer.step(groups)
        assert (result.skipped, result.skip_reason, result.loss) == (True, NO_TRAINED_TOKENS, 0.0)
        assert (result.version, result.trained_tokens, result.grad_norm) == (0, 0, 0.0)
        assert all(math.isfinite(value) for value in result.metrics.values())
    assert hash_of(trainer) == before
    assert trainer.skipped_steps == 3


def test_a_batch_without_signal_does_not_move_weights_by_momentum(
    pocket: str, make_trajectory: MakeTrajectory, make_group: MakeGroup, make_groups: MakeGroups
) -> None:
    """After a real step AdamW has momentum; a step on zeros would follow it."""
    trainer = Trainer(pocket, TrainerConfig(learning_rate=1e-3))
    assert not trainer.step(make_groups()).skipped
    before = hash_of(trainer)
    equal = make_group([make_trajectory(i, [{"context": [1], "completion": [2]}], 1.0) for i in "ab"])
    result = trainer.step([equal])
    assert (result.skipped, result.skip_reason, result.version, result.trained_tokens) == (True, NO_SIGNAL, 1, 2)
    assert hash_of(trainer) == before


def test_a_non_finite_loss_skips_the_step_and_the_next_one_is_as_if_it_had_not_been(
    pocket: str, make_trajectory: MakeTrajectory, make_group: MakeGroup, make_groups: MakeGroups
) -> None:
    """A ratio of exp(200) overflows float32 and is not clipped where the advantage is negative."""
    turns = [[{"context": [1], "completion": [2], "logprobs": [p]}] for p in (-1.0, -200.0)]
    overflow = make_group([make_trajectory(str(i), turn, 1.0 - i) for i, turn in enumerate(turns)])
    trainer, other = (Trainer(pocket, TrainerConfig(learning_rate=1e-3, **EXACT)) for _ in range(2))
    before = hash_of(trainer)
    result = trainer.step([overflow])
    assert (result.skipped, result.skip_reason, result.version) == (True, NON_FINITE, 0)
    assert not math.isfinite(result.loss)
    assert hash_of(trainer) == before
    assert (trainer.version, trainer.skipped_steps) == (0, 1)
    trainer.step(make_groups())
    other.step(make_groups())
    assert hash_of(trainer) == hash_of(other) != before


@pytest.mark.parametrize("polls", [1, 2, 4])
def test_a_cancelled_step_changes_nothing(pocket: str, make_groups: MakeGroups, polls: int) -> None:
    """With three micro-batches: before the first, between them, and before the optimizer."""
    config = TrainerConfig(learning_rate=1e-3, max_tokens_per_microbatch=60, **EXACT)
    trainer, other = Trainer(pocket, config), Trainer(pocket, config)
    before = hash_of(trainer)
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked == polls

    groups = make_groups(2, groups=3)
    with pytest.raises(StepCancelled):
        trainer.step(groups, cancelled=cancelled)
    assert asked == polls
    assert hash_of(trainer) == before
    assert trainer.version == 0
    assert trainer.step(groups).microbatches == 3
    other.step(groups)
    assert hash_of(trainer) == hash_of(other) != before


def test_f74_small_updates_are_not_swallowed(pocket: str, make_groups: MakeGroups) -> None:
    """Norm weights start at 1.0, where bfloat16 steps by 2^-8: five steps of 1e-6 must move the master weights."""
    trainer = Trainer(pocket, TrainerConfig(learning_rate=1e-6))
    for _ in range(5):
        assert not trainer.step(make_groups()).skipped
    norm = dict(trainer.weights())["model.norm.weight"]
    assert norm.dtype == torch.float32
    assert 0.0 < float((norm - 1.0).abs().max()) <= 6e-6


def test_f116_tied_weights_stay_tied_and_get_both_gradients(
    pocket: str, make_groups: MakeGroups, tmp_path: Path
) -> None:
    """The gradient of the one tensor is that of the float64 model, in which embedding and head add up; the exported
    model loads with both names equal, and ``weights`` gives the tensor once."""
    trainer = Trainer(pocket, TrainerConfig(learning_rate=1e-2, betas=(0.0, 0.999), **EXACT))
    _, gradients, _ = reference(pocket, make_groups())
    _, found = gradient_of(trainer, make_groups(), tmp_path / "out")
    name = "model.embed_tokens.weight"
    torch.testing.assert_close(found[name].double(), gradients[name], rtol=1e-3, atol=2e-6)
    assert [n for n, _ in trainer.weights() if "lm_head" in n or "embed" in n] == [name]
    trainer.export(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded.lm_head.weight, dict(trainer.weights())[name])
    assert torch.equal(loaded.model.embed_tokens.weight, loaded.lm_head.weight)


def test_weights_are_whole_copies_under_hugging_face_names(pocket: str, make_groups: MakeGroups) -> None:
    trainer = Trainer(pocket, TrainerConfig(learning_rate=1e-2))
    before = dict(trainer.weights())
    policy = AutoModelForCausalLM.from_pretrained(pocket)
    assert before.keys() == dict(policy.named_parameters()).keys()
    for name, parameter in policy.named_parameters():
        assert torch.equal(before[name], parameter)
    low = dict(trainer.weights("bfloat16"))
    assert all(torch.equal(low[name], tensor.bfloat16()) for name, tensor in before.items())
    trainer.step(make_groups())
    assert torch.equal(before["model.norm.weight"], torch.ones(64))  # a copy: the step did not reach into it


def test_gradient_is_clipped_by_its_global_norm(pocket: str, make_groups: MakeGroups, tmp_path: Path) -> None:
    config = TrainerConfig(betas=(0.0, 0.999), compute_dtype="float32", grad_clip=1e-3)
    result, gradient = gradient_of(Trainer(pocket, config), make_groups(), tmp_path / "out")
    assert result.grad_norm > 1e-3
    assert norm_of(gradient) == pytest.approx(1e-3, rel=1e-2)


def test_training_raises_the_probability_of_what_was_rewarded(
    pocket: str, make_trajectory: MakeTrajectory, make_group: MakeGroup
) -> None:
    """Ten steps on one prompt, on policy: the rewarded token becomes more likely, its sibling less."""
    trainer = Trainer(pocket, TrainerConfig(learning_rate=1e-3, **EXACT))
    chances = []
    for _ in range(10):
        policy = AutoModelForCausalLM.from_pretrained(pocket)
        policy.load_state_dict(dict(trainer.weights()), strict=False)
        with torch.no_grad():
            logprobs = policy(torch.tensor([[10, 11]])).logits[0, -1].log_softmax(-1)
        chances.append((float(logprobs[65].exp()), float(logprobs[66].exp())))
        members = [
            make_trajectory(str(i), [{"context": [10, 11], "completion": [t], "logprobs": [float(logprobs[t])]}], r)
            for i, (t, r) in enumerate([(65, 1.0), (66, 0.0)])
        ]
        trainer.step([make_group(members)])
    assert chances[-1][0] > 1.5 * chances[0][0]
    assert chances[-1][1] < chances[0][1] / 1.5


def test_mismatch_metrics_by_hand(pocket: str, make_trajectory: MakeTrajectory, make_group: MakeGroup) -> None:
    """The sampler's logprobs are the trainer's minus 0.1 and plus 0.3: mean |d| 0.2, max 0.3, and k3 = e^d - 1 - d with
    d = trainer - sampler, (0.005171 + 0.040818) / 2."""
    (true,) = own_logprobs(pocket, [3, 4], [5])
    members = [
        make_trajectory(str(i), [{"context": [3, 4], "completion": [5], "logprobs": [true - d]}], float(i))
        for i, d in enumerate([0.1, -0.3])
    ]
    metrics = Trainer(pocket, TrainerConfig(**EXACT)).step([make_group(members)]).metrics
    assert metrics["logprob_diff_mean"] == pytest.approx(0.2, abs=1e-4)
    assert metrics["logprob_diff_max"] == pytest.approx(0.3, abs=1e-4)
    assert metrics["mismatch_kl"] == pytest.approx(0.022995, abs=1e-4)
    assert metrics["ratio_mean"] == pytest.approx((math.exp(0.1) + math.exp(-0.3)) / 2, abs=1e-4)


def test_two_trainers_on_the_same_input_give_the_same_bits(pocket: str, make_groups: MakeGroups) -> None:
    trainers = [Trainer(pocket, TrainerConfig(learning_rate=1e-3), seed=seed) for seed in (0, 1)]
    for seed in range(3):
        for trainer in trainers:
            torch.rand(seed + 1)  # the global generator is in another state; training does not use it
            trainer.step(make_groups(seed))
    assert hash_of(trainers[0]) == hash_of(trainers[1])


@pytest.mark.slow
def test_two_processes_on_the_same_input_give_the_same_bits(pocket: str) -> None:
    program = f"""
import hashlib, torch
from molt_sdk.packed import pack_floats, pack_ints
from molt_sdk.types import SamplingParams, Task, Trajectory, TrajectoryGroup, Turn
from trainer_backend.config import TrainerConfig
from trainer_backend.trainer import Trainer
torch.set_num_threads(2)
def trajectory(index):
    turn = Turn(id=0, parent=None, fork_reason="first call", agent="main", trainable=True, new_messages=[], tools=(),
                sampling=SamplingParams(), message={{"role": "assistant"}}, finish_reason="stop",
                context_i32=pack_ints(range(50)), completion_i32=pack_ints(range(index, index + 60)),
                logprobs_f32=pack_floats([-5.5] * 60), version_spans=((0, 0, 60),))
    return Trajectory(id=str(index), task=Task(prompt="q"), turns=(turn,), reward=float(index))
group = TrajectoryGroup(task=Task(prompt="q"), position=0, epoch=0, trajectories=tuple(map(trajectory, range(6))))
trainer = Trainer({pocket!r}, TrainerConfig(learning_rate=1e-3))
for _ in range(3):
    assert not trainer.step([group]).skipped
digest = hashlib.sha256()
for name, tensor in trainer.weights():
    digest.update(tensor.numpy().tobytes())
print(digest.hexdigest())
"""
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    assert len(runs[0].stdout.strip()) == 64


def test_bad_input_is_an_error_that_names_it(
    pocket: str, make_trajectory: MakeTrajectory, make_group: MakeGroup, tmp_path: Path
) -> None:
    with pytest.raises(ModelPathError, match="missing"):
        Trainer(tmp_path / "missing", TrainerConfig())
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device='cuda'"):
            Trainer(pocket, TrainerConfig(device="cuda"))
    foreign = make_trajectory("foreign", [{"context": [1], "completion": [5000]}], 1.0)
    with pytest.raises(TrainingError, match=r"trajectory foreign: token ids from 1 to 5000, .* 259"):
        Trainer(pocket, TrainerConfig()).step([make_group([foreign])])


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_a_recurrent_model_is_trained_on_padded_rows(make_groups: MakeGroups, tmp_path: Path, budget: int) -> None:
    """State runs along the sequence, so no two rows may stand in one. The check finds that out, not a list of names."""
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    size = {"vocab_size": 259, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2}
    MambaForCausalLM(MambaConfig(**size)).save_pretrained(tmp_path / "mamba")
    groups, model = make_groups(1), str(tmp_path / "mamba")
    trainer = Trainer(model, TrainerConfig(max_tokens_per_microbatch=budget, **READABLE))
    assert trainer.layout == "padded"
    loss, gradients, count = reference(model, groups)
    result, found = gradient_of(trainer, groups, tmp_path / "out")
    assert result.distinct_tokens == result.flat_tokens
    assert result.computed_tokens == count
    assert result.loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert_gradients(found, gradients)
    with pytest.raises(TrainingError, match=r"layout='tree', but .*MambaForCausalLM"):
        Trainer(model, TrainerConfig(layout="tree"))


def test_settings_of_the_algorithms_reach_the_step(pocket: str, make_groups: MakeGroups) -> None:
    groups = make_groups()
    plain, narrow, raw = (
        Trainer(pocket, TrainerConfig(advantage=advantage, loss=loss, **EXACT)).step(groups)
        for advantage, loss in (
            (GRPO(), PPOClip()),
            (GRPO(), PPOClip(clip_low=0.01, clip_high=0.01)),
            (GRPO(normalize_std=False), PPOClip()),
        )
    )
    assert narrow.metrics["clip_fraction"] > plain.metrics["clip_fraction"] > 0.0
    # Rewards 0, 1, 4: mean 5/3, variance (25 + 4 + 49) / 27 = 26 / 9.
    assert raw.grad_norm == pytest.approx(plain.grad_norm * math.sqrt(26) / 3, rel=1e-4)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_is_tried_again_with_smaller_micro_batches(
    pocket: str, make_groups: MakeGroups, tmp_path: Path, where: str
) -> None:
    """In the middle of a pass, where gradients of some layers are there already. The step is as if it had not been."""
    groups, config = make_groups(3, groups=3), TrainerConfig(max_tokens_per_microbatch=100, **READABLE)
    trainer, plain = Trainer(pocket, config), Trainer(pocket, config)
    run_out_of_memory(trainer, where, above=60)
    result, found = gradient_of(trainer, groups, tmp_path / "retried")
    expected, gradients = gradient_of(plain, groups, tmp_path / "plain")
    assert result.microbatches > expected.microbatches
    assert result.loss == pytest.approx(expected.loss, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)
    assert trainer.step(groups).microbatches == result.microbatches  # it has learnt what fits


def test_out_of_memory_twice_says_what_to_lower(pocket: str, make_groups: MakeGroups) -> None:
    trainer = Trainer(pocket, TrainerConfig(learning_rate=1e-3, **EXACT))
    before = hash_of(trainer)
    run_out_of_memory(trainer, "forward", above=0)
    with pytest.raises(TrainingError, match=r"micro-batches of 2048 tokens .*max_tokens_per_microbatch.*more ranks"):
        trainer.step(make_groups())
    assert (hash_of(trainer), trainer.version) == (before, 0)


def run_out_of_memory(trainer: Trainer, where: str, *, above: int) -> None:
    """Let the first block fail as an allocator does, in passes of more than ``above`` tokens."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def after(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if output.shape[1] > above and output.requires_grad:
            fail() if where == "forward" else output.register_hook(fail)

    assert isinstance(trainer._ranks, Rank)
    decoder_blocks(trainer._ranks._lm)[0].mlp.register_forward_hook(after)


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": True},
        {"offload": "optimizer"},
        {"offload": "parameters"},
        {"activation_checkpointing": True, "offload": "parameters"},
    ],
    ids=str,
)
def test_what_saves_memory_changes_no_bit(pocket: str, make_groups: MakeGroups, settings: dict[str, Any]) -> None:
    plain, saving = (Trainer(pocket, TrainerConfig(learning_rate=1e-3, **more)) for more in ({}, settings))
    passes = [count_passes(plain), count_passes(saving)]
    for seed in range(2):
        assert plain.step(make_groups(seed)).loss == saving.step(make_groups(seed)).loss
    assert hash_of(plain) == hash_of(saving)
    again = 2 if settings.get("activation_checkpointing") else 1
    assert len(passes[1]) == again * len(passes[0]) > 0
    assert isinstance(saving._ranks, Rank)
    assert isinstance(saving._ranks._optimizer, OffloadedAdamW) == (settings.get("offload") == "optimizer")


def count_passes(trainer: Trainer) -> list[None]:
    """Grows with every forward pass of the first block's MLP."""
    found: list[None] = []
    assert isinstance(trainer._ranks, Rank)
    block = decoder_blocks(trainer._ranks._lm)[0]
    block.mlp.register_forward_pre_hook(lambda *_: found.append(None))
    return found


def test_the_learning_rate_follows_completed_steps_and_survives_a_resume(
    pocket: str, make_trajectory: MakeTrajectory, make_group: MakeGroup, make_groups: MakeGroups, tmp_path: Path
) -> None:
    """Warm-up over two steps to 1e-3, then in a line to 0 at step 4. A skipped step does not move it."""
    config = TrainerConfig(learning_rate=1e-3, warmup_steps=2, schedule="linear", decay_steps=4, **EXACT)
    equal = make_group([make_trajectory(i, [{"context": [1], "completion": [2]}], 1.0) for i in "ab"])
    trainer = Trainer(pocket, config)
    rates = [trainer.step(groups).learning_rate for groups in (make_groups(0), [equal], make_groups(1), make_groups(2))]
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 1e-3])
    trainer.save(tmp_path / "step-4")
    trainer.wait_saved()
    resumed = Trainer.load(tmp_path / "step-4")
    for _ in range(2):
        assert trainer.step(make_groups(3)).learning_rate == resumed.step(make_groups(3)).learning_rate
    assert trainer.step(make_groups(4)).learning_rate == 0.0
    resumed.step(make_groups(4))
    assert hash_of(trainer) == hash_of(resumed)


def test_f113_a_save_that_fails_in_the_background_is_raised_once_and_training_can_go_on(
    pocket: str, make_groups: MakeGroups, tmp_path: Path
) -> None:
    trainer = Trainer(pocket, TrainerConfig(learning_rate=1e-3, **EXACT))
    (tmp_path / "file").touch()
    trainer.save(tmp_path / "file" / "step-1")  # a folder cannot be made inside a file
    with pytest.raises(SaveError, match="step-1"):
        trainer.wait_saved()
    trainer.step(make_groups())
    trainer.save(tmp_path / "step-1")
    trainer.wait_saved()
    assert hash_of(Trainer.load(tmp_path / "step-1")) == hash_of(trainer)
