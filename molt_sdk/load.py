"""Find the policy and the environment in an agent file, for the command line."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from molt_sdk.decorators import EnvironmentMark, PolicyMark, mark_of
from molt_sdk.errors import ConfigError


def shipped_agents() -> dict[str, Path]:
    """Agent files that come with the package, by name."""
    here = Path(__file__).parent
    folders = (here / "_agents", here.parent / "agents")  # in a wheel; in a checkout
    return {file.stem: file for folder in folders if folder.is_dir() for file in sorted(folder.glob("*.py"))}


def load_agent(name: str, policy: str | None = None) -> tuple[Any, Any]:
    """(policy or environment, environment or None) of a file, given by path or by the name of a shipped agent.

    Raises:
        ConfigError: no such file, or it does not say which policy is meant.
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
    if chosen is None and environment is None:
        raise ConfigError(f"{path} has neither a @molt.policy function nor a @molt.environment class")
    return (chosen, environment) if chosen is not None else (environment, None)


def _import(path: Path) -> ModuleType:
    name = f"molt_agent_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and postponed annotations look their module up there
    spec.loader.exec_module(module)
    return module
