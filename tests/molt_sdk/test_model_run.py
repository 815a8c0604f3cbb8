"""The tool loop when things go wrong, and what becomes of replies and results that an agent sends back itself."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import molt_sdk as molt
from molt_sdk import graph, messages
from molt_sdk.testing import Script, ScriptedEngine, pocket_model

pytestmark = pytest.mark.anyio

Policy = Callable[[molt.Task, molt.Model], Awaitable[Any]]
TASKS = [{"prompt": "q"}]
BROKEN = '<tool_call>{"name": "add", "arguments": </tool_call>'
TOOL_TEMPLATE = """
{%- for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'tool' %}{{ m.name }}: {% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
{%- if call.function.arguments is not mapping %}{{ raise_exception('arguments must be an object') }}{% endif %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Knows tools; wants arguments as objects; places results by position, without their ids."""


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


ADD = call("add", '{"a": 1, "b": 2}')


async def run(policy: Any, engine: ScriptedEngine, *rest: Any) -> molt.Trajectory:
    groups = await molt.arollout(policy, *rest, tasks=TASKS, engine=engine, group_size=1)
    return groups[0].trajectories[0]


async def ran(pocket: str, policy: Policy, *replies: Any) -> molt.Trajectory:
    """The exact trajectory of a policy that ends well."""
    trajectory = await run(policy, ScriptedEngine(pocket, list(replies)))
    assert trajectory.error is None, trajectory.error
    assert trajectory.certify().ok
    return trajectory


def lineage(trajectory: molt.Trajectory) -> list[tuple[int | None, str]]:
    return [(turn.parent, turn.fork_reason) for turn in trajectory.turns]


def trained(pocket: str, trajectory: molt.Trajectory) -> list[str]:
    """Text of the trained tokens of each row."""
    renderer = ScriptedEngine(pocket, []).renderer
    rows = trajectory.samples()
    return [renderer.text([i for i, m in zip(r.token_ids, r.loss_mask, strict=True) if m]) for r in rows]


def prompts(engine: ScriptedEngine) -> list[str]:
    return [engine.renderer.text(request.prompt_token_ids) for request in engine.requests]


def results(trajectory: molt.Trajectory) -> list[Any]:
    return [execution.message["content"] for execution in trajectory.tool_executions]


# --- the loop ---------------------------------------------------------------------------------------------------------


async def test_a_loop_over_many_turns_is_one_segment(pocket: str) -> None:
    replies = [call("add", f'{{"a": {i}, "b": 1}}') for i in range(4)]

    async def policy(task: molt.Task, model: molt.Model) -> None:
        assert (await model.run("count", tools=[add])).text == "4"

    trajectory = await ran(pocket, policy, *replies, "4")
    assert lineage(trajectory) == [(None, "first call"), (0, ""), (1, ""), (2, ""), (3, "")]
    assert trained(pocket, trajectory) == ["<|im_end|>".join([*replies, "4"])]
    assert results(trajectory) == ["1", "2", "3", "4"]


@pytest.mark.parametrize("reply", [ADD + BROKEN, BROKEN + ADD, f"{BROKEN} and {ADD} and {BROKEN}"])
async def test_calls_that_can_be_read_run_and_what_was_wrong_with_the_others_follows(pocket: str, reply: str) -> None:
    """Results first, in the order of their calls; the sampled tokens stay, also those that cannot be read."""
    engine = ScriptedEngine(pocket, [reply, "sorry", "done"])

    async def policy(task: molt.Task, model: molt.Model) -> None:
        last = await model.run("q", tools=[add])
        tool_messages = [m for m in last.messages if m["role"] == "tool"]
        assert [m.get("tool_call_id") for m in tool_messages] == ["call_0_0"] + [None] * reply.count(BROKEN)
        assert tool_messages[0]["content"] == "3"
        assert all("was not executed" in str(m["content"]) for m in tool_messages[1:])
        await model.chat([*last.messages, {"role": "user", "content": "more"}], tools=[add])

    trajectory = await run(policy, engine)
    assert trajectory.error is None, trajectory.error
    assert lineage(trajectory) == [(None, "first call"), (0, ""), (1, "")]
    assert trained(pocket, trajectory) == [f"{reply}<|im_end|>sorry<|im_end|>done"]
    assert len(trajectory.tool_executions) == 1


async def test_nothing_is_executed_after_the_last_turn_or_a_cut_reply(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        assert len((await model.run("q", tools=[add], max_turns=2)).tool_calls) == 1
        cut = await model.run("q", tools=[add])
        assert cut.truncated
        assert len(cut.tool_calls) == 1

    trajectory = await ran(pocket, policy, ADD, ADD, Script(text=f"{ADD} and {ADD[:20]}", finish_reason="length"))
    assert len(trajectory.turns) == 3
    assert results(trajectory) == ["3"]


async def test_stop_of_one_of_several_parallel_tools_keeps_the_results_of_the_others(pocket: str) -> None:
    stopped = asyncio.Event()

    @molt.tool(parallel=True)
    async def submit() -> None:
        """Hand in."""
        stopped.set()
        raise molt.Stop("42")

    @molt.tool(parallel=True)
    async def look_up() -> str:
        """Look it up."""
        await stopped.wait()
        return "found"

    async def policy(task: molt.Task, model: molt.Model) -> None:
        reply = await model.run("q", tools=[submit, look_up, add])
        assert len(reply.tool_calls) == 4

    # what comes after the tools that run together does not run any more
    trajectory = await ran(pocket, policy, call("look_up") + call("submit") + call("look_up") + ADD)
    assert [(e.message["content"], e.stop) for e in trajectory.tool_executions] == [
        ("found", False),
        ("42", True),
        ("found", False),
    ]


async def test_results_of_parallel_tools_stand_in_the_order_of_the_calls(pocket: str) -> None:
    """Each tool ends after the one that was called behind it; one times out and one fails."""
    done = [asyncio.Event() for _ in range(4)]
    done[3].set()

    @molt.tool(parallel=True)
    async def wait(i: int) -> int:
        """Wait for the next."""
        await done[i + 1].wait()
        done[i].set()
        return i

    @molt.tool(parallel=True, timeout=0.05)
    async def hang() -> None:
        """Never ends."""
        await asyncio.Event().wait()

    @molt.tool(parallel=True)
    async def fail() -> None:
        """Fail."""
        raise KeyError("no")

    async def policy(task: molt.Task, model: molt.Model) -> None:
        last = await model.run("q", tools=[wait, hang, fail])
        assert [m["content"] for m in last.messages if m["role"] == "tool"] == expected

    expected = ["0", "1", "2", "Error: hang took longer than its timeout of 0.05 s", "Error: KeyError: 'no'"]
    asked = "".join(call("wait", json.dumps({"i": i})) for i in range(3)) + call("hang") + call("fail")
    trajectory = await ran(pocket, policy, asked, "done")
    assert results(trajectory) == expected
    errors = [e.error for e in trajectory.tool_executions]
    assert errors[:4] == [None, None, None, "hang took longer than its timeout of 0.05 s"]
    assert "Traceback" in str(errors[4])


async def in_a_group(*errors: Exception) -> None:
    async def fail(error: Exception) -> None:
        raise error

    async with asyncio.TaskGroup() as group:
        for error in errors:
            group.create_task(fail(error))


async def wraps(error: Exception) -> None:
    try:
        raise error
    except Exception as inner:
        raise ValueError("could not judge") from inner


DOWN = molt.EngineError("down")


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    ("act", "status", "words"),
    [
        (lambda: in_a_group(DOWN), "infra_error", "EngineError: down"),
        (lambda: in_a_group(ValueError("mine"), DOWN), "infra_error", "EngineError: down"),
        (lambda: wraps(DOWN), "infra_error", "ValueError: could not judge"),
        (lambda: in_a_group(molt.Reject("bad task")), "rejected", "bad task"),
    ],
)
async def test_a_failure_of_the_engine_inside_a_tool_is_never_text_for_the_model(
    pocket: str, act: Any, status: str, words: str, parallel: bool
) -> None:
    """Also where it comes in a group, as from sub-agents under a TaskGroup, or as the cause of another error."""

    @molt.tool(parallel=parallel)
    async def judge() -> None:
        """Ask a judge."""
        await act()

    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.run("q", tools=[judge])

    trajectory = await run(policy, ScriptedEngine(pocket, [call("judge") * 2, "sorry"]))
    assert trajectory.status == status
    assert words in str(trajectory.error)
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize("role", ["system", "developer"])
async def test_a_second_system_message_is_refused(pocket: str, role: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        messages: list[molt.Message] = [{"role": role, "content": "be short"}, {"role": "user", "content": "q"}]
        with pytest.raises(molt.RequestError, match=r"system=.* already; give one of the two"):
            await model.run(messages, system="be long")
        reply = await model.run(messages[1:], system="be long")
        assert [message["role"] for message in reply.messages] == ["system", "user", "assistant"]

    trajectory = await ran(pocket, policy, "a")
    assert len(trajectory.turns) == 1


async def test_errors_of_the_tool_itself_are_text_also_in_a_group(pocket: str) -> None:
    async def mixed() -> None:
        """Fail twice."""
        await in_a_group(molt.Stop("x"), ValueError("mine"))

    async def stops() -> None:
        """Stop in a task."""
        await in_a_group(molt.Stop("42"))

    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.run("q", tools=[mixed, stops])

    trajectory = await ran(pocket, policy, call("mixed"), call("stops"))
    first, second = trajectory.tool_executions
    assert str(first.message["content"]).startswith("Error: ExceptionGroup: ")
    assert "ValueError: mine" in str(first.error)
    assert (second.message["content"], second.error, second.stop) == ("42", None, True)


async def test_a_tool_that_waits_for_the_thread_of_a_hanging_one_is_not_late(pocket: str) -> None:
    """The time in which another call holds the environment's thread is not its own."""
    hang = threading.Event()

    @molt.environment
    class Env:
        @molt.tool(timeout=0.05)
        def slow(self) -> str:
            """Hang."""
            hang.wait()
            return "never heard"

        @molt.tool(timeout=0.05)
        def quick(self) -> str:
            """Answer."""
            return "answer"

    async def policy(env: Env, model: molt.Model) -> None:
        await model.run("q", tools=env)

    timer = threading.Timer(0.2, hang.set)  # later than quick's timeout, sooner than the thread is replaced
    engine = ScriptedEngine(pocket, [call("slow") + call("quick"), "done"])
    timer.start()
    try:
        trajectory = await run(policy, engine, Env)
    finally:
        hang.set()
        timer.join()
    assert results(trajectory) == ["Error: slow took longer than its timeout of 0.05 s", "answer"]


async def test_a_sync_tool_is_late_from_its_start_on(pocket: str) -> None:
    hang = threading.Event()

    @molt.tool(timeout=0.05)
    def slow(fn: int, scope: int, seconds: int) -> None:
        """Hang."""
        hang.wait()

    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.run("q", tools=[slow])

    try:
        trajectory = await ran(pocket, policy, call("slow", '{"fn": 1, "scope": 2, "seconds": 3}'), "done")
    finally:
        hang.set()
    assert results(trajectory) == ["Error: slow took longer than its timeout of 0.05 s"]


# --- calls and results that an agent sends itself ---------------------------------------------------------------------


@pytest.mark.parametrize("id", ["", "c1"])
async def test_f38_calls_of_one_id_are_both_executed(pocket: str, id: str) -> None:
    """F38: by hand, call by call; the results go back in the order of the calls."""
    engine = ScriptedEngine(pocket, ["done"])

    async def policy(task: molt.Task, model: molt.Model) -> None:
        calls: Any = [
            {"id": id, "type": "function", "function": {"name": "add", "arguments": {"a": i, "b": i}}} for i in (1, 2)
        ]
        answers = [await model.call_tool(c, [add]) for c in calls]
        said: Any = {"role": "assistant", "content": None, "tool_calls": calls}
        reply = await model.chat([{"role": "user", "content": "q"}, said, *answers], tools=[add])
        ids = [m["tool_call_id"] for m in reply.messages if m["role"] == "tool"]
        assert ids == [c["id"] for c in reply.messages[1]["tool_calls"]]
        assert len(set(ids)) == 2

    trajectory = await run(policy, engine)
    assert trajectory.error is None, trajectory.error
    assert results(trajectory) == ["2", "4"]
    (prompt,) = prompts(engine)
    assert prompt.index("\n2<|im_end|>") < prompt.index("\n4<|im_end|>")


async def test_f32_every_form_of_arguments_gives_the_same_prompt(tmp_path: Path) -> None:
    """F32: data, JSON text, JSON text in a JSON string; the keys stay in their order, the text stays as it is."""
    data = {"b": 1, "a": "é <"}
    text = json.dumps(data, ensure_ascii=False)
    for template in ("chatml", TOOL_TEMPLATE):
        engine = ScriptedEngine(pocket_model(tmp_path, template), lambda prompt, sampling: "ok")

        async def policy(task: molt.Task, model: molt.Model) -> None:
            for arguments in (data, text, json.dumps(data), json.dumps(text), json.dumps(data, indent=1)):
                asked: Any = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}]
                said: Any = {"role": "assistant", "content": None, "tool_calls": asked}
                answer: Any = {"role": "tool", "content": "x", "tool_call_id": "c1"}
                await model.chat([{"role": "user", "content": "q"}, said, answer], tools=[add])
            for nothing in (None, "", {}, "{}", "null"):
                said = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": nothing}}]}
                await model.chat([{"role": "user", "content": "q"}, said, {"role": "tool", "content": "x"}])

        trajectory = await run(policy, engine)
        assert trajectory.error is None, trajectory.error
        some, none = set(prompts(engine)[:5]), set(prompts(engine)[5:])
        assert (len(some), len(none)) == (1, 1)
        assert '"arguments": {"b": 1, "a": "é <"}}' in some.pop()
        assert '"arguments": {}}' in none.pop()


