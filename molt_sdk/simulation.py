"""A model without weights for ``check``, and a watch over the event loop.

The simulated model writes what a trained one might: a call of an offered tool with example arguments, an answer once
the result is there. Replies are in the template's own form, so what the agent makes of them is what it would make of a
real model's.
"""

from __future__ import annotations

import asyncio
import json
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple, Self

from molt_sdk.engines.base import GenerateRequest, Generation, NamedTensors
from molt_sdk.errors import EngineError, TemplateError
from molt_sdk.rendering.abilities import Tools
from molt_sdk.rendering.bridge import Bridge, History, NoBridge
from molt_sdk.rendering.probe import ReplyWriter
from molt_sdk.rendering.renderer import Renderer
from molt_sdk.rendering.toolcalls import example_arguments, tool_call
from molt_sdk.types import Message

MOST_CALLS = 24
"""Of one episode: an agent that asks until a reply pleases it would never end."""
FILLER = "This is a simulated answer."
BLOCKED = 0.1
"""Seconds without a tick from which on the event loop counts as blocked."""


class AskedRenderer(Renderer):
    """A renderer that remembers what it was asked last: an engine sees token ids, the simulated model has to know the
    conversation and the tools behind them."""

    def __init__(self, model: str, *, emulate_tools: bool = True) -> None:
        super().__init__(model, emulate_tools=emulate_tools)
        self._asked: tuple[Message, Tools, list[int]] | None = None

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        ids = super().prompt(messages, tools)
        self._asked = messages[-1], tools, ids
        return ids

    def bridge(
        self,
        history: History,
        reply: Message,
        completion_token_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Tools = (),
        *,
        prompt: Sequence[int] = (),
    ) -> Bridge | NoBridge:
        bridge = super().bridge(history, reply, completion_token_ids, new_messages, tools, prompt=prompt)
        if isinstance(bridge, Bridge):
            self._asked = (new_messages or [reply])[-1], tools, bridge.token_ids
        return bridge

    def take_asked(self, prompt: Sequence[int]) -> tuple[Message, Tools] | None:
        """The last message and the tools behind a prompt; None if it is not the one that was rendered last: it is raw
        text, or was taken before."""
        asked, self._asked = self._asked, None
        if asked is None or list(prompt[len(prompt) - len(asked[2]) :]) != asked[2]:
            return None
        return asked[:2]


class Cut(NamedTuple):
    """A reply that was cut by the length limit."""

    what: str
    needed: int
    """Tokens of the whole reply."""
    room: int
    context_full: bool
    """Not ``max_tokens`` cut it but the end of the context."""


