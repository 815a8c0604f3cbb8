"""From groups to what one forward pass computes: rows with advantages, then forests that hold a shared prefix once.

A forest holds the rows of one micro-batch as a trie: one node per distinct prefix, in depth-first order; a node's
position is its depth. Sorting rows by their tokens puts every trie into that order, so building one is a scan with the
common prefix of neighbours. Without sharing ("chain"), each row is a path of its own and all else stays the same.

A row's last trained token, and what follows it, needs no node: nothing is predicted from it.

Shapes: N nodes, K nodes whose logits are needed, R distinct (node, temperature) pairs, E trained tokens.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, get_origin

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from molt_sdk.errors import TrainingError
from molt_sdk.types import Sample, Trajectory, TrajectoryGroup
from trainer_backend.config import Advantage

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class Row(Struct, frozen=True, kw_only=True):
    """One sample with what to think of it. All arrays have shape [tokens]; only trained positions of the last three
    (and of ``turn_ids``) mean anything."""

    trajectory_id: str
    token_ids: Ints
    trained: NDArray[np.bool_]
    turn_ids: Ints
    rollout_logprobs: Floats
    temperatures: Floats
    advantages: Floats

    @property
    def inputs(self) -> Ints:
        """The tokens from which a trained token is predicted: all before the last trained one."""
        at = np.flatnonzero(self.trained)
        return self.token_ids[: at[-1]] if len(at) else self.token_ids[:0]

    @property
    def trained_tokens(self) -> int:
        return int(self.trained.sum())

    @property
    def has_signal(self) -> bool:
        """Whether any trained token has an advantage other than 0."""
        return bool(self.advantages[self.trained].any())


class Forest(Struct, frozen=True, kw_only=True):
    """One micro-batch. See the module docstring for the letters."""

    token_ids: Ints
    """[N]"""
    positions: Ints
    """[N] depth of each node in its tree, 0 at a root."""
    kept_nodes: Ints
    """[K] nodes with a trained child, ascending: the only places where logits are needed."""
    pair_kept: Ints
    """[R] index into ``kept_nodes``; (pair_kept, pair_temperature) ascending."""
    pair_temperature: Floats
    """[R]"""
    target_pair: Ints
    """[E] index of the pair whose distribution a trained token was sampled from, ascending."""
    target_token: Ints
    """[E]"""
    rollout_logprobs: Floats
    """[E]"""
    advantages: Floats
    """[E]"""
    row_nodes: tuple[Ints, ...]
    """The path of each row: node index at each of its inputs, ascending."""
    flat_tokens: int
    """Sum of the rows' inputs: what N would be without sharing."""


def make_rows(groups: Iterable[TrajectoryGroup], advantage: Advantage) -> list[Row]:
    """Rows of all scored trajectories, one per sample.

    The unit of comparison is (group, agent): one reward per *trajectory* that has turns of that agent, however many
    turns; its advantage goes to every token of those turns. Trajectories without trained tokens still count in the
    comparison. Raises TrainingError for a reward, advantage, logprob or temperature that cannot be trained on.
    """
    rows: list[Row] = []
    for group in groups:
        scored = group.scored
        agents = dict.fromkeys(agent for trajectory in scored for agent in trajectory.agents)
        by_agent = {agent: _advantages(scored, agent, advantage) for agent in agents}
        for index, trajectory in enumerate(scored):
            of_turn = np.array([by_agent[turn.agent][index] for turn in trajectory.turns], dtype=np.float32)
            rows += [make_row(sample, of_turn) for sample in trajectory.samples()]
    return rows


def _advantages(scored: Sequence[Trajectory], agent: str, advantage: Advantage) -> dict[int, float]:
    """Advantage by index in ``scored``, of those that have turns of the agent."""
    rewards: dict[int, float] = {}
    for index, trajectory in enumerate(scored):
        if agent not in trajectory.agents:
            continue
        reward = trajectory.agent_reward(agent)
        if reward is None or not math.isfinite(reward):
            raise TrainingError(
                f"trajectory {trajectory.id}: the reward of agent {agent!r} is {reward!r}; a scored trajectory needs a "
                "finite reward. Mark it as failed instead of scored"
            )
        rewards[index] = reward
    return dict(zip(rewards, advantage(list(rewards.values())), strict=True))


