"""``check``: what a model and an agent would do in training, found out in seconds, without weights or a GPU."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from molt_sdk.agent import Agent, resolve_agent
from molt_sdk.config import RolloutConfig, check_sampling_type, checked
from molt_sdk.engines.select import check_engine, check_renderer
from molt_sdk.errors import ConfigError, RequestError
from molt_sdk.explain import Explanation, Segment
from molt_sdk.loop import blocking, plain_errors
from molt_sdk.model import check_trainable
from molt_sdk.rendering.probe import model_findings
from molt_sdk.report import Finding, Report, Verdict
from molt_sdk.rollout import Rollouts
from molt_sdk.simulation import BLOCKED, FILLER, MOST_CALLS, AskedRenderer, LoopWatch, SimulatedModel, is_users
from molt_sdk.types import SamplingParams, Task, Trajectory
from molt_sdk.workers import WorkerPool

AGENT = "Agent: simulated episodes"
SIBLINGS = 2
"""Episodes per task: one that ends with the task's answer, one that does not."""
TIMEOUT = 30.0
"""Seconds that an episode may take if the config sets no time."""


async def acheck(
    policy_or_env: Any = None,
    env_or_tasks: Any = None,
    *,
    model: str,
    tasks: Any = None,
    rewards: Sequence[Any] = (),
    tools: Sequence[Any] = (),
    sampling: SamplingParams | None = None,
    limit: int = 2,
    seed: int = 0,
    split: str = "train",
    config: RolloutConfig | None = None,
) -> Report:
    """What training this agent with this model would meet. Nothing is trained and no weights are read.

    The model directory alone decides about prefix stability, tools, EOS ids, special tokens, and whether replies are
    read as they are written. An agent, if one is given, is run on a few tasks with a simulated model, twice on each: it
    calls each offered tool with example arguments, then answers, once with ``task.answer`` and once with other words.
    Tools, rewards and environments run for real.

    Args:
        policy_or_env, env_or_tasks, tasks, rewards, tools: as in :func:`fit`; without any the model alone is checked.
        model: model directory; config.json and tokenizer.json are enough.
        sampling: as in :func:`fit`; simulated replies are cut at ``max_tokens`` as real ones are.
        limit: most tasks.  split: passed to the environment's ``tasks``.
        config: as ``config.rollout`` of :func:`fit`; an episode may take 30 s unless ``timeout`` is set.

    Raises:
        MoltError: the arguments or the model directory cannot be used at all; what the check itself finds is in the
            report.
    """
    check_sampling_type(sampling)
    sampling, config = sampling or SamplingParams(), config or RolloutConfig()
    limit, seed = checked(limit, int, "limit"), checked(seed, int, "seed")
    if limit < 1:
        raise ConfigError(f"limit={limit} must be at least 1")
    try:
        check_trainable(sampling, "sampling")
    except RequestError as error:
        raise ConfigError(str(error)) from None
    path = check_engine("auto", model)
    agent = None
    if any(given is not None for given in (policy_or_env, env_or_tasks, tasks)) or rewards or tools:
        agent = resolve_agent(
            policy_or_env,
            env_or_tasks,
            tasks=tasks,
            rewards=rewards,
            tools=tools,
            split=split,
            seed=seed,
            need_reward=False,
        )
    renderer = AskedRenderer(path, emulate_tools=config.tool_emulation)
    check_renderer(renderer, sampling, tools=False)
    findings = model_findings(renderer)
    if agent is None:
        return Report(model=path, findings=tuple(findings))
    run = await _simulate(agent, renderer, sampling, config, limit=limit, seed=seed, split=split)
    findings += [_setting(agent, run), *_episodes(run), _tools(agent, run), *_rewards(run), _event_loop(run)]
    return Report(model=path, findings=tuple(findings), trajectories=run.trajectories)


class _Run(NamedTuple):
    """Simulated episodes, and what was noticed meanwhile."""

    tasks: list[Task]
    trajectories: tuple[Trajectory, ...]
    engine: SimulatedModel
    blocked: dict[str, float]


async def _simulate(
    agent: Agent,
    renderer: AskedRenderer,
    sampling: SamplingParams,
    config: RolloutConfig,
    *,
    limit: int,
    seed: int,
    split: str,
) -> _Run:
    tasks = await agent.tasks.once(limit)
    engine = SimulatedModel(renderer)
    # one after the other, so that it is known whose request the simulated model answers, and who blocks the loop
    config = msgspec.structs.replace(config, max_concurrent=1, timeout=config.timeout or TIMEOUT)
    pool = WorkerPool(config.threads)
    trajectories: list[Trajectory] = []
    rollouts = Rollouts(
        agent, engine, renderer, pool, sampling=sampling, config=config, seed=seed, training=True, split=split
    )
    try:
        with LoopWatch() as watch, plain_errors():
            for position, task in enumerate(tasks):
                engine.answers = [*_known_answer(task), FILLER]
                trajectories += await rollouts.group(task, position, 0, SIBLINGS)
    finally:
        pool.close()
    return _Run(tasks, tuple(trajectories), engine, watch.blocked)


