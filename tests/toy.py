"""ToyRunner: a worker double in plain Python whose answers are known, and which checks every plan it is given.

Its target is a function of the whole history, so one wrong token changes everything after it. Its KV cache remembers for
each slot which tokens were computed into it, so reading a slot that holds anything else is caught at once. Drafters are
right or wrong on purpose. No torch.

    resolved = toy_resolved(num_drafts=3)
    runner = ToyRunner.for_config(resolved, drafter=coin(0.5))
    scheduler = Scheduler(resolved, runner.num_blocks, build_policy(resolved))
    plan = scheduler.schedule(); commits = scheduler.update(plan, runner.execute(plan))
    runner.solo(prompt, sampling)  # what it must come to
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from specdec.config.engine import CacheConfig, EngineConfig, ResolvedConfig, SchedulerConfig
from specdec.config.methods import MethodTraits
from specdec.sampling_params import SamplingParams
from specdec.scheduler.output import (
    DraftOrder,
    ModelRunnerOutput,
    NewRequestData,
    RequestOutput,
    SchedulerOutput,
    StepTimings,
    TokenLogprobs,
)

VOCAB_SIZE = 97
Target: TypeAlias = Callable[[Sequence[int], int], int]  # (history, number of prompt tokens in it) -> next token
Drafter: TypeAlias = Callable[[Sequence[int], int, Callable[[Sequence[int]], int]], list[int]]  # (history, at most, target) -> drafts


@dataclass(frozen=True)
class ToyHFConfig:
    """What stands where a checkpoint's configuration would."""

    vocab_size: int
    max_position_embeddings: int
    hidden_size: int = 8
    num_hidden_layers: int = 1
    model_type: str = "toy"


def toy_resolved(
    *,
    num_drafts: int = 0,
    draft_slots: int = 0,
    lookahead: int = 0,
    prefill_lookahead: int = 0,
    block_size: int = 4,
    num_blocks: int = 64,
    enable_prefix_caching: bool = True,
    max_model_len: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    long_prefill_token_threshold: int = 0,
    policy: str = "fcfs",
    max_waiting: int = 0,
    async_scheduling: bool = False,
    vocab_size: int = VOCAB_SIZE,
    eos_token_ids: tuple[int, ...] = (),
) -> ResolvedConfig:
    """Build a small configuration; `num_drafts` 0 is plain decoding (no traits). Lengths in tokens."""
    traits = MethodTraits(
        method="ngram",
        max_nodes=num_drafts,
        max_depth=num_drafts,
        draft_slots=draft_slots,
        lookahead=lookahead,
        prefill_lookahead=prefill_lookahead,
    )
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_token_threshold=long_prefill_token_threshold,
        policy=policy,  # type: ignore[arg-type]
        max_waiting=max_waiting,
        async_scheduling=async_scheduling,
    )
    cache = CacheConfig(block_size=block_size, num_blocks=num_blocks, enable_prefix_caching=enable_prefix_caching)
    return ResolvedConfig(
        engine=EngineConfig(cache=cache, scheduler=scheduler, device="cpu"),
        model_path="toy",
        tokenizer_path="toy",
        hf_config=ToyHFConfig(vocab_size, max_model_len),
        dtype="float32",
        device="cpu",
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        served_model_name="toy",
        traits=traits if num_drafts else None,
    )


# -- targets -------------------------------------------------------------------------------------------------------------


def mix(token_ids: Sequence[int], salt: int = 0) -> int:
    """Hash a token list to 32 bits, the same in every process."""
    return (zlib.crc32(array("q", token_ids).tobytes(), salt & 0xFFFFFFFF) * 2654435761 + salt) % 2**32


def hash_target(vocab_size: int = VOCAB_SIZE, *, seed: int = 0, eos_token_id: int | None = None, eos_rate: float = 0.05) -> Target:
    """The next token is a hash of the whole history; `eos_token_id`, if given, comes in a share `eos_rate` of places and only there."""

    def target(history: Sequence[int], num_prompt: int) -> int:
        value = mix(history, seed)
        token_id = value % vocab_size
        if eos_token_id is None:
            return token_id
        if mix(history, seed + 1) < eos_rate * 2**32:
            return eos_token_id
        return token_id if token_id != eos_token_id else (token_id + 1) % vocab_size

    return target


def scripted_target(output: Sequence[int]) -> Target:
    """The output is the given one, whatever the prompt; past its end it starts again."""
    return lambda history, num_prompt: output[(len(history) - num_prompt) % len(output)]


# -- drafters ------------------------------------------------------------------------------------------------------------


