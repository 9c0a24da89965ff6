"""Fixtures of the configuration tests."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def package_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Capture the package's log lines from DEBUG up, whatever an earlier test made of its loggers."""
    monkeypatch.setattr(logging.getLogger("specdec"), "propagate", True)
    caplog.set_level(logging.DEBUG, logger="specdec")
    return caplog
