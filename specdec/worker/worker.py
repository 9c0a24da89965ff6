"""load_runner: weights, memory, caches, proposer, and the runner over them.

Owns: the order in which memory is counted: weights and draft needs and verify logits first, KV blocks from the rest.
Must not know: queues. Read next: model_runner.py.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from specdec.config.engine import ResolvedConfig
from specdec.errors import ConfigError
from specdec.kernels.attention.backends import load_backend
from specdec.kernels.graphs import CapturePlan, NoGraphs
from specdec.models.attention import KVPair, allocate_kv
from specdec.models.registry import TargetModel, load_model
from specdec.proposers.base import DraftRail, MemoryNeed, Proposer, build_proposer
from specdec.worker.cuda_graphs import captures_drafter, captures_target, chain_buckets, graph_bytes, make_graphs, step_buckets
from specdec.worker.model_runner import ModelRunner, build_metadata_factory
from specdec.worker.request_state import RequestState
from specdec.worker.rules import verify_rule
from specdec.worker.sampler import Sampler
from specdec.worker.target_pass import Execution
from specdec.worker.weights import Weights

logger = logging.getLogger(__name__)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CPU_FRACTION, CUDA_FRACTION = 0.3, 0.9


def load_runner(resolved: ResolvedConfig, *, proposer: Proposer | None = None) -> ModelRunner:
    """Load the target and everything a step needs. `proposer` replaces the configured one (tests of the seam).

    Raises:
        ConfigError: a checkpoint cannot be read, or the memory does not hold one request.
    """
    device, dtype = torch.device(resolved.device), DTYPES[resolved.dtype]
    with torch.inference_mode():
        model = load_model(resolved.model_path, resolved.hf_config, dtype=dtype, device=device, max_model_len=resolved.max_model_len)
        proposer = proposer or build_proposer(resolved)
        need = proposer.memory() if proposer else MemoryNeed()
        num_blocks = fix_num_blocks(resolved, model, need)
        block_size = resolved.engine.cache.block_size
        kv = allocate_kv(model.num_layers, (num_blocks, block_size, *model.kv_shape()), dtype=dtype, device=device)
        state = RequestState(
            max_num_seqs=resolved.engine.scheduler.max_num_seqs,
            max_model_len=resolved.max_model_len,
            block_size=block_size,
            max_nodes=proposer.traits.max_nodes if proposer else 0,
            seed=resolved.engine.model.seed,
            device=device,
        )
        rule = verify_rule(resolved.engine.speculative, max_nodes=proposer.traits.max_nodes if proposer else 0)
        sampler = Sampler(state, eos_token_ids=resolved.eos_token_ids, rule=rule)
        execution = _execution(resolved, model, num_blocks=state.block_table.shape[1])
        own = _draft_kv(resolved, model, need, num_blocks)
        if proposer is not None:
            proposer.bind(_rail(resolved, model, kv, sampler=sampler, own=own, execution=execution))
    graphs = execution.plan.graphs
    weights = Weights(resolved, model, [*kv, *own], proposer=proposer, graphs=graphs)
    runner = ModelRunner(
        model, kv, state=state, sampler=sampler, proposer=proposer, block_size=block_size, weights=weights, execution=execution
    )
    graphs.capture()
    return runner


def _execution(resolved: ResolvedConfig, model: TargetModel, *, num_blocks: int) -> Execution:
    """How steps run on this device. num_blocks: width of the block table."""
    plan = CapturePlan(
        graphs=make_graphs(resolved, model),
        buckets=step_buckets(resolved) if captures_target(resolved, model) else (),
        num_blocks=num_blocks,
        block_size=resolved.engine.cache.block_size,
    )
    return Execution(plan=plan, paged_attention=load_backend(resolved.engine.execution.attention_backend))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one configuration: what is fixed, and what one KV block costs (draft KV included)."""

    budget_bytes: int
    fixed_bytes: int
    block_bytes: int

    @property
    def num_blocks(self) -> int:
        """KV blocks that fit beside the fixed needs."""
        return max(self.budget_bytes - self.fixed_bytes, 0) // self.block_bytes


