"""Settings of the torch engine; importing this needs no torch."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from molt_sdk.errors import ConfigError


class TorchEngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine that samples in this process, on its own copy of the weights."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights, KV cache and compute; logits are always float32."""
    device: str = "auto"
    """``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:<index>``."""
    max_batch_requests: int = 64
    """Most requests that are decoded together; more wait in order."""
    max_batch_tokens: int = 512
    """Most tokens in one forward pass; longer prompts are prefilled in parts."""
    page_size: int = 16
    """Tokens in one page of the KV cache; whole pages of equal prefixes are shared."""
    kv_cache_gib: float = 1.0
    """Most memory for the KV cache, in GiB; never more than the requests of one batch can fill.
    Requests that do not fit together wait, or are computed again later."""

    def __post_init__(self) -> None:
        for name, least in (("max_batch_requests", 1), ("max_batch_tokens", 1), ("page_size", 4)):
            if getattr(self, name) < least:
                raise ConfigError(f"torch_engine.{name}={getattr(self, name)} must be at least {least}")
        if not self.kv_cache_gib > 0:
            raise ConfigError(f"torch_engine.kv_cache_gib={self.kv_cache_gib} must be positive")
        if self.dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"torch_engine.dtype={self.dtype!r} must be 'bfloat16' or 'float32'")
