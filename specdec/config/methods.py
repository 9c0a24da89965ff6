"""MethodTraits: what one draft method needs of scheduler and worker, resolved from config and checkpoint.

Owns: the arithmetic of slots. Must not know: how any method drafts. Read next: scheduler/scheduler.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from specdec.errors import ConfigError

if TYPE_CHECKING:
    from specdec.config.speculative import SpeculativeConfig

FINAL_NORM = "final_norm"
Tap: TypeAlias = str | int  # FINAL_NORM, or m: the residual stream after m decoder layers (0 is the embedding)


class DraftKV(Enum):
    """Whose KV cache a drafter writes or reads."""

    NONE = "none"
    OWN = "own"
    TARGET = "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodTraits:
    """Needs of a draft method, all counts per request and step.

    max_nodes: drafts at most (K). max_depth: longest chain of them (D); equal to K for chains.
    draft_slots: rows that drafting takes from the token budget.
    lookahead: KV slots past the target's query. prefill_lookahead: prompt tokens past the chunk that are read.
    taps: hidden states of the target the drafter reads. laws: what kind of draft law it returns.
    reads_host: drafting needs the step's results on the host; False where it may be queued behind a step nobody has waited for.
    """

    method: str
    max_nodes: int
    max_depth: int
    draft_slots: int = 0
    lookahead: int = 0
    prefill_lookahead: int = 0
    taps: tuple[Tap, ...] = ()
    kv: DraftKV = DraftKV.NONE
    runs_on: Literal["host", "device"] = "host"
    reads_host: bool = True
    laws: Literal["one_hot", "dense", "sparse"] = "one_hot"


def traits_for(config: SpeculativeConfig, hf_draft_config: Any = None, *, num_target_layers: int | None = None) -> MethodTraits:
    """Return what the configured method needs.

    hf_draft_config: configuration object or mapping of the draft checkpoint, None for methods without one.
    num_target_layers: decoder layers of the target, for taps that no checkpoint names.

    Raises:
        ConfigError: num_speculative_tokens is not settled, or a tap lies outside the target.
    """
    if config.method == "hybrid":
        return _hybrid(config, hf_draft_config, num_target_layers)
    if config.num_speculative_tokens is None:
        raise ConfigError("speculative_config.num_speculative_tokens is missing", hint="the draft checkpoint names none, so set it")
    draft = _Draft(config, config.num_speculative_tokens, _as_mapping(hf_draft_config), num_target_layers)
    traits = _METHODS[config.method](draft)
    _check_taps(traits.taps, num_target_layers)
    return traits


@dataclass(frozen=True, slots=True)
class _Draft:
    """What a row of the table reads: config, drafts K, the checkpoint's keys, and the depth of the target."""

    config: Any
    drafts: int
    keys: Mapping[str, Any]
    num_target_layers: int | None

    def traits(self, **needs: Any) -> MethodTraits:
        law: Literal["one_hot", "dense"] = "dense" if self.config.draft_sample_method == "probabilistic" else "one_hot"
        return MethodTraits(**{"method": self.config.method, "max_nodes": self.drafts, "max_depth": self.drafts, "laws": law, **needs})


def _host(draft: _Draft) -> MethodTraits:
    return draft.traits()


def _device_lookup(draft: _Draft) -> MethodTraits:
    return draft.traits(runs_on="device", reads_host=False)


def _hidden_states(draft: _Draft) -> MethodTraits:
    return draft.traits(taps=tuple(sorted(draft.config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)), runs_on="device")


def _draft_model(draft: _Draft) -> MethodTraits:
    # The anchor gets a row of its own beside the target's; a parallel drafter adds its masks to the same pass.
    slots = draft.drafts if draft.config.parallel_drafting else 1
    return draft.traits(draft_slots=slots, lookahead=draft.drafts, kv=DraftKV.OWN, runs_on="device")


def _eagle(draft: _Draft) -> MethodTraits:
    return draft.traits(lookahead=draft.drafts, prefill_lookahead=1, taps=(FINAL_NORM,), kv=DraftKV.OWN, runs_on="device")


def _eagle3(draft: _Draft) -> MethodTraits:
    slots = draft.drafts - 1 if draft.config.parallel_drafting else 0
    taps: tuple[Tap, ...] = (FINAL_NORM,) if _reads_last_state_only(draft.keys) else _aux_taps(draft)
    return draft.traits(draft_slots=slots, lookahead=draft.drafts, prefill_lookahead=1, taps=taps, kv=DraftKV.OWN, runs_on="device")


def _mtp(draft: _Draft) -> MethodTraits:
    modules = min(int(draft.keys.get("num_nextn_predict_layers") or 1), draft.drafts)
    ahead = draft.drafts if modules > 1 else 1  # each further module reads one more token past the chunk
    taps: tuple[Tap, ...] = (FINAL_NORM,)
    is_mimo = "MiMoForCausalLM" in (draft.keys.get("architectures") or ())
    if is_mimo or "speculators_model_type" in draft.keys:  # these are trained on the stream before the norm
        taps = (draft.num_target_layers or int(draft.keys["num_hidden_layers"]),)
    return draft.traits(lookahead=draft.drafts, prefill_lookahead=ahead, taps=taps, kv=DraftKV.OWN, runs_on="device")


def _dflash(draft: _Draft) -> MethodTraits:
    return _block(draft, has_bonus_row=True)


