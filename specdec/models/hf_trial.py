"""run_trial: a few tokens through the paged cache in two chunks must equal the model's own eager attention.

Owns: what HfModel refuses and why; state outside the KV cache, lost windows, caps, biases and positions all end here.
Must not know: how weights are loaded. Read next: hf.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from specdec.errors import ConfigError
from specdec.models.attention import AttentionMetadata, KVPair
from specdec.models.hf import ANOTHER_MODEL, ATTENTION, AttentionCall, PagedStep

if TYPE_CHECKING:
    from specdec.models.hf import HfModel

_LAYER_TYPES = ("full_attention", "sliding_attention")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Arguments that do not change the law of attention; anything else that is set is refused by name.
_HARMLESS = frozenset(
    {"dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
)
_CHUNKS = (4, 3)
_BLOCK_SIZE = 4
_BLOCKS = (2, 0)  # out of order, so that a model which ignores the block table is caught
# Relative distance of the logits. Float32 differs by summation order alone; a 16-bit mixture of experts may route a token
# elsewhere after rounding, while lost state or positions move the logits by about their own size.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.25}


def check_config(hf_config: Any, max_model_len: int) -> None:
    """Refuse an architecture by what its config and class say, before any weight is read."""
    text = hf_config.get_text_config()
    try:
        with torch.device("meta"):
            shell = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(hf_config))
    except Exception as error:  # no class for this config, or values its class does not accept
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"model type {text.model_type!r} cannot be built by transformers: {first}", hint=ANOTHER_MODEL) from None
    name = type(shell).__name__
    if type(shell)._is_stateful:
        raise ConfigError(f"{name} keeps recurrent state, which cannot be rolled back when drafts are rejected", hint=ANOTHER_MODEL)
    if not type(shell).is_backend_compatible():
        raise ConfigError(f"{name} does not run its attention through transformers' attention interface", hint=ANOTHER_MODEL)
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            raise ConfigError(f"{name} has layers of type {kind!r}, but served are {' and '.join(_LAYER_TYPES)}", hint=ANOTHER_MODEL)
    _check_rope(text, name, max_model_len)


def _check_rope(text: Any, name: str, max_model_len: int) -> None:
    """Refuse frequencies that depend on the longest sequence of a batch: one request would change another's cached keys."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    for entry in nested:
        own = entry.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        limit: int = own or getattr(text, "max_position_embeddings", None) or 0
        if entry.get("rope_type") in _LENGTH_DEPENDENT_ROPE and max_model_len > limit:
            changes = f"{name} has rope_type {entry['rope_type']!r}, whose angles change past {limit} tokens"
            raise ConfigError(f"{changes}, but max_model_len is {max_model_len}", hint=f"set --max-model-len to at most {limit}")


def run_trial(model: HfModel) -> tuple[tuple[int, int], tuple[nn.Module, ...] | None]:
    """Return (num_kv_heads, head_dim) of the caches and the modules after the last layer (None: not a plain sequence of modules).

    Raises:
        ConfigError: the model asks more of attention than the paged one does, or the two disagree.
    """
    total = sum(_CHUNKS)
    ids = (torch.arange(total, device=model.device) * 7 + 3) % model.config.vocab_size
    positions = torch.arange(total, device=model.device)
    with torch.inference_mode():
        expected = _eager_logits(model, ids, positions)
        trial = _Trial(model)
        hidden, tail = trial.run(ids, positions)
        shape = trial.kv_shape()
        _check_close(model, model.compute_logits(hidden), expected)
    return shape, tail


