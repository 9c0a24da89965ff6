"""FusedStack: a list of decoder layers run by one compiled call on CPUs with AMX.

Owns: packed weights, row buffers and the call table of kernels/cpu/amx_decoder.py. Must not know: where rows come from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from specdec.kernels.cpu import amx_decoder as table
from specdec.kernels.cpu import team
from specdec.kernels.cpu.amx_gemm import ROWS, can_pack, interleave, pack_weight, tile_config_bytes
from specdec.kernels.cpu.amx_int8 import can_quantize, quantize_weight, workspace_bytes
from specdec.models.attention import AttentionMetadata, KVPair

if TYPE_CHECKING:
    from specdec.models.draft_head import FirstLayer
    from specdec.models.llama import DecoderLayer, LayerShape
    from specdec.models.rope import RotaryTable

SCRATCH_BYTES = 32 * 1024 + 64 * 64 + 192  # packed queries, scores, running softmax state; values and outputs come on top


def can_fuse(layers: Sequence[DecoderLayer | FirstLayer], shape: LayerShape) -> bool:
    """True when every size fits whole tiles."""
    if shape.head_dim % 64 or shape.head_dim > 512 or shape.intermediate_size % 32:
        return False
    linears = [x for layer in layers for x in (layer.attention.qkv, layer.attention.out, layer.gate_up, layer.down)]
    return all(can_pack(x.weight) for x in linears) and all(
        x.bias is None for layer in layers for x in (layer.attention.out, layer.gate_up, layer.down)
    )


def can_fuse_int8(layers: Sequence[DecoderLayer | FirstLayer]) -> bool:
    """True when every size also fits whole tiles of int8."""
    return all(can_quantize(x.weight) for layer in layers for x in (layer.attention.qkv, layer.attention.out, layer.gate_up, layer.down))


def widest_input(shape: LayerShape) -> int:
    """Inputs of the widest product that int8 rows are rounded for: a draft head joins up to four states."""
    return max(4 * shape.hidden_size, shape.intermediate_size, shape.q_size)


class Spans(NamedTuple):
    """Where a call's rows lie, as addresses: positions, slots [N]; starts [num + 1], seq_lens [num]: int64; block_table int32."""

    num: int
    positions: int
    slots: int
    starts: int
    seq_lens: int
    block_table: int
    table_stride: int


