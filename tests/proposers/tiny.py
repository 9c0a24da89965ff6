"""A tiny random Llama, an engine over it, and how the tests of draft methods run requests through both.

The model has 97 tokens and float32 weights that are large enough for varied text, so that greedy and seeded ids are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.config.engine import CacheConfig, EngineConfig, ResolvedConfig, SchedulerConfig
from specdec.config.methods import MethodTraits
from specdec.engine.core import EngineCore
from specdec.engine.types import EngineRequest, SpecDecodeRequestStats
from specdec.proposers.base import Proposer
from specdec.sampling_params import SamplingParams
from specdec.worker.model_runner import ModelRunner
from specdec.worker.worker import load_runner
from tests.engine.tokenizers_for_tests import TOY_EOS, TOY_VOCAB_SIZE, toy_tokenizer

MAX_MODEL_LEN = 96
BLOCK_SIZE = 4
MakeProposer = Callable[[ResolvedConfig], Proposer]


def write_checkpoint(path: Path, *, seed: int, num_layers: int = 2, vocab_size: int = TOY_VOCAB_SIZE, max_positions: int = 128) -> Path:
    """Write a random Llama checkpoint and return its directory."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=TOY_EOS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(path)
    return path


def resolved_for(
    path: Path,
    *,
    traits: MethodTraits | None = None,
    speculative: Any = None,
    num_blocks: int = 200,
    enable_prefix_caching: bool = True,
    **scheduler: Any,
) -> ResolvedConfig:
    """The resolved configuration of a checkpoint of `write_checkpoint`; `scheduler` are fields of SchedulerConfig."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "async_scheduling": False} | scheduler
    engine = EngineConfig(
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, enable_prefix_caching=enable_prefix_caching),
        scheduler=SchedulerConfig(**limits),
        speculative=speculative,
    )
    return ResolvedConfig(
        engine=engine,
        model_path=str(path),
        tokenizer_path=str(path),
        hf_config=LlamaConfig.from_pretrained(path),
        dtype="float32",
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=TOY_VOCAB_SIZE,
        eos_token_ids=(TOY_EOS,),
        served_model_name="tiny",
        traits=traits,
    )


@dataclass(slots=True)
class Run:
    """What a set of requests produced: ids and statistics by request id, and the engine that made them."""

    core: EngineCore
    runner: ModelRunner
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    stats: dict[str, SpecDecodeRequestStats] = field(default_factory=dict)
    num_cached_tokens: dict[str, int] = field(default_factory=dict)
    num_engine_steps: int = 0

    @property
    def num_preemptions(self) -> int:
        return self.core.stats.gauges.num_preemptions

    def acceptance_length(self) -> float:
        """1 + accepted / steps, over steps that had drafts."""
        steps = sum(stats.num_drafts for stats in self.stats.values())
        return 1 + sum(stats.num_verified_tokens for stats in self.stats.values()) / steps

    def num_drafted(self) -> int:
        return sum(stats.num_draft_tokens for stats in self.stats.values())

    def num_accepted(self) -> int:
        return sum(stats.num_accepted_tokens for stats in self.stats.values())

    def add(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            self.core.add_request(request)
            self.token_ids[request.request_id] = []

    def step(self) -> None:
        """Run one step and collect what it gave."""
        self.num_engine_steps += 1
        assert self.num_engine_steps < 5000, f"the engine makes no progress: {self.core.describe_requests()}"
        for output in self.core.step():
            self.token_ids[output.request_id].extend(output.token_ids)
            if output.num_cached_tokens:
                self.num_cached_tokens[output.request_id] = output.num_cached_tokens
            if output.finish_reason is not None:
                assert output.error is None, output.error
                self.reasons[output.request_id] = output.finish_reason
                self.stats[output.request_id] = output.stats

    def finish(self) -> Run:
        """Run until nothing is left, and close the engine."""
        while self.core.has_work:
            self.step()
        self.core.close()
        return self


def start(resolved: ResolvedConfig, make: MakeProposer | None = None) -> Run:
    """Build an engine. `make` builds the proposer under test; without it the configured one runs, or none."""
    runner = load_runner(resolved, proposer=make(resolved) if make is not None else None)
    return Run(EngineCore(resolved, runner, tokenizer=toy_tokenizer()), runner)


def run(resolved: ResolvedConfig, requests: Sequence[EngineRequest], make: MakeProposer | None = None) -> Run:
    """Run requests that arrive together to their end."""
    started = start(resolved, make)
    started.add(requests)
    return started.finish()


def request(
    request_id: str, prompt: Sequence[int], *, temperature: float = 0.0, max_tokens: int = 24, tenant: str = "", **sampling: Any
) -> EngineRequest:
    """A request that never stops at <eos>; its seed is made of its id."""
    params = SamplingParams(
        temperature=temperature, max_tokens=max_tokens, **{"seed": sum(map(ord, request_id)), "ignore_eos": True, **sampling}
    )
    return EngineRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=params, tenant=tenant)


def prompts(count: int, *, seed: int = 0, shortest: int = 3, longest: int = 40) -> list[list[int]]:
    """Random prompts of varied lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, TOY_VOCAB_SIZE - 1, (length,), generator=generator).tolist() for length in lengths]


def mixed_requests(count: int = 6, *, seed: int = 0, max_tokens: int = 24, **sampling: Any) -> list[EngineRequest]:
    """Requests of varied lengths, greedy and seeded by turns; the last two share the beginning of their prompts."""
    texts = prompts(count, seed=seed)
    texts[-1] = [*texts[-2][:-1], 5, 6, 7]
    return [
        request(f"r{index}", text, temperature=0.8 * (index % 2), max_tokens=max_tokens - index, **sampling)
        for index, text in enumerate(texts)
    ]


_plain: dict[tuple[object, ...], dict[str, list[int]]] = {}


def plain(path: Path, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
    """What plain decoding emits, with room for everybody and without prefix caching. Computed once per set of requests."""
    key = (path, *((r.request_id, r.prompt_token_ids, repr(r.sampling)) for r in requests))
    if key not in _plain:
        _plain[key] = run(resolved_for(path, enable_prefix_caching=False), requests).token_ids
    return _plain[key]


def with_draft(resolved: ResolvedConfig, path: Path) -> ResolvedConfig:
    """The configuration with a draft checkpoint."""
    return replace(resolved, draft_model_path=str(path), draft_hf_config=LlamaConfig.from_pretrained(path))