class SimulatedModel:
    """An engine without weights. After a message of anyone but a tool it calls an offered tool, the one that it called
    least so far; else it answers with the next of ``answers``: one per episode, the last of them for all that follow.
    """

    def __init__(self, renderer: AskedRenderer) -> None:
        self.model = str(renderer.files.path)
        self.version = 0
        self.answers: list[str] = [FILLER]
        self.calls: Counter[str] = Counter()
        """Of each tool that was offered."""
        self.cut: dict[str, Cut] = {}
        """By trajectory: a reply that did not fit."""
        self.endless: set[str] = set()
        """Trajectories that asked more than ``MOST_CALLS`` times."""
        self.answered: dict[str, str] = {}
        """By trajectory: the answer that was given, whole; none where calls alone were written."""
        self._renderer = renderer
        self._requests: Counter[str] = Counter()
        self._answer_of: dict[str, str] = {}
        self._writer = ReplyWriter(renderer) if renderer.files.chat_template is not None else None

    @property
    def context_length(self) -> int:
        return self._renderer.context_length

    async def start(self) -> None:
        """Nothing to load."""

    async def close(self) -> None:
        """Nothing to free."""

    async def update_weights(self, weights: NamedTensors, version: int) -> None:
        raise EngineError("a simulated model has no weights")

    async def generate(self, request: GenerateRequest) -> Generation:
        asked = self._renderer.take_asked(
            request.prompt_token_ids
        )  # before anything is awaited: the next request overwrites it
        await asyncio.sleep(0)  # a real engine always yields to the loop
        episode = request.trajectory_id
        self._requests[episode] += 1
        if self._requests[episode] > MOST_CALLS:
            self.endless.add(episode)
            raise EngineError(f"the simulated model answers {MOST_CALLS} times in an episode")
        if episode not in self._answer_of:
            self._answer_of[episode] = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        message, tools = self._message(asked, self._answer_of[episode], self._requests[episode])
        ids = self._ids(message, tools)
        room = request.sampling.max_tokens
        calls = message.get("tool_calls") or ()
        if len(ids) > room:
            what = f"a call of {calls[0]['function']['name']}" if calls else "an answer"
            full = len(request.prompt_token_ids) + room >= self.context_length
            self.cut[episode] = Cut(what, len(ids), room, full)
        elif not calls:
            self.answered[episode] = self._answer_of[episode]
        return Generation(
            token_ids=ids[:room],
            logprobs=[-1.0] * len(ids[:room]),
            versions=[self.version] * len(ids[:room]),
            finish_reason="length" if len(ids) > room else "stop",
        )

    def _message(self, asked: tuple[Message, Tools] | None, answer: str, number: int) -> tuple[Message, Tools | None]:
        """The reply, and the tools that were offered; no tools where raw text was asked for."""
        message: Message = {"role": "assistant", "content": answer}
        if asked is None:
            return message, None
        last, tools = asked
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        for name in functions:
            self.calls.setdefault(name, 0)
        if functions and last["role"] != "tool":
            name = min(functions, key=lambda name: self.calls[name])
            self.calls[name] += 1
            arguments = json.dumps(example_arguments(functions[name]), ensure_ascii=False)
            message = {"role": "assistant", "content": "", "tool_calls": [tool_call(f"call_{number}", name, arguments)]}
        if self._writer is not None and self._writer.reasons:
            message["reasoning"] = "I think about it."
        return message, tools

    def _ids(self, message: Message, tools: Tools | None) -> list[int]:
        if tools is not None and self._writer is not None:
            try:
                return self._writer.write(message, tools)
            except TemplateError:  # it cannot show such a reply; the findings about the model say so
                pass
        return self._renderer.encode_reply(str(message.get("content") or FILLER), end=True)


class LoopWatch:
    """Notices when code of the user keeps the event loop from running anything else, and where. Use with ``with``
    inside a running loop.

    A thread looks at the loop's stack when the loop has not ticked for a while. It counts if the user's code runs at
    that moment; the seconds are those since the last tick, of which the SDK or a busy machine may have taken a part.
    """

    def __init__(self) -> None:
        self.blocked: dict[str, float] = {}
        """Longest time in seconds by place, such as ``agent.py:12 in solver``."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._tick = time.perf_counter()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="molt-loop-watch", daemon=True)
        self._places: dict[tuple[str, str], str] = {}

    def __enter__(self) -> Self:
        self._beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        self._tick = time.perf_counter()
        if not self._over.is_set():
            self._loop.call_later(BLOCKED / 10, self._beat)

    def _look(self) -> None:
        while not self._over.wait(BLOCKED / 5):
            late = time.perf_counter() - self._tick
            frame = sys._current_frames().get(self._thread_id)
            if late < BLOCKED or frame is None or (place := user_place(frame)) is None:
                continue
            file, line, function = place
            shown = self._places.setdefault((file, function), f"{Path(file).name}:{line} in {function}")
            self.blocked[shown] = max(self.blocked.get(shown, 0.0), late)


def user_place(frame: FrameType | None) -> tuple[str, int, str] | None:
    """(file, line, function) of the user's code that runs in a stack; None where the SDK runs by itself."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return file, frame.f_lineno, frame.f_code.co_name
        if _within(file, _SDK):
            return None
        frame = frame.f_back
    return None


def is_users(file: str) -> bool:
    """Whether a source file is neither the SDK's, nor an installed package's, nor Python's."""
    if _within(file, _SHIPPED_AGENTS):
        return True
    return not file.startswith("<frozen") and not any(_within(file, folder) for folder in (_SDK, *_INSTALLED))


def _within(file: str, folder: str) -> bool:
    return file.startswith(folder + "/")


_SDK = str(Path(__file__).parent)
_SHIPPED_AGENTS = str(Path(__file__).parent / "_agents")
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
