"""Between rollouts and the trainer: slots bound what is in flight, groups leave in the order of the task stream.

Groups running + buffered + in training never exceed (max_staleness + 1) x groups_per_step. Every exit of a group frees
its slot, so nothing leaks and nothing has to be restored.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec

from molt_sdk.types import TrajectoryGroup


class Buffer:
    """Finished groups by stream position, and the slots of those that are not trained yet."""

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        self._free = (max_staleness + 1) * groups_per_step
        self._max_staleness = max_staleness
        self._changed = asyncio.Condition()
        self._finished: dict[int, TrajectoryGroup | None] = {}
        self._next = 0
        self._ended_at: int | None = None
        self.dropped: Counter[str] = Counter()
        """Trajectories and groups that were not trained, by reason."""

    @property
    def next_position(self) -> int:
        """First position of the task stream that was not taken."""
        return self._next

    def start_at(self, position: int) -> None:
        """Continue a stream whose earlier positions were taken by an earlier run."""
        self._next = position

    @property
    def waiting(self) -> int:
        """Finished groups that wait for their turn."""
        return sum(group is not None for group in self._finished.values())

    async def acquire(self) -> None:
        """Wait for a slot; called before a group starts."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._free > 0)
            self._free -= 1

    async def release(self, groups: int) -> None:
        """Free the slots of groups that left training."""
        async with self._changed:
            self._free += groups
            self._changed.notify_all()

    async def put(self, group: TrajectoryGroup) -> None:
        """A finished group; one without a scored trajectory is dropped and frees its slot at once."""
        async with self._changed:
            if group.scored:
                self._finished[group.position] = group
            else:
                self._drop(group.position, "group without a scored trajectory")
            self._changed.notify_all()

    async def end(self, position: int) -> None:
        """The stream has no group at ``position`` or later."""
        async with self._changed:
            self._ended_at = position
            self._changed.notify_all()

    async def take(self, count: int, version: int) -> list[TrajectoryGroup]:
        """The next ``count`` groups in stream order, fewer only at the end of the stream.

        The sweep at the trainer's door: trajectories whose oldest token is more than ``max_staleness`` versions behind
        ``version`` are dropped here, whatever the slots have promised. A cancelled call takes nothing.
        """
        taken: list[TrajectoryGroup] = []
        async with self._changed:
            try:
                while len(taken) < count:
                    await self._changed.wait_for(lambda: self._next in self._finished or self._at_end)
                    if self._at_end:
                        break
                    group = self._finished.pop(self._next)
                    self._next += 1
                    if group is not None:
                        fresh = self._sweep(group, version)
                        if fresh is not None:
                            taken.append(fresh)
            except BaseException:
                self._give_back(taken)
                raise
        return taken

    @property
    def _at_end(self) -> bool:
        return self._ended_at is not None and self._next >= self._ended_at

    def _give_back(self, taken: list[TrajectoryGroup]) -> None:
        """Undo a take: the groups are in their places again, what was dropped between them stays dropped."""
        if taken:
            first = taken[0].position
            self._finished |= dict.fromkeys(range(first, self._next)) | {group.position: group for group in taken}
            self._next = first

    def _sweep(self, group: TrajectoryGroup, version: int) -> TrajectoryGroup | None:
        fresh = tuple(
            t
            for t in group.trajectories
            if t.oldest_version is None or version - t.oldest_version <= self._max_staleness
        )
        stale = len(group.trajectories) - len(fresh)
        if not stale:
            return group
        self.dropped["stale trajectory"] += stale
        swept = msgspec.structs.replace(group, trajectories=fresh)
        if swept.scored:
            return swept
        self.dropped["stale group"] += 1
        self._free += 1
        self._changed.notify_all()
        return None

    def _drop(self, position: int, reason: str) -> None:
        self._finished[position] = None
        self.dropped[reason] += 1
        self._free += 1
