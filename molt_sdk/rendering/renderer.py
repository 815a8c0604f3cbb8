"""All conversions between messages and token ids for one model directory."""

from __future__ import annotations

from collections.abc import Sequence

from molt_sdk.errors import TemplateError
from molt_sdk.rendering.abilities import Tools
from molt_sdk.rendering.bridge import Bridge, History, NoBridge, SampledReply
from molt_sdk.rendering.replies import ParsedCompletion
from molt_sdk.rendering.startup import Chat
from molt_sdk.rendering.template import ModelFiles, no_template
from molt_sdk.types import FinishReason, Message

__all__ = ["Bridge", "History", "NoBridge", "ParsedCompletion", "Renderer"]


class Renderer:
    """Prompts, bridges and parsed replies. Stateless after construction; safe to share between threads.

    Raises:
        ModelPathError: the directory is not a model with a tokenizer.
        TemplateError: its chat template does not compile.
    """

    def __init__(self, model: str, *, emulate_tools: bool = True) -> None:
        self.files = ModelFiles(model)
        self._emulate_tools = emulate_tools
        self.tokens = self.files.tokens
        self._chat = Chat(self.files) if self.files.chat_template is not None else None

    @property
    def chat(self) -> Chat:
        """What start-up found out. Raises TemplateError for a model without a chat template."""
        if self._chat is None:
            raise no_template(self.files)
        return self._chat

    def require_tools(self) -> None:
        """Raise TemplateError if tools can only be emulated and that is switched off."""
        if self.chat.emulates_tools and not self._emulate_tools:
            raise TemplateError(
                f"{self.chat.template.place} {self.chat.why_emulated}; use another model, or allow tools in plain text "
                "with RolloutConfig(tool_emulation=True)"
            )

    @property
    def context_length(self) -> int:
        return self.files.context_length

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply: those of the model's config, the end of turn of its template, its family's own."""
        return self._chat.eos_token_ids if self._chat is not None else self.files.eos_token_ids

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids of a new root: the rendered conversation with the generation prompt.

        Raises TemplateError where the template refuses the messages or leaves one out.
        """
        if tools:
            self.require_tools()
        bridger, shape = self.chat.bridger, self.chat.shape
        marker = shape.marker_for(messages, tools)
        text = bridger.render(messages, tools, marker)
        asked = [(i, message) for i, message in enumerate(messages) if message["role"] != "assistant"]
        missing = bridger.missing(text, [message for _, message in asked], marker)
        if missing is not None:
            i, message = asked[missing]
            raise TemplateError(f"{self.chat.template.place} leaves out message {i} ({message['role']})")
        return self.tokens.encode(text, marker)

    def raw_prompt(self, text: str) -> list[int]:
        """Ids of raw text for ``model.complete``: BOS exactly once, if tokenizer.json or ``add_bos_token`` says so.
        Special tokens in the text are control tokens here: whoever writes raw text writes the whole prompt."""
        ids = list(self.files.tokenizer.encode(text, add_special_tokens=True).ids)
        bos = self.tokens.special_ids.get(self.files.special_map.get("bos_token", ""))
        if bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        if bos is not None and self.files.tokenizer_config.get("add_bos_token") is True and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def bridge(
        self,
        history: History,
        reply: Message,
        completion_token_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Tools = (),
        *,
        prompt: Sequence[int] = (),
    ) -> Bridge | NoBridge:
        """What follows ``history`` + completion so that ``new_messages`` continue it.

        Args:
            history: the conversation before the reply, or what a
                :class:`~molt_sdk.rendering.window.Window` of it shows.
            reply: the completion, parsed.
            completion_token_ids: the completion as it was sampled.
            new_messages: what came after it.
            tools: schemas offered, the same as for the reply.
            prompt: the latest ids of the prompt of the reply.
        """
        chat = self.chat
        ended = completion_token_ids[-1] if completion_token_ids[-1] in chat.eos_token_ids else None
        sampled = SampledReply(chat.parser.text(completion_token_ids), reply, ended)
        bridge = chat.bridger.bridge(history, sampled, new_messages, tools)
        if isinstance(bridge, NoBridge) and bridge.form and ended is not None and ended == chat.end_of_turn:
            ids = self._known_bridge(completion_token_ids, new_messages, tools, prompt)
            return bridge if ids is None else Bridge(ids)
        return bridge

    def _known_bridge(
        self, completion: Sequence[int], new: Sequence[Message], tools: Tools, prompt: Sequence[int]
    ) -> list[int] | None:
        """The library's bridge, for a reply whose form alone kept ours from being proved; it must lose no message."""
        chat = self.chat
        if chat.known is None or not chat.known_bridges or any(m["role"] not in ("user", "tool") for m in new):
            return None
        ids = chat.known.bridge(prompt, completion, new, tools)
        return ids if ids and chat.bridger.missing(self.tokens.decode(ids), new, "") is None else None

    @property
    def windowed(self) -> bool:
        """Whether the messages that a :class:`~molt_sdk.rendering.window.Window` keeps decide how the template
        continues."""
        return self.chat.windowed

    def encode_reply(self, text: str, *, end: bool) -> list[int]:
        """Ids of a reply as a model would sample it, closed by the template's end-of-turn token if ``end``."""
        ids = self.tokens.encode(text)
        if end and self.eos_token_ids:
            closing = self._chat.end_of_turn if self._chat is not None else None
            ids.append(closing if closing is not None else self.eos_token_ids[0])
        return ids

    def write_reply(self, reply: Message, tools: Tools = ()) -> list[int]:
        """Ids of an assistant message as a model would sample it, in the template's own form of reasoning and calls.

        Raises TemplateError where the template refuses it.
        """
        return self.chat.written(reply, tools)

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of a completion without its closing EOS; other special tokens stay visible."""
        return self.tokens.text(token_ids, self.eos_token_ids)

    def holds(self, token_ids: Sequence[int], stops: Sequence[str]) -> bool:
        """Whether the text of ids holds one of the stop strings."""
        text = self.tokens.decode(token_ids)
        return any(stop in text for stop in stops)

    def parse(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason,
        tools: Tools = (),
        call_prefix: str = "call_",
        *,
        prompt: Sequence[int] = (),
    ) -> ParsedCompletion:
        """The assistant message of a completion: content, reasoning, tool calls (only if tools were offered)."""
        return self.chat.parser.parse(token_ids, finish_reason, tools, call_prefix, prompt)
