"""``trainer.json`` of a checkpoint, and what saves that were killed leave behind. Importing this needs no torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from pathlib import Path

import msgspec
from msgspec import Struct

from molt_sdk.errors import TrainingError
from trainer_backend.config import TrainerConfig

STATE_FILE = "trainer.json"
FORMAT = 2

_HIDDEN = re.compile(r"\.(.+)\.(new|old)-[0-9a-f]{8}")
"""Names of folders that are being written, and of those that are being replaced."""


class TrainerState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of ``trainer.json``."""

    format: int = FORMAT
    step: int = 0
    """Of the run, when this was saved."""
    position: int = 0
    """In the task stream, where the run goes on."""
    version: int
    """Completed optimizer steps; the learning rate follows from it."""
    skipped_steps: int
    adam_steps: float
    """Steps that AdamW's moments have seen; 0.0 before the first."""
    fingerprint: dict[str, str | int] = {}
    """Of the trainer that saved: re-training the same batches with an equal one gives the same bits."""
    files: dict[str, int] = {}
    """CRC-32 of each file that holds tensors, by its path in the folder."""
    config: TrainerConfig


def load_state(directory: str | os.PathLike[str]) -> TrainerState:
    """Read ``trainer.json``. Raises TrainingError when it is missing or is not one of this release."""
    path = Path(directory) / STATE_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and isinstance(found := content.get("format"), int) and found != FORMAT:
            raise TrainingError(
                f"the checkpoint {str(directory)!r} has format {found}, but this release reads format {FORMAT} only; "
                "go on with the release that wrote it"
            )
        return msgspec.convert(content, TrainerState)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise TrainingError(
            f"{str(path)!r} does not exist: the folder is no checkpoint, or one that was never completed; resume from "
            "a folder that the trainer saved"
        ) from error
    except (msgspec.ValidationError, ValueError) as error:
        raise TrainingError(f"{str(path)!r} is not a trainer state that this release reads: {error}") from error


def crc_of(path: Path) -> int:
    """CRC-32 of a file's content. Raises OSError."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def state_json(state: TrainerState) -> str:
    # The json module, because msgspec would write an infinite grad_clip as null.
    return json.dumps(msgspec.to_builtins(state), indent=2) + "\n"


def remove_torn(parent: str | os.PathLike[str]) -> None:
    """Delete what saves that were killed left behind in ``parent``; while one is under way there, do not call this. A
    folder that was just being replaced gets its name back."""
    for path in sorted(Path(parent).glob(".*")):
        match = _HIDDEN.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        name, kind = match.groups()
        if kind == "old" and not path.with_name(name).exists():
            path.rename(path.with_name(name))
        else:
            shutil.rmtree(path)
