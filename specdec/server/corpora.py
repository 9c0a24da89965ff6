"""/v1/corpora: texts that a client hands in, for suffix drafting to draft from. Each key sees its own only.

Owns: paths, bodies and answers. Must not know: how texts are searched.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.exceptions import HTTPException

from specdec.errors import RequestRejected
from specdec.server.context import ServerContext
from specdec.server.large_bodies import LargeBodyRoute

NAME = r"^[A-Za-z0-9._-]{1,64}$"


class CorpusBody(BaseModel):
    """A named corpus: texts, or token ids of texts."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, StringConstraints(pattern=NAME)] = Field(description="Up to 64 letters, digits, `.`, `_` and `-`.")
    texts: list[str] | None = Field(default=None, description="Texts; each is learnt by itself.")
    token_ids: list[list[int]] | None = Field(default=None, description="The same as token ids.")


def corpora_router(ctx: ServerContext) -> APIRouter:
    """Return the routes under /v1/corpora."""
    router = APIRouter(prefix="/v1/corpora", tags=["Corpora"], route_class=LargeBodyRoute)

    @router.post("", status_code=201)
    async def add(body: CorpusBody, request: Request) -> dict[str, Any]:
        """Learn a corpus, or replace the one of that name."""
        shelf = _shelf(ctx)
        info = await asyncio.to_thread(_learn, body, ctx, shelf, tenant_of(request))
        return _as_object(info)

    @router.get("")
    async def list_all(request: Request) -> dict[str, Any]:
        """List the corpora of this key."""
        return {"object": "list", "data": [_as_object(info) for info in _shelf(ctx).list(tenant_of(request))]}

    @router.get("/{name}")
    async def retrieve(name: str, request: Request) -> dict[str, Any]:
        """Describe one corpus."""
        for info in _shelf(ctx).list(tenant_of(request)):
            if info.name == name:
                return _as_object(info)
        raise _unknown(name)

    @router.delete("/{name}")
    async def remove(name: str, request: Request) -> dict[str, Any]:
        """Forget one corpus."""
        if not _shelf(ctx).remove(tenant_of(request), name):
            raise _unknown(name)
        return {"id": name, "object": "corpus", "deleted": True}

    return router


def tenant_of(request: Request) -> str:
    """The digest of the key that came with the request; "" without keys."""
    return str(request.scope.get("state", {}).get("tenant", ""))


def _learn(body: CorpusBody, ctx: ServerContext, shelf: Any, tenant: str) -> Any:
    """Tokenize and build, on a thread of its own."""
    if (body.texts is None) == (body.token_ids is None):
        raise RequestRejected("texts or token_ids must be given, and not both", param="texts")
    if body.token_ids is not None:
        ids = body.token_ids
        outside = next((token for text in ids for token in text if not 0 <= token < ctx.resolved.vocab_size), None)
        if outside is not None:
            raise RequestRejected(f"token_ids holds {outside}, but ids are 0..{ctx.resolved.vocab_size - 1}", param="token_ids")
    else:
        ids = [list(ctx.tokenizer.encode(text, add_special_tokens=False)) for text in body.texts or ()]
    return shelf.add(tenant, body.name, ids)


def _shelf(ctx: ServerContext) -> Any:
    shelf = ctx.engine.core.corpora
    if shelf is None:
        raise HTTPException(404, "this server does not draft from texts (hint: start it with method suffix, or a hybrid that has it)")
    return shelf


def _unknown(name: str) -> HTTPException:
    return HTTPException(404, f"there is no corpus {name!r} (hint: GET /v1/corpora lists them)")


def _as_object(info: Any) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "corpus",
        "created": info.created_s,
        "num_texts": info.num_texts,
        "num_tokens": info.num_tokens,
        "num_bytes": info.num_bytes,
    }
