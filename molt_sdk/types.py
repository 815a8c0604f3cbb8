"""The records: what a user's agent asked, what the model sampled, what it was worth.

All are frozen. While a policy runs, a private recorder (recorder.py) is mutable; the records are built when its rewards
are in. Token ids are int32, logprobs float32 (natural log, after temperature), kept as bytes and given out as lists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NotRequired, Required, TypedDict

import msgspec
from msgspec import Struct, field

from molt_sdk.errors import ConfigError
from molt_sdk.packed import Span, from_spans, unpack_floats, unpack_ints

if TYPE_CHECKING:
    from molt_sdk.explain import Explanation


class FunctionCall(TypedDict):
    name: str
    arguments: str
    """The arguments as JSON text, as in OpenAI's API."""


class ToolCall(TypedDict):
    """One call of a tool, in OpenAI's shape."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict, total=False):
    """One chat message, in OpenAI's shape."""

    role: Required[str]
    content: NotRequired[str | list[dict[str, Any]] | None]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning: NotRequired[str]


MAIN_AGENT = "main"
"""Name of the agent that the policy itself is; forks have names of their own."""

Status = Literal[
    "ok",
    "truncated",
    "rejected",
    "agent_error",
    "env_error",
    "reward_error",
    "infra_error",
    "timeout",
    "cancelled",
]
"""How a trajectory ended, as README.md explains. ``cancelled`` is set aside: an interrupted one is not recorded."""
FinishReason = Literal["stop", "length"]


class Task(Struct, frozen=True):
    """One question for an agent. ``prompt`` is text or a list of messages; ``id`` defaults to a hash of the content.

    A dict row becomes a Task with its keys ``prompt``, ``answer``, ``id`` and ``metadata``; every other key is put into
    ``metadata``: ``{"prompt": ..., "level": 3}`` is read as ``task.metadata["level"]``.
    """

    prompt: str | list[Message] = ""
    answer: Any = None
    id: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id:
            content = _fingerprint([self.prompt, self.answer, self.metadata]).encode("utf-8", "surrogatepass")
            msgspec.structs.force_setattr(self, "id", hashlib.sha256(content).hexdigest()[:12])

    def copy(self) -> Task:
        """The same task in containers of its own: what one trajectory appends to its prompt no sibling sees."""
        changes = {name: _copied(getattr(self, name)) for name in ("prompt", "answer", "metadata")}
        return msgspec.structs.replace(self, **changes)


def _copied(value: Any) -> Any:
    """Lists, dicts and sets are new, down to the bottom; everything else is the same object."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return set(value) if type(value) is set else value


def _fingerprint(value: Any) -> str:
    """Text that is the same for equal content in every process: no order of a set, no address of an object."""
    if isinstance(value, Mapping):
        return f"{{{','.join(sorted(f'{_fingerprint(k)}:{_fingerprint(v)}' for k, v in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"({','.join(sorted(map(_fingerprint, value)))})"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_fingerprint, value))}]"
    shows_address: object = object.__repr__
    return type(value).__qualname__ if type(value).__repr__ is shows_address else repr(value)


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample one completion. Every field is sent to the engine; nothing is left to a server's defaults.

    A token is drawn from the logits after, in this order: logit bias, repetition, frequency and presence penalty,
    temperature, min_p, top_k, top_p. Its recorded logprob is the one under the distribution that is left, whose
    probabilities sum to 1. Training needs a temperature > 0 and everything else in this list off.
    """

    temperature: float = 1.0
    """0 is greedy: the most likely token after bias and penalties, recorded with its logprob at temperature 1."""
    top_p: float = 1.0
    """Nucleus mass that is kept; 1 keeps all."""
    top_k: int = 0
    """Most likely tokens that are kept; 0 keeps all."""
    min_p: float = 0.0
    """Least probability, relative to the most likely token, that is kept; 0 keeps all."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that this completion holds; -2 to 2, 0 is off."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that this completion holds it; -2 to 2, 0 is off."""
    repetition_penalty: float = 1.0
    """Divides the logit of every token of prompt or completion, multiplies it if negative; 0.01 to 100, 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of these tokens: pairs of token id and bias from -100 to 100. A mapping becomes pairs."""
    max_tokens: int = 512
    """Most new tokens of one call, clamped to the room left in the context."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; the sampled tokens up to and including the match are kept."""
    seed: int | None = None
    """Mixed with the task's position and the trajectory's index, so that siblings differ."""

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ConfigError(f"sampling: {name}={getattr(self, name)!r} is not valid; {name} must be {rule}")

        if isinstance(self.stop, str | list | None):
            stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
            msgspec.structs.force_setattr(self, "stop", stop)
        if self.logit_bias != ():
            msgspec.structs.force_setattr(self, "logit_bias", _bias_pairs(self.logit_bias))
        penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        for name in ("temperature", "top_p", "min_p", *penalties):
            need(_is_number(getattr(self, name), int | float), name, "a number")
        for name in ("top_k", "max_tokens"):
            need(_is_number(getattr(self, name), int), name, "an integer")
        need(0.0 <= self.temperature < float("inf"), "temperature", "a finite number >= 0")
        need(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]")
        need(self.top_k >= 0, "top_k", ">= 0 (0 switches it off)")
        need(0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            need(-2.0 <= getattr(self, name) <= 2.0, name, "in [-2, 2] (0 switches it off)")
        need(0.01 <= self.repetition_penalty <= 100.0, "repetition_penalty", "in [0.01, 100] (1 switches it off)")
        need(self.max_tokens >= 1, "max_tokens", ">= 1")
        texts = isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop)
        need(texts, "stop", "non-empty strings")
        need(self.seed is None or _is_number(self.seed, int), "seed", "an integer or None")