def fix_num_blocks(resolved: ResolvedConfig, model: TargetModel, need: MemoryNeed) -> int:
    """Return the number of KV blocks: the user's, or what the memory fraction leaves, never more than can be used."""
    cache, limits = resolved.engine.cache, resolved.engine.scheduler
    per_request = -(-(resolved.max_model_len + resolved.num_lookahead_tokens) // cache.block_size)
    if cache.num_blocks is not None:
        num_blocks = cache.num_blocks
    else:
        plan = memory_plan(resolved, model, need)
        num_blocks = min(plan.num_blocks, limits.max_num_seqs * per_request + 1)
        if num_blocks < per_request + 1:
            raise ConfigError(
                f"max_model_len {resolved.max_model_len} needs {per_request + 1} KV blocks, but memory holds {num_blocks}",
                hint="lower --max-model-len, raise --memory-fraction, or set --num-blocks",
            )
    logger.info("KV cache: %d blocks of %d tokens", num_blocks, cache.block_size)
    return num_blocks


def memory_plan(resolved: ResolvedConfig, model: TargetModel, need: MemoryNeed) -> MemoryPlan:
    """Count weights, draft weights, draft rows and verify logits before any KV block."""
    limits, cache = resolved.engine.scheduler, resolved.engine.cache
    device = torch.device(resolved.device)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]  # the target's weights are already resident
        fraction = cache.memory_fraction or CUDA_FRACTION
    else:
        free = _free_ram_bytes()
        fraction = cache.memory_fraction or CPU_FRACTION
    max_nodes = resolved.traits.max_nodes if resolved.traits else 0
    logits_rows = min(limits.max_num_seqs * (1 + max_nodes), limits.max_num_batched_tokens)
    has_laws = resolved.traits is not None and resolved.traits.laws != "one_hot"
    copies = 6 if has_laws else 3  # logits, law, and its running sum; then drafts' laws, waiting and under test, and a residual
    logits_bytes = logits_rows * resolved.vocab_size * 4 * copies
    activation_bytes = limits.max_num_batched_tokens * resolved.hf_config.hidden_size * 4 * 16
    heads, head_dim = model.kv_shape()
    element = torch.empty(0, dtype=model.dtype).element_size()
    block_bytes = 2 * model.num_layers * cache.block_size * heads * head_dim * element
    fixed = logits_bytes + activation_bytes + need.weights_bytes + need.row_bytes * limits.max_num_seqs + graph_bytes(resolved, model)
    return MemoryPlan(int(free * fraction), fixed, block_bytes + need.kv_bytes_per_block)


def _free_ram_bytes() -> int:
    """MemAvailable of the machine, or of a container's limit where that is lower."""
    import os
    from pathlib import Path

    try:
        line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
        free = int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free = min(free, int(limit) - used) if limit != "max" else free
    except (OSError, ValueError):
        pass
    return max(free, 0)


def _draft_kv(resolved: ResolvedConfig, model: TargetModel, need: MemoryNeed, num_blocks: int) -> list[KVPair]:
    """The drafter's own caches, in the target's blocks."""
    blocks, device = (num_blocks, resolved.engine.cache.block_size), torch.device(resolved.device)
    return [pair for shape in need.kv_layers for pair in allocate_kv(1, (*blocks, *shape), dtype=model.dtype, device=device)]


def _rail(
    resolved: ResolvedConfig, model: TargetModel, kv: list[KVPair], *, sampler: Sampler, own: list[KVPair], execution: Execution
) -> DraftRail:
    device = torch.device(resolved.device)
    is_captured, plan = captures_drafter(resolved), execution.plan
    return DraftRail(
        device=device,
        dtype=model.dtype,
        vocab_size=resolved.vocab_size,
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.engine.scheduler.max_num_seqs,
        block_size=resolved.engine.cache.block_size,
        kv=own,
        target_kv=kv,
        target=model,  # type: ignore[arg-type]
        build_attention=build_metadata_factory(device, execution.paged_attention),  # type: ignore[arg-type]
        capture=replace(plan, graphs=plan.graphs if is_captured else NoGraphs(), buckets=chain_buckets(resolved) if is_captured else ()),
        sample_target=sampler.sample_target,
    )
