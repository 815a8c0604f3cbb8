"""Drawing tokens and matching stop strings, without a model."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from molt_sdk.engines.base import GenerateRequest
from molt_sdk.engines.torch_sampling import Running, draw_tokens
from molt_sdk.errors import EngineError
from molt_sdk.types import SamplingParams

HALF = torch.tensor([0.5, 0.25, 0.25]).log()


def draw(logits: torch.Tensor, temperature: float, uniform: float) -> tuple[int, float]:
    tokens, logprobs = draw_tokens(logits[None].clone(), [temperature], [uniform])
    return int(tokens[0]), float(logprobs[0])


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
    tokens, logprobs = draw_tokens(HALF.repeat(3, 1), [0.0, 0.5, 1.0], [0.9, 0.67, 0.6])
    assert tokens.tolist() == [0, 1, 1]
    assert logprobs.tolist() == pytest.approx([math.log(0.5), math.log(1 / 6), math.log(0.25)])


def running(pocket: str, stop: tuple[str, ...] = (), eos: tuple[int, ...] = (), max_tokens: int = 200) -> Running:
    tokenizer = Tokenizer.from_file(str(Path(pocket) / "tokenizer.json"))
    request = GenerateRequest(
        request_id="r",
        prompt_token_ids=[65],
        sampling=SamplingParams(stop=stop, max_tokens=max_tokens),
        eos_token_ids=eos,
    )
    loop = asyncio.new_event_loop()
    try:
        return Running(request, lambda ids: tokenizer.decode(ids, skip_special_tokens=False), loop)
    finally:
        loop.close()


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
