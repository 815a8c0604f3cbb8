"""What becomes of an agent's episodes with a simulated model: segments, failures, tools, rewards, the event loop."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from molt_sdk.agent import Agent
from molt_sdk.config import RolloutConfig
from molt_sdk.explain import Segment, counted
from molt_sdk.graph import canonical
from molt_sdk.loop import plain_errors
from molt_sdk.report import Finding, Verdict
from molt_sdk.rollout import Rollouts
from molt_sdk.simulation import BLOCKED, FILLER, MOST_CALLS, AskedRenderer, LoopWatch, SimulatedModel, is_users
from molt_sdk.types import SamplingParams, Status, Task, Trajectory, Turn
from molt_sdk.workers import WorkerPool

SIBLINGS = 2
"""Episodes per task: one that ends with the task's answer, one that does not."""
TIMEOUT = 30.0
"""Seconds that an episode may take if the config sets no time."""
ANSWERED, OTHER = "task.answer", "other words"
"""Answers of the simulated model, as the report calls them."""
SHORTEN = "shorten the conversation, or use a model with a longer context"
FAILURES: Mapping[Status, tuple[Verdict, str]] = {
    "truncated": ("warning", SHORTEN),
    "rejected": ("warning", "nothing to do if a simulated reply deserves that; rejected episodes are not trained on"),
    "agent_error": (
        "warning",
        "such episodes are left out of training; if the model's replies can cause it, catch the error or set "
        "agent_error_reward",
    ),
    "reward_error": ("problem", "see the rewards below: such episodes are left out of training"),
    "timeout": ("warning", "see what it waits for, or set RolloutConfig(timeout=...)"),
    "env_error": ("problem", "correct it: such episodes are left out of training"),
    "infra_error": ("problem", "correct it: such episodes are left out of training"),
    "cancelled": ("problem", "correct it: such episodes are left out of training"),
}
"""Of each status of an episode that failed: how bad it is, and the next step."""

_finding = functools.partial(Finding, area="Agent: simulated episodes")


class _Run(NamedTuple):
    """Simulated episodes, and what was noticed meanwhile."""

    tasks: list[Task]
    trajectories: tuple[Trajectory, ...]
    engine: SimulatedModel
    blocked: dict[str, float]


async def agent_findings(
    agent: Agent,
    renderer: AskedRenderer,
    sampling: SamplingParams,
    config: RolloutConfig,
    *,
    limit: int,
    seed: int,
    split: str,
) -> tuple[list[Finding], tuple[Trajectory, ...]]:
    """What was found in simulated episodes on up to ``limit`` tasks, and the episodes."""
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
    run = _Run(tasks, tuple(trajectories), engine, watch.blocked)
    findings = [_setting(agent, run), *_episodes(run), _tools(agent, run), *_rewards(run), _event_loop(run)]
    return findings, run.trajectories


def _known_answer(task: Task) -> list[str]:
    """The task's answer as the model would write it, if it can be known."""
    known = isinstance(task.answer, str | int | float) and not isinstance(task.answer, bool)
    return [str(task.answer)] if known and str(task.answer).strip() else []


def _setting(agent: Agent, run: _Run) -> Finding:
    place = f" with {agent.environment_name}" if agent.environment_name else ""
    text = (
        f"{agent.policy_name}{place}, {counted(len(run.tasks), 'task')}, {SIBLINGS} episodes each. No model ran: a "
        "simulated one calls a tool where tools are offered and answers after the result, in the first episode of a "
        "task with task.answer where that is text or a number, in the second with other words"
    )
    return _finding(name="setting", text=text)


# --- episodes ---------------------------------------------------------------------------------------------------------


class _Failure(NamedTuple):
    """What went wrong in an episode."""

    verdict: Verdict = "ok"
    text: str = ""
    advice: str = ""


class _Episode(NamedTuple):
    """One episode as the report shows it."""

    outcome: str
    failure: _Failure
    advice: str
    details: tuple[str, ...]
    trained: int
    context: int
    repeated: int
    """Prompt tokens of segments that go on with an earlier one, those left out that both share."""

    @property
    def key(self) -> tuple[object, ...]:
        """Episodes that differ in numbers alone are shown together."""
        return self.outcome, self.failure, self.advice, re.sub(r"\d+", "N", "\n".join(self.details))


