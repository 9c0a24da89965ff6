"""The tiny target of the proposer tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proposers.tiny import write_checkpoint


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 layers, 97 tokens."""
    return write_checkpoint(tmp_path_factory.mktemp("target"), seed=1)
