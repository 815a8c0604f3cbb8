from __future__ import annotations

import pytest

from molt_sdk.testing import pocket_model


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a tiny random model with a byte-level tokenizer and a ChatML template."""
    return pocket_model(tmp_path_factory.mktemp("pocket"))