def _eager_logits(model: HfModel, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[N, V] float32 of the model's own code, in one piece and without a cache."""
    model.model.set_attn_implementation("eager")
    try:
        output = model.model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
    finally:
        model.model.set_attn_implementation(ATTENTION)
    logits: torch.Tensor = output.logits[0].float()
    return logits


def _check_close(model: HfModel, actual: torch.Tensor, expected: torch.Tensor) -> None:
    distance = float((actual - expected).norm() / expected.norm().clamp(min=1e-12))
    limit = _TOLERANCE[model.dtype]
    if not distance <= limit:  # NaN is no agreement either
        name = type(model.model).__name__
        raise ConfigError(
            f"{name} over the paged cache differs from its own attention by {distance:.2g} of the logits (limit {limit})",
            hint="it keeps or adds something that the cache does not hold; " + ANOTHER_MODEL,
        )


class _Trial:
    """Runs the decoder chunk by chunk over a cache that takes its shapes from the first call of each layer."""

    def __init__(self, model: HfModel) -> None:
        self.model = model
        self.name = type(model.model).__name__
        self.kv: dict[int, KVPair] = {}
        self.shapes: dict[int, tuple[int, int]] = {}
        self._seen: list[int] = []

    def run(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, tuple[nn.Module, ...] | None]:
        """Return the normed hidden states [N, H] of all chunks and the modules after the last layer."""
        parts, tail, start = [], None, 0
        for length in _CHUNKS:
            self._seen = []
            rows = slice(start, start + length)
            step = PagedStep(kv=self.kv, meta=_metadata(start, length, ids.device), ops=self.model.ops, observe=self._observe)
            with _TailWatch(self.model.parent, self.model.layers) as watch:
                parts.append(self.model.run(ids[rows], positions[rows], step))
            tail = watch.tail(parts[-1])
            missing = sorted(set(range(len(self.model.layers))) - set(self._seen))
            if missing:
                raise ConfigError(f"layer {missing[0]} of {self.name} does not attend through transformers' interface", hint=ANOTHER_MODEL)
            start += length
        return torch.cat(parts), tail

    def kv_shape(self) -> tuple[int, int]:
        """Return the one shape that all layers share."""
        first = self.shapes[0]
        for layer, shape in sorted(self.shapes.items()):
            if shape != first:
                raise ConfigError(
                    f"layer {layer} of {self.name} has {shape[0]} KV heads of {shape[1]}, layer 0 has {first[0]} of {first[1]}",
                    hint="layers of one size share the cache here; serve a model with equal layers",
                )
        return first

    def _observe(self, call: AttentionCall, key: torch.Tensor) -> None:
        """Check one attention call and make its layer's cache on first sight."""
        if call.layer in self._seen:
            raise ConfigError(f"layer {call.layer} of {self.name} attends more than once, but has one cache", hint=ANOTHER_MODEL)
        self._seen.append(call.layer)
        if call.key_shape != call.value_shape:
            raise ConfigError(
                f"{self.name} has keys of {call.key_shape[1]} and values of {call.value_shape[1]} numbers, but the cache wants one size",
                hint=ANOTHER_MODEL,
            )
        for argument, value in call.extras.items():
            if value is not None and argument not in _HARMLESS:
                given = f" {value}" if isinstance(value, int | float) else ""
                message = f"{self.name} hands its attention `{argument}`{given}, which paged attention does not apply"
                raise ConfigError(message, hint=ANOTHER_MODEL)
        self._check_window(call)
        self.shapes[call.layer] = call.key_shape
        if call.layer not in self.kv:
            size = (max(_BLOCKS) + 1, _BLOCK_SIZE, *call.key_shape)
            self.kv[call.layer] = (key.new_zeros(size), key.new_zeros(size))

    def _check_window(self, call: AttentionCall) -> None:
        """A window that the model puts into its mask alone would be lost, for no mask is built."""
        expected = _config_window(self.model.config, call.layer)
        if expected is not None and call.window is None:
            message = f"layer {call.layer} of {self.name} has sliding_window {expected}, but does not hand it to its attention"
            raise ConfigError(message, hint=ANOTHER_MODEL)


def _config_window(config: Any, layer: int) -> int | None:
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    kinds = getattr(config, "layer_types", None)
    return None if kinds is not None and kinds[layer] != "sliding_attention" else int(window)


def _metadata(context: int, length: int, device: torch.device) -> AttentionMetadata:
    """Describe one request's chunk of `length` rows after `context` cached ones, in the blocks of the trial."""
    places = [_BLOCKS[i // _BLOCK_SIZE] * _BLOCK_SIZE + i % _BLOCK_SIZE for i in range(context, context + length)]
    return AttentionMetadata(
        cu_query_lens=torch.tensor([0, length], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([context + length], dtype=torch.int32, device=device),
        block_table=torch.tensor([_BLOCKS], dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(places, device=device),
        query_lens_cpu=(length,),
        seq_lens_cpu=(context + length,),
    )


class _TailWatch:
    """Notes which siblings of the decoder layers run after the last of them, and what they start from."""

    def __init__(self, parent: nn.Module, layers: nn.ModuleList) -> None:
        self._siblings = [module for module in parent.children() if module is not layers]
        self._last = layers[-1]
        self._stream: torch.Tensor | None = None
        self._after: list[nn.Module] = []
        self._handles: list[Any] = []

    def __enter__(self) -> _TailWatch:
        def after_layers(_module: nn.Module, _args: Any, output: Any) -> None:
            self._stream = output[0] if isinstance(output, tuple) else output
            self._after.clear()

        def sibling(module: nn.Module, _args: Any, _output: Any) -> None:
            self._after.append(module)

        self._handles = [self._last.register_forward_hook(after_layers), *(m.register_forward_hook(sibling) for m in self._siblings)]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def tail(self, hidden: torch.Tensor) -> tuple[nn.Module, ...] | None:
        """Return the modules that turn the stream into `hidden` [N, H], or None when they alone do not."""
        if self._stream is None:
            return None
        result = _apply(self._after, self._stream[0])
        return tuple(self._after) if result.shape == hidden.shape and torch.equal(result, hidden) else None


def _apply(modules: Sequence[nn.Module], hidden: torch.Tensor) -> torch.Tensor:
    for module in modules:
        hidden = module(hidden)
    return hidden
