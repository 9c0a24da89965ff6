"""A drafter that is always wrong, to see what drafting costs when it is worth nothing: serve it with the adaptive policy.

python benchmarks/bench_server.py --workload chat --repeats 7 --arm off=--no-speculation --arm 'anti=--speculative-config
    {"method":"custom_class","model":"benchmarks.anti_drafter.AntiDrafter","num_speculative_tokens":4,"policy":"adaptive"}'
"""

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
