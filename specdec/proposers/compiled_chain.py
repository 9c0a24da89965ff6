"""compiled_chain: lets a head with a compiled drafting phase draft a whole step in one call.

Owns: turning a step into arrays, and the call's chains into drafts. Must not know: what the head computes.
Letters: R requests of the batch, P requests that draft, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.proposers.base import DraftBatch, DraftRail, StepView

if TYPE_CHECKING:
    from specdec.kernels.cpu.chain_rows import ChainRows
    from specdec.models.fused_chain import FusedChain, GrownChains


def lay_out(step: StepView, *, block_size: int, max_len: int) -> ChainRows:
    """Return the committed rows of a step on the CPU, and who drafts behind them, up to max_len positions."""
    from specdec.kernels.cpu.chain_rows import chain_rows  # compiles on import, so only where a head is compiled

    rows: ChainRows = chain_rows(
        step.cu_query_lens.numpy(),
        step.num_rejected.numpy(),
        step.num_sampled.numpy(),
        step.path.numpy(),
        step.rows.numpy(),
        step.token_ids.numpy(),
        step.num_computed.numpy(),
        step.block_table.numpy(),
        np.array(step.max_nodes, dtype=np.int64),
        block_size,
        max_len,
    )
    return rows


def grow_chains(
    chain: FusedChain,
    rail: DraftRail,
    step: StepView,
    rows: ChainRows,
    *,
    taps: Sequence[torch.Tensor],
    is_greedy: bool,
    least_trust: float,
) -> GrownChains:
    """Extend the draft KV over all committed rows, and draft where `is_greedy`; else only the first states are made."""
    most = int(rows.wanted.max(initial=0)) if is_greedy else 0
    return chain.run(taps, rows, step.block_table.numpy(), rail.kv, most=most, least_trust=least_trust)


def chain_batch(step: StepView, rows: ChainRows, grown: GrownChains, *, source: str) -> DraftBatch:
    """Return the chains as the step's drafts."""
    num_requests = len(step.rows)
    token_ids = np.full((num_requests, grown.token_ids.shape[1] if len(rows.chains) else 0), -1, dtype=np.int64)
    confidence = np.zeros(token_ids.shape, dtype=np.float32)
    token_ids[rows.chains], confidence[rows.chains] = grown.token_ids, grown.confidence
    num_nodes = (token_ids >= 0).sum(axis=1)
    return DraftBatch(
        token_ids=torch.from_numpy(token_ids),
        num_nodes=torch.from_numpy(num_nodes),
        source=[source if count else "" for count in num_nodes.tolist()],
        confidence=torch.from_numpy(confidence),
    )