def _follow(history: Sequence[int], count: int, choose: Callable[[list[int]], int]) -> list[int]:
    tokens = list(history)
    for _ in range(count):
        tokens.append(choose(tokens))
    return tokens[len(history) :]


def oracle() -> Drafter:
    """Every draft is right."""
    return lambda history, count, target: _follow(history, count, target)


def anti(vocab_size: int = VOCAB_SIZE) -> Drafter:
    """Every draft is wrong."""
    return lambda history, count, target: _follow(history, count, lambda tokens: (target(tokens) + 1) % vocab_size)


def coin(p: float, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Drafter:
    """Each draft is right with probability p, decided by a hash of what precedes it."""

    def choose(tokens: list[int], target: Callable[[Sequence[int]], int]) -> int:
        is_right = mix(tokens, seed + 7) < p * 2**32
        return target(tokens) if is_right else (target(tokens) + 1) % vocab_size

    return lambda history, count, target: _follow(history, count, lambda tokens: choose(tokens, target))


def script(draft_token_ids: Sequence[int]) -> Drafter:
    """The same drafts every time, cut to what was ordered."""
    return lambda history, count, target: list(draft_token_ids[:count])


def ragged(drafter: Drafter, *, seed: int = 0) -> Drafter:
    """`drafter` with a number of drafts between none and what was ordered, as lookups have."""
    return lambda history, count, target: drafter(history, mix(history, seed + 13) % (count + 1), target)


# -- the runner ----------------------------------------------------------------------------------------------------------


@dataclass
class ToyRow:
    """One request as the worker knows it. keys[i] names tokens 0..i, and is what their slot must hold."""

    history: list[int]
    num_prompt: int
    sampling: SamplingParams
    block_ids: list[int]
    num_computed: int
    prefill_len: int
    drafts: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)


