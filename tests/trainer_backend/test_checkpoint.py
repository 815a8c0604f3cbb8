from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt_sdk.errors import TrainingError
from molt_sdk.types import Trajectory, TrajectoryGroup
from trainer_backend import checkpoint
from trainer_backend.config import TrainerConfig
from trainer_backend.trainer import Trainer

CONFIG = TrainerConfig(learning_rate=1e-3, weight_decay=0.01)


@pytest.fixture
def groups(
    make_trajectory: Callable[..., Trajectory], make_group: Callable[..., TrajectoryGroup]
) -> list[TrajectoryGroup]:
    members = [make_trajectory(str(i), [{"context": [1, 2], "completion": [3 + i, 9]}], float(i)) for i in range(3)]
    return [make_group(members)]


def test_transformers_loads_what_was_saved(
    pocket: str, groups: list[TrajectoryGroup], checkpoint_directory: Path
) -> None:
    """Same weights, logits, tokenizer and chat template; the optimizer is out of an inference engine's sight."""
    trainer = Trainer(pocket, CONFIG)
    trainer.step(groups)
    trainer.save(checkpoint_directory)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint_directory)
    assert loaded.dtype == torch.float32
    weights = dict(trainer.weights())
    assert all(torch.equal(weights[name], parameter) for name, parameter in loaded.named_parameters())
    expected = AutoModelForCausalLM.from_pretrained(pocket)
    expected.load_state_dict(weights, strict=False)
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(tokens).logits, expected(tokens).logits)
    messages = [{"role": "user", "content": "hi"}]
    rendered = [AutoTokenizer.from_pretrained(d).apply_chat_template(messages) for d in (pocket, checkpoint_directory)]
    assert rendered[0] == rendered[1]
    assert [file.name for file in checkpoint_directory.glob("*.safetensors")] == ["model.safetensors"]
    assert "attn_implementation" not in (checkpoint_directory / "config.json").read_text()
    generation = json.loads((checkpoint_directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 258


def test_resumed_training_continues_bit_for_bit(
    pocket: str, groups: list[TrajectoryGroup], checkpoint_directory: Path
) -> None:
    """Weights, AdamW's moments, their step count and the version all come back: two steps, a restart and two more are
    four steps."""
    through = Trainer(pocket, CONFIG, version=5)
    results = [through.step(groups) for _ in range(4)]
    first = Trainer(pocket, CONFIG, version=5)
    for _ in range(2):
        first.step(groups)
    first.save(checkpoint_directory)
    first.close()
    resumed = Trainer.load(checkpoint_directory)
    assert (resumed.version, resumed.config) == (7, CONFIG)
    again = [resumed.step(groups) for _ in range(2)]
    assert [(r.version, r.loss, r.grad_norm) for r in again] == [(r.version, r.loss, r.grad_norm) for r in results[2:]]
    weights = dict(through.weights())
    assert all(torch.equal(weights[name], tensor) for name, tensor in resumed.weights())


def test_a_checkpoint_before_the_first_step_resumes(
    pocket: str, groups: list[TrajectoryGroup], checkpoint_directory: Path
) -> None:
    Trainer(pocket, CONFIG).save(checkpoint_directory)
    resumed, fresh = Trainer.load(checkpoint_directory), Trainer(pocket, CONFIG)
    assert resumed.step(groups).loss == fresh.step(groups).loss


def test_settings_can_change_on_resume_and_counters_go_on(pocket: str, checkpoint_directory: Path) -> None:
    trainer = Trainer(pocket, CONFIG, version=3)
    trainer.step([])
    trainer.save(checkpoint_directory)
    resumed = Trainer.load(checkpoint_directory, TrainerConfig(learning_rate=1e-5))
    assert (resumed.version, resumed.skipped_steps, resumed.config.learning_rate) == (3, 1, 1e-5)


def test_clipping_that_is_off_stays_off_on_resume(pocket: str, checkpoint_directory: Path) -> None:
    Trainer(pocket, TrainerConfig(grad_clip=math.inf)).save(checkpoint_directory)
    assert Trainer.load(checkpoint_directory).config.grad_clip == math.inf


def test_a_torn_state_file_is_named(pocket: str, checkpoint_directory: Path) -> None:
    Trainer(pocket, CONFIG).save(checkpoint_directory)
    file = checkpoint_directory / "trainer.json"
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(TrainingError, match=r"trainer\.json"):
        Trainer.load(checkpoint_directory)


def test_saving_replaces_the_folder_as_a_whole(
    pocket: str, groups: list[TrajectoryGroup], checkpoint_directory: Path
) -> None:
    trainer = Trainer(pocket, CONFIG)
    trainer.save(checkpoint_directory)
    (checkpoint_directory / "stale").write_text("from before")
    trainer.step(groups)
    trainer.save(checkpoint_directory)
    assert Trainer.load(checkpoint_directory).version == 1
    assert not (checkpoint_directory / "stale").exists()
    assert [path.name for path in checkpoint_directory.parent.iterdir()] == [checkpoint_directory.name]


def test_a_failed_save_leaves_the_old_checkpoint(
    pocket: str, groups: list[TrajectoryGroup], checkpoint_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full while the optimizer is written."""
    trainer = Trainer(pocket, CONFIG)
    trainer.save(checkpoint_directory)
    trainer.step(groups)

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        trainer.save(checkpoint_directory)
    assert Trainer.load(checkpoint_directory).version == 0
    assert [path.name for path in checkpoint_directory.parent.iterdir()] == [checkpoint_directory.name]


def test_a_folder_that_is_no_checkpoint_is_named(pocket: str, checkpoint_directory: Path) -> None:
    with pytest.raises(TrainingError, match=r"trainer\.json.*does not exist"):
        Trainer.load(pocket)
    Trainer(pocket, CONFIG).save(checkpoint_directory)
    (checkpoint_directory / "trainer.json").write_text('{"version": "seven"}')
    with pytest.raises(TrainingError, match=r"trainer\.json.*is not a trainer state"):
        Trainer.load(checkpoint_directory)


def test_moments_that_are_missing_or_misshapen_are_named(
    pocket: str, groups: list[TrajectoryGroup], checkpoint_directory: Path
) -> None:
    from safetensors.torch import save_file

    trainer = Trainer(pocket, CONFIG)
    trainer.step(groups)
    trainer.save(checkpoint_directory)
    file = checkpoint_directory / "trainer" / "optimizer.safetensors"
    moments = load_file(file)
    save_file({**moments, "model.norm.weight.exp_avg": torch.zeros(3)}, file)
    with pytest.raises(TrainingError, match=re.escape("model.norm.weight.exp_avg") + r".*\(64,\)"):
        Trainer.load(checkpoint_directory)
    file.unlink()
    with pytest.raises(TrainingError, match=r"optimizer\.safetensors.*does not exist"):
        Trainer.load(checkpoint_directory)


def test_no_pickle_is_written(pocket: str, groups: list[TrajectoryGroup], checkpoint_directory: Path) -> None:
    trainer = Trainer(pocket, CONFIG)
    trainer.step(groups)
    trainer.save(checkpoint_directory)
    suffixes = {path.suffix for path in checkpoint_directory.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".jinja", ".safetensors"}
