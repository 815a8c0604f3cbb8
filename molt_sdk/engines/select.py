"""From ``engine="auto"`` or an Engine object to a started engine with its renderer."""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from molt_sdk.engines.base import Engine
from molt_sdk.engines.torch_config import TorchEngineConfig
from molt_sdk.errors import ConfigError
from molt_sdk.rendering.renderer import Renderer
from molt_sdk.rendering.template import check_model_path
from molt_sdk.types import SamplingParams

ENGINES = ("auto", "torch")
"""``auto`` is ``torch``, the model in this process."""


def check_engine(engine: str | Engine, model: str | None) -> str:
    """The model directory to use. Raises ConfigError or ModelPathError; loads nothing."""
    if isinstance(engine, str):
        if engine not in ENGINES:
            near = difflib.get_close_matches(engine, ENGINES, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"engine={engine!r} is unknown; use one of {', '.join(ENGINES)} or an Engine object{hint}"
            )
        if not model:
            raise ConfigError("model is missing: give the path of a model directory as model=...")
        check_model_path(model)
        return str(model)
    if not isinstance(engine, Engine):
        raise ConfigError(f"engine={engine!r:.80} is neither a name ({', '.join(ENGINES)}) nor an Engine")
    path = str(model) if model else engine.model
    check_model_path(path)
    return path


def check_renderer(renderer: Renderer, sampling: SamplingParams, *, tools: bool) -> None:
    """What can be known of a model before anything expensive starts; ``tools``: the agent has some.

    Raises:
        TemplateError: the chat template cannot show tools, and emulation is switched off.
        ConfigError: one completion alone could not fit into the context.
    """
    if tools:
        renderer.require_tools()
    if sampling.max_tokens >= renderer.context_length:
        raise ConfigError(
            f"sampling.max_tokens={sampling.max_tokens} does not fit into the model's context of "
            f"{renderer.context_length} tokens with a prompt; lower max_tokens"
        )


@asynccontextmanager
async def running_engine(engine: str | Engine, model: str, config: TorchEngineConfig) -> AsyncIterator[Engine]:
    """A started engine. One made here is closed at the end; one that the user made stays the user's to close."""
    if not isinstance(engine, str):
        await engine.start()
        yield engine
        return
    from molt_sdk.engines.torch import TorchEngine

    made = TorchEngine(model, config)
    try:
        await made.start()
        yield made
    finally:
        await made.close()
