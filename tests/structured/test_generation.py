"""Structured outputs through scheduler, runner and every kind of drafter: valid text, and the very tokens of plain decoding."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from specdec.config.method_configs import EarlyExitConfig, NgramConfig
from specdec.config.methods import traits_for
from specdec.engine.core import EngineCore
from specdec.engine.tokenizer import Tokenizer
from specdec.engine.types import EngineRequest
from specdec.proposers.base import BaseProposer, DraftBatch, StepView
from specdec.proposers.ngram import host_batch
from specdec.sampling_params import SamplingParams, StructuredOutputParams
from specdec.worker.worker import load_runner
from tests.proposers.seam_proposers import KnowsTruth, traits
from tests.structured.schemas import SCHEMAS
from tests.structured.vocabulary import EOS, TOOL, VOCAB_SIZE, resolved_for

MAX_TOKENS = 220
VALIDATOR = jsonschema.Draft202012Validator
CHECKERS = [VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER) for schema in SCHEMAS]
Plain = Mapping[str, Sequence[int]]


class Run:
    """Ids, texts, reasons and statistics of a set of requests."""

    def __init__(self, core: EngineCore, requests: Sequence[EngineRequest]) -> None:
        self.core = core
        self.ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
        self.texts: dict[str, str] = dict.fromkeys(self.ids, "")
        self.reasons: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        for request in requests:
            core.add_request(request)
        for _ in range(4000):
            if not core.has_work:
                break
            for output in core.step():
                self.ids[output.request_id] += output.token_ids
                self.texts[output.request_id] += output.text
                if output.finish_reason is not None:
                    self.reasons[output.request_id] = output.finish_reason
                    if output.error is not None:
                        self.errors[output.request_id] = output.error
        assert self.reasons.keys() == self.ids.keys(), "every request ends"
        core.close()

    @property
    def spec(self) -> Any:
        return self.core.stats.spec


def run(
    path: Path,
    tokenizer: Tokenizer,
    requests: Sequence[EngineRequest],
    *,
    proposer: BaseProposer | None = None,
    speculative: Any = None,
    **settings: Any,
) -> Run:
    found = traits_for(speculative) if speculative is not None else proposer.traits if proposer is not None else None
    resolved = resolved_for(path, traits=found, speculative=speculative, **settings)
    runner = load_runner(resolved, proposer=proposer)
    result = Run(EngineCore(resolved, runner, tokenizer=tokenizer), requests)
    result.core.runner = runner  # type: ignore[attr-defined]
    return result


def asks(request_id: str, *, seed: int = 0, prompt: Sequence[int] = (1, 2, 3), sampling: Any = None, **constraint: Any) -> EngineRequest:
    structured = StructuredOutputParams(**constraint) if constraint else None
    params = {"temperature": 1.0, "seed": seed, "max_tokens": MAX_TOKENS} | (sampling or {})
    return EngineRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=SamplingParams(structured=structured, **params))


def schema_requests(count: int) -> list[EngineRequest]:
    """Requests over the schemas in turn, greedy and seeded by turns."""
    return [
        asks(
            f"s{i}",
            seed=i,
            prompt=(i % 250, 7, i // 250 + 1),
            json_schema=json.dumps(SCHEMAS[i % len(SCHEMAS)]),
            sampling={"temperature": 0.0 if i % 5 == 4 else 1.0},
        )
        for i in range(count)
    ]


def check_documents(result: Run) -> None:
    """Every text is a document of its schema."""
    assert not result.errors
    for request_id, text in result.texts.items():
        index = int(request_id[1:])
        assert result.reasons[request_id] == "stop", (SCHEMAS[index % len(SCHEMAS)], text)
        jsonschema.validate(
            json.loads(text),
            SCHEMAS[index % len(SCHEMAS)],
            jsonschema.Draft202012Validator,
            format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
        )
        assert result.ids[request_id].index(EOS) == len(result.ids[request_id]) - 1


# -- drafters ------------------------------------------------------------------------------------------------------------


def may_draft(step: StepView, index: int) -> int:
    """Drafts that one request may get: none while its prompt is being read."""
    return step.max_nodes[index] if int(step.num_sampled[index]) else 0


class Adversary(KnowsTruth):
    """Chains that begin right and go wrong: any id, the end token too early, special and padding ids."""

    def __init__(self, plain: Plain, max_nodes: int = 5) -> None:
        super().__init__(plain, max_nodes)
        self.rng = random.Random(3)

    def wrong(self) -> int:
        return self.rng.choice([EOS, TOOL, VOCAB_SIZE - 1, self.rng.randrange(VOCAB_SIZE)])

    def propose(self, step: StepView) -> DraftBatch:
        drafts = []
        for index in range(len(step.rows)):
            count = may_draft(step, index)
            kept = self.coming(step, index, self.rng.randrange(count + 1) if count else 0)
            drafts.append([*kept, *(self.wrong() for _ in range(count - len(kept)))])
        return host_batch(drafts, source="seam")


class TreeAdversary(Adversary):
    """A wrong branch and a right one from the anchor, by turns."""

    PARENTS = (-1, -1, 0, 1, 2, 3)

    def __init__(self, plain: Plain) -> None:
        super().__init__(plain, 6)

    def propose(self, step: StepView) -> DraftBatch:
        drafts = []
        for index in range(len(step.rows)):
            truth = self.coming(step, index, may_draft(step, index) // 2)
            drafts.append([token for right in truth for token in (self.wrong(), right)])
        batch = host_batch(drafts, source="seam")
        return replace(batch, parents=torch.tensor(self.PARENTS[: batch.token_ids.shape[1]]).expand_as(batch.token_ids))


class Oracle(KnowsTruth):
    """Always right, past the end token too."""

    def propose(self, step: StepView) -> DraftBatch:
        drafts = []
        for index in range(len(step.rows)):
            count = may_draft(step, index)
            truth = self.coming(step, index, count)
            drafts.append([*truth, *[EOS] * (count - len(truth))])
        return host_batch(drafts, source="seam")


class MaskReader(BaseProposer):
    """Draws the lowest id that the grammar allows behind its own drafts, as a drafter with constant logits would."""

    def __init__(self, max_nodes: int = 3) -> None:
        self.traits = traits(max_nodes)

    def propose(self, step: StepView) -> DraftBatch:
        wanted = {index: may_draft(step, index) for index in range(len(step.rows)) if may_draft(step, index)}
        drafts: dict[int, list[int]] = {index: [] for index in wanted}
        for depth in range(max(wanted.values(), default=0)):
            mask = step.sampling.token_mask(depth, drafts) if step.sampling.token_mask is not None else None
            for index in [i for i, count in wanted.items() if count > depth]:
                drafts[index].append(int(mask[index].int().argmax()) if mask is not None else 5)
        return host_batch([drafts.get(index, []) for index in range(len(step.rows))], source="seam")


DRAFTERS: dict[str, Callable[[Plain], dict[str, Any]]] = {
    "ngram": lambda _: {"speculative": NgramConfig(num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)},
    "adversary": lambda plain: {"proposer": Adversary(plain)},
    "tree": lambda plain: {"proposer": TreeAdversary(plain)},
    "oracle": lambda plain: {"proposer": Oracle(plain, 4)},
}


# -- tests ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(target_path: Path, tokenizer: Tokenizer) -> Run:
    """The thirty schemas without speculation."""
    return run(target_path, tokenizer, schema_requests(30))


def test_plain_decoding_gives_documents(plain: Run) -> None:
    check_documents(plain)
    assert plain.core.runner.sampler.num_grammar_copies == 0, "without drafts there is nothing to copy"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafting_changes_no_token(name: str, plain: Run, target_path: Path, tokenizer: Tokenizer) -> None:
    result = run(target_path, tokenizer, schema_requests(30), **DRAFTERS[name](plain.ids))
    check_documents(result)
    assert result.ids == plain.ids
    assert result.spec.total.num_accepted_tokens > 0
    assert (result.spec.num_invalid_tokens > 0) == (name == "tree"), "chains were cut before, single nodes of a tree are refused"
    if name == "oracle":
        assert result.spec.total.num_accepted_tokens == result.spec.total.num_draft_tokens


@pytest.mark.parametrize("draft_sample_method", ["greedy", "coupled", "probabilistic"])
def test_drafters_with_logits_draw_what_the_grammar_allows(
    draft_sample_method: str, plain: Run, target_path: Path, tokenizer: Tokenizer
) -> None:
    """Sampled drafts keep the target's law, not its sample; certain and coupled ones keep both."""
    config = EarlyExitConfig(exit_layer=1, num_speculative_tokens=3, draft_sample_method=draft_sample_method)
    result = run(target_path, tokenizer, schema_requests(30), speculative=config)
    check_documents(result)
    assert result.spec.num_invalid_tokens == 0
    assert result.spec.total.num_accepted_tokens > 0
    if draft_sample_method != "probabilistic":
        assert result.ids == plain.ids


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "adversary"])
def test_three_hundred_requests(name: str, target_path: Path, tokenizer: Tokenizer) -> None:
    requests = schema_requests(300)
    expected = run(target_path, tokenizer, requests)
    result = run(target_path, tokenizer, requests, **DRAFTERS[name](expected.ids))
    check_documents(result)
    assert result.ids == expected.ids


