"""The checkpoints of a run that is being trained: written in the background, recorded when complete, then pruned."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import anyio
from loguru import logger

from molt_sdk import database
from molt_sdk.errors import TrainingError
from molt_sdk.run import Checkpoint, open_run, read_checkpoint
from molt_sdk.store import Store

if TYPE_CHECKING:
    from trainer_backend.trainer import Trainer


class Checkpoints:
    """Saves under ``checkpoints/step-<N>``, one at a time. An old one is deleted only when a newer one is complete.

    Methods raise TrainingError when a save has failed, unless ``on_error`` is "warn".
    """

    def __init__(
        self,
        store: Store,
        trainer: Trainer,
        call: Callable[..., Awaitable[None]],
        *,
        keep: int,
        on_error: Literal["stop", "warn"],
        saved: int,
    ) -> None:
        """``call(function, *arguments)`` runs it on the trainer's thread; ``saved``: step of the newest one."""
        self._store = store
        self._trainer = trainer
        self._call = call
        self._keep = keep
        self._on_error = on_error
        self._saved = saved
        self._saving: Checkpoint | None = None
        self.broken = False
        """A save has failed and ends the run; another try would fail alike."""

    async def save(self, step: int, position: int) -> None:
        """Begin to save the weights after ``step``, unless they are saved or being saved; ``position``: where the task
        stream goes on after it."""
        if step in (0, self._saved) or (self._saving is not None and self._saving.step == step):
            return
        await self.wait()

        def begin() -> None:  # there, because a call that is cancelled before it runs there begins nothing
            path = self._store.dir / database.CHECKPOINTS / f"step-{step}"
            self._saving = Checkpoint(step=step, version=self._trainer.version, path=path)
            self._trainer.save(path, step=step, position=position)

        try:
            await self._call(begin)
        except Exception as error:  # the disk, in the words of whichever library met it
            self.failed(error)

    async def poll(self) -> None:
        """Record the save under way if it is complete by now."""
        if self._saving is not None and read_checkpoint(self._saving.path) is not None:
            await self.wait()

    async def wait(self) -> None:
        """Wait for the save under way, record it and delete the oldest checkpoints."""
        if self._saving is None:
            return
        try:
            await self._call(self._trainer.wait_saved)
            if read_checkpoint(self._saving.path) is None:
                raise TrainingError(f"the checkpoint {str(self._saving.path)!r} was written, but is not there")
        except Exception as error:
            self.failed(error)
            return
        done, self._saving = self._saving, None
        self._saved = done.step
        with anyio.CancelScope(shield=True):
            await self._store.add_checkpoint(done.step, done.version, done.path)
        await self.prune()

    async def finish(self, step: int, position: int) -> None:
        """Save the last weights and wait. A failure is raised whatever ``on_error`` says: no later save makes up for
        it."""
        await self.wait()
        self._on_error = "stop"
        await self.save(step, position)
        await self.wait()

    def failed(self, error: Exception) -> None:
        """The save under way has failed: raise TrainingError, or log it."""
        lost, self._saving = self._saving, None
        if lost is None:
            raise error
        message = f"after step {lost.step}, {error}"
        if str(lost.path) not in message:
            message = f"after step {lost.step}, the checkpoint {lost.path} was not saved: {error}"
        if self._on_error == "stop":
            self.broken = True
            raise TrainingError(f"{message}; solve that and resume") from error
        logger.error("{}; the run goes on and tries again when the next one is due (on_save_error='warn')", message)

    async def prune(self) -> None:
        """Delete all but the newest and the best one. Called by :meth:`wait`; after an evaluation, another may be the
        best."""
        await self._call(_prune, self._store.dir, self._keep)


def _prune(run_dir: Path, keep: int) -> None:
    run = open_run(run_dir)
    best = run.best
    for old in run.checkpoints[:-keep]:
        if old != best:
            # Hidden first, under the name of an unfinished one: a half-deleted folder must not look complete, and the
            # next resume deletes what a kill has left of it.
            condemned = old.path.with_name(f".{old.path.name}.new-{uuid.uuid4().hex[:8]}")
            try:
                old.path.rename(condemned)
                shutil.rmtree(condemned)
            except OSError as error:
                logger.warning("the old checkpoint {} could not be deleted: {}", old.path, error)
