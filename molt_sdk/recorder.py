"""The mutable record of one running trajectory; frozen into a :class:`Trajectory` when its rewards are in."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import msgspec

from molt_sdk.engines.base import Engine, GenerateRequest, Generation, check_generation
from molt_sdk.errors import ContextLengthError, EngineError, ModelClosedError, MoltError, RequestError
from molt_sdk.graph import Lineage, explain_new_root, prefix_keys
from molt_sdk.loop import Turnstile
from molt_sdk.messages import encodable
from molt_sdk.packed import pack_floats, pack_ints, to_spans
from molt_sdk.rendering.renderer import Bridge, Renderer
from molt_sdk.rendering.template import LARGE_TEXT
from molt_sdk.types import MAIN_AGENT, Message, SamplingParams, ToolExecution, Turn
from molt_sdk.workers import being_cancelled

RAW_COMPLETION = "raw completion"
"""``fork_reason`` of a call of ``model.complete``, which has no messages to continue."""


class Scope:
    """Which earlier turns a Model handle may extend: its own, and those its ancestors had when it was forked."""

    def __init__(self, agent: str, trainable: bool, parent: Scope | None, forked_at: int) -> None:
        self.agent = agent
        self.trainable = trainable
        self.parent = parent
        self.forked_at = forked_at
        self.turn_ids: set[int] = set()

    def sees(self, turn: Turn) -> bool:
        scope: Scope | None = self
        limit = 1 << 62
        while scope is not None:
            if turn.id in scope.turn_ids:
                return turn.id < limit
            limit = min(limit, scope.forked_at)
            scope = scope.parent
        return False


class Plan(msgspec.Struct, frozen=True):
    """How one request will be put to the engine."""

    parent: Turn | None
    fork_reason: str
    context: list[int]
    prompt: list[int]
    new_messages: list[Message]
    keys: list[bytes]


class Recorder:
    """Every model call of one trajectory goes through :meth:`call`; nothing else reaches the engine."""

    def __init__(
        self, trajectory_id: str, engine: Engine, renderer: Renderer, turnstile: Turnstile, *, seed: int
    ) -> None:
        self.trajectory_id = trajectory_id
        self.engine = engine
        self.renderer = renderer
        self.turnstile = turnstile
        self.seed = seed
        self.turns: list[Turn] = []
        self.executions: list[ToolExecution] = []
        self.turn_rewards: dict[int, float] = {}
        self.agent_rewards: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.root = Scope(MAIN_AGENT, True, None, 0)
        self._agents = {MAIN_AGENT}
        self._lineage = Lineage()
        self._calls = 0
        self._in_flight: set[anyio.CancelScope] = set()
        self.closed = False
        self._engine_name = type(engine).__name__
        self._context_length = min(renderer.context_length, engine.context_length)

    def fork(self, parent: Scope, agent: str | None, trainable: bool) -> Scope:
        self.require_open()
        if agent == MAIN_AGENT:
            raise RequestError(f"model.fork: {agent!r} is the policy's own name; give the fork another one")
        name = agent or next(n for i in range(1, 1 << 30) if (n := f"fork{i}") not in self._agents)
        self._agents.add(name)
        return Scope(name, trainable and parent.trainable, parent, len(self.turns))

    def require_open(self) -> None:
        if self.closed:
            raise ModelClosedError(
                f"trajectory {self.trajectory_id} has ended; a call after its policy returned is refused and not "
                "recorded. Await every call (and background task) before the policy returns"
            )

    def close(self) -> None:
        """End the record: calls in flight are cancelled at the engine, later calls are refused."""
        self.closed = True
        for scope in list(self._in_flight):
            scope.cancel()

    async def chat(
        self, scope: Scope, messages: list[Message], tools: Sequence[Mapping[str, Any]], sampling: SamplingParams
    ) -> tuple[Turn, list[str]]:
        """Record one chat turn; returns it with what was wrong with tool calls that could not be read."""
        await self.turnstile.turn()
        self.require_open()
        if sum(len(str(message.get("content") or "")) for message in messages) < LARGE_TEXT:
            plan = self._plan(scope, messages, tools)
        else:
            # a megabyte takes a second
            plan = await asyncio.to_thread(self._plan, scope, messages, tools)
        number, generation, sampling, seconds = await self._generate(plan.prompt, sampling)
        parsed = self.renderer.parse(generation.token_ids, generation.finish_reason, tools, f"call_{number}_")
        offered = plan.parent.tools if plan.parent else tuple(dict(t) for t in tools)
        turn = self._record(scope, plan, offered, sampling, generation, parsed.message, seconds)
        self._lineage.add(turn, plan.keys)
        return turn, parsed.tool_errors

    async def complete(self, scope: Scope, prompt: str | Sequence[int], sampling: SamplingParams) -> Turn:
        """Record one raw completion: always a root, since it has no messages."""
        await self.turnstile.turn()
        self.require_open()
        ids = self._raw_ids(prompt)
        shown: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []
        plan = Plan(None, RAW_COMPLETION, ids, ids, shown, [])
        _, generation, sampling, seconds = await self._generate(ids, sampling)
        message: Message = {"role": "assistant", "content": self.renderer.text(generation.token_ids)}
        return self._record(scope, plan, (), sampling, generation, message, seconds)

    def _raw_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            ids = self.renderer.raw_prompt(encodable(prompt, "model.complete: the prompt"))
        else:
            ids = list(prompt)
            size = self.renderer.files.tokenizer.get_vocab_size()
            for position, i in enumerate(ids):
                if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < size:
                    raise RequestError(
                        f"model.complete: {i!r} at position {position} is no token id; ids are integers from 0 to "
                        f"{size - 1}"
                    )
        if not ids:
            raise RequestError("model.complete: the prompt is empty; give text or token ids")
        return ids

    def _plan(self, scope: Scope, messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> Plan:
        keys = prefix_keys(messages)
        found = self._lineage.candidate(keys, scope.sees)
        if found is None:
            visible = [turn for turn in self.turns if scope.sees(turn) and turn.fork_reason != RAW_COMPLETION]
            reason = explain_new_root(messages, visible)
        else:
            parent, covered = found
            if list(parent.tools) != [dict(t) for t in tools]:
                reason = f"other tools are offered than in turn {parent.id}"
            else:
                history, new = [*parent.messages], messages[covered:]
                bridge = self.renderer.bridge(history, parent.completion_token_ids, new, tools)
                if isinstance(bridge, Bridge):
                    prompt = parent.prompt_token_ids + parent.completion_token_ids + bridge.token_ids
                    return Plan(parent, "", bridge.token_ids, prompt, new, keys)
                reason = f"cannot continue turn {parent.id}: {bridge.reason}"
        prompt = self.renderer.prompt(messages, tools)
        return Plan(None, reason, prompt, prompt, messages, keys)

    async def _generate(
        self, prompt: list[int], sampling: SamplingParams
    ) -> tuple[int, Generation, SamplingParams, float]:
        room = self._context_length - len(prompt)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens and the context holds {self._context_length}: no room for a new "
                "token. Shorten the conversation or raise the model's context"
            )
        number = self._calls
        self._calls += 1
        seed = self._call_seed(sampling.seed, number)
        sent = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room), seed=seed)
        request = GenerateRequest(
            request_id=f"{self.trajectory_id}-{number}",
            prompt_token_ids=prompt,
            sampling=sent,
            eos_token_ids=self.renderer.eos_token_ids,
            trajectory_id=self.trajectory_id,
        )
        started = time.perf_counter()
        with anyio.CancelScope() as scope:
            self._in_flight.add(scope)
            try:
                generation = await self.engine.generate(request)
            except MoltError:
                raise
            except asyncio.CancelledError as error:
                if being_cancelled():
                    raise
                raise EngineError(
                    f"engine {self._engine_name}, request {request.request_id}: the engine cancelled the request"
                ) from error
            except Exception as error:  # whatever an engine raises is the infrastructure's fault, not the agent's
                raise EngineError(
                    f"engine {self._engine_name}, request {request.request_id}: {type(error).__name__}: {error}"
                ) from error
            finally:
                self._in_flight.discard(scope)
        await self.turnstile.turn()
        self.require_open()
        check_generation(generation, request, self._engine_name)
        return number, generation, sent, time.perf_counter() - started

    def _call_seed(self, user_seed: int | None, number: int) -> int:
        """One seed per call: the user's (or the run's) mixed with the trajectory's place in the run."""
        base = self.seed if user_seed is None else user_seed ^ self.seed
        return zlib.crc32(f"{base}:{number}".encode())

    def _record(
        self,
        scope: Scope,
        plan: Plan,
        tools: tuple[dict[str, Any], ...],
        sampling: SamplingParams,
        generation: Generation,
        message: Message,
        seconds: float,
    ) -> Turn:
        turn = Turn(
            id=len(self.turns),
            parent=plan.parent.id if plan.parent else None,
            fork_reason=plan.fork_reason,
            agent=scope.agent,
            trainable=scope.trainable,
            new_messages=plan.new_messages,
            tools=tools,
            sampling=sampling,
            message=message,
            finish_reason=generation.finish_reason,
            context_i32=pack_ints(plan.context),
            completion_i32=pack_ints(generation.token_ids),
            logprobs_f32=pack_floats(generation.logprobs),
            version_spans=to_spans(generation.versions),
            seconds=seconds,
            parent_turn=plan.parent,
        )
        self.turns.append(turn)
        scope.turn_ids.add(turn.id)
        return turn

    def frozen_turns(self) -> tuple[Turn, ...]:
        """The turns with their rewards, linked to each other."""
        if not self.turn_rewards:
            return tuple(self.turns)
        frozen: list[Turn] = []
        for turn in self.turns:
            parent = frozen[turn.parent] if turn.parent is not None else None
            reward = self.turn_rewards.get(turn.id)
            frozen.append(msgspec.structs.replace(turn, reward=reward, parent_turn=parent))
        return tuple(frozen)
