"""resolve(): what was asked + the checkpoints on disk -> ResolvedConfig. The only configuration code with I/O.

Owns: reading model and draft configs, the device and its dtype, cross-checks, and the start-up report.
Must not know: weights or tensors. Read next: report.py, models/source.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from specdec.config import compatibility, report
from specdec.config.engine import EngineConfig, ModelConfig, ReportRow, ResolvedConfig
from specdec.config.inference import checkpoint_kind, mtp_depth, settle_method
from specdec.config.methods import MethodTraits, traits_for
from specdec.config.speculative import (
    HybridConfig,
    SpeculativeConfig,
    check_built,
    default_speculative,
    with_method,
    with_num_speculative_tokens,
    with_sources,
)
from specdec.errors import ConfigError
from specdec.logging import get_logger
from specdec.models.source import TargetFiles, locate_target, locate_tokenizer, read_json

__all__ = ["default_speculative", "probe_device", "probe_dtype", "resolve"]

logger = get_logger(__name__)

_CHAT_END = "<|im_end|>"  # what the embedded model says at the end of a turn
_OWN_CHECKPOINT = frozenset({"draft_model", "eagle", "eagle3", "dflash", "medusa", "mlp_speculator"})
_IN_TARGET = frozenset({"mtp", "dspark"})  # without a model of their own they live in the target's checkpoint


@dataclass(frozen=True, slots=True)
class _Target:
    """What the checks read of the target: its files, its configuration object, and the text part of that as a mapping."""

    files: TargetFiles
    tokenizer_path: str
    hf_config: Any
    keys: Mapping[str, Any]
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Draft:
    """The drafter as decided. keys: its config.json flattened, or empty. hf_config None: no checkpoint of its own."""

    config: SpeculativeConfig
    path: str | None
    keys: Mapping[str, Any]
    hf_config: Any = None
    length_source: str = "user"


def resolve(engine: EngineConfig, *, sources: Mapping[str, str] | None = None) -> ResolvedConfig:
    """Decide everything that start-up can decide, and say where each value came from.

    sources: report names (`model.dtype`, `speculative.method`) -> source, for callers that know what the user typed.

    Raises:
        ConfigError: files are missing or broken, values contradict the checkpoint or each other.
    """
    target = _read_target(engine.model)
    device = probe_device(engine.device)
    dtype = _resolve_dtype(engine.model.dtype, device)
    max_model_len, len_source = _resolve_max_model_len(engine.model.max_model_len, target.keys)
    draft = _resolve_draft(engine, target, max_model_len) if engine.speculative is not None else None
    traits = _traits(draft, target) if draft else None
    _check_budget(engine, traits)
    decided = replace(engine, speculative=draft.config if draft else None)
    name = engine.model.served_model_name or _served_name(engine.model.model)
    eos = _eos_token_ids(target)
    rows = report.replace_rows(
        report.asked_rows(engine, sources),
        {
            "device": (device, "derived"),
            "model.tokenizer": (target.tokenizer_path, "derived"),
            "model.dtype": (dtype, "derived"),
            "model.max_model_len": (max_model_len, len_source),
            "model.served_model_name": (name, "derived"),
        },
    )
    return ResolvedConfig(
        engine=decided,
        model_path=target.files.model_path,
        tokenizer_path=target.tokenizer_path,
        hf_config=target.hf_config,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        vocab_size=int(target.keys["vocab_size"]),
        eos_token_ids=eos,
        served_model_name=name,
        traits=traits,
        draft_hf_config=draft.hf_config if draft else None,
        draft_model_path=draft.path if draft else None,
        report=(*rows, *_checkpoint_rows(target, eos), *_speculation_rows(engine, draft, traits, sources)),
    )


def probe_device(asked: str = "auto") -> str:
    """Return cpu or cuda. `auto` takes a GPU when there is one.

    Raises:
        ConfigError: cuda was asked for and there is none.
    """
    if asked == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if asked == "cuda":
        raise ConfigError("device is 'cuda', but torch sees no GPU", hint="use --device cpu, or install a CUDA build of torch")
    return "cpu"


def probe_dtype(device: str) -> str:
    """Return the dtype that `auto` means on this device: bfloat16 where it runs natively, else float16 (GPU) or float32 (CPU)."""
    import torch

    if device == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability()[0] >= 8 else "float16"
    return "bfloat16" if _cpu_has_bf16(torch) else "float32"


def _cpu_has_bf16(torch: Any) -> bool:
    """True with AMX, AVX-512 BF16, or a CPU that oneDNN serves in bf16 (recent ARM); a missing probe counts as no."""
    if not torch.backends.mkldnn.is_available():
        return False
    probes = (
        lambda: torch.cpu._is_amx_tile_supported(),
        lambda: torch.cpu._is_avx512_bf16_supported(),
        lambda: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    )
    for probe in probes:
        try:
            if probe():
                return True
        except (AttributeError, RuntimeError):  # other versions of torch and other architectures lack some of them
            continue
    return False


def _resolve_dtype(asked: str, device: str) -> str:
    if asked == "float16" and device == "cpu":
        raise ConfigError("dtype is 'float16', but CPUs serve bfloat16 or float32 here", hint="use --dtype auto")
    return probe_dtype(device) if asked == "auto" else asked


def _read_target(model: ModelConfig) -> _Target:
    files = locate_target(model.model, revision=model.revision)
    tokenizer_path = locate_tokenizer(model.tokenizer or files.tokenizer_path)
    hf_config = _auto_config(files.model_path, trust_remote_code=model.trust_remote_code)
    keys = hf_config.get_text_config().to_dict()
    if not keys.get("vocab_size"):
        raise ConfigError(f"model type {keys.get('model_type')!r} has no vocab_size", hint="serve a causal language model")
    return _Target(files, tokenizer_path, hf_config, keys, read_json(Path(files.model_path) / "config.json"))


def _auto_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """Return transformers' configuration object of a directory."""
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # unknown model types, bad values and missing code end here by many classes
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{path}/config.json cannot be read: {first}", hint="check that transformers knows this model type") from None


