"""commit(): tokens up to the first stop, rejected drafts rolled back."""

from __future__ import annotations

import pytest

from specdec.sampling_params import SamplingParams
from specdec.scheduler.output import RequestOutput
from specdec.scheduler.request import Request

EOS = 2


def decoding(sampling: SamplingParams | None = None, *, num_prompt: int = 9, num_output: int = 1, max_model_len: int = 100) -> Request:
    """A request with `num_output` output tokens of which the newest is not computed."""
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(range(10, 10 + num_prompt)),
        sampling=sampling or SamplingParams(),
        eos_token_ids=frozenset({EOS}),
        max_model_len=max_model_len,
    )
    request.output_token_ids += [50] * num_output
    request.num_computed_tokens = request.num_tokens - 1
    return request


def verify(request: Request, token_ids: tuple[int, ...], *, num_drafts: int = 3) -> object:
    request.schedule(1 + num_drafts, num_drafts=num_drafts, samples=True)
    return request.commit(RequestOutput(token_ids=token_ids, num_drafts=num_drafts), num_rows=1 + num_drafts, num_drafts=num_drafts)


def test_rejected_drafts_are_rolled_back_to_one_uncomputed_token() -> None:
    request = decoding()
    request.num_draft_nodes = 3
    assert (request.num_tokens, request.num_computed_tokens, request.num_tokens_with_spec) == (10, 9, 13)
    request.schedule(4, num_drafts=3, samples=True)
    assert (request.num_tokens, request.num_computed_tokens, request.num_output_placeholders) == (10, 13, 4)
    commit = request.commit(RequestOutput(token_ids=(60, 61), num_drafts=3, source="ngram"), num_rows=4, num_drafts=3)
    assert (request.num_tokens, request.num_computed_tokens, request.num_output_placeholders) == (12, 11, 0)
    assert (commit.token_ids, commit.num_drafts, commit.num_accepted, commit.num_verified) == ((60, 61), 3, 1, 1)
    assert (commit.source, commit.start, commit.finish_reason) == ("ngram", 9, None)


@pytest.mark.parametrize("place", range(4))
def test_an_end_of_sequence_anywhere_in_the_block_cuts_it_there(place: int) -> None:
    request = decoding()
    token_ids = tuple(EOS if i == place else 60 + i for i in range(4))
    commit = verify(request, token_ids)
    assert commit.token_ids == token_ids[: place + 1]
    assert (commit.finish_reason, commit.stop_reason) == ("stop", None)
    assert (commit.num_accepted, commit.num_verified) == (min(place + 1, 3), 3)
    assert request.num_computed_tokens == request.num_tokens - 1


def test_ignored_end_of_sequence_goes_on() -> None:
    assert verify(decoding(SamplingParams(ignore_eos=True)), (EOS, 61)).token_ids == (EOS, 61)


def test_a_named_stop_token_is_reported_and_not_ignored_with_the_end_of_sequence() -> None:
    commit = verify(decoding(SamplingParams(ignore_eos=True, stop_token_ids=(61, EOS))), (60, EOS, 61))
    assert (commit.token_ids, commit.finish_reason, commit.stop_reason) == ((60, EOS), "stop", EOS)


@pytest.mark.parametrize(("min_tokens", "kept"), [(0, 1), (2, 1), (3, 2), (4, 3), (5, 4)])
def test_min_tokens_is_tested_at_each_token_of_a_block(min_tokens: int, kept: int) -> None:
    commit = verify(decoding(SamplingParams(min_tokens=min_tokens)), (EOS, EOS, EOS, EOS))
    assert len(commit.token_ids) == kept  # one output token was there before
    assert commit.finish_reason == "stop"


def test_max_tokens_cuts_a_block() -> None:
    commit = verify(decoding(SamplingParams(max_tokens=3)), (60, 61, 62, 63))
    assert (commit.token_ids, commit.finish_reason, commit.num_accepted, commit.num_verified) == ((60, 61), "length", 2, 3)


def test_max_model_len_cuts_a_block_even_below_min_tokens() -> None:
    commit = verify(decoding(SamplingParams(min_tokens=50), max_model_len=12), (EOS, 61, 62, 63))
    assert (commit.token_ids, commit.finish_reason) == ((EOS, 61), "length")


def test_an_end_of_sequence_at_the_limit_is_a_stop() -> None:
    assert verify(decoding(SamplingParams(max_tokens=2)), (EOS,), num_drafts=0).finish_reason == "stop"


def test_a_prompt_chunk_commits_nothing() -> None:
    request = decoding(num_output=0)
    request.num_computed_tokens = 0
    request.schedule(4, num_drafts=0, samples=False)
    commit = request.commit(RequestOutput(), num_rows=4, num_drafts=0)
    assert (commit.token_ids, commit.finish_reason, commit.start, request.num_computed_tokens) == ((), None, 0, 4)


def test_an_error_of_the_worker_and_a_missing_token_end_the_request_as_error() -> None:
    request = decoding()
    request.schedule(1, num_drafts=0, samples=True)
    commit = request.commit(RequestOutput(error="no finite logit"), num_rows=1, num_drafts=0)
    assert (commit.finish_reason, commit.error) == ("error", "no finite logit")
    commit = verify(decoding(), (), num_drafts=2)
    assert commit.finish_reason == "error"
    assert "no token" in commit.error


def test_two_steps_in_flight_commit_in_order() -> None:
    request = decoding()
    request.schedule(4, num_drafts=3, samples=True)
    request.schedule(3, num_drafts=2, samples=True)
    assert (request.num_computed_tokens, request.num_output_placeholders, request.num_processed_tokens) == (16, 7, 9)
    first = request.commit(RequestOutput(token_ids=(60, 61), num_drafts=3), num_rows=4, num_drafts=3)
    assert (first.start, request.num_tokens, request.num_processed_tokens, request.num_output_placeholders) == (9, 12, 11, 3)
    second = request.commit(RequestOutput(token_ids=(62, 63, 64), num_drafts=2), num_rows=3, num_drafts=2)
    assert (second.start, request.num_tokens, request.num_computed_tokens, request.num_output_placeholders) == (11, 15, 14, 0)


def test_tokens_reads_across_the_end_of_the_prompt() -> None:
    request = decoding(num_prompt=3, num_output=2)
    whole = [10, 11, 12, 50, 50]
    assert all(request.tokens(i, j) == whole[i:j] for i in range(6) for j in range(i, 6))


def test_drafts_past_the_end_are_of_no_use() -> None:
    request = decoding(SamplingParams(max_tokens=4))  # one of four is there
    assert request.max_useful_drafts == 2  # verification emits one token beyond its drafts
    request.schedule(1, num_drafts=0, samples=True)
    assert request.max_useful_drafts == 1
