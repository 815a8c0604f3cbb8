"""The torch engine on a pocket model: what it records, refuses, survives and leaves alone."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MistralConfig
from transformers.generation.continuous_batching import PagedAttentionCache

from molt_sdk.engines.base import Engine, GenerateRequest, Generation, check_generation
from molt_sdk.engines.torch import TorchEngine
from molt_sdk.engines.torch_config import TorchEngineConfig
from molt_sdk.errors import ConfigError, EngineError, ModelPathError, RequestError
from molt_sdk.testing import pocket_model
from molt_sdk.types import SamplingParams

pytestmark = pytest.mark.anyio

END = 258  # the pocket tokenizer: bytes are 0-255, <|endoftext|> 256, <|im_start|> 257, <|im_end|> 258
FLOAT32 = TorchEngineConfig(dtype="float32", page_size=16, max_batch_tokens=64, max_batch_requests=16)


def request(
    prompt: str | list[int] = "What is 2 + 2?",
    *,
    temperature: float = 1.0,
    max_tokens: int = 16,
    seed: int | None = 0,
    stop: tuple[str, ...] = (),
    eos: tuple[int, ...] = (),
    **sampling: Any,
) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt_token_ids=list(prompt.encode()) if isinstance(prompt, str) else prompt,
        sampling=SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, stop=stop, **sampling),
        eos_token_ids=eos,
    )


@asynccontextmanager
async def engine_of(model: str, config: TorchEngineConfig = FLOAT32) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(model, config)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture
async def engine(pocket: str) -> AsyncIterator[TorchEngine]:
    async with engine_of(pocket) as engine:
        yield engine


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The pocket model with other weights."""
    return pocket_model(tmp_path_factory.mktemp("other"), seed=1)


def weights_of(model: str) -> dict[str, torch.Tensor]:
    return dict(load_file(Path(model) / "model.safetensors"))


