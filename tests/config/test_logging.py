"""Log lines: one format, text or JSON, nothing installed on import."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from specdec.errors import ConfigError
from specdec.logging import LEVEL_VARIABLE, configure, get_logger, warn_once


@pytest.fixture
def restored() -> Iterator[None]:
    root = logging.getLogger("specdec")
    before = root.handlers, root.level, root.propagate
    yield
    root.handlers, root.level, root.propagate = before


def test_nothing_is_installed_on_import() -> None:
    code = "import logging, specdec.logging; assert not logging.getLogger('specdec').handlers and not logging.getLogger().handlers"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.usefixtures("restored")
def test_text_lines_carry_level_and_module(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info")
    get_logger("specdec.config.resolve").info("%d blocks", 7)
    line = capsys.readouterr().err
    assert line.endswith("INFO config.resolve: 7 blocks\n")


@pytest.mark.usefixtures("restored")
def test_json_lines_are_objects_with_the_exception(capsys: pytest.CaptureFixture[str]) -> None:
    configure("DEBUG", "json")
    try:
        raise ValueError("broken")
    except ValueError:
        get_logger("specdec.x").exception("failed %s", "here")
    fields = json.loads(capsys.readouterr().err)
    assert (fields["level"], fields["logger"], fields["message"]) == ("ERROR", "specdec.x", "failed here")
    assert "ValueError: broken" in fields["exception"]


@pytest.mark.usefixtures("restored")
def test_configuring_twice_does_not_double_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure("INFO")
    configure("INFO")
    get_logger("specdec.x").info("once")
    assert capsys.readouterr().err.count("once") == 1


@pytest.mark.usefixtures("restored")
def test_the_level_comes_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "warning")
    configure()
    assert logging.getLogger("specdec").level == logging.WARNING
    configure("DEBUG")
    assert logging.getLogger("specdec").level == logging.DEBUG
    monkeypatch.setenv(LEVEL_VARIABLE, "loud")
    with pytest.raises(ConfigError, match="SPECDEC_LOG_LEVEL is 'loud'"):
        configure()
    with pytest.raises(ConfigError, match="log format is 'xml'"):
        configure("INFO", "xml")  # type: ignore[arg-type]


def test_a_warning_is_said_once(package_log: pytest.LogCaptureFixture) -> None:
    logger = get_logger("specdec.test_once")
    for value in (1, 1, 2):
        warn_once(logger, "value %d", value)
    assert [record.getMessage() for record in package_log.records] == ["value 1", "value 2"]
