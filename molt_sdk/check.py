"""``check``: what a model and an agent would do in training, found out in seconds, without weights or a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from molt_sdk.agent import resolve_agent
from molt_sdk.agent_check import agent_findings
from molt_sdk.config import RolloutConfig, check_sampling_type, checked
from molt_sdk.engines.select import check_engine, check_renderer
from molt_sdk.errors import ConfigError, RequestError
from molt_sdk.loop import blocking
from molt_sdk.model import check_trainable
from molt_sdk.model_check import model_findings
from molt_sdk.report import Report
from molt_sdk.simulation import AskedRenderer
from molt_sdk.types import SamplingParams


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
    found, trajectories = await agent_findings(agent, renderer, sampling, config, limit=limit, seed=seed, split=split)
    return Report(model=path, findings=(*findings, *found), trajectories=trajectories)


check = blocking(acheck, "check")
