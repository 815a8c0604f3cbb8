"""What a user handed to ``fit``, ``evaluate`` or ``rollout``: checked and put into one shape before any loading."""

from __future__ import annotations

import inspect
from collections.abc import (
    Awaitable,
    Callable,
    Sequence,
)
from typing import Any

from msgspec import Struct

from molt_sdk.decorators import EnvironmentMark, PolicyMark, RewardMark, check_policy, mark_of, where
from molt_sdk.errors import ConfigError, DefinitionError
from molt_sdk.model import Model, describe
from molt_sdk.tasks import TaskSource
from molt_sdk.tools import tools_from
from molt_sdk.types import Task

Policy = Callable[[Any, Model], Awaitable[Any]]


class RewardSpec(Struct, frozen=True):
    """One reward part. ``fn`` is a function, or the name of a method of the environment."""

    name: str
    weight: float
    timeout: float | None
    group: bool
    fn: Any
    method: bool


class Agent(Struct, frozen=True):
    """A policy with its environment, tools, rewards and tasks."""

    policy: Policy
    policy_name: str
    environment: type | None
    tools: tuple[Any, ...]
    rewards: tuple[RewardSpec, ...]
    tasks: TaskSource

    @property
    def environment_name(self) -> str:
        return describe(self.environment) if self.environment else ""

    @property
    def has_tools(self) -> bool:
        return bool(self.tools) or (self.environment is not None and bool(tools_from(self.environment)))

    @property
    def max_turns(self) -> int | None:
        mark = mark_of(self.environment) if self.environment else None
        return mark.max_turns if isinstance(mark, EnvironmentMark) else None


def resolve_agent(
    policy_or_env: Any,
    env_or_tasks: Any,
    *,
    tasks: Any,
    rewards: Sequence[Any],
    tools: Sequence[Any],
    split: str,
    seed: int,
    need_reward: bool,
) -> Agent:
    """Put together policy, environment, tools, rewards and tasks. Runs no user code but ``tasks``-free checks.

    Raises:
        DefinitionError, ConfigError: what is wrong, where, and what to write instead.
    """
    policy, environment = _policy_and_environment(policy_or_env, env_or_tasks)
    for given in (env_or_tasks, tasks):
        _check_no_policy(given)
    if env_or_tasks is not None and environment is not env_or_tasks:
        if tasks is not None:
            raise ConfigError("tasks were given twice: as the second argument and as tasks=...; give them once")
        tasks = env_or_tasks
    tools = _listed(tools)
    if environment is not None:
        _check_environment(environment)
        if tools:
            raise ConfigError(
                f"tools=... and environment {environment.__qualname__} were both given; write the tools as @molt.tool "
                "methods of the environment"
            )
    for given in tools:
        if inspect.isclass(given):
            raise DefinitionError(
                f"tools=... holds the class {given.__qualname__}, whose methods need an instance: pass one, or give an "
                "environment class in place of tools"
            )
    tools_from(tools)
    if policy is not None and tools:
        raise ConfigError("tools=... belongs to the built-in loop; your policy passes tools to model.run itself")
    specs = _reward_specs(environment, rewards)
    policy_fn = policy if policy is not None else _built_in(environment, tuple(tools))
    if need_reward and not specs:
        if policy is None:
            raise ConfigError(
                "there is no reward source: give rewards=[fn], or an environment with @molt.reward methods, or a "
                "policy that returns a number"
            )
        if inspect.signature(policy).return_annotation in (None, "None", type(None)):
            raise ConfigError(
                f"there is no reward source: policy {where(policy)} is annotated to return None, and neither "
                "rewards=... nor @molt.reward methods are given. Return a number or add a reward"
            )
    if tasks is None:
        tasks = _tasks_of(environment)
        if tasks is None:
            raise ConfigError(
                "there are no tasks: give tasks=[...] or a static method tasks(split, seed) on the environment"
            )
    place = "tasks" if not callable(tasks) else f"{getattr(tasks, '__qualname__', 'tasks')}()"
    return Agent(
        policy=policy_fn,
        policy_name=describe(policy) if policy is not None else "built_in_loop",
        environment=environment,
        tools=tuple(tools),
        rewards=specs,
        tasks=TaskSource(tasks, split=split, seed=seed, place=place),
    )


def _check_no_policy(tasks: Any) -> None:
    """Raise ConfigError for what cannot give tasks although it can be called or is an object of the user's."""
    if isinstance(mark_of(tasks), PolicyMark):
        raise ConfigError(f"policy {where(tasks)} stands where tasks belong; the policy is the first argument")
    if isinstance(mark_of(tasks), EnvironmentMark) and not inspect.isclass(tasks):
        raise ConfigError(
            f"an instance of environment {type(tasks).__qualname__} was given; pass the class, each trajectory makes "
            "an instance of its own"
        )


