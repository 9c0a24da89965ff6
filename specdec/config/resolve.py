"""resolve(): what was asked + the checkpoints on disk -> ResolvedConfig. The only I/O of configuration.

Owns: the device and its dtype, lengths, the token budget, and the order in which all is decided.
Must not know: weights or tensors. Read next: checkpoints.py, resolve_draft.py, report.py.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specdec.config import report
from specdec.config.checkpoints import Target, eos_token_ids, read_target
from specdec.config.engine import EngineConfig, ExecutionConfig, ReportRow, ResolvedConfig
from specdec.config.methods import MethodTraits, traits_for
from specdec.config.resolve_draft import Draft, resolve_draft
from specdec.config.speculative import SpeculativeConfig, default_speculative
from specdec.errors import ConfigError
from specdec.logging import LEVEL_VARIABLE, get_logger, warn_once

logger = get_logger(__name__)

VARIABLES = (LEVEL_VARIABLE, "SPECDEC_KERNELS")  # the only environment variables that change anything, secrets apart
SECRETS = ("SPECDEC_API_KEYS",)  # read by the server; never part of the report
_PACKAGES = {"flashinfer": "flashinfer"}  # attention backend -> package that it needs
__all__ = ["default_speculative", "probe_device", "probe_dtype", "resolve"]


def resolve(engine: EngineConfig, *, sources: Mapping[str, str] | None = None) -> ResolvedConfig:
    """Decide everything that start-up can decide, and say where each value came from.

    sources: report names (`model.dtype`, `speculative.method`) -> source, for callers that know what the user typed.

    Raises:
        ConfigError: files are missing or broken, values contradict the checkpoint or each other.
    """
    _warn_unknown_variables(os.environ)
    target = read_target(engine.model)
    device = probe_device(engine.device)
    _check_execution(engine.execution, device)
    dtype = _resolve_dtype(engine.model.dtype, device)
    max_model_len, len_source = _resolve_max_model_len(engine.model.max_model_len, target.keys)
    draft = resolve_draft(engine.speculative, target, max_model_len) if engine.speculative is not None else None
    traits = _traits(draft, target) if draft else None
    if draft and traits:
        _check_lengths(draft.config, traits, budget=engine.scheduler.max_num_batched_tokens, max_model_len=max_model_len)
    decided = replace(engine, speculative=draft.config if draft else None)
    name = engine.model.served_model_name or _served_name(engine.model.model)
    eos = eos_token_ids(target)
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
    resolved = ResolvedConfig(
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
        report=(*rows, *_variable_rows(os.environ), *_checkpoint_rows(target, eos), *_speculation_rows(engine, draft, traits, sources)),
    )
    parts = draft.parts if draft else ()
    return replace(resolved, sources=tuple(_alone(resolved, part, target) for part in parts))


def _alone(resolved: ResolvedConfig, part: Draft, target: Target) -> ResolvedConfig:
    """Return the configuration of one source of a hybrid."""
    engine = replace(resolved.engine, speculative=part.config)
    traits = _traits(part, target)
    return replace(resolved, engine=engine, traits=traits, draft_hf_config=part.hf_config, draft_model_path=part.path, sources=())


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
        (torch.cpu, "_is_amx_tile_supported"),
        (torch.cpu, "_is_avx512_bf16_supported"),
        (torch.ops.mkldnn, "_is_mkldnn_bf16_supported"),
    )
    for owner, name in probes:
        try:
            if getattr(owner, name)():
                return True
        except (AttributeError, RuntimeError):  # other versions of torch and other architectures lack some of them
            continue
    return False


def _warn_unknown_variables(environ: Mapping[str, str]) -> None:
    """Say which SPECDEC_* variables do nothing, so that a renamed or misspelt one is not believed to work."""
    for name in sorted(environ):
        if name.startswith("SPECDEC_") and name not in VARIABLES + SECRETS:
            close = difflib.get_close_matches(name, VARIABLES + SECRETS, n=1)
            warn_once(logger, "environment variable %s has no effect%s", name, f": did you mean {close[0]}?" if close else "")


def _check_execution(execution: ExecutionConfig, device: str) -> None:
    """Refuse what only a GPU has, and a backend whose package is missing."""
    backend, sizes = execution.attention_backend, execution.cudagraph_capture_sizes
    if device == "cpu" and sizes is not None:
        raise ConfigError(f"cudagraph_capture_sizes is {sizes!r}, but a CPU has no CUDA graphs", hint="leave it out")
    if device == "cpu" and backend != "auto":
        message = f"attention_backend is {backend!r}, but on a CPU attention is part of the compiled layers"
        raise ConfigError(message, hint="leave it out, or serve on a GPU")
    package = _PACKAGES.get(backend)
    if package is not None and find_spec(package) is None:
        message = f"attention_backend is {backend!r}, but the package {package} is not installed"
        raise ConfigError(message, hint="pip install flashinfer-python, or leave the option out for the kernels of specdec")


def _resolve_dtype(asked: str, device: str) -> str:
    if asked == "float16" and device == "cpu":
        raise ConfigError("dtype is 'float16', but CPUs serve bfloat16 or float32 here", hint="use --dtype auto")
    return probe_dtype(device) if asked == "auto" else asked


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


def _traits(draft: Draft, target: Target) -> MethodTraits:
    keys = {part.config.method: part.keys for part in draft.parts} if draft.parts else draft.keys
    return traits_for(draft.config, keys or None, num_target_layers=target.keys.get("num_hidden_layers"))


def _check_lengths(config: SpeculativeConfig, traits: MethodTraits, *, budget: int, max_model_len: int) -> None:
    """Check that a step and a sequence can hold what drafting needs, and say once that a lossy rule is lossy. Lengths in tokens."""
    if traits.max_nodes >= max_model_len:
        message = f"speculative_config.num_speculative_tokens is {traits.max_nodes}, but a sequence has at most {max_model_len} tokens"
        raise ConfigError(message, hint="lower num_speculative_tokens")
    needed = max(traits.lookahead, traits.draft_slots) + 1
    if budget < needed:
        message = f"max_num_batched_tokens is {budget}, but method `{traits.method}` with {traits.max_nodes} drafts needs at least {needed}"
        raise ConfigError(message, hint="raise max_num_batched_tokens, or lower num_speculative_tokens")
    if config.is_lossy:
        warn_once(logger, "rejection_sample_method `%s` is lossy: answers differ from the target's own", config.rejection_sample_method)


def _served_name(model: str) -> str:
    """Return the name that clients ask for: a hub id as it is, the last part of a path."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else model


