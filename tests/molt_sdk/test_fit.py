"""The loop: rollouts, batches, versions, resume, and what happens when things go wrong."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import molt_sdk as molt
from molt_sdk.testing import Script, ScriptedEngine
from tests.training import state_hash
from trainer_backend.config import TrainerConfig

QUESTIONS = [{"prompt": f"question {i}"} for i in range(5)]


def even(task: molt.Task, trajectory: molt.Trajectory) -> bool:
    return len(trajectory.text) % 2 == 0


def chatter(prompt: list[int], sampling: molt.SamplingParams) -> str:
    """A deterministic engine: what it says depends on the request alone."""
    dice = random.Random(sampling.seed)
    return "".join(dice.choice("ab") for _ in range(dice.randint(1, 4)))


def fit(model: str, run_dir: Path, /, **changes: Any) -> molt.Run:
    arguments: dict[str, Any] = {
        "tasks": QUESTIONS,
        "rewards": [even],
        "model": model,
        "engine": ScriptedEngine(model, chatter),
        "steps": 3,
        "group_size": 4,
        "groups_per_step": 2,
        "max_staleness": 0,
        "learning_rate": 1e-3,
        "run_dir": run_dir,
    }
    return molt.fit(**arguments | changes)


def weights_hash(run: molt.Run) -> str:
    return state_hash(run.checkpoints[-1].path)


def test_two_runs_with_a_deterministic_engine_give_the_same_bits(pocket: str, tmp_path: Path) -> None:
    first, second = fit(pocket, tmp_path / "a"), fit(pocket, tmp_path / "b")
    assert weights_hash(first) == weights_hash(second)
    third = fit(pocket, tmp_path / "c", seed=1)
    assert weights_hash(third) != weights_hash(first)


def test_without_staleness_no_rollout_starts_before_the_weights_of_the_last_step_are_live(
    pocket: str, tmp_path: Path
) -> None:
    engine = ScriptedEngine(pocket, chatter)
    seen: list[int] = []

    def reply(prompt: list[int], sampling: molt.SamplingParams) -> str:
        seen.append(engine.version)
        return chatter(prompt, sampling)

    engine._function = reply
    run = fit(pocket, tmp_path / "run", engine=engine, steps=3)
    # 2 groups x 4 trajectories of one call each per step; what a step trains was sampled by the weights before it
    assert seen[:24] == [0] * 8 + [1] * 8 + [2] * 8
    assert engine.updates == [0, 1, 2, 3]
    for step in (1, 2, 3):
        assert {v for g in run.groups(step) for t in g for turn in t.turns for v in turn.versions} == {step - 1}


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_no_token_older_than_the_bound_is_trained_on(pocket: str, tmp_path: Path, max_staleness: int) -> None:
    run = fit(pocket, tmp_path / "run", steps=6, max_staleness=max_staleness)
    staleness = []
    for step in range(1, 7):
        versions = [v for g in run.groups(step) for t in g for turn in t.turns for v in turn.versions]
        staleness.append(step - 1 - min(versions))
    assert max(staleness) <= max_staleness
    assert max(staleness) > 0, "rollouts never overlapped with training"


def test_every_step_commits_its_batch_and_reports_its_numbers(pocket: str, tmp_path: Path) -> None:
    run = fit(pocket, tmp_path / "run", eval_tasks=QUESTIONS[:3])
    assert sorted(run.batches) == [1, 2, 3]
    assert all(len(ids) == 8 for ids in run.batches.values())
    rows = {row["step"]: row for row in run.metrics}
    assert list(rows) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        rewards = [t.reward for g in run.groups(step) for t in g]
        assert rows[step]["reward"] == pytest.approx(sum(map(float, rewards)) / 8)
        tokens = sum(len(turn.completion_token_ids) for g in run.groups(step) for t in g for turn in t.turns)
        assert rows[step]["tokens"] == rows[step]["trained_tokens"] == tokens
        assert rows[step]["version"] == step
        assert 0 < rows[step]["seconds/train"] < rows[step]["seconds"]
    assert "eval/reward" in rows[0]
    assert "eval/reward" in rows[3]
    assert "eval/reward" not in rows[1]
    assert len(list(run.trajectories(split="eval"))) == 6
    assert molt.open_run(run.dir).metrics == run.metrics


def test_a_resumed_run_continues_from_the_saved_weights_and_the_stream(pocket: str, tmp_path: Path) -> None:
    whole = fit(pocket, tmp_path / "whole", steps=4)
    fit(pocket, tmp_path / "parts", steps=2)
    engine = ScriptedEngine(pocket, chatter)
    run = fit(pocket, tmp_path / "parts", steps=4, resume=True, engine=engine)
    assert engine.updates == [2, 3, 4]
    assert sorted(run.batches) == [1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        assert [g.position for g in run.groups(step)] == [g.position for g in whole.groups(step)]
        assert [t.text for g in run.groups(step) for t in g] == [t.text for g in whole.groups(step) for t in g]
    assert run.checkpoints[-1].step == 4
    assert weights_hash(run) == weights_hash(whole)


def test_resuming_with_other_settings_is_refused(pocket: str, tmp_path: Path) -> None:
    fit(pocket, tmp_path / "run", steps=1)
    with pytest.raises(molt.ConfigError, match=r"group_size was 4 and is 2"):
        fit(pocket, tmp_path / "run", steps=2, group_size=2, resume=True)
    with pytest.raises(molt.StoreError, match="another run"):
        fit(pocket, tmp_path / "run", steps=2)


def test_a_run_without_clipping_can_be_resumed(pocket: str, tmp_path: Path) -> None:
    config = molt.FitConfig(trainer=TrainerConfig(grad_clip=float("inf")))
    fit(pocket, tmp_path / "run", steps=1, config=config)
    assert sorted(fit(pocket, tmp_path / "run", steps=2, config=config, resume=True).batches) == [1, 2]


def test_the_first_weights_go_to_an_engine_that_the_user_made(pocket: str, tmp_path: Path) -> None:
    """It may hold those of an earlier run, at whatever version."""
    engine = ScriptedEngine(pocket, chatter)
    engine.version = 7
    run = fit(pocket, tmp_path / "run", engine=engine, steps=1)
    assert {v for g in run.groups(1) for t in g for turn in t.turns for v in turn.versions} == {0}


def test_resume_starts_a_run_where_there_is_none(pocket: str, tmp_path: Path) -> None:
    assert sorted(fit(pocket, tmp_path / "new", steps=1, resume=True).batches) == [1]


def test_failures_are_counted_and_left_out_and_the_run_goes_on(pocket: str, tmp_path: Path) -> None:
    @molt.policy
    async def moody(task: molt.Task, model: molt.Model) -> float:
        reply = await model.chat(task.prompt)
        if len(reply.text) == 1:
            raise KeyError("one letter")
        return float(len(reply.text) % 2)

    run = fit(pocket, tmp_path / "run", tasks=None, rewards=(), policy_or_env=moody, env_or_tasks=QUESTIONS, steps=2)
    failed = list(run.trajectories(status="agent_error"))
    assert failed
    assert all("KeyError: 'one letter'" in str(t.error) and t.reward is None for t in failed)
    trained = {i for ids in run.batches.values() for i in ids}
    assert not trained & {t.id for t in failed}
    assert run.metrics[-1]["failed/agent_error"] == pytest.approx(len(failed), abs=8)


def test_a_run_in_which_everything_fails_stops_with_the_root_error(pocket: str, tmp_path: Path) -> None:
    @molt.policy
    async def broken(task: molt.Task, model: molt.Model) -> float:
        raise ZeroDivisionError("the root error")

    config = molt.FitConfig(max_failed_groups=3)
    with pytest.raises(molt.RunFailedError, match="ZeroDivisionError: the root error"):
        fit(
            pocket,
            tmp_path / "run",
            policy_or_env=broken,
            env_or_tasks=QUESTIONS,
            tasks=None,
            rewards=(),
            config=config,
        )
    assert molt.open_run(tmp_path / "run").status["agent_error"] >= 12


def test_a_group_that_fails_frees_its_slot_and_the_next_one_takes_its_place(pocket: str, tmp_path: Path) -> None:
    @molt.policy
    async def picky(task: molt.Task, model: molt.Model) -> float:
        if task.prompt == "question 2":
            raise KeyError("always fails")
        return float(len((await model.chat(task.prompt)).text) % 2)

    run = fit(pocket, tmp_path / "run", policy_or_env=picky, env_or_tasks=QUESTIONS, tasks=None, rewards=(), steps=6)
    assert sorted(run.batches) == [1, 2, 3, 4, 5, 6]
    assert all(t.task.prompt != "question 2" for step in run.batches for g in run.groups(step) for t in g)
    assert run.metrics[-1]["dropped/group without a scored trajectory"] >= 2


def test_the_stream_may_end_before_the_steps_do(pocket: str, tmp_path: Path) -> None:
    run = fit(pocket, tmp_path / "run", tasks=iter(QUESTIONS), steps=9)
    # 5 groups: two full batches and a last one of a single group
    assert [len(ids) for ids in run.batches.values()] == [8, 8, 4]


def test_what_an_engine_reports_wrongly_is_refused_not_repaired(pocket: str, tmp_path: Path) -> None:
    def reply(prompt: list[int], sampling: molt.SamplingParams) -> Script:
        bad = float("nan") if random.Random(sampling.seed).random() < 0.3 else -0.5
        return Script(token_ids=[97, 98], logprobs=[-0.1, bad], finish_reason="length")

    run = fit(pocket, tmp_path / "run", engine=ScriptedEngine(pocket, reply), steps=2, rewards=[lambda task, t: 1.0])
    refused = list(run.trajectories(status="infra_error"))
    assert refused
    assert all("position 1" in str(t.error) and "nan" in str(t.error) for t in refused)


BAD_INPUT: dict[str, tuple[dict[str, Any], type[molt.MoltError], str]] = {
    "model path": ({"model": "/no/such/model", "engine": "torch"}, molt.ModelPathError, "/no/such/model"),
    "no model": ({"model": None, "engine": "torch"}, molt.ConfigError, "model="),
    "empty tasks": ({"tasks": []}, molt.ConfigError, "tasks is empty"),
    "no tasks": ({"tasks": None}, molt.ConfigError, "no tasks"),
    "row without a prompt": ({"tasks": [{"question": "x"}]}, molt.ConfigError, 'tasks\\[0\\].*"prompt"'),
    "no reward": ({"rewards": ()}, molt.ConfigError, "no reward source"),
    "max_tokens": ({"sampling": molt.SamplingParams(max_tokens=9999)}, molt.ConfigError, "max_tokens=9999"),
    "temperature": ({"sampling": molt.SamplingParams(temperature=0.0)}, molt.ConfigError, "temperature=0.0"),
    "top_p": ({"sampling": molt.SamplingParams(top_p=0.9)}, molt.ConfigError, "top_p=0.9"),
    "steps": ({"steps": None}, molt.ConfigError, "steps"),
    "group_size": ({"group_size": 0}, molt.ConfigError, "group_size=0"),
    "one sibling": ({"group_size": 1}, molt.ConfigError, "group_size=1: rewards are compared"),
    "engine name": ({"engine": "torhc"}, molt.ConfigError, "did you mean 'torch'"),
    "contradiction": ({"config": molt.FitConfig(group_size=3)}, molt.ConfigError, "group_size=4 contradicts"),
    "two environments": ({"policy_or_env": int}, molt.DefinitionError, "not an environment"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_an_error_before_anything_is_loaded(
    pocket: str, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loading(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(sys.modules["molt_sdk.fit"]._Job, "run", loading)  # the name fit is the function
    changes, error, message = BAD_INPUT[case]
    with pytest.raises(error, match=message):
        fit(pocket, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists(), "a refused call leaves nothing behind"


def test_a_policy_annotated_to_return_nothing_is_no_reward_source(pocket: str, tmp_path: Path) -> None:
    @molt.policy
    async def silent(task: molt.Task, model: molt.Model) -> None:
        await model.chat(task.prompt)

    with pytest.raises(molt.ConfigError, match="silent"):
        fit(pocket, tmp_path / "run", policy_or_env=silent, env_or_tasks=QUESTIONS, tasks=None, rewards=())


@pytest.mark.anyio
async def test_fit_inside_a_running_loop_names_its_twin(pocket: str, tmp_path: Path) -> None:
    with pytest.raises(molt.MoltError, match="await afit"):
        fit(pocket, tmp_path / "run")


@pytest.mark.anyio
async def test_afit_works_inside_a_running_loop_and_leaves_no_task_behind(pocket: str, tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    run = await molt.afit(
        tasks=QUESTIONS,
        rewards=[even],
        model=pocket,
        engine=ScriptedEngine(pocket, chatter),
        steps=1,
        group_size=2,
        groups_per_step=1,
        run_dir=tmp_path / "run",
    )
    assert sorted(run.batches) == [1]
    assert asyncio.all_tasks() == before


@pytest.mark.anyio
async def test_cancelling_stops_everything_and_saves_the_last_completed_weights(pocket: str, tmp_path: Path) -> None:
    second_step = anyio.Event()
    engine = ScriptedEngine(pocket, chatter)

    def reply(prompt: list[int], sampling: molt.SamplingParams) -> Script:
        if engine.version == 2:
            second_step.set()
            return Script(text="ab", delay=3600)
        return Script(text=chatter(prompt, sampling))

    engine._function = reply
    async with anyio.create_task_group() as group:

        async def run() -> None:
            await molt.afit(
                tasks=QUESTIONS,
                rewards=[even],
                model=pocket,
                engine=engine,
                steps=50,
                group_size=4,
                groups_per_step=2,
                max_staleness=0,
                run_dir=tmp_path / "run",
            )

        group.start_soon(run)
        await second_step.wait()
        group.cancel_scope.cancel()
    assert engine.open_requests == 0
    found = molt.open_run(tmp_path / "run")
    assert [(c.step, c.version) for c in found.checkpoints] == [(2, 2)]


@pytest.mark.slow
def test_ctrl_c_ends_the_process_quickly_and_the_run_can_be_resumed(pocket: str, tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import signal, time
        import molt_sdk as molt
        from molt_sdk.testing import ScriptedEngine

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell starts its children without it

        @molt.tool
        def nap(seconds: int) -> str:
            "Sleep."
            time.sleep(600)
            return "awake"

        def replies(prompt, sampling):
            if engine.version < 2:
                return "a" if sampling.seed % 2 else "bb"
            print("hanging", flush=True)
            return '<tool_call>{{"name": "nap", "arguments": {{"seconds": 600}}}}</tool_call>'

        engine = ScriptedEngine({pocket!r}, replies)
        molt.fit(tasks=[{{"prompt": "q"}}], tools=[nap], rewards=[lambda task, t: len(t.text)], model={pocket!r},
                 engine=engine, steps=9, group_size=2, groups_per_step=1, max_staleness=0,
                 run_dir={str(tmp_path / "run")!r})
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "hanging"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors
    assert [c.version for c in molt.open_run(tmp_path / "run").checkpoints] == [2]


def test_what_tasks_raise_is_named_and_an_endless_evaluation_is_refused(
    pocket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield {"prompt": "one"}
        raise KeyError("row two")

    with pytest.raises(molt.DefinitionError, match=r"eval_tasks raised KeyError after 1 tasks.*row two"):
        fit(pocket, tmp_path / "run", eval_tasks=broken())
    monkeypatch.setattr("molt_sdk.tasks.MOST_TASKS", 100)
    with pytest.raises(molt.ConfigError, match="eval_tasks gave more than 100 tasks"):
        fit(pocket, tmp_path / "run", eval_tasks=({"prompt": str(i)} for i in itertools.count()))
    with pytest.raises(molt.ConfigError, match=r'tasks\[0\]: "prompt".*role'):
        fit(pocket, tmp_path / "run", tasks=[molt.Task([{"content": "no role"}])])  # type: ignore[list-item]


def test_a_tracker_that_fails_does_not_end_the_run(pocket: str, tmp_path: Path) -> None:
    class Down:
        logged = 0

        def start(self, run: molt.Run) -> None: ...

        def log(self, step: int, metrics: Any) -> None:
            self.logged += 1
            raise ConnectionError("the service is down")

        def finish(self) -> None:
            raise ConnectionError("still down")

    tracker = Down()
    run = fit(pocket, tmp_path / "run", trackers=[tracker], steps=2)
    assert sorted(run.batches) == [1, 2]
    assert tracker.logged == 2


def test_a_save_that_fails_names_the_path_and_earlier_checkpoints_stay(
    pocket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up between two checkpoints."""
    from trainer_backend.trainer import Trainer

    save = Trainer.save

    def full(self: Trainer, directory: Any, **options: Any) -> None:
        if "step-2" in str(directory):
            raise OSError(28, "No space left on device")
        save(self, directory, **options)

    monkeypatch.setattr(Trainer, "save", full)
    with pytest.raises(molt.TrainingError, match=r"after step 2, .*step-2 was not saved: .*No space left"):
        fit(pocket, tmp_path / "run", config=molt.FitConfig(checkpoint_every=1))
    assert [c.step for c in molt.open_run(tmp_path / "run").checkpoints] == [1]
    monkeypatch.undo()
    (tmp_path / "run" / "checkpoints" / ".step-2.new-01234567").mkdir()
    config = molt.FitConfig(checkpoint_every=1)
    assert sorted(fit(pocket, tmp_path / "run", config=config, resume=True).batches) == [1, 2, 3]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


