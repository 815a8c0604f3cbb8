"""What an engine is: token ids in, sampled ids with logprobs and policy versions out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from molt_sdk.errors import EngineReplyError
from molt_sdk.types import FinishReason, SamplingParams

NamedTensors = Iterable[tuple[str, Any]]
"""(Hugging Face parameter name, full torch tensor) pairs; typed loosely so that this module needs no torch."""


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """One completion to sample."""

    request_id: str
    prompt_token_ids: list[int]
    """Shape [prompt], never empty; with ``sampling.max_tokens`` it fits into the engine's context."""
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    """Any of these ends the completion; the sampled one is kept as its last token."""
    trajectory_id: str = ""
    """Requests of one trajectory share prefixes: an engine with several servers keeps them together."""


class Generation(Struct, frozen=True, kw_only=True):
    """What was sampled. All three lists have shape [completion] >= 1."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural-log probability of each sampled token under the distribution it was drawn from (after temperature)."""
    versions: list[int]
    """Policy version of the weights that sampled each token."""
    finish_reason: FinishReason
    """``stop``: an EOS id or a stop string; ``length``: max_tokens reached."""


@runtime_checkable
class Engine(Protocol):
    """The few methods that the rollout and the training loop need."""

    model: str
    """Directory with tokenizer, chat template and config."""
    version: int
    """Policy version that stamps what is sampled from now on."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt + completion."""

    async def start(self) -> None:
        """Load what is needed, before the first request; does nothing when it is loaded. Raises EngineError or
        ModelPathError."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one completion. Cancelling the caller aborts the request. Raises EngineError, or
        RequestError for a request that no engine could serve."""

    async def update_weights(self, weights: NamedTensors, version: int) -> None:
        """Replace the weights; when this returns, every new token is sampled by ``version``. Requests in flight go on
        under the new weights. All or nothing: on an error the old version stays in force."""

    async def close(self) -> None:
        """Abort what is running and free everything; safe to call twice."""


def check_generation(generation: Generation, request: GenerateRequest, engine: str) -> None:
    """Refuse a malformed reply, naming engine, request and position. Never repairs anything."""
    ids, logprobs, versions = generation.token_ids, generation.logprobs, generation.versions
    where = f"engine {engine}, request {request.request_id}"
    if not ids:
        raise EngineReplyError(f"{where}: empty completion; an engine must return at least one sampled token")
    if not len(ids) == len(logprobs) == len(versions):
        raise EngineReplyError(
            f"{where}: {len(ids)} token ids, {len(logprobs)} logprobs and {len(versions)} versions; "
            "all three must have one entry per sampled token"
        )
    if len(ids) <= request.sampling.max_tokens and _plain(ids) and _plain(versions) and _plain_logprobs(logprobs):
        return
    for name, integers in (("token id", ids), ("version", versions)):
        for position, integer in enumerate(integers):
            if not isinstance(integer, int) or isinstance(integer, bool) or not 0 <= integer < 2**31:
                raise EngineReplyError(f"{where}: {name} {integer!r} at completion position {position} is no int >= 0")
    for position, value in enumerate(logprobs):
        if not isinstance(value, int | float) or not -9999.0 < value <= 1e-3 or math.isnan(value):
            raise EngineReplyError(
                f"{where}: logprob {value!r} at completion position {position} (token id {ids[position]}); "
                "a sampled token has a finite logprob <= 0. The rollout is refused, not repaired"
            )
    if len(ids) > request.sampling.max_tokens:
        raise EngineReplyError(f"{where}: {len(ids)} tokens although max_tokens={request.sampling.max_tokens}")


def _plain(integers: list[int]) -> bool:
    """Whether all are good; looks at the whole list at once, since every call of every trajectory passes here."""
    return set(map(type, integers)) == {int} and min(integers) >= 0 and max(integers) < 2**31


def _plain_logprobs(values: list[float]) -> bool:
    plain = set(map(type, values)) == {float} and math.isfinite(sum(values))  # a NaN anywhere makes the sum one
    return plain and min(values) > -9999.0 and max(values) <= 1e-3
