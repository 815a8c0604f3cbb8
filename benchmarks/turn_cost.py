"""What one more turn of a long conversation costs: rendering, stitching, recording; the engine answers at once.

Prints µs per turn by length of the conversation, beside rendering and encoding the whole conversation again.

    python benchmarks/turn_cost.py [--model DIR] [--turns 200] [--tokens 64000] [--without-reasoning]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

import molt_sdk as molt
from molt_sdk.engines.base import GenerateRequest, Generation
from molt_sdk.rendering.renderer import Renderer
from molt_sdk.testing import ScriptedEngine, pocket_model

WORDS = [
    "the",
    "model",
    "reads",
    "a",
    "long",
    "page",
    "and",
    "writes",
    "down",
    "what",
    "it",
    "finds",
    "there",
    "before",
    "it",
    "goes",
    "on",
    "to",
    "another",
    "one",
]
AROUND = 5
"""Turns on each side over which a figure is the median."""


class InstantEngine(ScriptedEngine):
    """Answers with the next text at once and keeps no request, so that only the SDK is measured."""

    def __init__(self, model: str, replies: list[list[int]]) -> None:
        super().__init__(model, [])
        self._ids = iter(replies)

    async def generate(self, request: GenerateRequest) -> Generation:
        ids = next(self._ids)
        return Generation(token_ids=ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids), finish_reason="stop")


def text(words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


@asynccontextmanager
async def timed(seconds: list[float]) -> AsyncIterator[None]:
    started = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - started)


async def conversation(
    model: str, turns: int, words: int, *, without_reasoning: bool
) -> tuple[list[float], list[float], list[int]]:
    """Seconds of each turn, seconds of rendering each prompt from scratch, tokens of each prompt."""
    renderer = Renderer(model)
    thought = "<think>hm</think>" if without_reasoning else ""
    replies = [renderer.encode_reply(thought + text(words, -i), end=True) for i in range(turns + 1)]
    engine = InstantEngine(model, replies)
    costs: list[float] = []
    renders: list[float] = []
    lengths: list[int] = []

    @molt.policy
    async def talk(task: molt.Task, chat: molt.Model) -> float:
        messages: list[molt.Message] = [{"role": "system", "content": "Be brief."}]
        for i in range(turns):
            messages.append({"role": "user", "content": text(words, i)})
            async with timed(costs):
                reply = await chat.chat(messages)
            lengths.append(reply.usage["prompt_tokens"])
            async with timed(renders):
                renderer.prompt(messages)
            messages.append({"role": "assistant", "content": reply.text} if without_reasoning else reply.message)
            assert bool(reply.reasoning) == without_reasoning
        return 1.0

    (group,) = await molt.arollout(talk, [molt.Task("long")], engine=engine)
    (trajectory,) = group.trajectories
    assert trajectory.status == "ok", trajectory.error
    assert [turn.parent for turn in trajectory.turns] == [None, *range(turns - 1)]
    assert trajectory.certify().ok
    return costs, renders, lengths


def near(values: list[float], turn: int) -> float:
    """Median around the ``turn``-th value, in microseconds."""
    return 1e6 * statistics.median(values[max(0, turn - 1 - AROUND) : turn + AROUND])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="model directory (default: a pocket model)")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--without-reasoning",
        action="store_true",
        help="replies have some, and the agent sends them back without it, as most clients do",
    )
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # figures per core
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or pocket_model(Path(folder) / "model", context_length=4 * options.tokens)
        per_turn = options.tokens / options.turns / 2
        probe = len(Renderer(model).encode_reply(text(100, 0), end=False)) / 100
        words = max(1, round((per_turn - 5) / probe))
        runs = [
            asyncio.run(conversation(model, options.turns, words, without_reasoning=options.without_reasoning))
            for _ in range(options.repeats)
        ]
    table = Table("turn", "prompt tokens", "µs/turn", "× turn 2", "µs re-rendering", "re-rendering / turn", box=None)
    shown = [2, *(t for t in (10, 50, 100, 150) if t < options.turns), options.turns]
    second = 1e6 * statistics.median(costs[1] for costs, _, _ in runs)
    for turn in shown:
        cost = second if turn == 2 else statistics.median(near(costs, turn) for costs, _, _ in runs)
        render = statistics.median(near(renders, turn) if turn > 2 else 1e6 * renders[1] for _, renders, _ in runs)
        tokens = runs[0][2][turn - 1]
        table.add_row(
            str(turn), str(tokens), f"{cost:.0f}", f"{cost / second:.2f}", f"{render:.0f}", f"{render / cost:.1f}"
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
