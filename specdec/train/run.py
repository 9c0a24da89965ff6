"""TrainingRun: one directory in which one head is trained, from the data to the exported checkpoint.

Owns: what a run consists of, and that it goes on with the vocabulary it began with. Must not know: arguments, progress bars.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import nn

from specdec.errors import ConfigError
from specdec.models.loader import Checkpoint
from specdec.train.dflash import DFlashTraining
from specdec.train.draft_vocabulary import choose_draft_ids, count_ids
from specdec.train.dspark import DSparkTraining
from specdec.train.eagle3 import Eagle3Training
from specdec.train.evaluation import serve_held_out
from specdec.train.fit import FitOptions, Progress, checkpoint_path, fit, load_averaged
from specdec.train.medusa import MedusaTraining
from specdec.train.mlp_speculator import MlpSpeculatorTraining
from specdec.train.mtp import MtpTraining
from specdec.train.peagle import PEagleTraining
from specdec.train.shards import Corpus, save_atomically, shard_paths
from specdec.train.truncated import TruncatedTraining
from specdec.train.warm_start import Weighted, begin_from, exported_draft_ids

DRAFT_VOCAB = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a method's drafter is trained. kind: its class. drafts_all_ids: its format has no draft vocabulary, and its tables are its own.

    copies_layers: it begins as a part of the target, whose tensors it is let `read`.
    """

    kind: Any
    drafts_all_ids: bool = False
    copies_layers: bool = False


METHODS = {
    "eagle3": Method(kind=Eagle3Training),
    "dspark": Method(kind=DSparkTraining),
    "medusa": Method(kind=MedusaTraining),
    "peagle": Method(kind=PEagleTraining),
    "mtp": Method(kind=MtpTraining),
    "dflash": Method(kind=DFlashTraining),
    "mlp_speculator": Method(kind=MlpSpeculatorTraining, drafts_all_ids=True),
    "truncated": Method(kind=TruncatedTraining, copies_layers=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTables:
    """What a head borrows while it is trained: config, embedding [V, H] and LM head [V, H] of the target. path: its directory."""

    path: str
    config: Any
    embedding: torch.Tensor
    head: torch.Tensor

    @classmethod
    def load(cls, path: str, hf_config: Any) -> TargetTables:
        """Read the two tables alone.

        Raises:
            ConfigError: the checkpoint has no such tensor.
        """
        text = hf_config.get_text_config()
        shape = (text.vocab_size, text.hidden_size)
        with Checkpoint(path) as checkpoint:
            embedding = checkpoint.take("model.embed_tokens.weight", shape)
            head = embedding if text.tie_word_embeddings else checkpoint.take("lm_head.weight", shape)
        return cls(path=path, config=text, embedding=embedding, head=head)

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return another tensor of the target.

        Raises:
            ConfigError: it has none of this name and shape.
        """
        with Checkpoint(self.path) as checkpoint:
            return checkpoint.take(name, shape)


class TrainingRun:
    """A method, its data and its directory. init: an exported head to begin from, in a run without a checkpoint.

    Raises:
        ConfigError: unknown method, data without features, or a head that is not of this method and target.
    """

    def __init__(
        self, method: str, *, data: Path, directory: Path, target: TargetTables, always: tuple[int, ...] = (), init: Path | None = None
    ) -> None:
        if method not in METHODS:
            raise ConfigError(f"method is {method!r}, but heads are trained for {', '.join(METHODS)}")
        self.method, self.data, self.directory, self.target = method, data, directory, target
        self.corpus = Corpus(data, features=True)
        self.draft_ids = self._vocabulary(always, init)
        torch.manual_seed(0)  # of the first weights
        more = {"read": target.read} if METHODS[method].copies_layers else {}
        self.head: nn.Module = METHODS[method].kind(
            target.config, embedding=target.embedding, head=target.head, draft_ids=self.draft_ids, taps=self.corpus.layers, **more
        )
        if init is not None and not checkpoint_path(directory).exists():
            begin_from(cast("Weighted", self.head), init)

    def fit(self, options: FitOptions, show: Callable[[Progress], None]) -> None:
        """Train, or go on training."""
        documents = self.corpus.documents
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "options.json").write_text(json.dumps(asdict(options)), encoding="utf-8")
        fit(self.head, documents("train"), documents("eval"), directory=self.directory, options=options, show=show)

    def export(self, out: Path) -> None:
        """Write the averaged weights of the last checkpoint in the public format of the method, with where they come from.

        Raises:
            ConfigError: nothing was trained yet.
        """
        if not checkpoint_path(self.directory).exists():
            raise ConfigError(f"{str(self.directory)!r} holds no checkpoint", hint="run specdec train fit first")
        state = torch.load(checkpoint_path(self.directory), weights_only=True)
        load_averaged(self.head, state["averaged"])
        out.mkdir(parents=True, exist_ok=True)
        head: Any = self.head
        save_atomically(head.tensors() | head.maps(), out / "model.safetensors", metadata={"format": "pt"})
        (out / "model.safetensors").chmod(0o644)  # the library writes it for its owner alone, but servers have users of their own
        (out / "config.json").write_text(json.dumps(head.config(), indent=2, sort_keys=True) + "\n", encoding="utf-8")
        provenance = self._provenance(int(state["step"]))
        (out / "provenance.json").write_text(json.dumps(provenance, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _vocabulary(self, always: tuple[int, ...], init: Path | None) -> torch.Tensor:
        path = self.directory / "draft_ids.safetensors"
        if path.exists():
            stored: torch.Tensor = load_file(path)["draft_ids"]
            return stored
        if METHODS[self.method].drafts_all_ids:
            draft_ids = torch.arange(self.target.config.vocab_size)
        elif init is not None:
            draft_ids = exported_draft_ids(init)
        else:
            counts = count_ids(self.corpus.documents("train"), self.target.config.vocab_size)
            draft_ids = choose_draft_ids(counts, min(DRAFT_VOCAB, len(counts)), always=always)
        self.directory.mkdir(parents=True, exist_ok=True)
        save_atomically({"draft_ids": draft_ids}, path)
        return draft_ids

    def _provenance(self, steps: int) -> dict[str, Any]:
        shards = shard_paths(self.data)
        digest = hashlib.sha256(b"".join(hashlib.sha256(shard.read_bytes()).digest() for shard in shards)).hexdigest()
        options = json.loads((self.directory / "options.json").read_text(encoding="utf-8"))
        head: Any = self.head
        served = serve_held_out(head, self.corpus.documents("eval"), batch_size=options["batch_size"], max_len=options["max_len"])
        counted = self.corpus.documents("train")
        return {
            "method": self.method,
            "steps": steps,
            "options": options,
            "documents": len(counted),
            "tokens": sum(len(document.ids) - document.prompt_len for document in counted),
            "data_sha256": digest,
            "written_by": "the target itself, answering prompts it was given or wrote itself; see docs/guides/train-a-head.md",
            "held_out_acceptance": served.by_position if served else None,
        }
