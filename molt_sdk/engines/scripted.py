"""An engine that answers from a script: a real tokenizer and chat template, no model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from molt_sdk.engines.base import GenerateRequest, Generation, NamedTensors
from molt_sdk.errors import EngineError
from molt_sdk.rendering.renderer import Renderer
from molt_sdk.types import FinishReason, SamplingParams


class Script(Struct, frozen=True, kw_only=True):
    """One scripted reply: ``text`` or ``token_ids``, and what else the engine says.

    logprobs, versions: one per token; default -1.0 and the engine's version.  delay: seconds before the answer.
    error: raised instead of an answer.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    finish_reason: FinishReason = "stop"
    logprobs: Sequence[float] | None = None
    versions: Sequence[int] | None = None
    delay: float = 0.0
    error: BaseException | None = None


ScriptedReply = str | Sequence[int] | Script
Replies = Iterable[ScriptedReply] | Callable[[list[int], SamplingParams], ScriptedReply]


class ScriptedEngine:
    """Answers each request with the next of ``replies``, or with ``replies(prompt_token_ids, sampling)``.

    Text replies end with the template's end-of-turn token unless ``finish_reason="length"``; token ids are taken as
    they are. ``version`` can be set at any time and stamps what is sampled from then on. ``requests`` lists what was
    asked, ``open_requests`` counts what is being answered.
    """

    def __init__(self, model: str, replies: Replies, *, context_length: int | None = None) -> None:
        self.model = str(model)
        self.version = 0
        self.requests: list[GenerateRequest] = []
        self.open_requests = 0
        self.updates: list[int] = []
        """Versions of the weights that were pushed here."""
        self.renderer = Renderer(self.model)
        self._context_length = context_length or self.renderer.context_length
        self._function: Callable[[list[int], SamplingParams], ScriptedReply] | None = None
        self._iterator: Iterator[ScriptedReply] = iter(())
        self._given = 0
        if callable(replies):
            self._function = replies
        else:
            self._iterator = iter([replies] if isinstance(replies, str | Script) else replies)

    @property
    def context_length(self) -> int:
        return self._context_length

    async def start(self) -> None:
        """Nothing to load."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """The scripted reply. Raises EngineError when the script has run out, or the reply's own ``error``."""
        self.requests.append(request)
        self.open_requests += 1
        try:
            script = self._next(request)
            if script.delay > 0:
                await asyncio.sleep(script.delay)
            else:
                await asyncio.sleep(0)  # a real engine always yields to the loop
            if script.error is not None:
                raise script.error
            return self._generation(script, request.sampling.max_tokens)
        finally:
            self.open_requests -= 1

    async def update_weights(self, weights: NamedTensors, version: int) -> None:
        """Take the version; the weights are looked at by nobody."""
        self.version = version
        self.updates.append(version)

    async def close(self) -> None:
        """Nothing to free."""

    def _next(self, request: GenerateRequest) -> Script:
        reply: Any
        if self._function is not None:
            reply = self._function(list(request.prompt_token_ids), request.sampling)
        else:
            try:
                reply = next(self._iterator)
            except StopIteration:
                raise EngineError(
                    f"ScriptedEngine: the script has {self._given} replies, and one more was asked for; give more "
                    "replies or a function"
                ) from None
            self._given += 1
        if isinstance(reply, Script):
            return reply
        return Script(text=reply) if isinstance(reply, str) else Script(token_ids=list(reply))

    def _generation(self, script: Script, max_tokens: int) -> Generation:
        finish_reason = script.finish_reason
        if script.token_ids is not None:
            ids = list(script.token_ids)
        else:
            ids = list(self.renderer.encode_reply(script.text or "", end=finish_reason != "length"))
            if len(ids) > max_tokens and script.logprobs is None:  # a longer text is cut, as a real engine would
                ids, finish_reason = ids[:max_tokens], "length"
        return Generation(
            token_ids=ids,
            logprobs=list(script.logprobs) if script.logprobs is not None else [-1.0] * len(ids),
            versions=list(script.versions) if script.versions is not None else [self.version] * len(ids),
            finish_reason=finish_reason,
        )
