"""A policy: the root module around a Hugging Face causal LM, and the layouts in which it may compute micro-batches.

A *tree* computes each distinct prefix of the micro-batch once, a *chain* is the same without sharing, both as one
packed row in the attention of ``attention.py``; *padded* rows are a batch in the model's own attention, right for any
causal architecture. Which of them a model computes correctly is measured, see :func:`choose_layout`. Letters in shapes
as in ``batch.py``.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from msgspec import Struct, structs
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from molt_sdk.errors import TrainingError
from trainer_backend.attention import TREE_ATTENTION, TreeLayout, tree_attention, tree_layout
from trainer_backend.batch import Forest, Ints, Row, build_forest, common_prefix
from trainer_backend.head import IDENTITY, LogitTransform, TargetStats, target_stats
from trainer_backend.loading import quiet_transformers
from trainer_backend.parallel import max_over_ranks

Layout: TypeAlias = Literal["tree", "chain", "padded"]
WantedLayout: TypeAlias = Literal["auto", "tree", "chain"]

SDPA, EAGER = "sdpa", "eager"
NOISE_FACTOR, NOISE_FLOOR = 2.5, 1e-5
"""A layout may move log-probabilities this many times further than the noise of ``choose_layout``, plus this many nats.
In bfloat16, right layouts of the tested architectures move them up to 1.6 times as far, wrong ones 5 to 100 times."""
MAX_WINDOW = 4096
"""Longest attention window, in tokens, that rows of the layout check go beyond."""
FORK, TWIG = 16, 8
"""Tokens of a branch of the layout check before it forks again, and after."""
BRANCH = FORK + TWIG
MIN_TRUNK = 8
START = 3
"""First tokens of a row or branch that the layout check looks at by themselves."""
COMPARED = 32
"""Random tokens whose log-probability the layout check compares at each position."""


def has_varlen_kernel(device: torch.device) -> bool:
    """Whether a kernel for attention over sequences of any length may exist; the layout check tries it."""
    return device.type == "cuda"


class Inputs(Struct, frozen=True):
    """One micro-batch of a policy. (Neither pytree nor dataclass, on purpose: FSDP2 would round the temperatures to the
    compute dtype.) B rows of L tokens, or one row of all nodes."""

    input_ids: Tensor
    """[B, L]"""
    position_ids: Tensor | None
    """[1, L] of a packed row; None where each row starts at 0."""
    tree: TreeLayout | None
    """Of a packed row."""
    place: Tensor
    """[R] where in the flattened [B * L] each (node, temperature) pair is."""
    temperature: Tensor
    """[R] float32"""
    pair: Tensor
    """[E] ascending index of the pair that a target was drawn from."""
    token: Tensor
    """[E]"""


def make_inputs(forest: Forest, layout: Layout, device: torch.device) -> Inputs:
    """A micro-batch in the given layout; a ``chain`` is a forest built without sharing. ``padded`` puts each row of the
    forest in a row of its own, filled up at its end."""
    if layout == "padded":
        length = max(map(len, forest.row_nodes))
        input_ids = np.zeros((len(forest.row_nodes), length), dtype=np.int64)
        place = np.empty(len(forest.token_ids), dtype=np.int64)
        for index, path in enumerate(forest.row_nodes):
            input_ids[index, : len(path)] = forest.token_ids[path]
            place[path] = np.arange(len(path)) + index * length
        position_ids = tree = None
    else:
        input_ids, place = forest.token_ids[None], np.arange(len(forest.token_ids))
        position_ids = torch.from_numpy(forest.positions).to(device)[None]
        tree = tree_layout(forest, device, varlen=has_varlen_kernel(device))
    return Inputs(
        input_ids=torch.from_numpy(input_ids).to(device),
        position_ids=position_ids,
        tree=tree,
        place=torch.from_numpy(place[forest.kept_nodes[forest.pair_kept]]).to(device),
        temperature=torch.from_numpy(forest.pair_temperature).to(device),
        pair=torch.from_numpy(forest.target_pair).to(device),
        token=torch.from_numpy(forest.target_token).to(device),
    )


class Policy(nn.Module):
    """A Hugging Face causal LM that computes log-probabilities of given tokens instead of logits. The root module for
    FSDP2: parameters are touched only inside its forward. Always in eval mode, as the sampler is: no dropout."""

    def __init__(self, causal_lm: Any, *, fp32_head: bool = False) -> None:
        """``causal_lm``: a ``PreTrainedModel`` with a language model head. Raises TrainingError for one without."""
        from transformers import AttentionInterface, PreTrainedModel

        super().__init__()
        base = causal_lm.base_model
        if base is causal_lm:  # where the class names its base model wrongly
            base = next((child for child in causal_lm.children() if isinstance(child, PreTrainedModel)), None)
        head = causal_lm.get_output_embeddings()
        if base is None or not isinstance(getattr(head, "weight", None), Tensor):
            raise TrainingError(f"{type(causal_lm).__name__} has no language model head over a base model to train")
        AttentionInterface.register(TREE_ATTENTION, tree_attention)
        self.causal_lm = causal_lm
        self._parts = base, head  # in a tuple, so as not to be modules a second time
        self.fp32_head = fp32_head
        """Multiply hidden states and head in float32, for samplers that do."""
        self.transform = IDENTITY
        """What the model does to its logits after the head; :func:`choose_layout` finds out."""
        self.varlen = True
        """Use the variable-length attention kernel where the inputs allow it."""
        self.eval()

    @property
    def config(self) -> Any:
        """Of the causal LM."""
        return self.causal_lm.config

    def forward(self, inputs: Inputs, *, reference: bool = False) -> TargetStats:
        """Log-probability and entropy of each target [E]. ``reference``: from the model's own complete forward, logits
        and all, of a single row."""
        if reference:
            return self._own_stats(inputs)
        arguments: dict[str, Any] = {}
        if inputs.tree is not None:
            tree = inputs.tree if self.varlen else structs.replace(inputs.tree, varlen=None)
            arguments = {"position_ids": inputs.position_ids, "tree": tree}
        base, head = self._parts
        hidden = base(input_ids=inputs.input_ids, use_cache=False, **arguments)[0]
        return target_stats(
            hidden.flatten(0, 1).index_select(0, inputs.place).to(head.weight.dtype),
            head.weight,
            getattr(head, "bias", None),
            inputs.temperature,
            inputs.pair,
            inputs.token,
            transform=self.transform,
            fp32=self.fp32_head,
        )

    def _own_stats(self, inputs: Inputs) -> TargetStats:
        logits = self.causal_lm(input_ids=inputs.input_ids, use_cache=False, logits_to_keep=inputs.place).logits[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / inputs.temperature[:, None]
        logprobs = logits.log_softmax(-1)
        entropy = torch.special.entr(logprobs.exp()).sum(-1)
        return TargetStats(logprobs[inputs.pair, inputs.token], entropy[inputs.pair])


class LayoutChoice(Struct, frozen=True, kw_only=True):
    """How a policy computes its micro-batches; see :func:`choose_layout`."""

    layout: Layout
    note: str
    """What costs time because a better layout was refused, with the reason; "" if nothing was."""
    detail: str
    """What the check measured, and how attention is computed."""


def choose_layout(policy: Policy, wanted: WantedLayout, device: torch.device, seed: int = 0) -> LayoutChoice:
    """Find the first of tree, chain and padded rows in which this model computes what its own forward pass computes for
    single rows in eager attention, and set the policy up for it.

    Random rows, longer than any attention window of the model, run through the (sharded) policy in each layout. The
    unit of measure is rounding: how far log-probabilities move when the parts of each decoder block are disturbed in
    the last place. A layout agrees if it moves them at most ``NOISE_FACTOR`` times as far. A collective: all ranks run
    the same passes and decide together. Gathered parameters stay gathered: reshard after.

    Raises TrainingError when ``wanted`` is "tree" and the model cannot, when no layout agrees, and for a model that
    does something unknown to its logits or computes NaN.
    """
    with torch.no_grad(), quiet_transformers():
        check = _Check(policy, device, seed)
        policy.transform = find_transform(policy, device, seed)
        return check.choose(wanted)


class _Check:
    """The passes of :func:`choose_layout`."""

    def __init__(self, policy: Policy, device: torch.device, seed: int) -> None:
        self.policy, self.device = policy, device
        self.name = type(policy.causal_lm).__name__
        vocabulary = policy.causal_lm.get_input_embeddings().num_embeddings
        window, longest_row = attention_window(policy.config)
        trunk = min(window + window // 2 + MIN_TRUNK, longest_row - BRANCH)
        self.unchecked = ""
        if window > MAX_WINDOW or trunk <= window:
            self.unchecked = f"rows longer than its attention window of {window} tokens cannot be checked"
            trunk = MIN_TRUNK
        rows = _random_rows(vocabulary, trunk, seed)
        self.forests = {share: build_forest(rows, share=share) for share in (True, False)}
        self.single = [build_forest([row], share=False) for row in rows[1:]]
        self.compared = _compared(rows)
        self.tokens = torch.from_numpy(np.random.default_rng(seed).integers(vocabulary, size=COMPARED)).to(device)
        self._attend(EAGER)
        self.truth = self._by_itself()
        if self.truth.isnan().any():
            raise TrainingError(f"{self.name} computes NaN for random tokens; its weights are damaged")
        with _disturbed(decoder_blocks(policy), seed):
            self.noise = _distance(self._by_itself(), self.truth)

    def choose(self, wanted: WantedLayout) -> LayoutChoice:
        """Raises TrainingError."""
        packed = [(TREE_ATTENTION, False)]
        if has_varlen_kernel(self.device):
            packed.insert(0, (TREE_ATTENTION, True))
        own = [(SDPA, False), (EAGER, False)]
        candidates: list[tuple[Layout, str, list[tuple[str, bool]]]] = [
            ("tree", "", packed),
            ("chain", "prefixes are not shared in training", packed),
            ("padded", "prefixes are not shared in training and rows are padded to one length", own),
        ]
        refused: list[str] = []
        for layout, cost, attentions in candidates[wanted == "chain" :]:
            failures: list[str] = []
            for attention, varlen in attentions:
                failure = self._failure(layout, attention, varlen)
                if not failure:
                    return LayoutChoice(
                        layout=layout,
                        note=f"{cost}: {self._why(refused)}" if refused else "",
                        detail=f"{layout} in {attention} attention{', varlen' * varlen}; rounding {self.noise:.1e} nats"
                        f"; refused: {'; '.join([*refused, *failures]) or 'nothing'}",
                    )
                failures.append(failure)
            refused.append(f"{layout}: {', '.join(failures)}")
            if wanted == "tree":
                raise TrainingError(f"layout='tree', but then {self._why(refused)}; use layout='auto'")
        raise TrainingError(f"{self._why(refused)}; this architecture cannot be trained here")

    def _why(self, refused: Sequence[str]) -> str:
        return (
            f"{self.name} would not compute what it computes for single rows "
            f"({'; '.join(refused)}; rounding {self.noise:.1e} nats)"
        )

    def _failure(self, layout: Layout, attention: str, varlen: bool) -> str:
        """Why the layout does not compute what single rows give; "" if it does, on every rank."""
        failure = ""
        if self.unchecked and layout != "padded":
            return self.unchecked
        try:
            self.policy.varlen = varlen
            self._attend(attention)
            distance = _distance(self._together(layout), self.truth)
            if not distance <= NOISE_FACTOR * self.noise + NOISE_FLOOR:  # also if it is NaN
                failure = f"differs by {distance:.1e} nats"
        except (TypeError, ValueError, RuntimeError, AttributeError, ImportError, TrainingError) as error:
            # An architecture may refuse a layout anywhere in its code. The message is for the user to see.
            if isinstance(self.policy, FSDPModule):
                self.policy.reset_iter_state()
            failure = f"{type(error).__name__}: {error}"
        failed = max_over_ranks(torch.tensor(float(bool(failure))))
        return failure or ("differs on another rank" if failed.item() else "")

    def _attend(self, attention: str) -> None:
        self.policy.causal_lm.set_attn_implementation(attention)
        if attention != EAGER and self.policy.config.get_text_config()._attn_implementation != attention:
            raise TrainingError("its attention cannot be replaced")

    def _by_itself(self) -> Tensor:
        """Log-probabilities [rows, positions, tokens] in the model's own complete forward, row by row."""
        results = [
            self.policy(self._inputs(forest, "padded", [forest.row_nodes[0][positions]]), reference=True).logprobs
            for forest, positions in zip(self.single, self.compared, strict=True)
        ]
        return torch.stack(results).view(len(results), -1, COMPARED)

    def _together(self, layout: Layout) -> Tensor:
        """The same in one micro-batch."""
        forest = self.forests[layout == "tree"]
        nodes = [path[at] for path, at in zip(forest.row_nodes[1:], self.compared, strict=True)]
        logprobs: Tensor = self.policy(self._inputs(forest, layout, nodes)).logprobs
        return logprobs.view(self.truth.shape)

    def _inputs(self, forest: Forest, layout: Layout, nodes: list[Ints]) -> Inputs:
        """Of the compared tokens at the given nodes of each row."""
        pairs = np.concatenate(nodes)
        targets = len(pairs) * COMPARED
        forest = structs.replace(
            forest,
            kept_nodes=pairs,
            pair_kept=np.arange(len(pairs)),
            pair_temperature=np.ones(len(pairs), dtype=np.float32),
            target_pair=np.repeat(np.arange(len(pairs)), COMPARED),
            target_token=np.zeros(targets, dtype=np.int64),
        )
        return structs.replace(make_inputs(forest, layout, self.device), token=self.tokens.repeat(len(pairs)))


