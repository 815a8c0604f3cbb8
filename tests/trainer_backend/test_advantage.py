from __future__ import annotations

import math

import pytest

from trainer_backend.advantage import GRPO


def test_grpo_by_hand() -> None:
    """mean 1/4; squared distances (9 + 1 + 1 + 1) / 16 / 4 = 3/16; std sqrt(3)/4; 3/4 / std = sqrt(3)."""
    assert GRPO()([1.0, 0.0, 0.0, 0.0]) == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3])


def test_grpo_without_std_only_subtracts_the_mean() -> None:
    """mean of 3, 1, 2 is 2."""
    assert GRPO(normalize_std=False)([3.0, 1.0, 2.0]) == [1.0, -1.0, 0.0]


def test_grpo_ignores_scale_and_offset_of_the_rewards() -> None:
    small = GRPO()([1e-6, 0.0, 3e-6])
    assert GRPO()([101.0, 100.0, 103.0]) == pytest.approx(small)


@pytest.mark.parametrize("rewards", [[], [5.0], [2.0, 2.0], [0.0, 0.0, 0.0], [-3.0] * 4])
def test_grpo_degenerate_groups_have_no_signal(rewards: list[float]) -> None:
    assert GRPO()(rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize(
    "rewards",
    [
        [0.1 + 0.2, 0.3, 0.3, 0.3],  # float64 noise: 5.6e-17
        [1.0000001192092896, 1.0, 1.0, 1.0],  # ten times 0.1 added up in float32
        [0.1 + 0.2 - 0.3, 0.0, 0.0],  # noise around 0, where no relative tolerance helps
    ],
)
@pytest.mark.parametrize("normalize_std", [True, False])
def test_f46_rewards_equal_up_to_float_noise_have_no_signal(rewards: list[float], normalize_std: bool) -> None:
    """Dividing the noise by its own std would give advantages above 1."""
    assert GRPO(normalize_std=normalize_std)(rewards) == [0.0] * len(rewards)


def test_f46_small_but_real_differences_keep_their_signal() -> None:
    assert GRPO()([1.0, 1.0 + 1e-4]) == pytest.approx([-1.0, 1.0])
