"""ExtractHiddenStatesProposer: drafts nothing, and writes chosen hidden states of every request to a file.

Owns: a paged cache of the tapped states, beside the KV cache and with its lifetime, so that a prefix hit finds them and a
preempted request computes them again. Must not know: files (hidden_states_files.py does).
Letters: N query rows, R requests, B blocks per request, T tokens of a file, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from specdec.config.hidden_states import hidden_states_directory
from specdec.config.methods import MethodTraits
from specdec.proposers.base import AdmitInfo, BaseProposer, DraftBatch, DraftRail, MemoryNeed, Outcome, StepView
from specdec.proposers.hidden_states_files import HiddenStatesFiles
from specdec.proposers.ngram import host_batch

if TYPE_CHECKING:
    from specdec.config.engine import ResolvedConfig

KEPT_IDS = 10_000  # ids of live requests whose prompt is written, remembered over a preemption


@dataclass(slots=True)
class _Export:
    """A live request. num_prompt: tokens it came with; blocks [B]: its block ids at its newest step."""

    request_id: str
    num_prompt: int
    blocks: torch.Tensor | None = None


class ExtractHiddenStatesProposer(BaseProposer):
    """Writes the states of the prompt as soon as it is read, or those of prompt and output (without the last token) at the end.

    Raises:
        ConfigError: nothing can be written into the directory.
    """

    def __init__(self, resolved: ResolvedConfig) -> None:
        config: Any = resolved.engine.speculative
        assert resolved.traits is not None, "a proposer is built for a resolved method"
        self.traits: MethodTraits = resolved.traits
        self.with_output: bool = config.include_output_tokens
        directory = hidden_states_directory(config.shared_storage_path)
        layers = ",".join(map(str, self.traits.taps))
        self.files = HiddenStatesFiles(directory, {"layers": layers, "model": resolved.served_model_name})
        self._hidden_size: int = resolved.hf_config.hidden_size
        self._block_bytes = resolved.engine.cache.block_size * self._hidden_size * (4 if resolved.dtype == "float32" else 2)
        self._live: dict[int, _Export] = {}
        self._written: dict[str, None] = {}
        self._caches: list[torch.Tensor] = []
        self._block_size = resolved.engine.cache.block_size

    def memory(self) -> MemoryNeed:
        """One state per tapped layer and cached token, in pairs as the caches come."""
        num_pairs = -(-len(self.traits.taps) // 2)
        return MemoryNeed(
            kv_bytes_per_block=2 * num_pairs * self._block_bytes, kv_layers=tuple((1, self._hidden_size) for _ in range(num_pairs))
        )

    def bind(self, rail: DraftRail) -> None:
        """Take one cache [slots, H] for each tapped layer."""
        flat = [cache.view(-1, self._hidden_size) for pair in rail.kv for cache in pair]
        self._caches = flat[: len(self.traits.taps)]

    def admit(self, rows: Sequence[int], infos: Sequence[AdmitInfo]) -> None:
        """Lock the files of new requests; a prompt that was written before a preemption is not written again."""
        for row, info in zip(rows, infos, strict=True):
            self._live[row] = _Export(info.request_id, len(info.prompt_token_ids))
            if info.request_id not in self._written:
                self.files.open(info.request_id)

    def release(self, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Write what is to be written at the end; requests that were aborted or failed leave no file."""
        for row, outcome in zip(rows, outcomes, strict=True):
            export = self._live.pop(row)
            if outcome.reason == "preempt" and export.request_id in self._written:
                continue
            self._written.pop(export.request_id, None)
            if self.with_output and outcome.reason in ("stop", "length") and export.blocks is not None:
                tokens = (*outcome.prompt_token_ids, *outcome.output_token_ids)[:-1]
                self._write(export, export.blocks, torch.tensor(tokens, dtype=torch.int64))
            else:
                self.files.drop(export.request_id)

    def propose(self, step: StepView) -> DraftBatch:
        """Keep the step's states, write the prompts that have been read, draft nothing."""
        self._store(step)
        computed = step.num_computed.tolist()
        for index, row in enumerate(step.rows.tolist()):
            export = self._live[row]
            export.blocks = step.block_table[index]
            if not self.with_output and computed[index] >= export.num_prompt and export.request_id not in self._written:
                self._remember(export.request_id)
                self._write(export, export.blocks, step.token_ids[row, : export.num_prompt].long())
        return host_batch([[] for _ in step.request_ids], source=self.traits.method)

    def _remember(self, request_id: str) -> None:
        self._written[request_id] = None
        if len(self._written) > KEPT_IDS:
            del self._written[next(iter(self._written))]

    def _store(self, step: StepView) -> None:
        """Put the states of the step's committed rows where the target put their KV."""
        lengths = step.cu_query_lens.diff().long()
        request = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)  # [N]
        positions = step.target_positions
        is_kept = positions < step.num_computed[request]
        request, positions = request[is_kept], positions[is_kept]
        blocks = step.block_table[request, positions // self._block_size].long()
        slots = blocks * self._block_size + positions % self._block_size
        for cache, tap in zip(self._caches, self.traits.taps, strict=True):
            cache[slots] = step.taps[tap][is_kept].to(cache.dtype)

    def _write(self, export: _Export, blocks: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Gather [T, layers, H] and hand it to a writer thread."""
        at = torch.arange(len(token_ids), device=blocks.device)
        slots = blocks[at // self._block_size].long() * self._block_size + at % self._block_size
        states = torch.stack([cache[slots] for cache in self._caches], dim=1)
        self.files.write(export.request_id, states.cpu(), token_ids.cpu())
