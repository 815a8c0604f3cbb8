"""``check``: what is said about a model directory and about an agent, without weights."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import molt_sdk as molt
from molt_sdk.cli import main
from molt_sdk.load import load_agent
from molt_sdk.report import Finding
from molt_sdk.testing import TEMPLATES, ScriptedEngine, pocket_model
from tests.families import FAMILIES, write_model

CHATML = TEMPLATES["chatml"]
ROWS = [{"prompt": "What is 6 * 7?", "answer": "42"}]
SHAPES = ["plain chat", "after reasoning", "tool cycle", "user after a tool cycle", "reply cut by length"]


def named(report: molt.Report) -> dict[str, Finding]:
    """By each of the names of a finding: what says the same is one finding."""
    return {name: finding for finding in report.findings for name in finding.name.split(", ")}


def verdicts(report: molt.Report, names: list[str]) -> list[str]:
    found = named(report)
    return [found[name].verdict for name in names]


def episodes(report: molt.Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.name.startswith("episode")]


def family(name: str, directory: Path) -> str:
    return write_model(next(family for family in FAMILIES if family.name == name), directory)


@pytest.fixture
def qwen3(tmp_path: Path) -> str:
    return family("qwen3", tmp_path / "qwen3")


# --- the model --------------------------------------------------------------------------------------------------------


def test_a_plain_chatml_model_is_usable_and_needs_no_weights(tmp_path: Path) -> None:
    path = pocket_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    report = molt.check(model=path)
    found = named(report)
    assert report.ok
    assert {finding.verdict for finding in report.findings} == {"ok"}
    assert report.trajectories == ()
    assert "2,048 tokens" in found["context"].text
    assert "<|im_end|> (258)" in found["EOS"].text
    assert "3 in the tokenizer; the chat template writes <|im_start|>, <|im_end|>" in found["special tokens"].text
    assert found["BOS"].text == "none"
    assert found["form"].text.startswith("emulated, as the chat template does not show schemas and calls: ")
    assert "all is well" in str(report)


def test_every_finding_that_is_not_ok_names_the_next_step(tmp_path: Path) -> None:
    for name in ("gpt-oss", "llama3.1", "mistral-7b", "qwq", "smollm3", "nemotron-nano-2"):
        report = molt.check(model=family(name, tmp_path / name))
        assert report.ok, report
        assert report.warnings
        assert all(bool(finding.advice) == (finding.verdict != "ok") for finding in report.findings)


NORMAL = "Normal for models that reason: training stays exact, and what segments share is computed once"


def test_a_template_that_drops_reasoning_starts_new_segments(qwen3: str) -> None:
    """F2. Where a user message follows, that is what such models are made for: told, but no warning."""
    report = molt.check(model=qwen3)
    found = named(report)
    assert report.warnings == []
    assert {name: found[name].text for name in SHAPES} == {
        "plain chat": "yes",
        "after reasoning": f"no, the chat template dropped the reasoning of message 1. {NORMAL}",
        "tool cycle": "yes",
        "user after a tool cycle": f"no, the chat template dropped the reasoning of message 1. {NORMAL}",
        "reply cut by length": "yes",
    }
    assert found["after reasoning"] is found["user after a tool cycle"]
    assert found["reasoning and content"].text == found["reasoning and a call"].text == "yes"
    assert "native" in found["form"].text
    assert "molt_sdk reads the calls" in found["form"].text


def test_who_reads_the_calls(tmp_path: Path) -> None:
    form = named(molt.check(model=family("glm-4.5", tmp_path / "model")))["form"]
    assert "the library renderers (glm-4.5) reads the calls" in form.text


@pytest.mark.parametrize("name", ["qwq", "nemotron-nano-2"])
def test_a_template_that_drops_reasoning_in_a_tool_loop_costs_something(name: str, tmp_path: Path) -> None:
    """Each step of the loop is a segment, and that is counted on a loop of ten; what they share is computed once."""
    cycle = named(molt.check(model=family(name, tmp_path / "model")))["tool cycle"]
    assert cycle.verdict == "warning"
    assert cycle.text == "no, the chat template dropped the reasoning of message 1"
    cost = re.search(r"10 rounds become 10 segments and ([0-9.]+) times the tokens", cycle.advice)
    assert cost is not None
    assert 1.25 <= float(cost[1]) < 2


def test_a_tool_loop_that_breaks_once_costs_next_to_nothing(tmp_path: Path) -> None:
    """DeepSeek R1's template drops the reasoning of the first step alone; the segments of a run are the same."""
    path = family("deepseek-r1", tmp_path / "model")
    cycle = named(molt.check(model=path))["tool cycle"]
    assert (cycle.verdict, cycle.text) == ("ok", f"no, the chat template dropped the reasoning of message 1. {NORMAL}")

    async def three_calls(task: molt.Task, model: molt.Model) -> float:
        messages: list[molt.Message] = [{"role": "user", "content": "q"}]
        for _ in range(4):
            reply = await model.chat(messages, tools=[look])
            messages = [*reply.messages, *[await model.call_tool(call, [look]) for call in reply.tool_calls]]
        return 1.0

    def look(place: str) -> str:
        """Look around, such as "attic"."""
        return "nothing"

    call = 'So.\n</think>\n\n<tool_call>{"name": "look", "arguments": {"place": "attic"}}</tool_call>'
    [[trajectory]] = molt.rollout(three_calls, ROWS, engine=ScriptedEngine(path, [call] * 4))
    assert [turn.parent for turn in trajectory.turns] == [None, None, 1, 2]


