"""SpeculativeConfig: what the user asked of speculation, one frozen model per method, joined by `method`.

Owns: the union, what of it is built, and parse_speculative. Must not know: checkpoints (resolve.py).
Read next: methods.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast

from pydantic import Field, model_validator

from specdec.config import parse
from specdec.config.fields import LOSSY_RULES, Count, SpeculativeBase, check_schedule, refuse
from specdec.config.method_configs import (
    ChainConfig,
    CustomClassConfig,
    DflashConfig,
    DraftModelConfig,
    DsparkConfig,
    Eagle3Config,
    EagleConfig,
    EarlyExitConfig,
    ExtractHiddenStatesConfig,
    MedusaConfig,
    MlpSpeculatorConfig,
    MtpConfig,
    NgramConfig,
    NgramGpuConfig,
    OneHotConfig,
    SuffixConfig,
    check_confidence_threshold,
)
from specdec.config.trained_heads import trained_head
from specdec.errors import ConfigError

__all__ = ["BUILT_RULES", "LOSSY_RULES", "SpeculativeBase", "SpeculativeConfig", "built_methods", "check_schedule", "parse_speculative"]

BUILT_RULES = frozenset({"standard", "block", "fly", "synthetic", "typical"})
BUILT_DRAFT_SAMPLING = frozenset({"greedy", "probabilistic", "coupled"})
BUILT_POLICIES = frozenset({"fixed", "adaptive"})
UNBUILT_OPTIONS = frozenset(  # refused unless they have their default; whoever builds an option removes its name
    {
        "enable_adaptive_verification",
        "index_share_for_mtp_iteration",
        "dspark_draft_topk",
        "xpress_topc",
    }
)

SourceConfig: TypeAlias = Annotated[
    NgramConfig
    | NgramGpuConfig
    | SuffixConfig
    | CustomClassConfig
    | ExtractHiddenStatesConfig
    | DraftModelConfig
    | EagleConfig
    | Eagle3Config
    | MtpConfig
    | DflashConfig
    | DsparkConfig
    | MedusaConfig
    | MlpSpeculatorConfig
    | EarlyExitConfig,
    Field(discriminator="method"),
]


class HybridConfig(SpeculativeBase):
    """Several draft sources, the first that has drafts wins. num_speculative_tokens: the cap, by default the largest source's.

    Rule, sampling and policy are set here, once, and never on a source.
    """

    method: Literal["hybrid"] = "hybrid"
    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1)]
    num_speculative_tokens: Count | None = None

    @model_validator(mode="after")
    def _check_sources(self) -> HybridConfig:
        if self.model is not None:
            refuse("model", f"is {self.model!r}, but method `hybrid` takes models on its sources", "move it into `sources`")
        if len(self.sources) < 2:
            refuse("sources", f"has {len(self.sources)} entry, but a hybrid needs at least 2", "use that method directly")
        methods = [source.method for source in self.sources]
        if len(set(methods)) < len(methods):
            refuse("sources", f"is {methods}, but each method may occur once", "drop the repeated one")
        if "extract_hidden_states" in methods:
            refuse("sources", "holds `extract_hidden_states`, which drafts nothing", "run it alone")
        if self.draft_sample_method != "greedy" and all(isinstance(source, OneHotConfig) for source in self.sources):
            refuse("draft_sample_method", f"is `{self.draft_sample_method}`, but none of {methods} has draft logits", "leave it out")
        for index, source in enumerate(self.sources):
            if isinstance(source, ChainConfig) and source.draft_confidence_threshold:
                check_confidence_threshold(source, self.draft_sample_method, prefix=f"sources[{index}].")
            for name in sorted(_SHARED_FIELDS & source.model_fields_set):
                refuse(f"sources[{index}].{name}", "is decided for the whole hybrid", f"move {name} beside `sources`")
        return self

    def inherited_sources(self) -> tuple[SourceConfig, ...]:
        """Return the sources with the hybrid's rule, policy and, where they draw drafts, its way of drawing."""
        shared = {name: getattr(self, name) for name in _SHARED_FIELDS & self.model_fields_set}
        drawn = shared.pop("draft_sample_method", "greedy")
        return tuple(
            source.model_copy(update=shared | ({} if isinstance(source, OneHotConfig) else {"draft_sample_method": drawn}))
            for source in self.sources
        )


_SHARED_FIELDS = frozenset(SpeculativeBase.model_fields) - {"method", "model", "num_speculative_tokens"}
SpeculativeConfig: TypeAlias = SourceConfig | HybridConfig
AnyConfig = TypeVar("AnyConfig", bound=SpeculativeBase)

MODELS: dict[str, type[SpeculativeBase]] = {
    str(model.model_fields["method"].default): model
    for model in (
        NgramConfig,
        NgramGpuConfig,
        SuffixConfig,
        DraftModelConfig,
        EarlyExitConfig,
        CustomClassConfig,
        ExtractHiddenStatesConfig,
        HybridConfig,
        EagleConfig,
        Eagle3Config,
        MtpConfig,
        DflashConfig,
        DsparkConfig,
        MedusaConfig,
        MlpSpeculatorConfig,
    )
}
METHODS = tuple(MODELS)
_OWNERS: dict[str, tuple[str, ...]] = {
    name: tuple(method for method, model in MODELS.items() if name in model.model_fields)
    for name in sorted({name for model in MODELS.values() for name in model.model_fields} - set(SpeculativeBase.model_fields))
}


def built_methods() -> frozenset[str]:
    """Return the methods that can run: those with a registered proposer."""
    from specdec.proposers.base import REGISTRY  # only import paths, no torch; imported late because it reads config.methods

    return frozenset(REGISTRY)