def _tasks_of(environment: type | None) -> Any:
    """``tasks`` of the environment: a static or class method, or data; None where there is none."""
    tasks = getattr(environment, "tasks", None)
    if inspect.isroutine(tasks):
        required = [p.name for p in inspect.signature(tasks).parameters.values() if _is_required(p)]
        if unknown := [name for name in required if name not in ("split", "seed")]:
            raise DefinitionError(
                f"{where(tasks)} takes {unknown[0]!r}, but it is called with split and seed alone, before there is an "
                "instance; write @staticmethod above `def tasks(split, seed)`"
            )
    return tasks


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def _policy_and_environment(first: Any, second: Any) -> tuple[Any, type | None]:
    policy: Any = None
    environment: type | None = None
    for given in (first, second):
        if inspect.isclass(given) and given is not Task:
            if not isinstance(mark_of(given), EnvironmentMark):
                raise DefinitionError(
                    f"class {given.__qualname__} is not an environment; decorate it with @molt.environment"
                )
            if environment is not None:
                raise ConfigError(f"two environments were given: {environment.__qualname__} and {given.__qualname__}")
            environment = given
    if first is not None and first is not environment:
        if not callable(first):
            raise ConfigError(
                f"the first argument is {type(first).__name__}; it must be a policy or an environment class. Give data "
                "as tasks=[...]"
            )
        if not isinstance(mark_of(first), PolicyMark):
            check_policy(first)
        policy = first
    return policy, environment


def _check_environment(environment: type) -> None:
    tools_from(environment)
    parameters = list(inspect.signature(environment).parameters.values())
    required = [p for p in parameters if _is_required(p)]
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        raise DefinitionError(
            f"environment {environment.__qualname__}.__init__ takes ({', '.join(p.name for p in parameters)}); it is "
            "made with the task alone: `def __init__(self, task)` or no __init__"
        )


def _reward_specs(environment: type | None, rewards: Sequence[Any]) -> tuple[RewardSpec, ...]:
    rewards = _listed(rewards)
    specs: list[RewardSpec] = []
    for name, member in _members(environment):
        mark = mark_of(member)
        if isinstance(mark, RewardMark):
            static = isinstance(member, staticmethod)
            if mark.group and not static:
                raise DefinitionError(f"@reward(group=True) {where(member)} must be a @staticmethod (task, group)")
            if static and not mark.group:
                raise DefinitionError(f"@reward {where(member)} is static; write it as a method (self, trajectory)")
            bound = getattr(environment, name)
            _check_takes_two(bound, member, "(task, group)" if mark.group else "(self, trajectory)")
            fn = bound if mark.group else name
            specs.append(RewardSpec(mark.name, mark.weight, mark.timeout, mark.group, fn, not mark.group))
        elif member is not None:
            _check_not_lost(environment, name, member)
    for fn in rewards:
        if not callable(fn):
            raise DefinitionError(f"rewards=[...] holds {fn!r}; a reward is a function (task, trajectory) -> number")
        mark = mark_of(fn)
        if not isinstance(mark, RewardMark):
            mark = RewardMark(getattr(fn, "__name__", "reward"), 1.0, None, False)
        _check_takes_two(fn, fn, "(task, group)" if mark.group else "(task, trajectory)")
        specs.append(RewardSpec(mark.name, mark.weight, mark.timeout, mark.group, fn, False))
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise DefinitionError(f"two rewards are named {name!r}; give one of them name=... in @molt.reward")
    return tuple(specs)


def _listed(given: Any) -> list[Any]:
    """What was given for a list: one thing may stand without brackets, None is nothing."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _check_not_lost(environment: type | None, name: str, member: Any) -> None:
    """Raise DefinitionError where a subclass overrides a reward and forgets the decorator: it would go unnoticed."""
    for base in environment.__mro__ if environment is not None else ():
        inherited = vars(base).get(name)
        if isinstance(mark_of(inherited), RewardMark):
            raise DefinitionError(
                f"{where(member)} overrides the reward {where(inherited)} without @reward; add the decorator, or write "
                f"`{name} = None` to drop the reward"
            )


def _check_takes_two(fn: Callable[..., Any], shown: Any, wanted: str) -> None:
    """Raise DefinitionError unless ``fn`` can be called with two positional arguments."""
    signature = inspect.signature(fn)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise DefinitionError(
            f"reward {where(shown)} takes ({', '.join(signature.parameters)}); it must take {wanted}: {error}"
        ) from None


def _members(environment: type | None) -> list[tuple[str, Any]]:
    """Members in definition order, bases first, each name once (the most derived wins)."""
    if environment is None:
        return []
    names = dict.fromkeys(name for cls in reversed(environment.__mro__) for name in vars(cls))
    return [(name, inspect.getattr_static(environment, name)) for name in names]


def _built_in(environment: type | None, tools: tuple[Any, ...]) -> Policy:
    """The policy of ``fit(tasks=..., tools=...)`` and ``fit(Environment)``: the tool loop on the task's prompt."""
    if environment is not None:

        async def environment_loop(env: Any, model: Model) -> None:
            await model.run(env.task.prompt, tools=env)

        return environment_loop

    async def task_loop(task: Task, model: Model) -> None:
        await model.run(task.prompt, tools=list(tools) or None)

    return task_loop


def make_environment(environment: type, task: Task) -> Any:
    """An instance with ``.task`` set, whether or not its ``__init__`` takes the task."""
    takes_task = any(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
        for p in inspect.signature(environment).parameters.values()
    )
    instance = environment(task) if takes_task else environment()
    if getattr(instance, "task", None) is None:
        try:
            instance.task = task
        except AttributeError as error:
            raise DefinitionError(
                f"environment {environment.__qualname__} has no room for its task ({error}); with __slots__ or frozen "
                "fields, add one named task"
            ) from error
    return instance
