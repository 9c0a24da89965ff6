"""One frozen model per draft method: the keys it knows beyond the common ones, spelled as vLLM spells them.

Owns: keys, defaults and static ranges of each method. Must not know: checkpoints (compatibility.py) or what is built (speculative.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specdec.config.fields import Count, Flag, Natural, NonNegative, Probability, SpeculativeBase, Text, refuse

NGRAM_WINDOW = 5
SUFFIX_TREE_DEPTH = 24
_WHOLE_MODELS = ("draft_model", "early_exit")  # their layers are those of a target


class OneHotConfig(SpeculativeBase):
    """A method without draft logits: its drafts are looked up, not drawn."""

    @model_validator(mode="after")
    def _check_one_hot(self) -> OneHotConfig:
        if self.draft_sample_method != "greedy":
            rule = f"is `{self.draft_sample_method}`, but `{self.method}` has no draft logits to sample from"
            refuse("draft_sample_method", rule, "leave it out: such drafts are verified exactly as they are")
        return self


class LookupConfig(OneHotConfig):
    """N-gram lookup in the request's own tokens. Window bounds in tokens; one bound alone sets both."""

    num_speculative_tokens: Count
    prompt_lookup_min: Count = NGRAM_WINDOW
    prompt_lookup_max: Count = NGRAM_WINDOW

    @model_validator(mode="before")
    @classmethod
    def _fill_window(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        low, high = data.get("prompt_lookup_min"), data.get("prompt_lookup_max")
        given = {name: value for name, value in data.items() if not (name.startswith("prompt_lookup_") and value is None)}
        if (low is None) != (high is None):
            other = low if high is None else high
            given["prompt_lookup_min"] = given["prompt_lookup_max"] = other
        return given

    @model_validator(mode="after")
    def _check_window(self) -> LookupConfig:
        _check_no_model(self)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            rule = f"is {self.prompt_lookup_min}, which exceeds prompt_lookup_max {self.prompt_lookup_max}"
            refuse("prompt_lookup_min", rule, "raise prompt_lookup_max, or lower prompt_lookup_min")
        return self


class NgramConfig(LookupConfig):
    """N-gram lookup on the host."""

    method: Literal["ngram"] = "ngram"


class NgramGpuConfig(LookupConfig):
    """N-gram lookup on the device that holds the token rows."""

    method: Literal["ngram_gpu"] = "ngram_gpu"


class SuffixConfig(OneHotConfig):
    """Suffix trees over the request and over past responses. num_speculative_tokens defaults to the tree depth.

    suffix_decoding_max_spec_factor: drafts at most factor x match length. suffix_corpus: file of texts to learn at start.
    """

    method: Literal["suffix"] = "suffix"
    suffix_decoding_max_tree_depth: Count = SUFFIX_TREE_DEPTH
    suffix_decoding_max_cached_requests: Natural = 10_000
    suffix_decoding_max_spec_factor: NonNegative = 1.0
    suffix_decoding_min_token_prob: Probability = 0.1
    suffix_corpus: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_length(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("num_speculative_tokens") is not None:
            return data
        depth = data.get("suffix_decoding_max_tree_depth")
        return {**data, "num_speculative_tokens": depth if isinstance(depth, int) and depth >= 1 else SUFFIX_TREE_DEPTH}

    @model_validator(mode="after")
    def _check_suffix(self) -> SuffixConfig:
        _check_no_model(self)
        return self


class CustomClassConfig(OneHotConfig):
    """A user's class, `model` = "package.module.Class"."""

    method: Literal["custom_class"] = "custom_class"
    model: Text
    num_speculative_tokens: Count

    @model_validator(mode="after")
    def _check_path(self) -> CustomClassConfig:
        parts = self.model.split(".")
        if len(parts) < 2 or not all(part.isidentifier() for part in parts):
            rule = f"is {self.model!r}, but method `custom_class` needs the import path of a class"
            refuse("model", rule, "write it as my_package.my_module.MyProposer")
        return self


class HiddenStatesSource(BaseModel):
    """Which hidden states to extract, in the shape vLLM takes them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    eagle_aux_hidden_state_layer_ids: Annotated[tuple[Natural, ...], Field(min_length=1)]


class HiddenStatesModel(BaseModel):
    """Wrapper of HiddenStatesSource: `draft_model_config: {"hf_config": {...}}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hf_config: HiddenStatesSource


class ExtractHiddenStatesConfig(OneHotConfig):
    """Write chosen hidden states to files; no speculation happens.

    shared_storage_path: directory of the files, the system's temporary one by default. include_output_tokens: prompt and output.
    """

    method: Literal["extract_hidden_states"] = "extract_hidden_states"
    num_speculative_tokens: Count = 1
    draft_model_config: HiddenStatesModel
    shared_storage_path: Text | None = None
    include_output_tokens: Flag = False

    @model_validator(mode="before")
    @classmethod
    def _check_rule(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("rejection_sample_method") == "fly":
            refuse("rejection_sample_method", "is `fly`, but method `extract_hidden_states` verifies no drafts", "leave it out")
        return data

    @model_validator(mode="after")
    def _check_extract(self) -> ExtractHiddenStatesConfig:
        _check_no_model(self)
        if self.num_speculative_tokens != 1:
            refuse(
                "num_speculative_tokens", f"is {self.num_speculative_tokens}, but method `extract_hidden_states` takes 1", "leave it out"
            )
        return self


class DrafterConfig(SpeculativeBase):
    """A drafter with weights. max_model_len: it stops drafting there (tokens). draft_tensor_parallel_size: one device, so 1.

    quantization: `int8` rounds an unquantised head when it is loaded, one scale an output. Where its layers are compiled (CPUs with AMX)
    it is faster, elsewhere smaller.
    """

    revision: Text | None = None
    quantization: Literal["int8"] | None = None
    draft_tensor_parallel_size: Count | None = None
    max_model_len: Count | None = None
    enable_adaptive_verification: Flag = False

    @model_validator(mode="after")
    def _check_drafter(self) -> DrafterConfig:
        size = self.draft_tensor_parallel_size
        if self.quantization and self.method in _WHOLE_MODELS:
            refuse("quantization", f"is `{self.quantization}`, but method `{self.method}` drafts in the target's dtype", "leave it out")
        if size not in (None, 1):
            refuse("draft_tensor_parallel_size", f"is {size}, but target and draft share one device here, so it must be 1", "leave it out")
        return self


class ChainConfig(DrafterConfig):
    """A drafter that makes one draft after the other.

    draft_confidence_threshold: a chain ends before the probability of all its drafts together, in the drafter's own eyes, falls below it.
    """

    draft_confidence_threshold: Probability = 0.0

    @model_validator(mode="after")
    def _check_chain(self) -> ChainConfig:
        if self.draft_confidence_threshold:
            check_confidence_threshold(self, self.draft_sample_method)
        return self


def check_confidence_threshold(config: ChainConfig, draft_sample_method: str, *, prefix: str = "") -> None:
    """Refuse a threshold where the length of a chain would depend on sampled drafts, or where all drafts come from one pass.

    Raises:
        ConfigError: names the key, behind `prefix`.
    """
    name = f"{prefix}draft_confidence_threshold"
    if draft_sample_method != "greedy":
        refuse(name, f"needs greedy drafts, but draft_sample_method is `{draft_sample_method}`", "drop one of the two")
    if getattr(config, "parallel_drafting", False):
        refuse(name, "ends chains, but with parallel_drafting all drafts come from one pass", "drop one of the two")


class HeadConfig(DrafterConfig):
    """A drafter that lives in a checkpoint of its own."""

    model: Text


class DraftModelConfig(ChainConfig):
    """A small causal language model. parallel_drafting: one trained with mask tokens, which drafts in one pass.

    use_heterogeneous_vocab: the draft has another tokenizer; it drafts what both know.
    """

    method: Literal["draft_model"] = "draft_model"
    model: Text
    parallel_drafting: Flag = False
    use_heterogeneous_vocab: Flag = False


class EagleConfig(ChainConfig):
    """A head on the target's last hidden state. token_map: file of the ids that it scores, for it has no vocabulary of its own."""

    method: Literal["eagle"] = "eagle"
    model: Text
    token_map: Text | None = None


class Eagle3Config(ChainConfig):
    """A head on several of the target's hidden states. parallel_drafting: a P-EAGLE head."""

    method: Literal["eagle3"] = "eagle3"
    model: Text
    parallel_drafting: Flag = False


class MtpConfig(DrafterConfig):
    """Multi-token prediction layers; without `model` they come from the target's checkpoint. token_map: as for `eagle`."""

    method: Literal["mtp"] = "mtp"
    token_map: Text | None = None
    index_share_for_mtp_iteration: Flag | None = None


class ParallelConfig(DrafterConfig):
    """A drafter that fills a whole block in one pass; parallel_drafting false contradicts it."""

    parallel_drafting: Flag = True

    @model_validator(mode="after")
    def _check_parallel(self) -> ParallelConfig:
        if not self.parallel_drafting:
            refuse("parallel_drafting", f"is false, but method `{self.method}` always drafts a block in one pass", "leave it out")
        return self


class DflashConfig(ParallelConfig):
    """Block drafting over projected target states. xpress_topc: candidates of an XPress refiner, 0 is off."""

    method: Literal["dflash"] = "dflash"
    model: Text
    xpress_topc: Natural | None = None


class DsparkConfig(ParallelConfig):
    """Block drafting with a sequential low-rank head; without `model` it comes from the target's checkpoint."""

    method: Literal["dspark"] = "dspark"
    dspark_draft_topk: Count | None = None


class MedusaConfig(HeadConfig):
    """Independent heads, one per offset."""

    method: Literal["medusa"] = "medusa"


class MlpSpeculatorConfig(HeadConfig):
    """A small recurrence over hidden state and drafted tokens."""

    method: Literal["mlp_speculator"] = "mlp_speculator"


class EarlyExitConfig(ChainConfig):
    """The target's first `exit_layer` decoder layers as drafter; `model`: a trained adapter, optional."""

    method: Literal["early_exit"] = "early_exit"
    num_speculative_tokens: Count
    exit_layer: Count


def _check_no_model(config: SpeculativeBase) -> None:
    """Methods without weights take no model; their own name is how vLLM spells it."""
    if config.model not in (None, config.method, f"[{config.method}]"):
        refuse("model", f"is {config.model!r}, but method `{config.method}` has no weights to load", "drop model, or choose another method")
