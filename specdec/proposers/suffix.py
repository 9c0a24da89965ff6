"""SuffixProposer: what most often followed the longest matches, in the request's own text, in past responses, in a corpus.

Owns: one tree per row, and the choice between trees. Must not know: the target. Draft length follows the match and the counts:
where nothing matches, nothing is drafted. Source: Oliaro et al. 2411.04975. Read next: suffix_tree.py.

Counts are not the law that drafts are drawn from (they are an argmax), so drafts are one-hot; the counts go out as confidence.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdec.config.methods import MethodTraits
from specdec.errors import ConfigError
from specdec.logging import get_logger
from specdec.proposers.base import AdmitInfo, BaseProposer, DraftBatch, MemoryNeed, Outcome, StepView
from specdec.proposers.corpora import CorpusShelf
from specdec.proposers.ngram import host_batch
from specdec.proposers.suffix_cache import ResponseCache
from specdec.proposers.suffix_tree import NODE_BYTES, Continuation, SuffixTree

if TYPE_CHECKING:
    from specdec.config.engine import ResolvedConfig

logger = get_logger(__name__)

MAX_CACHE_BYTES = 512 * 2**20  # of arrays; live data fill half of them at least
TOKEN_BYTES = 2 * (2 * NODE_BYTES + 4)  # of arrays, for a text of which every suffix is new


@dataclass(slots=True)
class _Text:
    """A live request: its tree, its length, and its last tokens, of which matches are made."""

    tree: SuffixTree
    tenant: str
    num_tokens: int
    recent: list[int]

    def extend(self, token_ids: Sequence[int]) -> None:
        self.tree.extend(token_ids)
        self.num_tokens += len(token_ids)
        self.recent = [*self.recent, *token_ids][-self.tree.depth :]


class SuffixProposer(BaseProposer):
    """Drafts from suffix trees.

    Raises:
        ConfigError: suffix_corpus cannot be read.
    """

    def __init__(self, resolved: ResolvedConfig) -> None:
        config: Any = resolved.engine.speculative
        assert resolved.traits is not None, "a proposer is built for a resolved method"
        self.traits: MethodTraits = resolved.traits
        self.depth: int = config.suffix_decoding_max_tree_depth
        self.factor: float = config.suffix_decoding_max_spec_factor
        self.min_chance: float = config.suffix_decoding_min_token_prob
        self._counts_in_budget = resolved.device == "cpu"  # the trees live in host memory
        self._max_model_len = resolved.max_model_len
        most = min(MAX_CACHE_BYTES, config.suffix_decoding_max_cached_requests * resolved.max_model_len * TOKEN_BYTES)
        self.cache = ResponseCache(
            self.depth,
            max_responses=config.suffix_decoding_max_cached_requests,
            max_bytes=most // 2,
            is_shared=resolved.engine.suffix_share_responses,
        )
        self._max_cache_bytes = most
        self._texts: dict[int, _Text] = {}
        _compile()
        self.corpora = CorpusShelf(self.depth)
        paths = [*([config.suffix_corpus] if config.suffix_corpus else []), *resolved.engine.suffix_corpora]
        self.corpus = _read_corpus(paths, resolved.tokenizer_path, self.depth) if paths else None

    @property
    def num_bytes(self) -> int:
        """Host memory held now: past responses, live requests, and corpora."""
        live = sum(text.tree.allocated_bytes for text in self._texts.values())
        return self.cache.allocated_bytes + live + self.corpora.num_bytes + (self.corpus.allocated_bytes if self.corpus else 0)

    def memory(self) -> MemoryNeed:
        """On a CPU the trees take from the same memory as the KV cache."""
        if not self._counts_in_budget:
            return MemoryNeed()
        corpus = self.corpus.allocated_bytes if self.corpus else 0
        return MemoryNeed(weights_bytes=self._max_cache_bytes + corpus, row_bytes=self._max_model_len * TOKEN_BYTES)

    def admit(self, rows: Sequence[int], infos: Sequence[AdmitInfo]) -> None:
        """Read the prompts (and, after preemption, the output so far)."""
        for row, info in zip(rows, infos, strict=True):
            self._texts[row] = _Text(SuffixTree(self.depth), info.tenant, 0, [])
            self._texts[row].extend(info.prompt_token_ids)

    def release(self, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Learn the responses; a preempted request comes back with what it has, and one that failed teaches nothing."""
        for row, outcome in zip(rows, outcomes, strict=True):
            self._texts.pop(row, None)
            if outcome.reason not in ("preempt", "error"):
                self.cache.learn(outcome.tenant, outcome.output_token_ids)

    def propose(self, step: StepView) -> DraftBatch:
        """Where drafts are wanted, read what was written since the last time, and search the trees."""
        if not any(step.max_nodes):
            return host_batch([()] * len(step.max_nodes), source="suffix")
        found = [Continuation()] * len(step.max_nodes)
        num_sampled, num_tokens = step.num_sampled.tolist(), step.num_tokens[step.rows].tolist()
        for index, (row, wanted) in enumerate(zip(step.rows.tolist(), step.max_nodes, strict=True)):
            if wanted and num_sampled[index]:
                text = self._texts[row]
                text.extend(step.token_ids[row, text.num_tokens : num_tokens[index]].tolist())
                found[index] = self._search(text, wanted)
        batch = host_batch([one.token_ids for one in found], source="suffix")
        return replace(batch, confidence=_confidence(found, batch.token_ids))

    def _search(self, text: _Text, limit: int) -> Continuation:
        """The best of the request's own text, past responses and corpora; the nearer one wins ties."""
        options: dict[str, Any] = {"limit": limit, "factor": self.factor, "min_chance": self.min_chance}
        best = text.tree.continue_text(text.recent, **options)
        others = [shelf.continue_text(text.tenant, text.recent, **options) for shelf in (self.cache, self.corpora)]
        if self.corpus is not None:
            others.append(self.corpus.continue_text(text.recent, **options))
        for other in others:
            if other.score > best.score:
                best = other
        return best


