"""Checkpoints of the proposer tests, written once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proposers.tiny import write_checkpoint


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target: 2 layers, 97 tokens."""
    return write_checkpoint(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(scope="session")
def deep_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 4 layers."""
    return write_checkpoint(tmp_path_factory.mktemp("deep"), seed=2, num_layers=4)


@pytest.fixture(scope="session")
def draft_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model of 1 layer whose vocabulary is padded to 104 rows."""
    return write_checkpoint(tmp_path_factory.mktemp("draft"), seed=3, num_layers=1, vocab_size=104)