@pytest.fixture
def forward_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many there were; the cache is updated once in each of the two layers."""
    update, calls = PagedAttentionCache.update, [0]

    def counted(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        return update(*args, **kwargs)

    monkeypatch.setattr(PagedAttentionCache, "update", counted)
    return lambda: calls[0] // 2


async def until(reached: Callable[[], bool], seconds: float = 20.0) -> None:
    """Other threads generate: let the event loop turn until they have come so far."""
    async with asyncio.timeout(seconds):
        while not reached():
            await asyncio.sleep(0.001)


async def together(*calls: Awaitable[Generation]) -> list[Generation]:
    return list(await asyncio.gather(*calls))


def expected_logprobs(model: str, request: GenerateRequest, generation: Generation) -> list[float]:
    """log softmax(logits / temperature) of the sampled tokens by one plain forward pass."""
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([request.prompt_token_ids + generation.token_ids])
    with torch.no_grad():
        logits = module(ids).logits[0, len(request.prompt_token_ids) - 1 : -1]
    scaled = (logits / (request.sampling.temperature or 1.0)).log_softmax(-1)
    return scaled.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0].tolist()


# ------------------------------------------------------------------------------------------------- what is recorded


async def test_it_is_an_engine_with_the_limits_of_the_model(engine: TorchEngine, pocket: str) -> None:
    assert isinstance(engine, Engine)
    assert (engine.model, engine.version, engine.context_length) == (pocket, 0, 2048)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
async def test_logprobs_are_those_of_a_plain_forward_pass_after_temperature(
    engine: TorchEngine, pocket: str, temperature: float
) -> None:
    asked = request(temperature=temperature, max_tokens=24)
    generation = await engine.generate(asked)
    check_generation(generation, asked, "torch")
    assert generation.logprobs == pytest.approx(expected_logprobs(pocket, asked, generation), abs=1e-4)


async def test_requests_of_one_batch_keep_to_their_own_prefix(engine: TorchEngine, pocket: str) -> None:
    """Mixed in one batch: lengths that differ much, prompts longer than a forward pass, a shared prefix."""
    shared = "You are a calculator. Reply with one number only, no words. " * 3
    prompts = ["a", "short one", *(f"{shared} What is {i} + {i}?" for i in range(8)), "x" * 700, "Q" * 64]
    asked = [
        request(prompt, temperature=0.5 + 0.1 * i, max_tokens=8 + 3 * i, seed=i) for i, prompt in enumerate(prompts)
    ]
    generations = await together(*(engine.generate(one) for one in asked))
    for one, generation in zip(asked, generations, strict=True):
        assert len(generation.token_ids) == one.sampling.max_tokens
        assert generation.logprobs == pytest.approx(expected_logprobs(pocket, one, generation), abs=1e-4)


async def test_more_requests_than_the_cache_holds_are_still_exact(pocket: str) -> None:
    # A token takes 2 (k, v) * 2 layers * 2 heads * 16 numbers * 4 bytes = 512 bytes: 1e-4 GiB is room for 208 tokens,
    # and 6 requests grow to 6 * 120. Requests that do not fit are computed again later by the manager.
    config = TorchEngineConfig(dtype="float32", page_size=16, max_batch_tokens=64, kv_cache_gib=1e-4)
    async with engine_of(pocket, config) as engine:
        asked = [request(f"{i}" * 20, max_tokens=100, seed=i) for i in range(6)]
        generations = await together(*(engine.generate(one) for one in asked))
    for one, generation in zip(asked, generations, strict=True):
        assert len(generation.token_ids) == 100
        assert generation.logprobs == pytest.approx(expected_logprobs(pocket, one, generation), abs=1e-4)


async def test_layers_with_a_sliding_window_see_only_the_window(tmp_path: Path) -> None:
    path = pocket_model(tmp_path)
    config = MistralConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=259,
        max_position_embeddings=256,
        sliding_window=16,
    )
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(6.0 if parameter.dim() == 2 else 1.0)  # else attention hardly matters
    module.save_pretrained(path)
    asked = [request("x" * (5 + 30 * i), seed=i, max_tokens=40) for i in range(4)]
    async with engine_of(path) as engine:
        generations = await together(*(engine.generate(one) for one in asked))
    for one, generation in zip(asked, generations, strict=True):
        assert generation.logprobs == pytest.approx(expected_logprobs(path, one, generation), abs=1e-4)


async def test_greedy_takes_the_most_probable_token_every_time(engine: TorchEngine, pocket: str) -> None:
    asked = request(temperature=0.0, max_tokens=12)
    first, again = await engine.generate(asked), await engine.generate(asked)
    assert first == again
    module = AutoModelForCausalLM.from_pretrained(pocket, dtype=torch.float32)
    ids = list(asked.prompt_token_ids)
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(module(torch.tensor([ids])).logits[0, -1].argmax()))
    assert first.token_ids == ids[-12:]


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(engine: TorchEngine) -> None:
    alone = await engine.generate(request(seed=7, max_tokens=24))
    batch = await together(*(engine.generate(request(seed=seed, max_tokens=24)) for seed in (5, 6, 7, 8)))
    assert batch[2].token_ids == alone.token_ids
    assert len({tuple(generation.token_ids) for generation in batch}) == 4
    unseeded = await together(*(engine.generate(request(seed=None, max_tokens=24)) for _ in range(2)))
    assert unseeded[0].token_ids != unseeded[1].token_ids


async def test_samples_follow_the_distribution(engine: TorchEngine, pocket: str) -> None:
    """Temperature 0.12 makes the random model's distribution uneven: its most probable token has the frequency that
    its probability says, within four standard deviations of 400 draws."""
    draws = await together(
        *(engine.generate(request("Hello", temperature=0.12, max_tokens=1, seed=seed)) for seed in range(400))
    )
    module = AutoModelForCausalLM.from_pretrained(pocket, dtype=torch.float32)
    with torch.no_grad():
        probabilities = (module(torch.tensor([list(b"Hello")])).logits[0, -1] / 0.12).softmax(-1)
    best = int(probabilities.argmax())
    chance = float(probabilities[best])
    assert 0.02 < chance < 0.98
    seen = sum(draw.token_ids == [best] for draw in draws)
    assert abs(seen - 400 * chance) < 4 * (400 * chance * (1 - chance)) ** 0.5


def adjusted_logprobs(model: str, request: GenerateRequest, generation: Generation) -> list[float]:
    """As :func:`expected_logprobs`, after all that the request's sampling parameters say, one plain loop at a time."""
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    asked, prompt = request.sampling, request.prompt_token_ids
    with torch.no_grad():
        rows = module(torch.tensor([prompt + generation.token_ids])).logits[0, len(prompt) - 1 : -1].double().tolist()
    logprobs = []
    for position, (row, sampled) in enumerate(zip(rows, generation.token_ids, strict=True)):
        so_far = Counter(generation.token_ids[:position])
        for token, bias in asked.logit_bias:
            row[token] += bias
        for token in {*prompt, *so_far}:
            row[token] *= asked.repetition_penalty if row[token] < 0 else 1 / asked.repetition_penalty
        for token, count in so_far.items():
            row[token] -= asked.frequency_penalty * count + asked.presence_penalty
        probabilities = (torch.tensor(row) / (asked.temperature or 1.0)).softmax(-1).tolist()
        if asked.temperature > 0:
            ranked = sorted(range(len(row)), key=lambda token: -probabilities[token])
            ranked = [token for token in ranked if probabilities[token] >= asked.min_p * probabilities[ranked[0]]]
            ranked = ranked[: asked.top_k or None]
            left, mass, kept = sum(probabilities[token] for token in ranked), 0.0, []
            for token in ranked:
                if mass < asked.top_p * left:
                    kept.append(token)
                    mass += probabilities[token]
            assert sampled in kept
            logprobs.append(float(np.log(probabilities[sampled] / mass)))
        else:
            assert sampled == max(range(len(row)), key=lambda token: row[token])
            logprobs.append(float(np.log(probabilities[sampled])))
    return logprobs