def make_row(sample: Sample, advantage_of_turn: Floats) -> Row:
    """Attach advantages ([turns], by turn id) to a sample and check every trained token of it."""
    where = f"trajectory {sample.trajectory_id}"
    token_ids = np.frombuffer(sample.token_ids_i32, dtype=np.int32).astype(np.int64)
    trained = np.frombuffer(sample.loss_mask_u8, dtype=np.uint8).astype(np.bool_)
    turn_ids = np.array(sample.turn_ids, dtype=np.int64)
    rollout_logprobs = np.frombuffer(sample.logprobs_f32, dtype=np.float32)
    temperatures = np.frombuffer(sample.temperatures_f32, dtype=np.float32)
    lengths = [len(values) for values in (token_ids, trained, turn_ids, rollout_logprobs, temperatures)]
    if len(set(lengths)) != 1:
        raise TrainingError(
            f"{where}: a sample has {lengths[0]} token ids, but loss mask, turn ids, logprobs and temperatures of "
            f"lengths {lengths[1:]}; all need one entry per token. Certify the trajectory to see what is missing"
        )
    outside = trained & ((turn_ids < 0) | (turn_ids >= len(advantage_of_turn)))
    _refuse(outside, turn_ids, turn_ids, token_ids, where, "turn id", "one of the trajectory's turns")
    advantages = np.zeros(len(token_ids), dtype=np.float32)
    advantages[trained] = advantage_of_turn[turn_ids[trained]]
    orphan = trained & (np.arange(len(token_ids)) == 0)
    _refuse(orphan, token_ids, turn_ids, token_ids, where, "first token of the row, id", "context, never sampled")
    for name, values, rule, bad in (
        ("rollout logprob", rollout_logprobs, "finite", ~np.isfinite(rollout_logprobs)),
        ("advantage", advantages, "finite", ~np.isfinite(advantages)),
        ("temperature", temperatures, "finite and at least 1e-30", ~(temperatures >= 1e-30) | np.isinf(temperatures)),
    ):
        _refuse(trained & bad, values, turn_ids, token_ids, where, name, rule)
    return Row(
        trajectory_id=sample.trajectory_id,
        token_ids=token_ids,
        trained=trained,
        turn_ids=turn_ids,
        rollout_logprobs=rollout_logprobs,
        temperatures=temperatures,
        advantages=advantages,
    )


def _refuse(
    bad: NDArray[np.bool_],
    values: Ints | Floats,
    turn_ids: Ints,
    token_ids: Ints,
    where: str,
    name: str,
    rule: str,
) -> None:
    """Raise for the first marked position, naming trajectory, turn and token."""
    if bad.any():
        at = int(bad.argmax())
        raise TrainingError(
            f"{where}, turn {turn_ids[at]}, position {at} (token id {token_ids[at]}): {name} {values[at]}; the {name} "
            f"of a trained token must be {rule}. Leave the trajectory out of the batch, or mask its turn"
        )


class CostModel(Struct, frozen=True, kw_only=True):
    """Work of one forward and backward pass, in units of what the linear layers of all blocks do for one node."""

    attention: float
    """Per node, for each node that it sees: depth + 1 of them."""
    head: float
    """Per trained token."""


def cost_model(*, hidden: int, layers: int, attention_width: int, vocab: int, parameters: int) -> CostModel:
    """The usual count of multiply-adds (arXiv 2001.08361, table 1; arXiv 2204.02311, appendix B).

    ``parameters``: of all decoder blocks, those of idle experts left out, so 2 * parameters FLOPs per node forward.
    ``attention_width``: query heads * head dimension. Scores and weighted values take 4 * layers * attention_width
    FLOPs for each node seen; the head takes 2 * hidden * vocab. Backward doubles all of them alike.
    """
    return CostModel(attention=2 * layers * attention_width / parameters, head=hidden * vocab / parameters)


Plan = list[list[list[Row]]]
"""[rank][micro-batch] -> rows. Ranks may differ in their number of micro-batches."""


