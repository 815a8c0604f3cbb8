"""The handle that a policy gets: calls, the tool loop, sampling, credit. Everything goes through ``molt.arollout``."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import molt_sdk as molt
from molt_sdk.model import SamplingRules
from molt_sdk.testing import Script, ScriptedEngine

pytestmark = pytest.mark.anyio

Policy = Callable[[Any, molt.Model], Awaitable[Any]]


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


async def run(policy: Any, engine: ScriptedEngine, *rest: Any, **options: Any) -> molt.Trajectory:
    """The one trajectory of one task."""
    if not rest and "tasks" not in options:
        options["tasks"] = [{"prompt": "q"}]
    groups = await molt.arollout(policy, *rest, engine=engine, **options)
    return groups[0].trajectories[0]


async def inside(pocket: str, policy: Policy, *replies: Any, **options: Any) -> molt.Trajectory:
    """Run a policy that asserts things itself."""
    trajectory = await run(policy, ScriptedEngine(pocket, list(replies)), **options)
    assert trajectory.error is None, trajectory.error
    return trajectory


# --- replies ----------------------------------------------------------------------------------------------------------


async def test_what_a_reply_says(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        reply = await model.chat([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}])
        assert reply.text == "hi"
        assert reply.reasoning is None
        assert reply.tool_calls == []
        assert reply.message == {"role": "assistant", "content": "hi"}
        assert reply.messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, reply.message]
        assert (reply.finish_reason, reply.truncated) == ("stop", False)
        assert reply.token_ids == [*b"hi", 258]
        assert reply.logprobs == [-0.5, -1.0, -2.0]
        assert reply.versions == [1, 1, 2]
        # each message: two control tokens, its role and text in bytes, two newlines; then the generation prompt
        prompt = (2 + len("system\ns\n")) + (2 + len("user\nq\n")) + 1 + len("assistant\n")
        assert reply.usage == {"prompt_tokens": prompt, "completion_tokens": 3, "total_tokens": prompt + 3}
        assert reply.id.endswith("/0")
        assert "hi" in repr(reply)

    reply = Script(text="hi", logprobs=[-0.5, -1.0, -2.0], versions=[1, 1, 2])
    trajectory = await inside(pocket, policy, reply)
    assert trajectory.text == "hi"


async def test_what_a_user_does_to_a_reply_changes_no_record(pocket: str) -> None:
    def noop() -> str:
        """Nothing."""
        return "fine"

    async def policy(task: molt.Task, model: molt.Model) -> None:
        first = await model.chat("q", tools=[noop])
        first.message["content"] = "forged"
        first.tool_calls[0]["function"]["name"] = "forged"
        first.messages[0]["content"] = "forged"
        history = first.messages
        result = await model.call_tool(first.tool_calls[0], [noop])
        history.append(result)
        result["content"] = "forged"
        history[-1] = {**result, "content": "fine"}
        await model.chat(history, tools=[noop])

    trajectory = await inside(pocket, policy, call("noop"), "done")
    assert "forged" not in str(trajectory.turns)
    assert "forged" not in str(trajectory.tool_executions)
    assert trajectory.turns[1].parent == 0


async def test_reasoning_is_apart_where_tools_are_offered(pocket: str) -> None:
    def noop() -> None:
        """Nothing."""

    async def policy(task: molt.Task, model: molt.Model) -> None:
        reply = await model.chat("q", tools=[noop])
        assert (reply.reasoning, reply.text, reply.tool_calls) == (f"maybe {call('noop')}", "Done.", [])  # F44

    await inside(pocket, policy, f"<think>maybe {call('noop')}</think>Done.")


async def test_complete_takes_text_or_ids_and_is_a_root(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        assert (await model.complete("Once")).text == " upon"
        assert (await model.complete([1, 2, 3])).token_ids == [9, 258]
        assert (await model.complete("Once")).messages[0] == {"role": "user", "content": "Once"}

    trajectory = await inside(pocket, policy, " upon", [9, 258], "x")
    assert [turn.prompt_token_ids for turn in trajectory.turns] == [[*b"Once"], [1, 2, 3], [*b"Once"]]
    assert [(turn.parent, turn.fork_reason) for turn in trajectory.turns] == [(None, "raw completion")] * 3
    assert trajectory.certify().trained_tokens == 6 + 2 + 2


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "empty"),
        ("a\ud800", "lone surrogate at character 1"),
        ([1, -1], "-1 at position 1"),
        ([259], "259 at position 0 is no token id"),
        (["a"], "'a' at position 0"),
        ([True], "True at position 0"),
    ],
)
async def test_raw_prompts_that_cannot_be_sampled_from(pocket: str, prompt: Any, words: str) -> None:
    engine = ScriptedEngine(pocket, ["a"])

    async def policy(task: molt.Task, model: molt.Model) -> None:
        with pytest.raises(molt.RequestError, match=words):
            await model.complete(prompt)

    assert (await run(policy, engine)).error is None
    assert engine.requests == []


@pytest.mark.parametrize(
    ("options", "words"),
    [({"tool_choice": "required"}, "required"), ({"response_format": {"type": "json_object"}}, "json_object")],
)
async def test_structured_output_is_refused(pocket: str, options: Any, words: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        with pytest.raises(molt.RequestError, match=words):
            await model.chat("q", **options)

    await inside(pocket, policy)


async def test_tool_choice_none_shows_no_tools(pocket: str) -> None:
    def noop() -> None:
        """Nothing."""

    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.chat("q", tools=[noop], tool_choice="none")

    trajectory = await inside(pocket, policy, "a")
    assert trajectory.turns[0].tools == ()


# --- sampling ---------------------------------------------------------------------------------------------------------


async def test_each_call_has_its_own_sampling(pocket: str) -> None:
    """F104: what one call asks for reaches no other call, and the caller's object is left alone."""
    sampling = molt.SamplingParams(temperature=0.7, max_tokens=50)
    engine = ScriptedEngine(pocket, lambda prompt, params: "a")

    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.chat("a", max_tokens=8, temperature=0.0)
        await model.chat("b")
        await model.complete("c", stop=["x", "y"])
        await model.run("d", stop="z", seed=None)

    assert (await run(policy, engine, sampling=sampling)).error is None
    sent = [request.sampling for request in engine.requests]
    assert [(s.temperature, s.max_tokens, s.stop) for s in sent] == [
        (0.0, 8, ()),
        (0.7, 50, ()),
        (0.7, 50, ("x", "y")),
        (0.7, 50, ("z",)),
    ]
    assert sampling == molt.SamplingParams(temperature=0.7, max_tokens=50)


