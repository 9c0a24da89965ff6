"""specdec's lookup drafting inside vLLM: three classes for its method `custom_class`.

Owns: telling requests apart by their texts, since vLLM names none. Must not know: torch, vLLM's modules, our engine.
Read next: proposers/ngram_index.py, proposers/suffix_tree.py.

vLLM calls propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=...) once a step. Position i of the three is
the same request, but requests move between positions, come and go. Only the first len(sampled_token_ids) rows are of the batch.
Nothing of vLLM is changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec.proposers.acceptance import AcceptanceBook, expected_accepted
from specdec.proposers.ngram_index import NgramIndex
from specdec.proposers.suffix_cache import ResponseCache
from specdec.proposers.suffix_tree import Continuation, SuffixTree

SHORTEST, LONGEST = 2, 5  # n-gram bounds; vLLM offers none to custom_class
MAX_CACHE_BYTES = 256 * 2**20
NGRAM, SUFFIX = 0, 1  # sources of the hybrid


@dataclass(slots=True, eq=False)
class _Text:
    """A request as far as it can be seen: its tokens [max_model_len], how many, and how many of them were there before any output."""

    key: int
    tokens: np.ndarray
    num_prompt: int
    num_tokens: int = 0
    ngrams: NgramIndex = field(default_factory=lambda: NgramIndex(SHORTEST, LONGEST))
    tree: SuffixTree | None = None
    drafted: tuple[int, int] | None = None  # (source, number) of the drafts that wait

    def continues_in(self, row: np.ndarray, length: int) -> bool:
        """True when a row holds this text and perhaps more."""
        return length >= self.num_tokens and np.array_equal(row[: self.num_tokens], self.tokens[: self.num_tokens])


class TextProposer(ABC):
    """Follows the texts of a batch from call to call; subclasses say what to keep of them and what to draft."""

    def __init__(self, vllm_config: Any) -> None:
        self.num_drafts = int(_required(vllm_config.speculative_config, "num_speculative_tokens"))
        self.max_model_len = int(vllm_config.model_config.max_model_len)
        self._texts: list[_Text] = []  # by position at the last call
        self._num_seen = 0

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return drafts by position, none for requests that sampled nothing.

        sampled_token_ids: ids of this step. num_tokens_no_spec [>= R]: lengths, these ids included. token_ids_cpu [>= R, max_model_len].
        """
        self._follow(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        drafts = []
        for text, sampled in zip(self._texts, sampled_token_ids, strict=True):
            limit = min(self.num_drafts, self.max_model_len - text.num_tokens - 1)
            drafts.append(self._draft(text, len(sampled), limit) if len(sampled) and limit > 0 else [])
        return drafts

    def load_model(self, model: Any) -> None:  # noqa: B027 (there is nothing to override)
        """Nothing is to be loaded, but vLLM's CPU runner (0.32) calls this without asking whether it is there."""

    def _follow(self, sampled: Sequence[Sequence[int]], lengths: np.ndarray, rows: np.ndarray) -> None:
        """Find each position's text, where it was or elsewhere, or begin one; texts that are in no row have ended."""
        left = dict(enumerate(self._texts))
        found: list[_Text | None] = []
        for position in range(len(sampled)):
            text = left.get(position)
            stays = text is not None and text.continues_in(rows[position], int(lengths[position]))
            found.append(left.pop(position) if stays else None)
        for position, text in enumerate(found):
            if text is None:
                length = int(lengths[position])
                moved = next((old for old, one in left.items() if one.continues_in(rows[position], length)), None)
                found[position] = self._begun(length - len(sampled[position])) if moved is None else left.pop(moved)
        for text in left.values():
            self._end(text)
        self._texts = [text for text in found if text is not None]
        for text, row, length in zip(self._texts, rows, lengths, strict=False):
            new = row[text.num_tokens : length]
            text.tokens[text.num_tokens : length] = new
            text.num_tokens = int(length)
            self._extend(text, new.tolist())

    def _begun(self, num_prompt: int) -> _Text:
        self._num_seen += 1
        return _Text(self._num_seen, np.zeros(self.max_model_len + 1, dtype=np.int32), num_prompt)

    @abstractmethod
    def _extend(self, text: _Text, new: list[int]) -> None:
        """Take in tokens that are already part of text.tokens."""

    @abstractmethod
    def _end(self, text: _Text) -> None:
        """The request has left the batch."""

    @abstractmethod
    def _draft(self, text: _Text, num_sampled: int, limit: int) -> list[int]:
        """Return up to `limit` drafts; num_sampled tells how many of the waiting ones came true."""


class NgramProposer(TextProposer):
    """Prompt lookup: the longest match of 2 to 5 tokens, then the most recent one; O(1) for each new token."""

    def _extend(self, text: _Text, new: list[int]) -> None:
        text.ngrams.extend(new)

    def _end(self, text: _Text) -> None:
        """Nothing is learned from it."""

    def _draft(self, text: _Text, num_sampled: int, limit: int) -> list[int]:
        return text.ngrams.lookup(limit)


class SuffixProposer(TextProposer):
    """Suffix decoding with vLLM's own settings (suffix_decoding_*). Every request learns from the responses of all before it."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        given = vllm_config.speculative_config
        self.depth = int(_setting(given, "suffix_decoding_max_tree_depth", 24))
        self.factor = float(_setting(given, "suffix_decoding_max_spec_factor", 1.0))
        self.min_chance = float(_setting(given, "suffix_decoding_min_token_prob", 0.1))
        max_responses = int(_setting(given, "suffix_decoding_max_cached_requests", 10_000))
        self.cache = ResponseCache(self.depth, max_responses=max_responses, max_bytes=MAX_CACHE_BYTES, is_shared=True)

    def _extend(self, text: _Text, new: list[int]) -> None:
        text.tree = text.tree or SuffixTree(self.depth)
        text.tree.extend(new)

    def _end(self, text: _Text) -> None:
        self.cache.learn("", text.tokens[text.num_prompt : text.num_tokens].tolist())

    def _draft(self, text: _Text, num_sampled: int, limit: int) -> list[int]:
        return list(self._continued(text, limit).token_ids)

    def _continued(self, text: _Text, limit: int) -> Continuation:
        """The better of the request's own text and past responses; its own wins ties."""
        assert text.tree is not None, "a text is read before it is continued"
        recent = text.tokens[max(text.num_tokens - self.depth, 0) : text.num_tokens].tolist()
        own = text.tree.continue_text(recent, limit=limit, factor=self.factor, min_chance=self.min_chance)
        past = self.cache.continue_text("", recent, limit=limit, factor=self.factor, min_chance=self.min_chance)
        return past if past.score > own.score else own


class HybridProposer(SuffixProposer):
    """At each step the one of both lookups whose drafts promise more, by how they fared for this request and for others."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.book = AcceptanceBook(2)

    def _extend(self, text: _Text, new: list[int]) -> None:
        super()._extend(text, new)
        text.ngrams.extend(new)

    def _end(self, text: _Text) -> None:
        super()._end(text)
        self.book.forget([text.key])

    def _draft(self, text: _Text, num_sampled: int, limit: int) -> list[int]:
        if text.drafted is not None:
            source, tested = text.drafted
            self.book.observe(text.key, source, tested=tested, accepted=min(num_sampled - 1, tested))
        ngram, suffix = text.ngrams.lookup(limit), self._continued(text, limit)
        rates = [self.book.rate(text.key, source) for source in (NGRAM, SUFFIX)]
        scores = [expected_accepted([rates[NGRAM]] * len(ngram)), expected_accepted([(one + rates[SUFFIX]) / 2 for one in suffix.chances])]
        drafts = ngram if scores[NGRAM] > scores[SUFFIX] else list(suffix.token_ids)
        text.drafted = (NGRAM if scores[NGRAM] > scores[SUFFIX] else SUFFIX, len(drafts)) if drafts else None
        return drafts


def _required(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if value is None:
        raise ValueError(f"speculative_config.{name} is missing: specdec's proposers need it, so set it in --speculative-config")
    return value


def _setting(config: Any, name: str, default: float) -> float:
    """A setting of the host engine's own config, which may lack it."""
    value = getattr(config, name, None)
    return default if value is None else value
