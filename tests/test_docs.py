"""docs/exactness.md: its example prints what the page shows, and its reasons are the ones that users see."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import molt_sdk as molt
from molt_sdk.testing import TEMPLATES, Script, ScriptedEngine, pocket_model

PAGE = Path(__file__).resolve().parent.parent / "docs" / "exactness.md"
TEXT = PAGE.read_text(encoding="utf-8")
CHATML = TEMPLATES["chatml"]
CONTENT = "message['content']"
Policy = Callable[[molt.Task, molt.Model], Awaitable[float]]


def code_blocks() -> list[tuple[str, str]]:
    """(language, text) of each block of the page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_example_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = code_blocks()
    languages = [language for language, _ in blocks]
    assert languages == ["python", "text"] * (len(blocks) // 2)
    assert len(blocks) >= 6
    names: dict[str, object] = {"__name__": "exactness"}
    for (_, program), (_, shown) in zip(blocks[::2], blocks[1::2], strict=True):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program, str(PAGE), "exec"), names)
        assert printed.getvalue() == shown
    assert [path.name for path in tmp_path.iterdir()] == ["pocket"]


def test_links_of_the_page_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", TEXT)
    headings = {re.sub(r"\W+", "-", line.lower()) for line in re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)}
    for target in targets:
        path, _, anchor = target.partition("#")
        if not path.startswith("https://"):
            assert not path or (PAGE.parent / path).exists(), target
            assert not anchor or anchor in headings, target


def listed_reasons() -> list[str]:
    """The reasons in the page's table, "…" for any text."""
    (table,) = re.findall(r"^\| reason \|.*?\n\n", TEXT, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def is_as_listed(reason: str, listed: str) -> bool:
    return re.fullmatch(re.escape(listed).replace("…", ".+"), reason, re.DOTALL) is not None


def reasons(directory: Path, policy: Policy, *replies: str | list[int], template: str = "chatml") -> set[str]:
    """Why the roots of a trajectory were started; a model may end replies with either of two tokens."""
    path = Path(pocket_model(directory, template))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    scripts = [Script(token_ids=reply) if isinstance(reply, list) else Script(text=reply) for reply in replies]
    ((trajectory,),) = molt.rollout(policy, [{"prompt": "q"}], engine=ScriptedEngine(str(path), scripts))
    assert trajectory.error is None, trajectory.error
    assert trajectory.certify().ok
    return {turn.fork_reason for turn in trajectory.turns if turn.parent is None}


def user(text: str) -> molt.Message:
    return {"role": "user", "content": text}


async def agent_starts_anew(task: molt.Task, model: molt.Model) -> float:
    def f(x: int) -> None:
        """Do."""

    first = await model.chat([user("q1"), user("q2")])
    await model.chat([user("q1"), user("q2")])
    await model.chat([user("q1"), user("q!")])
    await model.chat([user("q1"), {"role": "system", "content": "q2"}])
    await model.chat([user("q1")])
    await model.chat([*first.messages, user("with tools")], tools=[f])
    called = await model.chat("call", tools=[f])
    assert called.tool_calls
    await model.chat([*called.messages[:-1], {"role": "assistant", "content": ""}, user("more")], tools=[f])
    await model.complete("raw")
    return 1.0


async def agent_appends(task: molt.Task, model: molt.Model) -> float:
    reply = await model.chat("q")
    await model.chat([*reply.messages, user("more")])
    return 1.0


def test_every_reason_that_the_page_lists_is_seen_and_no_other(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    seen = reasons(tmp_path / "agent", agent_starts_anew, *"abcdef", call, "g", "h")
    drops = CHATML.replace(CONTENT, f"{CONTENT}.split('</think>')[-1]")
    appended: list[tuple[str, str | list[int]]] = [
        (drops, "<think>hm</think>a"),
        (drops.replace("assistant\n'", "assistant\n<think>'"), "</think>a"),
        (CHATML, [97, 256]),
        (CHATML.replace(CONTENT, f"{CONTENT} | replace('1', 'one')"), "1"),
        ("{{ messages | length }}" + CHATML, "a"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "a"),
    ]
    for number, (template, reply) in enumerate(appended):
        seen |= reasons(tmp_path / str(number), agent_appends, reply, "b", template=template)
    matches = {reason: [listed for listed in listed_reasons() if is_as_listed(reason, listed)] for reason in seen}
    assert {reason: listed for reason, listed in matches.items() if len(listed) != 1} == {}
    assert {listed for (listed,) in matches.values()} == set(listed_reasons())


def test_an_edit_behind_a_reply_branches_from_its_turn(tmp_path: Path) -> None:
    async def policy(task: molt.Task, model: molt.Model) -> float:
        first = await model.chat("q")
        second = await model.chat([*first.messages, user("more")])
        await model.chat([*first.messages, user("MORE"), second.message, user("and more")])
        return 1.0

    engine = ScriptedEngine(pocket_model(tmp_path), ["a", "b", "c"])
    ((trajectory,),) = molt.rollout(policy, [{"prompt": "q"}], engine=engine)
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 0]
    assert [sum(row.loss_mask) for row in trajectory.samples()] == [4, 2]  # a letter and an end of turn each
