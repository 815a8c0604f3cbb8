"""The models that the ``renderers`` library knows: its parser of their replies, and its bridge.

A model is known by what its template writes, not by its name: the library's rendering of probe conversations must equal
the template's, token for token. A fine-tune with the same template is known too; a changed template is not. Where none
agrees and our own reader does not understand the calls that the template writes, a reader of the library that does is
taken for the replies alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from loguru import logger
from msgspec import Struct

from molt_sdk.messages import parsed_arguments
from molt_sdk.rendering.tokens import Tokens
from molt_sdk.types import Message

TAIL = 512
"""Latest ids of a prompt that the library is shown: enough to see whether reasoning was opened in it."""
MAX_PARSING = 4_000_000
"""Steps up to which a reply is parsed by the library."""
FASTER = 24
"""Characters that a pattern passes in the time of one step."""
TAGS = (
    ("<parameter", "</parameter>"),
    ("<function", "</function>"),
    ("<invoke", "</invoke>"),
    ("<arg_key>", "</arg_key>"),
    ("<arg_value>", "</arg_value>"),
)
"""Tags inside of blocks, in the formats that have some."""


class KnownCall(Struct, frozen=True):
    """One attempt at a tool call."""

    name: str
    """"" if it could not be read."""
    arguments: Any
    """Data, or text where it is not JSON."""
    id: str
    problem: str
    """Why it cannot be executed; "" if it can."""
    raw: str
    """Text of the block."""
    span: tuple[int, int] | None
    """Its ids in the reply; None where the library does not say."""


class KnownReply(Struct, frozen=True):
    content: str
    reasoning: str | None
    calls: list[KnownCall]
    thinking: bool
    """The reply ended inside its reasoning."""


class KnownModel:
    """One renderer of the library, on this model's tokenizer."""

    def __init__(self, name: str, tokens: Tokens, make: Callable[[_Tokenizer], Any]) -> None:
        """Raises whatever the library raises when the tokenizer lacks what the family needs."""
        self.name = name
        self._tokens = tokens
        self._make: Callable[[str], Any] = lambda marker: make(_Tokenizer(tokens, marker))
        self._renderer = self._make("")
        self.channels = isinstance(self._renderer, _Harmony)
        """Reasoning, answer and calls are told apart by channels, which only the library knows."""
        self.stop_token_ids: list[int] = self._renderer.get_stop_token_ids()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """Ids of a conversation with the generation prompt. Raises what the library raises."""
        ids: list[int] = self._renderer.render_ids(
            [_in_its_terms(m) for m in messages],
            tools=list(tools) or None,
            add_generation_prompt=True,
        )
        return ids

    def bridge(
        self, prompt: Sequence[int], completion: Sequence[int], new: Sequence[Message], tools: Sequence[Any]
    ) -> list[int] | None:
        """Ids that follow the completion, if the library can prove them."""
        marker = self._tokens.marker_for(new, tools)
        renderer = self._make(marker) if marker else self._renderer
        tail = list(prompt[-TAIL:])
        shown = [self._tokens.guard(_in_its_terms(m), marker, strict=m["role"] in ("user", "tool")) for m in new]
        schemas = self._tokens.guard(list(tools), marker) or None
        try:
            rendered = renderer.bridge_to_next_turn(tail, list(completion), shown, tools=schemas)
        except Exception as error:  # a library's parser of whatever a model wrote
            logger.trace("renderers ({}) cannot continue a turn: {!r}", self.name, error)
            return None
        start = [*tail, *completion]
        if rendered is None or rendered.token_ids[: len(start)] != start:
            return None
        return list(rendered.token_ids[len(start) :])

    def parse(self, completion: Sequence[int], prompt: Sequence[int], tools: Sequence[Any]) -> KnownReply | None:
        """What a completion says; None if it cannot be read, or not in bounded time."""
        ids = list(completion)
        if self._work(ids) > MAX_PARSING:
            return None
        try:
            parsed = self._renderer.parse_response(
                ids, tools=list(tools) or None, prompt_ids=list(prompt[-TAIL:]) or None
            )
        except Exception as error:  # as above
            logger.trace("renderers ({}) cannot parse a reply: {!r}", self.name, error)
            return None
        calls = [_call(attempt) for attempt in parsed.tool_calls]
        return KnownReply(parsed.content, parsed.reasoning_content, calls, parsed.reasoning_complete is False)

    def _work(self, ids: list[int]) -> int:
        """Steps that the library's parsers take at worst: they look for the end of each block to the end of the reply,
        and so do their patterns, which are faster, for each tag."""
        text = self._tokens.decode(ids)
        tags = sum(text.count(tag) for pair in TAGS for tag in pair)
        controls = sum(i in self._tokens.control_id_set for i in ids)
        return controls * len(ids) + tags * len(text) // FASTER


