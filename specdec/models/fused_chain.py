"""FusedChain: an EAGLE-3 head's whole drafting phase as one compiled call on CPUs with AMX.

Owns: packed tables, buffers and the call table of kernels/cpu/amx_chain.py. Must not know: how drafts are used.
Oracle: the passes of models/eagle3.py, one by one (tests/models/test_fused_chain.py).
Letters: N committed rows, P chains, K drafts, H width, Ht target width, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from specdec.kernels.cpu import amx_chain as table
from specdec.kernels.cpu import amx_decoder, team
from specdec.kernels.cpu.amx_gemm import ROWS, can_pack
from specdec.kernels.cpu.amx_int8 import can_quantize
from specdec.kernels.cpu.chain_rows import ChainRows
from specdec.models.attention import KVPair
from specdec.models.fused_stack import FusedStack, Spans

if TYPE_CHECKING:
    from specdec.models.eagle3 import Eagle3Model


class GrownChains(NamedTuple):
    """What a drafting phase gives, by chain. token_ids [P, K] int64: target ids, -1 behind a chain's end; confidence [P, K] f32: the head's
    own chance of each. scored, fed_back [P, H] bf16: the newest states, as HeadStates has them."""

    token_ids: np.ndarray
    confidence: np.ndarray
    scored: torch.Tensor
    fed_back: torch.Tensor


def fuse_chain(head: Eagle3Model) -> FusedChain | None:
    """Return the compiled phase of a head that is attached to its target, where this CPU and its sizes allow one."""
    tables = head.tables
    linears = [x for x in (head.fc, tables.head) if x is not None]
    if head.fused is None or tables.head is None or tables.table is None or tables.logit_scale != 1.0:
        return None
    if any(x.bias is not None or not can_pack(x.weight) for x in linears) or tables.table.dtype is not torch.bfloat16:
        return None
    if head.fused.is_int8 and not all(can_quantize(x.weight) and x.in_features <= head.fused.widest for x in linears):
        return None
    return FusedChain(head, head.fused, embedding=tables.table, lm_head=tables.head.weight)


class FusedChain:
    """Runs a head over committed rows and lets it draft behind them. It shares the head's stack, and its KV."""

    def __init__(self, head: Eagle3Model, stack: FusedStack, *, embedding: torch.Tensor, lm_head: torch.Tensor) -> None:
        self.stack, self.width, self.draft_vocab = stack, head.shape.hidden_size, lm_head.shape[0]
        self._num_taps = len(head.taps)
        self._kept: list[torch.Tensor] = []  # owners of the addresses in the table
        self._taps = np.zeros(self._num_taps, dtype=np.int64)
        self._tap_norms = np.array([self._address(norm.float()) for norm in head.fc_norms] or [0] * self._num_taps, dtype=np.int64)
        self._least_trust = np.zeros(1, dtype=np.float32)
        self._tables = np.zeros((2, amx_decoder.NUM_SLOTS), dtype=np.int64)
        self._call = np.zeros(table.NUM_CHAIN_SLOTS, dtype=np.int64)
        self._wide_size = 0
        self._rows: _RowBuffers | None = None
        self._chains: _ChainBuffers | None = None
        self._fill_weights(head, embedding, lm_head)

    def fits(self, kv: Sequence[KVPair]) -> bool:
        """True when the compiled layers can read this cache."""
        return self.stack.fits(kv)

    def run(
        self,
        taps: Sequence[torch.Tensor],
        rows: ChainRows,
        block_table: np.ndarray,
        kv: Sequence[KVPair],
        *,
        most: int,
        least_trust: float = 0.0,
    ) -> GrownChains:
        """Extend over the committed rows, then draft up to `most` tokens a chain (0: none, the states are for the caller to draw from).

        taps: the target's states [., Ht] bf16 of the step's query rows. block_table [R, B] int32. least_trust: a chain ends before the
        chance of all its drafts together falls below it.
        """
        self.stack.bind(kv)
        taps = [tap.contiguous() for tap in taps]
        num_chains = len(rows.chains)
        chains = self._chain_buffers(num_chains, most)
        tables = block_table[rows.spans], block_table[rows.chains]
        self._fill_rows(rows, taps, tables[0])
        self._fill_chains(rows, chains, tables[1], most=most, least_trust=least_trust)
        team.run(table.chain_entry.address, self._call.ctypes.data, torch.get_num_threads())
        return GrownChains(
            chains.drafts[:num_chains], chains.confidence[:num_chains], chains.scored[:num_chains], chains.fed_back[:num_chains]
        )

    def _fill_weights(self, head: Eagle3Model, embedding: torch.Tensor, lm_head: torch.Tensor) -> None:
        call = self._call
        call[table.EXTEND], call[table.CHAIN] = (row.ctypes.data for row in self._tables)
        call[table.NUM_TAPS], call[table.TAPS], call[table.TAP_NORMS] = self._num_taps, self._taps.ctypes.data, self._tap_norms.ctypes.data
        call[table.WIDE_NORM] = 0 if head.input_norm is None else self._address(head.input_norm.float())
        if head.fc is not None:
            call[table.W_JOIN], call[table.S_JOIN] = self.stack.pack(head.fc.weight)
        call[table.EMBEDDING] = self._address(embedding)
        call[table.TOKEN_NORM], call[table.FEATURE_NORM] = self._address(head.token_norm.float()), self._address(head.feature_norm.float())
        call[table.NORMS_RESIDUAL], call[table.NORMS_OUTPUT] = int(head.norms_residual), int(head.norms_output)
        call[table.W_HEAD], call[table.S_HEAD] = self.stack.pack(lm_head)
        call[table.HEAD_SIZE] = self.draft_vocab
        call[table.ID_MAP] = 0 if head.id_map is None else self._address(head.id_map)
        call[table.LEAST_TRUST] = self._least_trust.ctypes.data

    def _fill_rows(self, rows: ChainRows, taps: Sequence[torch.Tensor], block_table: np.ndarray) -> None:
        count, call = len(rows.kept), self._call
        shared = self.stack.buffers(max(count, len(rows.chains)))
        if self._rows is None or self._rows.capacity < shared.capacity or self._wide_size != len(taps) * taps[0].shape[1]:
            self._wide_size = len(taps) * taps[0].shape[1]
            self._rows = _RowBuffers(shared.capacity, self._wide_size, self.width)
        own, mixed = self._rows, shared.mixed(2 * self.width)
        self.stack.layers[0][amx_decoder.MIXED], self.stack.layers[0][amx_decoder.MIXED_WIDTH] = mixed.data_ptr(), mixed.shape[1]
        self.stack.layers[:, amx_decoder.TAP] = 0
        self._taps[:] = [tap.data_ptr() for tap in taps]
        call[table.TAP_WIDTH], call[table.KEPT], call[table.SUCCESSORS] = taps[0].shape[1], _at(rows.kept), _at(rows.successors)
        call[table.WIDE], call[table.JOINED], call[table.FEATURES] = own.wide.data_ptr(), own.joined.data_ptr(), own.features.data_ptr()
        arrays = rows.positions, rows.slots, rows.starts, rows.seq_lens, block_table
        spans = Spans._make((len(rows.spans), *map(_at, arrays), block_table.shape[1]))
        self.stack.describe(self._tables[0], shared, count, spans, num_layers=len(self.stack.layers))

    def _fill_chains(self, rows: ChainRows, chains: _ChainBuffers, block_table: np.ndarray, *, most: int, least_trust: float) -> None:
        count, call = len(rows.chains), self._call
        self._least_trust[0] = least_trust
        chains.trust[:], chains.drafts[:count] = 1.0, -1
        arrays = chains.positions, chains.slots, chains.starts, chains.seq_lens, block_table
        spans = Spans._make((count, *map(_at, arrays), block_table.shape[1]))
        shared = self.stack.buffers(max(len(rows.kept), count))
        self.stack.describe(self._tables[1], shared, count, spans, num_layers=len(self.stack.layers))
        call[table.NUM_CHAINS], call[table.MOST] = count, most
        call[table.NEWEST], call[table.ANCHORS], call[table.WANTED] = _at(rows.newest), _at(rows.anchors), _at(rows.wanted)
        call[table.SCORED], call[table.FED_BACK] = chains.scored.data_ptr(), chains.fed_back.data_ptr()
        call[table.LOGITS], call[table.TRUST], call[table.NEXT] = chains.logits.data_ptr(), _at(chains.trust), _at(chains.following)
        call[table.DRAFTS], call[table.CONFIDENCE] = _at(chains.drafts), _at(chains.confidence)

    def _chain_buffers(self, count: int, most: int) -> _ChainBuffers:
        padded = -(-max(count, 1) // ROWS) * ROWS
        if self._chains is None or self._chains.capacity < padded or self._chains.most != max(most, 1):
            self._chains = _ChainBuffers(padded, max(most, 1), self.width, self.draft_vocab)
        return self._chains

    def _address(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()


class _RowBuffers:
    """Scratch of the committed rows, zeroed, so that padding rows stay finite."""

    def __init__(self, capacity: int, wide: int, width: int) -> None:
        self.capacity = capacity
        self.wide = torch.zeros(capacity, wide, dtype=torch.bfloat16)
        self.joined = torch.zeros(capacity, width)
        self.features = torch.zeros(capacity, width, dtype=torch.bfloat16)


class _ChainBuffers:
    """State of the chains while they grow."""

    def __init__(self, capacity: int, most: int, width: int, draft_vocab: int) -> None:
        self.capacity, self.most = capacity, most
        self.scored = torch.zeros(capacity, width, dtype=torch.bfloat16)
        self.fed_back = torch.zeros(capacity, width, dtype=torch.bfloat16)
        self.logits = torch.zeros(capacity, draft_vocab)
        self.positions, self.slots, self.seq_lens, self.following = (np.zeros(capacity, dtype=np.int64) for _ in range(4))
        self.starts = np.arange(capacity + 1, dtype=np.int64)
        self.trust = np.ones(capacity, dtype=np.float32)
        self.drafts = np.full((capacity, most), -1, dtype=np.int64)
        self.confidence = np.zeros((capacity, most), dtype=np.float32)


def _at(array: np.ndarray) -> int:
    return int(array.ctypes.data)
