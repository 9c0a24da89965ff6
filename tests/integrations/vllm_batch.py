"""What vLLM's runner does around a custom proposer, as far as the proposer can see: rows that requests move between."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

MAX_NUM_REQS, MAX_MODEL_LEN = 6, 64


def config(num_speculative_tokens: int | None = 4, **speculative: Any) -> Any:
    """The part of a VllmConfig that is read; custom_class gets prompt_lookup bounds of 0."""
    given = {"num_speculative_tokens": num_speculative_tokens, "prompt_lookup_min": 0, "prompt_lookup_max": 0, **speculative}
    return SimpleNamespace(speculative_config=SimpleNamespace(**given), model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN))


@dataclass(slots=True, eq=False)
class Request:
    """prompt and the whole output that it will have; num_read: prompt tokens already computed."""

    prompt: list[int]
    output: list[int]
    num_read: int = 0
    num_out: int = 0

    @property
    def text(self) -> list[int]:
        return [*self.prompt, *self.output[: self.num_out]]


class Batch:
    """Runs requests with a proposer: chunked prompts, verification of its drafts, rows that are compacted when a request ends."""

    def __init__(self, proposer: Any, *, chunk: int = 8) -> None:
        self.proposer, self.chunk = proposer, chunk
        self.requests: list[Request] = []
        self.drafts: dict[int, list[int]] = {}
        self.token_ids_cpu = np.zeros((MAX_NUM_REQS, MAX_MODEL_LEN), dtype=np.int32)
        self.num_tokens_no_spec = np.zeros(MAX_NUM_REQS, dtype=np.int32)
        self.num_accepted = self.num_drafted = 0

    def step(self, rng: random.Random | None = None) -> list[tuple[Request, list[int]]]:
        """One step; return each request of the batch with its new drafts. rng: rows are swapped at random."""
        ended = [i for i, one in enumerate(self.requests) if one.num_out == len(one.output)]
        for index in reversed(ended):  # the last row moves into the hole
            last = self.requests.pop()
            if index < len(self.requests):
                self.requests[index] = last
        if rng is not None and len(self.requests) > 1:
            a, b = rng.sample(range(len(self.requests)), 2)
            self.requests[a], self.requests[b] = self.requests[b], self.requests[a]
        sampled = [self._run(one) for one in self.requests]
        self.token_ids_cpu[len(self.requests) :] = -7  # rows of nobody
        self.num_tokens_no_spec[len(self.requests) :] = 3
        for row, one in enumerate(self.requests):
            text = one.text
            self.token_ids_cpu[row] = 99  # what lies behind a text is not of it
            self.token_ids_cpu[row, : len(text)] = text
            self.num_tokens_no_spec[row] = len(text)
        drafts = self.proposer.propose(sampled, self.num_tokens_no_spec, self.token_ids_cpu, slot_mappings=None)
        assert len(drafts) == len(self.requests)
        self.drafts = {id(one): ids for one, ids in zip(self.requests, drafts, strict=True)}
        assert all(not ids for ids, new in zip(drafts, sampled, strict=True) if not new)
        return list(zip(self.requests, drafts, strict=True))

    def _run(self, one: Request) -> list[int]:
        """The ids a request gets: accepted drafts and one more, or none while its prompt is read."""
        one.num_read = min(one.num_read + self.chunk, len(one.prompt))
        if one.num_read < len(one.prompt):
            return []
        drafts, rest = self.drafts.get(id(one), []), one.output[one.num_out :]
        accepted = 0
        while accepted < min(len(drafts), len(rest)) and drafts[accepted] == rest[accepted]:
            accepted += 1
        self.num_drafted += len(drafts)
        self.num_accepted += accepted
        new = rest[: accepted + 1]
        one.num_out += len(new)
        return new