def _call(attempt: Any) -> KnownCall:
    raw, problem = str(attempt.raw), "" if attempt.status == "ok" else str(attempt.status).replace("_", " ")
    if not problem and raw.lstrip()[:1] not in ("{", "[") and any(raw.count(a) != raw.count(b) for a, b in TAGS):
        problem = "a tag in it has no end, or a value holds a tag of the format"
    name = attempt.name if isinstance(attempt.name, str) else ""
    return KnownCall(name, attempt.arguments, attempt.id or "", problem, raw, attempt.token_span)


def candidates(tokens: Tokens, hub_name: str, dates: dict[str, str]) -> Iterator[KnownModel]:
    """The library's models whose special tokens this tokenizer has; what its name says first."""
    from renderers import config_from_name, create_renderer, merge_chat_template_kwargs
    from renderers.base import MODEL_RENDERER_MAP

    if tokens.control_ids.keys() >= _Harmony.TOKENS:
        yield KnownModel("gpt-oss", tokens, _Harmony)
    named = [family for name, family in MODEL_RENDERER_MAP.items() if hub_name in (name, name.split("/")[-1])]
    for family in dict.fromkeys([*named, *MODEL_RENDERER_MAP.values()]):
        if family == "gpt-oss":
            continue
        for settings in _SETTINGS.get(family, ({},)):
            config = config_from_name(family)
            config = merge_chat_template_kwargs(config, {k: dates.get(v, v) for k, v in settings.items()})
            try:
                yield KnownModel(family, tokens, functools.partial(create_renderer, config=config))
            except Exception as error:  # it asserts that the tokenizer has the family's tokens
                logger.trace("renderers: not {}: {!r}", family, error)
                break


_THINKING: Sequence[dict[str, Any]] = ({}, {"enable_thinking": True}, {"enable_thinking": False})
_SETTINGS: dict[str, Sequence[dict[str, Any]]] = {
    "llama-3": ({"date_string": "%d %b %Y"}, {}),
    "qwen3.5": _THINKING,
}
"""Settings of families whose template depends on the size of the model or on the date."""


class _Harmony:
    """The library's reader of gpt-oss replies without its renderer, which fetches a vocabulary from the network."""

    TOKENS = frozenset(
        ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
    )

    def __init__(self, tokenizer: _Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = {name[2:-2] + "_id": tokenizer.convert_tokens_to_ids(name) for name in self.TOKENS}

    def get_stop_token_ids(self) -> list[int]:
        return [self._ids["return_id"], self._ids["call_id"]]

    def bridge_to_next_turn(self, *turn: Any, **options: Any) -> None:
        return None

    def parse_response(self, token_ids: list[int], *, tools: Any, prompt_ids: list[int] | None) -> Any:
        from renderers.parsing import parse_gpt_oss

        start = self._ids["start_id"]
        if token_ids[:1] != [start]:  # the prompt holds the header of the reply, or its beginning
            prompt = prompt_ids or [start]
            token_ids = [*prompt[len(prompt) - 1 - prompt[::-1].index(start) :], *token_ids]
        return parse_gpt_oss(self._tokenizer, token_ids, **self._ids)


def _in_its_terms(message: Message) -> dict[str, Any]:
    shown: dict[str, Any] = dict(message)
    shown.setdefault("content", "")
    if "reasoning" in shown:
        shown["reasoning_content"] = shown.pop("reasoning")
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [
            {**c, "function": {**c["function"], "arguments": parsed_arguments(c["function"]["arguments"])}}
            for c in calls
        ]
    return shown


class _Tokenizer:
    """What the library needs of a tokenizer. Text that holds the marker is guarded against control tokens."""

    name_or_path = ""

    eos_token_id = unk_token_id = bos_token_id = None

    def __init__(self, tokens: Tokens, marker: str) -> None:
        self._tokens = tokens
        self._marker = marker

    def encode(self, text: str, *args: Any, **options: Any) -> list[int]:
        return self._tokens.encode(text, self._marker)

    def decode(self, token_ids: Any, *args: Any, **options: Any) -> str:
        return self._tokens.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokens.tokenizer.token_to_id(tokens)
        return [self._tokens.tokenizer.token_to_id(token) for token in tokens]

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        """Ids with character offsets, which only the library's attribution reads: it is not used here."""
        ids = self.encode(text)
        return {"input_ids": ids, "offset_mapping": [(0, 0)] * len(ids)}
