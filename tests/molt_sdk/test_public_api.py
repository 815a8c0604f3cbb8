"""The executable form of the public surface: what a user can import, and what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import molt_sdk as molt
import molt_sdk.testing
from molt_sdk.testing import ScriptedEngine


def imported_names() -> set[str]:
    """Names that ``molt_sdk/__init__.py`` imports for its users."""
    tree = ast.parse(Path(molt.__file__).read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def test_public_names_are_sorted_importable_and_complete() -> None:
    assert molt.__all__ == sorted(molt.__all__)
    assert len(set(molt.__all__)) == len(molt.__all__)
    assert set(molt.__all__) == imported_names()
    assert all(hasattr(molt, name) for name in molt.__all__)


def test_testing_names_are_importable() -> None:
    assert {"Script", "ScriptedEngine", "pocket_model"} <= set(molt_sdk.testing.__all__)
    assert all(hasattr(molt_sdk.testing, name) for name in molt_sdk.testing.__all__)


def test_every_error_is_a_molt_error_and_none_has_the_name_of_a_builtin() -> None:
    import builtins

    errors = [getattr(molt, name) for name in molt.__all__ if name.endswith("Error")]
    assert len(errors) > 10
    assert all(issubclass(error, molt.MoltError) for error in errors)
    assert not [error for error in errors if hasattr(builtins, error.__name__)]


def test_importing_the_sdk_loads_no_framework() -> None:
    program = (
        "import sys, molt_sdk, molt_sdk.testing; print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["rollout", "evaluate", "fit"])
async def test_a_blocking_function_inside_a_running_loop_names_its_twin(name: str, pocket: str) -> None:
    """F163."""
    engine = ScriptedEngine(pocket, ["a"])
    arguments = {"model": pocket, "steps": 1} if name == "fit" else {}
    with pytest.raises(molt.MoltError, match=rf"{name}\(\).*running event loop.*await a{name}\("):
        getattr(molt, name)(tasks=[{"prompt": "q"}], rewards=[len], engine=engine, **arguments)
    assert engine.requests == []


@pytest.mark.parametrize("name", ["rollout", "evaluate", "fit", "check"])
def test_a_blocking_function_has_the_signature_of_its_twin(name: str) -> None:
    import inspect

    assert inspect.signature(getattr(molt, name)) == inspect.signature(getattr(molt, f"a{name}"))
    assert not inspect.iscoroutinefunction(getattr(molt, name))
    assert getattr(molt, name).__name__ == name
