"""A model directory's tokenizer, limits and chat template, and the template's text for messages that fit it.

The tokenizer is loaded with the ``tokenizers`` library alone, so nothing here imports torch.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from molt_sdk.errors import ModelPathError, TemplateError
from molt_sdk.rendering.jinja import compile_template
from molt_sdk.rendering.tokens import Tokens

UNKNOWN_LENGTH = 2**31 - 1
"""Context length of a model whose config names none."""


class ModelFiles:
    """Tokenizer, template and limits read from a model directory.

    Raises:
        ModelPathError: the directory, its config.json or its tokenizer.json is missing or unreadable.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        check_model_path(path)
        config = _read_json(self.path / "config.json")
        generation = _read_json(self.path / "generation_config.json", optional=True)
        self.tokenizer_config = _read_json(self.path / "tokenizer_config.json", optional=True)
        self.hub_name = _hub_name(self.path, config)
        text_config = config.get("text_config") or config
        self.context_length = int(text_config.get("max_position_embeddings") or 0) or UNKNOWN_LENGTH
        from tokenizers import Tokenizer

        try:
            self.tokenizer = Tokenizer.from_file(str(self.path / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise ModelPathError(f"{self.path / 'tokenizer.json'} cannot be read: {error}") from error
        self.tokenizer.no_truncation()  # whatever the file says: a prompt is never cut
        self.tokenizer.no_padding()
        self.chat_template = self._chat_template()
        self.tokens = Tokens(self.tokenizer, self.chat_template or "")
        self.special_map = self._special_map()
        eos: list[int] = []
        for source in (generation.get("eos_token_id"), config.get("eos_token_id"), text_config.get("eos_token_id")):
            eos += source if isinstance(source, list) else [source] if source is not None else []
        named = self.special_map.get("eos_token")
        if named is not None and named in self.tokens.special_ids:
            eos.append(self.tokens.special_ids[named])
        self.eos_token_ids = tuple(dict.fromkeys(int(i) for i in eos))

    def _special_map(self) -> dict[str, str]:
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
        found: dict[str, str] = {}
        for name in names:
            value = self.tokenizer_config.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[name] = value
        return found

    def _chat_template(self) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self.tokenizer_config.get("chat_template")
        if isinstance(template, list):  # several named templates
            by_name = {entry["name"]: entry["template"] for entry in template}
            template = by_name.get("default")
        return template if isinstance(template, str) else None


def check_model_path(path: str) -> None:
    """Raise ModelPathError unless ``path`` is a directory with config.json and tokenizer.json. Loads nothing."""
    directory = Path(path)
    if not directory.is_dir():
        raise ModelPathError(
            f"model={str(path)!r} is not a directory; give the path of a local model directory (config.json, "
            "tokenizer.json, *.safetensors)"
        )
    for name, kind in (("trainer.json", "a checkpoint"), ("run.sqlite", "a run")):
        if (directory / name).is_file():
            raise ModelPathError(
                f"model={path!r} is {kind}, not a model; the trained model is in the folder model of its run, and "
                "`molt-sdk export RUN OUT --step N` makes one of a checkpoint"
            )
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise ModelPathError(f"model directory {directory} has no {name}; save the model with its tokenizer first")


def no_template(files: ModelFiles) -> TemplateError:
    return TemplateError(
        f"model directory {files.path} has no chat template (chat_template.jinja, or chat_template in "
        "tokenizer_config.json); add one, or use model.complete with raw text"
    )


class ChatTemplate:
    """Renders messages in the template's own terms. Raises TemplateError if the model has no template."""

    def __init__(self, files: ModelFiles) -> None:
        if files.chat_template is None:
            raise no_template(files)
        self.place = f"chat template of {files.path}"
        self.now = datetime.datetime.now()
        """The date that the template writes, for as long as this object lives."""
        self._render = compile_template(files.chat_template, self.place, self.now)
        self._special_map = files.special_map

    def text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, generation_prompt: bool
    ) -> str:
        """Render to text. Raises TemplateError with the template's own words."""
        return self._render(
            messages=list(messages),
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=generation_prompt,
            **self._special_map,
        )


def _hub_name(path: Path, config: Mapping[str, Any]) -> str:
    """``owner/name`` on the Hugging Face hub, as the config or a hub cache path says; else the directory's name."""
    cached = next((part for part in path.resolve().parts if part.startswith("models--")), "")
    if cached:
        return cached.removeprefix("models--").replace("--", "/", 1)
    return str(config.get("_name_or_path") or path.resolve().name)


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelPathError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelPathError(f"{path} must hold a JSON object")
    return value