async def test_f40_results_in_any_order_give_one_prompt_and_one_segment(tmp_path: Path) -> None:
    """F40: the template places results by position; the second request sends them in another order."""
    engine = ScriptedEngine(
        pocket_model(tmp_path, TOOL_TEMPLATE), [call("weather") + call("time"), "a", "b", "c", "unused"]
    )

    def weather() -> str:
        """Weather."""
        return "rain"

    def time() -> str:
        """Time."""
        return "noon"

    async def policy(task: molt.Task, model: molt.Model) -> None:
        tools = [weather, time]
        asked = await model.chat("q", tools=tools)
        answers = [await model.call_tool(c, tools) for c in asked.tool_calls]
        more: molt.Message = {"role": "user", "content": "more"}
        for given in (answers, answers[::-1], [{**m, "name": ""} for m in answers[::-1]]):
            await model.chat([*asked.messages, *given, more], tools=tools)  # type: ignore[list-item]
        wrong: molt.Message = {**answers[0], "tool_call_id": "call_9"}
        with pytest.raises(molt.RequestError, match=r"message 3 has tool_call_id='call_9', which no pending call has"):
            await model.chat([*asked.messages, answers[1], wrong], tools=tools)

    trajectory = await run(policy, engine)
    assert trajectory.error is None, trajectory.error
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 0, 0]
    assert len(set(prompts(engine)[1:])) == 1
    assert "weather: rain<|im_end|>\n<|im_start|>tool\ntime: noon<|im_end|>" in prompts(engine)[1]