def test_a_system_text_in_the_last_user_message_makes_every_turn_a_segment(tmp_path: Path) -> None:
    """Mistral's templates: nothing but the first characters is shared."""
    report = molt.check(model=family("mistral-7b", tmp_path / "model"))
    plain = named(report)["plain chat"]
    assert plain.verdict == "warning"
    cost = re.search(r"10 rounds become 10 segments and ([0-9.]+) times the tokens", plain.advice)
    assert cost is not None
    assert float(cost[1]) > 2
    assert "10 rounds become 10 segments" in named(report)["user after a tool cycle"].advice


def test_a_closing_token_that_history_replaces_breaks_the_plain_chat(tmp_path: Path) -> None:
    """F8. There is nothing to do about gpt-oss, and nobody is told to."""
    plain = named(molt.check(model=family("gpt-oss", tmp_path / "model")))["plain chat"]
    reason = "no, the reply ended with '<|return|>', but the template closes it with '<|end|>'"
    assert (plain.verdict, plain.text, plain.advice) == ("ok", f"{reason}. {NORMAL}", "")


def test_what_the_generation_prompt_says_about_reasoning(tmp_path: Path) -> None:
    """F10. Reasoning that the prompt opens is part of replies; reasoning that the prompt closes does not come up."""
    opened = molt.check(model=family("qwen3-thinking", tmp_path / "opened"))
    assert "generation prompt ends with '<think>\\n'" in named(opened)["plain chat"].text
    assert verdicts(opened, ["content", "reasoning and content"]) == ["ok", "ok"]
    closed = named(molt.check(model=family("qwen3.5", tmp_path / "closed")))
    assert closed["after reasoning"].text.startswith("does not come up")
    assert "reasoning and content" not in closed


@pytest.mark.parametrize(("name", "dated"), [("llama3.2", True), ("llama3.1", False)])
def test_a_date_in_the_template_is_found_by_rendering(name: str, dated: bool, tmp_path: Path) -> None:
    """F29."""
    assert ("stands still" in named(molt.check(model=family(name, tmp_path / name)))["date"].text) == dated


def test_a_template_that_shows_one_call_per_reply(tmp_path: Path) -> None:
    """F31."""
    found = named(molt.check(model=family("llama3.1", tmp_path / "model")))
    assert found["several calls in a reply"].verdict == "warning"
    assert found["round trip"].verdict == "ok"
    assert found["content and a call"].verdict == "warning"
    assert found["content and a call"].text.startswith("the chat template leaves out the content")


SWALLOWED = {
    "user": ("message.role != 'user' or loop.first", "system", "leaves out message 1 (user)"),
    "assistant": (
        "message.role != 'assistant'",
        "every conversation (replies left out)",
        "the model does not see what it said",
    ),
    "tool": ("message.role != 'tool' and '<tool_r' not in message.content", "results", "leaves out message 2 (tool)"),
}


@pytest.mark.parametrize("role", SWALLOWED)
def test_a_template_that_swallows_messages_is_a_problem(role: str, tmp_path: Path) -> None:
    """F31."""
    condition, name, words = SWALLOWED[role]
    template = CHATML.replace("{{ '<|im_start|>' + m", "{% if " + condition + " %}{{ '<|im_start|>' + m")
    template = template.replace("{% endfor %}", "{% endif %}{% endfor %}")
    report = molt.check(model=pocket_model(tmp_path, template))
    assert named(report)[name] in report.problems
    assert words in named(report)[name].text


