"""Weights: what a loaded runner gives back while it sleeps, and weights that are read again, from the same place or another.

Owns: where the weights come from, and the order of target and drafter. Must not know: requests; nobody may be running.

Records that were lent keep their meaning: the target object and the KV tensors stay the same objects, only their contents go
and come back, so a drafter that borrowed them needs no new loan. KV is emptied; whoever hands out blocks must forget their prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.config.checkpoints import auto_config
from specdec.config.engine import ResolvedConfig
from specdec.errors import ConfigError
from specdec.kernels.graphs import Graphs, NoGraphs
from specdec.models.attention import KVPair, release_kv, restore_kv
from specdec.models.registry import TargetModel, load_model
from specdec.models.source import locate_draft, locate_target, read_json
from specdec.proposers.base import Proposer

# Keys of config.json that say how a checkpoint was written, not what it computes.
_NOT_COMPARED = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"})


class Weights:
    """Weights and caches of one runner. `kv` holds every paged cache, the drafter's own among them."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        model: TargetModel,
        kv: Sequence[KVPair],
        *,
        proposer: Proposer | None,
        graphs: Graphs | None = None,
    ) -> None:
        self._resolved, self._model, self._kv, self._proposer = resolved, model, kv, proposer
        self._graphs = graphs or NoGraphs()
        self._path, self._draft_path = resolved.model_path, _draft_path_of(resolved)
        self._level = 0  # 0: awake

    @torch.inference_mode()
    def sleep(self, level: int) -> None:
        """Give back the caches (level 1), and the weights of target and drafter too (level 2). A deeper level may follow a lighter one."""
        if self._level == 0:
            self._graphs.drop()
            release_kv(self._kv)
        if level == 2 and self._level < 2:
            vars(self._model).clear()
            if self._proposer is not None:
                self._proposer.sleep()
        self._level = max(self._level, level)

    @torch.inference_mode()
    def wake(self) -> None:
        """Undo `sleep`: weights are read from where they came from last.

        Raises:
            ConfigError: the checkpoint cannot be read any more; everything sleeps on.
        """
        if self._level == 2:
            fresh = self._load(self._path)
            if self._proposer is not None:
                self._adopt(fresh, self._proposer.wake)
            else:
                vars(self._model).update(vars(fresh))
        self._restore()

    @torch.inference_mode()
    def reload(self, path: str | None, draft_path: str | None) -> None:
        """Read the weights of target and drafter, from other checkpoints where a path is given, and wake. Old and new target are
        in memory together unless the old one was dropped by sleep at level 2.

        Raises:
            ConfigError: a checkpoint cannot be read or is no other set of weights for the same model; nothing has changed then.
        """
        model_path = self._located(path)
        new_draft = self._located_draft(draft_path, model_path)
        fresh = self._load(model_path)
        if self._proposer is None:
            vars(self._model).clear()
            vars(self._model).update(vars(fresh))
        else:
            proposer = self._proposer
            self._adopt(fresh, lambda: proposer.reload() if new_draft is None else proposer.reload(new_draft))
        self._path, self._draft_path = model_path, new_draft or self._draft_path
        self._restore()

    def _adopt(self, fresh: TargetModel, then: Callable[[], None]) -> None:
        """Put the new target in place, then let the drafter load; when it cannot, all is as before."""
        before = dict(vars(self._model))
        vars(self._model).clear()
        vars(self._model).update(vars(fresh))
        try:
            then()
        except BaseException:
            vars(self._model).clear()
            vars(self._model).update(before)
            if self._proposer is not None:  # a source that has its new weights already goes back
                if before:
                    self._proposer.reload()
                else:
                    self._proposer.sleep()
            raise

    def _restore(self) -> None:
        """Captures hold addresses, and these are others now."""
        if self._level:
            restore_kv(self._kv)
        self._level = 0
        self._graphs.capture()

    def _load(self, path: str) -> TargetModel:
        resolved = self._resolved
        dtype, device = getattr(torch, resolved.dtype), torch.device(resolved.device)
        return load_model(path, resolved.hf_config, dtype=dtype, device=device, max_model_len=resolved.max_model_len)

    def _located(self, path: str | None) -> str:
        if path is None:
            return self._path
        found = locate_target(path).model_path
        _check_target(found, self._resolved)
        return found

    def _located_draft(self, path: str | None, model_path: str) -> str | None:
        """Where the drafter's weights are read from, None: from where they were. A head inside the target's checkpoint moves with it."""
        if path is None:
            return model_path if self._draft_path == self._path else None
        owners = [part for part in (self._resolved, *self._resolved.sources) if part.draft_model_path is not None]
        if len(owners) != 1:
            count = "no weights" if not owners else "several sources with weights"
            raise ConfigError(f"draft_weights_path is {path!r}, but the drafter has {count}", hint="leave it out")
        found = locate_draft(path).model_path
        known, other = (read_json(Path(at) / "config.json") for at in (owners[0].draft_model_path or "", found))
        _check_same("draft_weights_path", found, {key: known[key] for key in known.keys() & other.keys()}, other)
        return found


def _draft_path_of(resolved: ResolvedConfig) -> str | None:
    paths = [part.draft_model_path for part in (resolved, *resolved.sources) if part.draft_model_path is not None]
    return paths[0] if len(paths) == 1 else None


def _check_target(path: str, resolved: ResolvedConfig) -> None:
    try:
        found = auto_config(path, trust_remote_code=resolved.engine.model.trust_remote_code)
    except ConfigError as error:
        raise ConfigError(f"weights_path {path}: {error.message}", hint="export the weights again") from None
    known = resolved.hf_config.to_dict()
    _check_same("weights_path", path, known, dict.fromkeys(known) | found.to_dict())


def _check_same(name: str, path: str, known: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose config.json describes another model: weights of the same shapes would load and compute nonsense."""
    for key in sorted(known.keys() - _NOT_COMPARED):
        if found[key] != known[key]:
            raise ConfigError(
                f"{name} {path}: config.json has {key} {found[key]!r}, but the loaded model has {known[key]!r}",
                hint="give other weights of the same model, or start a server with this one",
            )