ADJUSTED: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.5},
    {"min_p": 0.6, "temperature": 0.5},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.1, "temperature": 1.5},
    {"presence_penalty": 2.0, "top_k": 3},
    {"frequency_penalty": -2.0, "temperature": 0.7},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 5.0, "temperature": 0.0},
    {"frequency_penalty": 1.0, "temperature": 0.0, "top_k": 4},
    {"logit_bias": {65: 3.0, 66: -100.0}},
    {"logit_bias": {97: 8.0}, "presence_penalty": -1.0, "repetition_penalty": 0.9, "top_p": 0.8, "temperature": 1.2},
]


async def test_each_request_of_a_batch_has_its_own_filters_penalties_and_bias(engine: TorchEngine, pocket: str) -> None:
    plain = [request(f"plain {i}", seed=i, max_tokens=24) for i in range(4)]
    alone = [await engine.generate(one) for one in plain]
    adjusted = [request(f"question {i}", seed=i, max_tokens=24, **asked) for i, asked in enumerate(ADJUSTED)]
    generations = await together(*(engine.generate(one) for one in [*plain, *adjusted]))
    assert [generation.token_ids for generation in generations[:4]] == [generation.token_ids for generation in alone]
    for one, generation in zip(adjusted, generations[4:], strict=True):
        check_generation(generation, one, "torch")
        assert generation.logprobs == pytest.approx(adjusted_logprobs(pocket, one, generation), abs=1e-4)


async def test_a_bias_can_force_and_forbid_a_token(engine: TorchEngine) -> None:
    forced = await engine.generate(request(logit_bias={65: 100.0}))
    assert forced.token_ids == [65] * 16
    assert forced.logprobs == pytest.approx([0.0] * 16, abs=1e-6)
    free = await engine.generate(request(temperature=0.0))
    forbidden = await engine.generate(request(temperature=0.0, logit_bias=dict.fromkeys(free.token_ids, -100.0)))
    assert set(forbidden.token_ids).isdisjoint(free.token_ids)


async def test_a_frequency_penalty_ends_repetition(engine: TorchEngine) -> None:
    biased = {"temperature": 0.0, "logit_bias": {65: 10.0}}
    assert (await engine.generate(request(**biased))).token_ids == [65] * 16
    generation = await engine.generate(request(**biased, frequency_penalty=2.0))
    assert 5 <= generation.token_ids.count(65) < 8  # of logit 10 and a bit, each takes 2


async def test_filtered_samples_follow_the_filtered_distribution(engine: TorchEngine, pocket: str) -> None:
    """Of the three most probable tokens, each has its renormalised share, within four standard deviations of 400."""
    draws = await together(
        *(engine.generate(request("Hello", temperature=0.3, max_tokens=1, seed=seed, top_k=3)) for seed in range(400))
    )
    module = AutoModelForCausalLM.from_pretrained(pocket, dtype=torch.float32)
    with torch.no_grad():
        logits, tokens = (module(torch.tensor([list(b"Hello")])).logits[0, -1] / 0.3).topk(3)
    seen = Counter(draw.token_ids[0] for draw in draws)
    assert set(seen) == set(tokens.tolist())
    for token, share in zip(tokens.tolist(), logits.softmax(-1).tolist(), strict=True):
        assert abs(seen[token] - 400 * share) < 4 * (400 * share * (1 - share)) ** 0.5