async def test_f41_a_guess_is_refused_before_the_engine(pocket: str) -> None:
    """F41: one result without an id for two calls of one name."""
    engine = ScriptedEngine(pocket, [ADD * 2, "b"])

    async def policy(task: molt.Task, model: molt.Model) -> None:
        reply = await model.chat("q", tools=[add])
        answer: molt.Message = {"role": "tool", "content": "3"}
        with pytest.raises(molt.RequestError, match=r"model\.chat: message 2 has no tool_call_id and is ambiguous"):
            await model.chat([*reply.messages, answer], tools=[add])
        await model.chat([*reply.messages, {**answer, "tool_call_id": "call_0_0"}, answer], tools=[add])

    trajectory = await run(policy, engine)
    assert trajectory.error is None, trajectory.error
    assert len(engine.requests) == 2
    assert trajectory.turns[1].parent == 0


def asks(*ids: str) -> Any:
    calls = [{"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(content: str, id: str = "") -> Any:
    return {"role": "tool", "content": content, "tool_call_id": id}


QUESTION: Any = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("first", "then", "read"),
    [
        # an earlier request gave the results in another order
        (
            [asks("c1", "c2"), result("two", "c2"), result("one", "c1")],
            [asks("c1", "c2"), result("two", "c2"), QUESTION],
            ["two"],
        ),
        # ids that have to be made unique, and a result that changed
        (
            [asks("c1", "c1"), result("one", "c1"), result("two", "c1")],
            [asks("c1", "c1"), result("one", "c1"), result("TWO", "c1")],
            ["one", "TWO"],
        ),
        ([asks("c1", "c1")], [asks("c1", "c1"), result("one", "c1"), result("two", "c1")], ["one", "two"]),
        ([asks("", "")], [asks("", ""), result("one"), result("two")], ["one", "two"]),
        ([asks("", ""), result("one"), result("two")], [asks("", ""), result("one"), result("two"), QUESTION], None),
    ],
)
async def test_what_an_earlier_request_held_is_read_in_the_same_way(
    pocket: str, first: list[Any], then: list[Any], read: list[str] | None
) -> None:
    """A request that repeats part of another is matched as if it were the first."""

    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.chat([QUESTION, *first])
        reply = await model.chat([QUESTION, *then])
        assert [m["content"] for m in reply.messages if m["role"] == "tool"] == (read or ["one", "two"])

    await ran(pocket, policy, "a", "b")


async def test_a_result_of_an_answered_call_is_as_ambiguous_the_second_time(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        history = [QUESTION, asks("c1"), result("one")]
        await model.chat(history)
        with pytest.raises(molt.RequestError, match="ambiguous"):
            await model.chat([*history, result("two")])

    await ran(pocket, policy, "a")


# --- replies that come back changed -----------------------------------------------------------------------------------

THOUGHT = "<think>hm</think>Let me see. " + call("add", '{"a": 1,  "b": 2}') + call("add", '{"a": 3, "b": 4}')


def incomplete(message: int) -> str:
    return f"message {message} was echoed incompletely and is as it was sampled"


def without_reasoning(message: Any) -> None:
    del message["reasoning"]


def other_reasoning(message: Any) -> None:
    message["reasoning_content"] = message.pop("reasoning") + " edited"


def arguments_as_data(message: Any) -> None:
    for asked in message["tool_calls"]:
        asked["function"]["arguments"] = json.loads(asked["function"]["arguments"])


def arguments_in_other_words(message: Any) -> None:
    for asked in message["tool_calls"]:
        swapped = dict(reversed(json.loads(asked["function"]["arguments"]).items()))
        asked["function"]["arguments"] = json.dumps(json.dumps(swapped))


def content_as_parts(message: Any) -> None:
    message["content"] = [{"type": "text", "text": part} for part in ("Let me ", "see.")]


def more_keys(message: Any) -> None:
    message |= {"refusal": None, "audio": None, "annotations": [], "function_call": None, "index": 0}


@pytest.mark.parametrize(
    "change",
    [
        without_reasoning,
        other_reasoning,
        arguments_as_data,
        arguments_in_other_words,
        content_as_parts,
        more_keys,
    ],
)
async def test_f43_a_cosmetic_change_of_a_reply_continues_the_segment(pocket: str, change: Any) -> None:
    """F43: and the trained tokens are the sampled ones, whatever the agent sent back."""

    async def policy(task: molt.Task, model: molt.Model) -> None:
        reply = await model.chat("q", tools=[add])
        assert (reply.reasoning, reply.text) == ("hm", "Let me see.")
        echo = reply.message
        change(echo)
        answers = [await model.call_tool(c, [add]) for c in reply.tool_calls]
        history: list[molt.Message] = [{"role": "user", "content": "q"}, echo, *answers]
        second = await model.chat(history, tools=[add])
        await model.chat([*history, second.message, {"role": "user", "content": "more"}], tools=[add])

    trajectory = await ran(pocket, policy, THOUGHT, "10", "bye")
    assert lineage(trajectory) == [(None, "first call"), (0, ""), (1, "")]
    assert trained(pocket, trajectory) == [f"{THOUGHT}<|im_end|>10<|im_end|>bye"]


@pytest.mark.parametrize("content", [None, "", []])
@pytest.mark.parametrize("with_ids", [True, False])
async def test_f43_no_content_is_empty_content_and_ids_may_be_lost(pocket: str, content: Any, with_ids: bool) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        reply = await model.chat("q", tools=[add])
        echo: Any = {**reply.message, "content": content}
        answer: Any = await model.call_tool(reply.tool_calls[0], [add])
        if not with_ids:
            del echo["tool_calls"][0]["id"], answer["tool_call_id"]
        second = await model.chat([{"role": "user", "content": "q"}, echo, answer], tools=[add])
        await model.chat([*second.messages, {"role": "user", "content": "more"}], tools=[add])

    trajectory = await ran(pocket, policy, ADD, "3", "bye")
    assert lineage(trajectory) == [(None, "first call"), (0, ""), (1, "")]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kept", [0, 1])
async def test_f43_a_reply_that_is_echoed_incompletely_stays_as_it_was_sampled(
    pocket: str, kept: int, split: bool
) -> None:
    """F43: clients drop the reasoning and all but one of the parallel calls, or send text and calls as two messages.
    What was left out is no change: one segment, the sampled tokens stay, and the record says so."""

    async def policy(task: molt.Task, model: molt.Model) -> None:
        reply = await model.chat("q", tools=[add])
        echo: Any = {"role": "assistant", "content": reply.text, "tool_calls": [reply.tool_calls[kept]]}
        echoes = [{**echo, "tool_calls": []}, {**echo, "content": None}] if split else [echo]
        answer = await model.call_tool(reply.tool_calls[kept], [add])
        history: list[molt.Message] = [{"role": "user", "content": "q"}, *echoes, answer]
        second = await model.chat(history, tools=[add])
        await model.chat([*history, second.message, {"role": "user", "content": "more"}], tools=[add])

    trajectory = await ran(pocket, policy, THOUGHT, "10", "bye")
    assert lineage(trajectory) == [(None, "first call"), (0, ""), (1, "")]
    assert trained(pocket, trajectory) == [f"{THOUGHT}<|im_end|>10<|im_end|>bye"]
    assert [turn.remarks for turn in trajectory.turns] == [(), (incomplete(1),), ()]  # later turns need not repeat it
    assert trajectory.turns[1].messages[1] == trajectory.turns[0].message
    assert trajectory.turns[1].messages[2].get("tool_call_id") == f"call_0_{kept}"


def whole(message: Any) -> list[Any]:
    return [message]


def plain(message: Any) -> list[Any]:
    """Without reasoning and ids; arguments as data."""
    del message["reasoning"]
    arguments_as_data(message)
    for asked in message["tool_calls"]:
        del asked["id"]
    return [{**message, "index": 0}]


def one_call(message: Any) -> list[Any]:
    del message["tool_calls"][0]
    return [message]


def one_call_of_another_id(message: Any) -> list[Any]:
    message["tool_calls"][1]["id"] = "mine"
    return one_call(message)


def split(message: Any) -> list[Any]:
    """The second message lacks the ids as well, so that they are made of positions."""
    (calls,) = plain({**message, "content": None})
    return [{"role": "assistant", "content": message["content"]}, calls]


def two_texts(message: Any) -> list[Any]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]}]


