"""Between rollouts and trainer: order, slots that never leak, and the bound on staleness."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import molt_sdk as molt
from molt_sdk.buffer import Buffer
from molt_sdk.packed import pack_floats, pack_ints

pytestmark = pytest.mark.anyio

Member = tuple[float | None, int]
"""Reward and oldest version of a trajectory."""


def turn(version: int, *, trainable: bool = True) -> molt.Turn:
    return molt.Turn(
        id=0,
        parent=None,
        fork_reason="first call",
        agent="main",
        trainable=trainable,
        new_messages=[],
        tools=(),
        sampling=molt.SamplingParams(),
        message={"role": "assistant", "content": ""},
        finish_reason="stop",
        context_i32=pack_ints([1]),
        completion_i32=pack_ints([2, 3]),
        logprobs_f32=pack_floats([-1.0, -1.0]),
        version_spans=((version, 0, 1), (version + 1, 1, 2)),  # the oldest token decides
    )


def group(position: int, *members: Member) -> molt.TrajectoryGroup:
    task = molt.Task("q")
    trajectories = tuple(
        molt.Trajectory(id=f"{position}.{i}", task=task, turns=(turn(version),), reward=reward)
        for i, (reward, version) in enumerate(members)
    )
    return molt.TrajectoryGroup(task=task, position=position, epoch=0, trajectories=trajectories)


def positions(groups: list[molt.TrajectoryGroup]) -> list[int]:
    return [g.position for g in groups]


async def attempt(awaitable: Awaitable[Any]) -> tuple[bool, Any]:
    """Whether it can be done now, and its result; what cannot be done now is cancelled."""
    task = asyncio.ensure_future(awaitable)
    for _ in range(10):
        await asyncio.sleep(0)
    if task.done():
        return True, task.result()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return False, None


# --- by hand ----------------------------------------------------------------------------------------------------------


async def test_groups_leave_in_the_order_of_the_stream() -> None:
    buffer = Buffer(groups_per_step=2, max_staleness=1)
    for position in (3, 1, 2):
        await buffer.put(group(position, (1.0, 0)))
    assert await attempt(buffer.take(2, 0)) == (False, None)
    assert (buffer.waiting, buffer.next_position) == (3, 0)
    await buffer.put(group(0, (1.0, 0)))
    assert positions(await buffer.take(2, 0)) == [0, 1]
    assert positions(await buffer.take(2, 0)) == [2, 3]
    assert (buffer.waiting, buffer.next_position) == (0, 4)


async def test_a_waiting_take_is_woken_by_the_group_that_it_waits_for() -> None:
    buffer = Buffer(2, 0)
    take = asyncio.create_task(buffer.take(2, 0))
    await asyncio.sleep(0)
    await buffer.put(group(1, (1.0, 0)))
    await buffer.put(group(0, (1.0, 0)))
    assert positions(await take) == [0, 1]


@pytest.mark.parametrize(("max_staleness", "slots"), [(0, 3), (1, 6), (2, 9)])
async def test_slots_bound_what_is_under_way(max_staleness: int, slots: int) -> None:
    """Running + buffered + in training <= (max_staleness + 1) * groups_per_step."""
    buffer = Buffer(3, max_staleness)
    for _ in range(slots):
        assert (await attempt(buffer.acquire()))[0]
    assert not (await attempt(buffer.acquire()))[0]
    for position in range(3):
        await buffer.put(group(position, (1.0, 0)))
    assert not (await attempt(buffer.acquire()))[0]  # buffered
    await buffer.take(3, 0)
    assert not (await attempt(buffer.acquire()))[0]  # in training
    await buffer.release(3)
    for _ in range(3):
        assert (await attempt(buffer.acquire()))[0]
    assert not (await attempt(buffer.acquire()))[0]


async def test_groups_that_cannot_be_trained_free_their_slots_at_once() -> None:
    """F83, F85: nothing waits for them and they use up nothing."""
    buffer = Buffer(2, 1)
    for _ in range(4):
        await buffer.acquire()
    for position in range(4):
        await buffer.put(group(position, (None, 0), (None, 0)))
    for _ in range(4):
        assert (await attempt(buffer.acquire()))[0]
    assert buffer.dropped == {"group without a scored trajectory": 4}
    await buffer.put(group(4, (1.0, 0)))
    await buffer.put(group(5, (1.0, 0)))
    assert positions(await buffer.take(2, 0)) == [4, 5]


async def test_the_sweep_drops_what_is_older_than_the_bound_by_its_oldest_token() -> None:
    """F88: what is left of a group is still trained; a group without a scored rest is dropped."""
    buffer = Buffer(2, 1)
    for _ in range(4):
        await buffer.acquire()
    await buffer.put(group(0, (1.0, 4), (0.0, 3), (0.5, 5)))  # at version 5 the bound is 4
    await buffer.put(group(1, (1.0, 3), (None, 5)))
    await buffer.put(group(2, (1.0, 5), (None, 0)))
    taken = await buffer.take(2, 5)
    assert [(g.position, [t.id for t in g]) for g in taken] == [(0, ["0.0", "0.2"]), (2, ["2.0"])]
    assert buffer.dropped == {"stale trajectory": 3, "stale group": 1}
    assert (await attempt(buffer.acquire()))[0]  # the slot of group 1
    assert not (await attempt(buffer.acquire()))[0]


async def test_tokens_that_are_not_trained_may_be_of_any_age() -> None:
    buffer = Buffer(1, 0)
    trajectory = molt.Trajectory(id="x", task=molt.Task("q"), turns=(turn(0, trainable=False), turn(9)), reward=1.0)
    await buffer.put(molt.TrajectoryGroup(task=trajectory.task, position=0, epoch=0, trajectories=(trajectory,)))
    assert positions(await buffer.take(1, 9)) == [0]


async def test_at_the_end_of_the_stream_the_last_groups_are_fewer() -> None:
    buffer = Buffer(2, 1)
    await buffer.put(group(0, (1.0, 0)))
    take = asyncio.create_task(buffer.take(2, 0))
    await asyncio.sleep(0)
    await buffer.end(1)
    assert positions(await take) == [0]
    assert await buffer.take(2, 0) == []


async def test_a_cancelled_take_takes_nothing() -> None:
    buffer = Buffer(3, 0)
    await buffer.put(group(0, (1.0, 0)))
    await buffer.put(group(1, (None, 0)))
    await buffer.put(group(2, (1.0, 0)))
    assert not (await attempt(buffer.take(3, 0)))[0]
    assert (buffer.waiting, buffer.next_position) == (2, 0)
    assert positions(await buffer.take(2, 0)) == [0, 2]


async def test_a_resumed_stream_starts_where_it_was_left() -> None:
    buffer = Buffer(1, 0)
    buffer.start_at(7)
    await buffer.put(group(7, (1.0, 0)))
    assert positions(await buffer.take(1, 0)) == [7]


# --- any history ------------------------------------------------------------------------------------------------------


class Histories(RuleBasedStateMachine):
    """Whatever happens in whatever order: every slot comes back, every group leaves once and in order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()

    def now(self, awaitable: Any) -> tuple[bool, Any]:
        return self.loop.run_until_complete(attempt(awaitable))

    @initialize(groups_per_step=st.integers(1, 3), max_staleness=st.integers(0, 2))
    def start(self, groups_per_step: int, max_staleness: int) -> None:
        self.capacity = (max_staleness + 1) * groups_per_step
        self.max_staleness = max_staleness
        self.buffer = Buffer(groups_per_step, max_staleness)
        self.version = 0
        self.started = 0
        self.running: list[int] = []
        self.finished: dict[int, list[Member] | None] = {}
        self.training = 0
        self.next = 0
        self.end: int | None = None

    @property
    def used(self) -> int:
        return len(self.running) + sum(g is not None for g in self.finished.values()) + self.training

    @rule()
    def acquire(self) -> None:
        if self.end is not None:
            return
        possible, _ = self.now(self.buffer.acquire())
        assert possible == (self.used < self.capacity)
        if possible:
            self.running.append(self.started)
            self.started += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(self.running))
        version = st.integers(max(0, self.version - 3), self.version)
        members = data.draw(st.lists(st.tuples(st.sampled_from([None, 0.0, 1.0]), version), min_size=1, max_size=3))
        self.running.remove(position)
        scored = any(reward is not None for reward, _ in members)
        self.finished[position] = members if scored else None
        self.now(self.buffer.put(group(position, *members)))

    @rule()
    def end_stream(self) -> None:
        if self.end is None and self.started > 6:
            self.end = self.started
            self.now(self.buffer.end(self.end))

    @rule(count=st.integers(1, 3))
    def take(self, count: int) -> None:
        expected, waits, position = [], False, self.next
        while len(expected) < count and position != self.end:
            if position not in self.finished:
                waits = True
                break
            members = self.finished[position]
            if members is not None:
                fresh = [m for m in members if self.version - m[1] <= self.max_staleness]
                if any(reward is not None for reward, _ in fresh):
                    expected.append((position, fresh))
                else:
                    self.finished[position] = None
            position += 1
        possible, taken = self.now(self.buffer.take(count, self.version))
        assert possible == (not waits)
        if possible:
            assert [(g.position, [(t.reward, t.oldest_version) for t in g]) for g in taken] == expected
            for gone in range(self.next, position):
                del self.finished[gone]
            self.next = position
            self.training += len(expected)

    @precondition(lambda self: self.training)
    @rule()
    def train(self) -> None:
        self.version += 1
        self.now(self.buffer.release(self.training))
        self.training = 0

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            for position in list(self.running):
                self.now(self.buffer.put(group(position, (None, 0))))
            self.now(self.buffer.end(self.started))
            possible, taken = self.now(self.buffer.take(1000, self.version))
            assert possible
            self.now(self.buffer.release(len(taken) + self.training))
            free = 0
            while self.now(self.buffer.acquire())[0]:
                free += 1
            assert free == self.capacity
        self.loop.close()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
