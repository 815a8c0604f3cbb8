"""Settings of the torch engine; importing this needs no torch."""

from __future__ import annotations

from msgspec import Struct


class TorchEngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the embedded engine."""
