"""A model's chat template (Jinja) and its tokenizer: the only places where text becomes token ids.

Text inside a message never becomes a control token: special-token text in a content is encoded as plain text.
The tokenizer is loaded with the ``tokenizers`` library alone, so nothing here imports torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molt_sdk.errors import ModelPathError, TemplateError
from molt_sdk.types import Message

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LARGE_TEXT = 200_000
"""Characters from which on a text is encoded off the event loop."""

SENTINEL = "MOLT\u00b7PROBE"


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
        text_config = config.get("text_config") or config
        self.context_length = int(text_config.get("max_position_embeddings") or 0) or 2**31 - 1
        from tokenizers import Tokenizer

        try:
            self.tokenizer = Tokenizer.from_file(str(self.path / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise ModelPathError(f"{self.path / 'tokenizer.json'} cannot be read: {error}") from error
        self.special_ids = {
            token.content: i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self.special_map = self._special_map()
        eos: list[int] = []
        for source in (generation.get("eos_token_id"), config.get("eos_token_id"), text_config.get("eos_token_id")):
            eos += source if isinstance(source, list) else [source] if source is not None else []
        named = self.special_map.get("eos_token")
        if named is not None and named in self.special_ids:
            eos.append(self.special_ids[named])
        self.eos_token_ids = tuple(dict.fromkeys(int(i) for i in eos))
        self.chat_template = self._chat_template()

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
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise ModelPathError(f"model directory {directory} has no {name}; save the model with its tokenizer first")


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of ``text``, nothing added. Unlike ``encode``, ``encode_batch`` lets other threads run meanwhile, which
    matters for a text of a megabyte: that takes a second."""
    if len(text) < LARGE_TEXT:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    return list(tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)


class ChatTemplate:
    """Renders messages with a chat template and encodes the text.

    ``tools_supported`` and ``tool_role_supported`` come from rendering a probe, never from the template's name.
    """

    def __init__(self, files: ModelFiles) -> None:
        if files.chat_template is None:
            raise TemplateError(
                f"model directory {files.path} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); add one, or use model.complete with raw text"
            )
        from tokenizers import Tokenizer

        from molt_sdk.rendering.jinja import compile_template

        self.files = files
        self._render = compile_template(files.chat_template, f"chat template of {files.path}")
        self._plain = Tokenizer.from_str(files.tokenizer.to_str())
        self._plain.encode_special_tokens = True
        specials = sorted(files.special_ids, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, specials))) if specials else None
        self.end_of_turn = self._find_end_of_turn()
        self.opens_thinking = self._generation_prompt_ends_with("<think>")
        eos = dict.fromkeys(files.eos_token_ids)
        if self.end_of_turn is not None:
            eos[self.end_of_turn[1]] = None
        self.eos_token_ids = tuple(eos)
        self.system_supported = self._probe([_message("system", SENTINEL), _message("user", "x")])
        self.tools_supported = self._probe([_message("user", "x")], tools=[_PROBE_TOOL])
        call: Message = {"role": "assistant", "content": "y"}
        tool_turn: Message = {"role": "tool", "content": SENTINEL, "tool_call_id": "call_0", "name": "probe"}
        self.tool_role_supported = self._probe([_message("user", "x"), call, tool_turn])

    def _probe(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        try:
            return SENTINEL in self.text(messages, tools, generation_prompt=True)
        except TemplateError:
            return False

    def _generation_prompt_ends_with(self, text: str) -> bool:
        try:
            return self.text([_message("user", "x")], (), generation_prompt=True).rstrip().endswith(text)
        except TemplateError:
            return False

    def _find_end_of_turn(self) -> tuple[str, int] | None:
        """(text, id) of the special token that the template writes right after an assistant's content."""
        try:
            rendered = self.text([_message("user", "x"), _message("assistant", SENTINEL)], (), generation_prompt=False)
        except TemplateError:
            return None
        after = rendered[rendered.rfind(SENTINEL) + len(SENTINEL) :]
        match = self._special_pattern.match(after) if self._special_pattern else None
        return (match.group(), self.files.special_ids[match.group()]) if match else None

    def text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, generation_prompt: bool
    ) -> str:
        """Render to text. Raises TemplateError with the template's own words."""
        return self._render(
            messages=list(messages),
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=generation_prompt,
            **self.files.special_map,
        )

    def marker_for(self, *shown: Sequence[Mapping[str, Any]]) -> str:
        """A character that no message or tool holds if one of them holds special-token text, else ""."""
        texts = [text for items in shown for item in items for text in _strings(item)]
        if self._special_pattern is None or not any(self._special_pattern.search(text) for text in texts):
            return ""
        used = set().union(*map(set, texts))
        return next(chr(c) for c in range(0xE000, 0xF8FF) if chr(c) not in used)

    def guard(self, messages: Sequence[Mapping[str, Any]], marker: str) -> list[dict[str, Any]]:
        """Messages (or tools) with ``marker`` inside special-token text; :meth:`encode` takes it out again."""
        if not marker:
            return [dict(message) for message in messages]
        return [_map_strings(message, lambda text: self.break_up(text, marker)) for message in messages]

    def break_up(self, text: str, marker: str) -> str:
        """``text`` with ``marker`` inside every special-token literal."""
        if not marker or self._special_pattern is None:
            return text
        return self._special_pattern.sub(lambda m: m.group()[0] + marker + m.group()[1:], text)

    def encode(self, text: str, marker: str = "") -> list[int]:
        """Ids of rendered text; special tokens written by the template become their ids, guarded text does not."""
        if not marker or self._special_pattern is None:
            return encode_text(self.files.tokenizer, text)
        ids: list[int] = []
        position = 0
        for match in self._special_pattern.finditer(text):
            ids += self._encode_plain(text[position : match.start()], marker)
            ids.append(self.files.special_ids[match.group()])
            position = match.end()
        return ids + self._encode_plain(text[position:], marker)

    def _encode_plain(self, text: str, marker: str) -> list[int]:
        text = text.replace(marker, "")
        return encode_text(self._plain, text) if text else []


_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": SENTINEL,
        "description": "probe",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for item in pair for text in _strings(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _strings(item)]
    return []


def _map_strings(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


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
