"""How good was a trajectory compared with its siblings: rewards of one unit of comparison -> one advantage each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from msgspec import Struct

EQUAL_RELATIVE = 1e-6
EQUAL_ABSOLUTE = 1e-9
"""Rewards are equal if their extremes differ by at most this: a part of the larger magnitude, or an absolute value."""


class GRPO(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="algorithm", tag="grpo"):
    """Group-relative advantage, ``(r - mean) / std`` (GRPO, arXiv 2402.03300, eq. for outcome supervision).

    The std is the population's (divided by n). There is no epsilon: a group whose rewards are equal up to float noise
    (see ``EQUAL_RELATIVE``) gets exactly 0 everywhere, and in any other group the std is a number worth dividing by.
    """

    normalize_std: bool = True
    """Divide by the std; False keeps ``r - mean`` (Dr. GRPO, arXiv 2503.20783)."""

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        """Finite rewards [n] of the scored trajectories of one (group, agent) -> advantages [n].

        Degenerate cases: n = 1, and n equal rewards, give zeros; n = 0 gives [].
        """
        if not rewards or all_equal(rewards):
            return [0.0] * len(rewards)
        mean = fmean(rewards)
        centered = [reward - mean for reward in rewards]
        if not self.normalize_std:
            return centered
        std = math.sqrt(fmean([value * value for value in centered]))
        return [value / std for value in centered]


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether the rewards are the same number up to float noise."""
    return math.isclose(min(rewards), max(rewards), rel_tol=EQUAL_RELATIVE, abs_tol=EQUAL_ABSOLUTE)