def test_a_template_that_changes_arguments_is_a_problem(tmp_path: Path) -> None:
    """F23."""
    template = (
        "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% for c in m.tool_calls or () %}"
        '{{ \'<tool_call>{"name": "\' + c.function.name + \'", "arguments": \' }}'
        "{{ (c.function.arguments | tojson | replace('ü', 'ue')) + '}</tool_call>' }}"
        "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    found = named(molt.check(model=pocket_model(tmp_path, template)))
    assert "native" in found["form"].text
    assert found["round trip"].verdict == "problem"
    (detail,) = found["round trip"].details
    assert "Zürich" in detail
    assert "Zuerich" in detail


def test_what_ends_a_reply(tmp_path: Path) -> None:
    def with_eos(eos: Any) -> Finding:
        path = Path(pocket_model(tmp_path, "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"))
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            settings = json.loads((path / name).read_text())
            settings |= {"eos_token_id": eos} if name == "config.json" else {"eos_token_id": None, "eos_token": None}
            (path / name).write_text(json.dumps(settings))
        return named(molt.check(model=str(path)))["EOS"]

    assert with_eos([256, 258]).text == "a reply ends with <|endoftext|> (256), <|im_end|> (258)"
    assert (with_eos(None).verdict, with_eos(4711).verdict) == ("problem", "problem")
    assert "4711" in with_eos(4711).text


FLAWED = {
    "no end": (CHATML.replace("+ '<|im_end|>' ", ""), "add one: let the template write '<|im_end|>'"),
    "other end": (
        CHATML.replace("<|im_end|>", "<|endoftext|>"),
        "add its id to eos_token_id in generation_config.json",
    ),
    "no generation prompt": (
        CHATML[: CHATML.index("{% if add")],
        "end the template with {% if add_generation_prompt %}",
    ),
    "beginning rewritten": (
        "{{ '<|im_start|>system\n' ~ messages | length ~ ' messages<|im_end|>\n' }}" + CHATML,
        "take what changes out of the template",
    ),
}


@pytest.mark.parametrize("flaw", FLAWED)
def test_a_template_that_keeps_every_conversation_from_going_on(flaw: str, tmp_path: Path) -> None:
    """Its cause is named once and with the next step, nothing else is made of it, and the episodes of a run are what
    the report says: exact, and a segment for each turn. (The model ends its replies with what its configs name.)"""
    template, step = FLAWED[flaw]
    path = pocket_model(tmp_path, template)

    def look(place: str) -> str:
        """Look around, such as "attic"."""
        return f"nothing in {place}"

    report = molt.check(tasks=ROWS, tools=[look], rewards=[right], model=path, limit=1)
    found = named(report)
    (finding, episode) = report.warnings
    assert report.ok
    assert finding is found[f"every conversation ({flaw})"]
    assert step in finding.advice
    assert "10 rounds become 10 segments" in finding.advice
    assert "plain chat" not in found
    assert ("all" in found) == (flaw != "other end")  # of the replies, if they cannot be cut out of a conversation
    assert "2 turns in 2 segments" in episode.text
    assert [execution.message["content"] for t in report.trajectories for execution in t.tool_executions] == [
        "nothing in attic",
        "nothing in attic",
    ]
    assert found["rewards"].text == "1 for task.answer; 0 for other words"
    assert all(t.certify().ok for t in report.trajectories)


def right(task: molt.Task, trajectory: molt.Trajectory) -> float:
    return float(trajectory.text == task.answer)


def test_what_is_wrong_with_a_template_in_words(tmp_path: Path) -> None:
    def cause(template: str) -> str:
        report = molt.check(model=pocket_model(tmp_path, template))
        return report.warnings[0].text

    assert cause(FLAWED["other end"][0]) == (
        "no, the chat template closes a reply with '<|endoftext|>', but the model's configs name '<|im_end|>': a reply "
        "that ends so starts a new segment"
    )
    assert "a prompt ends before '<|im_start|>assistant\\n'" in cause(FLAWED["no generation prompt"][0])
    assert "'art|>system\\n1 messages" in cause(FLAWED["beginning rewritten"][0])


def test_plain_text_as_a_template(tmp_path: Path) -> None:
    """No token of its own, and no generation prompt: both are named, and nothing is called a problem."""
    report = molt.check(
        model=pocket_model(tmp_path, "{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}{% endfor %}")
    )
    assert report.ok
    assert [finding.name for finding in report.warnings] == [
        "every conversation (no generation prompt)",
        "every conversation (no end)",
    ]


def test_an_end_token_that_the_template_leaves_to_the_next_message(tmp_path: Path) -> None:
    """GLM's templates write no end, but the token that begins the next message is an EOS of the model."""
    assert molt.check(model=family("glm-4.5", tmp_path / "model")).warnings == []


CALL = "'<tool_call>' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson) + '</tool_call>'"
NATIVE = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or () %}"
    "{{ " + CALL + " }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EMULATED = {
    "no calls": (NATIVE.replace("m.tool_calls or ()", "()"), "does not show calls", "warning"),
    "no schemas": (NATIVE.replace("if tools", "if false"), "does not show schemas", "warning"),
    "neither": (CHATML, "does not show schemas and calls", "ok"),
    "no results": (
        NATIVE.replace("m.content }}", "(m.content if m.role != 'tool' else '') }}"),
        "does not show results",
        "warning",
    ),
    "no results, and arguments as text": (
        NATIVE.replace(CALL, "'calls ' + c.function.name + ' with ' + c.function.arguments").replace(
            "m.content }}", "(m.content if m.role != 'tool' else '') }}"
        ),
        "does not show results",
        "warning",
    ),
    "not readable": (
        NATIVE.replace(CALL, "'call ' + c.function.name + ' ' + (c.function.arguments | string)"),
        "writes tool calls in a form that cannot be read back",
        "warning",
    ),
    "refused": (
        NATIVE.replace("m.tool_calls or ()", "(m.tool_calls and raise_exception('no tools')) or ()"),
        "refuses a tool call and its result",
        "warning",
    ),
}