# ----------------------------------------------------------------------------------------------- where a request ends


async def test_max_tokens_ends_with_length(engine: TorchEngine) -> None:
    generation = await engine.generate(request(max_tokens=5))
    assert (len(generation.token_ids), generation.finish_reason) == (5, "length")


async def test_any_eos_of_the_request_ends_it_and_is_kept(engine: TorchEngine) -> None:
    free = await engine.generate(request(max_tokens=30))
    assert free.finish_reason == "length"
    for position in (0, 9):
        eos = free.token_ids[position]
        ended = await engine.generate(request(max_tokens=30, eos=(END, eos)))
        cut = free.token_ids.index(eos) + 1
        assert ended.token_ids == free.token_ids[:cut]
        assert ended.finish_reason == "stop"


async def test_eos_as_the_last_allowed_token_is_a_stop(engine: TorchEngine) -> None:
    free = await engine.generate(request(max_tokens=30))
    position = next(i for i, token in enumerate(free.token_ids) if token not in free.token_ids[:i] and i > 3)
    ended = await engine.generate(request(max_tokens=position + 1, eos=(free.token_ids[position],)))
    assert (ended.token_ids, ended.finish_reason) == (free.token_ids[: position + 1], "stop")


async def test_a_stop_string_over_several_tokens_ends_right_after_its_last(engine: TorchEngine) -> None:
    free = await engine.generate(request(max_tokens=200))
    text = bytes(token if token < 256 else 0x20 for token in free.token_ids)
    # Three ASCII bytes in a row: a stop string that three tokens have to complete.
    start = next(
        i for i in range(5, 198) if all(32 <= b < 127 for b in text[i : i + 3]) and text.find(text[i : i + 3]) == i
    )
    stop = text[start : start + 3].decode()
    ended = await engine.generate(request(max_tokens=200, stop=("never this", stop)))
    assert ended.token_ids == free.token_ids[: start + 3]
    assert ended.logprobs == pytest.approx(free.logprobs[: start + 3], abs=1e-5)
    assert ended.finish_reason == "stop"


async def test_a_stop_string_in_the_prompt_is_no_match(engine: TorchEngine) -> None:
    free = await engine.generate(request("STOP", max_tokens=8))
    asked = request("STO", max_tokens=8, stop=("STO",))
    generation = await engine.generate(asked)
    assert len(generation.token_ids) == len(free.token_ids) == 8
    assert generation.finish_reason == "length"


