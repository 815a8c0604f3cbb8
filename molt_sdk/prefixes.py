"""Which prompts begin alike: a radix tree over the token streams (prompt + completion) of a trajectory's turns."""

from __future__ import annotations

from molt_sdk.types import Turn


class PrefixTree:
    """Finds, for each turn in the order of the record, the earlier turn with which it shares most.

    Edges hold bytes of the turns themselves, never copies, and are compared as bytes. One step of a search is one edge,
    and what is compared is no longer than what is added: a trajectory takes time linear in the size of its turns,
    however many of them are roots.
    """

    def __init__(self) -> None:
        self._top = _Node(b"", 0, 0, -1)
        self._ends: list[_Node] = []

    def add(self, turn: Turn) -> tuple[int, int]:
        """Take up the next turn; its parent, if any, must be in the tree.

        Returns (earlier turn, tokens): its own part of the prompt (``context_i32``) begins with as many tokens as that
        turn's prompt + completion has in the same place. (-1, 0) if not one token is the same.
        """
        known = turn.parent is not None and 0 <= turn.parent < len(self._ends)
        start = self._ends[turn.parent] if known and turn.parent is not None else self._top
        number = len(self._ends)
        middle, other, same = self._insert(start, turn.context_i32, number)
        end, _, _ = self._insert(middle, turn.completion_i32, number)
        self._ends.append(end)
        return (other, same // 4) if same >= 4 else (-1, 0)

    def _insert(self, node: _Node, data: bytes, turn: int) -> tuple[_Node, int, int]:
        """(node where ``data`` ends, turn that had most of it, bytes that this turn had)"""
        at = 0
        while at < len(data):
            edge = node.children.get(data[at])
            if edge is None:
                new = node.children[data[at]] = _Node(data, at, len(data), turn)
                return new, node.turn, at
            same = _common(edge.data, edge.start, edge.end, data, at)
            if edge.start + same < edge.end:  # part of the edge: a node goes in between
                upper = _Node(edge.data, edge.start, edge.start + same, edge.turn)
                edge.start += same
                upper.children[edge.data[edge.start]] = edge
                node.children[data[at]] = edge = upper
            at += same
            node = edge
        return node, node.turn, at


class _Node:
    """End of an edge that reads ``data[start:end]``; ``turn`` was the first whose stream passes here."""

    __slots__ = ("children", "data", "end", "start", "turn")

    def __init__(self, data: bytes, start: int, end: int, turn: int) -> None:
        self.data = data
        self.start = start
        self.end = end
        self.turn = turn
        self.children: dict[int, _Node] = {}


def _common(a: bytes, start: int, end: int, b: bytes, at: int) -> int:
    """Length of the common prefix of a[start:end] and b[at:], by bisection."""
    low, high = 0, min(end - start, len(b) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if a[start + low : start + middle] == b[at + low : at + middle]:
            low = middle
        else:
            high = middle - 1
    return low