@pytest.mark.parametrize("kind", EMULATED)
def test_why_tools_are_emulated(kind: str, tmp_path: Path) -> None:
    """It says which part is missing; tool support of the template that is not used is a warning."""
    assert "native" in named(molt.check(model=pocket_model(tmp_path / "native", NATIVE)))["form"].text
    template, reason, verdict = EMULATED[kind]
    form = named(molt.check(model=pocket_model(tmp_path / "model", template)))["form"]
    assert form.text.startswith(f"emulated, as the chat template {reason}")
    assert form.verdict == verdict


def test_a_template_that_cannot_say_what_was_wrong_with_a_call(tmp_path: Path) -> None:
    """An episode in which the model writes an unreadable call would fail in the middle of a run."""
    refuses = "{% for m in messages %}{% if 'Error' in m.content %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    report = molt.check(model=pocket_model(tmp_path / "model", refuses + CHATML))
    assert [finding.name for finding in report.problems] == ["an unreadable call"]
    for name in ("mistral-7b", "gemma4", "minimax-m2", "gpt-oss"):
        assert named(molt.check(model=family(name, tmp_path / name)))["an unreadable call"].verdict == "ok"


def test_a_bos_that_is_written_twice(tmp_path: Path) -> None:
    def bos(template: str) -> Finding:
        path = Path(pocket_model(tmp_path, template))
        settings = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<|endoftext|>"}))
        return named(molt.check(model=str(path)))["BOS"]

    assert bos(CHATML).text.endswith("does not begin with it")
    assert bos("{{ bos_token }}" + CHATML).text == "<|endoftext|> (256); the chat template begins with it"
    assert bos("{{ bos_token + bos_token }}" + CHATML).verdict == "warning"


def test_an_answer_is_given_as_it_is_written(tmp_path: Path) -> None:
    """Although the template trims what it shows."""
    path = pocket_model(tmp_path, CHATML.replace("message['content']", "message['content'] | trim"))
    report = molt.check(tasks=[{"prompt": "q", "answer": " 42\n"}], rewards=[right], model=path)
    assert named(report)["rewards"].text == "1 for task.answer; 0 for other words"


def test_an_unknown_context_and_no_template(tmp_path: Path) -> None:
    path = Path(pocket_model(tmp_path))
    for name, gone in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "chat_template")):
        settings = json.loads((path / name).read_text())
        del settings[gone]
        (path / name).write_text(json.dumps(settings))
    (path / "chat_template.jinja").unlink()
    found = named(molt.check(model=str(path)))
    assert found["context"].verdict == "warning"
    assert found["chat template"].verdict == "problem"
    assert "plain chat" not in found


def test_tools_that_may_not_be_emulated(pocket: str) -> None:
    report = molt.check(model=pocket, config=molt.RolloutConfig(tool_emulation=False))
    assert report.problems == [named(report)["form"]]
    assert "tool cycle" not in named(report)
    assert "tool_emulation=True" in named(report)["form"].text


# --- the agent --------------------------------------------------------------------------------------------------------


def test_the_calculator_runs_its_loop_on_example_calls(qwen3: str) -> None:
    agent = load_agent("calculator")
    report = molt.check(agent.policy, agent.environment, model=qwen3)
    (finding,) = episodes(report)
    assert finding.name == "episodes 1, 2, 3, 4"
    assert finding.text.startswith("ok, 2 turns in 1 segment")
    assert [len(t.tool_executions) for t in report.trajectories] == [1, 1, 1, 1]
    assert report.trajectories[0].tool_executions[0].message["content"] == "84"  # "12 * 7", as its docstring says
    assert report.trajectories[0].turns[0].message["reasoning"]
    assert all(t.certify().ok for t in report.trajectories)
    assert named(report)["rewards"].text == "0.8, 0.8 for task.answer; 0, 0 for other words"
    assert named(report)["tools"].text.startswith("called: calculator (4); 4 of 4 calls were executed")
    assert "No model ran" in named(report)["setting"].text


