from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from molt_sdk.errors import TrainingError
from trainer_backend import attention
from trainer_backend import model as module
from trainer_backend.batch import Row, build_forest
from trainer_backend.head import LogitTransform
from trainer_backend.model import Layout, Policy, choose_layout, decoder_blocks, find_transform, make_inputs
from trainer_backend.parallel import make_mesh, shard

CPU = torch.device("cpu")
VOCABULARY = 101
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
STATE: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
FULL_AND_SLIDING = ["sliding_attention", "full_attention"]


def small(name: str, **fields: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**SMALL | fields)


FAMILIES: dict[str, tuple[Layout, Callable[[], Any]]] = {
    "llama": ("tree", small("LlamaConfig")),
    "llama, tied": ("tree", small("LlamaConfig", tie_word_embeddings=True)),
    "qwen3": ("tree", small("Qwen3Config")),
    "mistral, window 5": ("tree", small("MistralConfig", sliding_window=5)),
    "gemma2": (
        "tree",
        small(
            "Gemma2Config",
            sliding_window=6,
            query_pre_attn_scalar=8,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
    ),
    "gemma3": ("tree", small("Gemma3TextConfig", sliding_window=6, layer_types=FULL_AND_SLIDING)),
    "granite": (
        "tree",
        small("GraniteConfig", logits_scaling=4.0, embedding_multiplier=3.0, attention_multiplier=0.3),
    ),
    "cohere": ("tree", small("CohereConfig", logit_scale=0.25)),
    "minicpm3, scaled before the head": (
        "tree",
        small(
            "MiniCPM3Config",
            num_key_value_heads=4,
            head_dim=4,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            dim_model_base=8,
        ),
    ),
    "gpt-oss, sinks": (
        "tree",
        small(
            "GptOssConfig",
            sliding_window=6,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=FULL_AND_SLIDING,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
    ),
    "qwen3-moe": ("tree", small("Qwen3MoeConfig", **EXPERTS)),
    "gpt2, dropout": (
        "tree",
        lambda: transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=256,
            initializer_range=0.2,
            resid_pdrop=0.5,
            embd_pdrop=0.5,
            attn_pdrop=0.5,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "llama4, chunks of 12": (
        "padded",
        small(
            "Llama4TextConfig",
            attention_chunk_size=12,
            num_local_experts=2,
            num_experts_per_tok=1,
            intermediate_size_mlp=48,
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0],
        ),
    ),
    "stablelm, drops keywords": ("padded", small("StableLmConfig")),
    "gpt-neo, attention of its own": (
        "padded",
        lambda: transformers.GPTNeoConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            max_position_embeddings=256,
            attention_types=[[["global", "local"], 1]],
            window_size=6,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "mamba": ("padded", lambda: transformers.MambaConfig(**STATE, initializer_range=0.2)),
    "mamba2": (
        "padded",
        lambda: transformers.Mamba2Config(
            **STATE, num_heads=8, head_dim=8, n_groups=2, chunk_size=8, initializer_range=0.2
        ),
    ),
    "qwen3-next, hybrid": (
        "padded",
        small(
            "Qwen3NextConfig",
            **EXPERTS,
            shared_expert_intermediate_size=16,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
        ),
    ),
    "falcon-h1, hybrid": (
        "padded",
        small(
            "FalconH1Config",
            mamba_d_ssm=64,
            mamba_n_heads=8,
            mamba_d_head=8,
            mamba_n_groups=1,
            mamba_d_state=8,
            mamba_chunk_size=8,
            lm_head_multiplier=0.5,
        ),
    ),
    "lfm2, convolution": ("padded", small("Lfm2Config", layer_types=["conv", "full_attention"])),
}


def build(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """The same random weights each time."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family][1](), attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    return model.to(dtype)


def random_rows(seed: int = 0) -> list[Row]:
    """Rows of different lengths from a common trunk, longer than the windows above, with trained tokens here and
    there, at several temperatures; two of them are a prefix of another."""
    rng = np.random.default_rng(seed)
    trunk, fork = rng.integers(VOCABULARY, size=14), rng.integers(VOCABULARY, size=5)
    parts = [
        (trunk, fork, rng.integers(VOCABULARY, size=9)),
        (trunk, fork, rng.integers(VOCABULARY, size=2)),
        (trunk, rng.integers(VOCABULARY, size=11)),
        (trunk, fork),
        (rng.integers(VOCABULARY, size=3),),
        (trunk, fork),
    ]
    rows = []
    for index, part in enumerate(parts):
        token_ids = np.concatenate(part).astype(np.int64)
        length = len(token_ids)
        trained = rng.random(length) < 0.4
        trained[0], trained[-1] = False, True
        rows.append(
            Row(
                trajectory_id=str(index),
                token_ids=token_ids,
                trained=trained,
                turn_ids=np.zeros(length, dtype=np.int64),
                rollout_logprobs=np.zeros(length, dtype=np.float32),
                temperatures=rng.choice(np.array([0.7, 1.0, 1.3], dtype=np.float32), size=length),
                # Here: the weight of each target in the loss.
                advantages=rng.normal(size=length).astype(np.float32),
            )
        )
    return sorted(rows, key=lambda row: row.inputs.tolist())


def plain(model: Any, rows: list[Row]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sums of weighted log-probabilities and entropies with the gradient of the former: one row at a time, logits and
    all, in the model as transformers made it."""
    model.eval()
    loss, entropies = torch.zeros(()), torch.zeros(())
    for row in rows:
        at = np.flatnonzero(row.trained)
        logits = model(input_ids=torch.from_numpy(row.token_ids)[None], use_cache=False).logits[0, at - 1]
        logprobs = (logits / torch.from_numpy(row.temperatures[at])[:, None]).log_softmax(-1)
        weights = torch.from_numpy(row.advantages[at])
        loss = loss + (logprobs[torch.arange(len(at)), row.token_ids[at]] * weights).sum()
        entropies = entropies - ((logprobs.exp() * logprobs).sum(-1) * weights).sum().detach()
    loss.backward()
    return loss.detach(), entropies, gradients(model)


def through(policy: Policy, layout: Layout, rows: list[Row]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The same through the policy."""
    forest = build_forest(rows, share=layout == "tree")
    stats = policy(make_inputs(forest, layout, CPU))
    weights = torch.from_numpy(forest.advantages)
    loss = (stats.logprobs * weights).sum()
    loss.backward()
    return loss.detach(), (stats.entropy * weights).sum(), gradients(policy.causal_lm)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-4, atol=1e-4)
    assert found[2].keys() == expected[2].keys()
    for name, grad in found[2].items():
        # Of a gradient that is all rounding (a bias before a softmax), only the size can be compared.
        error, scale = (grad - expected[2][name]).norm(), expected[2][name].norm()
        assert error <= 1e-3 * scale + 1e-4, (name, error, scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layout_of_each_architecture_and_its_gradient(family: str) -> None:
    expected = plain(build(family), random_rows())
    policy = Policy(build(family))
    choice = choose_layout(policy, "auto", CPU)
    assert choice.layout == FAMILIES[family][0], choice.detail
    assert bool(choice.note) == (choice.layout != "tree")
    assert_equal(through(policy, choice.layout, random_rows()), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_gets_the_same_layout(family: str) -> None:
    choice = choose_layout(Policy(build(family, torch.bfloat16)), "auto", CPU)
    assert choice.layout == FAMILIES[family][0], choice.detail


@pytest.mark.parametrize("family", ["llama, tied", "mistral, window 5", "gemma2", "gpt-oss, sinks"])
@pytest.mark.parametrize("layout", ["tree", "chain", "padded"])
def test_all_layouts_give_the_same_gradient(family: str, layout: Layout) -> None:
    expected = plain(build(family), random_rows(1))
    policy = Policy(build(family))
    policy.transform = find_transform(policy, CPU)
    policy.causal_lm.set_attn_implementation("eager" if layout == "padded" else attention.TREE_ATTENTION)
    assert_equal(through(policy, layout, random_rows(1)), expected)


@pytest.mark.parametrize(
    ("family", "transform"),
    [
        ("llama", LogitTransform()),
        ("gemma2", LogitTransform(softcap=3.0)),
        ("granite", LogitTransform(scale=0.25)),
        ("cohere", LogitTransform(scale=0.25)),
        ("minicpm3, scaled before the head", LogitTransform(scale=0.25)),
        ("falcon-h1, hybrid", LogitTransform(scale=0.5)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_model_does_to_its_logits_is_found_out(
    family: str, transform: LogitTransform, dtype: torch.dtype
) -> None:
    """Also where its logits are so small that a softcap does nothing to them yet."""
    model = build(family, dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 0.001
    assert find_transform(Policy(model), CPU) == transform


@pytest.mark.parametrize("change", [lambda logits: logits + 1e-3 * logits**3, lambda logits: logits.cumsum(-1)])
def test_unknown_operations_on_logits_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    policy = Policy(build("llama"))

    def hook(_: Any, __: Any, output: Any) -> Any:
        output.logits = change(output.logits)
        return output

    policy.causal_lm.register_forward_hook(hook)
    with pytest.raises(TrainingError, match="LlamaForCausalLM does something to its logits"):
        choose_layout(policy, "auto", CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mistral, window 5", "gemma2", "gpt-oss, sinks"])
def test_a_window_that_is_ignored_fails_the_check(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For trees and chains alike: the rows of the check are longer than the window."""
    visible = attention._visible
    monkeypatch.setattr(attention, "_visible", lambda bucket, window: visible(bucket, None))
    policy = Policy(build(family, dtype))
    choice = choose_layout(policy, "auto", CPU)
    assert choice.layout == "padded"
    assert "differs by" in choice.note
    with pytest.raises(TrainingError, match=r"layout='tree', but .* differs by"):
        choose_layout(policy, "tree", CPU)


@pytest.mark.parametrize("keyword", ["softcap", "s_aux"])
def test_a_keyword_of_attention_that_is_ignored_fails_the_check(keyword: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ignoring(*arguments: Any, **keywords: Any) -> Any:
        return attention.tree_attention(*arguments, **keywords | {keyword: None})

    monkeypatch.setattr(module, "tree_attention", ignoring)
    policy = Policy(build({"softcap": "gemma2", "s_aux": "gpt-oss, sinks"}[keyword]))
    assert choose_layout(policy, "auto", CPU).layout == "padded"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_leaks_between_packed_rows_gets_padded_ones(dtype: torch.dtype) -> None:
    """As a convolution of width 2 does: each token's embedding gets a part of the one before it."""
    policy = Policy(build("llama", dtype))
    policy.causal_lm.get_input_embeddings().register_forward_hook(
        lambda _, __, out: out + 0.3 * functional.pad(out[:, :-1], (0, 0, 1, 0))
    )
    assert choose_layout(policy, "auto", CPU).layout == "padded"
    assert choose_layout(policy, "chain", CPU).layout == "padded"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_counts_positions_itself_gets_chains(dtype: torch.dtype) -> None:
    """Positions counted from the last start of a row are right for packed rows and wrong for shared prefixes."""
    policy = Policy(build("qwen3", dtype))

    def count(_: Any, __: Any, arguments: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        if arguments.get("position_ids") is not None:
            starts = torch.where(arguments["position_ids"] == 0, torch.arange(arguments["input_ids"].shape[1]), 0)
            arguments["position_ids"] = torch.arange(starts.shape[1])[None] - starts.cummax(dim=1).values
        return (), arguments

    policy.causal_lm.base_model.register_forward_pre_hook(count, with_kwargs=True)
    choice = choose_layout(policy, "auto", CPU)
    assert choice.layout == "chain"
    assert "prefixes are not shared in training" in choice.note
    with pytest.raises(TrainingError, match="use layout='auto'"):
        choose_layout(policy, "tree", CPU)


def test_a_model_whose_rows_of_a_batch_depend_on_each_other_is_refused() -> None:
    policy = Policy(build("llama"))
    policy.causal_lm.get_input_embeddings().register_forward_hook(
        lambda _, __, out: out + out.mean(dim=(0, 1), keepdim=True)
    )
    with pytest.raises(TrainingError, match="LlamaForCausalLM would not compute what it computes for single rows"):
        choose_layout(policy, "auto", CPU)


def test_a_wanted_chain_needs_no_excuse() -> None:
    choice = choose_layout(Policy(build("llama")), "chain", CPU)
    assert (choice.layout, choice.note) == ("chain", "")


def test_what_cannot_be_checked_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WINDOW", 4)
    choice = choose_layout(Policy(build("mistral, window 5")), "auto", CPU)
    assert choice.layout == "padded"
    assert "window of 5 tokens" in choice.note


def test_damaged_weights_are_not_taken_for_an_architecture_that_cannot_be_trained() -> None:
    policy = Policy(build("llama"))
    with torch.no_grad():
        policy.causal_lm.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(TrainingError, match="LlamaForCausalLM computes NaN"):
        choose_layout(policy, "auto", CPU)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(TrainingError, match="LlamaModel has no language model head"):
        Policy(build("llama").model)


def test_fsdp_leaves_temperatures_and_places_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It casts floating-point inputs of a module to the compute dtype, in which 0.7 is 0.699."""
    seen: list[Any] = []
    stats = module.target_stats

    def spy(*arguments: Any, **options: Any) -> Any:
        seen.append(arguments)
        return stats(*arguments, **options)

    monkeypatch.setattr(module, "target_stats", spy)
    policy = Policy(build("llama"))
    shard(policy, decoder_blocks(policy), make_mesh(CPU), torch.bfloat16)
    choice = choose_layout(policy, "auto", CPU)
    assert choice.layout == "tree"
    found = through(policy, "tree", random_rows())[0]
    hidden, weight, _, temperature, *_ = seen[-1]
    assert hidden.dtype == weight.dtype == torch.bfloat16
    assert set(temperature.tolist()) == {float(np.float32(value)) for value in (0.7, 1.0, 1.3)}
    torch.testing.assert_close(found, plain(build("llama"), random_rows())[0], rtol=0.05, atol=0.05)


def test_a_failed_layout_leaves_a_sharded_policy_usable() -> None:
    policy = Policy(build("stablelm, drops keywords"))
    shard(policy, decoder_blocks(policy), make_mesh(CPU), torch.float32)
    choice = choose_layout(policy, "auto", CPU)
    assert choice.layout == "padded"
    assert "does not hand the keywords of forward on" in choice.note
    loss, entropies, _ = through(policy, "padded", random_rows())
    torch.testing.assert_close((loss, entropies), plain(build("stablelm, drops keywords"), random_rows())[:2])


def varlen_kernel(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """What ``torch.nn.attention.varlen.varlen_attn`` documents, sequence by sequence in float64."""
    query_starts, key_starts, max_queries, max_keys = arguments
    left, right = options["window_size"]
    shared = query.shape[1] // key.shape[1]
    assert options["enable_gqa"] == (shared > 1)
    parts = []
    for (q0, q1), (k0, k1) in zip(
        itertools.pairwise(query_starts.tolist()), itertools.pairwise(key_starts.tolist()), strict=True
    ):
        assert q1 - q0 <= max_queries
        assert k1 - k0 <= max_keys
        q, k, v = (tensor.double().transpose(0, 1) for tensor in (query[q0:q1], key[k0:k1], value[k0:k1]))
        scores = q @ k.repeat_interleave(shared, 0).transpose(1, 2) * options["scale"]
        ahead = torch.arange(k1 - k0)[None] - torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None]
        hidden = ((ahead > right) if right >= 0 else False) | ((ahead < -left) if left >= 0 else False)
        probabilities = scores.masked_fill(torch.as_tensor(hidden), -torch.inf).softmax(-1)
        parts.append((probabilities @ v.repeat_interleave(shared, 0)).transpose(0, 1))
    return torch.cat(parts).to(query.dtype)


@pytest.mark.parametrize("family", ["llama", "mistral, window 5"])
@pytest.mark.parametrize(
    ("kernel", "used"),
    [("right", True), ("wrong", False), ("missing", False), ("failing", False)],
)
@pytest.mark.parametrize("layout", ["tree", "chain"])
def test_a_varlen_kernel_is_used_where_it_proves_right(
    family: str, kernel: str, used: bool, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.nn.attention.varlen as varlen

    calls = 0

    def attend(*arguments: Any, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if kernel == "failing":
            raise RuntimeError("no kernel for this head dimension")
        if kernel == "wrong":
            options["window_size"] = (-1, -1)
        return varlen_kernel(*arguments, **options)

    monkeypatch.setattr(module, "has_varlen_kernel", lambda device: True)
    if kernel == "missing":
        monkeypatch.delattr(varlen, "varlen_attn")
    else:
        monkeypatch.setattr(varlen, "varlen_attn", attend)
    policy = Policy(build(family, torch.bfloat16))
    choice = choose_layout(policy, "auto" if layout == "tree" else "chain", CPU)
    assert choice.layout == layout
    assert not choice.note
    before = calls
    policy(make_inputs(build_forest(random_rows(), share=layout == "tree"), layout, CPU))
    assert (calls > before) == used
    assert ("varlen" in choice.detail.partition(";")[0]) == used