def plan(
    rows: Sequence[Row], *, ranks: int, max_tokens: int, share: bool, cost: CostModel, padded: bool = False
) -> Plan:
    """Spread rows that have trained tokens over ranks, and those of a rank over forward passes of at most
    ``max_tokens`` nodes; a longer row gets a pass of its own.

    Rows are sorted by their tokens, so that rows with a common prefix are neighbours, and cut into runs. A cut through
    a tree computes the common prefix on both sides: more work, the same result. Ranks get runs whose largest cost is
    the lowest possible, micro-batches runs whose largest number of nodes is, at the lowest number of passes. Because
    all ranks take part in each pass and wait for the slowest, a rank that needs fewer passes is cut into as many as
    the others where that saves time, and each rank begins with its costliest micro-batch. A rank has no rows only if
    there are fewer rows than ranks.

    ``padded``: a micro-batch is a rectangle, rows * longest row nodes, so rows are sorted by length; nothing is shared.
    The plan depends on the set of rows alone, not on their order.
    """
    if padded and share:
        raise ValueError("padded rows cannot share prefixes")
    ordered = sorted(rows, key=(lambda row: (-len(row.inputs), _sort_key(row))) if padded else _sort_key)
    inputs = [row.inputs for row in ordered]
    lengths = np.array([len(tokens) for tokens in inputs], dtype=np.int64)
    shared = np.zeros_like(lengths)
    if share:
        shared[1:] = [common_prefix(left, right) for left, right in itertools.pairwise(inputs)]

    def until(depth: Ints) -> NDArray[np.float64]:
        """Cost of the nodes from the root to a depth."""
        return depth + cost.attention * (depth * (depth + 1) / 2)

    head = cost.head * np.array([row.trained_tokens for row in ordered], dtype=np.float64)
    work = _Line(until(lengths) - until(shared) + head, until(shared))
    nodes = _Rectangles(lengths) if padded else _Line(lengths - shared, shared)
    of_rank = _cut(work, (0, len(ordered)), ranks, math.inf)
    fewest = [len(_runs(nodes, run, max_tokens)) for run in of_rank]
    passes = max(fewest, default=0)
    # Ranks that need all passes first: they say what a pass costs the others at least.
    chosen: dict[int, list[Run]] = {}
    slowest = np.zeros(passes)
    for rank in sorted(range(len(of_rank)), key=lambda rank: -fewest[rank]):
        options = []
        for parts in dict.fromkeys((passes, fewest[rank])):
            runs = sorted(_cut(nodes, of_rank[rank], parts, max_tokens), key=lambda run: -work.cost(*run))
            costs = np.array([work.cost(*run) for run in runs] + [0.0] * (passes - len(runs)))
            options.append((np.maximum(slowest, costs), runs))
        slowest, chosen[rank] = min(options, key=lambda option: float(option[0].sum()))
    return [[ordered[start:stop] for start, stop in chosen.get(rank, [])] for rank in range(ranks)]


Run = tuple[int, int]
"""Start and stop in a line of rows."""


class _Line:
    """Rows one after the other: what each adds to the run it is in, and what it takes ``again`` where a run begins."""

    def __init__(self, new: NDArray[Any], again: NDArray[Any]) -> None:
        self._sums: list[float] = [0.0, *np.cumsum(new, dtype=np.float64).tolist()]
        self._again: list[float] = again.tolist()

    def cost(self, start: int, stop: int) -> float:
        return self._sums[stop] - self._sums[start] + self._again[start]

    def furthest(self, start: int, most: float) -> int:
        """Stop of the longest run from ``start`` that costs at most ``most``."""
        return bisect.bisect_right(self._sums, most + self._sums[start] - self._again[start], lo=start) - 1


