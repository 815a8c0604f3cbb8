"""The messages before a reply that decide how a chat template continues it.

A template looks at roles, at whether fields are there, at the start of a conversation and at its latest exchanges, but
not at how often the same kind of exchange came before. So a long conversation is shown to it as its opening, the latest
exchange of each kind, and the last two; the bridge is derived and proved on those, at the same cost for every length.
Start-up compares this with whole conversations of up to thirty messages, plain and with tools, with and without
reasoning; where a template continues one of them otherwise, the whole conversation is shown each time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from molt_sdk.types import Message

LAST = 2
"""Latest exchanges that are always shown."""
KINDS = 8
"""Most other exchanges, each the latest of its kind."""

_TAG = re.compile(r"</?[a-z_|]+>")


class _Exchange(NamedTuple):
    """A reply and the messages that follow it."""

    start: int
    end: int
    kind: tuple[object, ...]


class Window(NamedTuple):
    """Which messages of a conversation to show; the conversation ends before a reply."""

    opening: int
    """Messages before the first reply."""
    exchanges: tuple[_Exchange, ...]

    @property
    def numbers(self) -> list[int]:
        """Indices of the messages to show."""
        return [*range(self.opening), *(i for e in self.exchanges for i in range(e.start, e.end))]

    def extended(self, messages: Sequence[Message], start: int) -> Window:
        """The window of a longer conversation, from ``start`` on of which, a reply, this one knows nothing."""
        exchanges = [*self.exchanges, *_exchanges(messages, start)]
        latest = {exchange.kind: exchange for exchange in exchanges}
        kept = sorted(latest.values())[-KINDS:]
        return Window(self.opening, tuple(sorted({*kept, *exchanges[-LAST:]})))


def window_of(messages: Sequence[Message]) -> Window:
    """The window of a conversation."""
    replies = (i for i, message in enumerate(messages) if message["role"] == "assistant")
    opening = next(replies, len(messages))
    return Window(opening, ()).extended(messages, opening)


def _exchanges(messages: Sequence[Message], start: int) -> list[_Exchange]:
    starts = [i for i in range(start, len(messages)) if messages[i]["role"] == "assistant"]
    return [
        _Exchange(a, b, tuple(dict.fromkeys(map(_kind, messages[a:b]))))
        for a, b in itertools.pairwise([*starts, len(messages)])
    ]


def _kind(message: Message) -> tuple[object, ...]:
    """What a template can tell messages apart by."""
    content = str(message.get("content") or "")
    calls = len(message.get("tool_calls") or ())
    return message["role"], bool(content), bool(message.get("reasoning")), min(calls, 2), bool(_TAG.search(content))
