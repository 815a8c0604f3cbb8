"""Keeps the event loop responsive when thousands of trajectories become ready at once."""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Lets ``per_tick`` passers through in one iteration of the event loop; the others wait their turn in order.

    Rendering and recording a call takes a fraction of a millisecond of pure Python. asyncio runs everything that is
    ready before it looks at timers and sockets again, so 2,000 ready calls would stall them for a second.
    """

    def __init__(self, per_tick: int = 32) -> None:
        self._per_tick = per_tick
        self._passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._reset_planned = False

    async def turn(self) -> None:
        """Return at once if this iteration has room, else in a later one."""
        if self._passed < self._per_tick and not self._waiting:
            self._passed += 1
            self._plan_reset()
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._plan_reset()
        await future

    def _plan_reset(self) -> None:
        if not self._reset_planned:
            self._reset_planned = True
            asyncio.get_running_loop().call_soon(self._reset)

    def _reset(self) -> None:
        self._reset_planned = False
        self._passed = 0
        while self._waiting and self._passed < self._per_tick:
            future = self._waiting.popleft()
            if not future.done():  # a cancelled passer takes no room
                future.set_result(None)
                self._passed += 1
        if self._passed:
            self._plan_reset()
