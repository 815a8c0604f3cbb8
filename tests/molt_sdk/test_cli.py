"""The command line, run as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import molt_sdk as molt
from molt_sdk.cli import main, read_config
from molt_sdk.fit_config import FitConfig
from molt_sdk.load import load_agent
from molt_sdk.testing import ScriptedEngine

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
    policy, environment = load_agent(agent)
    assert policy.__name__ == "talk"
    assert environment.__name__ == "Echo"
    Path(agent).write_text(AGENT + "\n@molt.policy\nasync def other(env, model): ...\n")
    with pytest.raises(molt.ConfigError, match="talk, other"):
        load_agent(agent)
    assert load_agent(agent, "other")[0].__name__ == "other"


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
    evaluated = run("eval", agent, *small, "--limit", "3")
    assert evaluated.returncode == 0, evaluated.stderr
    assert "reward/short" in evaluated.stdout
    rolled = run("rollout", agent, *small, "--limit", "2", "--group-size", "2", "--run-dir", str(tmp_path / "r"))
    assert rolled.returncode == 0, rolled.stderr
    assert len(list(molt.open_run(tmp_path / "r").trajectories())) == 4
