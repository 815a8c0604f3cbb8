"""transformers' continuous batching, run from one set of weights to the next. All that touches its manager is here."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from molt_sdk.engines.torch_attention import PAGED, only_full_attention
from molt_sdk.engines.torch_config import TorchEngineConfig
from molt_sdk.engines.torch_sampling import Running, Sampler, processors

_POLL = 0.05
"""Seconds between looks at a generation thread that delivers nothing."""


class Session:
    """Generates what is submitted between :meth:`start` and :meth:`stop`, which may follow each other many times.

    Args:
        module: the model; its attention implementation is switched.
        kv_tokens: size of the KV cache.
        on_death: called from another thread with the root cause if generation dies.
    """

    def __init__(
        self,
        module: Any,
        config: TorchEngineConfig,
        kv_tokens: int,
        on_death: Callable[[BaseException | None], None],
    ) -> None:
        self._on_death = on_death
        self._names = itertools.count()
        self._running: dict[str, Running] = {}
        """By the manager's request id, until finished or cancelled. Every operation on it is atomic."""
        self._sampler = Sampler(self._running, self._finished)
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        module.set_attn_implementation("sdpa")  # the manager accepts no other name when it is made
        greedy = GenerationConfig(do_sample=False, max_new_tokens=1, eos_token_id=-1)  # type: ignore[no-untyped-call]
        manager = module.init_continuous_batching(
            generation_config=greedy,
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=config.page_size,
                num_blocks=kv_tokens // config.page_size,
                max_batch_tokens=config.max_batch_tokens,
                max_requests_per_batch=config.max_batch_requests,
                max_blocks_per_request=0,
                use_async_batching=False,
                use_cuda_graph=False,
                auto_switch_to_flash=False,
            ),
        )
        if only_full_attention(module.config.get_text_config()):
            module.set_attn_implementation(PAGED)
        manager.logit_processor = processors(self._sampler)
        # It would reseed torch's global generator, which sampling here does not use.
        manager.distributed_helper.set_tp_seed = lambda *_: None
        manager.warmup()  # builds the cache; here, so that what goes wrong is raised here
        self._manager = manager

    @property
    def sampled_tokens(self) -> int:
        return self._sampler.sampled_tokens

    def start(self, version: int) -> None:
        """Generate with the weights as they are, as policy ``version``. To be called on a daemon thread: the generation
        thread inherits that, else it would keep an interpreter that ends without a stop alive for ever."""
        self._sampler.version = version
        self._stopping.clear()
        self._manager.start()
        self._watcher = threading.Thread(target=self._watch, name="molt-torch-watch", daemon=True)
        self._watcher.start()

    def submit(self, running: Running) -> None:
        """Start or resume a request. If generation is dead it stays open until ``on_death`` is called."""
        running.name = str(next(self._names))  # ids of users may repeat
        self._running[running.name] = running
        self._manager.add_request(
            running.prompt,
            request_id=running.name,
            max_new_tokens=running.room,
            eos_token_id=list(running.request.eos_token_ids) or -1,
        )

    def cancel(self, running: Running) -> None:
        """Give up on a request, from the next forward pass on; does nothing if it has finished."""
        if self._running.pop(running.name, None) is not None:
            self._manager.cancel_request(running.name)

    def stop(self) -> None:
        """End after the forward pass under way and forget all requests and everything that was cached for them. What
        was not finished keeps its tokens and is not settled. Does nothing when stopped."""
        if self._watcher is None:
            return
        self._stopping.set()
        self._watcher.join()
        self._watcher = None
        # The memory of the cache is kept, for it takes long to allocate; reset() frees every page and clears the hashes
        # by which prefixes are found.
        self._manager.stop(hard_stop=True, keep_for_next_session=True)
        self._manager.batch_processor.cache.reset()
        self._running.clear()

    def close(self) -> None:
        """Stop and let go of the model."""
        self.stop()
        self._manager.model.destroy_cached_continuous_batching_manager()
        del self._manager

    def _finished(self, running: Running) -> None:
        """On the generation thread, for the last token of a request."""
        self._running.pop(running.name, None)  # cancel() may have been faster
        if running.ended_by_text:
            self._manager.cancel_request(running.name)  # in force before the next forward pass
        running.settle()

    def _watch(self) -> None:
        """Notice the death of the generation thread. Its results are not needed but have to be taken."""
        while not self._stopping.is_set():
            if self._manager.get_result(timeout=_POLL) is None and not self._manager.is_running():
                break
        if not self._stopping.is_set():
            self._on_death(self._manager.background_thread_status.fatal_error)