def _is_number(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _bias_pairs(given: Any) -> tuple[tuple[int, float], ...]:
    """A logit bias (a mapping, pairs, or None) as pairs in the order of their token ids: equal if they mean the same.

    Raises ConfigError.
    """
    pairs = given.items() if isinstance(given, Mapping) else () if given is None else given
    biases: dict[int, float] = {}
    try:
        for key, bias in pairs:
            token = int(key) if isinstance(key, str) else key  # the keys of a JSON object are text
            if not _is_number(token, int) or not 0 <= token < 2**31 or token in biases:
                raise ConfigError(
                    f"sampling: logit_bias has {key!r} as a token id; it must be an integer >= 0, given once"
                )
            if not _is_number(bias, int | float) or not -100.0 <= bias <= 100.0:
                raise ConfigError(
                    f"sampling: logit_bias of token id {token} is {bias!r}; it must be a number in [-100, 100]"
                )
            biases[token] = float(bias)
    except (TypeError, ValueError):
        raise ConfigError(
            f"sampling: logit_bias={given!r:.80} is not valid; logit_bias must be a mapping of token ids to numbers in "
            "[-100, 100]"
        ) from None
    return tuple(sorted(biases.items()))


class Turn(Struct, frozen=True, kw_only=True):
    """One model call: what was asked, what was sampled.

    ``parent`` is the id of the turn that it extends: its prompt starts with the parent's prompt + completion, token for
    token. A root has ``parent=None`` and says why in ``fork_reason``. Only what the parent does not hold is stored.
    """

    id: int
    """Index in ``trajectory.turns``; the order in which the calls were answered."""
    parent: int | None
    fork_reason: str
    agent: str
    trainable: bool
    new_messages: list[Message]
    """Messages after the parent's conversation; all messages for a root."""
    tools: tuple[dict[str, Any], ...]
    """JSON schemas offered in this call, in OpenAI's shape."""
    sampling: SamplingParams
    message: Message
    """The reply, parsed."""
    finish_reason: FinishReason
    context_i32: bytes
    """Prompt ids after the parent's prompt + completion; the whole prompt for a root."""
    completion_i32: bytes
    logprobs_f32: bytes
    version_spans: tuple[Span, ...]
    reward: float | None = None
    """What ``reply.reward`` gave this call; see :meth:`Trajectory.agent_reward`."""
    seconds: float = 0.0
    follows: int | None = None
    """Of a root: the turn whose conversation it goes on with, although its tokens could not be extended."""
    parent_turn: Turn | None = None
    """The record of ``parent``; never stored twice."""
    remarks: tuple[str, ...] = ()
    """What the SDK noticed, in words: in the reply, tool calls that cannot be read, and what it read as what; in the
    request, a reply that came back incomplete, and the edit for which the latest turn is not continued."""
    digest: bytes = b""
    """16 bytes over the parent's digest and all that is trained of this turn, taken when it was recorded; ``certify()``
    takes them again. b"" in a turn that was made by hand."""

    def __repr__(self) -> str:
        start = f"parent={self.parent}" if self.parent is not None else f"fork_reason={self.fork_reason!r}"
        tokens = f"{len(self.completion_i32) // 4} tokens"
        return (
            f"Turn(id={self.id}, agent={self.agent!r}, {start}, {tokens}, {self.finish_reason}, {self.message!r:.80})"
        )

    @property
    def prompt_token_ids(self) -> list[int]:
        """Every id the engine was given, shape [prompt]."""
        return unpack_ints(self.prompt_i32)

    @property
    def prompt_i32(self) -> bytes:
        parts: list[bytes] = [self.context_i32]
        turn = self.parent_turn
        while turn is not None:
            parts += (turn.completion_i32, turn.context_i32)
            turn = turn.parent_turn
        return b"".join(reversed(parts))

    @property
    def completion_token_ids(self) -> list[int]:
        """The sampled ids, the end-of-turn token included, shape [completion]."""
        return unpack_ints(self.completion_i32)

    @property
    def logprobs(self) -> list[float]:
        """The sampler's log-probability of each completion token, after temperature, shape [completion]."""
        return unpack_floats(self.logprobs_f32)

    @property
    def versions(self) -> list[int]:
        """The policy version that sampled each completion token, shape [completion]."""
        return from_spans(self.version_spans)

    @property
    def messages(self) -> list[Message]:
        """The conversation of the request, without the reply."""
        parts: list[list[Message]] = [self.new_messages]
        turn = self.parent_turn
        while turn is not None:
            parts += [[turn.message], turn.new_messages]
            turn = turn.parent_turn
        return [message for part in reversed(parts) for message in part]


class ToolExecution(Struct, frozen=True, kw_only=True):
    """One executed tool call: arguments in, message out."""

    call: ToolCall
    message: Message
    agent: str = MAIN_AGENT
    error: str | None = None
    """Traceback when the tool raised, or why the call could not be executed."""
    stop: bool = False
    """The tool raised ``Stop``."""
    seconds: float = 0.0


class Sample(Struct, frozen=True, kw_only=True):
    """One token-exact training row: a path from a root of the turn forest to a leaf. All lists have shape [tokens].

    ``loss_mask`` is 1 on a token that was sampled and is trained in this row (a token that several leaves share is
    trained in the first only). On context, ``rollout_logprobs`` is 0.0, ``versions`` and ``turn_ids`` are -1.
    """

    trajectory_id: str
    token_ids_i32: bytes
    loss_mask_u8: bytes
    logprobs_f32: bytes
    version_spans: tuple[Span, ...]
    turn_spans: tuple[Span, ...]
    temperatures_f32: bytes

    def __repr__(self) -> str:
        turns = [turn for turn, _, _ in self.turn_spans if turn >= 0]
        return f"Sample({len(self)} tokens, {sum(self.loss_mask_u8)} trained, turns {turns})"

    @property
    def token_ids(self) -> list[int]:
        return unpack_ints(self.token_ids_i32)

    @property
    def loss_mask(self) -> list[int]:
        return list(self.loss_mask_u8)

    @property
    def rollout_logprobs(self) -> list[float]:
        return unpack_floats(self.logprobs_f32)

    @property
    def versions(self) -> list[int]:
        return from_spans(self.version_spans)

    @property
    def turn_ids(self) -> list[int]:
        return from_spans(self.turn_spans)

    @property
    def temperatures(self) -> list[float]:
        return unpack_floats(self.temperatures_f32)

    def __len__(self) -> int:
        return len(self.loss_mask_u8)


class Trajectory(Struct, frozen=True, kw_only=True):
    """One run of a policy on one task."""

    id: str
    task: Task
    turns: tuple[Turn, ...] = ()
    status: Status = "ok"
    reward: float | None = None
    """The scalar that is trained on; None until scored, and for everything that failed."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named parts, unweighted; metrics (weight 0) included."""
    agent_rewards: dict[str, float] = field(default_factory=dict)
    """Rewards that forks gave themselves with ``model.reward``, by the name of the fork."""
    output: Any = None
    """What the policy returned, where rewards come from elsewhere."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the policy logged with ``model.log``."""
    tool_executions: tuple[ToolExecution, ...] = ()
    error: str | None = None
    """Traceback of what failed, or the reason of a rejection."""
    policy: str = ""
    environment: str = ""
    position: int = 0
    """Position of the task in the stream of the run."""
    index: int = 0
    """Index among the siblings of its group."""
    attempt: int = 0
    split: str = "train"
    started: float = 0.0
    """Unix time in seconds."""
    seconds: float = 0.0

    def __repr__(self) -> str:
        return (
            f"Trajectory(id={self.id[:8]!r}, task={self.task.id!r}, status={self.status!r}, reward={self.reward}, "
            f"{len(self.turns)} turns, text={self.text!r:.60})"
        )

    @property
    def text(self) -> str:
        """Text of the last reply; "" when the model was never called."""
        content = self.turns[-1].message.get("content") if self.turns else None
        return content if isinstance(content, str) else ""

    @property
    def messages(self) -> list[Message]:
        """The conversation of the last call with its reply."""
        return [*self.turns[-1].messages, self.turns[-1].message] if self.turns else []

    @property
    def tool_calls(self) -> list[ToolCall]:
        """All tool calls that the model made, in order."""
        return [call for turn in self.turns for call in turn.message.get("tool_calls") or ()]

    @property
    def agents(self) -> list[str]:
        """Names of the agents that called the model, in order of their first call."""
        return list(dict.fromkeys(turn.agent for turn in self.turns))

    @property
    def oldest_version(self) -> int | None:
        """Smallest policy version of any trainable sampled token."""
        return min((v for t in self.turns if t.trainable for v, _, _ in t.version_spans), default=None)

    @property
    def scored(self) -> bool:
        """Whether it can be trained on: it ended on its own terms and has a reward."""
        return self.reward is not None and self.status in ("ok", "truncated", "agent_error")

    def agent_reward(self, agent: str) -> float | None:
        """What all tokens of ``agent`` are trained on: its own reward if it has one, else the trajectory's, plus the
        rewards of all its turns, whichever branch they are on. The advantage compares it with that of the same agent in
        the sibling trajectories. None where there is neither."""
        base = self.agent_rewards.get(agent, self.reward)
        if base is None:
            return None
        return base + sum(t.reward for t in self.turns if t.agent == agent and t.reward is not None)

    def samples(self) -> list[Sample]:
        """Training rows, one per leaf of the turn forest, depth first."""
        from molt_sdk.forest import samples

        return samples(self)

    def certify(self) -> Certificate:
        """Prove from the record alone that every trained token is exact; see :class:`Certificate`."""
        from molt_sdk.certificate import certify

        return certify(self)

    def explain(self) -> Explanation:
        """In words: which turns continue each other, where a new segment or a branch starts and why, what is trained
        and what is not. ``print(trajectory.explain())`` shows it."""
        from molt_sdk.explain import explain

        return explain(self)


class Certificate(Struct, frozen=True, kw_only=True):
    """Result of ``certify()``: prefix, mask, exactly-once, versions, lengths, and that nothing of it was changed after
    it was recorded; ``problems`` is empty if exact."""

    trained_tokens: int
    context_tokens: int
    """Tokens of the rows with mask 0; what several rows share counts once per row."""
    abandoned_tokens: int
    """Sampled but masked: a best-of-n reply that was not continued and has no reward of its own."""
    problems: tuple[str, ...] = ()
    """What is wrong, each naming its turn."""
    sealed: bool = False
    """Whether every turn was compared with its digest; False for turns made by hand, which have none: of those the
    structure alone is proven."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok


class TrajectoryGroup(Struct, frozen=True, kw_only=True):
    """The trajectories of one task position, whose rewards are compared with each other."""

    task: Task
    position: int
    epoch: int
    trajectories: tuple[Trajectory, ...]

    def __repr__(self) -> str:
        return f"TrajectoryGroup(position={self.position}, task={self.task.id!r}, rewards={self.rewards})"

    @property
    def rewards(self) -> list[float | None]:
        return [t.reward for t in self.trajectories]

    @property
    def scored(self) -> list[Trajectory]:
        return [t for t in self.trajectories if t.scored]

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)
