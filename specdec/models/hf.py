"""HfModel: any attention-only causal LM of transformers, its own code over our paged KV.

Owns: one attention function, registered with transformers, and the trial at load that proves it computes what the
model's own attention does. Must not know: requests or drafts. Read next: hf_trial.py.
Letters: N query rows, H hidden, Hq/Hkv query and KV heads, Dh head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn

from specdec.config.methods import FINAL_NORM, Tap
from specdec.errors import ConfigError
from specdec.kernels.layer_ops import layer_ops
from specdec.models.attention import AttentionMetadata, KVPair
from specdec.models.linear import Linear
from specdec.models.source import check_model_dir

ATTENTION = "specdec_paged"
HOLDER = "specdec_holder"  # attribute of every attention module: some models pass no keywords down to their layers
ANOTHER_MODEL = "serve an attention-only model that transformers runs through its attention interface"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What a model handed its attention in one call. extras: arguments beyond q, k, v that were set."""

    layer: int
    key_shape: tuple[int, int]  # (Hkv, Dh)
    value_shape: tuple[int, int]
    window: int | None
    extras: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedStep:
    """One forward's caches and metadata. observe: told of every call before its cache is read (the trial at load)."""

    kv: Sequence[KVPair] | Mapping[int, KVPair]
    meta: AttentionMetadata
    ops: ModuleType
    observe: Callable[[AttentionCall, torch.Tensor], None] | None = None


@dataclass(slots=True)
class StepHolder:
    """The step that one model is running; shared by its attention modules and set by HfModel.run alone."""

    step: PagedStep | None = None


def attend_paged(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """Store key, value [1, Hkv, N, Dh] and attend query [1, Hq, N, Dh]; the signature is transformers', the result [1, N, Hq, Dh].

    Raises:
        ConfigError: the module has no number, or runs outside a step.
    """
    holder: StepHolder | None = getattr(module, HOLDER, None)
    if holder is None or holder.step is None:
        raise ConfigError(f"{type(module).__name__} has no layer_idx, so its cache is not known", hint=ANOTHER_MODEL)
    step, layer = holder.step, int(module.layer_idx)  # type: ignore[arg-type]
    if step.observe is not None:
        call = AttentionCall(
            layer=layer,
            key_shape=(key.shape[1], key.shape[3]),
            value_shape=(value.shape[1], value.shape[3]),
            window=sliding_window,
            extras={**extras, "attention_mask": attention_mask},
        )
        step.observe(call, key)
    k_cache, v_cache = step.kv[layer]
    meta = step.meta
    step.ops.store_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), k_cache, v_cache, meta.slot_mapping)
    attended = (meta.paged_attention or step.ops.paged_attention)(
        query[0].transpose(0, 1).contiguous(),
        k_cache,
        v_cache,
        query_lens=meta.query_lens_cpu,
        seq_lens=meta.seq_lens_cpu,
        block_table=meta.block_table,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        is_causal=meta.is_causal,
        tree_mask=meta.tree_mask,
        window=sliding_window,
        device_lens=meta.device_lens,
    )
    return attended[None], None


# Only the attention is registered, no mask beside it: transformers then builds none, and metadata says who sees what.
transformers.AttentionInterface.register(ATTENTION, attend_paged)