def _known_answer(task: Task) -> list[str]:
    """The task's answer as the model would write it, if it can be known."""
    known = isinstance(task.answer, str | int | float) and not isinstance(task.answer, bool)
    return [str(task.answer)] if known and str(task.answer).strip() else []


def _setting(agent: Agent, run: _Run) -> Finding:
    place = f" with {agent.environment_name}" if agent.environment_name else ""
    text = (
        f"{agent.policy_name}{place}, {_count(len(run.tasks), 'task')}, {SIBLINGS} episodes each. No model ran: a "
        "simulated one calls a tool where tools are offered and answers after the result, in the first episode of a "
        "task with task.answer where that is text or a number, in the second with other words"
    )
    return Finding(area=AGENT, name="setting", text=text)


# --- episodes ---------------------------------------------------------------------------------------------------------


class _Episode(NamedTuple):
    """One episode as the report shows it; episodes that differ in numbers alone are shown together."""

    status: str
    turns: int
    segments: int
    trained: int
    context: int
    repeated: int
    """Prompt tokens of segments that go on with an earlier one, those left out that both share."""
    failure: _Failure | None
    advice: str
    details: tuple[str, ...]

    @property
    def key(self) -> tuple[object, ...]:
        words = re.sub(r"\d+", "N", "\n".join(self.details))
        return self.status, self.turns, self.segments, self.failure, self.advice, words


class _Failure(NamedTuple):
    """What went wrong in an episode, and the next step."""

    verdict: Verdict
    text: str
    advice: str


def _episodes(run: _Run) -> Iterator[Finding]:
    """One finding for all episodes that went alike."""
    all_failed = all(t.status == "agent_error" for t in run.trajectories)
    alike: defaultdict[tuple[object, ...], list[tuple[int, _Episode]]] = defaultdict(list)
    for number, trajectory in enumerate(run.trajectories, 1):
        episode = _episode(run, trajectory, all_failed=all_failed)
        alike[episode.key].append((number, episode))
    for members in alike.values():
        numbers, episodes = zip(*members, strict=True)
        yield _together(numbers, episodes)


def _together(numbers: Sequence[int], episodes: Sequence[_Episode]) -> Finding:
    first = episodes[0]
    verdict: Verdict = "warning" if first.repeated else "ok"
    text = (
        f"{first.status}, {_count(first.turns, 'turn')} in {_count(first.segments, 'segment')}, "
        f"{_span([e.trained for e in episodes])} tokens trained, {_span([e.context for e in episodes])} of context"
    )
    if first.repeated:
        share = sum(e.repeated for e in episodes) / sum(e.trained + e.context for e in episodes)
        text += f"; {share:.0%} of these tokens were encoded anew for later segments"
    if first.failure is not None:
        verdict = first.failure.verdict
        text += f"; {first.failure.text}"
    return Finding(
        area=AGENT,
        name=f"episode{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}",
        verdict=verdict,
        text=text,
        advice=first.advice,
        details=first.details,
    )


def _episode(run: _Run, trajectory: Trajectory, *, all_failed: bool) -> _Episode:
    explanation = trajectory.explain()
    segments = explanation.segments
    again = list(_restarts(trajectory, explanation))
    failure = _failure(run, trajectory, all_failed)
    advice = [_restart_advice(trajectory, again)] if again else []
    advice += [failure.advice] if failure is not None else []
    return _Episode(
        status="endless" if trajectory.id in run.engine.endless else trajectory.status,
        turns=len(trajectory.turns),
        segments=len(segments),
        trained=sum(segment.trained_tokens for segment in segments),
        context=sum(segment.context_tokens for segment in segments),
        repeated=sum(_repeated(trajectory, segment) for segment in again),
        failure=failure,
        advice=". ".join(advice),
        details=tuple(str(explanation).splitlines()) if len(segments) > 1 else (),
    )


def _restarts(trajectory: Trajectory, explanation: Explanation) -> Iterator[Segment]:
    """Segments that go on with what an earlier one of the same agent said. A sub-agent's own conversation, a prompt
    that is asked again, and raw text are not among them."""
    known: set[str] = set()
    for segment in explanation.segments:
        root = trajectory.turns[segment.turns[0]]
        edited = root.agent in known and root.fork_reason.startswith(("differs from", "history of"))
        if root.follows is not None or edited:
            yield segment
        known.update(segment.agents)


def _repeated(trajectory: Trajectory, segment: Segment) -> int:
    """Prompt tokens of a segment's root that no earlier turn shares."""
    return len(trajectory.turns[segment.turns[0]].context_i32) // 4 - segment.shared_tokens


def _restart_advice(trajectory: Trajectory, again: Sequence[Segment]) -> str:
    reasons = [trajectory.turns[segment.turns[0]].fork_reason for segment in again]
    if all(reason.startswith("cannot continue") for reason in reasons):
        return "nothing to do: training stays exact, but a chat template that only appends would need fewer tokens"
    return "training stays exact, but costs less if the agent only appends: send reply.messages plus what is new"