async def test_seeds_differ_between_calls_and_siblings_and_repeat_between_runs(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.chat("a")
        await model.chat("b")

    async def seeds(**options: Any) -> list[int | None]:
        engine = ScriptedEngine(pocket, lambda prompt, params: "a")
        await molt.arollout(policy, [{"prompt": "q"}, {"prompt": "q"}], engine=engine, group_size=2, **options)
        return sorted(request.sampling.seed or 0 for request in engine.requests)

    first = await seeds(sampling=molt.SamplingParams(seed=1))
    assert len(set(first)) == 8
    assert await seeds(sampling=molt.SamplingParams(seed=1)) == first
    assert set(await seeds(sampling=molt.SamplingParams(seed=2))).isdisjoint(first)
    assert set(await seeds(sampling=molt.SamplingParams(seed=1), seed=1)).isdisjoint(first)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"temprature": 1.0}, "unknown sampling parameter 'temprature'; did you mean 'temperature'"),
        ({"max_token": 1}, "did you mean 'max_tokens'"),
        ({"zzz": 1}, "known are temperature, top_p"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 8.5}, "max_tokens=8.5"),
        ({"max_tokens": None}, "max_tokens=None"),
        ({"top_p": 0}, "top_p=0"),
        ({"stop": [""]}, "stop="),
        ({"stop": [3]}, "stop="),
        ({"stop": 5}, "stop=5 is not valid; stop must be non-empty strings"),
        ({"seed": "a"}, "seed='a'"),
    ],
)
async def test_sampling_that_cannot_be_is_refused_before_the_engine(pocket: str, asked: Any, words: str) -> None:
    engine = ScriptedEngine(pocket, ["a"])

    async def policy(task: molt.Task, model: molt.Model) -> None:
        with pytest.raises(molt.RequestError, match=words) as error:
            await model.chat("q", **asked)
        assert "model.chat" in str(error.value)

    assert (await run(policy, engine)).error is None
    assert engine.requests == []


