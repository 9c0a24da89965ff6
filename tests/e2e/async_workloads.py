"""Random workloads for the comparison of overlapped with plain steps: who asks for what, who leaves when, and how small the cache is.

Everything follows from a seed. A client leaves after a number of its own tokens, not after a number of steps, so that the same
thing happens to a request whatever the order of steps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from specdec.config.engine import ResolvedConfig
from specdec.engine.types import EngineRequest
from specdec.sampling_params import SamplingParams, SpeculationParams, StructuredOutputParams
from tests.engine.tokenizers_for_tests import TOY_EOS
from tests.proposers.tiny import BLOCK_SIZE, Run, start

MAX_REQUESTS = 16
LONGEST_PROMPT, LONGEST_OUTPUT = 30, 40
LEAST_BLOCKS = -(-(LONGEST_PROMPT + 1 + LONGEST_OUTPUT) // BLOCK_SIZE) + 1


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with the step before which each arrives, and the output length at which some are aborted."""

    arrivals: tuple[tuple[int, EngineRequest], ...]
    aborts: dict[str, int]
    settings: dict[str, Any]


@dataclass(slots=True)
class Outcome:
    """What clients saw: ids, texts and reasons by request. `run` holds the counters."""

    run: Run
    texts: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, tuple[str, object]] = field(default_factory=dict)

    @property
    def num_cut_drafts(self) -> int:
        """Good drafts behind a stop."""
        total = self.run.core.stats.spec.total
        return total.num_verified_tokens - total.num_accepted_tokens


def workload(seed: int, *, structured: bool = False) -> Workload:
    """The workload of a seed: 1 to 16 requests over a cache that may be too small for them."""
    rng = random.Random(seed)
    count = rng.randint(1, MAX_REQUESTS)
    stems = [_prompt(rng) for _ in range(3)]
    requests = [_request(rng, f"r{index}", stems, structured=structured) for index in range(count)]
    leaving = rng.sample(requests, rng.randint(0, count // 3))
    return Workload(
        arrivals=tuple((rng.choice((0, 0, rng.randint(0, 12))), request) for request in requests),
        aborts={request.request_id: rng.randint(0, 12) for request in leaving},
        settings={
            "num_blocks": rng.choice((LEAST_BLOCKS, LEAST_BLOCKS + 8, 200)),
            "max_num_seqs": rng.choice((2, 5, MAX_REQUESTS)),
            "max_num_batched_tokens": rng.choice((24, 64, 256)),
            "enable_prefix_caching": rng.random() < 0.7,
        },
    )


def serve(resolved: ResolvedConfig, work: Workload, run: Run | None = None) -> Outcome:
    """Run a workload to its end, on an engine of its own where none is given."""
    run = run or start(resolved)
    outcome = Outcome(run)
    waiting = sorted(work.arrivals, key=lambda arrival: arrival[0])
    leaving = dict(work.aborts)
    while waiting or run.core.has_work:
        while waiting and (waiting[0][0] <= run.num_engine_steps or not run.core.has_work):
            request = waiting.pop(0)[1]
            run.add([request])
            outcome.texts[request.request_id] = ""
        _step(outcome)
        for request_id in [one for one, length in leaving.items() if len(run.token_ids.get(one, ())) >= length and one in run.token_ids]:
            del leaving[request_id]
            last = run.core.abort(request_id)
            if last is not None:
                outcome.texts[request_id] += last.text
                outcome.reasons[request_id] = ("abort", None)
    run.core.close()
    return outcome


def _step(outcome: Outcome) -> None:
    run = outcome.run
    run.num_engine_steps += 1
    assert run.num_engine_steps < 5000, f"the engine makes no progress: {run.core.describe_requests()}"
    for output in run.core.step():
        assert output.error is None, output.error
        run.token_ids[output.request_id].extend(output.token_ids)
        outcome.texts[output.request_id] += output.text
        if output.finish_reason is not None:
            outcome.reasons[output.request_id] = (output.finish_reason, output.stop_reason)


def _prompt(rng: random.Random) -> list[int]:
    """Ids that repeat, so that lookups find something."""
    motif = [rng.randrange(TOY_EOS) for _ in range(rng.randint(2, 6))]
    tail = [rng.randrange(TOY_EOS) for _ in range(rng.randint(0, 4))]
    return (motif * rng.randint(1, 4) + tail)[:LONGEST_PROMPT]


def _request(rng: random.Random, request_id: str, stems: list[list[int]], *, structured: bool) -> EngineRequest:
    prompt = [*rng.choice(stems), rng.randrange(TOY_EOS)] if rng.random() < 0.5 else _prompt(rng)
    max_tokens = rng.randint(1, LONGEST_OUTPUT)
    sampling: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.0, 0.8)),
        "seed": rng.getrandbits(32),
        "max_tokens": max_tokens,
        "min_tokens": rng.choice((0, 0, 0, min(3, max_tokens))),
        "stop_token_ids": tuple(rng.sample(range(TOY_EOS), rng.choice((0, 4, 12)))),
        "stop": rng.choice(((), (), (chr(rng.randrange(0x21, 0x7B)),))),
        "ignore_eos": rng.random() < 0.5,
        "top_k": rng.choice((0, 0, 20)),
        "top_p": rng.choice((1.0, 1.0, 0.9)),
        "repetition_penalty": rng.choice((1.0, 1.0, 1.0, 1.3)),
        "logprobs": rng.choice((None, None, None, 2)),
        "speculation": rng.choice(
            (SpeculationParams(),) * 4 + (SpeculationParams(enabled=False), SpeculationParams(num_speculative_tokens=2))
        ),
    }
    if structured and rng.random() < 0.6:
        sampling |= {"structured": StructuredOutputParams(regex="(ab|cd[0-9]|x{2,6}y){1,9}"), "stop_token_ids": (), "ignore_eos": False}
    return EngineRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=SamplingParams(**sampling), priority=0)
