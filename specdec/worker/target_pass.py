"""TargetPass: the target's forward over one step's rows, replayed from a capture where there is one for the batch's shape.

Owns: what a captured step reads, and cutting its padding off. Must not know: sampling or drafting. Read next: kernels/graphs.py.
Letters: R requests, N query rows, B blocks per request, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from specdec.config.methods import Tap
from specdec.kernels.graphs import EAGER, Bucket, CapturePlan, Field, Tensors
from specdec.models.attention import Attend, AttentionMetadata, KVPair
from specdec.models.registry import TargetModel
from specdec.worker.input_batch import InputBatch

HIDDEN = "hidden"


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How the device runs steps. paged_attention: an attention backend that was asked for, None for the device's own."""

    plan: CapturePlan = EAGER
    paged_attention: Attend | None = None


class TargetPass:
    """One target over its caches. The batch of a capture may hold requests of any query length up to its bucket's, prompts' ends among
    them; a tree, whose mask differs from step to step, is computed as it comes."""

    name = "target"

    def __init__(self, model: TargetModel, kv: Sequence[KVPair], *, taps: tuple[Tap, ...], plan: CapturePlan = EAGER) -> None:
        self.model, self.kv, self.taps, self._plan = model, kv, taps, plan
        self.buckets = plan.buckets
        plan.graphs.add(self)

    def run(self, batch: InputBatch, meta: AttentionMetadata) -> tuple[torch.Tensor, Mapping[Tap, torch.Tensor]]:
        """Return the normed hidden states [N, H] and the tapped ones, valid until the next step."""
        bucket = self._bucket(batch)
        if bucket is None:
            return self.model.forward(batch.input_ids, batch.positions, self.kv, meta, taps=self.taps)
        outputs = self._plan.graphs.run(self, bucket, _inputs(batch))
        num_rows = len(batch.input_ids)
        return outputs[HIDDEN][:num_rows], {tap: outputs[_name(tap)][:num_rows] for tap in self.taps}

    def fields(self, bucket: Bucket) -> Mapping[str, Field]:
        """A padding row writes nowhere; a padding request has no rows."""
        requests, rows = (bucket.num_requests,), (bucket.num_rows,)
        return {
            "input_ids": Field(rows, torch.int64),
            "positions": Field(rows, torch.int64),
            "slot_mapping": Field(rows, torch.int64, pad=-1),
            "query_lens": Field(requests, torch.int32),
            "seq_lens": Field(requests, torch.int32),
            "block_table": Field((bucket.num_requests, self._plan.num_blocks), torch.int32),
        }

    def compute(self, inputs: Tensors, bucket: Bucket) -> Tensors:
        """The forward over a bucket's rows; lengths on the host are bounds."""
        cu_query_lens = torch.zeros(bucket.num_requests + 1, dtype=torch.int32, device=inputs["query_lens"].device)
        cu_query_lens[1:] = inputs["query_lens"].cumsum(0)
        longest = self._plan.num_blocks * self._plan.block_size
        meta = AttentionMetadata(
            cu_query_lens=cu_query_lens,
            seq_lens=inputs["seq_lens"],
            block_table=inputs["block_table"],
            slot_mapping=inputs["slot_mapping"],
            query_lens_cpu=(bucket.query_len,) * bucket.num_requests,
            seq_lens_cpu=(longest,) * bucket.num_requests,
        )
        hidden, taps = self.model.forward(inputs["input_ids"], inputs["positions"], self.kv, meta, taps=self.taps)
        return {HIDDEN: hidden} | {_name(tap): state for tap, state in taps.items()}

    def _bucket(self, batch: InputBatch) -> Bucket | None:
        if batch.parents is not None:
            return None
        return self._plan.graphs.bucket_for(self, len(batch.request_ids), max(batch.query_lens_cpu))


def _inputs(batch: InputBatch) -> Tensors:
    return {
        "input_ids": batch.input_ids,
        "positions": batch.positions,
        "slot_mapping": batch.slot_mapping,
        "query_lens": batch.cu_query_lens.diff(),
        "seq_lens": batch.seq_lens,
        "block_table": batch.block_table,
    }


def _name(tap: Tap) -> str:
    return f"tap {tap}"