def _draft_hf_config(path: str, keys: Mapping[str, Any]) -> Any:
    """Return a configuration object for a drafter; types that transformers does not know become a plain one with the same keys."""
    import transformers

    kept = {key: value for key, value in keys.items() if key not in ("model_type", "transformers_version")}
    try:
        return transformers.AutoConfig.for_model(keys["model_type"], **kept)
    except (KeyError, ValueError, TypeError):
        pass
    try:
        plain = transformers.PretrainedConfig()
        for key, value in kept.items():
            setattr(plain, key, value)
    except Exception as error:
        raise ConfigError(f"{path}/config.json cannot be read: {error}", hint="export the draft again") from None
    return plain


def _resolve_max_model_len(asked: int | None, keys: Mapping[str, Any]) -> tuple[int, report.Source]:
    """Return the longest sequence in tokens, and its source."""
    limit = keys.get("max_position_embeddings")
    if limit is None:
        if asked is None:
            raise ConfigError("max_model_len is not set, and the checkpoint has no max_position_embeddings", hint="pass --max-model-len")
        return asked, "user"
    if asked is not None and asked > limit:
        message = f"max_model_len is {asked}, but the checkpoint was made for {limit} positions"
        raise ConfigError(message, hint=f"use at most {limit}, or leave it out")
    return (asked, "user") if asked is not None else (int(limit), "checkpoint")


def _eos_token_ids(target: _Target) -> tuple[int, ...]:
    """Return every id that ends an answer, ascending: generation config, model config, tokenizer, and the embedded model's turn end."""
    path, tokenizer = Path(target.files.model_path), Path(target.tokenizer_path)
    found: set[int] = set()
    generation = read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    for value in (generation.get("eos_token_id"), target.keys.get("eos_token_id")):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    ids = _token_ids(tokenizer)
    names = [_eos_token(tokenizer)] + ([_CHAT_END] if target.files.kind == "embedded" else [])
    found.update(ids[name] for name in names if name in ids)
    vocab_size = int(target.keys["vocab_size"])
    if outside := sorted(index for index in found if not 0 <= index < vocab_size):
        raise ConfigError(
            f"eos token ids {outside} are outside the model's vocabulary of {vocab_size}", hint="pass the model's own --tokenizer"
        )
    return tuple(sorted(found))


