"""The page at / and the two small JSON endpoints it reads: /specdec/stats and /specdec/config. Off with --no-ui.

Owns: static files (server/ui/, read once at start), their headers, and both shapes of JSON.
Must not know: how the page looks, or anything a client typed into it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from specdec import __version__
from specdec.config.engine import ReportRow, ResolvedConfig
from specdec.metrics.stats import EngineStats
from specdec.server.admission import draft_sources
from specdec.server.context import ServerContext

FOLDER = Path(__file__).with_name("ui")
KINDS = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".mjs": "text/javascript; charset=utf-8"}
# The page may load nothing from elsewhere and talk to nobody else, whatever text a model puts into it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One static file."""

    body: bytes
    media_type: str


def assets() -> dict[str, Asset]:
    """Return path -> file for everything the page is made of. Paths are exact, so no request can name another file."""
    files = sorted(path for path in FOLDER.iterdir() if path.suffix in KINDS)
    found = {f"/ui/{path.name}": Asset(path.read_bytes(), KINDS[path.suffix]) for path in files}
    found["/"] = found.pop("/ui/index.html")
    return found


def playground_router(ctx: ServerContext, files: dict[str, Asset]) -> APIRouter:
    """Return the page, its files, and its two endpoints. The files need no key; the endpoints do where the server has keys."""
    router = APIRouter(tags=["Playground"])
    for path, asset in files.items():
        router.add_api_route(path, _serve(asset), methods=["GET", "HEAD"], include_in_schema=False, response_model=None)

    @router.get("/specdec/stats")
    async def stats() -> dict[str, Any]:
        """Return counters and gauges of the engine as JSON; rates are for the reader to take."""
        return _stats(ctx.engine.stats, max_draft_length=ctx.max_nodes)

    @router.get("/specdec/config")
    async def config() -> dict[str, Any]:
        """Return the resolved configuration: every value and where it came from."""
        return _config(ctx.resolved)

    return router


def _serve(asset: Asset) -> Any:
    async def send() -> Response:
        return Response(asset.body, media_type=asset.media_type, headers=HEADERS)

    return send


def _stats(stats: EngineStats, *, max_draft_length: int) -> dict[str, Any]:
    """Counters are totals since the start; time_s is a clock to divide their differences by."""
    spec, gauges = stats.spec, stats.gauges
    padding = [0] * (max_draft_length - len(spec.accepted_per_pos))
    return {
        "time_s": time.monotonic(),
        "num_requests_running": gauges.num_running,
        "num_requests_waiting": gauges.num_waiting,
        "kv_cache_usage_ratio": gauges.kv_cache_usage,
        "num_preemptions": gauges.num_preemptions,
        "draft_length": gauges.draft_length,
        "max_draft_length": max_draft_length,
        "draft_bank_seconds": gauges.draft_bank_s,
        "acceptance_collapsed": stats.collapse.is_collapsed,
        "num_steps": stats.num_steps,
        "prompt_tokens": stats.num_prompt_tokens,
        "generation_tokens": stats.num_generation_tokens,
        "num_decode_steps": spec.num_decode_steps,
        "num_decode_tokens": spec.num_decode_tokens,
        "num_drafts": spec.total.num_drafts,
        "num_draft_tokens": spec.total.num_draft_tokens,
        "num_accepted_tokens": spec.total.num_accepted_tokens,
        "num_accepted_tokens_per_pos": [*spec.accepted_per_pos, *padding],
        "by_source": {
            source or "unknown": {"num_draft_tokens": counts.num_draft_tokens, "num_accepted_tokens": counts.num_accepted_tokens}
            for source, counts in sorted(spec.by_source.items())
        },
    }


def _config(resolved: ResolvedConfig) -> dict[str, Any]:
    return {
        "version": __version__,
        "model": resolved.served_model_name,
        "device": resolved.device,
        "dtype": resolved.dtype,
        "max_model_len": resolved.max_model_len,
        "max_num_seqs": resolved.engine.scheduler.max_num_seqs,
        "sources": list(draft_sources(resolved)),
        "num_speculative_tokens": resolved.traits.max_nodes if resolved.traits else 0,
        "report": [_row(row) for row in resolved.report],
    }


def _row(row: ReportRow) -> dict[str, Any]:
    value = row.value if row.value is None or isinstance(row.value, bool | int | float | str) else str(row.value)
    return {"name": row.name, "value": value, "source": row.source}