class FusedStack:
    """Runs layers over a float32 residual stream; the result is the normed stream in bf16."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer | FirstLayer],
        shape: LayerShape,
        rotary: RotaryTable,
        *,
        final_norm: torch.Tensor | None,
        is_int8: bool = False,
    ) -> None:
        self.shape, self.rotary, self.is_int8 = shape, rotary, is_int8
        self._kept: list[torch.Tensor] = []  # owners of the addresses in the tables
        self.layers = np.zeros((len(layers), table.NUM_COLUMNS), dtype=np.int64)
        for row, layer in zip(self.layers, layers, strict=True):
            self._fill_layer(row, layer)
        self._final_norm = None if final_norm is None else self._keep(final_norm.float())
        self._eps = np.array([shape.eps], dtype=np.float32)
        self._config = tile_config_bytes()
        self._call = np.zeros(table.NUM_SLOTS, dtype=np.int64)
        self._rows: RowBuffers | None = None
        self._bound: Sequence[KVPair] | None = None

    @property
    def widest(self) -> int:
        """Inputs of the widest product in int8."""
        return widest_input(self.shape)

    @staticmethod
    def fits(kv: Sequence[KVPair]) -> bool:
        """True when a tile of 16 keys never crosses a block."""
        return bool(kv) and kv[0][0].shape[1] % ROWS == 0

    def run(
        self,
        stream: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[KVPair],
        meta: AttentionMetadata,
        *,
        taps: Collection[Any] = (),
        last: int | None = None,
        mixed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[Any, torch.Tensor]]:
        """stream [N, H] -> (normed hidden [N, H] bf16, or the stream itself without a final norm; taps by layer number).

        last: run only the first `last` layers (and still the final norm). mixed [N, W] bf16: what the first layer's QKV product reads,
        for a first layer without an input norm.
        """
        num_rows = stream.shape[0]
        rows = self.buffers(num_rows)
        rows.residual[:num_rows] = stream
        if mixed is not None:
            padded = rows.mixed(mixed.shape[1])
            padded[:num_rows] = mixed
            self.layers[0][table.MIXED], self.layers[0][table.MIXED_WIDTH] = padded.data_ptr(), mixed.shape[1]
        self.bind(kv)
        num_layers = len(self.layers) if last is None else last
        tapped = {
            tap: torch.empty(num_rows, self.shape.hidden_size, dtype=torch.bfloat16)
            for tap in taps
            if isinstance(tap, int) and tap < num_layers
        }
        for index, row in enumerate(self.layers):
            row[table.TAP] = tapped[index].data_ptr() if index in tapped else 0
        out = torch.empty(num_rows, self.shape.hidden_size, dtype=torch.bfloat16)
        held = self._fill_call(rows, num_rows, positions, meta, num_layers=num_layers, out=out)
        team.run(table.decoder_entry.address, self._call.ctypes.data, int(self._call[table.NUM_THREADS]))
        del held
        if num_layers in taps or self._final_norm is None:
            final = rows.residual[:num_rows].to(torch.bfloat16)
            tapped[num_layers] = final
            out = final if self._final_norm is None else out
        return out, tapped

    def _fill_call(
        self, rows: RowBuffers, num_rows: int, positions: torch.Tensor, meta: AttentionMetadata, *, num_layers: int, out: torch.Tensor
    ) -> list[Any]:
        """Write the call table; returns what must outlive the call."""
        held = [positions.contiguous(), meta.slot_mapping.contiguous(), meta.cu_query_lens.to(torch.int64), meta.seq_lens.to(torch.int64)]
        held.append(meta.block_table.contiguous())
        spans = Spans._make((len(meta.query_lens_cpu), *(tensor.data_ptr() for tensor in held), held[-1].shape[1]))
        self.describe(self._call, rows, num_rows, spans, num_layers=num_layers, out=out.data_ptr())
        self._call[table.IS_CAUSAL] = int(meta.is_causal)
        if meta.tree_mask is not None:
            held.append(meta.tree_mask.contiguous())
            self._call[table.TREE], self._call[table.TREE_STRIDE] = held[-1].data_ptr(), held[-1].shape[1]
        return held

    def describe(self, call: np.ndarray, rows: RowBuffers, num_rows: int, spans: Spans, *, num_layers: int, out: int = 0) -> None:
        """Write a call table of causal chains. out: address of the normed rows."""
        shape = self.shape
        call[:] = (
            rows.num_threads, num_rows, num_layers,
            shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.intermediate_size,
            rows.residual.data_ptr(), rows.normed.data_ptr(), rows.qkv.data_ptr(), rows.query.data_ptr(), rows.attended.data_ptr(),
            rows.activation.data_ptr(), self.rotary.cos.data_ptr(), self.rotary.sin.data_ptr(), spans.positions, spans.slots,
            spans.num, spans.starts, spans.seq_lens, spans.block_table, spans.table_stride, self._block_size, 0, 0, 1,
            rows.scratch.data_ptr(), rows.scratch.shape[1], self._config.ctypes.data, self.layers.ctypes.data, self._eps.ctypes.data,
            0 if self._final_norm is None else self._final_norm.data_ptr(), out, rows.arrivals.data_ptr(), rows.workspace,
        )  # fmt: skip

    def buffers(self, num_rows: int) -> RowBuffers:
        """Row buffers for a forward of num_rows rows."""
        if self._rows is None or self._rows.capacity < num_rows or self._rows.num_threads != torch.get_num_threads():
            self._rows = RowBuffers(self.shape, -(-max(num_rows, ROWS) // ROWS) * ROWS, torch.get_num_threads())
        return self._rows

    def bind(self, kv: Sequence[KVPair]) -> None:
        """Enter the caches' addresses into the layer table."""
        if self._bound is kv:
            return
        for row, (k_cache, v_cache) in zip(self.layers, kv, strict=True):
            row[table.K_CACHE], row[table.V_CACHE] = k_cache.data_ptr(), v_cache.data_ptr()
        self._block_size = kv[0][0].shape[1]
        self._bound = kv

    def _fill_layer(self, row: np.ndarray, layer: DecoderLayer | FirstLayer) -> None:
        attention = layer.attention
        gate, up = layer.gate_up.weight.chunk(2)
        row[table.W_QKV], row[table.S_QKV] = self.pack(attention.qkv.weight)
        row[table.W_OUT], row[table.S_OUT] = self.pack(attention.out.weight)
        row[table.W_GATE_UP], row[table.S_GATE_UP] = self.pack(interleave(gate, up))
        row[table.W_DOWN], row[table.S_DOWN] = self.pack(layer.down.weight)
        if layer.input_norm is not None:  # else its input comes prepared
            row[table.INPUT_NORM] = self._keep(layer.input_norm.float()).data_ptr()
        row[table.POST_NORM] = self._keep(layer.post_norm.float()).data_ptr()
        if attention.qkv.bias is not None:
            row[table.QKV_BIAS] = self._keep(attention.qkv.bias.float()).data_ptr()
        if attention.norms is not None:
            row[table.Q_NORM] = self._keep(attention.norms[0].float()).data_ptr()
            row[table.K_NORM] = self._keep(attention.norms[1].float()).data_ptr()
        row[table.WINDOW] = attention.window or 0
        row[table.HAS_ROPE] = int(attention.has_rope)

    def pack(self, weight: torch.Tensor) -> tuple[int, int]:
        """Addresses of a packed weight, and of its scales: 0 in bf16."""
        if not self.is_int8:
            return self._keep(pack_weight(weight)).data_ptr(), 0
        packed, scales = quantize_weight(weight)
        return self._keep(packed).data_ptr(), self._keep(scales).data_ptr()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor.contiguous())
        return self._kept[-1]