@pytest.mark.parametrize("stop", ["ab", ["ab"], ("ab",)])
def test_stop_is_one_string_or_several(stop: Any) -> None:
    assert molt.SamplingParams(stop=stop).stop == ("ab",)


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.1},
    {"logit_bias": ((5, 1.0),)},
]


@pytest.mark.parametrize("asked", FILTERS, ids=str)
def test_training_refuses_what_the_trainer_cannot_reproduce(asked: dict[str, Any]) -> None:
    """F130."""
    defaults = molt.SamplingParams(temperature=0.8)
    (name,) = asked
    with pytest.raises(molt.RequestError, match=rf'{name}.*sampling_from="config"'):
        SamplingRules(defaults, training=True, overrule=False).resolve(asked, "model.chat")
    overruled = SamplingRules(defaults, training=True, overrule=True).resolve({**asked, "max_tokens": 3}, "model.chat")
    assert overruled == molt.SamplingParams(temperature=0.8, max_tokens=3)
    assert getattr(SamplingRules(defaults, False, False).resolve(asked, "model.chat"), name) == asked[name]


@pytest.mark.parametrize("asked", FILTERS, ids=str)
@pytest.mark.parametrize("overrule", [False, True])
def test_a_fork_that_is_not_trained_may_sample_as_it_likes(asked: dict[str, Any], overrule: bool) -> None:
    rules = SamplingRules(molt.SamplingParams(), training=True, overrule=overrule)
    (name,) = asked
    assert getattr(rules.resolve(asked, "model.chat", trainable=False), name) == asked[name]


async def test_sampling_from_config_overrules_the_agent(pocket: str) -> None:
    engine = ScriptedEngine(pocket, lambda prompt, params: "a")

    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.chat("q", temperature=0.0, max_tokens=4)
        await model.fork("judge", trainable=False).chat("q", temperature=0.0)

    config = molt.RolloutConfig(sampling_from="config")
    assert (await run(policy, engine, config=config, sampling=molt.SamplingParams(temperature=0.9))).error is None
    assert [(r.sampling.temperature, r.sampling.max_tokens) for r in engine.requests] == [(0.9, 4), (0.0, 512)]


# --- the tool loop ----------------------------------------------------------------------------------------------------


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def test_the_loop_calls_tools_until_a_reply_has_none(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        reply = await model.run("1 + 2 + 3?", tools=[add], system="Be exact.")
        assert reply.text == "6"
        roles = [m["role"] for m in reply.messages]
        assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]

    replies = call("add", '{"a": 1, "b": 2}'), call("add", '{"a": 3, "b": 3}'), "6"
    trajectory = await inside(pocket, policy, *replies)
    assert [e.message["content"] for e in trajectory.tool_executions] == ["3", "6"]
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
    assert [c["id"] for c in trajectory.tool_calls] == ["call_0_0", "call_1_0"]