def test_a_call_that_does_not_fit_is_cut_as_a_real_one(pocket: str) -> None:
    agent = load_agent("calculator")
    report = molt.check(agent.policy, agent.environment, model=pocket, limit=1)  # 48 tokens are 48 bytes of it
    (finding,) = episodes(report)
    assert report.ok
    assert finding.verdict == "warning"
    assert "a call of calculator of 85 tokens was cut after 48" in finding.text
    assert finding.advice.startswith("raise max_tokens")


def test_a_full_context_is_told_from_max_tokens(tmp_path: Path) -> None:
    path = pocket_model(tmp_path, context_length=60)

    async def talk(task: molt.Task, model: molt.Model) -> float:
        messages: list[molt.Message] = [{"role": "user", "content": "q"}]
        for _ in range(9):
            messages = [*(await model.chat(messages)).messages, {"role": "user", "content": "more"}]
        return 1.0

    report = molt.check(talk, ROWS, model=path, sampling=molt.SamplingParams(max_tokens=40))
    assert [finding.verdict for finding in episodes(report)] == ["warning", "warning"]
    assert all("longer context" in finding.advice for finding in episodes(report))


def test_several_tools_take_turns(pocket: str) -> None:
    """So that a tool which ends an agent's loop is called at some time."""
    done: list[str] = []

    def look(place: str) -> str:
        """Look around.

        Args:
            place: Where, such as "attic".
        """
        done.append(place)
        return "nothing"

    def submit(answer: int) -> str:
        """Hand in the answer."""
        done.append(f"submit {answer}")
        raise molt.Stop("thanks")

    async def policy(task: molt.Task, model: molt.Model) -> float:
        messages: list[molt.Message] = [{"role": "user", "content": task.prompt}]
        done.clear()
        while not done or not done[-1].startswith("submit"):
            messages = (await model.run(messages, tools=[look, submit])).messages
            messages.append({"role": "user", "content": "Go on."})
        return 1.0

    report = molt.check(policy, ROWS, model=pocket)
    assert done == ["attic", "submit 1"]
    assert report.ok, report
    assert named(report)["tools"].text.startswith("called: look (2), submit (2); 4 of 4")


def test_a_policy_that_reads_reasoning_history_again_shows_its_segments(qwen3: str) -> None:
    @molt.policy
    async def twice(task: molt.Task, model: molt.Model) -> float:
        reply = await model.chat(task.prompt)
        await model.chat([*reply.messages, {"role": "user", "content": "Sure?"}])
        return 1.0

    report = molt.check(twice, ROWS, model=qwen3)
    (finding,) = episodes(report)
    assert finding.verdict == "warning"
    assert "2 turns in 2 segments" in finding.text
    assert "were encoded anew for later segments" in finding.text
    assert any("dropped the reasoning of message 1" in line for line in finding.details)
    assert report.trajectories[0].turns[0].message["content"] == "42"


def test_an_agent_that_edits_its_history(pocket: str) -> None:
    async def edits(task: molt.Task, model: molt.Model) -> float:
        reply = await model.chat("Step 1")
        await model.chat([{"role": "user", "content": "Step 2"}, reply.message, {"role": "user", "content": "Go on."}])
        return 1.0

    (finding,) = episodes(molt.check(edits, ROWS, model=pocket))
    assert finding.verdict == "warning"
    assert any("'Step 1' became 'Step 2'" in line for line in finding.details)
    assert "only appends" in finding.advice


def test_forks_and_retries_are_no_fragmentation(pocket: str) -> None:
    async def team(task: molt.Task, model: molt.Model) -> float:
        await model.chat(task.prompt)
        await model.chat(task.prompt)
        await model.fork("critic").chat("Something else entirely.")
        await model.complete("raw text")
        return 1.0

    (finding,) = episodes(molt.check(team, ROWS, model=pocket))
    assert finding.verdict == "ok"
    assert "4 segments" in finding.text