@pytest.mark.parametrize("name", ["adversary", "tree"])
def test_preempted_requests_go_on_where_they_stood(name: str, plain: Run, target_path: Path, tokenizer: Tokenizer) -> None:
    short = [request for request in schema_requests(30) if len(plain.ids[request.request_id]) <= 60]
    requests = [replace(request, sampling=replace(request.sampling, max_tokens=64)) for request in short[:12]]
    result = run(target_path, tokenizer, requests, num_blocks=12, **DRAFTERS[name](plain.ids))
    assert result.core.stats.gauges.num_preemptions > 0
    check_documents(result)
    assert result.ids == {request_id: plain.ids[request_id] for request_id in result.ids}


@pytest.mark.parametrize("name", ["adversary", "ngram"])
def test_overlapped_steps_give_the_same(name: str, plain: Run, target_path: Path, tokenizer: Tokenizer) -> None:
    result = run(target_path, tokenizer, schema_requests(30)[:10], async_scheduling=True, **DRAFTERS[name](plain.ids))
    assert result.ids == {request_id: plain.ids[request_id] for request_id in result.ids}


CONSTRAINTS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "regex": ({"regex": "(ab|12){2,5}-[x-z]?"}, lambda text: text[-1] in "-xyz" and 5 <= len(text) <= 12),
    "choice": ({"choice": ("yes", "no", 'é🎉"\n')}, lambda text: text in ("yes", "no", 'é🎉"\n')),
    "grammar": (
        {"grammar": 'root ::= "(" root ")" | "ab"'},
        lambda text: text == "(" * (len(text) // 2 - 1) + "ab" + ")" * (len(text) // 2 - 1),
    ),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
}


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_each_kind_of_constraint_holds(kind: str, target_path: Path, tokenizer: Tokenizer) -> None:
    constraint, holds = CONSTRAINTS[kind]
    requests = [asks(f"r{seed}", seed=seed, **constraint) for seed in range(6)]
    expected = run(target_path, tokenizer, requests)
    for drafter in ("adversary", "tree"):
        result = run(target_path, tokenizer, requests, **DRAFTERS[drafter](expected.ids))
        assert result.ids == expected.ids
    ended = [text for request_id, text in expected.texts.items() if expected.reasons[request_id] == "stop"]
    assert len(ended) >= 3
    assert all(holds(text) for text in ended), ended


