"""Sampling for the torch engine: one draw per token, from the request's own random stream.

A logits processor of transformers' continuous batching sees the logits of every request that gets a token, together
with the request's id. This one draws the token itself, notes its logprob, and marks it so that the manager's argmax
finds it. So all sampling parameters are per request, no global generator is touched, and what is recorded is what the
manager goes on with.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.logits_process import LogitsProcessorList

from molt_sdk.engines.base import GenerateRequest, Generation
from molt_sdk.errors import EngineError
from molt_sdk.types import FinishReason, SamplingParams

_STRETCH = 256
"""Tokens summed at once when a token is drawn."""


class Running:
    """One request while it is generated. Tokens are written on the generation thread only, until it has finished."""

    def __init__(
        self, request: GenerateRequest, decode: Callable[[list[int]], str], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.request = request
        self.future: asyncio.Future[None] = loop.create_future()
        self.finish_reason: FinishReason | None = None
        self.name = ""
        """The id under which the current session knows it."""
        self._loop = loop
        self._decode = decode
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self.versions: list[int] = []
        self._eos = frozenset(request.eos_token_ids)
        sampling = request.sampling
        self.adjusts = bool(
            sampling.logit_bias
            or sampling.repetition_penalty != 1
            or sampling.frequency_penalty
            or sampling.presence_penalty
        )
        # A request's own generator: the global one stays as it is, and a seed means the same in any batch.
        self._random = random.Random(sampling.seed)
        longest = max((len(text.encode()) for text in sampling.stop), default=0)
        # A token holds at least a byte, so a match that ends at the newest token starts within so many tokens. The
        # few more keep a tokenizer's special treatment of the first token out of the match.
        self._window = longest + 8

    @property
    def prompt(self) -> list[int]:
        """What the model has to see (again): the prompt and everything sampled so far."""
        return [*self.request.prompt_token_ids, *self._token_ids]

    @property
    def room(self) -> int:
        """Tokens that may still be sampled."""
        return self.request.sampling.max_tokens - len(self._token_ids)

    @property
    def generation(self) -> Generation:
        """The record of a finished request."""
        if self.finish_reason is None:
            raise EngineError(f"torch engine, request {self.request.request_id}: not finished")
        return Generation(
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            versions=self.versions,
            finish_reason=self.finish_reason,
        )

    @property
    def ended_by_text(self) -> bool:
        """Finished by a stop string alone, of which the manager knows nothing."""
        return self.finish_reason == "stop" and self.room > 0 and self._token_ids[-1] not in self._eos

    def draw(self) -> float:
        """Uniform in [0, 1)."""
        return self._random.random()

    def adjust(self, logits: Tensor) -> None:
        """Apply logit bias and penalties, if it ``adjusts``, to the float32 logits [vocab] of the next token."""
        sampling = self.request.sampling
        if sampling.logit_bias:
            tokens, biases = zip(*sampling.logit_bias, strict=True)
            logits[list(tokens)] += torch.tensor(biases, device=logits.device)
        if sampling.repetition_penalty != 1.0:
            seen = list({*self.request.prompt_token_ids, *self._token_ids})
            values, penalty = logits[seen], sampling.repetition_penalty
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if self._token_ids and (sampling.presence_penalty or sampling.frequency_penalty):
            times = Counter(self._token_ids)
            counts = torch.tensor(list(times.values()), device=logits.device)
            logits[list(times)] -= sampling.presence_penalty + sampling.frequency_penalty * counts

    def add(self, token_id: int, logprob: float, version: int) -> None:
        """Note one sampled token and whether it is the last."""
        self._token_ids.append(token_id)
        self._logprobs.append(logprob)
        self.versions.append(version)
        if token_id in self._eos or (self.request.sampling.stop and self._matches()):
            self.finish_reason = "stop"
        elif self.room <= 0:
            self.finish_reason = "length"

    def settle(self, error: BaseException | None = None) -> None:
        """Wake the waiting caller, from any thread."""

        def wake() -> None:
            if not self.future.done():
                if error is None:
                    self.future.set_result(None)
                else:
                    self.future.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(wake)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    def _matches(self) -> bool:
        # A character whose bytes are still incomplete decodes to U+FFFD and matches when its last byte is there.
        tail = self._decode(self._token_ids[-self._window :])
        return any(text in tail for text in self.request.sampling.stop)


class Sampler(ContinuousBatchingLogitsProcessor):
    """Draws a token for every row of logits. Lives on the generation thread.

    Args:
        running: what is generated, by the manager's request id; others keep their argmax and are not recorded.
        on_finish: called when the last token of a request is noted.
    """

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012 (declared so by the base class)
    ignored_kwargs = ()

    def __init__(self, running: Mapping[str, Running], on_finish: Callable[[Running], None]) -> None:
        self.version = 0
        """Stamps every token; set while nothing is generated."""
        self._running = running
        self._on_finish = on_finish
        self._rows: list[str] = []
        self.sampled_tokens = 0

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> Tensor:
        """Called before the forward pass with the requests in the order of the logits' rows."""
        self._rows = [request.state.request_id for request in requests_with_new_token]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.FloatTensor, tensor_arg: Tensor) -> torch.FloatTensor:
        """``scores``: float32 logits [rows, vocab], overwritten. Rows past the prepared ones mean nothing."""
        drawn = [(row, running) for row, name in enumerate(self._rows) if (running := self._running.get(name))]
        if not drawn:
            return scores
        logits = scores if len(drawn) == len(scores) else scores[[row for row, _ in drawn]]
        for place, (_, running) in enumerate(drawn):
            if running.adjusts:
                running.adjust(logits[place])
        tokens, logprobs = draw_tokens(
            logits, [running.request.sampling for _, running in drawn], [running.draw() for _, running in drawn]
        )
        for (row, running), token, logprob in zip(drawn, tokens.tolist(), logprobs.tolist(), strict=True):
            if not logprob > -torch.inf:
                raise EngineError(
                    f"torch engine, request {running.request.request_id}: the model's logits are not finite "
                    f"(policy version {self.version})"
                )
            scores[row, token] = torch.inf
            running.add(token, logprob, self.version)
            self.sampled_tokens += 1
            if running.finish_reason is not None:
                self._on_finish(running)
        return scores


