"""The ranks of a trainer that needs more than one: processes under torchrun, led over loopback.

The driver (this process) keeps agents, records and the plan of each batch; the ranks hold nothing but weights and
optimizer. Whatever happens to one of them (an exception, ``kill -9``) is seen at once, ends all of them, and is raised
here with its traceback. When this process ends, however it ends, the ranks end too.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from molt_sdk.errors import ConfigError, ModelPathError, MoltError, TrainingError, TrainingMemoryError
from trainer_backend import wire
from trainer_backend.state import TrainerState
from trainer_backend.wire import Outcome, Ready, Setup, Work

ADVICE = (
    "Lower trainer.max_tokens_per_microbatch or the length of episodes, set trainer.activation_checkpointing=True or "
    "trainer.offload, or use more ranks"
)
"""What helps when a step does not fit into memory."""
GRACE = 10.0
"""Seconds that processes get to end by themselves before they are killed."""
_KNOWN: dict[str, type[MoltError]] = {error.__name__: error for error in (ConfigError, ModelPathError, TrainingError)}


_starting: set[Launched] = set()


def abandon_starts() -> None:
    """End the processes that are being started, from another thread than the one that waits for them."""
    for launched in list(_starting):
        if launched._process is not None:
            launched._process.terminate()


class Launched:
    """Has the methods of :class:`trainer_backend.rank.Rank`; ``step`` takes the parts of all ranks."""

    def __init__(self, setup: Setup) -> None:
        """Start the ranks and load the model. Raises what a rank raised, and TrainingError when one dies."""
        self.ranks = setup.config.ranks
        self._channels: list[wire.Channel] = []
        self._pids: dict[int, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._unread: Iterator[list[tuple[str, Tensor]]] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="molt-ranks-")
        self._log = (Path(self._folder.name) / "output").open("w+b")
        _starting.add(self)
        try:
            self._start()
            replies = self._ask([setup] * self.ranks)
        except BaseException:
            self.close()
            raise
        finally:
            _starting.discard(self)
        assert isinstance(replies[0], Ready)
        self.ready = replies[0]

    def step(self, works: Sequence[Work], cancelled: Callable[[], bool]) -> Outcome:
        if cancelled():
            return Outcome(cancelled=True)
        outcome = self._ask(works, cancelled)[0]
        assert isinstance(outcome, Outcome)
        return outcome

    def buckets(self, dtype: str) -> Iterator[list[tuple[str, Tensor]]]:
        """Each bucket is checked by its checksums. What is not read before something else is asked is dropped."""
        self._send([wire.SendWeights(dtype)] * self.ranks)
        replies = self._unread = self._replies()
        for bucket in replies:  # noqa: UP028  ("yield from" would close the replies when this one is given up)
            yield bucket
        if self._unread is not replies:
            raise TrainingError("the weights were not read to the end before something else was asked of the trainer")
        self._unread = None

    def save(self, directory: str, state: TrainerState) -> None:
        self._ask([wire.Save(directory=directory, state=state)] * self.ranks)

    def saved(self, *, wait: bool) -> str:
        answers = self._ask([wire.Saved(wait)] * self.ranks)
        return next((answer for answer in answers if isinstance(answer, str) and answer), "")

    @property
    def alive(self) -> bool:
        return bool(self._channels)

    def close(self) -> None:
        """End the processes; safe to call twice."""
        try:
            if self._channels:
                with contextlib.suppress(TrainingError, subprocess.TimeoutExpired):
                    self._ask([wire.Close()] * self.ranks)
                    self._wait()
        finally:
            self._kill()
            self._log.close()
            self._folder.cleanup()

    def _start(self) -> None:
        # torchrun takes options from PET_*, which a scheduler may have set for jobs of its own.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
        environment["PYTHONSAFEPATH"] = "1"  # no module of the working directory may stand in for one of ours
        home = str(Path(__file__).resolve().parent.parent)
        if home not in sysconfig.get_paths().values():  # run from a checkout that is not installed
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), home]))
        environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // self.ranks)))
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        key = environment[wire.KEY] = secrets.token_hex(16)
        with socket.create_server(("127.0.0.1", 0), backlog=self.ranks) as server:
            environment[wire.ADDRESS] = f"127.0.0.1:{server.getsockname()[1]}"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1"]
            command += f"--nnodes 1 --nproc-per-node {self.ranks} --max-restarts 0".split()
            command += ["--log-dir", self._folder.name, "-m", "trainer_backend.rank"]
            # In a session of its own: Ctrl-C in a terminal is for the driver, which ends the step properly first.
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._channels = self._accept(server, key)

    def _accept(self, server: socket.socket, key: str) -> list[wire.Channel]:
        """One authenticated channel per rank, in rank order. Waits as long as torchrun lives."""
        found: dict[int, wire.Channel] = {}
        server.settimeout(0.2)
        try:
            while len(found) < self.ranks:
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    if self._process is None or self._process.poll() is not None:
                        raise TrainingError(f"the trainer's processes ended at start{_said(self._output())}") from None
                    continue
                connection.settimeout(GRACE)  # a stranger who says nothing must not hold the start up
                channel = wire.Channel(connection)
                try:
                    hello = channel.receive(wire.Hello, longest=4096)
                    known = hmac.compare_digest(hello.key, key)
                except (EOFError, ValueError):
                    known = False
                if not known:
                    channel.close()
                    continue
                connection.settimeout(None)
                found[hello.rank] = channel
                self._pids[hello.rank] = hello.pid
        except BaseException:
            for channel in found.values():
                channel.close()
            raise
        return [found[rank] for rank in range(self.ranks)]

    def _ask(
        self, commands: Sequence[wire.Command], cancelled: Callable[[], bool] | None = None
    ) -> list[Ready | Outcome | str | None]:
        """Send each rank its command and wait for all answers."""
        self._send(commands)
        results: dict[int, Ready | Outcome | str | None] = {}
        for _ in self._replies(cancelled, results):
            pass
        return [results[rank] for rank in range(self.ranks)]

    def _send(self, commands: Sequence[wire.Command]) -> None:
        if not self._channels:
            raise TrainingError("the trainer's processes have ended; load the newest checkpoint into a new trainer")
        unread, self._unread = self._unread, None
        for _ in unread or ():
            pass
        for channel, command in zip(self._channels, commands, strict=True):
            with contextlib.suppress(OSError):  # the reason is read as its reply
                channel.send(command)

    def _replies(
        self,
        cancelled: Callable[[], bool] | None = None,
        results: dict[int, Ready | Outcome | str | None] | None = None,
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield buckets until every rank is done; results go into the dict. Raises when any rank fails or dies."""
        waiting = dict(enumerate(self._channels))
        while waiting:
            if cancelled is not None and cancelled():
                cancelled = None
                for channel in self._channels:
                    with contextlib.suppress(OSError):
                        channel.send(wire.Cancel())
            for rank in _readable(waiting, 0.1 if cancelled is not None else None):
                try:
                    message = waiting[rank].receive(wire.Reply)
                    if isinstance(message, wire.Bucket):
                        yield waiting[rank].receive_tensors(message)
                        continue
                except EOFError:
                    message = None
                if not isinstance(message, wire.Done):
                    self._raise(rank, message, waiting)
                del waiting[rank]
                if results is not None:
                    results[rank] = message.result

    def _raise(self, rank: int, message: wire.Reply | None, waiting: dict[int, wire.Channel]) -> NoReturn:
        """Find out what happened first: the other ranks fail only because one is gone. Then end all and raise it."""
        last: dict[int, wire.Reply | None] = {rank: message}
        deadline = time.monotonic() + GRACE
        # A rank may have been the first to die and yet be heard of after one that noticed.
        while not _own_failures(last) and (rest := {r: c for r, c in waiting.items() if r not in last}):
            ready = _readable(rest, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for other in ready:
                try:
                    last[other] = rest[other].receive(wire.Reply)
                except EOFError:
                    last[other] = None
        failures = _own_failures(last)
        if not failures:  # killed: torchrun saw who was first, ends the others, and reports
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._wait()
        self._kill()
        if failures:
            rank, failed = next(iter(failures.items()))
            if failed.error in _KNOWN:
                raise _KNOWN[failed.error](failed.message)
            what = f"rank {rank} of {self.ranks} failed: {failed.error}: {failed.message}"
            if failed.out_of_memory:
                raise TrainingMemoryError(f"{what}. {ADVICE}")
            raise TrainingError(f"{what}\n{failed.traceback}")
        report = self._output()
        ended = [
            (int(r), int(c)) for r, c in re.findall(r"rank\s*:\s*(\d+) .*?exitcode\s*:\s*(-?\d+)", report, re.DOTALL)
        ]
        # torchrun itself ends the others by SIGTERM; and one that was killed comes before those that noticed.
        killed = [(r, c) for r, c in ended if c < 0 and c != -signal.SIGTERM]
        rank, code = (killed or ended or [(rank, 1)])[-1]
        how = f"killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise TrainingError(
            f"rank {rank} of {self.ranks} (process {self._pids[rank]}) was {how}, perhaps for want of memory; go on "
            f"with resume=True (--resume){_said(report)}"
        )

    def _kill(self) -> None:
        """End what is left. The ranks end by themselves when their channel closes, torchrun when they have ended."""
        for channel in self._channels:
            channel.close()
        self._channels = []
        if self._process is None:
            return
        for signal_ in (None, signal.SIGTERM, signal.SIGKILL):
            if signal_ is not None:
                self._process.send_signal(signal_)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._wait()
                return

    def _wait(self) -> None:
        """For torchrun to end. Raises TimeoutExpired."""
        if self._process is not None:
            self._process.wait(GRACE)

    def _output(self) -> str:
        """What the ranks and torchrun have written."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


def _said(report: str, lines: int = 30) -> str:
    """The end of what the ranks wrote, without what torchrun has to say of it."""
    own = re.split(r"^[WEI]\d{4} .*torch/distributed/", report, maxsplit=1, flags=re.MULTILINE)[0].strip()
    return "; their last words:\n" + "\n".join(own.splitlines()[-lines:]) if own else ""


def _readable(channels: dict[int, wire.Channel], timeout: float | None) -> list[int]:
    """The ranks that have said something or are gone."""
    waitable: Any = list(channels.values())
    ready: list[Any] = wait(waitable, timeout)
    return [rank for rank, channel in channels.items() if channel in ready]


def _own_failures(last: dict[int, wire.Reply | None]) -> dict[int, wire.Failed]:
    """The ranks that failed by themselves, as far as is known."""
    return {r: m for r, m in last.items() if isinstance(m, wire.Failed) and not m.by_peer}


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
