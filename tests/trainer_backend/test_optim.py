from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from molt_sdk.errors import ConfigError
from trainer_backend.config import TrainerConfig
from trainer_backend.optim import (
    MOMENTS,
    OffloadedAdamW,
    clip_gradient,
    gradient_norm,
    learning_rate,
    make_optimizer,
    new_state,
)

PLAIN = TrainerConfig(learning_rate=1e-2, weight_decay=0.1)
OFFLOADED = TrainerConfig(learning_rate=1e-2, weight_decay=0.1, offload="optimizer")


def with_gradient(values: Sequence[float], gradient: Sequence[float]) -> nn.Parameter:
    parameter = nn.Parameter(torch.tensor(values))
    parameter.grad = torch.tensor(gradient)
    return parameter


@pytest.mark.parametrize("offload", ["none", "optimizer", "parameters"])
def test_two_steps_of_adamw_by_hand(offload: Any) -> None:
    """beta1 0.9, beta2 0.99, weight decay 0.1, eps negligible.

    Step 1, rate 0.1, gradient 0.5: m = 0.05, v = 0.0025; without bias 0.5 and 0.25. 1 (1 - 0.01) - 0.1 (0.5 / 0.5)
    = 0.89. Step 2, rate 0.2, gradient -0.5: m = 0.045 - 0.05 = -0.005, v = 0.002475 + 0.0025 = 0.004975; without bias
    -0.005 / 0.19 and 0.004975 / 0.0199 = 0.25. 0.89 (1 - 0.02) + 0.2 (0.005 / 0.19) / 0.5 = 0.8722 + 0.010526 =
    0.882726.
    """
    config = TrainerConfig(learning_rate=0.1, betas=(0.9, 0.99), eps=1e-12, weight_decay=0.1, offload=offload)
    parameter = with_gradient([1.0], [0.5])
    optimizer = make_optimizer([parameter], config)
    optimizer.step()
    assert parameter.item() == pytest.approx(0.89, rel=1e-6)
    optimizer.param_groups[0]["lr"] = 0.2
    parameter.grad = torch.tensor([-0.5])
    optimizer.step()
    assert parameter.item() == pytest.approx(0.882726, rel=1e-6)
    state = optimizer.state[parameter]
    assert state["step"].item() == 2
    assert [state[name].item() for name in MOMENTS] == pytest.approx([-0.005, 0.004975], rel=1e-5)


def rates(config: TrainerConfig, steps: int) -> list[float]:
    return [learning_rate(config, completed) for completed in range(steps)]


def test_the_rate_is_constant_by_default() -> None:
    assert set(rates(TrainerConfig(learning_rate=3.0), 1000)) == {3.0}


def test_warm_up_rises_in_a_line_and_wastes_no_step_at_rate_0() -> None:
    config = TrainerConfig(learning_rate=4.0, warmup_steps=4)
    assert rates(config, 6) == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]


def test_a_linear_schedule_by_hand() -> None:
    """Warm-up 2, end at 6: p = 0, 1/4, 1/2, 3/4 in between; from 8 down to a quarter of it."""
    config = TrainerConfig(learning_rate=8.0, warmup_steps=2, schedule="linear", decay_steps=6, min_lr_ratio=0.25)
    assert rates(config, 9) == [4.0, 8.0, 8.0, 6.5, 5.0, 3.5, 2.0, 2.0, 2.0]


def test_a_cosine_schedule_by_hand() -> None:
    """p = 0, 1/4, 1/2, 3/4: (1 + cos(pi p)) / 2 = 1, 0.853553, 1/2, 0.146447."""
    config = TrainerConfig(learning_rate=1.0, schedule="cosine", decay_steps=4, min_lr_ratio=0.1)
    expected = [1.0, 0.1 + 0.9 * 0.853553, 0.55, 0.1 + 0.9 * 0.146447, 0.1, 0.1]
    assert rates(config, 6) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_after_warm_up_schedules_are_those_of_transformers(schedule: Any) -> None:
    from transformers import get_scheduler

    config = TrainerConfig(learning_rate=0.5, warmup_steps=3, schedule=schedule, decay_steps=11)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = get_scheduler(schedule, optimizer, num_warmup_steps=3, num_training_steps=11)
    expected = []
    for _ in range(11):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert rates(config, 11)[3:] == pytest.approx(expected[3:])


