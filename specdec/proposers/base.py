"""The seam between the runner and every draft method: StepView in, DraftBatch out.

Owns: the Proposer protocol, its records, and the registry (method -> import path, loaded on demand).
Must not know: scheduler, runner, or any concrete method.
Letters: R requests in the batch, N query rows, K draft nodes at most, D depth, M persistent rows,
V target vocabulary, Vd draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from specdec.config.methods import MethodTraits, Tap

if TYPE_CHECKING:
    import torch

    from specdec.config.engine import ResolvedConfig
    from specdec.kernels.graphs import CapturePlan
    from specdec.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSampling:
    """How drafts may be drawn, one entry per request of the batch.

    temperature [R] f32 (0: argmax), seed [R] int64, top_k [R] int64 (0: off), top_p [R] f32.
    token_mask(depth, paths=None) returns a [R, V] bool mask of what the grammar allows at that depth (0: right behind the anchor),
    or None. paths: by batch index, the drafts before it; without them only depth 0 is known.
    """

    temperature: torch.Tensor
    seed: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    token_mask: Callable[..., torch.Tensor | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """What a proposer sees after verification; read only.

    rows [R] int64: persistent rows. cu_query_lens [R+1] int32 and target_token_ids / target_positions [N]: the step's
    query rows. path [R, D+1]: offsets of kept rows from the request's anchor row. sampled_token_ids [R, D+1]
    padded with -1; num_sampled [R], 0 while a prompt is still being read: extend the draft KV, draft nothing.
    num_computed [R] int64: tokens with target KV after this step. token_ids [M, max_len] int32 and num_tokens [M] int64:
    committed history, the newest token included; the whole prompt is readable.
    max_nodes: list of R ints, 0 means extend only (slots past the target's query may not exist then).
    sources: per request, the only source allowed to draft, or None. can_draw_target: per request, whether a token may be
    drawn from the target's law here (see DraftBatch); false where logits are processed or reported first.
    taps: hidden states [N, H] by Tap. block_table [R, B] int32.
    """

    request_ids: tuple[str, ...]
    rows: torch.Tensor
    cu_query_lens: torch.Tensor
    target_token_ids: torch.Tensor
    target_positions: torch.Tensor
    path: torch.Tensor
    sampled_token_ids: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    num_computed: torch.Tensor
    token_ids: torch.Tensor
    num_tokens: torch.Tensor
    max_nodes: Sequence[int]
    sources: Sequence[str | None]
    can_draw_target: Sequence[bool]
    taps: Mapping[Tap, torch.Tensor]
    block_table: torch.Tensor
    sampling: DraftSampling


@dataclass(frozen=True, slots=True)
class Dense:
    """Draft logits [R, K, Vd] the drafts were truly drawn from (after temperature), with an optional draft -> target id map [Vd]."""

    logits: torch.Tensor
    id_map: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Sparse:
    """Support ids [R, K, S] int64 (target ids, -1 pads) and their log-probabilities [R, K, S] f32."""

    ids: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftLaw:
    """The law of the drafts. one_hot [R] bool; requests that are not one-hot have rows in `rows`."""

    one_hot: torch.Tensor
    rows: Dense | Sparse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """Drafts for the next step. token_ids [R, K] int64 (-1 pads), num_nodes [R] int64.

    parents [R, K] int64 or None for chains: index of the parent node, -1 for a child of the anchor; parents precede
    children. law None: every draft is one-hot. source: who drafted, per request; not read where there are no nodes.
    target_token_ids [R] int64 or None: the anchor's successor, drawn by this pass with DraftRail.sample_target from the
    target's logits at the anchor (-1: none), after it wrote the target's KV of the anchor. It is committed like a sampled
    token and becomes the anchor of the drafts returned beside it.
    confidence [R, K] f32 or None: estimated acceptance probability of each node given its parent.
    """

    token_ids: torch.Tensor
    num_nodes: torch.Tensor
    source: Sequence[str]
    parents: torch.Tensor | None = None
    law: DraftLaw | None = None
    confidence: torch.Tensor | None = None
    target_token_ids: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes a proposer needs, known before KV blocks are counted: weights, per KV block, and per persistent row.

    kv_layers: (num_kv_heads, head_dim) of each draft layer that owns a paged cache, in the order of DraftRail.kv.
    """

    weights_bytes: int = 0
    kv_bytes_per_block: int = 0
    row_bytes: int = 0
    kv_layers: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AdmitInfo:
    """What a proposer learns of a request when it gets its row. prompt_token_ids: all it has, after preemption its output too."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    tenant: str
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Outcome:
    """Why a row is released ("stop", "length", "abort", "preempt", "error") and the whole output of the request."""

    reason: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    tenant: str


class TargetHandle(Protocol):
    """Read-only access to the target: its modules and a forward over extra rows."""

    embed_tokens: Callable[[torch.Tensor], torch.Tensor]  # [N] -> [N, H]
    compute_logits: Callable[[torch.Tensor], torch.Tensor]  # [N, H] after final norm -> [N, V] f32
    reduced_head: Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]  # ids [n] -> compute_logits of those alone
    final_norm: Callable[[torch.Tensor], torch.Tensor]
    layers: Sequence[Any]
    config: Any
    forward: Callable[..., Any]  # (input_ids, positions, kv, metadata, taps=()) -> (hidden [N, H], taps)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRail:
    """What a proposer is lent once, after memory is fixed.

    kv: the proposer's own paged caches, one (K, V) pair per draft layer, or empty; they share block ids and lifetime with
    the target's, so a prefix hit finds draft KV where `propose` left no hole below num_computed. target_kv: the target's
    caches, read only except for slots from the anchor on, which the next target pass overwrites.
    build_attention(query_lens=, seq_lens=, block_table=, slot_mapping=, tree_mask=None, is_causal=True) -> AttentionMetadata.
    capture: how parts of drafting are captured as CUDA graphs, where they are (proposers/device_chain.py).
    sample_target(logits [L, V], rows [L], positions [L]) -> [L] int64 draws from the target's law with the target's own noise.
    """

    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    kv: Sequence[tuple[torch.Tensor, torch.Tensor]]
    target_kv: Sequence[tuple[torch.Tensor, torch.Tensor]]
    target: TargetHandle
    build_attention: Callable[..., Any]
    capture: CapturePlan
    sample_target: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@runtime_checkable
class Proposer(Protocol):
    """A draft method. `propose` is called on every step, also when nobody may draft, so that draft state never has holes."""

    traits: MethodTraits

    def memory(self) -> MemoryNeed:
        """Return what this method needs; called before `bind`."""
        ...

    def bind(self, rail: DraftRail) -> None:
        """Receive caches and handles; called once."""
        ...

    def admit(self, rows: Sequence[int], infos: Sequence[AdmitInfo]) -> None:
        """Requests were given these persistent rows (also after preemption)."""
        ...

    def propose(self, step: StepView) -> DraftBatch:
        """Extend draft state over the step's rows and draft for the next step."""
        ...

    def release(self, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """The rows are free again; caches of past responses learn here."""
        ...

    def sleep(self) -> None:
        """Drop device memory that `wake` can rebuild."""
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...

    def reload(self, draft_path: str | None = None, /) -> None:
        """Read the weights again after the target's changed; from draft_path, where one is given, from now on.

        A path comes only to methods with a draft checkpoint. When it cannot be read, the weights stay what they were.
        """
        ...


class BaseProposer:
    """Defaults for methods without weights: nothing to count, bind, or put to sleep."""

    traits: MethodTraits

    def memory(self) -> MemoryNeed:
        """No memory beyond the persistent rows."""
        return MemoryNeed()

    def bind(self, rail: DraftRail) -> None:
        """Nothing to bind."""

    def admit(self, rows: Sequence[int], infos: Sequence[AdmitInfo]) -> None:
        """Nothing to prepare."""

    def release(self, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn or forget."""

    def sleep(self) -> None:
        """Nothing to drop."""

    def wake(self) -> None:
        """Nothing to rebuild."""

    def reload(self, draft_path: str | None = None, /) -> None:
        """Nothing to read again."""


REGISTRY: dict[str, str] = {
    "ngram": "specdec.proposers.ngram:NgramProposer",
    "ngram_gpu": "specdec.proposers.ngram_gpu:NgramGpuProposer",
    "suffix": "specdec.proposers.suffix:SuffixProposer",
    "custom_class": "specdec.proposers.custom_class:build_custom",
    "extract_hidden_states": "specdec.proposers.extract_hidden_states:ExtractHiddenStatesProposer",
    "draft_model": "specdec.proposers.parallel_draft:build_draft_model",
    "eagle": "specdec.proposers.eagle:EagleProposer",
    "eagle3": "specdec.proposers.parallel_head:build_eagle3",
    "mtp": "specdec.proposers.mtp_modules:build_mtp",
    "dflash": "specdec.proposers.block:BlockProposer",
    "dspark": "specdec.proposers.block:BlockProposer",
    "medusa": "specdec.proposers.hidden_head:HiddenHeadProposer",
    "mlp_speculator": "specdec.proposers.hidden_head:HiddenHeadProposer",
    "early_exit": "specdec.proposers.early_exit:EarlyExitProposer",
    "hybrid": "specdec.proposers.hybrid:HybridProposer",
}


def build_proposer(resolved: ResolvedConfig) -> Proposer | None:
    """Build the proposer of the resolved configuration, or None for plain decoding.

    Each entry, a class or a function, is called with the resolved configuration.
    """
    if resolved.traits is None:
        return None
    module, _, name = REGISTRY[resolved.traits.method].partition(":")
    proposer: Proposer = getattr(import_module(module), name)(resolved)
    return proposer
