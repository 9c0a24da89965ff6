"""Two hundred requests at once, with aborts, over a KV cache of 64 blocks: every answer equals its solo run, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import NgramConfig
from specdec.config.methods import traits_for
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.core import EngineCore
from specdec.engine.types import EngineRequest
from specdec.kernels.cpu.team import has_amx
from specdec.sampling_params import SamplingParams
from specdec.tools.arm import Question
from specdec.worker.model_runner import ModelRunner
from tests.e2e.embedded import embedded, lookup
from tests.engine.tokenizers_for_tests import TOY_VOCAB_SIZE
from tests.proposers.tiny import request, resolved_for, start, write_checkpoint

NUM_REQUESTS = 200
NUM_BLOCKS = 64
VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 12},
    {"temperature": 0.0, "repetition_penalty": 1.2},
]
PATTERN = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("load"), seed=5)


def traffic(*, seed: int, longest: int = 24) -> list[EngineRequest]:
    """Prompts and outputs of 1 to `longest` tokens; a third of the prompts repeat themselves, a fifth begins alike."""
    dice = random.Random(seed)
    requests = []
    for index in range(NUM_REQUESTS):
        length = dice.randint(1, longest)
        prompt = [dice.randrange(TOY_VOCAB_SIZE - 1) for _ in range(length)]
        if index % 3 == 0:
            prompt = (PATTERN * longest)[:length]
        elif index % 5 == 1:
            prompt = [*range(20, 30), *prompt][:length]
        params = dice.choice(VARIANTS) | {"seed": dice.getrandbits(32), "max_tokens": dice.randint(1, longest)}
        requests.append(request(f"r{index}", prompt, **params))
    return requests


@pytest.fixture(scope="module")
def solo(checkpoint: Path) -> dict[str, list[int]]:
    """Answers of an engine that runs one request at a time, without drafts and without cached prefixes."""
    running = start(resolved_for(checkpoint, max_num_seqs=1, max_waiting=0, enable_prefix_caching=False))
    running.add(traffic(seed=1))
    return running.finish().token_ids


def looked_up(path: Path, *, drafts: int, **limits: Any) -> ResolvedConfig:
    """A configuration over 64 blocks; drafts 0 is plain decoding."""
    limits = {"num_blocks": NUM_BLOCKS, "max_num_seqs": 24, "max_num_batched_tokens": 48} | limits
    if not drafts:
        return resolved_for(path, **limits)
    config = NgramConfig(num_speculative_tokens=drafts, prompt_lookup_min=1, prompt_lookup_max=3)
    return resolved_for(path, speculative=config, traits=traits_for(config), **limits)


def assert_nothing_left(core: EngineCore, runner: ModelRunner) -> None:
    """No block is held, no row is taken, and nobody remembers a request."""
    scheduler, state = core._scheduler, runner.state
    assert not core.has_work
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
    assert not any(scheduler.kv.pool._num_owners)
    assert not scheduler.requests
    assert not scheduler.waiting
    assert not scheduler.running
    assert core.describe_requests() == {}
    assert state.infos == {}
    assert sorted(state._free) == list(range(state.num_tokens.shape[0]))
    assert state._seed_of == {}, "seeds of requests that are gone"
    if runner.proposer is not None:
        assert runner.proposer._index == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("drafts", "async_scheduling"), [(0, False), (4, False), (4, True)])
def test_two_hundred_requests_equal_their_solo_runs(
    checkpoint: Path, solo: dict[str, list[int]], drafts: int, async_scheduling: bool
) -> None:
    """A fifth is aborted: some before they ran, some in the middle, and the first six that are found preempted."""
    dice = random.Random(drafts)
    running = start(looked_up(checkpoint, drafts=drafts, async_scheduling=async_scheduling))
    running.add(traffic(seed=1))
    doomed = dice.sample(sorted(running.token_ids), 40)
    aborted: set[str] = set()
    statuses: Counter[str] = Counter()
    while running.core.has_work:
        running.step()
        live = running.core.describe_requests()
        targets = [doomed.pop()] if doomed and running.num_engine_steps % 4 == 0 else []
        if statuses["preempted"] < 6:
            targets += [name for name, facts in live.items() if facts["status"] == "preempted"][:1]
        for name in targets:
            if running.core.abort(name) is not None:
                aborted.add(name)
                statuses[live[name]["status"]] += 1
    assert set(statuses) == {"waiting", "running", "preempted"}, "aborts must have met requests in each state"
    assert running.num_preemptions > 0
    assert len(aborted) < NUM_REQUESTS // 2
    for name, token_ids in running.token_ids.items():
        wanted = solo[name][: len(token_ids)] if name in aborted else solo[name]
        assert token_ids == wanted, name
    total = running.core.stats.snapshot().spec.total
    assert (0 < total.num_accepted_tokens < total.num_draft_tokens) == (drafts > 0)
    assert_nothing_left(running.core, running.runner)
    running.core.close()


def test_an_id_that_was_aborted_while_preempted_brings_its_own_seed_the_next_time(checkpoint: Path) -> None:
    """The worker keeps the noise of a preempted request for its return; one that never returns must not leave it to a namesake."""
    running = start(looked_up(checkpoint, drafts=0, num_blocks=24))
    running.add([request(f"r{index}", [index, 3, 4], temperature=1.0, seed=index, max_tokens=40) for index in range(6)])
    while not (preempted := [name for name, facts in running.core.describe_requests().items() if facts["status"] == "preempted"]):
        running.step()
    name = preempted[0]
    running.core.abort(name)
    again = request(name, [3, 4, 5], temperature=1.0, seed=77, max_tokens=20)
    running.add([again])
    running.finish()
    alone = start(resolved_for(checkpoint))
    alone.add([again])
    assert running.token_ids[name] == alone.finish().token_ids[name]
    assert_nothing_left(running.core, running.runner)


# ---------------------------------------------------------------- the embedded model, through the front end that servers use


def sentences(model: Any, count: int) -> list[EngineRequest]:
    """Short prompts and answers of random length, cut from two benchmark prompts, greedy and seeded."""
    dice = random.Random(9)
    texts = [
        model.encode("Tell me how a small town by the sea lives through the seasons of one year."),
        model.encode("one two three one two three"),
    ]
    requests = []
    for index in range(count):
        text = dice.choice(texts)
        first = dice.randrange(len(text) - 8)
        prompt = text[first : first + dice.randint(3, 24)]
        sampling = SamplingParams(
            temperature=dice.choice([0.0, 0.8]), top_p=0.95, seed=index, max_tokens=dice.randint(24, 56), ignore_eos=True
        )
        requests.append(EngineRequest(request_id=f"r{index}", prompt_token_ids=prompt, sampling=sampling))
    return requests


async def ask_all(engine: AsyncEngine, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
    """Stream every request; each fifth client leaves after its first output and gets no entry."""
    found: dict[str, list[int]] = {}

    async def client(index: int, entry: EngineRequest) -> None:
        stream = engine.generate(entry)
        token_ids: list[int] = []
        async for output in stream:
            token_ids += output.token_ids
            if index % 5 == 4 and output.finish_reason is None:
                await stream.aclose()
                return
        found[entry.request_id] = token_ids

    await asyncio.gather(*(client(index, entry) for index, entry in enumerate(requests)))
    return found


@pytest.mark.slow
def test_two_hundred_clients_of_the_embedded_model_get_their_solo_answers() -> None:
    model = embedded("bfloat16" if has_amx() else "float32")  # the compiled stack is exact too, and much faster
    requests = sentences(model, NUM_REQUESTS)
    arm = model.arm(lookup(4), num_blocks=NUM_BLOCKS, prefix_caching=True, max_num_seqs=64)
    core, runner = arm._core, arm._core._runner
    engine = AsyncEngine(core)
    found = asyncio.run(ask_all(engine, requests))
    engine.close(drain_s=60)
    assert len(found) >= NUM_REQUESTS * 3 // 4
    assert core.stats.gauges.num_preemptions > 0
    assert isinstance(runner, ModelRunner)
    assert_nothing_left(core, runner)
    alone = model.arm(max_num_seqs=1)
    kept = [entry for entry in requests if entry.request_id in found][::5]  # one at a time is slow: a fifth of them
    wanted = alone.answer([Question(entry.prompt_token_ids, entry.sampling) for entry in kept], advance=lambda _: None)
    alone.close()
    assert [found[entry.request_id] for entry in kept] == [answer.token_ids for answer in wanted]