def test_an_agent_that_blocks_the_event_loop(pocket: str) -> None:
    async def sleeper(task: molt.Task, model: molt.Model) -> float:
        await model.chat(task.prompt)
        time.sleep(0.3)  # noqa: ASYNC251 (the fault itself)
        return 1.0

    def tool_on_a_thread() -> str:
        """Sleep where it is allowed."""
        time.sleep(0.3)
        return ""

    async def waiter(task: molt.Task, model: molt.Model) -> float:
        await model.run(task.prompt, tools=[tool_on_a_thread])
        return 1.0

    finding = named(molt.check(sleeper, ROWS, model=pocket))["event loop"]
    assert finding.verdict == "warning"
    assert "test_check.py:" in finding.text
    assert "in sleeper" in finding.text
    assert named(molt.check(waiter, ROWS, model=pocket))["event loop"].verdict == "ok"


def test_an_agent_that_raises(pocket: str) -> None:
    """On every reply: nothing could be trained. On some: the user should know."""

    async def always(task: molt.Task, model: molt.Model) -> float:
        raise KeyError((await model.chat(task.prompt)).text[:0] + "\x1b[2Jmissing")

    report = molt.check(always, ROWS, model=pocket)
    (finding,) = episodes(report)
    assert not report.ok
    assert finding.verdict == "problem"
    assert "in always: KeyError" in finding.text
    assert "\x1b" not in str(report)

    async def sometimes(task: molt.Task, model: molt.Model) -> float:
        return float((await model.chat(task.prompt)).text)

    report = molt.check(sometimes, ROWS, model=pocket)
    assert [finding.verdict for finding in episodes(report)] == ["ok", "warning"]
    assert "agent_error_reward" in episodes(report)[1].advice
    assert named(report)["rewards"].text == "42 for task.answer"


def test_what_training_would_refuse_is_a_problem(pocket: str) -> None:
    async def cold(task: molt.Task, model: molt.Model) -> float:
        await model.chat(task.prompt, temperature=0)
        return 1.0

    (finding,) = episodes(molt.check(cold, ROWS, model=pocket))
    assert finding.verdict == "problem"
    assert "temperature=0 cannot be trained on" in finding.text
    overruled = molt.RolloutConfig(sampling_from="config")
    assert molt.check(cold, ROWS, model=pocket, config=overruled).ok


def test_an_agent_that_never_calls_the_model(pocket: str) -> None:
    async def bypasses(task: molt.Task, model: molt.Model) -> float:
        return 1.0

    (finding,) = episodes(molt.check(bypasses, ROWS, model=pocket))
    assert finding.verdict == "problem"
    assert "never called" in finding.text


def test_an_agent_without_an_end_is_stopped(pocket: str) -> None:
    async def insists(task: molt.Task, model: molt.Model) -> float:
        while (await model.chat(task.prompt)).text != "the magic word":
            pass
        return 1.0

    (finding,) = episodes(molt.check(insists, ROWS, model=pocket))
    assert finding.verdict == "warning"
    assert "asked 24 times and would have gone on" in finding.text


def test_a_reward_that_fails_and_a_reward_that_is_missing(pocket: str) -> None:
    def number(task: molt.Task, trajectory: molt.Trajectory) -> float:
        return float(trajectory.text)

    finding = named(molt.check(tasks=ROWS, rewards=[number], model=pocket))["rewards"]
    assert (finding.verdict, finding.text) == ("problem", "1 of 2 episodes cannot be scored")
    assert "in number: ValueError" in finding.details[0]
    assert named(molt.check(tasks=ROWS, model=pocket))["rewards"].verdict == "problem"


def test_episodes_that_cannot_be_scored_are_not_called_fine(pocket: str) -> None:
    report = molt.check(tasks=ROWS, model=pocket)
    (finding,) = episodes(report)
    assert finding.verdict == "problem"
    assert finding.text.startswith("reward_error, ")
    assert "see the rewards below" in finding.advice


def test_rewards_that_are_the_same_whatever_is_answered(pocket: str) -> None:
    """``fit`` would skip every step. Rewards that differ between tasks alone are no help: siblings are compared."""

    def by_task(task: molt.Task, trajectory: molt.Trajectory) -> float:
        return float(task.answer)

    rows = [{"prompt": "q", "answer": "1"}, {"prompt": "r", "answer": "2"}]
    finding = named(molt.check(tasks=rows, rewards=[by_task], model=pocket))["rewards"]
    assert finding.verdict == "warning"
    assert finding.text.startswith("1, 2 for task.answer; 1, 2 for other words: no difference")
    assert "fit skips a step" in finding.advice
    assert named(molt.check(tasks=rows, rewards=[right], model=pocket))["rewards"].verdict == "ok"