def _failure(run: _Run, trajectory: Trajectory, all_failed: bool) -> _Failure | None:
    """None if nothing went wrong, or only with the rewards, which are told apart."""
    if not trajectory.turns and trajectory.status in ("ok", "truncated"):
        step = "call the model through the handle that the policy gets; other calls are not recorded and not trained on"
        return _Failure("problem", "the model was never called", step)
    if trajectory.id in run.engine.endless:
        step = "see that the agent's loop has an end, as model.run has with max_turns"
        return _Failure("warning", f"the agent asked {MOST_CALLS} times and would have gone on", step)
    if (cut := run.engine.cut.get(trajectory.id)) is not None:
        step = "raise max_tokens, in the agent's call or in sampling, so that calls and answers fit"
        if cut.context_full:
            step = "shorten the conversation, or use a model with a longer context"
        return _Failure("warning", f"{cut.what} of {cut.needed} tokens was cut after {cut.room}", step)
    error = error_line(trajectory.error or "")
    match trajectory.status:
        case "truncated":
            return _Failure("warning", error, "shorten the conversation, or use a model with a longer context")
        case "rejected":
            step = "nothing to do if a simulated reply deserves that; rejected episodes are not trained on"
            return _Failure("warning", f"rejected: {trajectory.error}", step)
        case "agent_error":
            step = (
                "such episodes are left out of training; if the model's replies can cause it, catch the error or set "
            )
            verdict: Verdict = "problem" if all_failed or not trajectory.turns else "warning"
            return _Failure(verdict, error, step + "agent_error_reward")
        case "timeout":
            return _Failure("warning", error, "see what it waits for, or set RolloutConfig(timeout=...)")
        case "env_error" | "infra_error" | "cancelled":
            return _Failure("problem", error, "correct it: such episodes are left out of training")
    return None


def error_line(error: str) -> str:
    """The last line of a traceback with the place in the user's code, or the text itself."""
    lines = [line.strip() for line in error.strip().splitlines()]
    if not lines:
        return "no reason is known"
    places = re.findall(r'File "([^"\n]+)", line (\d+), in (\S+)', error)
    own = [f"{file}:{line} in {function}: " for file, line, function in places if is_users(file)]
    return f"{own[-1] if own else ''}{lines[-1]}"


# --- tools, rewards, event loop ---------------------------------------------------------------------------------------


def _tools(agent: Agent, run: _Run) -> Finding:
    calls = run.engine.calls
    if not calls and agent.has_tools:
        return Finding(
            area=AGENT,
            name="tools",
            verdict="warning",
            text="the agent has tools, but no call of the model offered them",
            advice="pass them: model.run(..., tools=env) or model.chat(..., tools=env)",
        )
    if not calls:
        return Finding(area=AGENT, name="tools", text="none were offered")
    executions = [execution for trajectory in run.trajectories for execution in trajectory.tool_executions]
    failed = {e.call["function"]["name"]: e for e in executions if e.error}
    text = ", ".join(f"{name} ({number})" for name, number in calls.items())
    text = f"called: {text}; {len(executions)} of {calls.total()} calls were executed through the model's handle"
    if not failed:
        return Finding(area=AGENT, name="tools", text=text)
    return Finding(
        area=AGENT,
        name="tools",
        verdict="warning",
        text=f"{text}; {_count(len(failed), 'tool')} failed",
        advice="the model is shown the error as the result. Nothing to do if the example arguments are to blame; an "
        "example in the docstring gives better ones",
        details=tuple(
            f"{name}({e.call['function']['arguments']:.200}): {error_line(e.error or '')}" for name, e in failed.items()
        ),
    )


def _rewards(run: _Run) -> Iterator[Finding]:
    errors = [error_line(t.error or "") for t in run.trajectories if t.status == "reward_error"]
    if errors:
        yield Finding(
            area=AGENT,
            name="rewards",
            verdict="problem",
            text=f"{len(errors)} of {len(run.trajectories)} episodes cannot be scored",
            advice="give each episode one finite number, whatever the model answers: with rewards=[...], @molt.reward "
            "methods, or as the policy's return value",
            details=tuple(dict.fromkeys(errors)),
        )
        return
    by_answer: defaultdict[str, list[str]] = defaultdict(list)
    for t in run.trajectories:
        if t.reward is not None:
            known = t.index == 0 and _known_answer(run.tasks[t.position])
            by_answer["task.answer" if known else "other words"].append(f"{t.reward:.4g}")
    if by_answer:
        shown = [f"{', '.join(values)} for {answer}" for answer, values in by_answer.items()]
        yield Finding(area=AGENT, name="rewards", text="; ".join(shown))


def _event_loop(run: _Run) -> Finding:
    if not run.blocked:
        return Finding(area=AGENT, name="event loop", text=f"never blocked for longer than {BLOCKED} s")
    longest = sorted(run.blocked.items(), key=lambda item: -item[1])
    return Finding(
        area=AGENT,
        name="event loop",
        verdict="warning",
        text="blocked, while no other episode can go on: "
        + ", ".join(f"{seconds:.2f} s at {place}" for place, seconds in longest[:5]),
        advice="await an async call there, move it into a sync tool (those run on threads), or use asyncio.to_thread",
    )


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


check = blocking(acheck, "check")