async def test_several_calls_of_one_reply_run_in_order(pocket: str) -> None:
    """F35, F38, F40: each call has an id of its own and its result follows in order."""
    both = call("add", '{"a": 1, "b": 1}') + call("add", '{"a": 2, "b": 2}')

    async def policy(task: molt.Task, model: molt.Model) -> None:
        reply = await model.run("q", tools=[add])
        results = [m for m in reply.messages if m["role"] == "tool"]
        assert [(m["tool_call_id"], m["content"]) for m in results] == [("call_0_0", "2"), ("call_0_1", "4")]

    await inside(pocket, policy, both, "done")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (call("sub"), "no tool 'sub'; known are add"),
        (call("add", '{"a": 1}'), 'missing argument "b"'),
        (call("add", '{"a": "x", "b": 1}'), '"a" must be'),
        ('<tool_call>{"name": "add", "arguments": </tool_call>', "not executed"),
        ("<tool_call></tool_call>", "empty"),
    ],
)
async def test_calls_that_cannot_be_executed_go_back_to_the_model(pocket: str, reply: str, words: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        last = await model.run("q", tools=[add])
        assert last.text == "sorry"
        assert words in str(last.messages[-2]["content"])
        assert str(last.messages[-2]["content"]).startswith("Error: ")

    await inside(pocket, policy, reply, "sorry")


async def test_the_loop_ends_after_max_turns(pocket: str) -> None:
    @molt.environment(max_turns=2)
    class Env:
        @molt.tool
        def noop(self) -> None:
            """Nothing."""

    engine = ScriptedEngine(pocket, lambda prompt, params: call("noop"))
    trajectory = await run(Env, engine, tasks=[{"prompt": "q"}])
    assert (len(trajectory.turns), len(trajectory.tool_executions), trajectory.status) == (2, 1, "ok")

    async def policy(env: Env, model: molt.Model) -> None:
        await model.run("q", tools=env, max_turns=1)
        with pytest.raises(molt.RequestError, match="max_turns=0"):
            await model.run("q", tools=env, max_turns=0)

    trajectory = await run(policy, engine, Env, tasks=[{"prompt": "q"}])
    assert (len(trajectory.turns), len(trajectory.tool_executions), trajectory.error) == (1, 0, None)


async def test_the_loop_ends_where_a_reply_was_cut(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        assert (await model.run("q", tools=[add])).truncated

    cut = Script(text='<tool_call>{"name": "add", "arg', finish_reason="length")
    trajectory = await run(policy, ScriptedEngine(pocket, [cut]))
    assert (trajectory.status, trajectory.tool_executions) == ("truncated", ())


async def test_stop_ends_the_loop_and_its_result_is_recorded(pocket: str) -> None:
    def submit(answer: str) -> None:
        """Hand in the answer."""
        raise molt.Stop(answer)

    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.run("q", tools=[submit, add])

    both = call("submit", '{"answer": "42"}') + call("add", '{"a": 1, "b": 1}')
    trajectory = await inside(pocket, policy, both)
    assert len(trajectory.turns) == 1
    assert [(e.stop, e.message["content"], e.error) for e in trajectory.tool_executions] == [(True, "42", None)]


async def test_call_tool_raises_stop_after_recording_it(pocket: str) -> None:
    def submit() -> None:
        """Hand in."""
        raise molt.Stop("42")

    async def policy(task: molt.Task, model: molt.Model) -> None:
        asked: Any = {"id": "x", "function": {"name": "submit", "arguments": {}}}
        with pytest.raises(molt.Stop) as stop:
            await model.call_tool(asked, [submit])
        assert stop.value.result == "42"
        with pytest.raises(molt.RequestError, match=r"model\.call_tool"):
            await model.call_tool({"name": "submit"}, [submit])  # type: ignore[typeddict-item]

    trajectory = await inside(pocket, policy)
    assert [e.stop for e in trajectory.tool_executions] == [True]


async def test_a_list_of_tools_may_grow_between_calls(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        tools: list[Any] = [add]
        await model.chat("q", tools=tools)

        def more() -> None:
            """More."""

        tools.append(more)
        await model.chat("q", tools=tools)

    trajectory = await inside(pocket, policy, "a", "b")
    assert [len(turn.tools) for turn in trajectory.turns] == [1, 2]


async def test_a_class_cannot_run_tools(pocket: str) -> None:
    @molt.environment
    class Env:
        @molt.tool
        def noop(self) -> None:
            """Nothing."""

    async def policy(task: molt.Task, model: molt.Model) -> None:
        with pytest.raises(molt.RequestError, match="Env is a class; pass the instance"):
            await model.run("q", tools=Env)

    await inside(pocket, policy)


# --- tools and what can go wrong in them ------------------------------------------------------------------------------


class Oops(Exception):
    pass


def failing() -> None:
    """Fail."""
    raise Oops("broken")


def exiting() -> None:
    """Exit."""
    sys.exit(3)


async def cancelling() -> None:
    """Await something that it cancelled."""
    task = asyncio.ensure_future(asyncio.Event().wait())
    task.cancel()
    await task


def cancelling_sync() -> None:
    """Raise what asyncio raises."""
    raise asyncio.CancelledError


def stopping() -> None:
    """Raise what iterators raise."""
    raise StopIteration("end")


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        (failing, "Error: Oops: broken"),
        (exiting, "Error: SystemExit: 3"),
        (cancelling, "t let a CancelledError of its own escape"),
        (cancelling_sync, "t let a CancelledError of its own escape"),
        (stopping, "StopIteration: end"),
    ],
)
@pytest.mark.parametrize("parallel", [False, True])
async def test_what_a_tool_raises_is_text_for_the_model(pocket: str, tool: Any, words: str, parallel: bool) -> None:
    marked = molt.tool(name="t", parallel=parallel)(tool)

    async def policy(task: molt.Task, model: molt.Model) -> None:
        reply = await model.run("q", tools=[marked])
        assert reply.text == "sorry"
        for result in (m for m in reply.messages if m["role"] == "tool"):
            assert words in str(result["content"])

    trajectory = await inside(pocket, policy, call("t") * 2, "sorry")
    assert len(trajectory.tool_executions) == 2
    assert all("Traceback" in str(e.error) for e in trajectory.tool_executions)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    ("error", "status"), [(molt.EngineError("down"), "infra_error"), (molt.Reject("bad task"), "rejected")]
)
async def test_what_is_not_for_the_model_to_read_ends_the_trajectory(
    pocket: str, parallel: bool, error: Exception, status: str
) -> None:
    @molt.tool(parallel=parallel)
    async def judge() -> str:
        """Ask a judge."""
        raise error

    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.run("q", tools=[judge])

    trajectory = await run(policy, ScriptedEngine(pocket, [call("judge") * 2]))
    assert trajectory.status == status
    assert str(error) in str(trajectory.error)


