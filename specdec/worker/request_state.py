"""RequestState: the runner's persistent rows, one per request it knows.

Owns: token history, counters, block tables and waiting drafts on the device, and their host twins.
Must not know: queues (scheduler) or how drafts are made. Letters: M rows, K draft nodes, B blocks per request.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from specdec.kernels.transfers import upload
from specdec.proposers.base import Dense, DraftBatch, Outcome, Sparse
from specdec.sampling_params import SamplingParams
from specdec.scheduler.output import FinishedRequest, NewRequestData
from specdec.structured.compiler import Grammar
from specdec.structured.matcher import Matcher
from specdec.worker.input_batch import INVALID_TOKEN


@dataclass(slots=True)
class RowInfo:
    """Host side of one row. prefill_len: tokens known when the row was given. token_ids: all that are known by now.

    num_tokens (committed), num_computed and num_drafts (waiting) are bounds while steps are on their way, exact otherwise; see
    step_record.py. newest_step: serial of the last step that the request was in.
    matcher: where a structured request stands in its grammar, None for others.
    """

    request_id: str
    row: int
    num_prompt_tokens: int
    prefill_len: int
    num_tokens: int
    num_computed: int
    num_blocks: int
    sampling: SamplingParams
    tenant: str
    seed: int
    track_drafts: bool
    token_ids: list[int] = field(default_factory=list)
    num_drafts: int = 0
    newest_step: int = -1
    source: str = ""
    parents: list[int] | None = None
    law: Dense | Sparse | None = None  # rows of this request alone, [1, K, ...]; None means one-hot
    matcher: Matcher | None = None


class RequestState:
    """Rows by request id. Device tensors: token_ids [M, max_len] int32, num_tokens and num_computed [M] int64,
    draft_token_ids [M, K] int64, block_table [M, B] int32, and the sampling parameters [M]."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, max_nodes: int, seed: int, device: torch.device) -> None:
        rows, blocks = max_num_seqs, -(-max_model_len // block_size) + 1
        self.device = device
        self.infos: dict[str, RowInfo] = {}
        self._free = list(range(rows - 1, -1, -1))
        self._seeds = random.Random(seed)
        self._seed_of: dict[str, int] = {}  # survives preemption, so that a resumed request replays its own noise
        self.token_ids = torch.zeros(rows, max_model_len + 1, dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.num_computed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.draft_token_ids = torch.full((rows, max(max_nodes, 1)), INVALID_TOKEN, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(rows, dtype=torch.float32, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)

    def add(self, new: NewRequestData) -> RowInfo:
        """Give a new or resumed request a row and fill it."""
        row = self._free.pop()
        sampling = new.sampling
        info = RowInfo(
            request_id=new.request_id,
            row=row,
            num_prompt_tokens=new.num_prompt_tokens,
            prefill_len=len(new.token_ids),
            num_tokens=len(new.token_ids),
            num_computed=new.num_computed_tokens,
            num_blocks=0,
            sampling=sampling,
            tenant=new.tenant,
            track_drafts=new.track_drafts,
            seed=self._seed_for(new.request_id, sampling.seed),
            token_ids=list(new.token_ids),
            matcher=_matcher_for(new),
        )
        self.infos[new.request_id] = info
        self.token_ids[row, : info.num_tokens] = upload(new.token_ids, self.device, dtype=torch.int32)
        self.num_tokens[row] = info.num_tokens
        self.num_computed[row] = new.num_computed_tokens
        self.draft_token_ids[row] = INVALID_TOKEN
        self.temperature[row] = 0.0 if sampling.is_greedy else sampling.temperature
        self.top_k[row] = max(sampling.top_k, 0)
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = info.seed
        self.block_table[row] = 0  # the padding block: nothing that a former request held may be written to
        self.append_blocks(new.request_id, new.block_ids)
        return info

    @property
    def is_greedy(self) -> bool:
        """True when no request here draws at random."""
        return all(info.sampling.is_greedy for info in self.infos.values())

    def append_blocks(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        """Write new block ids behind the ones the row has."""
        if block_ids:
            info = self.infos[request_id]
            end = info.num_blocks + len(block_ids)
            self.block_table[info.row, info.num_blocks : end] = upload(block_ids, self.device, dtype=torch.int32)
            info.num_blocks = end

    def release(self, finished: dict[str, FinishedRequest], preempted: Iterable[str]) -> tuple[list[int], list[Outcome]]:
        """Free rows; return them with their outcomes, for the proposer to forget and to learn."""
        rows, outcomes = [], []
        for request_id in [*finished, *preempted]:
            if request_id in finished:
                self._seed_of.pop(request_id, None)
            info = self.infos.pop(request_id, None)
            if info is None:
                continue
            tokens = tuple(info.token_ids[: finished[request_id].num_tokens] if request_id in finished else info.token_ids)
            reason = finished[request_id].reason if request_id in finished else "preempt"
            rows.append(info.row)
            outcomes.append(Outcome(reason, tokens[: info.num_prompt_tokens], tokens[info.num_prompt_tokens :], info.tenant))
            self._free.append(info.row)
        return rows, outcomes

    def store_drafts(self, infos: Sequence[RowInfo], rows: torch.Tensor, drafts: DraftBatch) -> None:
        """Keep a proposer's batch for the next step, info.num_drafts nodes at most; columns past them become INVALID_TOKEN."""
        width = drafts.token_ids.shape[1]
        self.draft_token_ids[rows] = INVALID_TOKEN
        if width:
            unused = torch.arange(width, device=rows.device)[None] >= drafts.num_nodes.to(rows.device)[:, None]
            self.draft_token_ids[rows, :width] = drafts.token_ids.to(rows.device).masked_fill(unused, INVALID_TOKEN)
        for index, info in enumerate(infos):
            count = info.num_drafts
            info.source = drafts.source[index] if count else ""
            info.parents = self._parents_of(drafts, index, count)
            info.law = _law_of(drafts, index) if count else None

    def _parents_of(self, drafts: DraftBatch, index: int, count: int) -> list[int] | None:
        """A request's tree, as long as K so that a plan may name more nodes than were drafted."""
        if drafts.parents is None or not count:
            return None
        parents: list[int] = drafts.parents[index, :count].tolist()
        return parents + [-1] * (self.draft_token_ids.shape[1] - count)

    def _seed_for(self, request_id: str, asked: int | None) -> int:
        if request_id not in self._seed_of:
            seed = self._seeds.getrandbits(63) if asked is None else asked
            self._seed_of[request_id] = (seed + 2**63) % 2**64 - 2**63  # the same 64 bits as a signed number
        return self._seed_of[request_id]


def _matcher_for(new: NewRequestData) -> Matcher | None:
    """The matcher of a structured request, behind the output it comes with after preemption."""
    wish = new.sampling.structured
    if wish is None:
        return None
    assert isinstance(wish.compiled, Grammar), f"{new.request_id}: the engine compiles constraints before it queues a request"
    return Matcher(wish.compiled, stop_token_ids=new.sampling.stop_token_ids, output=new.token_ids[new.num_prompt_tokens :])


def _law_of(drafts: DraftBatch, index: int) -> Dense | Sparse | None:
    law = drafts.law
    if law is None or law.rows is None or bool(law.one_hot[index]):
        return None
    if isinstance(law.rows, Dense):
        return Dense(law.rows.logits[index : index + 1], law.rows.id_map)
    return Sparse(law.rows.ids[index : index + 1], law.rows.logprobs[index : index + 1])