def _eos_token(tokenizer: Path) -> str | None:
    path = tokenizer / "tokenizer_config.json"
    token = read_json(path).get("eos_token") if path.is_file() else None
    return token.get("content") if isinstance(token, dict) else token


def _token_ids(tokenizer: Path) -> dict[str, int]:
    """Return token -> id of a tokenizer, added tokens included; through transformers where there is no tokenizer.json."""
    path = tokenizer / "tokenizer.json"
    if path.is_file():
        content = read_json(path)
        vocabulary = (content.get("model") or {}).get("vocab")
        if isinstance(vocabulary, list):  # unigram models list (token, score) pairs
            vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
        added = {entry["content"]: entry["id"] for entry in content.get("added_tokens") or ()}
        return {**(vocabulary or {}), **added}
    import transformers

    try:
        return dict(transformers.AutoTokenizer.from_pretrained(str(tokenizer)).get_vocab())
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"tokenizer {tokenizer} cannot be read: {first}", hint="pass --tokenizer with the model's own tokenizer"
        ) from None


def _resolve_draft(engine: EngineConfig, target: _Target, max_model_len: int) -> _Draft:
    config = engine.speculative
    assert config is not None, "no speculative config to resolve"
    if isinstance(config, HybridConfig):
        return _resolve_hybrid(config, target, max_model_len)
    draft = _resolve_one(config, target, max_model_len)
    check_built(draft.config)  # the checkpoint may have changed the method
    return draft


def _resolve_hybrid(config: HybridConfig, target: _Target, max_model_len: int) -> _Draft:
    parts = [_resolve_one(source, target, max_model_len) for source in config.sources]
    drafts = config.num_speculative_tokens or max(part.config.num_speculative_tokens or 0 for part in parts)
    joined = with_sources(config, [part.config for part in parts])
    keys = {part.config.method: part.keys for part in parts}
    hf_configs = {part.config.method: part.hf_config for part in parts if part.hf_config is not None}
    paths = [part.path for part in parts if part.path is not None]
    decided = with_num_speculative_tokens(joined, drafts)
    check_built(decided)
    return _Draft(
        decided, paths[0] if len(paths) == 1 else None, keys, hf_configs or None, "user" if config.num_speculative_tokens else "derived"
    )


def _resolve_one(config: SpeculativeConfig, target: _Target, max_model_len: int) -> _Draft:
    """Settle method, length and fit of one draft source."""
    if config.method not in _OWN_CHECKPOINT | _IN_TARGET and not (config.method == "early_exit" and config.model):
        _check_exit_layer(config, target)
        return _Draft(config, None, {})
    path, raw = _draft_checkpoint(config, target)
    config = _settle_draft_method(config, raw, in_target=path == target.files.model_path)
    keys = compatibility.flatten(raw)
    drafts, source = compatibility.settle_num_speculative_tokens(config.method, config.num_speculative_tokens, keys)
    config = with_num_speculative_tokens(config, drafts)
    compatibility.check_sizes(config.method, keys, target.keys)
    if config.method == "draft_model" and not getattr(config, "use_heterogeneous_vocab", False):
        compatibility.check_vocabularies(
            _token_ids(Path(path)),
            _token_ids(Path(target.tokenizer_path)),
            draft_size=int(keys.get("vocab_size") or 0),
            target_size=int(target.keys["vocab_size"]),
        )
    limit = keys.get("max_position_embeddings")
    compatibility.check_draft_lengths(getattr(config, "max_model_len", None), draft_limit=limit, target_limit=max_model_len)
    return _Draft(config, path, keys, _draft_hf_config(path, keys), source)


