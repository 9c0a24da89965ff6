"""ServerOptions: what the HTTP front end may be told, and Lifecycle: whether it is still taking work.

Owns: limits and switches of the server. Must not know: engine options (config/) or routes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from specdec.errors import ConfigError
from specdec.server.answers.formats import check_names

SpecMetricsLevel = Literal["none", "summary", "detailed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Frozen options of the server. Times in seconds, sizes in bytes.

    api_keys: empty means no key is asked for. cors_origins: empty means no CORS headers.
    per_request_spec_decode_metrics: the level when a request does not name one.
    stall_after_s: /health turns red when there is work and no step ended for so long.
    request_timeout_s: a body must be in, and an answer out, within so long each; None: no limit. has_ui: serve the page at /.
    tool_call_parser, reasoning_parser: how the model writes calls ("auto": look at its chat template) and reasoning (None: it
    does not). enable_auto_tool_choice: the model may decide to call a tool.
    enable_sleep_mode: serve /sleep, /wake_up, /is_sleeping and /reload_weights, to holders of a key.
    otlp_traces_endpoint: URL that traces of requests are sent to; None: none are made.

    Raises:
        ConfigError: a value is outside its range.
    """

    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 1024 * 1024
    metrics_compat: Literal["none", "vllm"] = "none"
    per_request_spec_decode_metrics: SpecMetricsLevel = "none"
    stall_after_s: float = 60.0
    request_timeout_s: float | None = None
    has_ui: bool = True
    tool_call_parser: str = "auto"
    reasoning_parser: str | None = None
    enable_auto_tool_choice: bool = True
    enable_sleep_mode: bool = False
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1024:
            raise ConfigError(f"max_body_bytes is {self.max_body_bytes}, but it must be at least 1024")
        if self.stall_after_s <= 0:
            raise ConfigError(f"stall_after_s is {self.stall_after_s}, but it must be positive")
        if self.request_timeout_s is not None and self.request_timeout_s <= 0:
            raise ConfigError(f"request_timeout_s is {self.request_timeout_s}, but it must be positive", hint="leave it out for no limit")
        if self.metrics_compat not in ("none", "vllm"):
            raise ConfigError(f"metrics_compat is {self.metrics_compat!r}, but it must be 'none' or 'vllm'")
        if self.per_request_spec_decode_metrics not in ("none", "summary", "detailed"):
            level = self.per_request_spec_decode_metrics
            raise ConfigError(f"per_request_spec_decode_metrics is {level!r}, but it must be 'none', 'summary' or 'detailed'")
        check_names(self.tool_call_parser, self.reasoning_parser)
        if self.enable_sleep_mode and not self.api_keys:
            raise ConfigError(
                "enable_sleep_mode is on, but there is no API key, so that anybody could stop the server or make it read files",
                hint="give an --api-key, or drop --enable-sleep-mode",
            )
        if not all(self.api_keys):
            raise ConfigError("api_keys holds an empty key", hint="give each --api-key a value, or drop the flag to serve without keys")


@dataclass(slots=True)
class Lifecycle:
    """Shared by serve.py (which sets it on SIGTERM) and the routes (which read it).

    draining: no longer ready; running requests go on. expired: the drain limit passed, running requests end now.
    """

    draining: bool = False
    expired: asyncio.Event = field(default_factory=asyncio.Event)