async def test_parameters_may_have_any_name(pocket: str) -> None:
    def odd(fn: int, pinned: int, args: int, kwargs: int, call: int, tool: int) -> int:
        """Odd names."""
        return fn + pinned + args + kwargs + call + tool

    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.run("q", tools=[odd])

    arguments = '{"fn": 1, "pinned": 2, "args": 4, "kwargs": 8, "call": 16, "tool": 32}'
    trajectory = await inside(pocket, policy, call("odd", arguments), "done")
    assert trajectory.tool_executions[0].message["content"] == "63"


async def test_a_tool_timeout_is_text_for_the_model_and_the_loop_goes_on(pocket: str) -> None:
    hang = threading.Event()

    @molt.tool(timeout=0.05)
    async def slow() -> None:
        """Never ends."""
        await asyncio.Event().wait()

    @molt.tool(timeout=0.05)
    def slow_sync() -> None:
        """Never ends."""
        hang.wait()

    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.run("q", tools=[slow, slow_sync])

    try:
        trajectory = await inside(pocket, policy, call("slow") + call("slow_sync"), "done")
    finally:
        hang.set()
    texts = [str(e.message["content"]) for e in trajectory.tool_executions]
    assert texts == [f"Error: {name} took longer than its timeout of 0.05 s" for name in ("slow", "slow_sync")]


async def test_a_timeout_error_of_the_tool_itself_is_not_its_timeout(pocket: str) -> None:
    @molt.tool(timeout=60)
    async def upstream() -> None:
        """Something else was slow."""
        raise TimeoutError("upstream")

    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.run("q", tools=[upstream])

    trajectory = await inside(pocket, policy, call("upstream"), "done")
    assert trajectory.tool_executions[0].message["content"] == "Error: TimeoutError: upstream"


async def test_tools_of_an_environment_are_serial_unless_parallel(pocket: str) -> None:
    """Two calls of a serial tool never overlap; two of a parallel one must, since each waits for the other."""

    @molt.environment
    class Env:
        def __init__(self, task: molt.Task) -> None:
            self.task = task
            self.inside = 0
            self.both = asyncio.Event()
            self.meeting = threading.Barrier(2)

        @molt.tool
        async def serial(self) -> int:
            """Count who is inside."""
            self.inside += 1
            await asyncio.sleep(0)
            seen = self.inside
            self.inside -= 1
            return seen

        @molt.tool(parallel=True)
        async def together(self) -> str:
            """Wait for the other."""
            self.inside += 1
            if self.inside == 2:
                self.both.set()
            await self.both.wait()
            return "met"

        @molt.tool(parallel=True)
        def threads(self) -> str:
            """Wait for the other, on a thread."""
            self.meeting.wait(timeout=30)
            return "met"

    async def policy(env: Env, model: molt.Model) -> None:
        calls: list[Any] = [{"id": str(i), "function": {"name": "serial"}} for i in range(3)]
        results = await asyncio.gather(*(model.call_tool(c, env) for c in calls))
        assert [m["content"] for m in results] == ["1", "1", "1"]
        await model.run("q", tools=env)

    engine = ScriptedEngine(pocket, [call("together") * 2 + call("threads") * 2, "done"])
    trajectory = await run(policy, engine, Env, tasks=[{"prompt": "q"}])
    assert trajectory.error is None, trajectory.error
    assert [e.message["content"] for e in trajectory.tool_executions[3:]] == ["met"] * 4