async def test_after_a_stop_string_its_place_in_the_batch_is_free(
    pocket: str, forward_passes: Callable[[], int]
) -> None:
    config = TorchEngineConfig(dtype="float32", max_batch_requests=1, max_batch_tokens=16)
    async with engine_of(pocket, config) as engine:
        free = await engine.generate(request(max_tokens=60))
        passes, sampled = forward_passes(), engine.sampled_tokens
        letter = next(chr(token) for token in free.token_ids if 32 <= token < 127)
        ended, after = await together(
            engine.generate(request(max_tokens=2000, stop=(letter,))), engine.generate(request(max_tokens=3))
        )
        assert chr(ended.token_ids[-1]) == letter
        assert len(after.token_ids) == 3
        assert engine.sampled_tokens == sampled + len(ended.token_ids) + 3
        assert forward_passes() == passes + len(ended.token_ids) + 3


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request([]), "the prompt is empty"),
        (request([65, 259]), "id 259 at position 1 is outside the vocabulary \\(0..258\\)"),
        (request([-1]), "id -1 at position 0"),
        (request(logit_bias={65: 1, 259: 1}), "request r: logit_bias has token id 259, outside the vocabulary"),
        (
            request([65] * 2000, max_tokens=49),
            "2000 prompt tokens \\+ max_tokens=49 exceed the model's context of 2048",
        ),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused(
    engine: TorchEngine, asked: GenerateRequest, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        await engine.generate(asked)
    assert engine.running_requests == 0


async def test_the_whole_context_can_be_used(engine: TorchEngine, pocket: str) -> None:
    asked = request([65] * 2030, max_tokens=18)
    generation = await engine.generate(asked)
    assert generation.logprobs == pytest.approx(expected_logprobs(pocket, asked, generation), abs=1e-4)


async def test_a_request_beyond_the_kv_cache_is_refused(pocket: str) -> None:
    async with engine_of(pocket, TorchEngineConfig(dtype="float32", kv_cache_gib=1e-4)) as engine:
        with pytest.raises(RequestError, match="exceed the KV cache of 208 tokens; raise kv_cache_gib"):
            await engine.generate(request([65] * 200, max_tokens=9))
        assert len((await engine.generate(request([65] * 200, max_tokens=8))).token_ids) == 8


async def test_no_call_before_the_start_and_after_the_end(pocket: str) -> None:
    engine = TorchEngine(pocket, FLOAT32)
    with pytest.raises(EngineError, match="not running; await start"):
        await engine.generate(request())
    with pytest.raises(EngineError, match="not running; await start"):
        await engine.update_weights([], 1)
    await engine.start()
    await engine.start()
    await engine.close()
    await engine.close()
    for call in (engine.generate(request()), engine.update_weights([], 1), engine.start()):
        with pytest.raises(EngineError, match="was closed"):
            await call


def test_a_model_directory_that_is_missing_or_incomplete(tmp_path: Path, pocket: str) -> None:
    with pytest.raises(ModelPathError, match="nowhere"):
        TorchEngine(str(tmp_path / "nowhere"))
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((Path(pocket) / name).read_bytes())
    with pytest.raises(ModelPathError, match=r"no \*.safetensors weights"):
        TorchEngine(str(tmp_path))


async def test_damaged_weights_are_a_model_path_error(tmp_path: Path) -> None:
    path = Path(pocket_model(tmp_path))
    (path / "model.safetensors").write_bytes(b"not safetensors")
    engine = TorchEngine(str(path), FLOAT32)
    with pytest.raises(ModelPathError, match="cannot be loaded"):
        await engine.start()
    await engine.close()


@pytest.mark.parametrize("field", ["max_batch_requests", "max_batch_tokens", "page_size", "kv_cache_gib"])
def test_settings_out_of_range(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        TorchEngineConfig(**{field: 0})


# -------------------------------------------------------------------------------------------------------- new weights


async def test_an_update_in_flight_keeps_tokens_and_stamps_versions(
    engine: TorchEngine, pocket: str, other: str
) -> None:
    asked = [request(prompt, seed=i, max_tokens=400) for i, prompt in enumerate(("one", "two", "three"))]
    tasks = [asyncio.ensure_future(engine.generate(one)) for one in asked]
    await until(lambda: engine.sampled_tokens > 60)
    await engine.update_weights(weights_of(other).items(), 5)
    assert engine.version == 5
    for one, generation in zip(asked, await together(*tasks), strict=True):
        old = generation.versions.count(0)
        assert 0 < old < 400
        assert generation.versions == [0] * old + [5] * (400 - old)
        before = expected_logprobs(pocket, one, generation)[:old]
        after = expected_logprobs(other, one, generation)[old:]  # under the whole prefix, old tokens included
        assert generation.logprobs == pytest.approx(before + after, abs=1e-4)


async def test_nothing_of_the_old_weights_survives_an_update(engine: TorchEngine, other: str) -> None:
    asked = request("A prompt of some length, so that several pages of its cache are full.", temperature=0.0)
    before = await engine.generate(asked)
    await engine.update_weights(weights_of(other).items(), 1)
    after = await engine.generate(asked)
    async with engine_of(other) as fresh:
        expected = await fresh.generate(asked)
    assert after.token_ids == expected.token_ids
    assert after.logprobs == expected.logprobs
    assert after.versions == [1] * 16
    assert before.logprobs != after.logprobs


@pytest.mark.parametrize("sampling", [{}, {"frequency_penalty": 1.0, "repetition_penalty": 1.2, "top_k": 9}], ids=str)
async def test_a_seed_goes_on_over_an_update_with_the_same_weights(
    engine: TorchEngine, pocket: str, sampling: dict[str, Any]
) -> None:
    asked = request(seed=3, max_tokens=300, **sampling)
    expected = await engine.generate(asked)
    sampled = engine.sampled_tokens
    task = asyncio.ensure_future(engine.generate(asked))
    await until(lambda: engine.sampled_tokens > sampled + 20)
    await engine.update_weights(weights_of(pocket).items(), 1)
    again = await task
    assert again.token_ids == expected.token_ids
    assert set(again.versions) == {0, 1}


@pytest.mark.parametrize("present", [True, False])
async def test_a_tied_head_may_be_given_or_left_out(engine: TorchEngine, other: str, present: bool) -> None:
    weights = weights_of(other)
    if present:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    await engine.update_weights(weights.items(), 1)
    async with engine_of(other) as fresh:
        expected = await fresh.generate(request())
    assert (await engine.generate(request())).logprobs == expected.logprobs


def _renamed(weights: dict[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    return [(f"module.{name}", tensor) for name, tensor in weights.items()]


def _incomplete(weights: dict[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in weights.items() if name != "model.norm.weight"]


def _misshapen(weights: dict[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    return [(name, tensor[:1] if name == "model.norm.weight" else tensor) for name, tensor in weights.items()]


def _not_finite(weights: dict[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    return [(name, tensor.index_fill(0, torch.tensor([3]), torch.nan)) for name, tensor in weights.items()]


def _untied(weights: dict[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    return [*weights.items(), ("lm_head.weight", weights["model.embed_tokens.weight"] + 1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_renamed, "loaded 0 of 21 tensors.*20 unknown names \\(module.*21 missing names"),
        (_incomplete, "1 missing names \\(model.norm.weight\\)"),
        (_misshapen, "model.norm.weight has shape \\[1\\] instead of \\[64\\]"),
        (_not_finite, "not finite"),
        (_untied, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
async def test_a_bad_update_changes_nothing_and_disturbs_nobody(
    engine: TorchEngine,
    other: str,
    change: Callable[[dict[str, torch.Tensor]], Iterable[tuple[str, torch.Tensor]]],
    message: str,
) -> None:
    asked = request(max_tokens=100)
    expected = await engine.generate(asked)
    sampled = engine.sampled_tokens
    task = asyncio.ensure_future(engine.generate(asked))
    await until(lambda: engine.sampled_tokens > sampled)
    with pytest.raises(EngineError, match=message):
        await engine.update_weights(change(weights_of(other)), 1)
    assert engine.version == 0
    assert await task == expected
    assert await engine.generate(asked) == expected


async def test_weights_that_fail_to_arrive_change_nothing(engine: TorchEngine, other: str) -> None:
    def half() -> Iterable[tuple[str, torch.Tensor]]:
        yield from list(weights_of(other).items())[:10]
        raise OSError("the sender went away")

    expected = await engine.generate(request())
    with pytest.raises(OSError, match="went away"):
        await engine.update_weights(half(), 1)
    assert await engine.generate(request()) == expected


async def test_an_update_copies_what_the_trainer_goes_on_changing(engine: TorchEngine, other: str) -> None:
    weights = weights_of(other)
    await engine.update_weights(weights.items(), 1)
    expected = await engine.generate(request())
    for tensor in weights.values():
        tensor.zero_()
    assert await engine.generate(request()) == expected


async def test_updates_without_requests_are_cheap(engine: TorchEngine, other: str) -> None:
    started = time.perf_counter()
    for version in (1, 2, 3):
        await engine.update_weights(weights_of(other).items(), version)
    assert time.perf_counter() - started < 6.0  # 0.2 s each when nothing else runs
    assert (await engine.generate(request())).versions == [3] * 16


# ------------------------------------------------------------------------------------------- cancellation, end, death


async def test_cancelling_the_caller_frees_the_batch_at_once(pocket: str, forward_passes: Callable[[], int]) -> None:
    config = TorchEngineConfig(dtype="float32", max_batch_requests=1, max_batch_tokens=16)
    async with engine_of(pocket, config) as engine:
        tasks = [asyncio.ensure_future(engine.generate(request(max_tokens=2000))) for _ in range(3)]
        await until(lambda: engine.sampled_tokens > 0)
        assert engine.running_requests == 3
        for task in tasks:
            task.cancel()
        for task in tasks:
            with pytest.raises(asyncio.CancelledError):
                await task
        assert engine.running_requests == 0
        passes = forward_passes()
        assert len((await engine.generate(request(max_tokens=3))).token_ids) == 3  # there is only one place
        assert forward_passes() <= passes + 2 + 3  # two may be under way: one counted by half, one begun since


async def test_a_request_cancelled_during_an_update_is_not_taken_up_again(
    engine: TorchEngine, other: str, forward_passes: Callable[[], int]
) -> None:
    task = asyncio.ensure_future(engine.generate(request(max_tokens=2000)))
    await until(lambda: engine.sampled_tokens > 0)
    update = asyncio.ensure_future(engine.update_weights(weights_of(other).items(), 1))
    await asyncio.sleep(0)
    task.cancel()
    await update
    with pytest.raises(asyncio.CancelledError):
        await task
    passes = forward_passes()
    await engine.generate(request(max_tokens=3))
    assert forward_passes() == passes + 3


async def test_close_fails_what_runs_and_leaves_no_thread(pocket: str) -> None:
    before = set(threading.enumerate())
    engine = TorchEngine(pocket, FLOAT32)
    await engine.start()
    tasks = [asyncio.ensure_future(engine.generate(request(max_tokens=2000))) for _ in range(2)]
    await until(lambda: engine.sampled_tokens > 0)
    assert set(threading.enumerate()) > before
    await engine.close()
    for task in tasks:
        with pytest.raises(EngineError, match="request r: the engine was closed"):
            await task
    await until(lambda: set(threading.enumerate()) <= before)


async def test_close_frees_the_weights(pocket: str) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(type(thing) is torch.nn.Embedding for thing in gc.get_objects())

    before = tensors()
    async with engine_of(pocket) as engine:
        await engine.generate(request())
        assert tensors() == before + 1
    assert tensors() == before


async def test_the_death_of_generation_fails_everybody_with_its_cause(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = [asyncio.ensure_future(engine.generate(request(max_tokens=2000))) for _ in range(3)]
    await until(lambda: engine.sampled_tokens > 0)

    def broken(*_: object) -> None:
        raise MemoryError("the cache is gone")

    monkeypatch.setattr(PagedAttentionCache, "update", broken)
    for task in tasks:
        with pytest.raises(EngineError, match=r"request r: generation died .*the cache is gone") as caught:
            await task
        assert isinstance(caught.value.__cause__, MemoryError)
    for call in (engine.generate(request()), engine.update_weights([], 1), engine.start()):
        with pytest.raises(EngineError, match=r"generation died .*the cache is gone.*make a new one"):
            await call
    assert engine.running_requests == 0


async def test_weights_that_overflow_are_an_error_and_no_record(engine: TorchEngine, other: str) -> None:
    weights = weights_of(other)
    weights["model.norm.weight"] *= 3e38
    await engine.update_weights(weights.items(), 1)
    with pytest.raises(EngineError, match=r"logits are not finite \(policy version 1\)"):
        await engine.generate(request())


@pytest.mark.slow
async def test_a_program_that_forgets_to_close_ends(pocket: str) -> None:
    program = f"""
import asyncio
from molt_sdk.engines.torch import TorchEngine
from molt_sdk.engines.base import GenerateRequest
from molt_sdk.types import SamplingParams

async def main():
    engine = TorchEngine({pocket!r})
    await engine.start()
    request = GenerateRequest(request_id="r", prompt_token_ids=[65], sampling=SamplingParams(max_tokens=2000),
                              eos_token_ids=())
    asyncio.ensure_future(engine.generate(request))
    while not engine.sampled_tokens:
        await asyncio.sleep(0.01)
    print("generating")

asyncio.run(main())
"""
    run = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, timeout=90
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "generating\n", "")


# ----------------------------------------------------------------------------------------------------- good neighbours


async def test_the_global_random_state_is_left_as_found(pocket: str, other: str) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    python, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    async with engine_of(pocket) as engine:
        await together(*(engine.generate(request(seed=seed)) for seed in (None, 1, 2)))
        await engine.update_weights(weights_of(other).items(), 1)
        await engine.generate(request(temperature=0.0))
    assert random.getstate() == python
    assert np.array_equal(np.random.get_state()[1], numpy_state[1])  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), torch_state)


async def test_nothing_is_printed(pocket: str, other: str, capfd: pytest.CaptureFixture[str]) -> None:
    async with engine_of(pocket) as engine:
        await engine.generate(request())
        await engine.update_weights(weights_of(other).items(), 1)
        await engine.generate(request())
    assert capfd.readouterr() == ("", "")


async def test_bfloat16_is_the_default_and_close_to_float32(pocket: str) -> None:
    asked = request(max_tokens=24)
    async with engine_of(pocket, TorchEngineConfig()) as engine:
        generation = await engine.generate(asked)
    # bfloat16 keeps 8 bits: logits of about 1 are off by some 0.01.
    assert generation.logprobs == pytest.approx(expected_logprobs(pocket, asked, generation), abs=0.05)
