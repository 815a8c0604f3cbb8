"""The engine that answers from a script: what users test their agents with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest

import molt_sdk as molt
from molt_sdk.engines.base import Engine, GenerateRequest, Generation
from molt_sdk.testing import TEMPLATES, Script, ScriptedEngine, pocket_model

pytestmark = pytest.mark.anyio
END = 258


def request(*, max_tokens: int = 512, prompt: list[int] | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt_token_ids=prompt or [1, 2],
        sampling=molt.SamplingParams(max_tokens=max_tokens),
        eos_token_ids=(END,),
    )


async def answer(pocket: str, reply: Any, **options: Any) -> Generation:
    return await ScriptedEngine(pocket, [reply]).generate(request(**options))


async def test_it_is_an_engine(pocket: str) -> None:
    assert isinstance(ScriptedEngine(pocket, []), Engine)


async def test_text_ends_with_the_end_of_turn_token(pocket: str) -> None:
    generation = await answer(pocket, "hi")
    assert generation.token_ids == [*b"hi", END]
    assert generation.logprobs == [-1.0] * 3
    assert generation.versions == [0] * 3
    assert generation.finish_reason == "stop"


async def test_text_cut_by_length_has_no_end_token(pocket: str) -> None:
    generation = await answer(pocket, Script(text="hi", finish_reason="length"))
    assert generation.token_ids == [*b"hi"]
    assert generation.finish_reason == "length"


async def test_text_longer_than_max_tokens_is_cut(pocket: str) -> None:
    generation = await answer(pocket, "hello", max_tokens=3)
    assert generation.token_ids == [*b"hel"]
    assert generation.finish_reason == "length"


async def test_token_ids_are_taken_as_they_are(pocket: str) -> None:
    assert (await answer(pocket, [7, 8])).token_ids == [7, 8]
    assert (await answer(pocket, Script(token_ids=[7, END, 8]))).token_ids == [7, END, 8]


async def test_a_script_says_logprobs_versions_and_reason(pocket: str) -> None:
    generation = await answer(pocket, Script(token_ids=[7, 8], logprobs=[-0.5, -2.0], versions=[3, 4]))
    assert (generation.logprobs, generation.versions) == ([-0.5, -2.0], [3, 4])


async def test_replies_come_in_order_and_run_out_with_a_clear_error(pocket: str) -> None:
    engine = ScriptedEngine(pocket, (text for text in ("a", "b")))
    assert [(await engine.generate(request())).token_ids[0] for _ in range(2)] == [*b"ab"]
    with pytest.raises(molt.EngineError, match="the script has 2 replies, and one more was asked for"):
        await engine.generate(request())
    assert len(engine.requests) == 3
    assert engine.open_requests == 0


async def test_a_function_of_the_request_is_a_deterministic_engine(pocket: str) -> None:
    def reply(prompt: list[int], sampling: molt.SamplingParams) -> str:
        prompt.append(9)  # it may do with its list what it likes
        return f"{len(prompt)} {sampling.max_tokens}"

    engine = ScriptedEngine(pocket, reply)
    asked = request(max_tokens=9, prompt=[1, 2, 3])
    assert (await engine.generate(asked)).token_ids == [*b"4 9", END]
    assert (await engine.generate(asked)).token_ids == [*b"4 9", END]
    assert engine.requests == [asked, asked]
    assert asked.prompt_token_ids == [1, 2, 3]


async def test_the_version_stamps_what_is_sampled_from_then_on(pocket: str) -> None:
    engine = ScriptedEngine(pocket, lambda prompt, sampling: "a")
    engine.version = 7
    assert (await engine.generate(request())).versions == [7, 7]
    await engine.update_weights([], 8)
    assert (await engine.generate(request())).versions == [8, 8]
    assert engine.updates == [8]


async def test_an_error_is_raised_in_place_of_an_answer(pocket: str) -> None:
    engine = ScriptedEngine(pocket, [Script(error=molt.EngineError("gone")), "a"])
    with pytest.raises(molt.EngineError, match="gone"):
        await engine.generate(request())
    assert engine.open_requests == 0
    assert (await engine.generate(request())).token_ids == [*b"a", END]


async def test_a_cancelled_request_is_no_longer_open(pocket: str) -> None:
    engine = ScriptedEngine(pocket, [Script(text="late", delay=60)])
    task = asyncio.create_task(engine.generate(request()))
    await anyio.wait_all_tasks_blocked()
    assert engine.open_requests == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.open_requests == 0


async def test_a_context_of_its_own(pocket: str) -> None:
    assert ScriptedEngine(pocket, []).context_length == 2048
    assert ScriptedEngine(pocket, [], context_length=10).context_length == 10


async def test_a_model_without_chat_template_can_complete(tmp_path: Path) -> None:
    path = Path(pocket_model(tmp_path / "m"))
    (path / "chat_template.jinja").unlink()
    config = (path / "tokenizer_config.json").read_text().replace('"chat_template"', '"unused"')
    (path / "tokenizer_config.json").write_text(config)

    async def agent(task: molt.Task, model: molt.Model) -> float:
        assert (await model.complete("x")).text == "a"
        with pytest.raises(molt.TemplateError, match="no chat template"):
            await model.chat("x")
        return 1.0

    groups = await molt.arollout(agent, [{"prompt": "q"}], engine=ScriptedEngine(str(path), ["a"]))
    assert [t.error for t in groups[0]] == [None]


# --- the pocket model -------------------------------------------------------------------------------------------------


async def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    first, second, other = (
        Path(pocket_model(tmp_path / name, seed=seed)) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    files = sorted(file.name for file in first.iterdir())
    assert [(second / name).read_bytes() for name in files] == [(first / name).read_bytes() for name in files]
    assert (other / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()


async def test_a_pocket_model_takes_a_template_name_or_text(tmp_path: Path) -> None:
    assert (Path(pocket_model(tmp_path / "a", "chatml")) / "chat_template.jinja").read_text() == TEMPLATES["chatml"]
    assert (Path(pocket_model(tmp_path / "b", "{{ 1 }}")) / "chat_template.jinja").read_text() == "{{ 1 }}"
    with pytest.raises(molt.ConfigError, match="no template named 'chatlm'"):
        pocket_model(tmp_path / "c", "chatlm")