def test_an_end_inside_a_block_ends_the_request(plain: Run, target_path: Path, tokenizer: Tokenizer) -> None:
    """The oracle drafts the end token and more behind it; what is behind is neither tested nor emitted."""
    requests = [request for request in schema_requests(30) if len(plain.ids[request.request_id]) <= 30]
    assert len(requests) >= 5
    result = run(target_path, tokenizer, requests, proposer=Oracle(plain.ids, 30))
    check_documents(result)
    assert result.ids == {request.request_id: plain.ids[request.request_id] for request in requests}
    total = result.spec.total
    assert total.num_draft_tokens == total.num_accepted_tokens == sum(len(ids) - 1 for ids in result.ids.values())
    assert result.spec.num_invalid_tokens == 0


def test_a_length_limit_ends_as_length(target_path: Path, tokenizer: Tokenizer) -> None:
    requests = [asks("r0", json_object=True, sampling={"max_tokens": 1}), asks("r1", regex="[ab]{50}", sampling={"max_tokens": 9})]
    result = run(
        target_path, tokenizer, requests, speculative=NgramConfig(num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=2)
    )
    assert result.reasons == {"r0": "length", "r1": "length"}
    assert result.texts["r0"][0] == "{"
    assert set(result.texts["r1"]) <= set("ab")
    assert len(result.ids["r1"]) == 9


