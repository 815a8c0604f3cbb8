"""The command line, run as a user runs it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

import molt_sdk as molt
from molt_sdk.cli import main, read_config
from molt_sdk.fit_config import FitConfig
from molt_sdk.load import load_agent
from molt_sdk.show import show_run
from molt_sdk.testing import ScriptedEngine
from tests.training import fit, state_hash

AGENT = """
import molt_sdk as molt

@molt.environment
class Echo:
    @staticmethod
    def tasks(split="train", seed=0):
        return [molt.Task(f"{split} {i}", str(i)) for i in range(4)]

    @molt.reward
    def short(self, trajectory):
        return 1.0 / (1 + len(trajectory.text))

@molt.policy
async def talk(env: Echo, model: molt.Model) -> None:
    await model.chat(env.task.prompt, max_tokens=4)
"""


@pytest.fixture
def agent(tmp_path: Path) -> str:
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    return str(path)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "molt_sdk", *arguments], capture_output=True, text=True, timeout=100, check=False
    )


def test_help_lists_the_commands_and_needs_no_torch() -> None:
    code = "import sys; from molt_sdk.cli import main\ntry: main(['fit', '--help'])\nexcept SystemExit: pass\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print('torch' in sys.modules, 'transformers' in sys.modules)"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False False"
    for name in msgspec.structs.fields(FitConfig):
        if name.name not in ("sampling", "rollout", "trainer", "torch_engine"):
            assert f"--{name.name.replace('_', '-')}" in done.stdout
    assert "--trainer.learning-rate" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["fti"], 2, "unknown command 'fti'"),
        (["fit", "nope.py", "--steps", "1"], 2, "neither a file nor a shipped agent"),
        (["fit", "calculator", "--model", "/no/model", "--steps", "1"], 2, "/no/model"),
        (["fit", "calculator", "--trainer.lerning-rate", "1"], 2, "--trainer.learning-rate"),
        (["show", "/no/run"], 2, "/no/run"),
    ],
)
def test_mistakes_are_one_clear_line_and_a_nonzero_exit(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    assert stop.value.code == code
    assert words in captured.err + captured.out
    assert "Traceback" not in captured.err


def test_a_config_file_sets_the_flags_and_unknown_keys_name_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 3\n[trainer]\nlearning_rate = 1e-4\n[sampling]\nmax_tokens = 9\n")
    config = read_config(file, FitConfig)
    assert (config.steps, config.trainer.learning_rate, config.sampling.max_tokens) == (3, 1e-4, 9)
    file.write_text("[trainer]\nlerning_rate = 1e-4\n")
    with pytest.raises(molt.ConfigError, match=r"lerning_rate.*\$.trainer.*did you mean 'trainer.learning_rate'"):
        read_config(file, FitConfig)
    file.write_text("steps = 'three'\n")
    with pytest.raises(molt.ConfigError, match=r"\$.steps"):
        read_config(file, FitConfig)


def test_an_agent_file_must_say_which_policy(agent: str) -> None:
    file = load_agent(agent)
    assert (file.first.__name__, file.second.__name__) == ("talk", "Echo")
    assert (file.tasks, file.rewards, file.tools) == (None, (), ())
    Path(agent).write_text(AGENT + "\n@molt.policy\nasync def other(env, model): ...\n")
    with pytest.raises(molt.ConfigError, match="talk, other"):
        load_agent(agent)
    assert load_agent(agent, "other").policy.__name__ == "other"


ROWS = """
import molt_sdk as molt
tasks = [{"prompt": "What is 2 + 2?", "answer": "4"}, {"prompt": "What is 3 + 3?", "answer": "6"}]
"""
POLICY = """
@molt.policy
async def solver(task: molt.Task, model: molt.Model) -> float:
    return float((await model.chat(task.prompt)).text == task.answer)
"""
LOOP = """
def correct(task, trajectory):
    return trajectory.text == task.answer

def add(a: int, b: int) -> int:
    \"\"\"Add.\"\"\"
    return a + b

rewards = [correct]
tools = [add]
"""
SPLITS = """
import molt_sdk as molt
def tasks(split, seed):
    return [{"prompt": f"{split} {seed}", "answer": "4"}]
