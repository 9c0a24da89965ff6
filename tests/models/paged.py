"""PagedRun: feeds a target the way the worker does, several requests at once over interleaved blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from specdec.config.methods import Tap
from specdec.models.attention import AttentionMetadata, allocate_kv, build_tree_mask
from specdec.models.registry import TargetModel


class PagedRun:
    """Requests 0 to num_requests - 1 own every num_requests-th block, handed out from the last block down."""

    def __init__(self, model: TargetModel, *, num_requests: int = 1, max_len: int = 64, block_size: int = 4) -> None:
        self.model, self.block_size = model, block_size
        blocks = -(-max_len // block_size)
        order = torch.arange(num_requests * blocks - 1, -1, -1, dtype=torch.int32)
        self.block_table = order.view(blocks, num_requests).T.contiguous()  # [R, B]
        self.kv = allocate_kv(model.num_layers, (len(order), block_size, *model.kv_shape()), dtype=model.dtype, device=model.device)
        for pair in self.kv:
            for cache in pair:
                cache.fill_(1e3)  # a slot that is read before it is written shows at once
        self.lengths = [0] * num_requests
        self.taps: Mapping[Tap, torch.Tensor] = {}

    @torch.inference_mode()
    def feed(self, chunks: Mapping[int, Sequence[int]], *, taps: Sequence[Tap] = ()) -> dict[int, torch.Tensor]:
        """Append each request's chunk in one step and return its logits [len(chunk), V]."""
        result = self._run(chunks, parents=None, taps=taps)
        for request, chunk in chunks.items():
            self.lengths[request] += len(chunk)
        return result

    @torch.inference_mode()
    def peek_trees(self, anchors: Mapping[int, Sequence[int]], trees: Mapping[int, Sequence[tuple[int, int]]]) -> dict[int, torch.Tensor]:
        """Logits of each request's anchor rows and then its tree nodes (parent node or -1, token id); nothing is kept."""
        chunks = {request: [*anchors[request], *(token for _, token in nodes)] for request, nodes in trees.items()}
        return self._run(chunks, parents={request: [parent for parent, _ in nodes] for request, nodes in trees.items()}, taps=())

    def _run(
        self, chunks: Mapping[int, Sequence[int]], *, parents: Mapping[int, list[int]] | None, taps: Sequence[Tap]
    ) -> dict[int, torch.Tensor]:
        query_lens = [len(chunk) for chunk in chunks.values()]
        places, positions = [], []
        for request, chunk in chunks.items():
            own = list(range(self.lengths[request], self.lengths[request] + len(chunk)))
            places += [(request, index) for index in own]
            positions += own if parents is None else _tree_positions(own, parents[request])
        slots = [int(self.block_table[request, i // self.block_size]) * self.block_size + i % self.block_size for request, i in places]
        seq_lens = tuple(self.lengths[request] + len(chunk) for request, chunk in chunks.items())
        meta = AttentionMetadata(
            cu_query_lens=torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=self.block_table[list(chunks)],
            slot_mapping=torch.tensor(slots),
            query_lens_cpu=tuple(query_lens),
            seq_lens_cpu=seq_lens,
            tree_mask=None if parents is None else build_tree_mask([parents[request] for request in chunks], query_lens),
        )
        ids = torch.tensor([token for chunk in chunks.values() for token in chunk])
        hidden, self.taps = self.model.forward(ids, torch.tensor(positions), self.kv, meta, taps=taps)
        parts = self.model.compute_logits(hidden).split(query_lens)
        return dict(zip(chunks, parts, strict=True))


def _tree_positions(own: list[int], parents: list[int]) -> list[int]:
    """Positions of the chain rows, then of the nodes: anchor plus depth, whatever slot they lie in."""
    num_chain = len(own) - len(parents)
    anchor = own[num_chain - 1]
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return own[:num_chain] + [anchor + depth for depth in depths]
