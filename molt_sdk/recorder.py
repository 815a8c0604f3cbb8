"""The mutable record of one running trajectory; frozen into a :class:`Trajectory` when its rewards are in."""

from __future__ import annotations

import asyncio
import bisect
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import anyio
import msgspec

from molt_sdk.certificate import turn_digest
from molt_sdk.engines.base import Engine, GenerateRequest, Generation, check_generation
from molt_sdk.errors import ContextLengthError, EngineError, ModelClosedError, MoltError, RequestError
from molt_sdk.graph import Lineage, Node, Request
from molt_sdk.loop import Turnstile
from molt_sdk.messages import encodable, message_list
from molt_sdk.packed import pack_floats, pack_ints, to_spans
from molt_sdk.rendering.known import TAIL
from molt_sdk.rendering.renderer import Bridge, History, NoBridge, ParsedCompletion, Renderer
from molt_sdk.rendering.tokens import LARGE_TEXT
from molt_sdk.types import MAIN_AGENT, Message, SamplingParams, ToolExecution, Turn
from molt_sdk.workers import being_cancelled

P = ParamSpec("P")
T = TypeVar("T")

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

    parent: Node | None
    fork_reason: str
    context: list[int]
    """Prompt ids after those of the parent."""
    prompt: list[int]
    new_messages: list[Message]
    follows: int | None = None


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
        self,
        scope: Scope,
        messages: str | Sequence[Any],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        place: str,
    ) -> tuple[Turn, list[Message], list[str]]:
        """Record one chat turn; returns it with the messages as they were read, and with what was wrong with tool
        calls that could not be read. Raises RequestError for messages that are not well-formed."""
        await self.turnstile.turn()
        self.require_open()
        request = self._lineage.read(message_list(messages, place), place, scope.sees)
        plan, remarks = self._plan(scope, request, tools)
        if _size(plan.new_messages) < LARGE_TEXT:
            plan = self._bridged(plan, tools)
        else:
            plan = await self._on_thread(self._bridged, plan, tools)
        if plan.parent is None:
            large = _size(request.messages) >= LARGE_TEXT
            render = self.renderer.prompt
            prompt = (
                await self._on_thread(render, request.messages, tools) if large else render(request.messages, tools)
            )
            plan = Plan(None, plan.fork_reason, prompt, prompt, request.messages, plan.follows)
        number, generation, sampling, seconds = await self._generate(plan.prompt, sampling)
        parsed = self.renderer.parse(
            generation.token_ids, generation.finish_reason, tools, f"call_{number}_", prompt=plan.prompt[-TAIL:]
        )
        parent = plan.parent
        offered = parent.turn.tools if parent else tuple(dict(t) for t in tools)
        parsed = parsed._replace(remarks=(*remarks, *parsed.remarks))
        turn = self._record(scope, plan, offered, sampling, generation, parsed, seconds)
        self._lineage.add(turn, parent, request, [*plan.context, *generation.token_ids])
        return turn, request.messages, parsed.tool_errors

    async def complete(self, scope: Scope, prompt: str | Sequence[int], sampling: SamplingParams) -> Turn:
        """Record one raw completion: always a root, since it has no messages."""
        await self.turnstile.turn()
        self.require_open()
        ids = self._raw_ids(prompt) if len(prompt) < LARGE_TEXT else await self._on_thread(self._raw_ids, prompt)
        shown: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []
        plan = Plan(None, RAW_COMPLETION, ids, ids, shown)
        _, generation, sampling, seconds = await self._generate(ids, sampling)
        message: Message = {"role": "assistant", "content": self.renderer.text(generation.token_ids)}
        return self._record(scope, plan, (), sampling, generation, ParsedCompletion(message, []), seconds)

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

    def _plan(self, scope: Scope, request: Request, tools: Sequence[Mapping[str, Any]]) -> tuple[Plan, tuple[str, ...]]:
        """The turn to extend, if there is a candidate, and remarks on the request; nothing is rendered yet."""
        offered = [dict(tool) for tool in tools]
        node = self._lineage.candidate(request.keys, offered, scope.sees)
        if node is None:
            reason = self._lineage.explain_new_root(request, offered, scope.sees)
            return Plan(None, reason, [], [], request.messages), ()
        remarks = self._lineage.remarks(request, node, lambda turn: turn.id in scope.turn_ids)
        if list(node.turn.tools) != offered:
            reason = f"other tools are offered than in turn {node.turn.id}"
            return Plan(None, reason, [], [], request.messages, node.turn.id), remarks
        return Plan(node, "", [], [], node.behind(request)), remarks

    def _bridged(self, plan: Plan, tools: Sequence[Mapping[str, Any]]) -> Plan:
        """The plan with the ids that extend its candidate; without a parent and with the reason if they cannot."""
        node = plan.parent
        if node is None:
            return plan
        bridge = self._bridge(node, plan.new_messages, tools)
        if isinstance(bridge, Bridge):
            prompt = node.token_ids
            prompt += bridge.token_ids  # in place: the copy of a long prompt is what a turn costs
            return Plan(node, "", bridge.token_ids, prompt, plan.new_messages)
        reason = f"cannot continue turn {node.turn.id}: {bridge.reason}"
        return Plan(None, reason, [], [], plan.new_messages, node.turn.id)

    async def _on_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Work on a megabyte of text takes a second, which the event loop has not."""
        result = await asyncio.to_thread(work, *args, **kwargs)
        await self.turnstile.turn()
        self.require_open()
        return result

    def _bridge(self, node: Node, new: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Bridge | NoBridge:
        numbers = node.window.numbers if self.renderer.windowed else range(node.messages - 1)
        known = node.conversation.messages
        completion = node.turn.completion_token_ids
        prompt_end = node.tokens - len(completion)
        return self.renderer.bridge(
            History([known[i] for i in numbers], [*numbers, node.messages - 1]),
            node.turn.message,
            completion,
            new,
            tools,
            prompt=node.conversation.token_ids[max(0, prompt_end - TAIL) : prompt_end],
        )

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
        generation = self._until_its_end(generation, request)
        return number, generation, sent, time.perf_counter() - started

    def _until_its_end(self, generation: Generation, request: GenerateRequest) -> Generation:
        """The reply up to the first token that ends it. An engine that samples several tokens at a time may return
        more; nobody was shown those."""
        ids, eos = generation.token_ids, request.eos_token_ids
        end = next((i + 1 for i, token in enumerate(ids) if token in eos), len(ids))
        if request.sampling.stop and self.renderer.holds(ids[:end], request.sampling.stop):
            end = bisect.bisect_left(
                range(end), True, key=lambda i: self.renderer.holds(ids[: i + 1], request.sampling.stop)
            )
            end += 1
        if end == len(ids):
            return generation
        return msgspec.structs.replace(
            generation,
            token_ids=ids[:end],
            logprobs=generation.logprobs[:end],
            versions=generation.versions[:end],
            finish_reason="stop",
        )

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
        reply: ParsedCompletion,
        seconds: float,
    ) -> Turn:
        parent = plan.parent.turn if plan.parent else None
        turn = Turn(
            id=len(self.turns),
            parent=parent.id if parent else None,
            fork_reason=plan.fork_reason,
            agent=scope.agent,
            trainable=scope.trainable,
            new_messages=plan.new_messages,
            tools=tools,
            sampling=sampling,
            message=reply.message,
            finish_reason=generation.finish_reason,
            context_i32=pack_ints(plan.context),
            completion_i32=pack_ints(generation.token_ids),
            logprobs_f32=pack_floats(generation.logprobs),
            version_spans=to_spans(generation.versions),
            seconds=seconds,
            remarks=(*reply.tool_errors, *reply.remarks),
            follows=plan.follows,
            parent_turn=parent,
        )
        turn = msgspec.structs.replace(turn, digest=turn_digest(turn))
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


def _size(messages: Sequence[Message]) -> int:
    return sum(len(str(message.get("content") or "")) for message in messages)
