"""What a sampling parameter may be, how it travels, what reaches the engine, and what training refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tyro

import molt_sdk as molt
from molt_sdk.cli import read_config
from molt_sdk.codec import decode_trajectory, encode_trajectory
from molt_sdk.testing import ScriptedEngine

pytestmark = pytest.mark.anyio

ROWS = [{"prompt": f"question {i}"} for i in range(2)]
PAIRS = ((5, 2.5), (7, -100.0))
EVERYTHING: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {7: -100, 5: 2.5},
    "max_tokens": 9,
    "stop": ["x"],
    "seed": 3,
}
CHANGES_THE_DISTRIBUTION = [name for name in EVERYTHING if name not in ("temperature", "max_tokens", "stop", "seed")]


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"presence_penalty": 2.1}, r"presence_penalty=2.1 .* in \[-2, 2\]"),
        ({"frequency_penalty": -3}, r"frequency_penalty=-3 .* in \[-2, 2\]"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty=nan"),
        ({"presence_penalty": None}, "presence_penalty=None .* a number"),
        ({"repetition_penalty": 0}, r"repetition_penalty=0 .* in \[0.01, 100\]"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty=inf"),
        ({"repetition_penalty": True}, "repetition_penalty=True .* a number"),
        ({"logit_bias": {5: 101}}, r"logit_bias of token id 5 is 101; .* in \[-100, 100\]"),
        ({"logit_bias": {5: float("nan")}}, "token id 5 is nan"),
        ({"logit_bias": {5: "high"}}, "token id 5 is 'high'"),
        ({"logit_bias": {-5: 1.0}}, "logit_bias has -5 as a token id; it must be an integer >= 0"),
        ({"logit_bias": {2**31: 1.0}}, "2147483648 as a token id"),
        ({"logit_bias": {5.0: 1.0}}, "5.0 as a token id"),
        ({"logit_bias": {5: 1.0, "5": 2.0}}, "'5' as a token id; .* once"),
        ({"logit_bias": {"yes": 1.0}}, "logit_bias={'yes': 1.0} .* a mapping of token ids"),
        ({"logit_bias": 3}, "logit_bias=3 .* a mapping"),
        ({"logit_bias": "57"}, "logit_bias='57' .* a mapping"),
    ],
    ids=str,
)
def test_values_out_of_range_are_named_with_their_rule(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(molt.ConfigError, match=rf"sampling: .*{message}"):
        molt.SamplingParams(**asked)


@pytest.mark.parametrize(
    "given",
    [{7: -100, 5: 2.5}, {"5": 2.5, "7": -100.0}, [[7, -100], [5, 2.5]], PAIRS],
    ids=["ids", "json", "lists", "pairs"],
)
def test_a_logit_bias_is_the_same_however_it_is_written(given: Any) -> None:
    params = molt.SamplingParams(logit_bias=given)
    assert params.logit_bias == PAIRS
    assert hash(params) == hash(molt.SamplingParams(logit_bias=PAIRS))


@pytest.mark.parametrize("nothing", [{}, [], None], ids=str)
def test_no_logit_bias(nothing: Any) -> None:
    assert molt.SamplingParams(logit_bias=nothing) == molt.SamplingParams()


def test_sampling_parameters_survive_every_way_they_travel(tmp_path: Path, pocket: str) -> None:
    params = molt.SamplingParams(**EVERYTHING)
    assert msgspec.json.decode(msgspec.json.encode(params), type=molt.SamplingParams) == params
    assert msgspec.convert(msgspec.to_builtins(params), molt.SamplingParams) == params

    file = tmp_path / "run.toml"
    file.write_text("[sampling]\nlogit_bias = [[7, -100], [5, 2.5]]\nrepetition_penalty = 1.1\n")
    expected = molt.SamplingParams(logit_bias=PAIRS, repetition_penalty=1.1)
    assert read_config(file, molt.FitConfig).sampling == expected

    flags = ["--logit-bias", "7", "-100", "5", "2.5", "--frequency-penalty", "-1"]
    assert tyro.cli(molt.SamplingParams, args=flags) == molt.SamplingParams(logit_bias=PAIRS, frequency_penalty=-1.0)

    (group,) = molt.rollout(tasks=ROWS[:1], engine=ScriptedEngine(pocket, "a"), sampling=params)
    back = decode_trajectory(encode_trajectory(group.trajectories[0])).turns[0].sampling
    assert back == group.trajectories[0].turns[0].sampling
    assert back.logit_bias == PAIRS


# --- what reaches the engine ------------------------------------------------------------------------------------------


async def test_every_field_is_sent_whether_config_or_call_sets_it(pocket: str) -> None:
    async def by_call(task: molt.Task, model: molt.Model) -> None:
        await model.chat("q", **EVERYTHING)

    async def by_config(task: molt.Task, model: molt.Model) -> None:
        await model.chat("q")

    assert set(EVERYTHING) == set(molt.SamplingParams.__struct_fields__)
    params = molt.SamplingParams(**EVERYTHING)
    engine = ScriptedEngine(pocket, lambda prompt, sampling: "a")
    await molt.arollout(by_call, ROWS[:1], engine=engine)
    await molt.arollout(by_config, ROWS[:1], engine=engine, sampling=params)
    for request in engine.requests:
        assert msgspec.structs.replace(request.sampling, seed=3) == params  # the seed is mixed, see test_model.py


async def test_f104_training_and_evaluation_at_the_same_time_keep_their_own_values(pocket: str, tmp_path: Path) -> None:
    engine = ScriptedEngine(pocket, lambda prompt, sampling: "ab"[: 1 + (sampling.seed or 0) % 2])
    hot, cold = molt.SamplingParams(max_tokens=50), molt.SamplingParams(temperature=0.0, top_k=5, logit_bias=PAIRS)
    begun, evaluated = asyncio.Event(), asyncio.Event()
    once: dict[str, Any] = {"max_tokens": 8, "stop": ["x"]}

    @molt.policy
    async def learner(task: molt.Task, model: molt.Model) -> float:
        await model.chat("train short", **once)
        begun.set()
        await evaluated.wait()
        return float(len((await model.chat("train long")).text) % 2)

    @molt.policy
    async def judge(task: molt.Task, model: molt.Model) -> float:
        await begun.wait()
        await model.chat("evaluate long")
        await model.chat("evaluate biased", logit_bias={9: 1})
        evaluated.set()
        return 1.0

    async with asyncio.timeout(60):
        await asyncio.gather(
            molt.afit(
                learner,
                ROWS,
                engine=engine,
                sampling=hot,
                steps=1,
                groups_per_step=2,
                group_size=2,
                run_dir=tmp_path / "r",
            ),
            molt.aevaluate(judge, ROWS, engine=engine, sampling=cold),
        )

    sent: dict[str, set[Any]] = {}
    for request in engine.requests:
        text = engine.renderer.text(request.prompt_token_ids)
        words = next(w for w in ("train short", "train long", "evaluate long", "evaluate biased") if w in text)
        s = request.sampling
        sent.setdefault(words, set()).add((s.temperature, s.top_k, s.logit_bias, s.max_tokens, s.stop))
    assert sent == {
        "train short": {(1.0, 0, (), 8, ("x",))},
        "train long": {(1.0, 0, (), 50, ())},
        "evaluate long": {(0.0, 5, PAIRS, 512, ())},
        "evaluate biased": {(0.0, 5, ((9, 1.0),), 512, ())},
    }
    assert hot == molt.SamplingParams(max_tokens=50)
    assert cold == molt.SamplingParams(temperature=0.0, top_k=5, logit_bias=PAIRS)
    assert once == {"max_tokens": 8, "stop": ["x"]}


async def test_f104_a_logit_bias_that_the_caller_changes_later_is_not_changed(pocket: str) -> None:
    mine = {5: 1.0}
    params = molt.SamplingParams(logit_bias=mine)  # type: ignore[arg-type]
    engine = ScriptedEngine(pocket, lambda prompt, sampling: "a")

    async def policy(task: molt.Task, model: molt.Model) -> None:
        await model.chat("q", logit_bias=mine)
        mine[5] = -1.0
        await model.chat("q")

    await molt.arollout(policy, ROWS[:1], engine=engine, sampling=params)
    assert [request.sampling.logit_bias for request in engine.requests] == [((5, 1.0),)] * 2
    assert mine == {5: -1.0}


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHANGES_THE_DISTRIBUTION)
def test_f130_training_refuses_a_changed_distribution_in_its_settings(pocket: str, tmp_path: Path, name: str) -> None:
    engine = ScriptedEngine(pocket, "a")
    sampling = molt.SamplingParams(**{name: EVERYTHING[name]})

    @molt.policy
    async def policy(task: molt.Task, model: molt.Model) -> float:
        return 1.0

    with pytest.raises(molt.ConfigError, match=rf"sampling: {name}=.*wrong ratios; use {name}=.* in training"):
        molt.fit(policy, ROWS, engine=engine, sampling=sampling, steps=1, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_f130_training_refuses_an_agent_that_asks_for_one_before_the_engine_is_asked(
    pocket: str, tmp_path: Path
) -> None:
    engine = ScriptedEngine(pocket, lambda prompt, sampling: "a")

    @molt.policy
    async def policy(task: molt.Task, model: molt.Model) -> float:
        await model.fork("judge", trainable=False).chat("q", **EVERYTHING)  # not trained: as it likes
        await model.fork("helper").chat("q", logit_bias={5: 1})
        return 1.0

    with pytest.raises(molt.RunFailedError, match=r'logit_bias=\(\(5, 1.0\),\) changes.*sampling_from="config"'):
        molt.fit(policy, ROWS, engine=engine, steps=1, group_size=2, groups_per_step=1, run_dir=tmp_path / "run")
    assert engine.requests
    assert {request.sampling.top_k for request in engine.requests} == {20}, "only the judge's calls came through"
