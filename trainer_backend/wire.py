"""What the driver and its rank processes say to each other: msgspec frames over a loopback socket, no pickle.

The driver sends every rank the same kind of command and waits until each has answered. A rank answers ``Done`` (before
it, rank 0 may send ``Bucket`` frames), or ``Failed`` and ends. ``Cancel`` is the one message that comes unasked.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from molt_sdk.errors import TrainingError
from trainer_backend.batch import CostModel, Row, decode_array, encode_array
from trainer_backend.config import TrainerConfig
from trainer_backend.state import TrainerState
from trainer_backend.weights import checksum

ADDRESS = "MOLT_TRAINER_ADDRESS"
"""Environment variable of a rank process: ``host:port`` of the driver."""
KEY = "MOLT_TRAINER_KEY"
"""Environment variable of a rank process: what it must show to the driver first."""

_LENGTH = struct.Struct("!Q")


class Setup(Struct, frozen=True, kw_only=True, tag=True):
    """The first command: load the model, from a checkpoint if one is given."""

    model: str
    config: TrainerConfig
    seed: int
    checkpoint: str | None = None


class Work(Struct, frozen=True, kw_only=True, tag=True):
    """One rank's part of a training step."""

    microbatches: list[list[Row]]
    passes: int
    """Micro-batches of the busiest rank: as many forward and backward passes does every rank make."""
    trained_tokens: int
    """Of the whole batch: the loss's denominator."""
    learning_rate: float


class Cancel(Struct, frozen=True, tag=True):
    """Stop the step under way between micro-batches."""


class SendWeights(Struct, frozen=True, tag=True):
    dtype: str


class Save(Struct, frozen=True, kw_only=True, tag=True):
    directory: str
    state: TrainerState


class Saved(Struct, frozen=True, tag=True):
    """Ask for the error of a save that failed; with ``wait``, when the save under way has ended."""

    wait: bool


class Close(Struct, frozen=True, tag=True):
    """End the process."""


Command = Setup | Work | Cancel | SendWeights | Save | Saved | Close


class Hello(Struct, frozen=True, kw_only=True, tag=True):
    key: str
    rank: int
    pid: int


class Ready(Struct, frozen=True, kw_only=True, tag=True):
    """What the driver must know of the model that was loaded."""

    layout: str
    note: str
    """Why prefixes are not shared although that was allowed; "" if they are."""
    vocab_size: int
    cost: CostModel
    fingerprint: dict[str, str | int]


class Outcome(Struct, frozen=True, kw_only=True, tag=True):
    """Of one step, the same on all ranks: sums are over all of them."""

    cancelled: bool = False
    finite: bool = True
    loss_sum: float = 0.0
    grad_norm: float = 0.0
    computed_tokens: int = 0
    distinct_tokens: int = 0
    flat_tokens: int = 0
    microbatches: int = 0
    metrics: dict[str, float] = {}


class Done(Struct, frozen=True, kw_only=True, tag=True):
    result: Ready | Outcome | str | None = None


class TensorHeader(Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int


class Bucket(Struct, frozen=True, tag=True):
    """The bytes of the tensors follow the frame, one after the other."""

    tensors: list[TensorHeader]


class Failed(Struct, frozen=True, kw_only=True, tag=True):
    error: str
    """Name of the exception's class."""
    message: str
    traceback: str
    out_of_memory: bool
    by_peer: bool
    """Whether this rank failed only because another one was gone."""


Reply = Hello | Done | Bucket | Failed


class Channel:
    """Frames over a connected socket: eight bytes of length, then msgpack. One thread may send while another one
    receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Command | Reply) -> None:
        data = msgspec.msgpack.encode(message, enc_hook=encode_array)
        self._socket.sendall(_LENGTH.pack(len(data)))
        self._socket.sendall(data)

    def receive(self, kind: Any, *, longest: int = 1 << 62) -> Any:
        """The next message, of the union ``kind``. Raises EOFError at the end of the connection, and where a frame is
        longer than any that is expected."""
        (length,) = _LENGTH.unpack(self._fill(bytearray(_LENGTH.size)))
        if length > longest:
            raise EOFError
        return msgspec.msgpack.decode(self._fill(bytearray(length)), type=kind, dec_hook=decode_array)

    def send_bucket(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """CPU tensors, of any size and without a copy."""
        headers = [
            TensorHeader(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), checksum(tensor))
            for name, tensor in bucket
        ]
        self.send(Bucket(headers))
        for _, tensor in bucket:
            self._socket.sendall(_bytes_of(tensor))

    def receive_tensors(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        """What follows a ``Bucket``. Raises TrainingError when what arrived is not what was sent."""
        found = []
        for header in bucket.tensors:
            tensor = torch.empty(header.shape, dtype=getattr(torch, header.dtype))
            self._fill(_bytes_of(tensor))
            found.append((header.name, tensor))
        for header, (name, tensor) in zip(bucket.tensors, found, strict=True):
            if checksum(tensor) != header.checksum:
                raise TrainingError(f"weight {name!r} arrived damaged from the trainer's process; nothing was updated")
        return found

    def close(self) -> None:
        self._socket.close()

    def _fill(self, data: Any) -> Any:
        view, done = memoryview(data), 0
        while done < len(view):
            try:
                count = self._socket.recv_into(view[done:])
            except OSError:
                count = 0
            if count == 0:
                raise EOFError
            done += count
        return data


def _bytes_of(tensor: Tensor) -> Any:
    """A contiguous CPU tensor's memory as bytes."""
    flat: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return flat.data
