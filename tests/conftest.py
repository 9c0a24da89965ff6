"""Only the switches of the suite: --network, --soak, and skipping gpu tests without a CUDA device. Fixtures live beside their tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--network", action="store_true", default=False, help="also run the tests marked network")
    parser.addoption("--soak", action="store_true", default=False, help="also run the tests marked soak, which take minutes each")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--network"):
        _skip(items, "network", "needs the internet; run with --network")
    if not config.getoption("--soak"):
        _skip(items, "soak", "takes minutes; run with --soak")
    if any(item.get_closest_marker("gpu") for item in items) and not _has_cuda():
        _skip(items, "gpu", "needs a CUDA device")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