def test_equal_rewards_prove_nothing_without_an_answer(pocket: str) -> None:
    """Without a known answer, or where no answer was given, or where a fork has a reward of its own."""
    unknown = [{"prompt": "q"}]
    finding = named(molt.check(tasks=unknown, rewards=[lambda task, trajectory: 1.0], model=pocket))["rewards"]
    assert (finding.verdict, finding.text) == ("ok", "1, 1 for other words")

    async def critic(task: molt.Task, model: molt.Model) -> float:
        fork = model.fork("critic")
        fork.reward(float((await fork.chat("q")).text == "42"))
        return 1.0

    assert named(molt.check(critic, ROWS, model=pocket))["rewards"].verdict == "ok"


def test_rewards_stand_under_the_answer_that_was_given(pocket: str) -> None:
    """An episode without a call of the model takes no answer from the next one."""
    episode = iter(range(2))

    async def lazy(task: molt.Task, model: molt.Model) -> float:
        return float(next(episode) > 0 and (await model.chat("q")).text == task.answer)

    report = molt.check(lazy, ROWS, model=pocket)
    assert named(report)["rewards"].text == "0 for no answer; 1 for task.answer"


def test_raw_text_is_not_taken_for_the_conversation_before_it(tmp_path: Path) -> None:
    """Neither for the last one that the check itself tried, nor for one that was refused for its length."""
    path = pocket_model(tmp_path, context_length=1000)

    def look(place: str) -> str:
        """Look around."""
        return "nothing"

    async def raw(task: molt.Task, model: molt.Model) -> float:
        texts = [(await model.complete("Once upon a time")).text]
        with pytest.raises(molt.ContextLengthError):
            await model.chat("x" * 1000, tools=[look])
        texts.append((await model.complete([65, 66, 67])).text)
        assert texts == [texts[0]] * 2
        return float(texts[0] == "42")

    report = molt.check(raw, ROWS, model=path)
    assert named(report)["rewards"].text == "1 for task.answer; 0 for other words", report
    assert named(report)["tools"].text == "none were offered"


def test_an_agent_that_offers_other_tools_in_the_middle(pocket: str) -> None:
    def look(place: str) -> str:
        """Look around."""
        return "nothing"

    async def forgets(task: molt.Task, model: molt.Model) -> float:
        reply = await model.run(task.prompt, tools=[look])
        await model.chat([*reply.messages, {"role": "user", "content": "Sure?"}])
        return 1.0

    (finding,) = episodes(molt.check(forgets, ROWS, model=pocket))
    assert finding.verdict == "warning"
    assert "offer the same tools" in finding.advice


def test_a_new_conversation_with_the_same_examples_is_no_edit(pocket: str) -> None:
    examples: list[molt.Message] = [{"role": "user", "content": "1 + 41?"}, {"role": "assistant", "content": "42"}]

    async def twice(task: molt.Task, model: molt.Model) -> float:
        await model.chat([*examples, {"role": "user", "content": "First question"}])
        await model.chat([*examples, {"role": "user", "content": "Second question"}])
        return 1.0

    (finding,) = episodes(molt.check(twice, ROWS, model=pocket))
    assert (finding.verdict, finding.advice) == ("ok", "")


def test_tools_that_are_executed_past_the_handle(pocket: str) -> None:
    def look(place: str) -> str:
        """Look around."""
        return "nothing"

    async def by_hand(task: molt.Task, model: molt.Model) -> float:
        reply = await model.chat(task.prompt, tools=[look])
        results: list[molt.Message] = [
            {"role": "tool", "content": look("attic"), "tool_call_id": call["id"]} for call in reply.tool_calls
        ]
        await model.chat([*reply.messages, *results], tools=[look])
        return 1.0

    finding = named(molt.check(by_hand, ROWS, model=pocket))["tools"]
    assert finding.verdict == "warning"
    assert "0 of 2 calls were executed" in finding.text
    assert "model.call_tool" in finding.advice


def test_an_environment_that_fails_and_one_whose_tools_are_not_offered(pocket: str) -> None:
    @molt.environment
    class Room:
        def setup(self) -> None:
            if self.task.prompt == "burn":
                raise OSError("no room")

        @molt.tool
        def look(self) -> str:
            """Look around."""
            return "a door"

        @molt.reward
        def fine(self, trajectory: molt.Trajectory) -> float:
            return 1.0

    async def silent(env: Room, model: molt.Model) -> None:
        await model.chat("Hello")

    report = molt.check(silent, Room, tasks=[{"prompt": "stay"}, {"prompt": "burn"}], model=pocket)
    assert [finding.verdict for finding in episodes(report)] == ["ok", "problem"]
    assert "OSError: no room" in episodes(report)[1].text
    assert named(report)["tools"].verdict == "warning"
    assert "no call of the model offered them" in named(report)["tools"].text