class HfModel:
    """A target run by transformers' code. `config` is the text configuration.

    Raises:
        ConfigError: the architecture keeps state outside the KV cache or needs more of attention than is implemented,
            a weight is missing, unexpected or of another shape, or the trial disagrees with the model's own attention.
    """

    is_capturable = False  # other people's code may wait for the device

    def __init__(self, model_path: str, hf_config: Any, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        from specdec.models.hf_trial import check_config, run_trial

        check_config(hf_config, max_model_len)
        self.dtype, self.device = dtype, device
        self.ops = layer_ops(device)
        self.model = _load(model_path, hf_config, dtype=dtype, device=device)
        self.config = self.model.config.get_text_config()
        self.decoder: nn.Module = self.model.base_model
        head = self.model.get_output_embeddings()
        if head is None or self.decoder is self.model:
            raise ConfigError(f"{type(self.model).__name__} has no decoder and head apart from each other", hint=ANOTHER_MODEL)
        self.head: nn.Module = head
        self._holder = _attach_holder(self.decoder)
        self.parent, self.layers = find_layers(self.decoder, self.config.num_hidden_layers)
        self._kv_shape, self.tail = run_trial(self)

    @property
    def num_layers(self) -> int:
        """Decoder layers, each with one KV pair."""
        return len(self.layers)

    def kv_shape(self) -> tuple[int, int]:
        """(num_kv_heads, head_dim) of every layer's cache."""
        return self._kv_shape

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, tied ones once."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())

    def embed_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, H], scaled as the model scales it, without learned positions."""
        embedded: torch.Tensor = self.model.get_input_embeddings()(input_ids)
        return embedded

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """What follows the last decoder layer, [N, H] -> [N, H].

        Raises:
            ConfigError: the model does more there than apply modules one after the other.
        """
        if self.tail is None:
            raise ConfigError(
                f"the final norm of {type(self.model).__name__} could not be told apart, and the draft method reads it",
                hint="use a draft method that reads no hidden states, such as ngram",
            )
        for module in self.tail:
            hidden = module(hidden)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed hidden [L, H] -> logits [L, V] float32, scaled and capped as the config says."""
        return self._finish(self.head(hidden).float())

    def reduced_head(self, ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """compute_logits of the ids [n] alone, over a copy of their rows: [L, H] -> [L, n] float32."""
        weight, bias = self.head.get_parameter("weight"), getattr(self.head, "bias", None)
        part = Linear(weight.detach(), None if bias is None else bias.detach()).rows(ids)
        return lambda hidden: self._finish(part(hidden).float())

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits * (getattr(self.config, "logit_scale", None) or 1.0) / (getattr(self.config, "logits_scaling", None) or 1.0)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv: Sequence[KVPair], meta: AttentionMetadata, *, taps: Collection[Tap] = ()
    ) -> tuple[torch.Tensor, Mapping[Tap, torch.Tensor]]:
        """Return the normed hidden states [N, H] and the tapped ones: m is the residual stream after m layers."""
        step = PagedStep(kv=kv, meta=meta, ops=self.ops)
        with self._capture([tap for tap in taps if isinstance(tap, int)]) as tapped:
            hidden = self.run(input_ids, positions, step)
        if FINAL_NORM in taps:
            tapped[FINAL_NORM] = hidden
        return hidden, tapped

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> torch.Tensor:
        """One pass of the decoder over [N] rows of all requests at once; the normed hidden states are [N, H]."""
        self._holder.step = step
        try:
            output = self.decoder(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            self._holder.step = None
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    @contextmanager
    def _capture(self, depths: Sequence[int]) -> Iterator[dict[Tap, torch.Tensor]]:
        """Collect the stream [N, H] after `depths` layers while the decoder runs; 0 is what enters the first layer."""
        found: dict[Tap, torch.Tensor] = {}

        def keep_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[0] = (args[0] if args else kwargs["hidden_states"])[0]

        def keep_output(depth: int) -> Callable[..., None]:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                found[depth] = (output[0] if isinstance(output, tuple) else output)[0]

            return hook

        handles: list[Any] = [self.layers[depth - 1].register_forward_hook(keep_output(depth)) for depth in depths if depth > 0]
        if 0 in depths:
            handles.append(self.layers[0].register_forward_pre_hook(keep_input, with_kwargs=True))
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


def find_layers(decoder: nn.Module, count: int) -> tuple[nn.Module, nn.ModuleList]:
    """Return the module that owns the decoder layers, and the layers."""
    for parent in decoder.modules():
        for child in parent.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return parent, child
    raise ConfigError(f"{type(decoder).__name__} has no list of {count} decoder layers", hint=ANOTHER_MODEL)


def _attach_holder(decoder: nn.Module) -> StepHolder:
    """Give every module that knows its layer the one holder of this model."""
    holder = StepHolder()
    for module in decoder.modules():
        if getattr(module, "layer_idx", None) is not None:
            setattr(module, HOLDER, holder)
    return holder


def _load(model_path: str, hf_config: Any, *, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the model with all its weights in `dtype`, ready to evaluate; nothing is left at a random start."""
    check_model_dir(Path(model_path))  # names the file at fault, which transformers does not
    with _quiet_transformers():
        try:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                model_path,
                config=hf_config,
                dtype=dtype,
                attn_implementation=ATTENTION,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are named below, with both shapes
                output_loading_info=True,
            )
        except Exception as error:  # unknown classes, quantizers that are not installed and damaged files end here by many kinds
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{model_path} cannot be loaded: {first}", hint="check that transformers can load this model") from error
    _require_all_weights(model_path, report)
    return model.to(device).eval().requires_grad_(False)


def _require_all_weights(model_path: str, report: Mapping[str, Any]) -> None:
    if mismatched := sorted(report["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ConfigError(
            f"tensor `{name}` of {model_path} has shape {list(found)}, but the config asks for {list(expected)}",
            hint="config.json and weights do not belong together",
        )
    for kind, hint in (("missing", "the checkpoint is incomplete"), ("unexpected", "serving it would ignore these weights")):
        if names := sorted(report[f"{kind}_keys"]):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(f"{kind} tensor `{names[0]}`{more} in {model_path}", hint=hint)
    if errors := report.get("error_msgs"):
        raise ConfigError(f"{model_path} cannot be loaded: {next(iter(errors))}", hint="check that transformers can load this model")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars or advice while loading: what is wrong is raised."""
    from transformers.utils import logging as theirs

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(theirs.CRITICAL)
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()
