"""Steps that are handed to a device before the results of the step before are known: the same tokens, and nobody waits.

A GPU is not needed: tests/worker/late.py makes results late on the CPU, in the order in which a GPU would bring them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import NgramConfig, NgramGpuConfig
from specdec.config.methods import traits_for
from specdec.sampling_params import StructuredOutputParams
from tests.e2e.async_workloads import serve, workload
from tests.proposers.tiny import mixed_requests, request, resolved_for, run, write_checkpoint
from tests.worker.late import Watch, start_late

LOOKUP = {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
METHODS = {"off": None, "ngram_gpu": NgramGpuConfig(**LOOKUP), "ngram": NgramConfig(**LOOKUP)}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), seed=1)


def build(target: Path, method: str, **settings: object) -> ResolvedConfig:
    config = METHODS[method]
    return resolved_for(target, traits=traits_for(config) if config else None, speculative=config, **settings)


@pytest.mark.parametrize("method", METHODS)
def test_late_results_give_the_same_tokens(target: Path, method: str) -> None:
    """Requests with penalties and log-probabilities are among them, so some steps wait and others do not."""
    steps: Counter[str] = Counter()
    events: Counter[str] = Counter()
    for seed in range(1000, 1012):
        work = workload(seed)
        plain = serve(build(target, method, **work.settings), work)
        late, kinds = start_late(build(target, method, **work.settings, async_scheduling=True))
        ours = serve(late.core.resolved, work, late)
        for _, entry in work.arrivals:
            one = entry.request_id
            if one not in work.aborts:
                assert ours.run.token_ids[one] == plain.run.token_ids[one], f"seed {seed}, {one}"
                assert (ours.texts[one], ours.reasons[one]) == (plain.texts[one], plain.reasons[one])
        steps += kinds
        total = late.core.stats.spec.total
        events += Counter(preempted=late.num_preemptions, accepted=total.num_accepted_tokens)
        assert late.core.stats.spec.num_invalid_tokens == 0, "a draft that nobody made is not one that a grammar refused"
    assert steps["waited"] > 50
    assert events["preempted"] > 0
    assert (steps["queued"] > 50) == (method != "ngram"), "a drafter on the host needs the ids of each step"
    assert (events["accepted"] > 20) == (method != "off")


def test_a_grammar_gets_the_ids_that_it_needs(target: Path) -> None:
    """A structured request comes while others are on their way, and goes before them."""
    others = mixed_requests(4)
    wish = StructuredOutputParams(regex="(ab|cd[0-9]|x{2,6}y){3,9}")
    structured = request("s0", [7, 8, 9], max_tokens=12, structured=wish, ignore_eos=False)
    expected = run(build(target, "ngram_gpu"), [*others, structured])
    late, kinds = start_late(build(target, "ngram_gpu", async_scheduling=True))
    late.add(others)
    for _ in range(4):
        late.step()
    assert kinds == {"queued": 4}
    late.add([structured])
    late.finish()
    assert late.token_ids == expected.token_ids
    assert kinds["waited"] >= 3
    assert kinds["queued"] > 4


@pytest.mark.parametrize("method", ["off", "ngram_gpu"])
def test_a_queued_step_reads_nothing_on_the_host(target: Path, method: str) -> None:
    late, kinds = start_late(build(target, method, async_scheduling=True, num_blocks=23))
    late.add(mixed_requests(6))
    with Watch() as watch:
        late.finish()
    assert not watch.seen
    assert kinds["queued"] > 20
    assert kinds["waited"] == 0
    assert late.num_preemptions > 0


@pytest.mark.parametrize(
    ("method", "sampling", "place"),
    [
        ("ngram", {}, "proposers/ngram.py:propose: tolist"),
        ("off", {"logprobs": 1}, "worker/logprobs.py:token_logprobs: tolist"),
        ("off", {"structured": StructuredOutputParams(regex="a{20}"), "ignore_eos": False}, "worker/sampler.py:_constrain: tolist"),
    ],
)
def test_the_watch_sees_who_reads(target: Path, method: str, sampling: dict[str, object], place: str) -> None:
    late, _ = start_late(build(target, method, async_scheduling=True))
    late.add([request("r0", [1, 2, 3, 1, 2], max_tokens=8, **sampling)])
    with Watch() as watch:
        late.finish()
    assert watch.seen[place] > 0, watch.seen


def test_the_watch_knows_every_way_to_read() -> None:
    """Each statement waits on a GPU; none of them is made by the package, so they are compiled as if it were."""
    from tests.worker import late as module

    names = {"x": torch.arange(3), "torch": torch}
    for statement in (
        "x.tolist()",
        "x[0].item()",
        "bool(x[1])",
        "int(x[1])",
        "[1, 2][x[1]]",
        "x.nonzero()",
        "x[x > 1]",
        "x.cpu()",
        "torch.tensor([1])",
    ):
        with Watch() as watch:
            eval(compile(statement, str(module.PACKAGE / "worker/somewhere.py"), "eval"), names)
        assert sum(watch.seen.values()) == 1, statement


def test_preempted_requests_are_drawn_again(target: Path) -> None:
    """A step that is on its way when its request loses its blocks is dropped; the noise is named, so the tokens come back."""
    requests = mixed_requests(8, max_tokens=30)
    expected = run(build(target, "ngram_gpu"), requests)
    late, kinds = start_late(build(target, "ngram_gpu", async_scheduling=True, num_blocks=20))
    late.add([replace(one) for one in requests])
    late.finish()
    assert late.num_preemptions > 3
    assert late.token_ids == expected.token_ids
    assert kinds["waited"] == 0