class RowBuffers:
    """Scratch of a forward, padded to whole tiles and zeroed, so that padding rows stay finite."""

    def __init__(self, shape: LayerShape, capacity: int, num_threads: int) -> None:
        self.capacity, self.num_threads = capacity, num_threads
        self._mixed: torch.Tensor | None = None
        self.residual = torch.zeros(capacity, shape.hidden_size)
        self.normed = torch.zeros(capacity, shape.hidden_size, dtype=torch.bfloat16)
        self.qkv = torch.zeros(capacity, shape.q_size + 2 * shape.kv_size)
        self.query = torch.zeros(capacity, shape.q_size, dtype=torch.bfloat16)
        self.attended = torch.zeros(capacity, shape.q_size, dtype=torch.bfloat16)
        self.activation = torch.zeros(capacity, shape.intermediate_size, dtype=torch.bfloat16)
        self.arrivals = torch.zeros(8, dtype=torch.int64)  # a cache line of its own
        self.workspace = -(-(SCRATCH_BYTES + (16 + table.CHUNK) * shape.head_dim * 4) // 64) * 64  # where that of int8 products begins
        per_thread = self.workspace + workspace_bytes(widest_input(shape))
        self.scratch = torch.zeros(num_threads, -(-per_thread // 4096) * 4096, dtype=torch.uint8)

    def mixed(self, width: int) -> torch.Tensor:
        """Rows [capacity, width] for a prepared input, made on first use."""
        if self._mixed is None or self._mixed.shape[1] != width:
            self._mixed = torch.zeros(self.capacity, width, dtype=torch.bfloat16)
        return self._mixed