def test_min_tokens_holds_while_the_grammar_has_more_to_say(target_path: Path, tokenizer: Tokenizer) -> None:
    wish = {"min_tokens": 12}
    requests = [asks("r0", regex="[ab]*", sampling=wish), asks("r1", choice=("yes", "no"), sampling=wish)]
    expected = run(target_path, tokenizer, requests)
    assert len(expected.ids["r0"]) > 12
    assert expected.texts["r1"] in ("yes", "no"), "a complete text may only end"
    assert set(expected.reasons.values()) == {"stop"}
    assert run(target_path, tokenizer, requests, proposer=Adversary(expected.ids)).ids == expected.ids


def test_other_processors_hold_within_the_grammar(target_path: Path, tokenizer: Tokenizer) -> None:
    (no,) = tokenizer.encode("n")
    bias = {"logit_bias": {no: 100.0, TOOL: 100.0}, "repetition_penalty": 1.2, "presence_penalty": 0.5, "logprobs": 3}
    requests = [asks(f"r{seed}", seed=seed, choice=("yes", "no"), sampling=bias) for seed in range(3)]
    result = run(target_path, tokenizer, requests)
    assert set(result.texts.values()) == {"no"}
    assert run(target_path, tokenizer, requests, proposer=Adversary(result.ids)).ids == result.ids


def test_a_request_that_nothing_can_continue_ends_as_an_error_and_others_go_on(target_path: Path, tokenizer: Tokenizer) -> None:
    requests = [asks("bad", choice=("yes",), sampling={"allowed_token_ids": (5,)}), asks("good", choice=("no",))]
    result = run(target_path, tokenizer, requests)
    assert result.reasons == {"bad": "error", "good": "stop"}
    assert "every token is forbidden" in result.errors["bad"]


def test_requests_without_a_grammar_are_not_touched(plain: Run, target_path: Path, tokenizer: Tokenizer) -> None:
    """Beside structured requests they draw what they draw alone; alone, no draft is copied for a grammar and no mask is made."""
    free = [asks(f"f{seed}", seed=seed, sampling={"max_tokens": 20}) for seed in range(3)]
    speculative = NgramConfig(num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=2)
    alone = run(target_path, tokenizer, free, speculative=speculative)
    assert alone.spec.total.num_draft_tokens > 0
    assert alone.core.runner.sampler.num_grammar_copies == 0  # type: ignore[attr-defined]
    assert alone.core.grammars.num_compiled == 0
    mixed = run(target_path, tokenizer, [*free, *schema_requests(3)], proposer=Adversary(alone.ids | plain.ids))
    assert mixed.ids == alone.ids | {f"s{i}": plain.ids[f"s{i}"] for i in range(3)}
    assert 0 < mixed.core.runner.sampler.num_grammar_copies < mixed.core.stats.num_steps  # type: ignore[attr-defined]


def test_drafters_that_read_the_mask_waste_no_draft(plain: Run, target_path: Path, tokenizer: Tokenizer) -> None:
    requests = [asks(f"r{seed}", seed=seed, choice=("ab12ab12ab", "ab12ab")) for seed in range(3)]
    expected = run(target_path, tokenizer, requests)
    result = run(target_path, tokenizer, requests, proposer=MaskReader())
    assert result.ids == expected.ids
    assert result.spec.num_invalid_tokens == 0
    assert result.spec.total.num_accepted_tokens > 0
    blind = run(target_path, tokenizer, requests, proposer=Adversary(dict.fromkeys(expected.ids, ())))
    assert result.spec.num_decode_steps < blind.spec.num_decode_steps
