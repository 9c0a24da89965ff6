"""What a stream tells of its drafts when the request asks: which tokens were accepted drafts, who drafted, what was dropped.

Owns: the member `specdec` of a streamed choice. Must not know: how drafts are made or verified. Read next: chunks.py.
"""

from __future__ import annotations

from typing import Any

from specdec.engine.types import EngineOutput
from specdec.server.logprobs import TokenTexts
from specdec.server.protocol import GenerationBody


def wants_trace(body: GenerationBody) -> bool:
    """Return whether the body asks for `speculative.trace`."""
    return body.speculative is not None and body.speculative.trace


def draft_trace(output: EngineOutput, tokens: TokenTexts) -> dict[str, Any]:
    """Return one step's tokens and drafts.

    tokens: what was emitted; the first num_accepted of them were drafts. rejected: the drafts after those, which the target
    refused (in the last step of an answer also those that came after its end). source: who drafted, null in a step without drafts.
    """
    trace = output.trace
    num_accepted = trace.num_accepted if trace else 0
    dropped = trace.draft_token_ids[num_accepted:] if trace else ()
    return {
        "source": trace.source or None if trace else None,
        "num_accepted": num_accepted,
        "tokens": [_token(token_id, tokens) for token_id in output.token_ids],
        "rejected": [_token(token_id, tokens) for token_id in dropped if token_id >= 0],  # a grammar marks what it refuses
    }


def _token(token_id: int, tokens: TokenTexts) -> dict[str, Any]:
    return {"id": token_id, "text": tokens.text(token_id)}