def _confidence(found: Sequence[Continuation], token_ids: torch.Tensor) -> torch.Tensor:
    """[R, K] f32: the share of earlier occurrences that went on with each draft."""
    confidence = torch.zeros(token_ids.shape, dtype=torch.float32)
    for row, one in zip(confidence, found, strict=True):
        row[: len(one.chances)] = torch.tensor(one.chances)
    return confidence


def _compile() -> None:
    """Run every loop of the trees once: numba compiles them the first time on a machine, which no request should wait for."""
    logger.info("suffix trees: compiling, or loading what was compiled before")
    tree = SuffixTree(2)
    tree.extend([1, 2] * 40)
    tree.close()
    tree.continue_text([1, 2], limit=1, factor=1.0, min_chance=0.0)
    tree.remove_oldest()


def _read_corpus(paths: Sequence[str], tokenizer_path: str, depth: int) -> SuffixTree:
    """Learn files: a .jsonl file holds one text a line, as a string or an object with `text`; any other file is one text."""
    texts = [text for path in paths for text in texts_of(Path(path).expanduser(), name="suffix_corpus")]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    tree = SuffixTree(depth)
    for text in texts:
        tree.extend(tokenizer(text, add_special_tokens=False)["input_ids"])
        tree.close()
    logger.info("suffix corpus: %d texts, %d tokens, %d MiB", tree.num_texts, tree.num_tokens, tree.allocated_bytes >> 20)
    return tree


def texts_of(path: Path, *, name: str) -> list[str]:
    """The texts of a corpus file that was given as the option `name`.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} is {str(path)!r}, which cannot be read: {error}", hint="name a UTF-8 text or .jsonl file") from None
    if path.suffix != ".jsonl":
        return [content]
    texts = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            entry = json.loads(line) if line.strip() else ""
        except ValueError:
            entry = None
        text = entry.get("text") if isinstance(entry, dict) else entry
        if not isinstance(text, str):
            raise ConfigError(
                f"{name}: line {number} of {path} is neither a JSON string nor an object with a text", hint='write {"text": "..."}'
            )
        texts.append(text)
    return [text for text in texts if text]
