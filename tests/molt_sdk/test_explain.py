"""A trajectory in words: where segments and branches start and why, and what is trained of them."""

from __future__ import annotations

import io
from typing import Any

import anyio
import msgspec
import pytest
from rich.console import Console

import molt_sdk as molt
from molt_sdk.show import OWN_CODE, show_trajectory
from molt_sdk.testing import ScriptedEngine

Q = len("^user\nq$\n^assistant\n")  # tokens of a first prompt: one per byte and control token
MORE = len("\n^user\nx$\n^assistant\n")  # and of what one more user message adds


def user(text: str) -> molt.Message:
    return {"role": "user", "content": text}


def recorded(pocket: str, policy: Any, *replies: str) -> molt.Trajectory:
    (group,) = molt.rollout(policy, [{"prompt": "q"}], engine=ScriptedEngine(pocket, list(replies)))
    (trajectory,) = group.trajectories
    assert trajectory.error is None, trajectory.error
    return trajectory


def test_a_chain_is_one_segment(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        reply = await model.chat("q")
        await model.chat([*reply.messages, user("x")])

    explanation = recorded(pocket, policy, "a", "b").explain()
    (segment,) = explanation.segments
    assert (segment.turns, segment.agents, segment.rows) == ((0, 1), ("main",), 1)
    assert (segment.trained_tokens, segment.context_tokens, segment.abandoned_tokens) == (4, Q + MORE, 0)
    assert (segment.shared_turn, segment.shared_tokens) == (None, 0)
    assert str(explanation).splitlines() == [
        f"turns 0-1 (main): 4 tokens trained, {Q + MORE} stored as context, 1 row",
        "  turn 0 starts a new segment: first call",
    ]


def test_branches_say_why(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        first = await model.chat("q")
        replies = [await model.chat([*first.messages, user("x")]) for _ in range(4)]
        replies[3].reward(0.5)
        await model.chat([*replies[1].messages, user("y")])
        await model.chat([*first.messages, user("z")])
        await model.fork("critic", trainable=False).chat([*first.messages, user("x")])
        await model.fork("judge", trainable=False).chat([*first.messages, user("w")])

    # every reply is a letter and the end of the turn
    (segment,) = recorded(pocket, policy, *"abcdefghi").explain().segments
    assert segment.rows == 3  # that end with turns 4, 5 and 6
    assert (segment.trained_tokens, segment.abandoned_tokens) == (5 * 2, 2 * 2)
    assert segment.context_tokens == Q + 8 * MORE + 2 * 2
    assert segment.events == (
        "turn 0 starts a new segment: first call",
        "turns 2-4, 7 branch from turn 0: the prompt of turn 1 was asked again",
        "turn 6 branches from turn 0: other messages follow than in turn 1",
        "turn 8 branches from turn 0: agent judge goes on from there",
        "turns 1, 3 were abandoned: turn 2, a reply to the same prompt, was continued, and no reward was given here",
        "not trained, as critic and judge is not trainable: turns 7-8",
    )
    assert str(segment).startswith("turns 0-8 (main, critic, judge): 10 tokens trained, ")
    assert ", 4 abandoned, 3 rows\n" in str(segment)


def test_a_branch_that_an_edit_caused_shows_the_edit(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        first = await model.chat("q")
        second = await model.chat([*first.messages, user("x")])
        edited = [*first.messages, user("x"), {"role": "assistant", "content": second.text.strip()}]
        await model.chat([*edited, user("y")])
        await model.chat([*edited, user("z")])
        await model.chat([*first.messages, user("z")])

    (segment,) = recorded(pocket, policy, "a", "b ", "c", "d", "e").explain().segments
    assert segment.events[1:] == (
        "turns 2-3 branch from turn 0: message 3 (assistant) changed at character 1: 'b ' became 'b', so turn 1 is not "
        "continued",
        "turn 4 branches from turn 0: other messages follow than in turn 1",
    )


def test_what_all_prompts_of_a_template_share_is_not_worth_a_line(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.chat("q")
        await model.chat([{"role": "system", "content": "s"}, user("q")])
        await model.complete([7, 8])
        await model.complete([7, 8])
        await model.complete([7, 9])

    segments = recorded(pocket, policy, *"abcde").explain().segments
    assert [(segment.shared_turn, segment.shared_tokens) for segment in segments[1:]] == [
        (0, 1),
        (None, 0),
        (2, 2),
        (2, 1),
    ]
    assert [len(segment.events) for segment in segments] == [1, 1, 1, 2, 1]
    assert segments[3].events[1] == "all 2 prompt tokens are those of turn 2, stored once"


def test_best_of_n_at_the_first_call_shares_its_prompt(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        replies = [await model.chat("q") for _ in range(3)]
        await model.chat([*replies[1].messages, user("x")])

    segments = recorded(pocket, policy, *"abcd").explain().segments
    assert [segment.turns for segment in segments] == [(0,), (1, 3), (2,)]
    assert [(segment.shared_turn, segment.shared_tokens) for segment in segments] == [(None, 0), (0, Q), (0, Q)]
    assert [segment.rows for segment in segments] == [0, 1, 0]
    assert f"all {Q} prompt tokens are those of turn 0, stored once" in segments[2].events
    assert segments[0].events[-1].startswith("turn 0 was abandoned: turn 1, a reply to the same prompt")


def test_a_new_root_names_its_reason_and_what_it_shares(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        reply = await model.chat("q")
        await model.chat([*reply.messages, user("x")])
        await model.chat([user("q"), {"role": "assistant", "content": "A"}, user("x")])
        await model.complete([7])

    trajectory = recorded(pocket, policy, *"abcd")
    _, edited, raw = trajectory.explain().segments
    third = trajectory.turns[2]
    assert "message 1" in third.fork_reason
    assert edited.events == (
        f"turn 2 starts a new segment: {third.fork_reason}",
        f"the first {Q} of its {len(third.prompt_token_ids)} prompt tokens are those of turn 0, stored once",
    )
    assert (edited.shared_turn, edited.shared_tokens) == (0, Q)
    assert raw.events == ("turn 3 starts a new segment: raw completion",)


def test_a_prompt_that_could_not_be_continued_reads_as_one_sentence(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.chat("q")
        await model.chat("x")

    trajectory = recorded(pocket, policy, *"ab")
    why = "cannot continue turn 0: the chat template dropped the reasoning of message 1:\n'hm'"
    second = msgspec.structs.replace(trajectory.turns[1], fork_reason=why)
    trajectory = msgspec.structs.replace(trajectory, turns=(trajectory.turns[0], second))
    assert trajectory.explain().segments[1].events[0] == (
        "turn 1 starts a new segment and does not continue turn 0: the chat template dropped the reasoning of "
        "message 1:\n'hm'"
    )


def test_a_trajectory_without_turns_is_explained() -> None:
    explanation = molt.Trajectory(id="t", task=molt.Task("q")).explain()
    assert (explanation.segments, str(explanation)) == ((), "the model was never called")


def shown(trajectory: molt.Trajectory) -> str:
    out = io.StringIO()
    show_trajectory(trajectory, Console(file=out, width=300))
    return out.getvalue()


def test_show_prints_the_rewards_of_agents_and_replies(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> float:
        (await model.chat("q")).reward(0.25)
        critic = model.fork("critic")
        await critic.chat("q2")
        critic.reward(-0.5)
        return 1.0

    lines = shown(recorded(pocket, policy, "a", "b")).splitlines()
    assert lines[0].endswith("ok  reward 1")
    assert lines[1] == "  agent critic: reward -0.5"
    assert [", reward 0.25)" in line for line in lines if line.startswith("── turn")] == [True, False]


def test_show_leaves_frames_of_the_sdk_out_of_tracebacks(pocket: str) -> None:
    def divide(x: int) -> int:
        """Divide."""
        return 1 // x

    async def policy(task: molt.Task, model: molt.Model) -> None:
        call = molt.ToolCall(id="1", type="function", function={"name": "divide", "arguments": '{"x": 0}'})
        await model.call_tool(call, [divide])
        async with anyio.create_task_group():
            await model.chat("q", temperature="hot")

    engine = ScriptedEngine(pocket, [])
    ((trajectory,),) = molt.rollout(policy, [{"prompt": "q"}], engine=engine)
    (execution,) = trajectory.tool_executions
    for recorded_error in (execution.error, trajectory.error):
        assert recorded_error is not None
        assert str(OWN_CODE) in recorded_error
    lines = [line.strip(" |") for line in shown(trajectory).splitlines()]
    lines = lines[next(i for i, line in enumerate(lines) if line.startswith("tool divide: ")) :]
    assert not [line for line in lines if str(OWN_CODE) in line]
    assert [line for line in lines if line.startswith("File") and __file__ in line and line.endswith(", in divide")]
    assert "return 1 // x" in lines
    assert "ZeroDivisionError: integer division or modulo by zero" in lines
    assert 'await model.chat("q", temperature="hot")' in lines
    assert [line for line in lines if line.startswith("molt_sdk.errors.RequestError: ")]
    assert not [line for line in lines if line.startswith(("raise RequestError(", "params = ", "return await"))]


@pytest.mark.parametrize("remarks", [(), ("call 1: arguments were \x1b[31ma JSON string", "renamed id 0 to call_0")])
def test_show_prints_remarks_and_the_explanation(pocket: str, remarks: tuple[str, ...]) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.chat("q")

    trajectory = recorded(pocket, policy, "a")
    turn = msgspec.structs.replace(trajectory.turns[0], remarks=remarks)
    out = io.StringIO()
    show_trajectory(msgspec.structs.replace(trajectory, turns=(turn,)), Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    at = lines.index("assistant: a")
    assert lines[at + 1 : -3] == [f"  {remark}".replace("\x1b", "\\x1b") for remark in remarks]
    assert lines[-3:] == [
        f"turn 0 (main): 2 tokens trained, {Q} stored as context, 1 row",
        "  turn 0 starts a new segment: first call",
        f"2 trained tokens, {Q} context tokens in rows; exact",
    ]
