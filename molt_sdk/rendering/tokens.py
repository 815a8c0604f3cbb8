"""Text to token ids for one tokenizer, such that text inside a message never becomes a control token.

A message whose text spells a control token is *guarded* before it is rendered: a marker character, one that occurs
nowhere in the conversation, is put into the spelling. The rendered text then holds control tokens only where the
template wrote them; :meth:`Tokens.encode` gives those their ids and encodes the guarded text as plain text.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from molt_sdk.errors import TemplateError
from molt_sdk.messages import first_difference

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LARGE_TEXT = 200_000
"""Characters from which on a text is encoded off the event loop."""
_SEPARATOR = "\ue0fe\ue0fdseparator\ue0fd\ue0fe"


class Tokens:
    """A tokenizer with its control tokens: the special ones, and the added ones that the chat template writes."""

    def __init__(self, tokenizer: Tokenizer, template: str = "") -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = {token.content: i for i, token in added.items() if token.special}
        self.control_ids = dict(self.special_ids)
        for i, token in added.items():
            if token.content in template and not token.content.isspace():
                self.control_ids.setdefault(token.content, i)
        self._added = {token.content: token for token in added.values()}
        self._special = _any_of(self.special_ids)
        self.control = _any_of(self.control_ids)
        """Matches every control token in a text."""

    @functools.cached_property
    def plain(self) -> Tokenizer:
        """The tokenizer without added tokens, but for one that stands for the control token before a text: some
        tokenizers put a space in front of text that follows none."""
        from tokenizers import AddedToken, Tokenizer

        settings = json.loads(self.tokenizer.to_str())
        settings["added_tokens"] = []
        settings["post_processor"] = None
        plain = Tokenizer.from_str(json.dumps(settings))
        plain.add_special_tokens([AddedToken(_SEPARATOR, special=True, normalized=False)])
        return plain

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False) if token_ids else ""

    def text(self, token_ids: Sequence[int], eos_token_ids: Collection[int]) -> str:
        """Text of a completion without its closing EOS; other special tokens stay visible."""
        ended = bool(token_ids) and token_ids[-1] in eos_token_ids
        return self.decode(token_ids[:-1] if ended else token_ids)

    def marker_for(self, *shown: Iterable[Mapping[str, Any]]) -> str:
        """A character that no message or tool holds, if one of them spells a control token; else ""."""
        texts = [text for items in shown for item in items for text in _strings(item)]
        if not any(self.control.search(text) for text in texts):
            return ""
        used = set().union(*map(set, texts))
        private_first = itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0x110000), range(0xA0, 0xD800))
        marker = next((chr(c) for c in private_first if chr(c) not in used), None)
        if marker is None:
            raise TemplateError("the messages hold every character that could guard their special-token text")
        return marker

    def guard(self, value: Any, marker: str, *, strict: bool = False) -> Any:
        """``value`` (text, or lists and dicts of it) with ``marker`` inside every spelling of a special token.

        ``strict`` guards the added tokens that the template writes too, such as ``<tool_response>``: for what users
        and tools say. Elsewhere they are part of how the model writes.
        """
        if not marker:
            return value
        pattern = self.control if strict else self._special
        return _map_strings(value, lambda text: pattern.sub(lambda m: m.group()[0] + marker + m.group()[1:], text))

    def encode(self, text: str, marker: str = "", *, after: str = "") -> list[int]:
        """Ids of ``text`` that follows the control token ``after``: control tokens become their ids, guarded spellings
        do not."""
        if not marker or marker not in text:
            return self._encode(self.tokenizer, after + text)[bool(after) :]
        ids: list[int] = []
        easy, position, control = after, 0, after  # text that needs no care; where it goes on; the last control token
        for match in [*self.control.finditer(text), None]:
            segment = text[position : match.start() if match else len(text)]
            if marker in segment:
                ids += self._encode(self.tokenizer, easy) if easy else []
                ids += self._encode_plain(self._trimmed(segment, control, match[0] if match else ""), marker, control)
                easy = ""
            else:
                easy += segment
            if match:
                easy, position, control = easy + match[0], match.end(), match[0]
        ids += self._encode(self.tokenizer, easy) if easy else []
        return ids[bool(after) :]

    def _trimmed(self, segment: str, before: str, following: str) -> str:
        """What tokens that swallow the white space next to them leave of a segment."""
        if before and self._added[before].rstrip:
            segment = segment.lstrip()
        if following and self._added[following].lstrip:
            segment = segment.rstrip()
        return segment

    def _encode_plain(self, text: str, marker: str, control: str) -> list[int]:
        before = _SEPARATOR if control else ""
        ids = self._encode(self.plain, before + text.replace(marker, ""))[bool(before) :]
        if not self.control_id_set.isdisjoint(ids):  # a vocabulary that holds the spelling as a piece of text
            ids = [i for part in text.split(marker) for i in self._encode(self.plain, _SEPARATOR + part)[1:]]
        return ids

    @functools.cached_property
    def control_id_set(self) -> frozenset[int]:
        return frozenset(self.control_ids.values())

    def first_difference(self, before: str, after: str) -> int:
        """Where two rendered texts part, but not inside a control token of either."""
        at = first_difference(before, after)
        spellings = (match for text in (before, after) for match in self.control.finditer(text))
        return min((m.start() for m in spellings if m.start() < at < m.end()), default=at)

    @staticmethod
    def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
        """Ids of ``text``, nothing added. Unlike ``encode``, ``encode_batch`` lets other threads run meanwhile, which
        matters for a text of a megabyte: that takes a second."""
        if len(text) < LARGE_TEXT:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)
        return list(tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)


def _any_of(literals: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(literals, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


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