def _distance(found: Tensor, truth: Tensor) -> float:
    """How far log-probabilities [rows, positions, tokens] are apart, in nats: the largest of three medians, over the
    first tokens of each row, those of each branch (where state of a neighbour would leak in), and the last of each row.
    Medians, because rounding alone can send a token to other experts and so move some positions far."""
    difference = (found - truth).abs().double().cpu().numpy()
    return float(max(np.median(part) for part in np.split(difference, [START, 2 * START], axis=1)))


def decoder_blocks(model: nn.Module) -> nn.ModuleList:
    """The list of transformer blocks: the one whose length is the config's number of layers, and the largest such."""
    config: Any = model.config
    layers = config.get_text_config().num_hidden_layers
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
    if not found:
        raise TrainingError(f"{type(model).__name__} has no list of {layers} decoder blocks to shard")
    return max(found, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


def attention_window(config: Any) -> tuple[int, int]:
    """The longest span in tokens that a config names for sliding windows, attention chunks or other local computation,
    if a row can be longer, else 0; and how long a row can be. A span that limits nothing is harmless here: it makes the
    rows of the layout check longer."""
    text = config.get_text_config()
    longest_row: int = getattr(text, "max_position_embeddings", None) or sys.maxsize
    spans = [
        value
        for name, value in vars(text).items()
        if re.search("window|chunk|block_size|index_topk|local_attention", name) and isinstance(value, int)
    ]
    return max((span for span in spans if span < longest_row), default=0), longest_row


def _random_rows(vocab_size: int, trunk: int, seed: int) -> list[Row]:
    """Four samples in the order of a forest: a trunk, two forks from it, two twigs from each, so that masks are tried
    at two depths; one is shorter. The last token is the only trained one; the check looks at others."""
    rng = np.random.default_rng(seed)
    stem, left, right = (rng.integers(vocab_size, size=size) for size in (trunk, FORK, FORK))
    rows = []
    for fork, twig in ((left, TWIG), (left, TWIG), (right, TWIG), (right, TWIG - 3)):
        token_ids = np.concatenate((stem, fork, rng.integers(vocab_size, size=twig))).astype(np.int64)
        length = len(token_ids)
        rows.append(
            Row(
                trajectory_id="layout-check",
                token_ids=token_ids,
                trained=np.arange(length) == length - 1,
                turn_ids=np.zeros(length, dtype=np.int64),
                rollout_logprobs=np.zeros(length, dtype=np.float32),
                temperatures=np.ones(length, dtype=np.float32),
                advantages=np.ones(length, dtype=np.float32),
            )
        )
    return sorted(rows, key=lambda row: row.token_ids.tolist())


def _compared(rows: Sequence[Row]) -> list[Ints]:
    """Positions at which the check compares each row but the first, which has no neighbour before it: its first tokens,
    the first of its branch, its last ones."""
    result = []
    for before, row in pairwise(rows):
        last = len(row.inputs) - 1
        branch = common_prefix(before.inputs, row.inputs) + np.arange(START)
        ends = np.arange(last - TWIG, last) + 1
        result.append(np.concatenate([np.arange(START), branch.clip(max=last), ends]))
    return result


@contextlib.contextmanager
def _disturbed(blocks: nn.ModuleList, seed: int) -> Iterator[None]:
    """Inside, the outputs of the parts of each decoder block (attention, MLP, norms) get random noise of half a unit in
    the last place, about what another kernel would do. Not the residual stream itself: a few of its dimensions can be
    so large that their last place outweighs the rest."""

    def disturb(module: nn.Module, arguments: Any, output: Any) -> Any:
        if isinstance(output, tuple) and output:
            return disturb(module, arguments, output[0]), *output[1:]
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        generator = torch.Generator(output.device).manual_seed(seed)
        noise = torch.randn(output.shape, generator=generator, device=output.device)
        return (output * (1 + noise * torch.finfo(output.dtype).eps / 2)).to(output.dtype)

    with _hooks(*((part, disturb) for block in blocks for part in block.children())):
        yield


@contextlib.contextmanager
def _hooks(*hooks: tuple[nn.Module, Any]) -> Iterator[None]:
    """Forward hooks for the time inside."""
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def find_transform(policy: Policy, device: torch.device, seed: int = 0) -> LogitTransform:
    """What the model does between the hidden states of its base model and its logits, besides the head itself.

    The model's own forward runs with the output of the head replaced by a known ramp, and what comes out as logits is
    solved for a factor or a softcap; a factor on the hidden states before the head shows in the same pass. Raises
    TrainingError for anything else.
    """
    model = policy.causal_lm
    seen: dict[str, Tensor] = {}

    def replace_output(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # Magnitudes from 0.001 to 100 with both signs; in reverse at the second position, so that it shows when some
        # tokens are treated differently.
        size = output.shape[-1]
        ramp = torch.logspace(-3, 2, size, device=output.device)
        ramp[1::2] *= -1
        seen["entering"], seen["ramp"] = arguments[0], torch.stack([ramp, ramp.flip(0)])[None]
        return seen["ramp"].clone()

    tokens = np.random.default_rng(seed).integers(model.get_input_embeddings().num_embeddings, size=2)
    inputs = Inputs(
        input_ids=torch.from_numpy(tokens)[None].to(device),
        position_ids=None,
        tree=None,
        place=torch.arange(2, device=device),
        temperature=torch.ones(2, device=device),
        pair=torch.arange(2, device=device),
        token=torch.zeros(2, dtype=torch.long, device=device),
    )
    model.set_attn_implementation(EAGER)
    base, head = policy._parts
    with torch.no_grad():
        with _hooks((head, replace_output), (model, lambda _, __, output: seen.update(logits=output.logits))):
            policy(inputs, reference=True)
        with _hooks((base, lambda _, __, output: seen.update(hidden=output[0]))):
            policy(inputs)
    unknown = TrainingError(
        f"{type(model).__name__} does something to its logits that is neither a factor nor a softcap; its "
        "log-probabilities cannot be computed here"
    )
    if "ramp" not in seen:
        return IDENTITY  # the head is not called as a module; the layout check compares its results all the same
    if seen["hidden"].shape != seen["entering"].shape or seen["ramp"].shape != seen["logits"].shape:
        raise unknown
    before = _factor(seen["hidden"], seen["entering"])
    after = fit_transform(seen["ramp"].flatten(), seen["logits"].flatten())
    if before is None or after is None or (before != 1 and getattr(head, "bias", None) is not None):
        raise unknown
    return LogitTransform(scale=before * after.scale, softcap=after.softcap)


def _factor(left: Tensor, right: Tensor) -> float | None:
    """k of ``right = k * left`` within the rounding of their dtype, if there is one."""
    near = 4 * max(torch.finfo(left.dtype).eps, torch.finfo(right.dtype).eps)
    left, right = left.double(), right.double()
    factor = float((left * right).sum() / left.square().sum())
    factor = 1.0 if abs(factor - 1) < near / 4 else factor
    return factor if torch.allclose(factor * left, right, rtol=near, atol=near * float(right.abs().mean())) else None


def fit_transform(x: Tensor, y: Tensor) -> LogitTransform | None:
    """The transform that makes y of x, within the rounding of y's dtype, or None. x covers small and large numbers."""
    near = max(1e-5, 4 * torch.finfo(y.dtype).eps)
    x, y = x.double(), y.double()
    scale = float((y / x)[x.abs() < 0.01].median())  # where any softcap is a straight line
    scale = float(f"{scale:.6g}") if abs(scale - 1) > near else 1.0
    if not (math.isfinite(scale) and scale > 0):
        return None
    if torch.allclose(scale * x, y, rtol=near, atol=0):
        return LogitTransform(scale=scale)
    top = int(x.argmax())
    straight, found = scale * float(x[top]), float(y[top])
    low, high = 0.0, straight * 1000
    for _ in range(100):  # c * tanh(straight / c) grows with c
        c = (low + high) / 2
        low, high = (c, high) if c * math.tanh(straight / c) < found else (low, c)
    c = float(f"{c:.6g}")
    if torch.allclose(c * (scale * x / c).tanh(), y, rtol=near, atol=0):
        return LogitTransform(scale=scale, softcap=c)
    return None