def _draft_checkpoint(config: SpeculativeConfig, target: _Target) -> tuple[str, dict[str, Any]]:
    """Return directory and config.json of the drafter: its own, or the target's for layers that live there."""
    if config.model is None:
        if config.method == "mtp" and mtp_depth(target.raw) is None:
            hint = "name the draft checkpoint in `model`, or choose another method"
            raise ConfigError("speculative_config.method is `mtp`, but the target's checkpoint has no MTP layers", hint=hint)
        if config.method == "dspark" and not any(key.startswith("dspark_") for key in target.raw):
            hint = "name the draft checkpoint in `model`, or choose another method"
            raise ConfigError("speculative_config.method is `dspark`, but the target's checkpoint has no DSpark stages", hint=hint)
        return target.files.model_path, dict(target.raw)
    try:
        files = locate_target(config.model, revision=getattr(config, "revision", None))
    except ConfigError as error:
        raise ConfigError(f"speculative_config.model: {error.message}", hint=error.hint) from None
    return files.model_path, read_json(Path(files.model_path) / "config.json")


def _settle_draft_method(config: SpeculativeConfig, raw: Mapping[str, Any], *, in_target: bool) -> SpeculativeConfig:
    if in_target or config.method == "early_exit":
        return config
    method = settle_method(config.method, is_inferred=config.is_method_inferred, kind=checkpoint_kind(raw))
    if method != config.method:
        config = with_method(config, method)
    if raw.get("speculators_model_type") == "peagle" and getattr(config, "parallel_drafting", True) is False:
        config = with_parallel_drafting(config)
    return config


def with_parallel_drafting(config: SpeculativeConfig) -> SpeculativeConfig:
    """Return the config of a head that was trained to draft all tokens in one pass."""
    return config.model_copy(update={"parallel_drafting": True})


def _check_exit_layer(config: SpeculativeConfig, target: _Target) -> None:
    layer, layers = getattr(config, "exit_layer", None), target.keys.get("num_hidden_layers")
    if layer is not None and layers is not None and layer >= layers:
        message = f"speculative_config.exit_layer is {layer}, but the target has {layers} layers"
        raise ConfigError(message, hint=f"use a layer in 1..{layers - 1}")


def _traits(draft: _Draft, target: _Target) -> MethodTraits:
    return traits_for(draft.config, draft.keys or None, num_target_layers=target.keys.get("num_hidden_layers"))


def _check_budget(engine: EngineConfig, traits: MethodTraits | None) -> None:
    """Check that one step can hold what drafting needs beside the target's own token."""
    budget = engine.scheduler.max_num_batched_tokens
    if traits is None:
        return
    needed = max(traits.lookahead, traits.draft_slots) + 1
    if budget < needed:
        message = f"max_num_batched_tokens is {budget}, but method `{traits.method}` with {traits.max_nodes} drafts needs at least {needed}"
        raise ConfigError(message, hint="raise max_num_batched_tokens, or lower num_speculative_tokens")


def _served_name(model: str) -> str:
    """Return the name that clients ask for: a hub id as it is, the last part of a path."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else model


def _checkpoint_rows(target: _Target, eos: tuple[int, ...]) -> Iterable[ReportRow]:
    row = partial(ReportRow, source="checkpoint")
    architectures = target.raw.get("architectures") or [target.raw.get("model_type")]
    return (
        ReportRow(name="model.path", value=target.files.model_path, source="derived"),
        row(name="model.architecture", value=architectures[0]),
        row(name="model.vocab_size", value=target.keys["vocab_size"]),
        row(name="model.num_hidden_layers", value=target.keys.get("num_hidden_layers")),
        row(name="model.eos_token_ids", value=eos),
    )


def _speculation_rows(
    engine: EngineConfig, draft: _Draft | None, traits: MethodTraits | None, sources: Mapping[str, str] | None
) -> Iterable[ReportRow]:
    known = dict(sources or {})
    if draft is None or traits is None:
        return report.speculative_rows(None, known)
    if engine.speculative == default_speculative():
        known.setdefault("speculative", "default")
    known.setdefault("speculative.num_speculative_tokens", known.get("speculative", draft.length_source))
    derived = partial(ReportRow, source="derived")
    return (
        *report.speculative_rows(draft.config, known),
        derived(name="speculative.draft_slots", value=traits.draft_slots),
        derived(name="speculative.num_lookahead_tokens", value=traits.lookahead),
        derived(name="speculative.prefill_lookahead", value=traits.prefill_lookahead),
        derived(name="speculative.taps", value=traits.taps),
        *((derived(name="speculative.draft_path", value=draft.path),) if draft.path else ()),
    )