class ToyRunner:
    """Executes plans for a toy target, verifying drafts by exact match, and asserts that each plan is sound.

    errors: request id -> message; such a request fails alone at its next sample. raises: raised by the next execute.
    """

    def __init__(
        self,
        vocab_size: int = VOCAB_SIZE,
        drafter: Drafter | None = None,
        seed: int = 0,
        *,
        target: Target | None = None,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 64,
        traits: MethodTraits | None = None,
        async_scheduling: bool = False,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.vocab_size = vocab_size
        self.drafter = drafter
        self.target = target or hash_target(vocab_size, seed=seed)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.traits = traits
        self.async_scheduling = async_scheduling
        self.eos_token_ids = frozenset(eos_token_ids)
        self.rows: dict[str, ToyRow] = {}
        self.slots: dict[int, int] = {}  # slot -> key of the tokens computed into it
        self.released: dict[str, str] = {}  # request id -> why its row was given back last
        self.plans: list[SchedulerOutput] = []
        self.errors: dict[str, str] = {}
        self.raises: Exception | None = None
        self.timings = StepTimings()
        self.is_closed = False

    @classmethod
    def for_config(
        cls, resolved: ResolvedConfig, *, drafter: Drafter | None = None, target: Target | None = None, seed: int = 0
    ) -> ToyRunner:
        """Build the runner that fits a configuration of toy_resolved."""
        return cls(
            resolved.vocab_size,
            drafter,
            seed,
            target=target,
            num_blocks=resolved.engine.cache.num_blocks or 64,
            block_size=resolved.engine.cache.block_size,
            max_model_len=resolved.max_model_len,
            traits=resolved.traits,
            async_scheduling=resolved.engine.scheduler.async_scheduling,
            eos_token_ids=resolved.eos_token_ids,
        )

    def close(self) -> None:
        """Nothing to release; remembered for tests."""
        self.is_closed = True

    def solo(self, prompt: Sequence[int], sampling: SamplingParams) -> tuple[list[int], str, int | None]:
        """Generate for one request without cache, batch, or drafts: output ids, finish_reason, stop_reason."""
        history = list(prompt)
        limit = self.max_model_len
        if sampling.max_tokens is not None:
            limit = min(limit, len(prompt) + sampling.max_tokens)
        while True:
            token_id = self._sample(history, len(prompt), sampling)
            history.append(token_id)
            output = history[len(prompt) :]
            if len(output) >= sampling.min_tokens:
                if token_id in self.eos_token_ids and not sampling.ignore_eos:
                    return output, "stop", None
                if token_id in sampling.stop_token_ids:
                    return output, "stop", token_id
            if len(history) >= limit:
                return output, "length", None

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Check a plan, run it, and return its results."""
        if self.raises is not None:
            raise self.raises
        self.plans.append(plan)
        self._apply(plan)
        self._check_blocks()
        for request_id, num_rows in plan.num_scheduled_tokens.items():
            self._write(request_id, num_rows, plan)
        for request_id in plan.num_scheduled_tokens:
            self._check_reads(request_id)
        results = {request_id: self._run(request_id, num_rows, plan) for request_id, num_rows in plan.num_scheduled_tokens.items()}
        return ModelRunnerOutput(results=results, epoch=dict(plan.epoch), num_rows=plan.total_num_scheduled_tokens, timings=self.timings)

    def _apply(self, plan: SchedulerOutput) -> None:
        """Take over what changed, in the order a worker must: free rows first."""
        for request_id, finished in plan.finished.items():
            row = self.rows.pop(request_id, None)
            assert row is not None or self.released.get(request_id) == "preempt", f"{request_id} ends, but was never here"
            self.released[request_id] = finished.reason
            num_known = finished.num_tokens if row is None else len(row.history)
            assert finished.num_tokens <= num_known, f"{request_id}: {finished.num_tokens} tokens kept of {num_known}"
        for request_id in plan.preempted_ids:
            del self.rows[request_id]
            self.released[request_id] = "preempt"
        for new in plan.new:
            self._admit(new)
        for cached in plan.cached:
            row = self.rows[cached.request_id]
            row.block_ids += cached.new_block_ids
            ahead = cached.num_computed_tokens - row.num_computed
            assert ahead == 0 or (self.async_scheduling and ahead > 0), f"{cached.request_id}: the host is {ahead} tokens ahead"
        entries = [*(new.request_id for new in plan.new), *(cached.request_id for cached in plan.cached)]
        assert sorted(entries) == sorted(plan.num_scheduled_tokens), "each scheduled request comes with exactly one record"
        assert plan.epoch.keys() == plan.num_scheduled_tokens.keys(), "each scheduled request comes with its epoch"

    def _admit(self, new: NewRequestData) -> None:
        assert new.request_id not in self.rows, f"{new.request_id} has a row already"
        row = ToyRow(
            list(new.token_ids), new.num_prompt_tokens, new.sampling, list(new.block_ids), new.num_computed_tokens, len(new.token_ids)
        )
        self._extend_keys(row.keys, row.history)
        self.rows[new.request_id] = row

    def _check_blocks(self) -> None:
        """Two live requests may share a block only where both hold the same tokens in it, all of them computed."""
        holders: dict[int, tuple[str, int]] = {}
        for request_id, row in self.rows.items():
            assert len(set(row.block_ids)) == len(row.block_ids), f"{request_id} holds a block twice: {row.block_ids}"
            for index, block in enumerate(row.block_ids):
                assert 0 < block < self.num_blocks, f"{request_id} got block {block} of 1..{self.num_blocks - 1}"
                other = holders.setdefault(block, (request_id, index))
                if other[0] == request_id:
                    continue
                end = (index + 1) * self.block_size
                first = self.rows[other[0]]
                assert other[1] == index, f"block {block} is shared at two places, {other[1]} and {index}"
                assert end <= min(row.num_computed, first.num_computed), f"block {block} is shared while it is written"
                assert row.keys[end - 1] == first.keys[end - 1], f"block {block} is shared with other content"

    def _query(self, request_id: str, num_rows: int, plan: SchedulerOutput) -> tuple[list[int], list[int]]:
        """Committed tokens and drafts of a request's rows; a draft that was promised and never made is -1."""
        row = self.rows[request_id]
        num_drafts = plan.num_draft_nodes.get(request_id, 0)
        assert num_rows > 0, f"{request_id} is scheduled with {num_rows} rows"
        end = row.num_computed + num_rows - num_drafts
        assert end <= len(row.history), f"{request_id}: rows end at {end}, {len(row.history)} tokens are known"
        assert not num_drafts or end == len(row.history), f"{request_id}: drafts follow the newest token, not token {end}"
        assert self.async_scheduling or num_drafts <= len(row.drafts), f"{request_id}: {num_drafts} drafts of {len(row.drafts)}"
        drafts = [*row.drafts, *([-1] * num_drafts)][:num_drafts]
        return row.history[row.num_computed : end], drafts

    def _write(self, request_id: str, num_rows: int, plan: SchedulerOutput) -> None:
        row = self.rows[request_id]
        committed, drafts = self._query(request_id, num_rows, plan)
        end = row.num_computed + num_rows
        assert end < self.max_model_len, f"{request_id}: a row at position {end - 1} of {self.max_model_len}"
        num_slots = len(row.block_ids) * self.block_size
        order = plan.drafts_next.get(request_id, DraftOrder(0))
        lookahead = self.traits.lookahead if self.traits and order.max_nodes else 0
        assert min(end + lookahead, self.max_model_len) <= num_slots, f"{request_id}: {num_slots} slots for {end} + {lookahead}"
        keys = row.keys[: row.num_computed + len(committed)]
        self._extend_keys(keys, [*row.history[: len(keys)], *drafts])
        for position in range(row.num_computed, end):
            self.slots[self._slot(row, position)] = keys[position]

    def _check_reads(self, request_id: str) -> None:
        row = self.rows[request_id]
        for position in range(row.num_computed):
            held = self.slots.get(self._slot(row, position))
            assert held == row.keys[position], f"{request_id}: the slot of position {position} holds other tokens"

    def _run(self, request_id: str, num_rows: int, plan: SchedulerOutput) -> RequestOutput:
        row = self.rows[request_id]
        _, drafts = self._query(request_id, num_rows, plan)
        start = row.num_computed
        prompt_logprobs = self._prompt_logprobs(row, start, start + num_rows)
        if start + num_rows < row.prefill_len:
            assert request_id not in plan.drafts_next, f"{request_id} samples nothing and cannot draft"
            row.num_computed += num_rows
            return RequestOutput(prompt_logprobs=prompt_logprobs)
        if request_id in self.errors:
            return RequestOutput(error=self.errors[request_id])
        emitted = self._verify(row, drafts)
        row.num_computed = start + num_rows - (len(drafts) - (len(emitted) - 1))
        logprobs = self._logprobs(row, emitted)
        row.history += emitted
        self._extend_keys(row.keys, row.history)
        assert row.num_computed == len(row.history) - 1, f"{request_id}: {row.num_computed} of {len(row.history)} computed"
        tested = tuple(draft for draft in drafts if draft >= 0)
        row.drafts = self._propose(request_id, row, plan)
        return RequestOutput(
            token_ids=tuple(emitted),
            num_drafts=len(tested),
            num_next=len(row.drafts),
            source=self.traits.method if self.traits and tested else "",
            draft_token_ids=tested,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _verify(self, row: ToyRow, drafts: list[int]) -> list[int]:
        history = list(row.history)
        for draft in [*drafts, None]:
            token_id = self._sample(history, row.num_prompt, row.sampling)
            history.append(token_id)
            if token_id != draft:
                break
        return history[len(row.history) :]

    def _propose(self, request_id: str, row: ToyRow, plan: SchedulerOutput) -> list[int]:
        if self.traits is None:
            assert not plan.drafts_next, "nobody drafts here, but drafts were ordered"
            return []
        order = plan.drafts_next[request_id]
        assert 0 <= order.max_nodes <= self.traits.max_nodes, f"{request_id}: {order.max_nodes} drafts of {self.traits.max_nodes}"
        if self.drafter is None:
            return []
        return self.drafter(row.history, order.max_nodes, lambda history: self._sample(history, row.num_prompt, row.sampling))

    def _sample(self, history: Sequence[int], num_prompt: int, sampling: SamplingParams) -> int:
        """The target's token; among the first min_tokens there is no stop token."""
        token_id = self.target(history, num_prompt)
        if len(history) - num_prompt < sampling.min_tokens:
            while token_id in self.eos_token_ids or token_id in sampling.stop_token_ids:
                token_id = (token_id + 1) % self.vocab_size
        return token_id

    def _logprobs(self, row: ToyRow, emitted: list[int]) -> tuple[TokenLogprobs, ...] | None:
        if row.sampling.logprobs is None:
            return None
        ends = range(len(row.history), len(row.history) + len(emitted))
        tokens = [*row.history, *emitted]
        return tuple(self._logprob(tokens[: end + 1], row.sampling.logprobs) for end in ends)

    def _prompt_logprobs(self, row: ToyRow, start: int, end: int) -> tuple[TokenLogprobs | None, ...] | None:
        """One entry per prompt token of the chunk; the first token of a prompt has none."""
        count = row.sampling.prompt_logprobs
        if count is None or start >= row.num_prompt:
            return None
        positions = range(start, min(end, row.num_prompt))
        return tuple(self._logprob(row.history[: position + 1], count) if position else None for position in positions)

    def _logprob(self, tokens: Sequence[int], num_top: int) -> TokenLogprobs:
        value = -(1 + mix(tokens) % 1000) / 100
        top = tuple(((tokens[-1] + i) % self.vocab_size, value - i) for i in range(num_top))
        return TokenLogprobs(tokens[-1], value, 1, top)

    def _slot(self, row: ToyRow, position: int) -> int:
        return row.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    @staticmethod
    def _extend_keys(keys: list[int], tokens: Sequence[int]) -> None:
        for token_id in tokens[len(keys) :]:
            keys.append(hash((keys[-1] if keys else None, token_id)))