def test_warm_up_is_that_of_torch() -> None:
    config = TrainerConfig(learning_rate=0.5, warmup_steps=5)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 5, total_iters=4)
    for completed in range(8):
        assert learning_rate(config, completed) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()


def test_warm_up_may_end_where_the_schedule_does() -> None:
    config = TrainerConfig(learning_rate=1.0, warmup_steps=2, schedule="linear", decay_steps=2, min_lr_ratio=0.5)
    assert rates(config, 4) == [0.5, 1.0, 0.5, 0.5]


def test_a_falling_schedule_needs_an_end() -> None:
    with pytest.raises(ConfigError, match="schedule='cosine' needs decay_steps"):
        learning_rate(TrainerConfig(schedule="cosine"), 0)


def test_f115_the_first_step_after_a_resume_has_the_rate_and_decay_of_the_unbroken_run() -> None:
    """Saved after 50 steps; the optimizer that goes on was constructed with the rate of step 1."""
    config = TrainerConfig(
        learning_rate=1e-2, weight_decay=0.1, warmup_steps=10, schedule="cosine", decay_steps=80, min_lr_ratio=0.1
    )
    unbroken = model_and_optimizer(config)
    for step in range(50):
        train(*unbroken, config, step)
    resumed = restored(*unbroken, config)
    for step in (50, 51):
        train(*unbroken, config, step)
        train(*resumed, config, step)
        assert unbroken[1].param_groups[0]["lr"] == resumed[1].param_groups[0]["lr"] == learning_rate(config, step)
        assert_same(*unbroken, *resumed)


def model_and_optimizer(config: TrainerConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5), nn.LayerNorm(5))
    return model, make_optimizer(model.parameters(), config)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainerConfig, step: int) -> None:
    """One step on a batch that belongs to the number of the step."""
    inputs = torch.from_numpy(np.random.default_rng(step).normal(size=(11, 7)).astype(np.float32))
    optimizer.zero_grad(set_to_none=True)
    model(inputs)[:, 0].square().sum().backward()
    optimizer.param_groups[0]["lr"] = learning_rate(config, step)
    optimizer.step()