@pytest.mark.anyio
async def test_a_step_that_completes_while_the_run_is_cancelled_is_reported_and_saved(
    pocket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer_backend.trainer import StepResult, Trainer

    loop, scope, original = asyncio.get_running_loop(), anyio.CancelScope(), Trainer.step

    def step(self: Trainer, groups: Any, **options: Any) -> StepResult:
        result = original(self, groups, **options)
        if result.version == 2:
            loop.call_soon_threadsafe(scope.cancel)  # runs before the result is handed over
        return result

    monkeypatch.setattr(Trainer, "step", step)
    with scope:
        await molt.afit(
            tasks=QUESTIONS,
            rewards=[even],
            model=pocket,
            engine=ScriptedEngine(pocket, chatter),
            steps=9,
            group_size=4,
            groups_per_step=2,
            max_staleness=0,
            learning_rate=1e-3,
            run_dir=tmp_path / "run",
        )
    assert scope.cancelled_caught
    run = molt.open_run(tmp_path / "run")
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert [(c.step, c.version) for c in run.checkpoints] == [(2, 2)]


def test_fit_leaves_the_programs_excepthook_alone(pocket: str, tmp_path: Path) -> None:
    before = sys.excepthook
    fit(pocket, tmp_path / "run", steps=1)
    assert sys.excepthook is before


def test_a_script_that_ran_out_is_one_line(pocket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(molt.RunFailedError):
        fit(pocket, tmp_path / "run", engine=ScriptedEngine(pocket, ["a"]), steps=9)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("first ")]
    assert len(lines) == 1
    assert "the script has 1 replies, and one more was asked for" in lines[0]


def test_rewards_of_forks_alone_are_no_reward_of_the_trajectory(pocket: str, tmp_path: Path) -> None:
    @molt.policy
    async def debate(task: molt.Task, model: molt.Model):  # type: ignore[no-untyped-def]
        pro = model.fork("pro")
        await pro.chat(task.prompt)
        pro.reward(1.0)

    with pytest.raises(molt.RunFailedError, match="agents pro have rewards, but the trajectory has none"):
        fit(pocket, tmp_path / "run", policy_or_env=debate, env_or_tasks=QUESTIONS, tasks=None, rewards=())


def test_a_mistyped_keyword_suggests_the_right_one(pocket: str, tmp_path: Path) -> None:
    for wrong, hint in (
        ({"lr": 1.0}, r"'lr'; did you mean learning_rate=\?"),
        ({"max_tokens": 1}, r"write sampling=SamplingParams\(max_tokens=\.\.\.\)"),
        ({"checkpoint_every": 1}, r"write config=FitConfig\(checkpoint_every=\.\.\.\)"),
        ({"sampling_from": "config"}, r"write config=FitConfig\(rollout=RolloutConfig\(sampling_from=\.\.\.\)\)"),
    ):
        with pytest.raises(molt.ConfigError, match=rf"fit\(\).*{hint}"):
            fit(pocket, tmp_path / "run", **wrong)
    with pytest.raises(molt.ConfigError, match=r"write config=RolloutConfig\(sampling_from=\.\.\.\)"):
        molt.evaluate(even, sampling_from="config")  # type: ignore[call-arg]
    with pytest.raises(molt.ConfigError, match=r"fit\(\).*'step'; did you mean steps=\?"):
        fit(pocket, tmp_path / "run", step=3)


def test_what_does_not_certify_is_recorded_and_never_trained(
    pocket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certificates of the first sibling of each group fail, as they would for a torn record."""
    from molt_sdk import certificate

    certify = certificate.certify

    def strict(trajectory: molt.Trajectory) -> Any:
        found = certify(trajectory)
        return msgspec.structs.replace(found, problems=("torn",)) if trajectory.index == 0 else found

    monkeypatch.setattr(certificate, "certify", strict)
    config = molt.FitConfig(max_uncertified=0.5)
    run = fit(pocket, tmp_path / "run", steps=2, config=config)
    assert {t.index for step in run.batches for g in run.groups(step) for t in g} == {1, 2, 3}
    assert {t.index for t in run.trajectories(split="train")} == {0, 1, 2, 3}
    assert run.metrics[-1]["dropped/uncertified trajectory"] == 4
    with pytest.raises(molt.RunFailedError, match="failed their certificate"):
        fit(pocket, tmp_path / "strict", steps=9, config=molt.FitConfig(max_uncertified=0.0))
