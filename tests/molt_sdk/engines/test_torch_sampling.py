"""Drawing tokens and matching stop strings, without a model."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from molt_sdk.engines.base import GenerateRequest
from molt_sdk.engines.torch_sampling import Running, draw_tokens
from molt_sdk.errors import EngineError
from molt_sdk.types import SamplingParams

HALF = torch.tensor([0.5, 0.25, 0.25]).log()


def draw(logits: torch.Tensor, temperature: float, uniform: float, **filters: Any) -> tuple[int, float]:
    tokens, logprobs = draw_tokens(
        logits[None].clone(), [SamplingParams(temperature=temperature, **filters)], [uniform]
    )
    return int(tokens[0]), float(logprobs[0])


def shares(logits: torch.Tensor, temperature: float = 1.0, **filters: Any) -> dict[int, float]:
    """How many of 1000 evenly spread uniform numbers draw a token, in thousandths; its logprob must say the same."""
    uniforms = [(i + 0.5) / 1000 for i in range(1000)]
    sampling = SamplingParams(temperature=temperature, **filters)
    tokens, logprobs = draw_tokens(logits.repeat(1000, 1), [sampling] * 1000, uniforms)
    drawn = Counter(tokens.tolist())
    for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
        assert math.exp(logprob) == pytest.approx(drawn[token] / 1000, abs=0.001)
    return {token: drawn[token] / 1000 for token in sorted(drawn)}


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.499, 0), (0.501, 1), (0.749, 1), (0.751, 2), (1 - 2**-53, 2)]
)
def test_the_uniform_number_picks_its_share(uniform: float, token: int) -> None:
    assert draw(HALF, 1.0, uniform) == (token, pytest.approx(math.log(0.5 if token == 0 else 0.25)))


def test_temperature_changes_shares_and_logprobs() -> None:
    # T = 0.5 squares the weights: 0.25, 0.0625, 0.0625, so shares are 4/6, 1/6, 1/6.
    assert draw(HALF, 0.5, 0.66) == (0, pytest.approx(math.log(4 / 6)))
    assert draw(HALF, 0.5, 0.67) == (1, pytest.approx(math.log(1 / 6)))


def test_greedy_takes_the_peak_with_its_logprob_at_temperature_1() -> None:
    logits = torch.tensor([0.25, 0.5, 0.25]).log()
    assert draw(logits, 0.0, 0.99) == (1, pytest.approx(math.log(0.5)))


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_token_without_probability_is_never_drawn(uniform: float) -> None:
    logits = torch.tensor([-torch.inf, 1.0, -torch.inf, -1000.0])
    assert draw(logits, 1.0, uniform) == (1, pytest.approx(0.0))


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    token, logprob = draw(torch.tensor([300.0, -300.0]), temperature, 0.3)
    assert token == 0
    assert math.isfinite(logprob)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_have_no_logprob(bad: float) -> None:
    assert math.isnan(draw(torch.tensor([0.0, bad, 0.0]), 1.0, 0.5)[1])


def test_rows_have_their_own_temperature() -> None:
    samplings = [SamplingParams(temperature=temperature) for temperature in (0.0, 0.5, 1.0)]
    tokens, logprobs = draw_tokens(HALF.repeat(3, 1), samplings, [0.9, 0.67, 0.6])
    assert tokens.tolist() == [0, 1, 1]
    assert logprobs.tolist() == pytest.approx([math.log(0.5), math.log(1 / 6), math.log(0.25)])


def test_f142_the_logprob_is_that_of_the_sampled_token_not_of_the_best() -> None:
    assert draw(torch.tensor([0.6, 0.4]).log(), 1.0, 0.7) == (1, pytest.approx(math.log(0.4)))


THREE = torch.tensor([0.3, 0.5, 0.2]).log()
FOUR = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()


@pytest.mark.parametrize(
    "filters", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}, {"top_k": 2, "top_p": 0.99}], ids=str
)
def test_f130_what_a_filter_leaves_is_renormalised(filters: dict[str, Any]) -> None:
    """Each drops the 0.2 of (0.5, 0.3, 0.2): 0.5 / 0.8 and 0.3 / 0.8 are left, in draws and in logprobs."""
    assert shares(THREE, **filters) == {0: 0.375, 1: 0.625}


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.45}, {"top_p": 1e-9}, {"min_p": 0.7}], ids=str)
def test_the_most_likely_token_is_always_left(filters: dict[str, Any]) -> None:
    assert shares(THREE, **filters) == {1: 1.0}


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_k": 99}, {"top_p": 0.9}, {"min_p": 0.35}], ids=str)
def test_a_filter_that_drops_nothing_changes_nothing(filters: dict[str, Any]) -> None:
    assert shares(THREE, **filters) == shares(THREE) == {0: 0.3, 1: 0.5, 2: 0.2}


def test_filters_apply_after_temperature() -> None:
    # T = 0.5 squares the weights: 0.25, 0.09, 0.04 of 0.38, so the best alone has 0.66 and the second 0.09 / 0.34.
    assert shares(THREE, 0.5, top_p=0.65) == {1: 1.0}
    assert shares(THREE, 0.5, top_k=2) == {0: pytest.approx(9 / 34, abs=0.001), 1: pytest.approx(25 / 34, abs=0.001)}
    # T = 2 flattens 0.5 : 0.2 to 0.63, which a min_p of 0.5 keeps and at T = 1 drops.
    assert set(shares(THREE, 2.0, min_p=0.5)) == {0, 1, 2}


@pytest.mark.parametrize("first", [{"top_k": 3}, {"min_p": 0.3}], ids=str)
def test_top_p_applies_to_what_the_other_filters_leave(first: dict[str, Any]) -> None:
    """Of (0.4, 0.3, 0.2, 0.1), 0.75 takes three; once the 0.1 is gone, the first two hold 0.7 / 0.9 = 0.78 of it."""
    assert set(shares(FOUR, top_p=0.75)) == {1, 2, 3}
    expected = {1: pytest.approx(4 / 7, abs=0.001), 2: pytest.approx(3 / 7, abs=0.001)}
    assert shares(FOUR, top_p=0.75, **first) == expected


def test_of_equally_likely_tokens_the_first_are_kept() -> None:
    assert set(shares(HALF, top_k=2)) == {0, 1}
    assert set(shares(torch.zeros(300), top_k=2)) == {0, 1}
    assert set(shares(torch.zeros(4), top_p=0.6)) == {0, 1, 2}


def test_filters_leave_greedy_alone() -> None:
    assert draw(THREE, 0.0, 0.99, top_k=1, top_p=0.1, min_p=0.9) == (1, pytest.approx(math.log(0.5)))


def test_rows_with_filters_change_no_other_row() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    plain, uniforms = SamplingParams(temperature=0.9), [0.1, 0.4, 0.6, 0.9]
    tokens, logprobs = draw_tokens(logits.clone(), [plain] * 4, uniforms)
    filtered = [plain, SamplingParams(top_k=3), plain, SamplingParams(top_p=0.5, min_p=0.1)]
    mixed_tokens, mixed_logprobs = draw_tokens(logits.clone(), filtered, uniforms)
    for row in (0, 2):
        assert (mixed_tokens[row], mixed_logprobs[row]) == (tokens[row], logprobs[row])
    assert mixed_tokens[1] in logits[1].topk(3).indices
    assert mixed_logprobs[1] > logprobs[1]


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_filters_hide_no_logits_that_are_not_finite(bad: float, filters: dict[str, Any]) -> None:
    assert math.isnan(draw(torch.tensor([0.0, bad, 0.0]), 1.0, 0.5, **filters)[1])


def running(
    pocket: str,
    stop: tuple[str, ...] = (),
    eos: tuple[int, ...] = (),
    max_tokens: int = 200,
    prompt: tuple[int, ...] = (65,),
    **sampling: Any,
) -> Running:
    tokenizer = Tokenizer.from_file(str(Path(pocket) / "tokenizer.json"))
    request = GenerateRequest(
        request_id="r",
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(stop=stop, max_tokens=max_tokens, **sampling),
        eos_token_ids=eos,
    )
    loop = asyncio.new_event_loop()
    try:
        return Running(request, lambda ids: tokenizer.decode(ids, skip_special_tokens=False), loop)
    finally:
        loop.close()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"presence_penalty": 0.5}, [2.0, -1.5, 0.5, 0.5]),
        ({"presence_penalty": -0.5}, [2.0, -0.5, 1.5, 0.5]),
        ({"frequency_penalty": 0.5}, [2.0, -2.0, 0.5, 0.5]),
        ({"repetition_penalty": 2.0}, [1.0, -2.0, 0.5, 0.5]),
        ({"logit_bias": {3: 1.5, 0: -1}}, [1.0, -1.0, 1.0, 2.0]),
        (
            # The bias makes the second logit positive, so that the repetition penalty divides it.
            {
                "logit_bias": {1: 2.0},
                "repetition_penalty": 2.0,
                "frequency_penalty": 0.25,
                "presence_penalty": 0.125,
            },
            [1.0, 0.5 - 0.5 - 0.125, 0.5 - 0.25 - 0.125, 0.5],
        ),
    ],
    ids=str,
)
def test_bias_and_penalties_on_a_prompt_of_0_and_a_completion_of_1_1_2(
    pocket: str, sampling: dict[str, Any], expected: list[float]
) -> None:
    one = running(pocket, prompt=(0, 0), **sampling)
    assert one.adjusts
    for token in (1, 1, 2):
        one.add(token, -1.0, 0)
    logits = torch.tensor([2.0, -1.0, 1.0, 0.5])
    one.adjust(logits)
    assert logits.tolist() == expected


def test_before_the_first_token_only_the_repetition_penalty_has_something_to_count(pocket: str) -> None:
    one = running(pocket, prompt=(2,), presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=2.0)
    logits = torch.tensor([2.0, -1.0, 1.0])
    one.adjust(logits)
    assert logits.tolist() == [2.0, -1.0, 0.5]


def test_a_penalty_hides_no_logits_that_are_not_finite(pocket: str) -> None:
    one = running(pocket, prompt=(0, 1), repetition_penalty=2.0, logit_bias={0: 100, 1: -100})
    logits = torch.tensor([torch.nan, torch.inf])
    one.adjust(logits)
    assert math.isnan(logits[0])
    assert math.isinf(logits[1])


def test_without_bias_and_penalties_nothing_is_adjusted(pocket: str) -> None:
    assert not running(pocket, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1).adjusts


def tokens_until_the_end(one: Running, tokens: list[int]) -> int:
    for position, token in enumerate(tokens, start=1):
        one.add(token, -1.0, 0)
        if one.finish_reason is not None:
            return position
    return -1


@pytest.mark.parametrize(
    ("text", "stop", "length"),
    [
        ("one stop two", ("stop",), 8),
        ("a long way before the word is there: stop", ("stop",), 41),
        ("sto sto stop", ("stop", "never"), 12),
        ("caf\u00e9 au lait", ("\u00e9",), 5),  # two bytes, two tokens: complete with the second
        ("no \U0001f600 yes", ("\U0001f600 y",), 9),  # four bytes
        ("a" * 50 + "\u00e9" * 30 + "stop", ("\u00e9stop",), 50 + 60 + 4),
        ("nothing", ("stop",), -1),
        ("caf\u00e8", ("\u00e9",), -1),  # the same first byte
    ],
)
def test_a_stop_string_ends_with_the_token_that_completes_it(
    pocket: str, text: str, stop: tuple[str, ...], length: int
) -> None:
    one = running(pocket, stop)
    assert tokens_until_the_end(one, list(text.encode())) == length
    if length > 0:
        assert one.generation.token_ids == list(text.encode())[:length]
        assert one.finish_reason == "stop"
        assert one.ended_by_text


def test_special_tokens_are_text_for_stop_strings(pocket: str) -> None:
    one = running(pocket, ("<|im_end|>\n",))
    assert tokens_until_the_end(one, [65, 258, 10, 66]) == 3


def test_bytes_that_are_no_text_hide_no_stop_string(pocket: str) -> None:
    one = running(pocket, ("stop",))
    assert tokens_until_the_end(one, [0xFF, 0xC3, *b"stop"]) == 6


def test_eos_and_length_need_no_help_to_end(pocket: str) -> None:
    by_eos, by_length = running(pocket, eos=(7, 9)), running(pocket, max_tokens=2)
    assert tokens_until_the_end(by_eos, [65, 9, 65]) == 2
    assert (by_eos.finish_reason, by_eos.ended_by_text) == ("stop", False)
    assert tokens_until_the_end(by_length, [65, 66, 67]) == 2
    assert (by_length.finish_reason, by_length.ended_by_text) == ("length", False)


def test_an_unfinished_request_has_no_record(pocket: str) -> None:
    one = running(pocket)
    one.add(65, -1.0, 3)
    assert (one.prompt, one.room) == ([65, 65], 199)
    with pytest.raises(EngineError, match="request r: not finished"):
        _ = one.generation