def restored(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainerConfig
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A new model and optimizer with the same weights, moments and step counter, as a checkpoint puts them back."""
    new_model, new_optimizer = model_and_optimizer(config)
    new_model.load_state_dict(model.state_dict())
    for new, old in zip(new_model.parameters(), model.parameters(), strict=True):
        state = new_state(new_optimizer, new, steps=float(optimizer.state[old]["step"]))
        for name in MOMENTS:
            state[name].copy_(optimizer.state[old][name])
        new_optimizer.state[new] = state
    return new_model, new_optimizer


def assert_same(
    model: nn.Module, optimizer: torch.optim.Optimizer, other_model: nn.Module, other_optimizer: torch.optim.Optimizer
) -> None:
    for parameter, other in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(parameter, other)
        state, other_state = optimizer.state[parameter], other_optimizer.state[other]
        assert set(state) == {"step", *MOMENTS}
        assert all(torch.equal(state[name], other_state[name]) for name in state)


@pytest.mark.parametrize("bucket_bytes", [1, 1000, 1 << 28])
def test_moments_kept_on_the_cpu_give_the_same_bits(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are restored half way, from the plain optimizer or into it."""
    monkeypatch.setattr(OffloadedAdamW, "bucket_bytes", bucket_bytes)
    plain, offloaded = model_and_optimizer(PLAIN), model_and_optimizer(OFFLOADED)
    assert isinstance(offloaded[1], OffloadedAdamW)
    for step in range(3):
        train(*plain, PLAIN, step)
        train(*offloaded, OFFLOADED, step)
    assert_same(*plain, *offloaded)
    plain, offloaded = restored(*offloaded, PLAIN), restored(*plain, OFFLOADED)
    for step in range(3, 5):
        train(*plain, PLAIN, step)
        train(*offloaded, OFFLOADED, step)
    assert_same(*plain, *offloaded)


def test_an_offloaded_parameter_without_gradient_stays_as_it_is() -> None:
    used, unused = with_gradient([1.0], [1.0]), nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([unused, used], OFFLOADED)
    optimizer.step()
    assert unused.tolist() == [1.0, 1.0]
    assert list(optimizer.state) == [used]


def test_the_gradient_is_scaled_down_to_the_limit_and_never_up() -> None:
    """(3, 4) and (12) have the norm 13."""
    parameters = [with_gradient([0.0, 0.0], [3.0, 4.0]), with_gradient([0.0], [12.0]), nn.Parameter(torch.zeros(1))]
    norm = gradient_norm(parameters)
    assert (norm.dtype, norm.item()) == (torch.float32, 13.0)
    for limit in (13.0, 20.0, math.inf):
        clip_gradient(parameters, norm, limit)
        assert parameters[0].grad is not None
        assert parameters[0].grad.tolist() == [3.0, 4.0]
    clip_gradient(parameters, norm, 6.5)
    assert gradient_norm(parameters).item() == pytest.approx(6.5)
    assert parameters[0].grad.tolist() == [1.5, 2.0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_shows_in_the_norm(value: float) -> None:
    assert not math.isfinite(gradient_norm([with_gradient([0.0, 0.0], [1.0, value])]))


def test_the_norm_of_large_gradients_is_finite() -> None:
    assert gradient_norm([with_gradient([0.0], [2e19])]).item() == pytest.approx(2e19)


def test_no_gradient_has_norm_0() -> None:
    assert gradient_norm([nn.Parameter(torch.zeros(1))]).item() == 0.0


def sharded_worker(rank: int, folder: str) -> None:
    """Weights of 3 and 1 rows over two ranks: 2 and 1 rows, and 1 and none."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def sharded(whole: Tensor) -> Tensor:
        return distribute_tensor(whole, mesh, [Shard(0)])

    def run(config: TrainerConfig, *, shard: bool) -> tuple[list[Tensor], float]:
        torch.manual_seed(0)
        place = sharded if shard else lambda whole: whole
        parameters = [nn.Parameter(place(torch.randn(rows, 4))) for rows in (3, 1)]
        optimizer = make_optimizer(parameters, config)
        for step in range(3):
            for parameter in parameters:
                parameter.grad = place(torch.randn(parameter.shape) * (step + 1))
            norm = gradient_norm(parameters)
            clip_gradient(parameters, norm, 1.0)
            optimizer.step()
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters], norm.item()

    expected, expected_norm = run(PLAIN, shard=False)
    for config in (PLAIN, OFFLOADED):
        found, norm = run(config, shard=True)
        assert norm == pytest.approx(expected_norm, rel=1e-6)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    # One rank without any gradient takes part in the norm of the other.
    lonely = nn.Parameter(sharded(torch.zeros(2, 1)))
    if rank == 0:
        lonely.grad = DTensor.from_local(torch.full((1, 1), 3.0), mesh, [Shard(0)])
    assert gradient_norm([lonely]).item() == 3.0
    dist.destroy_process_group()


@pytest.mark.slow
def test_norm_clipping_and_steps_of_sharded_weights_are_those_of_whole_ones(tmp_path: Path) -> None:
    mp.spawn(sharded_worker, args=(str(tmp_path),), nprocs=2)