def test_a_tool_that_fails_on_the_example_says_so(pocket: str) -> None:
    def divide(a: int, b: int) -> float:
        """Divide.

        Args:
            a: Such as 3.
            b: Such as 0.
        """
        return a / b

    report = molt.check(tasks=ROWS, tools=[divide], rewards=[lambda task, trajectory: 1.0], model=pocket)
    finding = named(report)["tools"]
    assert report.ok
    assert finding.verdict == "warning"
    assert finding.details[0].startswith('divide({"a": 3, "b": 0}): ')
    assert "ZeroDivisionError" in finding.details[0]


def test_the_number_of_tasks_and_the_split(pocket: str) -> None:
    seen: list[str] = []

    def tasks(split: str = "train", seed: int = 0) -> Iterator[molt.Task]:
        for i in range(1000):
            yield molt.Task(f"{split} {seed} {i}")

    async def notes(task: molt.Task, model: molt.Model) -> float:
        seen.append(str(task.prompt))
        await model.chat(task.prompt)
        return 1.0

    molt.check(notes, tasks, model=pocket, limit=3, split="eval", seed=5)
    assert seen == [f"eval 5 {i}" for i in range(3) for _ in range(2)]


def test_what_is_wrong_with_the_arguments_is_an_error(pocket: str) -> None:
    with pytest.raises(molt.ModelPathError, match="/no/model"):
        molt.check(model="/no/model")
    with pytest.raises(molt.ConfigError, match="limit=0"):
        molt.check(tasks=ROWS, model=pocket, limit=0)
    with pytest.raises(molt.ConfigError, match="there are no tasks"):
        molt.check(rewards=[lambda task, trajectory: 1.0], model=pocket)
    with pytest.raises(molt.ConfigError, match="temperature=0"):
        molt.check(tasks=ROWS, model=pocket, sampling=molt.SamplingParams(temperature=0))


@pytest.mark.anyio
async def test_inside_a_running_loop_its_twin_is_named_and_works(pocket: str) -> None:
    with pytest.raises(molt.MoltError, match=r"check\(\).*running event loop.*await acheck\("):
        molt.check(model=pocket)
    report = await molt.acheck(tasks=ROWS, rewards=[lambda task, trajectory: 1.0], model=pocket)
    assert report.ok


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_command_prints_the_report_and_exits_with_zero(pocket: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "calculator", "--model", pocket, "--limit", "1"])
    shown = capsys.readouterr().out
    assert f"Check of {pocket}" in shown
    assert "Prefix stability" in shown
    assert "solver with Calculator, 1 task" in shown
    assert "usable: 2 warnings" in shown
    main(["check", "--model", pocket])
    assert "Agent" not in capsys.readouterr().out


def test_the_command_exits_with_one_for_a_problem_and_two_for_a_mistake(
    pocket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import molt_sdk as molt\n\n@molt.environment\nclass E:\n    tasks = [molt.Task('q')]\n\n@molt.policy\n"
        "async def fails(env, model):\n    raise RuntimeError('\\x1b[31mred')\n"
    )
    with pytest.raises(SystemExit) as stop:
        main(["check", str(agent), "--model", pocket])
    captured = capsys.readouterr()
    assert stop.value.code == 1
    assert "RuntimeError" in captured.out
    assert "\x1b" not in captured.out
    assert "not usable as it is: 1 problem" in captured.out
    for arguments in (["check"], ["check", "--model", "/no/model"], ["check", "nope.py", "--model", pocket]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2


@pytest.mark.parametrize(
    "tasks", ["tasks = [{'prompt': 'q', 'answer': '1'}]", "def tasks(split, seed):\n    yield molt.Task('q', '1')"]
)
def test_an_agent_file_with_tasks_beside_its_policy(
    tasks: str, pocket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = tmp_path / "agent.py"
    policy = "@molt.policy\nasync def p(task, model):\n    return (await model.chat(task.prompt)).text == task.answer\n"
    agent.write_text(f"import molt_sdk as molt\n\n{tasks}\n\n{policy}")
    main(["check", str(agent), "--model", pocket])
    shown = capsys.readouterr().out
    assert "1 for task.answer; 0 for other words" in shown
    assert "usable: all is well" in shown


def test_settings_come_from_flags_and_from_a_file(
    pocket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "check.toml"
    file.write_text(f"model = '{pocket}'\nlimit = 1\n[rollout]\ntool_emulation = false\n")
    with pytest.raises(SystemExit) as stop:
        main(["check", "--config", str(file)])
    assert stop.value.code == 1
    assert "tool_emulation=True" in capsys.readouterr().out


def test_it_loads_neither_torch_nor_transformers(pocket: str) -> None:
    code = f"import sys, molt_sdk as molt; print(molt.check(model={pocket!r}).ok, 'torch' in sys.modules, "
    code += "'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["True", "False", "False"]
