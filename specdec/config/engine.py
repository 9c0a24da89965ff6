"""EngineConfig: everything but speculation that the user decides, frozen.

Owns: engine options and their static ranges. Must not know: checkpoints (resolve.py reads those).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from specdec.config.methods import MethodTraits

if TYPE_CHECKING:
    from specdec.config.speculative import SpeculativeConfig

EMBEDDED_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which target is served. `model` is a directory, a .gguf file, a hub id, or EMBEDDED_MODEL."""

    model: str = EMBEDDED_MODEL
    tokenizer: str | None = None
    revision: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int | None = None
    served_model_name: str | None = None
    seed: int = 0
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. `num_blocks` None derives it from `memory_fraction` of free memory."""

    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float | None = None  # None: 0.9 of a GPU, 0.3 of free RAM on a CPU
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the queues. `max_waiting` 0 means no limit."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_waiting: int = 1024
    async_scheduling: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The whole engine as asked for. `speculative` None means plain decoding."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """One line of the start-up report: a resolved value and where it came from."""

    name: str
    value: object
    source: Literal["user", "checkpoint", "default", "derived"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What was decided: the only configuration that code after start-up reads.

    model_path: directory with config.json and safetensors. hf_config: transformers configuration object.
    num_blocks None: the worker fixes it after counting weights and verify logits.
    """

    engine: EngineConfig
    model_path: str
    tokenizer_path: str
    hf_config: Any
    dtype: str
    device: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    served_model_name: str
    traits: MethodTraits | None = None
    draft_hf_config: Any = None
    report: tuple[ReportRow, ...] = ()

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots reserved past the target's query."""
        return self.traits.lookahead if self.traits else 0
