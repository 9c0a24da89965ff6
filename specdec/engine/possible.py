"""check_possible: refuses constraints that together leave no token to draw, before the request is queued.

Owns: the search for a dead end among what a request's own rules allow. Must not know: queues, HTTP, the target's logits.
Read next: worker/logits.py, which applies the same rules to every row.

The search is exact while it stays small (a list of choices always does); what lies beyond its limit is found when it is drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from specdec.errors import RequestRejected
from specdec.sampling_params import SamplingParams
from specdec.structured.compiler import Grammar
from specdec.structured.mask import allowed_ids
from specdec.structured.matcher import Matcher
from specdec.worker.logits import process_block

MAX_STATES = 256  # beginnings of an answer that are looked at; a tenth of a millisecond each with a vocabulary of 50,000


def check_possible(sampling: SamplingParams, *, vocab_size: int, eos_token_ids: Sequence[int], field: str) -> None:
    """Refuse a request of which some answer runs into a place where every token is forbidden.

    sampling: with its grammar compiled and its bad words as ids. field: the request's field that holds the grammar.

    Raises:
        RequestRejected: the message says after how many tokens, and which fields forbid them.
    """
    names = _hard_rules(sampling, field)
    if len(names) < 2 and not sampling.bad_words_token_ids:
        return
    stop_ids = [*(() if sampling.ignore_eos else eos_token_ids), *sampling.stop_token_ids]
    dead = _Search(sampling, vocab_size, stop_ids).dead_end()
    if dead is None:
        return
    place = "at the first token" if not dead else f"after the tokens {list(dead)[:8]}{' ...' if len(dead) > 8 else ''}"
    raise RequestRejected(
        f"{' and '.join(names)} forbid every token {place}, so that no answer could go on",
        param=names[0],
        hint="allow the tokens of a whole answer, its end token included, or drop one of these fields",
    )


def _hard_rules(sampling: SamplingParams, field: str) -> list[str]:
    """The fields that forbid tokens, by name; min_tokens yields to a grammar that is complete, so beside one it forbids nothing alone."""
    names = []
    if sampling.allowed_token_ids is not None:
        names.append("allowed_token_ids")
    if sampling.bad_words_token_ids:
        names.append("bad_words")
    if sampling.structured is not None and names:
        names.append(field)
    if sampling.min_tokens and names:
        names.append("min_tokens")
    return names


class _Search:
    """Breadth first over beginnings of an answer; two that spell the same text behave the same unless bad words look back at ids."""

    def __init__(self, sampling: SamplingParams, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        wish = sampling.structured
        grammar = wish.compiled if wish is not None else None
        self._grammar = grammar if isinstance(grammar, Grammar) else None
        self._matcher = Matcher(self._grammar, stop_token_ids=sampling.stop_token_ids) if self._grammar else None

    def dead_end(self) -> tuple[int, ...] | None:
        """Return the shortest beginning that nothing can follow, None when there is none among the first MAX_STATES."""
        waiting: deque[tuple[int, ...]] = deque([()])
        seen: set[object] = set()
        ends = set(self._stop_ids)
        while waiting and len(seen) < MAX_STATES:
            path = waiting.popleft()
            key = self._key(path)
            if key in seen:
                continue
            seen.add(key)
            following = self._allowed_after(path)
            if not len(following):
                return path
            is_wide = len(following) > MAX_STATES  # free text: nothing is gained by looking behind a part of it
            if not is_wide and (self._sampling.max_tokens is None or len(path) + 1 < self._sampling.max_tokens):
                waiting.extend((*path, token_id) for token_id in following.tolist() if token_id not in ends)
        return None

    def _key(self, path: tuple[int, ...]) -> object:
        """What decides which tokens may follow."""
        early = min(len(path), self._sampling.min_tokens)
        longest = max((len(word) for word in self._sampling.bad_words_token_ids), default=1)
        text = b"".join(self._grammar.vocabulary.token_bytes[i] for i in path) if self._grammar else b""
        return early, text, path[len(path) - longest + 1 :] if longest > 1 else ()

    def _allowed_after(self, path: tuple[int, ...]) -> torch.Tensor:
        logits = torch.zeros((1, self._vocab_size))
        if self._matcher is not None:
            mask = torch.full((1, self._matcher.num_words), -1, dtype=torch.int32)
            self._matcher.apply(path)
            self._matcher.fill(mask, 0)
            logits.masked_fill_(~allowed_ids(mask, self._vocab_size, device=logits.device), -torch.inf)
        process_block(logits, self._sampling, prompt=(), output=path, paths=((),), stop_ids=self._stop_ids)
        return torch.isfinite(logits[0]).nonzero().flatten()
