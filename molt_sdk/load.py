"""Find what an agent file holds, for the command line: a policy, an environment, tasks, rewards, tools."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import Struct

from molt_sdk.decorators import EnvironmentMark, PolicyMark, mark_of
from molt_sdk.errors import ConfigError, MoltError


class AgentFile(Struct, frozen=True, kw_only=True):
    """What a file gives to ``fit``, ``rollout`` and ``check``, under the names of their arguments."""

    policy: Any = None
    """None: the built-in tool loop."""
    environment: Any = None
    tasks: Any = None
    """The module's ``tasks``, where the environment has none."""
    rewards: tuple[Any, ...] = ()
    tools: tuple[Any, ...] = ()

    @property
    def first(self) -> Any:
        """The first argument: the policy if there is one, else the environment."""
        return self.policy if self.policy is not None else self.environment

    @property
    def second(self) -> Any:
        """The second argument: the environment of a policy."""
        return self.environment if self.policy is not None else None


def shipped_agents() -> dict[str, Path]:
    """Agent files that come with the package, by name."""
    here = Path(__file__).parent
    folders = (here / "_agents", here.parent / "agents")  # in a wheel; in a checkout
    return {file.stem: file for folder in folders if folder.is_dir() for file in sorted(folder.glob("*.py"))}


def load_agent(name: str, policy: str | None = None) -> AgentFile:
    """What a file holds, given by path or by the name of a shipped agent.

    A file has a ``@molt.policy`` function, a ``@molt.environment`` class, or ``tasks`` (a list, or a function of split
    and seed), or several of these. The list ``rewards`` is used if there is one; the list ``tools`` belongs to the
    built-in loop, and is left to the file's own code where a policy or an environment is defined.

    Raises:
        ConfigError: no such file, it cannot be imported, or it does not say what is meant.
    """
    path = Path(name)
    if not path.is_file():
        shipped = shipped_agents()
        if name not in shipped:
            raise ConfigError(f"{name!r} is neither a file nor a shipped agent ({', '.join(shipped) or 'none found'})")
        path = shipped[name]
    members = vars(_import(path))
    policies = {k: v for k, v in members.items() if isinstance(mark_of(v), PolicyMark)}
    environments = {k: v for k, v in members.items() if isinstance(mark_of(v), EnvironmentMark)}
    if len(environments) > 1:
        raise ConfigError(f"{path} has several environments ({', '.join(environments)}); keep one per file")
    environment = next(iter(environments.values()), None)
    if policy is not None and policy not in policies:
        raise ConfigError(f"{path} has no policy {policy!r}; it has {', '.join(policies) or 'none'}")
    if policy is None and len(policies) > 1:
        raise ConfigError(f"{path} has several policies ({', '.join(policies)}); choose one with --policy NAME")
    chosen = policies[policy] if policy is not None else next(iter(policies.values()), None)
    tasks = None if isinstance(members.get("tasks"), ModuleType) else members.get("tasks")
    if chosen is None and environment is None and tasks is None:
        raise ConfigError(
            f"{path} has neither a @molt.policy function nor a @molt.environment class nor tasks = [...] for the "
            "built-in loop"
        )
    return AgentFile(
        policy=chosen,
        environment=environment,
        tasks=tasks if getattr(environment, "tasks", None) is None else None,
        rewards=_listed(members, "rewards"),
        tools=_listed(members, "tools") if chosen is None and environment is None else (),
    )


def _listed(members: dict[str, Any], name: str) -> tuple[Any, ...]:
    value = members.get(name)
    return tuple(value) if isinstance(value, list | tuple) else ()


def _import(path: Path) -> ModuleType:
    name = f"molt_agent_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and postponed annotations look their module up there
    try:
        spec.loader.exec_module(module)
    except MoltError:  # of a decorator, which names the place
        raise
    except SyntaxError as error:
        raise ConfigError(f"{error.filename or path}, line {error.lineno}: {error.msg}") from error
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == spec.origin]
        line = f", line {frames[-1].lineno}" if frames else ""
        raise ConfigError(f"{path}{line}: {type(error).__name__}: {error}") from error
    return module
