"""Log-probabilities for clients: of the model's own law (before penalties, temperature and cuts), as vLLM's default.

Owns: TokenLogprobs from logits rows. Must not know: verification. Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.scheduler.output import TokenLogprobs


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Return one record per row of logits [T, V] float32 for the token emitted there, with the num_top most likely ids."""
    if not token_ids:
        return ()
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    laws = logits.log_softmax(-1)
    own = laws.gather(1, ids)
    ranks = (laws > own).sum(-1).tolist()
    values = own.squeeze(1).tolist()
    top_values, top_ids = laws.topk(num_top, dim=-1) if num_top else (own[:, :0], ids[:, :0])
    tops = zip(top_ids.tolist(), top_values.tolist(), strict=True)
    return tuple(
        TokenLogprobs(token_id, value, rank + 1, tuple(zip(alternatives, chances, strict=True)))
        for token_id, value, rank, (alternatives, chances) in zip(token_ids, values, ranks, tops, strict=True)
    )
