"""``molt-sdk check|fit|eval|rollout|show|export``: flags from the config structs, defaults from ``--config``."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import tyro
from msgspec import Struct
from rich.console import Console
from tyro.conf import Positional, arg

from molt_sdk.check import check
from molt_sdk.config import RolloutConfig
from molt_sdk.engines.torch_config import TorchEngineConfig
from molt_sdk.errors import ConfigError, EngineError, MoltError, RunFailedError, TrainingError
from molt_sdk.evaluate import Evaluation, rollout
from molt_sdk.fit import fit
from molt_sdk.fit_config import FitConfig
from molt_sdk.load import AgentFile, load_agent
from molt_sdk.run import Checkpoint, Run, open_run
from molt_sdk.show import show_evaluation, show_report, show_run, show_trajectory
from molt_sdk.tasks import TaskSource
from molt_sdk.types import SamplingParams

C = TypeVar("C", bound=Struct)

USAGE = """usage: molt-sdk COMMAND ...

  check [AGENT] --model DIR         say what training would meet, in seconds: no weights, no GPU
  fit AGENT --model DIR --steps N   train an agent file (or a shipped agent such as calculator)
  eval AGENT --model DIR            run it on held-out tasks and sum up
  rollout AGENT --model DIR         run it and keep the trajectories, without a trainer
  show RUN [ID]                     print a run, or one trajectory of it
  export RUN OUT                    make a model folder of a checkpoint, for transformers and vLLM

AGENT is a Python file with a @molt.policy function, a @molt.environment class, or both; or with tasks = [...] (or
def tasks(split, seed)) beside a policy or, for the built-in tool loop, alone; lists named rewards and tools are used.

Each command explains its flags with --help. --config run.toml sets them from a file."""


class RolloutCommandConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of ``molt-sdk eval`` and ``molt-sdk rollout``."""

    model: str = ""
    """Model directory in Hugging Face format."""
    group_size: int = 1
    """Trajectories per task."""
    limit: int | None = None
    """Most tasks."""
    seed: int = 0
    """Of the tasks and of sampling."""
    sampling: SamplingParams = SamplingParams()
    rollout: RolloutConfig = RolloutConfig()
    torch_engine: TorchEngineConfig = TorchEngineConfig()


class CheckCommandConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of ``molt-sdk check``."""

    model: str = ""
    """Model directory in Hugging Face format; no weights are read."""
    limit: int = 2
    """Most tasks; each is run twice."""
    seed: int = 0
    """Of the tasks."""
    sampling: SamplingParams = SamplingParams()
    rollout: RolloutConfig = RolloutConfig()


def main(argv: list[str] | None = None) -> None:
    """Entry point; exits with 2 for what the user can correct, 1 for a run that failed or a check with a problem."""
    arguments = sys.argv[1:] if argv is None else argv
    commands = {"check": _check, "fit": _fit, "eval": _eval, "rollout": _rollout, "show": _show, "export": _export}
    if arguments[:1] == ["--version"]:
        print(f"molt-sdk {version('molt-sdk')}")
        return
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        raise SystemExit(0 if arguments else 2)
    command = commands.get(arguments[0])
    if command is None:
        print(f"error: unknown command {arguments[0]!r}; use one of {', '.join(commands)}", file=sys.stderr)
        raise SystemExit(2)
    try:
        try:
            command(arguments[1:])
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is no surprise
    except BrokenPipeError:  # of `molt-sdk ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still unwritten goes there at exit
        raise SystemExit(141) from None  # as of a process that SIGPIPE ended
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # what was kept, and how to go on, is said already
    except MoltError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, RunFailedError | TrainingError | EngineError) else 2) from None


def _check(argv: list[str]) -> None:
    defaults, argv = _config_file(argv, CheckCommandConfig)

    def command(
        agent: Positional[Annotated[str, arg(metavar="AGENT")]] = "",
        config: Annotated[CheckCommandConfig, arg(name="")] = defaults,
        policy: str | None = None,
        split: str = "train",
    ) -> None:
        """Say what training this agent with this model would meet: prefix stability, tools, EOS ids, special tokens,
        how replies are read, and simulated episodes of the agent. Nothing is trained and no weights are read.

        Exits with 0 if it is usable, warnings included; with 1 if training would fail or learn from something wrong.

        Args:
            agent: Agent file, or the name of a shipped agent; without one the model alone is checked.
            policy: Which policy of the file, if it has several.
            split: Which tasks of the environment.
        """
        file = load_agent(agent, policy) if agent else AgentFile()
        report = check(
            file.first,
            file.second,
            tasks=file.tasks,
            rewards=file.rewards,
            tools=file.tools,
            model=config.model,
            limit=config.limit,
            seed=config.seed,
            split=split,
            sampling=config.sampling,
            config=config.rollout,
        )
        show_report(report, Console())
        if not report.ok:
            raise SystemExit(1)

    _call(command, argv, "molt-sdk check")


def _fit(argv: list[str]) -> None:
    defaults, argv = _config_file(argv, FitConfig)

    def command(
        agent: Positional[Annotated[str, arg(metavar="AGENT")]],
        config: Annotated[FitConfig, arg(name="")] = defaults,
        run_dir: Path | None = None,
        resume: bool = False,
        policy: str | None = None,
        eval_limit: int = 0,
    ) -> None:
        """Train an agent. --config FILE.toml sets any of these flags from a file.

        Args:
            agent: Agent file, or the name of a shipped agent.
            run_dir: Where the run is kept (default: runs/<time>-<policy>).
            resume: Go on with the run in run-dir if there is one.
            policy: Which policy of the file, if it has several.
            eval_limit: Held-out tasks to run before and after; 0 for none.
        """
        file = load_agent(agent, policy)
        run = fit(
            file.first,
            file.second,
            tasks=file.tasks,
            rewards=file.rewards,
            tools=file.tools,
            config=config,
            run_dir=run_dir,
            resume=resume,
            eval_tasks=_held_out(file, eval_limit, config.seed),
        )
        show_run(run, Console(), run.trajectories(limit=10))

    _call(command, argv, "molt-sdk fit")


def _eval(argv: list[str]) -> None:
    _run_tasks(argv, "eval", "eval")


def _rollout(argv: list[str]) -> None:
    _run_tasks(argv, "rollout", "train")


def _run_tasks(argv: list[str], name: str, default_split: str) -> None:
    defaults, argv = _config_file(argv, RolloutCommandConfig)

    def command(
        agent: Positional[Annotated[str, arg(metavar="AGENT")]],
        config: Annotated[RolloutCommandConfig, arg(name="")] = defaults,
        run_dir: Path | None = None,
        policy: str | None = None,
        split: str = default_split,
    ) -> None:
        """Run an agent without training it. --config FILE.toml sets any of these flags from a file.

        Exits with 1 if every trajectory failed.

        Args:
            agent: Agent file, or the name of a shipped agent.
            run_dir: Keep the trajectories there, for molt-sdk show.
            policy: Which policy of the file, if it has several.
            split: What is passed to tasks(split, seed).
        """
        file = load_agent(agent, policy)
        groups = rollout(
            file.first,
            file.second,
            tasks=file.tasks,
            rewards=file.rewards,
            tools=file.tools,
            model=config.model,
            group_size=config.group_size,
            limit=config.limit,
            seed=config.seed,
            split=split,
            run_dir=run_dir,
            sampling=config.sampling,
            config=config.rollout,
            torch_engine=config.torch_engine,
        )
        evaluation = Evaluation(groups=groups)
        show_evaluation(evaluation, Console())
        if run_dir is None:
            print("the trajectories were not kept; with --run-dir DIR, `molt-sdk show DIR ID` prints one")
        if sum(evaluation.failures.values()) == len(evaluation.trajectories):
            print("error: every trajectory failed", file=sys.stderr)
            raise SystemExit(1)

    _call(command, argv, f"molt-sdk {name}")


def _show(argv: list[str]) -> None:
    def command(
        run: Positional[Annotated[Path, arg(metavar="RUN")]],
        trajectory: Positional[Annotated[str, arg(metavar="ID")]] = "",
        limit: int = 10,
        status: str | None = None,
        step: int | None = None,
        split: str | None = None,
    ) -> None:
        """Print a run, or one trajectory of it.

        Args:
            run: Run directory.
            trajectory: Id of a trajectory; its first characters are enough.
            limit: Trajectories to list.
            status: List only trajectories that ended so, such as agent_error.
            step: List only those of the batch of this step.
            split: List only those of this split, such as eval.
        """
        found = open_run(run)
        if trajectory:
            show_trajectory(found.trajectory(trajectory), Console())
        else:
            show_run(found, Console(), found.trajectories(status=status, step=step, split=split, limit=limit))

    _call(command, argv, "molt-sdk show")


def _export(argv: list[str]) -> None:
    def command(
        run: Positional[Annotated[Path, arg(metavar="RUN")]],
        out: Positional[Annotated[Path, arg(metavar="OUT")]],
        step: int | None = None,
        best: bool = False,
    ) -> None:
        """Make a Hugging Face model folder of a checkpoint, for transformers and vLLM. `fit` makes one of its last
        weights itself, in RUN/model.

        Args:
            run: Run directory.
            out: Folder to make; it must not exist.
            step: Of which step; the newest by default.
            best: The checkpoint with the best evaluation.
        """
        checkpoint = _chosen(open_run(run), step, best)
        if out.exists():
            raise ConfigError(f"{out} exists; name a new folder")
        from trainer_backend.checkpoint import export_checkpoint

        try:
            export_checkpoint(checkpoint.path, out)
        except OSError as error:
            raise ConfigError(f"{out} cannot be written: {error}") from error
        print(f"{out}: the weights after step {checkpoint.step} (version {checkpoint.version})")

    _call(command, argv, "molt-sdk export")


def _chosen(run: Run, step: int | None, best: bool) -> Checkpoint:
    """Raises ConfigError when there is no such checkpoint."""
    if step is not None and best:
        raise ConfigError("--step and --best exclude each other")
    found = {checkpoint.step: checkpoint for checkpoint in run.checkpoints}
    if not found:
        raise ConfigError(f"{run.dir} has no checkpoint")
    if best and run.best is None:
        raise ConfigError(f"no checkpoint of {run.dir} was evaluated; choose one with --step: {_listed(found)}")
    if step is not None and step not in found:
        raise ConfigError(f"{run.dir} has no checkpoint of step {step}; there are those of {_listed(found)}")
    return run.best if best and run.best is not None else found[max(found) if step is None else step]


def _listed(steps: Iterable[int]) -> str:
    return ", ".join(map(str, steps))


def _call(command: Any, argv: list[str], prog: str) -> None:
    tyro.cli(command, args=argv, prog=prog)


def _config_file(argv: list[str], kind: type[C]) -> tuple[C, list[str]]:
    """Defaults from ``--config FILE`` and the arguments without it. Raises ConfigError naming the wrong key."""
    rest = list(argv)
    for i, argument in enumerate(rest):
        if argument == "--config" or argument.startswith("--config="):
            inline = argument.startswith("--config=")
            if not inline and i + 1 == len(rest):
                raise ConfigError("--config needs a TOML file")
            name = argument.removeprefix("--config=") if inline else rest[i + 1]
            del rest[i : i + (1 if inline else 2)]
            return read_config(Path(name), kind), rest
    return kind(), rest


def read_config(path: Path, kind: type[C]) -> C:
    """A config struct from a TOML file. Raises ConfigError naming the key, and the nearest known one."""
    import difflib
    import tomllib

    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        key = str(error).split("`")[1] if "unknown field" in str(error) else ""
        paths = {path.rpartition(".")[2]: path for path in reversed(_field_paths(kind))}
        near = difflib.get_close_matches(key, paths, 1) if key else []
        hint = f"; did you mean {paths[near[0]]!r}?" if near else ""
        raise ConfigError(f"--config {path}: {error}{hint}") from None


def _field_paths(kind: type[Struct], prefix: str = "") -> list[str]:
    """Dotted names of all fields."""
    paths: list[str] = []
    for field in msgspec.structs.fields(kind):
        paths.append(prefix + field.name)
        if isinstance(field.type, type) and issubclass(field.type, Struct):
            paths += _field_paths(field.type, f"{prefix}{field.name}.")
    return paths


def _held_out(file: AgentFile, limit: int, seed: int) -> Any:
    if not limit:
        return None
    tasks = file.tasks if file.tasks is not None else getattr(file.environment, "tasks", None)
    if not callable(tasks):
        raise ConfigError(
            "--eval-limit needs tasks(split, seed), a function of the file or a static method of its environment: a "
            "list does not say which tasks are held out"
        )
    return asyncio.run(TaskSource(tasks, split="eval", seed=seed, place="tasks").once(limit))
