"""NgramGpuProposer: prompt lookup where the token rows already lie; the same drafts as `ngram`, and no copy of any text.

Owns: nothing but the bounds of a match: it reads the committed rows anew at each step. Must not know: the target.
Read next: ngram.py, kernels/reference_lookup.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.config.methods import MethodTraits
from specdec.kernels.dispatch import kernel
from specdec.kernels.transfers import upload
from specdec.proposers.base import BaseProposer, DraftBatch, StepView

if TYPE_CHECKING:
    from specdec.config.engine import ResolvedConfig


class NgramGpuProposer(BaseProposer):
    """Drafts from the request's own prompt and output by a scan on the device; on a CPU by a compiled loop."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        config: Any = resolved.engine.speculative
        assert resolved.traits is not None, "a proposer is built for a resolved method"
        self.traits: MethodTraits = resolved.traits
        self._bounds = {"shortest": config.prompt_lookup_min, "longest": config.prompt_lookup_max}

    def propose(self, step: StepView) -> DraftBatch:
        """Look up the requests that sampled a token in this step."""
        device = step.rows.device
        limits = upload(step.max_nodes, device) * (step.num_sampled > 0)
        found = kernel("ngram_match", device)(
            step.rows,
            limits,
            token_ids=step.token_ids,
            num_tokens=step.num_tokens,
            width=max(step.max_nodes, default=0),
            **self._bounds,
        )
        source = ["ngram_gpu" if count else "" for count in step.max_nodes]  # what was found is not waited for
        return DraftBatch(token_ids=found.token_ids, num_nodes=found.num_tokens, source=source)
