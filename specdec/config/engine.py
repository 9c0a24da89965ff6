"""EngineConfig: everything but speculation that the user decides, frozen.

Owns: engine options and their static ranges. Must not know: checkpoints (resolve.py reads those).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from specdec.config.methods import MethodTraits
from specdec.errors import ConfigError

if TYPE_CHECKING:
    from specdec.config.speculative import SpeculativeConfig

EMBEDDED_MODEL = "smollm2-135m-instruct"
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
QueuePolicy = Literal["fcfs", "priority"]
AttentionBackend = Literal["auto", "triton", "sdpa", "flashinfer"]
_VLLM_BACKENDS = {"triton_attn": "triton", "torch_sdpa": "sdpa"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which target is served. `model` is a directory, a .gguf file, a hub id, or EMBEDDED_MODEL."""

    model: str = EMBEDDED_MODEL
    tokenizer: str | None = None
    revision: str | None = None
    dtype: Dtype = "auto"
    max_model_len: int | None = None
    served_model_name: str | None = None
    seed: int = 0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, get_args(Dtype))
        _require("model", self.model, bool(self.model), "name a directory, a .gguf file or a hub id")
        _require("max_model_len", self.max_model_len, self.max_model_len is None or self.max_model_len >= 1, "be at least 1 token")
        _require("served_model_name", self.served_model_name, self.served_model_name != "", "not be empty")
        _require("seed", self.seed, -(2**63) <= self.seed < 2**63, "fit in 64 bits")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. `num_blocks` None derives it from `memory_fraction` of free memory."""

    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float | None = None  # None: 0.9 of a GPU, 0.3 of free RAM on a CPU
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _require("block_size", self.block_size, 1 <= self.block_size <= 1024, "be in 1..1024 tokens")
        _require("num_blocks", self.num_blocks, self.num_blocks is None or self.num_blocks >= 1, "be at least 1")
        fraction = self.memory_fraction
        _require("memory_fraction", fraction, fraction is None or 0 < fraction <= 1, "be in (0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the queues. `max_waiting` 0 means no limit.

    async_scheduling: plan a step while the one before it runs; what clients get is the same.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    policy: QueuePolicy = "fcfs"
    max_waiting: int = 1024
    async_scheduling: bool = True

    def __post_init__(self) -> None:
        _one_of("scheduling policy", self.policy, get_args(QueuePolicy))
        _require("max_num_seqs", self.max_num_seqs, self.max_num_seqs >= 1, "be at least 1")
        _require("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_batched_tokens >= 1, "be at least 1 token")
        threshold = self.long_prefill_token_threshold
        _require("long_prefill_token_threshold", threshold, threshold >= 0, "be 0 (off) or a number of tokens")
        _require("max_waiting", self.max_waiting, self.max_waiting >= 0, "be 0 (no limit) or a number of requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionConfig:
    """How a GPU runs a step. cudagraph_capture_sizes: query rows of the steps to capture, None for a list of the engine's own."""

    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    attention_backend: AttentionBackend = "auto"

    @staticmethod
    def backend_named(name: str) -> AttentionBackend:
        """Return the attention backend of a name as written here or, in capitals, in vLLM.

        Raises:
            ConfigError: there is none of this name.
        """
        lower = name.lower()
        backend = _VLLM_BACKENDS.get(lower, lower)
        if backend not in get_args(AttentionBackend):
            known = ", ".join(get_args(AttentionBackend))
            raise ConfigError(f"attention_backend is {name!r}, which specdec does not have", hint=f"use one of {known}")
        return cast("AttentionBackend", backend)

    def __post_init__(self) -> None:
        _one_of("attention_backend", self.attention_backend, get_args(AttentionBackend))
        sizes = self.cudagraph_capture_sizes
        _require("cudagraph_capture_sizes", sizes, sizes is None or (len(sizes) > 0 and min(sizes) >= 1), "be numbers of rows, at least 1")
        if sizes is not None and self.enforce_eager:
            raise ConfigError(f"cudagraph_capture_sizes is {sizes!r}, but enforce_eager captures nothing", hint="drop one of the two")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The whole engine as asked for. `speculative` None means plain decoding.

    suffix_corpora: files of texts that suffix drafting learns at start, for everybody, beside the config's suffix_corpus.
    suffix_share_responses: let suffix drafting learn across tenants, so that timing may tell of another's text.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    speculative: SpeculativeConfig | None = None
    device: Device = "auto"
    suffix_share_responses: bool = False
    suffix_corpora: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _one_of("device", self.device, get_args(Device))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """One line of the start-up report: a resolved value and where it came from."""

    name: str
    value: object
    source: Literal["user", "checkpoint", "default", "derived"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What was decided: the only configuration that code after start-up reads.

    engine: what was asked, with `speculative` as decided (method of the checkpoint, num_speculative_tokens filled in).
    model_path: directory with config.json and safetensors. hf_config: transformers configuration object.
    draft_model_path: directory of the draft checkpoint; None for methods without one.
    sources: of a hybrid, each source resolved as if it ran alone; proposers of sources are built from these.
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
    draft_model_path: str | None = None
    sources: tuple[ResolvedConfig, ...] = ()
    report: tuple[ReportRow, ...] = ()

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots reserved past the target's query."""
        return self.traits.lookahead if self.traits else 0


def _require(name: str, value: object, ok: bool, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}, but it must {rule}")


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    _require(name, value, value in choices, f"be one of {', '.join(choices)}")