"""
FAILS = """
@molt.policy
async def solver(task: molt.Task, model: molt.Model) -> float:
    await model.chat(task.prompt)
    raise ValueError("no idea")
"""


@pytest.fixture
def scripted(pocket: str, monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """The engine that ``molt-sdk eval`` and ``rollout`` use in place of the model."""
    engine = ScriptedEngine(pocket, lambda prompt, sampling: "4")

    def rollout(*arguments: Any, torch_engine: Any, **keywords: Any) -> Any:
        return molt.rollout(*arguments, engine=engine, **keywords)

    monkeypatch.setattr("molt_sdk.cli.rollout", rollout)
    return engine


@pytest.mark.parametrize(
    ("source", "reward"), [(ROWS + POLICY, "0.5"), (ROWS + LOOP, "0.5"), (SPLITS + POLICY, "1"), (SPLITS + LOOP, "1")]
)
def test_an_agent_file_may_hold_tasks_and_rewards(
    source: str, reward: str, tmp_path: Path, pocket: str, scripted: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "agent.py"
    path.write_text(source)
    main(["eval", str(path), "--model", pocket, "--seed", "7"])
    shown = capsys.readouterr().out
    assert [line.split() for line in shown.splitlines() if line.split()[:1] == ["reward"]] == [["reward", reward]]
    assert "with --run-dir DIR, `molt-sdk show DIR ID` prints one" in shown
    prompts = [bytes(i for i in request.prompt_token_ids if i < 256).decode() for request in scripted.requests]
    assert all(("eval 7" in prompt) == (source.startswith(SPLITS)) for prompt in prompts)
    assert all(('"add"' in prompt or "add(" in prompt) == (LOOP in source) for prompt in prompts)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\n", "neither a @molt.policy function nor a @molt.environment class nor tasks = [...]"),
        ("import molt_sdk\n\ndef f(:\n", "agent.py, line 3: "),
        ("import molt_sdk\nimport no_such_module\n", "agent.py, line 2: ModuleNotFoundError: No module named 'no_su"),
        ("def f():\n    return 1 / 0\n\nf()\n", "agent.py, line 2: ZeroDivisionError: division by zero"),
        (ROWS + "@molt.policy\ndef solver(task, model): ...\n", "solver"),
    ],
)
def test_a_broken_agent_file_is_one_line_with_its_place(
    source: str, words: str, tmp_path: Path, pocket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "agent.py"
    path.write_text(source)
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(path), "--model", pocket])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_held_out_tasks_need_a_function_of_the_split(
    tmp_path: Path, pocket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "agent.py"
    path.write_text(ROWS + POLICY)
    with pytest.raises(SystemExit):
        main(["fit", str(path), "--model", pocket, "--steps", "1", "--eval-limit", "1"])
    assert "--eval-limit needs tasks(split, seed)" in capsys.readouterr().err


def test_an_evaluation_where_everything_fails_says_why_and_exits_with_1(
    tmp_path: Path, pocket: str, scripted: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "agent.py"
    path.write_text(ROWS + FAILS)
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(path), "--model", pocket])
    assert stop.value.code == 1
    assert "every trajectory failed" in capsys.readouterr().err
    path.write_text(ROWS + FAILS.replace("raise", "assert task.answer == '4'; return 1.0; raise"))
    main(["eval", str(path), "--model", pocket])  # one of two
    assert len(scripted.requests) == 4


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "molt_sdk", "eval", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def metrics_shown(run: molt.Run) -> list[str]:
    out = io.StringIO()
    show_run(run, Console(file=out, width=80), [])
    return out.getvalue().splitlines()


def test_metrics_are_shown_whole_in_80_columns_and_only_if_there_are_some(
    pocket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    molt.rollout(tasks=[{"prompt": "q"}], engine=ScriptedEngine(pocket, ["a"]), run_dir=tmp_path / "run")
    run = molt.open_run(tmp_path / "run")
    assert metrics_shown(run)[1] == "trajectories: 1 ok"
    row = {"step": 100, "reward": 0.12345, "loss": -1.2345e-05, "grad_norm": 0.12345, "tokens": 123456, "seconds": 12.3}
    row |= {"staleness": 1, "failures": 100}
    monkeypatch.setattr(molt.Run, "metrics", [row])
    assert metrics_shown(run)[1].split() == [*row]
    monkeypatch.setattr(molt.Run, "metrics", [row, {"step": 100, "eval/reward": 0.12345}])
    names, numbers, evaluation = metrics_shown(run)[1:4]
    assert names.split() == [*row, "eval/reward"]
    assert numbers.split() == ["100", "0.1235", "-1.234e-05", "0.1235", "123456", "12.3", "1", "100", "-"]
    assert evaluation.split() == ["100", *"-" * 7, "0.1235"]


def test_show_prints_hostile_text_as_text(pocket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine(pocket, ["\x1b[2J\x1b]0;owned\x07[bold]not markup[/bold]\u202egnp.exe"])
    molt.rollout(
        tasks=[{"prompt": "[red]q[/red]"}], engine=engine, run_dir=tmp_path / "run", rewards=[lambda task, t: 1.0]
    )
    identity = next(iter(molt.open_run(tmp_path / "run").trajectories())).id
    main(["show", str(tmp_path / "run")])
    main(["show", str(tmp_path / "run"), identity[:6]])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\u202e" not in shown
    assert "[bold]not markup[/bold]" in shown
    assert "[red]q[/red]" in shown
    assert "exact" in shown


def test_export_makes_a_model_of_a_checkpoint(pocket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    rewards = iter([0.0, 1.0, 0.5])  # evaluations before the first, after the second and after the last step
    held_out = [{"prompt": "held out"}]

    def reward(task: molt.Task, t: molt.Trajectory) -> float:
        return next(rewards) if task.prompt == "held out" else float(len(t.text) % 2)

    config = molt.FitConfig(eval_every=2)
    fitted = fit(pocket, tmp_path / "run", steps=3, rewards=[reward], eval_tasks=held_out, config=config)
    assert [c.step for c in fitted.checkpoints] == [2, 3]
    for flags, step in ([], 3), (["--best"], 2), (["--step", "2"], 2):
        out = tmp_path / f"model{'-'.join(flags)}"
        main(["export", str(fitted.dir), str(out), *flags])
        assert f"the weights after step {step} (version " in capsys.readouterr().out
        AutoModelForCausalLM.from_pretrained(out)
    assert state_hash(tmp_path / "model") == state_hash(fitted.dir / "model")
    assert state_hash(tmp_path / "model--best") == state_hash(tmp_path / "model--step-2")
    assert state_hash(tmp_path / "model--best") != state_hash(tmp_path / "model")
    molt.rollout(tasks=held_out, engine=ScriptedEngine(pocket, ["a"]), run_dir=tmp_path / "other")
    for folder, flags, message in (
        ("run", ["--step", "1"], "has no checkpoint of step 1; there are those of 2, 3"),
        ("run", ["--step", "2", "--best"], "exclude each other"),
        ("run", [], "model exists; name a new folder"),
        ("other", [], "has no checkpoint"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["export", str(tmp_path / folder), str(tmp_path / "model"), *flags])
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_fit_eval_rollout_and_show_work_from_the_shell(agent: str, pocket: str, tmp_path: Path) -> None:
    small = ["--model", pocket, "--sampling.max-tokens", "4"]
    folder = str(tmp_path / "run")
    fitted = run(
        *("fit", agent, *small, "--steps", "2", "--group-size", "2", "--groups-per-step", "1"),
        *("--run-dir", folder, "--eval-limit", "2", "--trainer.learning-rate", "1e-3"),
    )
    assert fitted.returncode == 0, fitted.stderr
    assert "step 2/2" in fitted.stderr
    found = molt.open_run(folder)
    assert sorted(found.batches) == [1, 2]
    shown = run("show", folder)
    assert shown.returncode == 0
    assert "checkpoint: step 2" in shown.stdout
    assert f"trained model: {folder}" in shown.stdout.replace("\n", "")
    evaluated = run("eval", agent, *small, "--limit", "3")
    assert evaluated.returncode == 0, evaluated.stderr
    assert "reward/short" in evaluated.stdout
    rolled = run("rollout", agent, *small, "--limit", "2", "--group-size", "2", "--run-dir", str(tmp_path / "r"))
    assert rolled.returncode == 0, rolled.stderr
    assert len(list(molt.open_run(tmp_path / "r").trajectories())) == 4
