"""One life of transformers' continuous batching: from one set of weights to the next.

All that touches the manager is here. It is made anew for every set of weights, because its KV cache, its prefix hashes
and its queues must not outlive them.
"""

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
    """Generates what is submitted until :meth:`stop`. Make it, and stop it, on a daemon thread.

    Args:
        module: the model; its attention implementation is switched.
        kv_tokens: size of the KV cache.
        version: policy version of the weights.
        on_death: called from another thread with the root cause if generation dies.
    """

    def __init__(
        self,
        module: Any,
        config: TorchEngineConfig,
        kv_tokens: int,
        version: int,
        on_death: Callable[[Session, BaseException | None], None],
    ) -> None:
        self._on_death = on_death
        self._names = itertools.count()
        self._running: dict[str, Running] = {}
        """By the manager's request id, until finished or cancelled. Every operation on it is atomic."""
        self._stopping = threading.Event()
        self._sampler = Sampler(self._running, version, self._finished)
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
        # The generation thread inherits being a daemon from the thread that starts it; it would keep an interpreter
        # that ends without close() alive for ever.
        manager.start()
        self._manager = manager
        self._watcher = threading.Thread(target=self._watch, name="molt-torch-watch", daemon=True)
        self._watcher.start()

    @property
    def sampled_tokens(self) -> int:
        return self._sampler.sampled_tokens

    def submit(self, running: Running) -> None:
        """Start or resume a request. If generation is dead it stays open until ``on_death`` is called."""
        name = str(next(self._names))  # ids of users may repeat
        self._running[name] = running
        running.name = name
        self._manager.add_request(
            running.prompt,
            request_id=name,
            max_new_tokens=running.room,
            eos_token_id=list(running.request.eos_token_ids) or -1,
        )

    def cancel(self, running: Running) -> None:
        """Give up on a request, from the next forward pass on; does nothing if it has finished."""
        if self._running.pop(running.name, None) is not None:
            self._manager.cancel_request(running.name)

    def stop(self) -> None:
        """End after the forward pass under way. Unfinished requests keep their tokens and are not settled."""
        self._stopping.set()
        self._watcher.join()
        self._manager.stop(hard_stop=True)
        self._running.clear()

    def _finished(self, name: str, running: Running) -> None:
        """On the generation thread, for the last token of a request."""
        del self._running[name]
        if running.ended_by_text:
            self._manager.cancel_request(name)  # in force before the next forward pass
        running.settle()

    def _watch(self) -> None:
        """Notice the death of the generation thread. Its results are not needed but have to be taken."""
        while not self._stopping.is_set():
            if self._manager.get_result(timeout=_POLL) is None and not self._manager.is_running():
                break
        if not self._stopping.is_set():
            self._on_death(self, self._manager.background_thread_status.fatal_error)
