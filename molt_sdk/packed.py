"""Compact arrays for records: ids as int32, logprobs as float32, versions as spans, in the machine's byte order."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

Span = tuple[int, int, int]
"""(value, start, end): positions start..end-1 all hold ``value``."""


def pack_ints(values: Iterable[int]) -> bytes:
    """Pack int32 values; raises OverflowError for a value outside int32."""
    return array("i", values).tobytes()


def unpack_ints(data: bytes) -> list[int]:
    return memoryview(data).cast("i").tolist()


def pack_floats(values: Iterable[float]) -> bytes:
    """Pack as float32, the one place where a float64 logprob is rounded."""
    return array("f", values).tobytes()


def unpack_floats(data: bytes) -> list[float]:
    return array("f", data).tolist()


def to_spans(values: Sequence[int]) -> tuple[Span, ...]:
    """Run-length spans of a sequence: [7, 7, 8] -> ((7, 0, 2), (8, 2, 3))."""
    spans: list[Span] = []
    start = 0
    for end in range(1, len(values) + 1):
        if end == len(values) or values[end] != values[start]:
            spans.append((values[start], start, end))
            start = end
    return tuple(spans)


def from_spans(spans: Iterable[Span]) -> list[int]:
    return [value for value, start, end in spans for _ in range(end - start)]