class _Rectangles:
    """Rows from long to short, each padded to the first of its run."""

    def __init__(self, lengths: Ints) -> None:
        self._lengths: list[int] = lengths.tolist()

    def cost(self, start: int, stop: int) -> float:
        return (stop - start) * self._lengths[start]

    def furthest(self, start: int, most: float) -> int:
        return start + int(most // self._lengths[start])


def _cut(line: _Line | _Rectangles, run: Run, parts: int, most: float) -> list[Run]:
    """Cut a run into ``parts`` (one row each at least), such that the costliest part costs the least possible. The
    parts must be enough for ``most`` per part, which is kept to then (if only by rows that are alone)."""
    start, stop = run
    if start == stop:
        return []
    parts = min(parts, stop - start)
    low, high = 0.0, min(most, line.cost(start, stop))
    # A run never costs less than a run inside it, so taking as many rows as fit needs the fewest runs.
    for _ in range(32):  # exact for nodes: their numbers are whole and far below 2 ** 32
        middle = (low + high) / 2
        if len(_runs(line, run, middle)) <= parts:
            high = middle
        else:
            low = middle
    return _runs(line, run, high, parts)


def _runs(line: _Line | _Rectangles, run: Run, most: float, parts: int = 1) -> list[Run]:
    """From the left, as many rows as cost at most ``most``, or one; but leave a row for each of the ``parts``."""
    start, stop = run
    found: list[Run] = []
    while start < stop:
        left_over = max(0, parts - len(found) - 1)
        end = max(start + 1, min(line.furthest(start, most), stop - left_over))
        found.append((start, end))
        start = end
    return found


def _sort_key(row: Row) -> tuple[bytes, str, int]:
    # Big-endian ids compare as bytes in the same order as the sequences of ids. A turn is trained in one row only.
    at = np.flatnonzero(row.trained)
    return row.token_ids[: at[-1]].astype(">i4").tobytes(), row.trajectory_id, int(row.turn_ids[at[-1]])


def encode_array(value: Any) -> tuple[str, memoryview]:
    """``enc_hook`` of msgspec for messages that hold rows: an array is (dtype, its bytes). Anything else is a
    mistake of the caller, and NotImplementedError is how msgspec's hooks say that they do not know a type."""
    if isinstance(value, np.ndarray) and value.ndim == 1 and not value.dtype.hasobject:
        return value.dtype.str, np.ascontiguousarray(value).data.cast("B")
    raise NotImplementedError(f"{type(value).__name__} has no place in a message")


def decode_array(kind: Any, value: Any) -> NDArray[Any]:
    """``dec_hook`` of msgspec for the same: the bits that were sent, not writable."""
    if (get_origin(kind) or kind) is np.ndarray:
        dtype, data = value
        return np.frombuffer(data, dtype=np.dtype(dtype))
    raise NotImplementedError(f"{kind} has no place in a message")


def common_prefix(left: Ints, right: Ints) -> int:
    """Number of leading positions at which two rows agree."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    return int(different.argmax()) if different.any() else length


def build_forest(rows: Sequence[Row], *, share: bool) -> Forest:
    """Lay out one micro-batch of rows in the order of :func:`plan`."""
    inputs = [row.inputs for row in rows]
    path: Ints = np.zeros(0, dtype=np.int64)
    paths, tokens, positions, parents, targets = [], [], [], [], []
    nodes = 0
    for index, row in enumerate(rows):
        shared = common_prefix(inputs[index - 1], inputs[index]) if share and index else 0
        new = len(inputs[index]) - shared
        path = np.concatenate([path[:shared], np.arange(nodes, nodes + new)])
        nodes += new
        paths.append(path)
        tokens.append(inputs[index][shared:])
        positions.append(np.arange(shared, shared + new))
        at = np.flatnonzero(row.trained)
        parents.append(path[at - 1])
        targets.append((row.token_ids[at], row.temperatures[at], row.rollout_logprobs[at], row.advantages[at]))
    target_parent = np.concatenate(parents)
    target_token, temperature, logprobs, advantages = (np.concatenate(values) for values in zip(*targets, strict=True))
    order = np.lexsort((temperature, target_parent))
    pairs = np.stack([target_parent[order], temperature[order].astype(np.float64)], axis=1)
    first = np.ones(len(pairs), dtype=np.bool_)
    first[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
    kept_nodes, pair_kept = np.unique(target_parent[order][first], return_inverse=True)
    return Forest(
        token_ids=np.concatenate(tokens),
        positions=np.concatenate(positions),
        kept_nodes=kept_nodes,
        pair_kept=pair_kept,
        pair_temperature=temperature[order][first],
        target_pair=np.cumsum(first) - 1,
        target_token=target_token[order],
        rollout_logprobs=logprobs[order],
        advantages=advantages[order],
        row_nodes=tuple(paths),
        flat_tokens=sum(map(len, inputs)),
    )
