"""What the trainer's benchmarks train on: batches of random tokens in a given shape, and random models."""

from __future__ import annotations

import os
import random

import torch
from msgspec import Struct

from molt_sdk.packed import pack_floats, pack_ints
from molt_sdk.types import SamplingParams, Task, Trajectory, TrajectoryGroup, Turn


class Shape(Struct, frozen=True, kw_only=True):
    """Tokens of a trajectory: a prompt that all share, a question per group, a sampled reply; with ``second``, a tool
    result and another sampled reply."""

    prompt: int
    question: int
    reply: int
    result: int = 0
    second: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.question + self.reply + self.result + self.second


TOOL_USE = Shape(prompt=170, question=15, reply=26, result=12, second=8)
"""A small tool-use run, such as the quickstart's."""


def groups_of(shape: Shape, groups: int, size: int, vocab_size: int, *, seed: int = 0) -> list[TrajectoryGroup]:
    """Random tokens; rewards alternate, so that every trajectory of a group of two or more has a gradient."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    prompt = tokens(shape.prompt)
    made = []
    for position in range(groups):
        task = Task(prompt=f"question {position}")
        question = tokens(shape.question)
        members = []
        for index in range(size):
            turns = [_turn(0, None, prompt + question, tokens(shape.reply))]
            if shape.second:
                turns.append(_turn(1, turns[0], tokens(shape.result), tokens(shape.second)))
            name = f"{position}-{index}"
            members.append(Trajectory(id=name, task=task, turns=tuple(turns), reward=float(index % 2)))
        made.append(TrajectoryGroup(task=task, position=position, epoch=0, trajectories=tuple(members)))
    return made


def _turn(index: int, parent: Turn | None, context: list[int], completion: list[int]) -> Turn:
    return Turn(
        id=index,
        parent=parent.id if parent else None,
        parent_turn=parent,
        fork_reason="" if parent else "first call",
        agent="main",
        trainable=True,
        new_messages=[],
        tools=(),
        sampling=SamplingParams(),
        message={"role": "assistant", "content": ""},
        finish_reason="stop",
        context_i32=pack_ints(context),
        completion_i32=pack_ints(completion),
        logprobs_f32=pack_floats([-5.0] * len(completion)),
        version_spans=((0, 0, len(completion)),),
    )


def random_llama(
    folder: str | os.PathLike[str],
    *,
    hidden: int,
    layers: int,
    vocab: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> str:
    """Write the model folder (weights and config, no tokenizer) of a random Llama-like model; return its path."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        vocab_size=vocab,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
        max_position_embeddings=1 << 17,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with torch.device(device):
        LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return os.fspath(folder)