def draw_tokens(
    logits: Tensor, samplings: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Sample each row by inverting its cumulative distribution at its uniform number.

    In two steps, because the running sum of a whole vocabulary costs much more than its parts: first the stretch of
    tokens that the number falls into, then the token.

    Args:
        logits: float32 [rows, vocab]; overwritten.
        samplings: [rows]; temperature 0 takes the most probable token, its logprob is that of temperature 1 without
            filters.
        uniforms: [rows] in [0, 1).

    Returns:
        Token ids int64 [rows], and their log-probabilities float64 [rows] under the distribution drawn from; NaN where
        the logits are not finite.
    """
    heat = torch.tensor([s.temperature for s in samplings], dtype=torch.float32, device=logits.device)
    greedy = heat == 0
    peak = logits.amax(dim=-1, keepdim=True)
    weights = logits.sub_(peak).div_(heat.masked_fill(greedy, 1.0).unsqueeze(1)).exp_()
    for row, sampling in enumerate(samplings):
        if sampling.temperature > 0 and (sampling.min_p > 0 or sampling.top_k or sampling.top_p < 1):
            _filter(weights[row], sampling)
    stretches = pad(weights, (0, -weights.shape[1] % _STRETCH)).view(len(weights), -1, _STRETCH)
    sums = stretches.sum(dim=-1)
    total = sums.double().sum(dim=-1, keepdim=True)
    stretch, rest = _position(sums, torch.tensor(uniforms, dtype=torch.float64, device=logits.device) * total[:, 0])
    within, _ = _position(stretches[torch.arange(len(rest), device=logits.device), stretch], rest)
    tokens = (stretch * _STRETCH + within).clamp_(max=weights.shape[1] - 1).unsqueeze(1)  # beyond only if NaN
    if bool(greedy.any()):
        tokens[greedy] = weights[greedy].argmax(dim=-1, keepdim=True)
    logprobs = (weights.gather(1, tokens).double() / total).log()
    return tokens.squeeze(1), logprobs.squeeze(1)


def _filter(weights: Tensor, sampling: SamplingParams) -> None:
    """Set what min_p, top_k and top_p drop, in this order, to 0 in the weights [vocab] of a row, whose largest is 1.
    Of equal weights the lower token id is kept."""
    weights[weights < sampling.min_p] = 0.0
    if not sampling.top_k and sampling.top_p == 1:
        return
    # Sorting a whole vocabulary is slow. What is below the k-th largest, or together less than 1 - top_p, goes anyway.
    total = weights.sum(dtype=torch.float64)
    if sampling.top_k:
        least = weights.topk(min(sampling.top_k, len(weights))).values[-1]
    else:
        least = total * (1 - sampling.top_p) / len(weights)
    tokens = (~(weights < least)).nonzero().squeeze(1)  # all if NaN
    kept, order = weights[tokens].sort(descending=True, stable=True)
    tokens = tokens[order]
    if sampling.top_k:
        kept, tokens = kept[: sampling.top_k], tokens[: sampling.top_k]
        total = kept.sum(dtype=torch.float64)
    if sampling.top_p < 1:
        inside = kept.cumsum(dim=0, dtype=torch.float64) - kept < sampling.top_p * total
        kept, tokens = kept[inside], tokens[inside]
    weights.zero_()[tokens] = kept


def _position(weights: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Where the running sum of each row [rows, n] passes ``at`` [rows], and what of ``at`` is left there. Never a
    place of weight 0 unless all are."""
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    total = sums[:, -1]
    at = at.minimum(total.nextafter(torch.zeros_like(total))).unsqueeze(1)  # below the total even after rounding
    place = torch.searchsorted(sums, at, right=True).clamp_(max=weights.shape[1] - 1)
    before = sums.gather(1, place) - weights.gather(1, place)
    return place.squeeze(1), (at - before).clamp_(min=0.0).squeeze(1)


def processors(sampler: Sampler) -> Any:
    """The sampler as the manager's only logits processor."""
    wrapped = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([sampler]))
    wrapped.tensors_required = 1  # one int32 row of arguments, which makes the manager call prepare_tensor_args
    return wrapped