@pytest.mark.parametrize("echo", [whole, plain, one_call, one_call_of_another_id, split, two_texts])
async def test_f43_a_client_that_echoes_in_its_own_way_costs_the_same_in_each_turn(
    pocket: str, echo: Callable[[Any], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F43: its echoes are read once, and what is restored of them is restored and remarked upon once."""
    read: list[Any] = []
    monkeypatch.setattr(graph, "normalize_one", lambda *args: read.append(args) or messages.normalize_one(*args))
    hashed: list[Any] = []
    canonical = graph.canonical
    monkeypatch.setattr(graph, "canonical", lambda message: hashed.append(message) or canonical(message))
    costs: list[tuple[int, int]] = []

    async def policy(task: molt.Task, model: molt.Model) -> None:
        history: list[Any] = [QUESTION]
        for _ in range(7):
            read.clear()
            hashed.clear()
            reply = await model.chat(history, tools=[add])
            costs.append((len(read), len(hashed)))
            echoes = echo(reply.message)
            asked = echoes[-1]["tool_calls"]
            history += [*echoes, *[{**result("3", call.get("id", "")), "name": "add"} for call in asked]]

    trajectory = await ran(pocket, policy, *[THOUGHT] * 7)
    assert [turn.parent for turn in trajectory.turns] == [None, *range(6)]
    assert costs[3:] == [costs[2]] * 4
    restores = echo in (one_call, one_call_of_another_id, split)
    assert trajectory.turns[0].remarks == ()
    start = 1
    for turn, parent in zip(trajectory.turns[1:], trajectory.turns, strict=False):
        assert turn.remarks == ((incomplete(start),) if restores else ())
        ids = [call["id"] for call in parent.message["tool_calls"]]
        answered = [message.get("tool_call_id") for message in turn.new_messages if message["role"] == "tool"]
        assert answered == ids[-len(answered) :]
        start += 1 + len(answered)


async def test_f43_an_incomplete_echo_is_of_the_reply_that_has_its_calls(pocket: str) -> None:
    """F43: of several replies to one prompt; where two have the calls, the ids tell, else it is the newest."""
    calls = [call("add", f'{{"a": {i}, "b": 0}}') for i in range(4)]
    replies = [calls[0] + calls[1], calls[2] + calls[3], calls[0] + calls[3]]

    async def policy(task: molt.Task, model: molt.Model) -> None:
        asked = [await model.chat("q", tools=[add]) for _ in replies]
        for reply, kept in [(asked[0], 1), (asked[1], 0), (asked[0], 0), (asked[2], 0)]:
            echo = reply.message
            echo["tool_calls"] = [echo["tool_calls"][kept]]
            await model.chat([QUESTION, echo, result("3", echo["tool_calls"][0]["id"])], tools=[add])
        unknown = {**asked[0].message, "tool_calls": [{**asked[0].tool_calls[0], "id": "mine"}]}
        await model.chat([QUESTION, unknown, result("3", "mine")], tools=[add])

    trajectory = await ran(pocket, policy, *replies, *"abcde")
    assert [turn.parent for turn in trajectory.turns] == [None, None, None, 0, 1, 0, 2, 2]
    assert {turn.remarks for turn in trajectory.turns[3:]} == {(incomplete(1),)}


async def test_f43_only_what_was_sampled_is_restored(pocket: str) -> None:
    """F43: not a message that the agent wrote itself, and not for a fork that does not see the reply."""

    async def policy(task: molt.Task, model: molt.Model) -> None:
        fork = model.fork()
        await model.chat([QUESTION, asks("c1", "c2"), result("one", "c1"), QUESTION])
        reply = await model.chat([QUESTION, asks("c1"), result("one", "c1"), QUESTION])
        assert reply.messages[1] == asks("c1")
        asked = await model.chat("add", tools=[add])
        echo = asked.message
        del echo["tool_calls"][1]
        echoed: list[Any] = [{"role": "user", "content": "add"}, echo, result("3", "call_2_0")]
        restored = await model.chat(echoed, tools=[add])
        echoed += [restored.message, QUESTION]
        restored = await model.chat(echoed, tools=[add])
        assert restored.messages[1] == asked.message
        kept = await fork.chat(echoed, tools=[add])
        assert kept.messages[1] == echo

    trajectory = await ran(pocket, policy, "a", "b", ADD + ADD, *"cde")
    assert [turn.parent for turn in trajectory.turns] == [None, None, None, 2, 3, None]
    assert trajectory.turns[5].fork_reason == "first call"


async def test_f43_messages_are_numbered_as_the_client_sent_them(pocket: str) -> None:
    """F43: also behind a reply that came back as two; ids of calls without one are made of these numbers."""

    async def policy(task: molt.Task, model: molt.Model) -> None:
        asked = await model.chat("q", tools=[add])
        history = [QUESTION, *split(asked.message), result("3"), result("7")]
        for message in history[-2:]:
            message["name"] = "add"
        asked = await model.chat(history, tools=[add])
        echo: Any = asked.message
        del echo["tool_calls"][0]["id"]
        history += [echo, result("3")]
        reply = await model.chat(history, tools=[add])
        history += [reply.message, QUESTION]
        await model.chat(history, tools=[add])
        with pytest.raises(molt.RequestError, match=r"message 9 is a tool result, but no assistant message"):
            await model.chat([*history, result("3")], tools=[add])

    trajectory = await ran(pocket, policy, THOUGHT, ADD, "3", "bye")
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1, 2]


@pytest.mark.parametrize("renumbered", [False, True])
async def test_f38_a_renumbered_echo_gives_no_result_to_another_call(pocket: str, renumbered: bool) -> None:
    """F38, F40: a client that drops the first call may give the second one the first one's id."""

    async def policy(task: molt.Task, model: molt.Model) -> None:
        reply = await model.chat("q", tools=[add])
        first, second = reply.tool_calls
        call_id = first["id"] if renumbered else second["id"]
        echo: Any = {"role": "assistant", "content": reply.text, "tool_calls": [{**second, "id": call_id}]}
        result: Any = {"role": "tool", "tool_call_id": call_id, "content": "7"}
        await model.chat([{"role": "user", "content": "q"}, echo, result], tools=[add])

    trajectory = await ran(pocket, policy, THOUGHT, "7")
    first_turn, second_turn = trajectory.turns
    assert second_turn.parent == 0
    assert second_turn.new_messages[0]["tool_call_id"] == (first_turn.message["tool_calls"][1]["id"])


async def test_f43_parallel_calls_that_are_echoed_one_by_one_are_not_doubled(pocket: str) -> None:
    """F43: each call with its result behind it is another history; restoring both calls would show one twice."""

    async def policy(task: molt.Task, model: molt.Model) -> None:
        reply = await model.chat("q", tools=[add])
        history: list[Any] = [{"role": "user", "content": "q"}]
        for text, call in zip((reply.text, ""), reply.tool_calls, strict=True):
            history.append({"role": "assistant", "content": text, "tool_calls": [call]})
            history.append({"role": "tool", "tool_call_id": call["id"], "content": "7"})
        await model.chat(history, tools=[add])

    trajectory = await ran(pocket, policy, THOUGHT, "7")
    assert trajectory.turns[1].parent is None
    assert not trajectory.turns[1].remarks
    assert [len(m.get("tool_calls") or ()) for m in trajectory.turns[1].messages] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("extra", ["cycle", "deep", "odd"])
async def test_what_a_message_holds_beside_its_own_keys_stops_nothing(pocket: str, extra: str) -> None:
    class Odd(dict[str, Any]):
        def items(self) -> Any:
            raise ValueError("odd")

    cycle: list[Any] = []
    cycle.append(cycle)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    kept: Any = {"cycle": cycle, "deep": deep, "odd": Odd(a=1)}[extra]

    async def policy(task: molt.Task, model: molt.Model) -> None:
        history: list[Any] = [{"role": "user", "content": "q", "extra": kept}]
        reply = await model.chat(history)
        await model.chat([*history, reply.message, {"role": "user", "content": "more"}])

    trajectory = await ran(pocket, policy, "a", "b")
    assert lineage(trajectory) == [(None, "first call"), (0, "")]


async def test_the_order_of_arguments_that_are_given_as_data_is_seen(pocket: str) -> None:
    """F23: a template writes the keys in their order, so another order is another request."""
    orders: list[dict[str, int]] = [{"a": 1, "b": 2}, {"b": 2, "a": 1}]

    async def policy(task: molt.Task, model: molt.Model) -> None:
        for arguments in orders:
            call: Any = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
            asked: list[Any] = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
            await model.chat([*asked, {"role": "tool", "tool_call_id": "c", "content": "3"}, *asked[:1]], tools=[add])

    trajectory = await ran(pocket, policy, "a", "b")
    written = [turn.messages[1]["tool_calls"][0]["function"]["arguments"] for turn in trajectory.turns]
    assert written == [json.dumps(arguments) for arguments in orders]


def dropped_all_calls(message: Any) -> None:
    del message["tool_calls"]


def other_text(message: Any) -> None:
    message["content"] = "Let me see!"


def other_arguments(message: Any) -> None:
    message["tool_calls"][0]["function"]["arguments"] = '{"a": 1, "b": 3}'


def swapped_calls(message: Any) -> None:
    message["tool_calls"].reverse()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_text, "message 1 (assistant) changed at character 10"),
        (dropped_all_calls, "message 1 (assistant) has other tool calls"),
        (other_arguments, "message 1 (assistant) has other tool calls"),
        (swapped_calls, "message 1 (assistant) has other tool calls"),
    ],
)
async def test_f43_a_change_of_what_a_reply_says_forks_with_a_reason(pocket: str, change: Any, words: str) -> None:
    """F43: the model would read something that it did not say; both segments train what was sampled in them."""

    async def policy(task: molt.Task, model: molt.Model) -> None:
        reply = await model.chat("q", tools=[add])
        echo = reply.message
        change(echo)
        answers = [await model.call_tool(c, [add]) for c in echo.get("tool_calls", ())]
        await model.chat([{"role": "user", "content": "q"}, echo, *answers], tools=[add])

    trajectory = await ran(pocket, policy, THOUGHT, "10")
    assert trajectory.turns[1].parent is None
    assert words in trajectory.turns[1].fork_reason
    assert trained(pocket, trajectory) == [THOUGHT, "10"]


async def test_f43_the_result_of_a_dropped_call_is_refused(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        reply = await model.chat("q", tools=[add])
        echo = reply.message
        del echo["tool_calls"][1]
        answers = [await model.call_tool(c, [add]) for c in reply.tool_calls]
        with pytest.raises(molt.RequestError, match="tool_call_id='call_0_1', which no pending call has"):
            await model.chat([{"role": "user", "content": "q"}, echo, *answers], tools=[add])

    await ran(pocket, policy, THOUGHT)
