"""The handle that a policy gets: every call through it is recorded."""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import functools
import inspect
import math
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import anyio
import msgspec

from molt_sdk.decorators import MARK, mark_of, where
from molt_sdk.errors import ConfigError, EngineError, ModelClosedError, RequestError, RewardError
from molt_sdk.loop import plain_errors
from molt_sdk.messages import copied, normalize, normalize_call
from molt_sdk.recorder import Recorder, Scope
from molt_sdk.tools import Tool, ToolArgumentsError, error_text, result_text, tools_from
from molt_sdk.types import FinishReason, Message, SamplingParams, ToolCall, ToolExecution, Turn
from molt_sdk.workers import PinnedThread, WorkerPool, contained

DEFAULT_MAX_TURNS = 10
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
"""Of training: the trainer divides by it in float32, and gradients grow with its inverse."""
LARGEST_REWARD = 1e30
"""Sums and squares of rewards, and advantages in float32, stay finite below it."""


class Stop(Exception):
    """Raised by a tool: its result is recorded and the tool loop ends."""

    def __init__(self, result: Any = None) -> None:
        super().__init__(result)
        self.result = result


class Reject(Exception):
    """Raised by a policy: the trajectory is ``rejected``, recorded and never trained."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class _ToolTimeoutError(Exception):
    """A tool exceeded its own timeout (not a TimeoutError that the tool raised)."""


class SamplingRules(msgspec.Struct, frozen=True):
    """What a policy may ask for."""

    defaults: SamplingParams
    training: bool
    """Samples are trained on: temperature must be > 0 and nothing else may change the distribution."""
    overrule: bool
    """``sampling_from="config"``: all that an agent asks for but max_tokens, stop and seed is replaced by the
    defaults."""

    def resolve(self, overrides: Mapping[str, Any], place: str, *, trainable: bool = True) -> SamplingParams:
        """Defaults with the call's own values; a fork that is not trained may ask for any.

        Raises RequestError for what cannot be asked for here.
        """
        known = SamplingParams.__struct_fields__
        for name in overrides:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
                raise RequestError(f"{place}: unknown sampling parameter {name!r}{hint}")
        values = dict(overrides)
        if self.overrule and trainable:
            values = {k: v for k, v in values.items() if k in ("max_tokens", "stop", "seed")}
        try:
            params = msgspec.structs.replace(self.defaults, **values) if values else self.defaults
        except ConfigError as error:
            raise RequestError(f"{place}: {error}") from None
        if self.training and trainable:
            check_trainable(params, place, OVERRULE)
        return params


_OFF: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": (),
}
"""What draws from a distribution that the trainer does not compute, and the value that switches it off."""


OVERRULE = (
    ', or overrule what the agent asks for: config=FitConfig(rollout=RolloutConfig(sampling_from="config")), on the '
    "command line --rollout.sampling-from config"
)


def check_trainable(params: SamplingParams, place: str, advice: str = "") -> None:
    """Refuse sampling whose logprobs the trainer cannot reproduce. Raises RequestError."""
    if not MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE:
        raise RequestError(
            f"{place}: temperature={params.temperature} cannot be trained on; use a value > 0 "
            f"({MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}){advice}"
        )
    for name, off in _OFF.items():
        value = getattr(params, name)
        if value != off:
            raise RequestError(
                f"{place}: {name}={value!r:.80} changes the distribution that tokens are drawn from, and the trainer "
                f"would see wrong ratios; use {name}={off} in training{advice}"
            )


_inside_tool: contextvars.ContextVar[tuple[Session, asyncio.Lock] | None] = contextvars.ContextVar(
    "molt_inside_tool", default=None
)
"""The trajectory whose environment runs a tool in this context, and what makes the tools that this tool runs serial."""


class Session:
    """Everything one trajectory's handles share."""

    def __init__(
        self, recorder: Recorder, rules: SamplingRules, pool: WorkerPool, max_turns: int | None = None
    ) -> None:
        self.recorder = recorder
        self.rules = rules
        self.pool = pool
        self.thread = PinnedThread(pool)
        self.environment: object | None = None
        self.opening: asyncio.Task[BaseException | None] | None = None
        """Makes the environment; outlives a cancelled trajectory, so that what was opened can be closed."""
        self.max_turns = max_turns
        self.rewarded_by: dict[str, Scope] = {}
        """Which handle set the reward of an agent: forks may share a name."""
        self._serial = asyncio.Lock()
        self._environment_tools: list[Tool] | None = None

    def tools(self, source: Any) -> list[Tool]:
        """Tools of an environment, functions or Tools. Raises DefinitionError, and RequestError for a class."""
        if source is None:
            return []
        if inspect.isclass(source):
            raise RequestError(
                f"tools={source.__qualname__} is a class; pass the instance, whose methods can be called"
            )
        if source is not self.environment:  # a list may be another one at the next call
            return tools_from(source)
        if self._environment_tools is None:
            self._environment_tools = tools_from(source)
        return self._environment_tools

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """One tool of the environment at a time; a tool that runs tools (a sub-agent) does not wait for itself."""
        inside = _inside_tool.get()
        lock = inside[1] if inside is not None and inside[0] is self else self._serial
        async with lock:
            token = _inside_tool.set((self, asyncio.Lock()))
            try:
                yield
            finally:
                _inside_tool.reset(token)

    def is_environment(self, tool: Tool) -> bool:
        return self.environment is not None and getattr(tool.fn, "__self__", None) is self.environment

    async def call(self, fn: Callable[..., Any], *args: Any, pinned: bool) -> Any:
        """Call user code: async on the loop, sync on a thread (the environment's own if ``pinned``)."""
        return await call_user_code(self.thread if pinned else self.pool, fn, *args)


