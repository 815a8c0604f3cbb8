"""The model in this process, through transformers' continuous batching, on its own copy of the weights.

For laptops, CI and debugging. Recompute is the only KV policy: a weight update stops generation, swaps the weights, and
submits what was running again with its sampled tokens as part of the prompt. The tokens keep the versions that sampled
them, and nothing that old weights computed is used by new ones.

Threads: the caller's event loop; the engine's own worker, on which weights are loaded and replaced in order; the
generation thread of the manager, and one that watches it.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from pathlib import Path
from typing import Any

import torch

from molt_sdk.engines.base import GenerateRequest, Generation, NamedTensors
from molt_sdk.engines.torch_config import TorchEngineConfig
from molt_sdk.engines.torch_sampling import Running
from molt_sdk.engines.torch_session import Session
from molt_sdk.engines.torch_weights import install, load_model, stage
from molt_sdk.errors import EngineError, ModelPathError, RequestError
from molt_sdk.rendering.template import ModelFiles
from molt_sdk.workers import Worker


class TorchEngine:
    """Generates with the model of a directory; see :class:`TorchEngineConfig` for the settings.

    All of :class:`SamplingParams` and the EOS set are per request. The logprob of a token is the one under the
    distribution it was drawn from: after bias, penalties and temperature, filtered and renormalised; that of a greedy
    token is taken at temperature 1 without filters. The same seed gives the same tokens up to rounding, which differs
    with what else is in the batch.
    """

    def __init__(self, model: str, config: TorchEngineConfig | None = None) -> None:
        """Reads tokenizer and limits; the weights are loaded by :meth:`start`.

        Raises:
            ModelPathError: the directory or one of its files is missing or unreadable.
        """
        self.model = str(model)
        self.version = 0
        self.config = config or TorchEngineConfig()
        self._files = ModelFiles(self.model)
        if not any(Path(self.model).glob("*.safetensors")):
            raise ModelPathError(
                f"model directory {self.model} has no *.safetensors weights; convert them with save_pretrained()"
            )
        self._lock = threading.Lock()
        """Guards what follows; held for moments only."""
        self._running: set[Running] = set()
        self._session: Session | None = None
        self._generating = False
        self._failure: EngineError | None = None
        self._worker: Worker | None = None
        self._module: Any = None
        self._vocab_size = 0
        self._kv_tokens = 0

    @property
    def context_length(self) -> int:
        """Most tokens of prompt + completion: the model's context, or the KV cache if that is smaller."""
        return min(self._files.context_length, self._kv_tokens or self._files.context_length)

    @property
    def running_requests(self) -> int:
        """Requests that are being generated or wait for their turn."""
        return len(self._running)

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled since the start."""
        return self._session.sampled_tokens if self._session else 0

    async def start(self) -> None:
        """Load the weights; does nothing when they are loaded.

        Raises:
            ModelPathError: they cannot be loaded.
            EngineError: there is no room for the KV cache, or generation died earlier.
        """
        with self._lock:
            if self._worker is None:
                self._worker = Worker("molt-torch-engine")
            worker = self._worker
        await worker.run(self._load)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one completion. Cancelling the caller aborts the request.

        Raises:
            RequestError: the prompt is empty, a token id is not of this vocabulary, or the request exceeds context or
                KV cache.
            EngineError: the engine is not running, was closed, or generation died; the root cause is its ``__cause__``.
        """
        self._check(request)
        running = Running(request, self._decode, asyncio.get_running_loop())
        with self._lock:
            self._check_alive(f"request {request.request_id}")
            self._running.add(running)
            if self._session and self._generating:  # else an update is under way, which submits all in the end
                self._session.submit(running)
        try:
            await running.future
        finally:
            with self._lock:
                self._running.discard(running)
                if self._session and self._generating:
                    self._session.cancel(running)
        return running.generation

    async def update_weights(self, weights: NamedTensors, version: int) -> None:
        """Replace all weights. Requests in flight go on under the new ones.

        Raises:
            EngineError: names, shapes or values are wrong (weights and version are then as before, and requests go
                on), or the engine is not running.
        """
        with self._lock:
            self._check_alive("update_weights")
            worker = self._worker
        assert worker is not None  # what _check_alive says
        await worker.run(self._update, weights, version)

    async def close(self) -> None:
        """Abort what is running and free the model; safe to call twice."""
        closed = EngineError("the engine was closed; make a new one")
        with self._lock:
            worker, self._worker = self._worker, None
            self._failure = self._failure or closed
        self._fail_running(closed)
        if worker is not None:
            unloading = asyncio.ensure_future(worker.run(self._unload))
            try:
                await asyncio.shield(unloading)  # goes on if the caller is cancelled
            finally:
                worker.close()

    # ---------------------------------------------------------------------------------------------------- requests

    def _check(self, request: GenerateRequest) -> None:
        where = f"torch engine, request {request.request_id}"
        with self._lock:
            self._check_alive(f"request {request.request_id}")
        ids, room = request.prompt_token_ids, request.sampling.max_tokens
        if not ids:
            raise RequestError(f"{where}: the prompt is empty; it needs at least one token")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            position, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < self._vocab_size)
            raise RequestError(
                f"{where}: prompt token id {bad} at position {position} is outside the vocabulary "
                f"(0..{self._vocab_size - 1}); was the prompt made with another model's tokenizer?"
            )
        for token, _ in request.sampling.logit_bias:
            if token >= self._vocab_size:
                raise RequestError(
                    f"{where}: logit_bias has token id {token}, outside the vocabulary (0..{self._vocab_size - 1}); "
                    "was it made with another model's tokenizer?"
                )
        if len(ids) + room > self.context_length:
            held = self.context_length < self._files.context_length
            name, advice = (
                ("the KV cache", "raise kv_cache_gib of the torch engine")
                if held
                else ("the model's context", "shorten the prompt or lower max_tokens")
            )
            raise RequestError(
                f"{where}: {len(ids)} prompt tokens + max_tokens={room} exceed {name} of {self.context_length} tokens; "
                f"{advice}"
            )

    def _check_alive(self, what: str) -> None:
        """With the lock held."""
        if self._failure is not None:
            # A new one each time: an exception that many tasks raise would collect the tracebacks of all.
            raise EngineError(f"torch engine, {what}: {self._failure}") from self._failure.__cause__
        if self._worker is None or self._module is None:
            raise EngineError(f"torch engine, {what}: the engine is not running; await start() first")

    def _decode(self, ids: list[int]) -> str:
        text: str = self._files.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _fail_running(self, error: EngineError) -> None:
        with self._lock:
            waiting = list(self._running)
        for running in waiting:
            own = EngineError(f"torch engine, request {running.request.request_id}: {error}")
            own.__cause__ = error.__cause__
            running.settle(own)

    def _fail(self, message: str, cause: BaseException | None) -> EngineError:
        """Fail for good: all that runs now and all that is asked later."""
        failure = EngineError(f"{message} ({cause!r}); close this engine and make a new one")
        failure.__cause__ = cause
        with self._lock:
            self._failure = failure
        self._fail_running(failure)
        return failure

    def _died(self, cause: BaseException | None) -> None:
        """On the thread that watches generation."""
        self._fail("generation died", cause)

    # ---------------------------------------------------------------------------------- on the engine's own thread

    def _load(self) -> None:
        if self._module is not None or self._failure is not None:
            with self._lock:
                self._check_alive("start")
            return
        device = self.config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        module = load_model(self.model, getattr(torch, self.config.dtype), device)
        self._vocab_size = int(module.config.get_text_config().vocab_size)
        self._kv_tokens = self._affordable_tokens(module)
        self._module = module
        # An interpreter that ends without close() must not tear down torch under the generation thread.
        atexit.register(self._interrupt)
        try:
            self._session = Session(module, self.config, self._kv_tokens, self._died)
            self._generate()
        except Exception as error:
            self._unload()
            raise self._fail("generation could not be started", error) from error

    def _affordable_tokens(self, module: Any) -> int:
        """Size of the KV cache: what the requests of one batch can fill, within the memory that is allowed."""
        text = module.config.get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        bytes_per_token = 2 * text.num_hidden_layers * kv_heads * head_dim * module.dtype.itemsize
        allowed = int(self.config.kv_cache_gib * 2**30 / bytes_per_token) // self.config.page_size
        pages_per_request = -(-self.context_length // self.config.page_size)
        pages = min(allowed, self.config.max_batch_requests * pages_per_request)
        if pages < 1:
            raise EngineError(
                f"torch engine: kv_cache_gib={self.config.kv_cache_gib} holds not even one page of "
                f"{self.config.page_size} tokens of {bytes_per_token} bytes; raise it"
            )
        return pages * self.config.page_size

    def _generate(self) -> None:
        """Go on with the weights as they are, first with what was interrupted."""
        with self._lock:
            if self._session is None:
                return
            self._session.start(self.version)
            self._generating = True
            for running in self._running:
                if running.finish_reason is None:
                    self._session.submit(running)

    def _interrupt(self) -> None:
        """Afterwards no thread reads weights or writes tokens; new requests wait."""
        with self._lock:
            self._generating = False
        if self._session is not None:
            self._session.stop()

    def _update(self, weights: NamedTensors, version: int) -> None:
        staged = stage(self._module, weights)  # while generation goes on; raises before anything has changed
        try:
            self._interrupt()
            with self._lock:
                self._check_alive("update_weights")
            install(staged)
            self.version = version
            self._generate()
        except EngineError:
            raise
        except Exception as error:
            raise self._fail("generation could not go on after an update", error) from error

    def _unload(self) -> None:
        self._interrupt()
        atexit.unregister(self._interrupt)
        session, self._session, self._module = self._session, None, None
        if session is not None:
            session.close()