def _dspark(draft: _Draft) -> MethodTraits:
    # speculators checkpoints put a bonus row before the block unless they say otherwise, native ones do not
    from_anchor = draft.keys.get("sample_from_anchor", "speculators_model_type" not in draft.keys)
    return _block(draft, has_bonus_row=not from_anchor)


def _block(draft: _Draft, *, has_bonus_row: bool) -> MethodTraits:
    sparse = {"laws": "sparse"} if _is_sparse(draft) else {}
    ahead = draft.drafts + has_bonus_row
    return draft.traits(lookahead=ahead, prefill_lookahead=1, taps=_aux_taps(draft), kv=DraftKV.OWN, runs_on="device", **sparse)


def _hidden_head(draft: _Draft) -> MethodTraits:
    return draft.traits(taps=(FINAL_NORM,), runs_on="device")


def _early_exit(draft: _Draft) -> MethodTraits:
    taps = (draft.config.exit_layer,) if draft.config.model is not None else ()  # an adapter reads the layer's output
    return draft.traits(lookahead=draft.drafts, taps=taps, kv=DraftKV.TARGET, runs_on="device")


_METHODS: dict[str, Callable[[_Draft], MethodTraits]] = {
    "ngram": _host,
    "ngram_gpu": _device_lookup,
    "suffix": _host,
    "custom_class": _host,
    "extract_hidden_states": _hidden_states,
    "draft_model": _draft_model,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "mtp": _mtp,
    "dflash": _dflash,
    "dspark": _dspark,
    "medusa": _hidden_head,
    "mlp_speculator": _hidden_head,
    "early_exit": _early_exit,
}


def _hybrid(config: Any, hf_draft_config: Any, num_target_layers: int | None) -> MethodTraits:
    """Join the sources: the most of every count, all taps. hf_draft_config: mapping of source method to its checkpoint's config."""
    drafts = hf_draft_config or {}
    parts = [traits_for(source, drafts.get(source.method), num_target_layers=num_target_layers) for source in config.inherited_sources()]
    limit = min(config.num_speculative_tokens or 2**31, max(part.max_nodes for part in parts))
    laws = [part.laws for part in parts]
    kinds = [part.kv for part in parts]
    return MethodTraits(
        method="hybrid",
        max_nodes=limit,
        max_depth=limit,
        draft_slots=max(part.draft_slots for part in parts),
        lookahead=max(part.lookahead for part in parts),
        prefill_lookahead=max(part.prefill_lookahead for part in parts),
        taps=tuple(sorted({tap for part in parts for tap in part.taps}, key=_tap_order)),
        kv=next((kind for kind in (DraftKV.OWN, DraftKV.TARGET) if kind in kinds), DraftKV.NONE),
        runs_on="host" if any(part.runs_on == "host" for part in parts) else "device",
        laws="dense" if "dense" in laws else "sparse" if "sparse" in laws else "one_hot",
    )


def _aux_taps(draft: _Draft) -> tuple[Tap, ...]:
    """Return the layers a checkpoint reads, ascending; without a list, an early, a middle and a late one.

    Lists of target_layer_ids name layers from 0 and mean their output, hence + 1.
    """
    keys = draft.keys
    dflash, eagle = keys.get("dflash_config") or {}, keys.get("eagle_config") or {}
    shift_dspark = 0 if keys.get("model_type") == "deepseek_v41" else 1
    candidates = (
        (keys.get("eagle_aux_hidden_state_layer_ids"), 0),
        (keys.get("aux_hidden_state_layer_ids"), 0),
        (eagle.get("eagle_aux_hidden_state_layer_ids"), 0),
        (dflash.get("target_layer_ids"), 1),
        (keys.get("dspark_target_layer_ids"), shift_dspark),
        (keys.get("target_layer_ids"), 1),
        (dflash.get("layer_ids"), 0),
        (eagle.get("layer_ids"), 0),
    )
    for ids, shift in candidates:
        if ids:
            return tuple(sorted(int(layer) + shift for layer in ids))
    if draft.num_target_layers is None:
        raise ConfigError(
            "the draft checkpoint names no hidden states to read", hint="add eagle_aux_hidden_state_layer_ids to its config.json"
        )
    return _default_taps(draft.num_target_layers)


def _default_taps(num_layers: int) -> tuple[Tap, ...]:
    return tuple(sorted({2, num_layers // 2, num_layers - 3}))


def _is_sparse(draft: _Draft) -> bool:
    return draft.config.draft_sample_method == "probabilistic" and getattr(draft.config, "dspark_draft_topk", None) is not None


def _reads_last_state_only(keys: Mapping[str, Any]) -> bool:
    return (keys.get("eagle_config") or {}).get("use_aux_hidden_state", True) is False


def _check_taps(taps: Iterable[Tap], num_target_layers: int | None) -> None:
    outside = [tap for tap in taps if isinstance(tap, int) and num_target_layers is not None and not 0 <= tap <= num_target_layers]
    if outside:
        rule = f"but the target has {num_target_layers} layers"
        raise ConfigError(f"the drafter reads hidden states after layers {outside}, {rule}", hint="choose a draft trained for this target")


def _tap_order(tap: Tap) -> tuple[int, int]:
    return (1, 0) if isinstance(tap, str) else (0, tap)


def _as_mapping(hf_draft_config: Any) -> Mapping[str, Any]:
    if hf_draft_config is None:
        return {}
    if isinstance(hf_draft_config, Mapping):
        return hf_draft_config
    keys: dict[str, Any] = hf_draft_config.to_dict()
    return keys
