from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch.multiprocessing.spawn import ProcessException

from molt_sdk.errors import TrainingError
from tests.trainer_backend.checkpoint_ranks import (
    CHECKS,
    CONFIG,
    CPU,
    FOLDERS,
    assert_same,
    everything,
    run,
    state_of,
    train,
)
from tests.trainer_backend.folders import logits, make_folder, reference, stored
from trainer_backend import checkpoint
from trainer_backend.checkpoint import (
    Saver,
    export_checkpoint,
    load,
    stage,
)
from trainer_backend.config import TrainerConfig
from trainer_backend.loading import empty_model, load_weights, materialize, model_files
from trainer_backend.optim import make_optimizer
from trainer_backend.state import TrainerState, load_state, remove_torn

Trained = tuple[Any, torch.optim.Optimizer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folder(tmp_path_factory.mktemp("folders") / "tied", "tied")


@pytest.fixture
def trained(model: str) -> Trained:
    lm = empty_model(model)
    load_weights(lm, model, CPU)
    optimizer = make_optimizer(lm.parameters(), CONFIG)
    train(lm, optimizer)
    return lm, optimizer


def fresh(directory: str | Path) -> Trained:
    """With memory, but without values."""
    lm = empty_model(directory)
    materialize(lm, CPU)
    return lm, make_optimizer(lm.parameters(), CONFIG)


def state(**fields: Any) -> TrainerState:
    """Of one optimizer step."""
    return TrainerState(**{"version": 1, "skipped_steps": 0, "adam_steps": 1.0, "config": CONFIG} | fields)


def save(directory: Path, trained: Trained, source: str | Path, of: TrainerState | None = None) -> str:
    saver = Saver(None, model_files(source))
    saver.start(directory, stage(*trained), of or state_of(trained[1]))
    saver.wait()
    return saver.failure()


def test_training_goes_on_to_the_bit(trained: Trained, model: str, tmp_path: Path) -> None:
    """Weights, moments, their step count and the random numbers: one step, a restart and two more are three."""
    torch.manual_seed(7)
    assert save(tmp_path / "step-1", trained, model, state(step=1)) == ""
    drawn = torch.rand(3)
    train(*trained, steps=2)
    resumed = fresh(model)
    found = load(tmp_path / "step-1", *resumed)
    assert (found.step, found.version, found.adam_steps, found.config) == (1, 1, 1.0, CONFIG)
    assert torch.equal(torch.rand(3), drawn)
    train(*resumed, steps=2)
    assert_same(everything(*resumed), everything(*trained))


def test_a_checkpoint_before_the_first_step_is_read(model: str, tmp_path: Path) -> None:
    lm = empty_model(model)
    load_weights(lm, model, CPU)
    start: Trained = (lm, make_optimizer(lm.parameters(), CONFIG))
    assert save(tmp_path / "step-0", start, model) == ""
    resumed = fresh(tmp_path / "step-0")
    assert load(tmp_path / "step-0", *resumed).adam_steps == 0.0
    assert_same(everything(*resumed), everything(*start))


def test_a_parameter_that_no_gradient_reached_is_no_missing_one(model: str, tmp_path: Path) -> None:
    lm = empty_model(model)
    load_weights(lm, model, CPU)
    optimizer = make_optimizer(lm.parameters(), CONFIG)
    logits = lm(torch.arange(6)[None]).logits
    torch.autograd.backward(logits.square().mean(), inputs=[lm.model.norm.weight])
    optimizer.step()
    assert save(tmp_path / "step-1", (lm, optimizer), model) == ""
    resumed = fresh(model)
    load(tmp_path / "step-1", *resumed)
    assert torch.equal(resumed[0].model.norm.weight, lm.model.norm.weight)


def visible(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.glob("[!.]*"))


def test_what_is_staged_is_a_copy(trained: Trained, model: str, tmp_path: Path) -> None:
    staged, then = stage(*trained), everything(*trained)
    train(*trained, steps=2)
    saver = Saver(None, model_files(model))
    saver.start(tmp_path / "step-1", staged, state())
    saver.wait()
    resumed = fresh(model)
    load(tmp_path / "step-1", *resumed)
    assert_same(everything(*resumed), then)


def test_f113_a_failed_save_is_told_once_and_harms_nothing(
    trained: Trained, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer fails while training goes on."""
    assert save(tmp_path / "step-1", trained, model, state(step=1)) == ""
    started, go_on = threading.Event(), threading.Event()

    def full_disk(*_: object, **__: object) -> None:
        started.set()
        assert go_on.wait(60)
        raise OSError(28, "No space left on device")

    saver = Saver(None, model_files(model))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", full_disk)
        saver.start(tmp_path / "step-2", stage(*trained), state(step=2))
        assert started.wait(60)
        assert saver.failure() == ""
        assert visible(tmp_path) == ["step-1"]
        go_on.set()
        saver.wait()
    failure = saver.failure()
    assert "step-2' was not saved: [Errno 28] No space left on device" in failure
    assert saver.failure() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    saver.start(tmp_path / "step-2", stage(*trained), state(step=2))
    saver.wait()
    assert (saver.failure(), visible(tmp_path)) == ("", ["step-1", "step-2"])


def test_an_earlier_save_is_waited_for(
    trained: Trained, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    publish, write = checkpoint.publish, Saver._write

    def note_start(saver: Saver, folder: Path, staged: Any) -> Any:
        order.append(f"start {folder.name.split('.')[1]}")
        return write(saver, folder, staged)

    def note_end(folder: Path, target: Path) -> None:
        publish(folder, target)
        order.append(f"end {target.name}")

    monkeypatch.setattr(checkpoint, "publish", note_end)
    monkeypatch.setattr(Saver, "_write", note_start)
    saver = Saver(None, model_files(model))
    for step in (1, 2):
        saver.start(tmp_path / f"step-{step}", stage(*trained), state(step=step))
    saver.wait()
    assert order == ["start step-1", "end step-1", "start step-2", "end step-2"]


def test_a_checkpoint_is_replaced_as_a_whole(trained: Trained, model: str, tmp_path: Path) -> None:
    assert save(tmp_path / "step-1", trained, model) == ""
    (tmp_path / "step-1" / "stale").write_text("from before")
    assert save(tmp_path / "step-1", trained, model, state(version=9)) == ""
    assert load_state(tmp_path / "step-1").version == 9
    assert not (tmp_path / "step-1" / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_the_source_may_go_after_the_first_save(trained: Trained, tmp_path: Path) -> None:
    """It may be an earlier checkpoint, and only the last few of those are kept."""
    source = Path(make_folder(tmp_path / "source", "tied"))
    saver = Saver(None, model_files(source))
    for step in (1, 2):
        saver.start(tmp_path / f"step-{step}", stage(*trained), state(step=step))
        saver.wait()
        assert saver.failure() == ""
        for file in source.glob("*"):
            file.unlink()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE"):
        assert (tmp_path / "step-2" / name).is_file()


KILLED = """
import sys, threading
from tests.trainer_backend.test_checkpoint import *
model, parent = sys.argv[1], Path(sys.argv[2])
trained = fresh(model)
load_weights(trained[0], model, CPU)
train(*trained)
assert save(parent / "step-1", trained, model, state(step=1)) == ""
from trainer_backend import weights
flush = weights.flush
def stuck(path):
    flush(path)
    print("writing", flush=True)
    threading.Event().wait()
weights.flush = stuck
save(parent / "step-2", trained, model, state(step=2))
"""


def test_f110_killed_while_writing_the_previous_checkpoint_is_whole(model: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, model, str(tmp_path)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
        finally:
            process.send_signal(signal.SIGKILL)
    assert sorted(path.name for path in tmp_path.iterdir())[0].startswith(".step-2.new-")
    assert visible(tmp_path) == ["step-1"]
    assert load(tmp_path / "step-1", *fresh(model)).step == 1
    remove_torn(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_killed_while_replacing_the_folder_gets_its_name_back(trained: Trained, model: str, tmp_path: Path) -> None:
    assert save(tmp_path / "step-1", trained, model) == ""
    (tmp_path / "step-1").rename(tmp_path / ".step-1.old-0123abcd")
    (tmp_path / ".step-1.new-0123abcd").mkdir()
    (tmp_path / ".mine").mkdir()
    remove_torn(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine", "step-1"]
    load(tmp_path / "step-1", *fresh(model))


def test_looking_for_checkpoints_imports_no_torch() -> None:
    code = (
        "import sys; from trainer_backend.state import remove_torn; remove_torn('.'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)


def test_what_is_no_checkpoint_is_named(trained: Trained, model: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"trainer\.json' does not exist"):
        load(model, *fresh(model))
    assert save(tmp_path / "step-1", trained, model) == ""
    file = tmp_path / "step-1" / "trainer.json"
    content = file.read_text()
    for broken in (content[:20], '{"format": 2, "version": "seven"}', "[]"):
        file.write_text(broken)
        with pytest.raises(TrainingError, match=r"trainer\.json' is not a trainer state"):
            load(tmp_path / "step-1", *fresh(model))
    file.write_text(json.dumps(json.loads(content) | {"format": 1}))
    with pytest.raises(TrainingError, match="has format 1, but this release reads format 2"):
        load(tmp_path / "step-1", *fresh(model))


def test_a_truncated_file_is_named(trained: Trained, model: str, tmp_path: Path) -> None:
    assert save(tmp_path / "step-1", trained, model) == ""
    file = tmp_path / "step-1" / "optimizer" / "rank-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(TrainingError, match=r"optimizer/rank-0\.safetensors' is not what was saved"):
        load(tmp_path / "step-1", *fresh(model))
    file.unlink()
    with pytest.raises(TrainingError, match=r"optimizer/rank-0\.safetensors' is missing"):
        load(tmp_path / "step-1", *fresh(model))


@pytest.mark.parametrize(("part", "suffix"), [("model", ""), ("optimizer", ".exp_avg_sq")])
def test_tensors_that_do_not_fit_are_listed(
    trained: Trained, model: str, tmp_path: Path, part: str, suffix: str
) -> None:
    assert save(tmp_path / "step-1", trained, model) == ""
    file = tmp_path / "step-1" / part / "rank-0.safetensors"
    tensors = load_file(file)
    norm, embedding = f"model.norm.weight{suffix}", f"model.embed_tokens.weight{suffix}"
    tensors[f"decoder.{norm}"] = tensors.pop(norm)
    save_file({**tensors, embedding: torch.zeros(3)}, file)
    state_file = tmp_path / "step-1" / "trainer.json"
    state_file.write_text(json.dumps(json.loads(state_file.read_text()) | {"files": {}}))
    with pytest.raises(TrainingError) as raised:
        load(tmp_path / "step-1", *fresh(model))
    message = str(raised.value)
    assert f"1 missing: {norm} (renamed? decoder.{norm})" in message
    assert f"1 unexpected: decoder.{norm}" in message
    assert f"1 of another shape: {embedding} [3], expected [259, 20]" in message


def test_no_pickle_is_written(trained: Trained, model: str, tmp_path: Path) -> None:
    assert save(tmp_path / "step-1", trained, model) == ""
    files = [path for path in (tmp_path / "step-1").rglob("*") if path.is_file() and path.name != "LICENSE"]
    assert {path.suffix for path in files} == {".json", ".jinja", ".safetensors"}


def test_clipping_that_is_off_stays_off(trained: Trained, model: str, tmp_path: Path) -> None:
    config = TrainerConfig(grad_clip=math.inf)
    assert save(tmp_path / "step-1", trained, model, state(config=config)) == ""
    assert load_state(tmp_path / "step-1").config == config


@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_an_export_is_what_transformers_loads(tmp_path: Path, kind: str) -> None:
    """From the checkpoint alone: the names are those of the model folder, the dtype is that of its config."""
    directory = Path(make_folder(tmp_path / "model", kind))
    names = stored(directory).keys()
    lm = empty_model(directory)
    load_weights(lm, directory, CPU)
    optimizer = make_optimizer(lm.parameters(), CONFIG)
    train(lm, optimizer)
    assert save(tmp_path / "step-1", (lm, optimizer), directory) == ""
    for file in directory.iterdir():
        file.unlink()
    export_checkpoint(tmp_path / "step-1", tmp_path / "out", torch.float32)
    assert stored(tmp_path / "out").keys() == names
    assert torch.equal(logits(reference(tmp_path / "out")), logits(lm))
    assert not (tmp_path / "out" / "weight_names.json").exists()
    export_checkpoint(tmp_path / "step-1", tmp_path / "out")
    dtypes = {tensor.dtype for tensor in stored(tmp_path / "out").values()}
    assert dtypes == {torch.float32 if kind == "tied" else torch.bfloat16}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folders, and a checkpoint of one rank after two steps."""
    work = tmp_path_factory.mktemp("ranks")
    for kind in FOLDERS:
        make_folder(work / kind, kind)
    trained = fresh(work / "tied")
    load_weights(trained[0], work / "tied", CPU)
    train(*trained, steps=2)
    assert save(work / "saved-by-1", trained, work / "tied") == ""
    save_file(everything(*trained), work / "expected-of-saved-by-1")
    return work


@pytest.fixture(scope="module", autouse=True)
def no_process_stays() -> Iterator[None]:
    """The server that ranks are forked from would live as long as the tests, and a moment longer."""
    yield
    server: Any = forkserver._forkserver
    server._stop()


def outcome(ranks: int, work: Path) -> tuple[set[str], str]:
    """Names of the checks that all ranks passed, and what stopped them."""
    log = work / f"log-{ranks}"
    log.touch()
    mp.set_forkserver_preload([run.__module__])  # imports cost more than the checks: once for all ranks
    context = mp.start_processes(run, (ranks, work, log), nprocs=ranks, join=False, start_method="forkserver")
    deadline = time.monotonic() + 100
    error = ""
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                error = "the ranks hang"
                break
    except ProcessException as raised:
        error = str(raised)
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    reports = sorted(work.glob(f"log-{ranks}.[0-9]"))
    return set(log.read_text().split()), "\n".join([*(report.read_text() for report in reports), error])


@pytest.fixture(scope="module")
def two_ranks(work: Path) -> tuple[set[str], str]:
    return outcome(2, work)


@pytest.fixture(scope="module")
def four_ranks(work: Path, two_ranks: object) -> tuple[set[str], str]:
    return outcome(4, work)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_ranks(request: pytest.FixtureRequest, name: str, ranks: int) -> None:
    passed, error = request.getfixturevalue("two_ranks" if ranks == 2 else "four_ranks")
    assert name in passed, error


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_rank_reads_what_several_wrote(four_ranks: object, work: Path, ranks: int) -> None:
    resumed = fresh(work / "tied")
    load(work / f"saved-by-{ranks}", *resumed)
    assert_same(everything(*resumed), load_file(work / f"expected-of-saved-by-{ranks}"))
    export_checkpoint(work / f"saved-by-{ranks}", work / "one-rank", torch.float32)
    assert torch.equal(logits(reference(work / "one-rank")), logits(resumed[0]))


@pytest.mark.parametrize("part", ["model", "optimizer", "rng"])
def test_one_changed_byte_or_a_file_of_another_checkpoint_is_noticed(
    trained: Trained, model: str, tmp_path: Path, part: str
) -> None:
    assert save(tmp_path / "step-1", trained, model) == ""
    train(*trained)
    torch.rand(1)
    assert save(tmp_path / "step-2", trained, model) == ""
    file = tmp_path / "step-2" / part / "rank-0.safetensors"
    good = file.read_bytes()
    changed = good[:-1] + bytes([good[-1] ^ 1])
    for content in (changed, (tmp_path / "step-1" / part / "rank-0.safetensors").read_bytes()):
        file.write_bytes(content)
        with pytest.raises(TrainingError, match=rf"{part}/rank-0\.safetensors' is not what was saved"):
            load(tmp_path / "step-2", *fresh(model))
    file.write_bytes(good)
    load(tmp_path / "step-2", *fresh(model))


def test_a_place_of_the_run_is_replaced_whatever_is_left_there(trained: Trained, model: str, tmp_path: Path) -> None:
    (tmp_path / "step-1" / "model").mkdir(parents=True)
    (tmp_path / "step-1" / "model" / "rank-0.safetensors").touch()
    assert save(tmp_path / "step-1", trained, model) == ""
    load(tmp_path / "step-1", *fresh(model))
