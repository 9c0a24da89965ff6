"""How options of the command line are declared: the groups they are shown in, and one that belongs to a group."""

from __future__ import annotations

from typing import Any

import typer

MODEL, CACHE, SCHEDULER, EXECUTION, SPECULATION, SERVER, TEST = (
    "Model",
    "Cache",
    "Scheduler",
    "Execution",
    "Speculation",
    "Server",
    "Test",
)


def opt(*names: str, group: str, help: str, **more: Any) -> Any:
    """Return an option of that group."""
    return typer.Option(*names, rich_help_panel=group, help=help, **more)
