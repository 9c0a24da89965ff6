"""A drafter that is always wrong, to see what drafting costs when it is worth nothing: benchmarks/do_no_harm.py --anti serves it."""

from __future__ import annotations

from typing import Any

WRONG = 5  # an id that the embedded model never writes


class AntiDrafter:
    """Proposes as many wrong tokens as it may."""

    def __init__(self, vllm_config: Any) -> None:
        self.num_drafts: int = vllm_config.speculative_config.num_speculative_tokens

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Drafts for every request that got a token."""
        return [[WRONG] * self.num_drafts if new else [] for new in sampled_token_ids]