def _checkpoint_rows(target: Target, eos: tuple[int, ...]) -> Iterable[ReportRow]:
    row = partial(ReportRow, source="checkpoint")
    architectures = target.raw.get("architectures") or [target.raw.get("model_type")]
    return (
        ReportRow(name="model.path", value=target.files.model_path, source="derived"),
        row(name="model.architecture", value=architectures[0]),
        row(name="model.vocab_size", value=target.keys["vocab_size"]),
        row(name="model.num_hidden_layers", value=target.keys.get("num_hidden_layers")),
        row(name="model.eos_token_ids", value=eos),
    )


def _variable_rows(environ: Mapping[str, str]) -> Iterable[ReportRow]:
    return [ReportRow(name=f"environment.{name}", value=environ[name], source="user") for name in VARIABLES if name in environ]


def _speculation_rows(
    engine: EngineConfig, draft: Draft | None, traits: MethodTraits | None, sources: Mapping[str, str] | None
) -> Iterable[ReportRow]:
    known = dict(sources or {})
    if draft is None or traits is None:
        return report.speculative_rows(None, known)
    if engine.speculative == default_speculative(engine.model.model):
        known.setdefault("speculative", "default")
    known.setdefault("speculative.num_speculative_tokens", known.get("speculative") or draft.length_source)
    derived = partial(ReportRow, source="derived")
    return (
        *report.speculative_rows(draft.config, known),
        derived(name="speculative.draft_slots", value=traits.draft_slots),
        derived(name="speculative.num_lookahead_tokens", value=traits.lookahead),
        derived(name="speculative.prefill_lookahead", value=traits.prefill_lookahead),
        derived(name="speculative.taps", value=traits.taps),
        *((derived(name="speculative.draft_path", value=draft.path),) if draft.path else ()),
    )