async def call_user_code(threads: PinnedThread | WorkerPool, fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn``: async on the loop, sync on one of the threads. A sync function may return a coroutine."""

    async def call() -> Any:
        if inspect.iscoroutinefunction(fn):
            return await fn(*args)
        result = await threads.run(fn, *args)
        return await result if inspect.iscoroutine(result) else result

    return await contained(call(), describe(fn))


class Reply:
    """One answer of the model."""

    __slots__ = ("_messages", "_recorder", "tool_errors", "turn")

    def __init__(self, turn: Turn, messages: list[Message], tool_errors: list[str], recorder: Recorder) -> None:
        self.turn = turn
        self.tool_errors = tool_errors
        """What was wrong with tool calls that could not be read, in words for the model."""
        self._messages = messages
        self._recorder = recorder

    def __repr__(self) -> str:
        return f"Reply({self.text!r}, finish_reason={self.finish_reason!r}, tool_calls={len(self.tool_calls)})"

    @property
    def id(self) -> str:
        return f"{self._recorder.trajectory_id}/{self.turn.id}"

    @property
    def text(self) -> str:
        content = self.turn.message.get("content")
        return content if isinstance(content, str) else ""

    @property
    def reasoning(self) -> str | None:
        return self.turn.message.get("reasoning")

    @property
    def tool_calls(self) -> list[ToolCall]:
        return self.message.get("tool_calls") or []

    @property
    def message(self) -> Message:
        """The assistant message; append it to the conversation as it is."""
        return copied(self.turn.message)

    @property
    def messages(self) -> list[Message]:
        """The request's messages with this reply appended: the next request minus what comes after."""
        return [copied(message) for message in (*self._messages, self.turn.message)]

    @property
    def finish_reason(self) -> FinishReason:
        return self.turn.finish_reason

    @property
    def truncated(self) -> bool:
        return self.turn.finish_reason == "length"

    @property
    def token_ids(self) -> list[int]:
        return self.turn.completion_token_ids

    @property
    def logprobs(self) -> list[float]:
        return self.turn.logprobs

    @property
    def versions(self) -> list[int]:
        return self.turn.versions

    @property
    def usage(self) -> dict[str, int]:
        prompt, completion = len(self.turn.prompt_i32) // 4, len(self.turn.completion_i32) // 4
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def reward(self, value: Any) -> None:
        """Add to the reward of the agent that made this call; a second call replaces the first. Raises RewardError.

        All tokens of one agent in one trajectory are trained on one number: its reward plus the rewards of all its
        replies. A reply is not trained on its own reward alone; to tell parts of an episode apart, make each a fork
        with a name and a reward of its own. Of several replies to one prompt, one with a reward is trained although
        another one was continued.
        """
        self._recorder.require_open()
        self._recorder.turn_rewards[self.turn.id] = to_reward(value, f"reply.reward on turn {self.turn.id}")


class Model:
    """A policy's handle on the model it trains."""

    def __init__(self, session: Session, scope: Scope) -> None:
        self._session = session
        self._scope = scope
        self._recorder = session.recorder

    def __repr__(self) -> str:
        return f"Model(agent={self._scope.agent!r}, trajectory={self._recorder.trajectory_id!r})"

    @property
    def agent(self) -> str:
        return self._scope.agent

    async def chat(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Any = None,
        tool_choice: str = "auto",
        response_format: None = None,
        **sampling: Any,
    ) -> Reply:
        """Ask for one reply.

        Args:
            messages: text (one user message) or messages in OpenAI's shape.
            tools: an environment, functions or both in a list; their schemas are shown to the model.
            tool_choice: "auto", or "none" to show no tools in this call.
            response_format: not supported by the engines of this version; must be None.
            **sampling: fields of :class:`SamplingParams` for this call alone.

        Raises:
            RequestError: malformed messages or sampling (ContextLengthError: no room; ModelClosedError: too late).
            DefinitionError: a tool is defined in a way that cannot work.
            TemplateError: the chat template cannot show these messages.
            EngineError: inference failed.
        """
        if tool_choice not in ("auto", "none") or response_format is not None:
            asked = f"tool_choice={tool_choice!r}, response_format={response_format!r}"
            raise RequestError(
                f"model.chat: {asked} needs structured output, which this engine does not have; use "
                'tool_choice="auto" or "none" and no response_format'
            )
        schemas = [tool.schema for tool in self._session.tools(tools)] if tool_choice == "auto" else []
        params = self._session.rules.resolve(sampling, "model.chat", trainable=self._scope.trainable)
        turn, read, errors = await self._recorder.chat(self._scope, messages, schemas, params, "model.chat")
        return Reply(turn, read, errors, self._recorder)

    async def complete(self, prompt: str | Sequence[int], **sampling: Any) -> Reply:
        """Continue raw text (BOS added as the tokenizer does, exactly once) or token ids. Raises as :meth:`chat`."""
        params = self._session.rules.resolve(sampling, "model.complete", trainable=self._scope.trainable)
        turn = await self._recorder.complete(self._scope, prompt, params)
        return Reply(turn, turn.messages, [], self._recorder)

    async def run(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Any = None,
        system: str | None = None,
        max_turns: int | None = None,
        **sampling: Any,
    ) -> Reply:
        """The tool loop: ask, execute the tool calls, ask again, until a reply has none.

        It also ends when a tool raises ``Stop``, when a reply is cut by ``max_tokens``, or after ``max_turns`` calls of
        the model (default: the environment's, else 10); the calls of a cut or last reply are not executed. Returns the
        last reply. What a tool raises goes back to the model as its result; what was wrong with calls that cannot be
        read follows the results of the others, each as a tool message without ``tool_call_id``. ``system`` is put in
        front of messages that do not begin with a system message.

        Raises:
            RequestError: as :meth:`chat`; ``system`` although there is a system message; ``max_turns`` below 1.
            DefinitionError, TemplateError, EngineError: as :meth:`chat`.
            Reject, EngineError, ModelClosedError: a tool raised it; these are not for the model to read.
        """
        limit = max_turns if max_turns is not None else self._session.max_turns or DEFAULT_MAX_TURNS
        if limit < 1:
            raise RequestError(f"model.run: max_turns={limit} must be at least 1")
        conversation = normalize(messages, "model.run")
        if system is not None:
            if conversation[0]["role"] in ("system", "developer"):
                raise RequestError(
                    "model.run: system=... was given, but the messages begin with a system message already; give one "
                    "of the two"
                )
            conversation = [{"role": "system", "content": system}, *conversation]
        while True:
            reply = await self.chat(conversation, tools=tools, **sampling)
            limit -= 1
            conversation = reply.messages
            if reply.truncated or limit == 0 or not (reply.tool_calls or reply.tool_errors):
                return reply
            stopped, results = await self._call_tools(reply.tool_calls, tools)
            conversation += results
            for error in reply.tool_errors:
                conversation.append({"role": "tool", "content": f"Error: {error}"})
            if stopped:
                return reply

    async def _call_tools(self, calls: Sequence[ToolCall], source: Any) -> tuple[bool, list[Message]]:
        """Run the calls of one reply; results in call order. Neighbouring ``parallel=True`` calls run together."""
        by_name = {tool.name: tool for tool in self._session.tools(source)}
        done: list[ToolExecution | None] = [None] * len(calls)

        async def one(i: int) -> None:
            done[i] = await self._execute(calls[i], by_name)

        i = 0
        try:
            while i < len(calls) and not any(e is not None and e.stop for e in done):
                j = i + 1
                if _is_parallel(calls[i], by_name):
                    while j < len(calls) and _is_parallel(calls[j], by_name):
                        j += 1
                if j == i + 1:
                    await one(i)
                else:
                    await _together(functools.partial(one, k) for k in range(i, j))
                i = j
        finally:
            finished = [e for e in done if e is not None]
            self._recorder.executions += finished
        return any(e.stop for e in finished), [copied(e.message) for e in finished]

    async def call_tool(self, call: ToolCall, tools: Any) -> Message:
        """Execute one tool call and return its tool message; recorded. A tool's exception becomes the message's text.

        Raises:
            Stop: the tool raised it (its result is recorded).
            RequestError: the call is not in OpenAI's shape.
            Reject, EngineError, ModelClosedError: the tool raised it; these are not for the model to read.
        """
        call = normalize_call(call, "model.call_tool: the argument")
        by_name = {tool.name: tool for tool in self._session.tools(tools)}
        execution = await self._execute(call, by_name)
        self._recorder.executions.append(execution)
        if execution.stop:
            raise Stop(execution.message.get("content"))
        return copied(execution.message)

    async def _execute(self, call: ToolCall, tools: Mapping[str, Tool]) -> ToolExecution:
        self._recorder.require_open()
        started = time.perf_counter()
        name = call["function"]["name"]
        content, error, stop = "", None, False
        tool = tools.get(name)
        if tool is None:
            error = f"unknown tool {name!r}"
            content = f"Error: there is no tool {name!r}; known are {', '.join(sorted(tools)) or 'none'}"
        else:
            try:
                content = await self._call(tool, tool.bind(call["function"]["arguments"]))
            except ToolArgumentsError as raised:
                content, error = f"Error: {raised}", str(raised)
            except _ToolTimeoutError:
                error = f"{name} took longer than its timeout of {tool.timeout} s"
                content = f"Error: {error}"
            except (Exception, SystemExit) as raised:  # a tool that runs code may well meet an exit()
                errors = list(errors_inside(raised))
                if (fatal := _not_for_the_model(errors)) is not None:
                    raise fatal from fatal.__cause__
                stops = [inner for inner in errors if isinstance(inner, Stop)]
                stop = len(stops) == len(errors)
                if stop:
                    content = result_text(stops[0].result)
                else:
                    content, error = f"Error: {error_text(raised)}", traceback.format_exc()
        message: Message = {"role": "tool", "content": content, "tool_call_id": call["id"], "name": name}
        return ToolExecution(
            call=call,
            message=message,
            agent=self._scope.agent,
            error=error,
            stop=stop,
            seconds=time.perf_counter() - started,
        )

    async def _call(self, tool: Tool, arguments: dict[str, Any]) -> str:
        session = self._session
        owned = session.is_environment(tool)

        async def call(pinned: bool) -> str:
            with anyio.CancelScope() as limit:
                fn = tool.fn if tool.timeout is None else _limited(tool.fn, tool.timeout, limit)
                return result_text(await session.call(functools.partial(fn, **arguments), pinned=pinned))
            raise _ToolTimeoutError

        if owned and not tool.parallel:
            async with session.exclusive():
                return await call(pinned=True)
        return await call(pinned=False)

    def fork(self, agent: str | None = None, *, trainable: bool = True) -> Model:
        """A named sub-agent: it may continue what this handle has said so far, and has its own branch and reward.

        Rewards belong to names: a fork's tokens are trained on its own reward if it has one, else on the trajectory's,
        and compared with those of the fork of that name in the sibling trajectories. Forks that share a name share a
        reward; name them apart (``model.fork(f"worker{i}")``) to reward them apart. Without a name it is "fork1",
        "fork2", ...

        Raises RequestError for the name "main": the policy itself has it.
        """
        return Model(self._session, self._recorder.fork(self._scope, agent, trainable))

    def reward(self, value: Any, *, turn: Reply | int | None = None) -> None:
        """Set the reward of this agent, or with ``turn`` what a call adds to it (``reply.reward``); the last counts.

        Raises RewardError: no finite number; no such turn; another fork of this name has set another reward.
        """
        self._recorder.require_open()
        if turn is None:
            number = to_reward(value, f"model.reward of agent {self.agent!r}")
            before = self._recorder.agent_rewards.get(self.agent)
            if self._session.rewarded_by.setdefault(self.agent, self._scope) is not self._scope and before != number:
                raise RewardError(
                    f"model.reward: another fork named {self.agent!r} has the reward {before:g}, this one would get "
                    f"{number:g}; forks that share a name share a reward, so give each a name of its own, such as "
                    f'model.fork(f"{self.agent}{{i}}")'
                )
            self._recorder.agent_rewards[self.agent] = number
            return
        index = turn.turn.id if isinstance(turn, Reply) else turn
        if not 0 <= index < len(self._recorder.turns):
            raise RewardError(f"model.reward: turn={index} does not exist; there are {len(self._recorder.turns)} turns")
        self._recorder.turn_rewards[index] = to_reward(value, f"model.reward on turn {index}")

    def log(self, **values: Any) -> None:
        """Record numbers as metrics of the trajectory; they are averaged over the step."""
        self._recorder.require_open()
        for name, value in values.items():
            self._recorder.metrics[name] = to_reward(value, f"model.log({name}=...)", kind="metric")


async def _together(calls: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Await all at the same time. Raises the first error as it is, not in a group."""
    with plain_errors():
        async with anyio.create_task_group() as group:
            for call in calls:
                group.start_soon(call)


def errors_inside(error: BaseException) -> Iterator[BaseException]:
    """The error itself, or the errors inside a group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from errors_inside(inner)
    else:
        yield error


def blames_engine(error: BaseException) -> bool:
    """Whether inference failed: the error, one in its group, or what one of them was raised from."""
    for inner in errors_inside(error):
        cause: BaseException | None = inner
        while cause is not None:
            if isinstance(cause, EngineError):
                return True
            cause = cause.__cause__
    return False


def _not_for_the_model(errors: Sequence[BaseException]) -> BaseException | None:
    """Which of a tool's errors ends the policy's call instead of going to the model as text, if any."""
    fatal = (error for error in errors if isinstance(error, ModelClosedError) or blames_engine(error))
    return next(fatal, errors[0] if all(isinstance(error, Reject) for error in errors) else None)


def _limited(fn: Callable[..., Any], seconds: float, scope: anyio.CancelScope) -> Callable[..., Any]:
    """``fn``, which has ``seconds`` from its start on: a sync one may first wait for a thread that another call holds,
    and that is not its own time."""
    loop = asyncio.get_running_loop()

    def start() -> None:
        scope.deadline = loop.time() + seconds

    if inspect.iscoroutinefunction(fn):
        start()
        return fn

    @functools.wraps(fn)
    def on_thread(**arguments: Any) -> Any:
        loop.call_soon_threadsafe(start)
        return fn(**arguments)

    return on_thread


def _is_parallel(call: ToolCall, tools: Mapping[str, Tool]) -> bool:
    tool = tools.get(call["function"]["name"])
    return tool is not None and tool.parallel


def to_reward(value: Any, place: str, *, kind: str = "reward") -> float:
    """One finite float from a bool, int, float, Decimal, or NumPy/torch scalar.

    Raises:
        RewardError: naming ``place``, for anything else: None, NaN, infinity, text, lists.
    """
    number = value
    if not isinstance(value, bool | int | float | Decimal):
        size = getattr(value, "size", None) if not hasattr(value, "numel") else value.numel()
        if callable(getattr(value, "item", None)) and size == 1:
            number = value.item()
        if isinstance(number, str | bytes | complex) or not isinstance(number, bool | int | float | Decimal):
            hint = "; did it miss a return statement?" if value is None else ""
            raise RewardError(
                f"{place} gave {value!r:.80} of type {type(value).__name__}; a {kind} is one finite number "
                f"(bool, int, float, Decimal, NumPy or torch scalar){hint}"
            )
    try:
        result = float(number)
    except (OverflowError, ValueError) as error:
        raise RewardError(f"{place} gave {value!r:.80}, which is not a float: {error}") from None
    if not math.isfinite(result):
        raise RewardError(f"{place} gave {result}; a {kind} must be finite")
    if abs(result) > LARGEST_REWARD:
        raise RewardError(f"{place} gave {result}; the largest magnitude of a {kind} is {LARGEST_REWARD:g}")
    return result


def describe(fn: Any) -> str:
    """Name of a policy, reward or environment for records and messages."""
    if isinstance(fn, functools.partial):
        return describe(fn.func)
    if inspect.isclass(fn) and MARK not in vars(fn):  # a mark that is inherited names the base class
        return fn.__name__
    mark = mark_of(fn)
    return getattr(mark, "name", None) or getattr(fn, "__name__", None) or where(fn)