async def test_a_tool_may_be_a_sub_agent_that_uses_the_same_tools(pocket: str) -> None:
    """The environment's tools are serial, yet a tool that runs tools does not wait for itself."""

    @molt.environment
    class Env:
        model: molt.Model

        @molt.tool
        async def ask_expert(self, question: str) -> str:
            """Ask an expert."""
            return (await self.model.fork("expert").run(question, tools=self)).text

        @molt.tool
        def look_up(self) -> str:
            """Look it up."""
            return "fact"

    async def policy(env: Env, model: molt.Model) -> None:
        env.model = model
        await model.run("q", tools=env)

    replies = [call("ask_expert", '{"question": "why?"}'), call("look_up"), "because", "done"]
    trajectory = await run(policy, ScriptedEngine(pocket, replies), Env, tasks=[{"prompt": "q"}])
    assert trajectory.error is None, trajectory.error
    assert [turn.agent for turn in trajectory.turns] == ["main", "expert", "expert", "main"]
    assert [(e.call["function"]["name"], e.agent) for e in trajectory.tool_executions] == [
        ("look_up", "expert"),
        ("ask_expert", "main"),
    ]


async def test_context_variables_are_visible_in_sync_tools(pocket: str) -> None:
    request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id")

    def who() -> str:
        """Say it."""
        return f"{request_id.get()} {threading.current_thread() is threading.main_thread()}"

    async def policy(task: molt.Task, model: molt.Model) -> None:
        request_id.set("r7")
        await model.run("q", tools=[who])

    trajectory = await inside(pocket, policy, call("who"), "done")
    assert trajectory.tool_executions[0].message["content"] == "r7 False"


# --- credit -----------------------------------------------------------------------------------------------------------


async def test_credit_for_calls_forks_and_the_policy(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        first = await model.chat("a")
        critic = model.fork("critic")
        await critic.chat("b")
        first.reward(0.25)
        model.reward(True, turn=1)
        critic.reward(0.5)
        model.reward(2)
        model.log(length=3, ok=True)
        with pytest.raises(molt.RewardError, match="turn=2 does not exist"):
            model.reward(1, turn=2)
        with pytest.raises(molt.RewardError, match=r"reply\.reward on turn 0 gave 'x'"):
            first.reward("x")
        with pytest.raises(molt.RewardError, match=r"model\.log\(bad=...\).*; a metric is one finite number"):
            model.log(bad="x")

    trajectory = await inside(pocket, policy, "a", "b")
    assert (trajectory.reward, trajectory.agent_rewards) == (2.0, {"critic": 0.5})
    assert [turn.reward for turn in trajectory.turns] == [0.25, 1.0]
    # an agent's tokens: its own reward, else the trajectory's, plus those of its turns
    assert trajectory.agent_reward("main") == 2.25
    assert trajectory.agent_reward("critic") == 1.5
    assert trajectory.metrics == {"length": 3.0, "ok": 1.0}
    assert trajectory.agents == ["main", "critic"]


async def test_forks_that_share_a_name_cannot_have_different_rewards(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> float:
        first, second = model.fork("worker"), model.fork("worker")
        first.reward(2)
        first.reward(1)  # its own: the last one counts
        with pytest.raises(molt.RewardError, match=r"'worker' has the reward 1, this one would get 2; .*worker\{i\}"):
            second.reward(2)
        second.reward(1.0)  # nothing is lost
        model.fork("other").reward(2)
        return 0.0

    trajectory = await inside(pocket, policy)
    assert trajectory.agent_rewards == {"worker": 1.0, "other": 2.0}


async def test_a_reward_of_a_reply_counts_for_all_that_its_agent_said(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> float:
        worker = model.fork("worker")
        for value in (1, 2):  # two roots
            (await worker.chat(str(value))).reward(value)
        return 4.0

    trajectory = await inside(pocket, policy, "a", "b")
    assert trajectory.agent_reward("worker") == 7.0
    assert trajectory.agent_reward("main") == 4.0


async def test_a_fork_may_not_take_the_name_of_the_policy(pocket: str) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> None:
        with pytest.raises(molt.RequestError, match="'main'"):
            model.fork("main")
        assert [model.fork().agent, model.fork().agent] == ["fork1", "fork2"]

    await inside(pocket, policy)
