"""Faults that users of other engines met, each tried on a tiny float32 Llama: limits of length, stale rows, memory that grows."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import NgramConfig
from specdec.config.methods import traits_for
from specdec.engine.core import EngineCore
from specdec.engine.llm import LLM
from specdec.engine.results import CompletionOutput
from specdec.engine.types import DraftTrace
from specdec.errors import ConfigError
from specdec.models.registry import load_model
from specdec.proposers.base import MemoryNeed
from specdec.sampling_params import SamplingParams
from specdec.worker.model_runner import ModelRunner
from specdec.worker.worker import fix_num_blocks, load_runner, memory_plan
from tests.engine.tokenizers_for_tests import toy_tokenizer
from tests.proposers.tiny import BLOCK_SIZE, mixed_requests, prompts, request, resolved_for, start, write_checkpoint

PATTERN = [5, 6, 7, 8, 9, 10]
JUNK = 3e4  # large but finite: a masked key of infinity would show as NaN even where it is rightly ignored


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("faults"), seed=11)


def looked_up(path: Path, drafts: int, **limits: Any) -> ResolvedConfig:
    """Drafts by prompt lookup; none: plain decoding."""
    if not drafts:
        return resolved_for(path, **limits)
    config = NgramConfig(num_speculative_tokens=drafts, prompt_lookup_min=1, prompt_lookup_max=3)
    return resolved_for(path, speculative=config, traits=traits_for(config), **limits)


# ---------------------------------------------------------------- the end of the context


def to_the_end(path: Path, drafts: int) -> list[CompletionOutput]:
    """Prompts of 50 to 63 tokens with no limit of their own, in a context of 64."""
    resolved = replace(looked_up(path, drafts), max_model_len=64)
    texts = [[*PATTERN * 11][: 50 + extra] for extra in range(14)]
    sampling = [SamplingParams(temperature=0.7 * (extra % 2), seed=extra, logprobs=2, ignore_eos=True) for extra in range(14)]
    with LLM.from_core(EngineCore(resolved, load_runner(resolved), tokenizer=toy_tokenizer())) as llm:
        outputs = [result.outputs[0] for result in llm.generate(texts, sampling, use_tqdm=False)]
        assert (llm.stats.spec.total.num_accepted_tokens > 0) == (drafts > 0)
    return outputs


def test_answers_end_at_exactly_max_model_len_and_are_the_same_up_to_there(checkpoint: Path) -> None:
    plain = to_the_end(checkpoint, 0)
    assert [len(output.token_ids) for output in plain] == [64 - length for length in range(50, 64)]
    assert {output.finish_reason for output in plain} == {"length"}
    for drafts in (1, 3, 7):
        for ours, expected in zip(to_the_end(checkpoint, drafts), plain, strict=True):
            assert (ours.token_ids, ours.finish_reason, ours.text) == (expected.token_ids, "length", expected.text)
            assert ours.logprobs is not None
            assert expected.logprobs is not None
            assert len(ours.logprobs) == len(ours.token_ids)
            for mine, theirs in zip(ours.logprobs, expected.logprobs, strict=True):
                assert (mine.token_id, mine.rank) == (theirs.token_id, theirs.rank)
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
                assert mine.logprob < 0


# ---------------------------------------------------------------- rows and slots of those who are gone


def traces(resolved: ResolvedConfig, texts: Sequence[Sequence[int]]) -> list[list[tuple[DraftTrace, ...]]]:
    """Run texts one after another through one engine; return the drafts of every step of each."""
    running = start(resolved)
    found: list[list[tuple[DraftTrace, ...]]] = []
    for index, text in enumerate(texts):
        entry = replace(request(f"t{index}", text, max_tokens=30), track_drafts=True)
        running.core.add_request(entry)
        steps = []
        while running.core.has_work:
            steps += [(output.trace,) for output in running.core.step() if output.trace is not None]
        found.append(steps)
    running.core.close()
    return found


def test_a_row_drafts_nothing_from_the_request_that_had_it_before(checkpoint: Path) -> None:
    """Long request, then a short one that shares n-grams with it, in the only row there is."""
    resolved = looked_up(checkpoint, 4, max_num_seqs=1)
    long, short = (PATTERN * 12)[:60], [7, 8, 3, 7]
    _, second = traces(resolved, [long, short])
    (alone,) = traces(resolved, [short])
    assert second == alone
    assert any(trace.draft_token_ids for (trace,) in alone)


def test_the_third_identical_request_is_drafted_as_well_as_the_first(checkpoint: Path) -> None:
    resolved = looked_up(checkpoint, 4, max_num_seqs=2, enable_prefix_caching=False)
    first, second, third = traces(resolved, [(PATTERN * 6)[:31]] * 3)
    assert first == second == third
    assert sum(trace.num_accepted for (trace,) in first) > 0


class Spoiling:
    """Overwrites, after each step, every slot that no committed and computed token of a live request owns."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.num_spoiled = runner, 0
        self._execute = runner.execute
        runner.execute = self.execute  # type: ignore[method-assign]

    @torch.inference_mode()
    def execute(self, plan: Any) -> Any:
        result = self._execute(plan)
        state = self.runner.state
        keep = torch.zeros(self.runner.num_blocks * BLOCK_SIZE, dtype=torch.bool)
        for info in state.infos.values():
            positions = torch.arange(info.num_computed)
            blocks = state.block_table[info.row, positions // BLOCK_SIZE].long()
            keep[blocks * BLOCK_SIZE + positions % BLOCK_SIZE] = True
        for k_cache, v_cache in self.runner.kv:
            for cache in (k_cache, v_cache):
                cache.view(-1, *cache.shape[2:])[~keep] = JUNK
        self.num_spoiled += int((~keep).sum())
        return result


@pytest.mark.parametrize("num_blocks", [200, 23], ids=["roomy", "preempting"])
def test_keys_and_values_of_rejected_drafts_and_of_free_blocks_are_never_read(checkpoint: Path, num_blocks: int) -> None:
    entries = [*mixed_requests(), request("p", PATTERN * 3)]
    plain = start(resolved_for(checkpoint, enable_prefix_caching=False))
    plain.add(entries)
    plain.finish()
    ours = start(looked_up(checkpoint, 7, num_blocks=num_blocks, enable_prefix_caching=False))
    spoiling = Spoiling(ours.runner)
    ours.add(entries)
    ours.finish()
    assert ours.token_ids == plain.token_ids
    assert 0 < ours.num_accepted() < ours.num_drafted()
    assert (ours.num_preemptions > 0) == (num_blocks == 23)
    assert spoiling.num_spoiled > 0


# ---------------------------------------------------------------- memory


def blocks_kept(path: Path, *, leak: bool = False) -> int:
    """Python memory blocks that 800 short requests leave behind after as many to warm up. leak: keep id and seed of each."""
    running = start(looked_up(path, 3, max_num_seqs=16))
    kept: dict[str, int] = {}

    def wave(first: int) -> int:
        for index in range(first, first + 200):
            entry = request(f"w{index}", [index % 90, 5, 6, 5], max_tokens=2, temperature=0.5, seed=index + 2**40)
            running.core.add_request(entry)
            if leak:
                kept[entry.request_id] = entry.sampling.seed or 0
        while running.core.has_work:
            running.core.step()
        gc.collect()
        return sys.getallocatedblocks()

    counts = [wave(200 * index) for index in range(8)]
    running.core.close()
    return counts[-1] - counts[3]


def test_short_requests_leave_nothing_behind(checkpoint: Path) -> None:
    """Interpreter and torch keep a few hundred blocks, and ever fewer; one small record for each request would be 1600."""
    assert blocks_kept(checkpoint) < 800
    assert blocks_kept(checkpoint, leak=True) > 1500, "the measurement must see a leak of one id and one number"


def test_verify_logits_and_the_drafter_are_counted_before_kv_blocks(checkpoint: Path) -> None:
    plain, drafted = looked_up(checkpoint, 0, num_blocks=None), looked_up(checkpoint, 7, num_blocks=None)
    model = load_model(str(checkpoint), plain.hf_config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=96)
    need = MemoryNeed(weights_bytes=10**6, kv_bytes_per_block=4096, row_bytes=1000)
    bare, verifying, heavy = (
        memory_plan(plain, model, MemoryNeed()),
        memory_plan(drafted, model, MemoryNeed()),
        memory_plan(drafted, model, need),
    )
    rows = drafted.engine.scheduler.max_num_seqs
    assert verifying.fixed_bytes - bare.fixed_bytes >= 7 * rows * drafted.vocab_size * 4
    assert heavy.fixed_bytes - verifying.fixed_bytes == 10**6 + 1000 * rows
    assert heavy.block_bytes - verifying.block_bytes == 4096
    assert bare.block_bytes == 2 * model.num_layers * BLOCK_SIZE * 2 * 8 * 4  # keys and values, 2 heads of 8 floats
    with pytest.raises(ConfigError, match=r"max_model_len 96 needs 25 KV blocks, but memory holds 0"):
        fix_num_blocks(drafted, model, MemoryNeed(weights_bytes=2**62))


def test_a_prompt_that_fits_alone_is_served_however_many_wait(checkpoint: Path) -> None:
    """Blocks for exactly one full request: fifteen of them, all at once, run one after another."""
    texts = prompts(15, seed=2, shortest=40, longest=60)
    entries = [request(f"r{index}", text, max_tokens=96 - len(text)) for index, text in enumerate(texts)]
    plain = start(resolved_for(checkpoint, max_num_seqs=1))
    plain.add(entries)
    tight = start(looked_up(checkpoint, 5, num_blocks=25, max_num_seqs=8))
    tight.add(entries)
    assert tight.finish().token_ids == plain.finish().token_ids
    assert set(tight.reasons.values()) == {"length"}
