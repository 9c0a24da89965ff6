"""Draft lengths: the server's, the batch size's, the request's, and what is left of the request."""

from __future__ import annotations

import pytest

from specdec.config.engine import EngineConfig
from specdec.errors import ConfigError
from specdec.sampling_params import SamplingParams, SpeculationParams
from specdec.scheduler.output import DraftOrder
from specdec.scheduler.policy import BatchSizePolicy, FixedPolicy, NoDrafts, build_policy
from specdec.scheduler.request import Request
from tests.scheduler.driving import Drive
from tests.toy import oracle, toy_resolved


def request_of(sampling: SamplingParams | None = None, *, max_model_len: int = 100) -> Request:
    return Request(request_id="r", prompt_token_ids=(1, 2, 3), sampling=sampling or SamplingParams(), max_model_len=max_model_len)


def speculating(**changes: object) -> SamplingParams:
    return SamplingParams(speculation=SpeculationParams(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampling", "order"),
    [
        (SamplingParams(), DraftOrder(4)),
        (speculating(num_speculative_tokens=2), DraftOrder(2)),
        (speculating(num_speculative_tokens=9), DraftOrder(4)),
        (speculating(num_speculative_tokens=0), DraftOrder(0)),
        (speculating(enabled=False, num_speculative_tokens=2, method="suffix"), DraftOrder(0)),
        (speculating(method="suffix"), DraftOrder(4, "suffix")),
        (SamplingParams(max_tokens=3), DraftOrder(2)),
        (SamplingParams(max_tokens=1), DraftOrder(0)),
    ],
)
def test_a_request_shortens_chooses_or_refuses_its_drafts(sampling: SamplingParams, order: DraftOrder) -> None:
    assert FixedPolicy(4).orders([request_of(sampling)], batch_size=1) == {"r": order}


def test_nothing_is_drafted_past_max_model_len() -> None:
    assert FixedPolicy(4).orders([request_of(max_model_len=6)], batch_size=1) == {"r": DraftOrder(2)}


def test_plain_decoding_orders_nothing() -> None:
    assert NoDrafts().orders([request_of()], batch_size=1) == {"r": DraftOrder(0)}


def test_lengths_follow_the_batch_size_and_gaps_keep_the_range_before() -> None:
    policy = BatchSizePolicy(((1, 2, 5), (4, 4, 9), (6, 7, 0)), max_batch_size=9, max_nodes=7)
    lengths = [policy.orders([request_of()], batch_size=size)["r"].max_nodes for size in range(1, 11)]
    assert lengths == [5, 5, 5, 7, 7, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("schedule", [(), ((2, 4, 3),), ((1, 4, 3), (4, 8, 1)), ((0, 4, 3),), ((4, 1, 3),), ((1, 4, -1),)])
def test_a_schedule_without_sense_is_refused(schedule: tuple[tuple[int, int, int], ...]) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens_per_batch_size"):
        BatchSizePolicy(schedule, max_batch_size=8, max_nodes=4)


def test_the_configuration_chooses_the_policy() -> None:
    from dataclasses import replace

    from specdec.config.speculative import NgramConfig

    assert isinstance(build_policy(toy_resolved()), NoDrafts)
    resolved = toy_resolved(num_drafts=4)
    assert build_policy(resolved).max_nodes == 4  # type: ignore[attr-defined]
    config = NgramConfig(num_speculative_tokens=4, num_speculative_tokens_per_batch_size=((1, 1, 9), (2, 2, 1)))
    policy = build_policy(replace(resolved, engine=EngineConfig(speculative=config)))
    assert isinstance(policy, BatchSizePolicy)
    assert policy.drafts_at[:4] == [0, 4, 1, 1]


def test_the_length_of_a_step_is_verified_in_the_next() -> None:
    resolved = toy_resolved(num_drafts=4)
    drive = Drive(resolved, drafter=oracle(), policy=BatchSizePolicy(((1, 1, 4), (2, 8, 1)), max_batch_size=8, max_nodes=4))
    drive.add("a", [1, 2, 3], SamplingParams(max_tokens=30))
    drive.step()
    drive.add("b", [4, 5, 6], SamplingParams(max_tokens=30))
    assert drive.step()[0].num_draft_nodes == {"a": 4}  # ordered when a ran alone
    assert drive.step()[0].num_draft_nodes == {"a": 1, "b": 1}
    drive.run()
    drive.check_clean()


def test_policies_hear_of_every_commit() -> None:
    heard: list[tuple[set[str], int]] = []

    class Listener(FixedPolicy):
        def observe(self, results, *, num_rows, timings):  # type: ignore[no-untyped-def]
            heard.append((set(results), num_rows))

    drive = Drive(toy_resolved(num_drafts=2), drafter=oracle(), policy=Listener(2))
    drive.add("a", [1, 2, 3], SamplingParams(max_tokens=4))
    drive.run()
    assert heard == [({"a"}, 3), ({"a"}, 3)]  # three prompt rows; anchor and two drafts; not the empty step that tells of the end
