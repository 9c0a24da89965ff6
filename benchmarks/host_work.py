"""What the host does in a step beside the model: planning, laying out the batch, committing, text, counters.

Owns: driving an engine core with n requests and reading its phases. Must not know: servers or pictures.
Steps do not overlap here, so that a phase's time is its own; HTTP is not in it (benchmarks/bench_overhead.py).
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from time import perf_counter

from specdec.config.engine import ResolvedConfig
from specdec.engine.core import EngineCore
from specdec.engine.types import EngineRequest
from specdec.sampling_params import SamplingParams

NOT_HOST = ("forward", "verify", "propose")  # the model, its sampler, drafting
PROMPT_LEN = 24


def one_step_at_a_time(resolved: ResolvedConfig, *, max_num_seqs: int) -> ResolvedConfig:
    """Return the configuration without overlapping steps and without a cache of prefixes, for so many requests."""
    engine = resolved.engine
    scheduler = replace(engine.scheduler, async_scheduling=False, max_num_seqs=max_num_seqs)
    return replace(resolved, engine=replace(engine, scheduler=scheduler, cache=replace(engine.cache, enable_prefix_caching=False)))


def host_work(core: EngineCore, num_requests: int, *, steps: int) -> dict[str, float]:
    """Return milliseconds of a step in which all requests decode, medians of `steps`: each phase, `step` as a whole, and `host`.

    host is what is left of the step without model, sampler and drafting: what Python costs.
    """
    sampling = SamplingParams(temperature=0.0, max_tokens=core.resolved.max_model_len - PROMPT_LEN, ignore_eos=True)
    names = [f"host-work-{num_requests}-{index}" for index in range(num_requests)]
    for index, name in enumerate(names):
        prompt = tuple((7 * index + 3 * place) % (core.resolved.vocab_size - 1) for place in range(PROMPT_LEN))
        core.add_request(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
    waiting = set(names)
    while waiting:  # prefill
        waiting -= {output.request_id for output in core.step()}
    core.step()  # and a step as those that are measured
    figures = [_one_step(core) for _ in range(steps)]
    for name in names:
        core.abort(name)
    while core.has_work:
        core.step()
    return {name: median(step[name] for step in figures) for name in figures[0]}


def _one_step(core: EngineCore) -> dict[str, float]:
    before = _sums_s(core)
    start_s = perf_counter()
    core.step()
    wall_s = perf_counter() - start_s
    figures = {phase: 1e3 * (after_s - before[phase]) for phase, after_s in _sums_s(core).items()}
    figures["step"] = 1e3 * wall_s
    figures["host"] = figures["step"] - sum(figures[phase] for phase in NOT_HOST)
    return figures


def _sums_s(core: EngineCore) -> dict[str, float]:
    return {phase: histogram.sum for phase, histogram in core.stats.snapshot().step_duration_s.items()}
