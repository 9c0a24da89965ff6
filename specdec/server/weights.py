"""/sleep, /wake_up, /is_sleeping and /reload_weights: for trainers that share the machine with the server. Off unless asked for.

Owns: paths, bodies and answers. Must not know: what the engine gives back, nor in which order.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from specdec.engine.orders import PauseMode
from specdec.errors import ConfigError, RequestRejected
from specdec.server.context import ServerContext

ALL_TAGS = frozenset({"weights", "kv_cache"})


class ReloadBody(BaseModel):
    """Where the weights are; a path that is left out stays what it is, and is read again."""

    model_config = ConfigDict(extra="forbid")

    weights_path: str | None = Field(default=None, min_length=1, description="Directory, .gguf file or hub id of the target.")
    draft_weights_path: str | None = Field(default=None, min_length=1, description="The same of the drafter.")
    mode: PauseMode = Field(default="abort", description="What becomes of running requests.")


def weights_router(ctx: ServerContext) -> APIRouter:
    """Return the four routes."""
    router = APIRouter(tags=["Weights"])
    engine = ctx.engine

    @router.post("/sleep", response_model=None)
    async def sleep(level: Annotated[int, Query(ge=1, le=2)] = 1, mode: Literal["abort", "wait"] = "abort") -> Response:
        """Give memory back: 1 the KV caches, 2 the weights too. Until /wake_up requests get 503."""
        await engine.sleep(level=level, mode=mode)
        return Response(status_code=200)

    @router.post("/wake_up", response_model=None)
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """Take requests again."""
        if tags and set(tags) != ALL_TAGS:
            names = " and ".join(sorted(ALL_TAGS))
            raise RequestRejected(f"tags is {tags}, but {names} wake together here", param="tags", hint="leave it out")
        try:
            await engine.wake_up()
        except ConfigError as error:
            raise RequestRejected(error.message, hint=error.hint) from error
        return Response(status_code=200)

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        """Tell whether the engine sleeps."""
        return {"is_sleeping": engine.is_sleeping}

    @router.post("/reload_weights", response_model=None)
    async def reload_weights(body: ReloadBody | None = None) -> Response:
        """Read the weights of target and drafter again, and wake."""
        asked = body or ReloadBody()
        try:
            await engine.reload_weights(asked.weights_path, asked.draft_weights_path, mode=asked.mode)
        except ConfigError as error:
            param = "draft_weights_path" if error.message.startswith("draft_") else "weights_path"
            raise RequestRejected(error.message, param=param, hint=error.hint) from error
        return Response(status_code=200)

    return router