def default_speculative(model: str = "") -> SpeculativeConfig:
    """Return what serves a user who asked for nothing: it costs nothing where it does not help.

    Lookups in the text need no weights; where a head was trained for the target (see trained_heads.py), it drafts what they cannot.
    """
    settings: dict[str, Any] = {"num_speculative_tokens": 12, "suffix_decoding_max_spec_factor": 2.0, "suffix_decoding_min_token_prob": 0.3}
    head = trained_head(model)
    if head is None:
        return SuffixConfig(**settings, policy="adaptive")
    return HybridConfig(sources=(SuffixConfig(**settings), head), policy="adaptive")


def parse_speculative(
    raw: str | Mapping[str, Any] | SpeculativeBase | None = None,
    *,
    spec_method: str | None = None,
    spec_model: str | None = None,
    spec_tokens: int | None = None,
    token_map: str | None = None,
) -> SpeculativeConfig | None:
    """Read --speculative-config and its short flags; None when nothing was asked. Pure: no file is opened.

    Raises:
        ConfigError: malformed, contradictory, unknown, out of range, or known but not built.
    """
    if isinstance(raw, SpeculativeBase):
        raw = _given(raw)
    flags = {"method": spec_method, "model": spec_model, "num_speculative_tokens": spec_tokens, "token_map": token_map}
    if raw is None and all(value is None for value in flags.values()):
        return None
    data = parse.read_mapping({} if raw is None else raw)
    parse.merge_flags(data, flags)
    config = build(data)
    check_built(config)
    return config


def build(data: Mapping[str, Any]) -> SpeculativeConfig:
    """Build the config of one mapping, sources of a hybrid included, whether or not its method is built.

    Raises:
        ConfigError: as parse_speculative, save for what is not built.
    """
    kept = parse.drop_refused_keys(data)
    method, is_inferred = parse.name_method(kept, METHODS)
    kept["method"] = method
    if method == "hybrid" and isinstance(kept.get("sources"), list | tuple):
        kept["sources"] = tuple(_build_source(index, source, kept) for index, source in enumerate(kept["sources"]))
    of_others = _OWNERS.keys() - MODELS[method].model_fields.keys()
    asked = {name: value for name, value in kept.items() if value is not None or name not in of_others}  # null asks for nothing
    config = parse.validate(MODELS[method], asked, _OWNERS)
    config._is_inferred = is_inferred
    return cast("SpeculativeConfig", config)


def with_num_speculative_tokens(config: AnyConfig, drafts: int) -> AnyConfig:
    """Return the config with the length filled in, checked again because other keys are read against it."""
    filled = parse.validate(type(config), {**_given(config), "num_speculative_tokens": drafts}, _OWNERS)
    filled._is_inferred = config._is_inferred
    return cast("AnyConfig", filled)


def with_method(config: SourceConfig, method: str) -> SourceConfig:
    """Return the same keys under another method; a key that the new method lacks is refused."""
    return cast("SourceConfig", parse.validate(MODELS[method], {**_given(config), "method": method}, _OWNERS))


def with_sources(config: HybridConfig, sources: Sequence[SourceConfig]) -> HybridConfig:
    """Return the hybrid over other configs of its sources."""
    return HybridConfig.model_validate({**_given(config), "sources": tuple(sources)})


def check_built(config: SpeculativeConfig) -> None:
    """Refuse what is recognised but cannot run yet, by name.

    Raises:
        ConfigError: lists what can run instead.
    """
    built = built_methods()
    parts = config.sources if isinstance(config, HybridConfig) else ()
    for part in (config, *parts):
        _check_choice("method", part.method, built)
    _check_choice("rejection_sample_method", config.rejection_sample_method, BUILT_RULES)
    _check_choice("draft_sample_method", config.draft_sample_method, BUILT_DRAFT_SAMPLING)
    _check_choice("policy", config.policy, BUILT_POLICIES)
    for part in (config, *parts):
        for key in sorted(UNBUILT_OPTIONS & set(type(part).model_fields)):
            if getattr(part, key) != type(part).model_fields[key].default:
                refuse(key, f"is {getattr(part, key)!r}, a known option that is not built yet", f"drop {key}")


def _check_choice(field: str, value: str, built: frozenset[str]) -> None:
    if value not in built:
        refuse(field, f"is `{value}`, which is known but not built yet", f"built: {', '.join(sorted(built))}")


def _build_source(index: int, source: Any, hybrid: Mapping[str, Any]) -> SourceConfig:
    """Build one source of a hybrid; errors name it as sources[index]."""
    try:
        if isinstance(source, SpeculativeBase):
            source = _given(source)
        data = parse.read_mapping(source)
        if data.get("method") == "hybrid":
            refuse("method", "is `hybrid`, but a hybrid cannot be a source of another", "list its sources here")
        if data.get("num_speculative_tokens") is None and hybrid.get("num_speculative_tokens") is not None:
            data["num_speculative_tokens"] = hybrid["num_speculative_tokens"]
        return cast("SourceConfig", build(data))
    except ConfigError as error:
        place = f"sources[{index}]"
        message = error.message.replace("speculative_config", f"speculative_config.{place}", 1)
        raise ConfigError(message if place in message else f"{message} in {place}", hint=error.hint) from None


def _given(config: SpeculativeBase) -> dict[str, Any]:
    """Return the keys that were set, sources kept as built models."""
    return {name: getattr(config, name) for name in config.model_fields_set} | {"method": config.method}
