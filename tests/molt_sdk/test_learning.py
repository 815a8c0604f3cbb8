"""The real loop with real parts: the torch engine samples, the FSDP2 trainer learns, the reward goes up."""

from __future__ import annotations

from pathlib import Path

import pytest

import molt_sdk as molt

VOWELS = frozenset(b"aeiou")


@pytest.mark.slow
def test_the_pocket_model_learns_by_the_real_loop(pocket: str, tmp_path: Path) -> None:
    """A random model over 259 bytes writes vowels about 2 % of the time; the reward is the share of vowels."""

    def vowels(task: molt.Task, trajectory: molt.Trajectory) -> float:
        ids = trajectory.turns[0].completion_token_ids
        return sum(i in VOWELS for i in ids) / len(ids)

    run = molt.fit(
        tasks=[{"prompt": f"vowels {i}"} for i in range(4)],
        rewards=[vowels],
        model=pocket,
        engine="torch",
        steps=15,
        group_size=16,
        groups_per_step=4,
        max_staleness=0,
        sampling=molt.SamplingParams(max_tokens=8),
        eval_tasks=[{"prompt": f"held out {i}"} for i in range(32)],
        run_dir=tmp_path / "run",
        learning_rate=1e-2,
    )
    rows = {row["step"]: row for row in run.metrics}
    before, after = rows[0]["eval/reward"], rows[15]["eval/reward"]
    assert before < 0.1
    assert after > 0.5
    for step in range(1, 16):
        # the engine samples in bfloat16 what the trainer computes in bfloat16: the same weights, so nearly the same
        assert rows[step].get("logprob_diff_mean", 0.0) < 0.05  # absent where a step had nothing to learn from
        assert {v for g in run.groups(step) for t in g for turn in t.turns for v in turn.versions} == {step - 1}
    assert set(run.status) <= {"ok", "truncated"}