def _episodes(run: _Run) -> Iterator[Finding]:
    """One finding for all episodes that went alike."""
    alike: defaultdict[tuple[object, ...], list[tuple[int, _Episode]]] = defaultdict(list)
    for number, trajectory in enumerate(run.trajectories, 1):
        episode = _episode(run, trajectory)
        alike[episode.key].append((number, episode))
    for members in alike.values():
        numbers, episodes = zip(*members, strict=True)
        first = episodes[0]
        counts = (_span([e.trained for e in episodes]), _span([e.context for e in episodes]))
        text = f"{first.outcome}, {counts[0]} tokens trained, {counts[1]} of context"
        verdict = first.failure.verdict
        if first.repeated:
            share = sum(e.repeated for e in episodes) / sum(e.trained + e.context for e in episodes)
            text += f"; {share:.0%} of these tokens were encoded anew for later segments"
            verdict = "warning" if verdict == "ok" else verdict
        yield _finding(
            name=f"episode{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}",
            verdict=verdict,
            text="; ".join(filter(None, [text, first.failure.text])),
            advice=first.advice,
            details=first.details,
        )


def _episode(run: _Run, trajectory: Trajectory) -> _Episode:
    explanation = trajectory.explain()
    segments = explanation.segments
    status = "endless" if trajectory.id in run.engine.endless else trajectory.status
    again = list(_restarts(trajectory, segments))
    failure = _failure(run, trajectory)
    return _Episode(
        outcome=f"{status}, {counted(len(trajectory.turns), 'turn')} in {counted(len(segments), 'segment')}",
        failure=failure,
        advice=". ".join(filter(None, [_restart_advice(trajectory, again), failure.advice])),
        details=tuple(str(explanation).splitlines()) if len(segments) > 1 else (),
        trained=sum(segment.trained_tokens for segment in segments),
        context=sum(segment.context_tokens for segment in segments),
        repeated=sum(len(_root(trajectory, segment).context_i32) // 4 - segment.shared_tokens for segment in again),
    )


def _root(trajectory: Trajectory, segment: Segment) -> Turn:
    return trajectory.turns[segment.turns[0]]


def _restarts(trajectory: Trajectory, segments: Sequence[Segment]) -> Iterator[Segment]:
    """Segments that go on with what an earlier one of the same agent said. A sub-agent's own conversation, a prompt
    that is asked again, examples that the agent gives, and raw text are not among them."""
    said: defaultdict[str, set[bytes]] = defaultdict(set)
    given: defaultdict[str, set[bytes]] = defaultdict(set)
    for segment in segments:
        root = _root(trajectory, segment)
        shown = {canonical(message) for message in root.new_messages if message["role"] == "assistant"}
        if root.follows is not None or shown & said[root.agent] - given[root.agent]:
            yield segment
        given[root.agent] |= shown - said[root.agent]
        for turn in (trajectory.turns[i] for i in segment.turns):
            said[turn.agent].add(canonical(turn.message))


def _restart_advice(trajectory: Trajectory, again: Sequence[Segment]) -> str:
    if not again:
        return ""
    turns, roots = trajectory.turns, [_root(trajectory, segment) for segment in again]
    if any(root.follows is None for root in roots):
        return "training stays exact, but costs less if the agent only appends: send reply.messages plus what is new"
    if any(root.tools != turns[root.follows].tools for root in roots if root.follows is not None):
        return "training stays exact, but costs less if all calls of a conversation offer the same tools"
    return "training stays exact, but costs less with a chat template that only appends"


def _failure(run: _Run, trajectory: Trajectory) -> _Failure:
    if not trajectory.turns and trajectory.status in ("ok", "truncated"):
        step = "call the model through the handle that the policy gets; other calls are not recorded and not trained on"
        return _Failure("problem", "the model was never called", step)
    if trajectory.id in run.engine.endless:
        step = "see that the agent's loop has an end, as model.run has with max_turns"
        return _Failure("warning", f"the agent asked {MOST_CALLS} times and would have gone on", step)
    if (cut := run.engine.cut.get(trajectory.id)) is not None:
        step = "raise max_tokens, in the agent's call or in sampling, so that calls and answers fit"
        text = f"{cut.what} of {cut.needed} tokens was cut after {cut.room}"
        return _Failure("warning", text, SHORTEN if cut.context_full else step)
    if trajectory.status not in FAILURES:
        return _Failure()
    verdict, step = FAILURES[trajectory.status]
    hopeless = not trajectory.turns or all(t.status == "agent_error" for t in run.trajectories)
    if trajectory.status == "agent_error" and hopeless:
        verdict = "problem"
    return _Failure(verdict, error_line(trajectory.error or ""), step)


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
        text = "the agent has tools, but no call of the model offered them"
        step = "pass them: model.run(..., tools=env) or model.chat(..., tools=env)"
        return _finding(name="tools", verdict="warning", text=text, advice=step)
    if not calls:
        return _finding(name="tools", text="none were offered")
    executions = [execution for trajectory in run.trajectories for execution in trajectory.tool_executions]
    failed = {e.call["function"]["name"]: e for e in executions if e.error}
    text = ", ".join(f"{name} ({number})" for name, number in calls.items())
    text = f"called: {text}; {len(executions)} of {calls.total()} calls were executed through the model's handle"
    details = [
        f"{name}({e.call['function']['arguments']:.200}): {error_line(e.error or '')}" for name, e in failed.items()
    ]
    step = ""
    if failed:
        text += f"; {counted(len(failed), 'tool')} failed"
        step = "the model is shown the error as the result. Nothing to do if the example arguments are to blame; an "
        step += "example in the docstring gives better ones"
    elif not executions and calls.total():
        step = "the episodes above say what became of the calls. An agent that executes them itself should use "
        step += "model.call_tool, which records them"
    return _finding(name="tools", verdict="warning" if step else "ok", text=text, advice=step, details=tuple(details))


def _rewards(run: _Run) -> Iterator[Finding]:
    errors = [error_line(t.error or "") for t in run.trajectories if t.status == "reward_error"]
    if errors:
        step = "give each episode one finite number, whatever the model answers: with rewards=[...], @molt.reward "
        yield _finding(
            name="rewards",
            verdict="problem",
            text=f"{len(errors)} of {len(run.trajectories)} episodes cannot be scored",
            advice=f"{step}methods, or as the policy's return value",
            details=tuple(dict.fromkeys(errors)),
        )
        return
    by_answer: defaultdict[str, list[str]] = defaultdict(list)
    rewards_of: defaultdict[int, set[tuple[float | None, ...]]] = defaultdict(set)  # of each task
    for t in run.trajectories:
        if t.reward is not None:
            by_answer[_answer(run, t)].append(f"{t.reward:.4g}")
            rewards_of[t.position].add(tuple(t.agent_reward(agent) for agent in sorted(t.agents)))
    text = "; ".join(f"{', '.join(values)} for {answer}" for answer, values in by_answer.items())
    if by_answer.keys() >= {ANSWERED, OTHER} and all(len(different) == 1 for different in rewards_of.values()):
        text += ": no difference between task.answer and other words, so nothing to learn from these episodes"
        step = (
            "fit skips a step in which the episodes of each task have equal rewards. Nothing to do if a trained model "
        )
        step += "reaches what is rewarded and a simulated one does not; else let the rewards tell answers apart"
        yield _finding(name="rewards", verdict="warning", text=text, advice=step)
    elif text:
        yield _finding(name="rewards", text=text)


def _answer(run: _Run, trajectory: Trajectory) -> str:
    """Which answer the simulated model gave in an episode."""
    given = run.engine.answered.get(trajectory.id)
    if given is None:
        return "no answer"
    return ANSWERED if given in _known_answer(run.tasks[trajectory.position]) else OTHER


def _event_loop(run: _Run) -> Finding:
    if not run.blocked:
        return _finding(name="event loop", text=f"never blocked for longer than {BLOCKED} s")
    longest = sorted(run.blocked.items(), key=lambda item: -item[1])
    places = ", ".join(f"{seconds:.2f} s at {place}" for place, seconds in longest[:5])
    step = "await an async call there, move it into a sync tool (those run on threads), or use asyncio.to_thread"
    text = f"blocked, while no other episode can go on: {places}"
    return _finding(name="event loop", verdict="warning", text=text, advice=step)


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
