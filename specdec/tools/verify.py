"""specdec verify: is a model's output with speculation the same, in tokens where it should be, and in law everywhere?

Owns: what is asked of both engines, in which order, and the verdict. Must not know: how results are shown (verify_report.py).
Read next: arm.py, identity.py, scoring.py, pit.py, tv.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import torch

from specdec.errors import ConfigError
from specdec.sampling_params import SamplingParams
from specdec.tools import identity, tv
from specdec.tools.arm import Advance, Answer, Arm, Question
from specdec.tools.identity import Identity
from specdec.tools.pit import Transformed, pit_checks, transform
from specdec.tools.scoring import Scorer
from specdec.tools.significance import Check, holm
from specdec.tools.tv import Variation

Load = Callable[[], Arm]
TAIL = 8  # tokens a short text goes on for after those that are compared: near its end nothing is drafted
CONTROL_SHARE = 4  # the plain control is tested on a quarter of the tokens
OUTSIDE_SHARE = {"float32": 0.001, "float16": 0.01, "bfloat16": 0.02}  # tokens that rounding may move over the edge of a cut


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Sizes and the false-alarm rate. tokens: of the law test, for each law. length: of one answer. tv_*: see tv.py.

    alpha: probability that a correct engine is reported as broken by the tests of law, all of them together.

    Raises:
        ConfigError: a value is outside its range.
    """

    temperature: float = 0.8
    tokens: int = 8000
    length: int = 64
    tv_samples: int = 100
    tv_prompts: int = 4
    tv_length: int = 4
    alpha: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, 0.01 <= self.temperature <= 10, "be in 0.01..10: greedy decoding is checked besides")
        _require("tokens", self.tokens, self.tokens >= 400, "be at least 400: fewer say nothing about a law")
        _require("length", self.length, 8 <= self.length <= 4096, "be in 8..4096 tokens")
        _require("false-alarm", self.alpha, 0 < self.alpha <= 0.05, "be in (0, 0.05]")
        _require("samples", self.tv_samples, self.tv_samples >= 10, "be at least 10")
        _require("seed", self.seed, 0 <= self.seed < 2**40, "be in 0..2^40")

    @property
    def laws(self) -> dict[str, SamplingParams]:
        """The laws under test: the temperature alone, and all cuts and penalties together."""
        plain = SamplingParams(temperature=self.temperature, max_tokens=self.length, ignore_eos=True)
        processed = replace(plain, top_k=100, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5)
        return {f"temperature {self.temperature:g}": plain, "with cuts and penalties": processed}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFacts:
    """What a verification rule promises. exact_match: the same tokens for the same seed. by_slot: see pit_checks."""

    name: str
    exact_match: bool
    by_slot: bool
    lossy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LawResult:
    """The tests of one law on one engine. outside: tokens that the law gives no probability."""

    law: str
    engine: str  # "plain" or "speculative"
    num_tokens: int
    outside: int
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """All results. findings: what is wrong, in words; empty when nothing is. control_findings: the same for plain decoding."""

    rule: RuleFacts
    dtype: str
    alpha: float
    identities: tuple[Identity, ...]
    laws: tuple[LawResult, ...]
    variation: Variation
    accepted: int
    drafted: int
    findings: tuple[str, ...]
    control_findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True when no difference was found and the control passed as well."""
        return not self.findings and not self.control_findings


@dataclass(frozen=True, slots=True)
class _Answers:
    """What one engine answered."""

    greedy: list[Answer]
    seeded: list[Answer]
    laws: dict[str, list[Answer]]
    short: list[list[list[Answer]]]  # [samples][prompts][texts]


def verify(
    load_plain: Load,
    load_drafted: Load,
    *,
    prompts: Sequence[tuple[int, ...]],
    rule: RuleFacts,
    options: VerifyOptions,
    advance: Advance = lambda _: None,
) -> VerifyReport:
    """Run both engines, one after the other so that one is in memory at a time, and compare.

    Raises:
        RequestRejected: a prompt does not fit the model.
    """
    _require("prompts", len(prompts), len(prompts) > 0, "hold at least one prompt")
    drafted_arm = load_drafted()
    drafted = _ask(drafted_arm, prompts, options, num_tokens=options.tokens, seeds=(options.seed + 2**41,), advance=advance)
    accepted, num_drafted = drafted_arm.acceptance
    drafted_arm.close()
    del drafted_arm  # its weights must be gone before the plain engine's are read
    plain_arm = load_plain()
    seeds = (options.seed + 2**42, options.seed + 2**43)
    plain = _ask(plain_arm, prompts, options, num_tokens=options.tokens // CONTROL_SHARE, seeds=seeds, advance=advance)
    plain_arm.close()
    longest = max(map(len, prompts)) + options.length
    scorer, dtype = Scorer(plain_arm.model, max_len=longest), plain_arm.resolved.dtype
    identities = [identity.compare("greedy", plain.greedy, drafted.greedy, scorer=scorer, dtype=dtype)]
    if rule.exact_match:
        identities.append(identity.compare("seeded", plain.seeded, drafted.seeded, scorer=scorer, dtype=dtype))
    laws = _law_results(scorer, {"plain": plain, "speculative": drafted}, rule, options=options, advance=advance)
    plain_texts, again, drafted_texts = (_texts(sample, options.tv_length) for sample in (*plain.short, *drafted.short))
    variation = tv.compare(plain_texts, again, drafted_texts, seed=options.seed)
    findings = [_identity_finding(x) for x in identities if not x.holds]
    findings += _law_findings([x for x in laws if x.engine == "speculative"], options.alpha, dtype, extra=[variation.check])
    return VerifyReport(
        rule=rule,
        dtype=dtype,
        alpha=options.alpha,
        identities=tuple(identities),
        laws=tuple(laws),
        variation=variation,
        accepted=accepted,
        drafted=num_drafted,
        findings=tuple(findings),
        control_findings=tuple(_law_findings([x for x in laws if x.engine == "plain"], options.alpha, dtype)),
    )


def num_steps(num_prompts: int, options: VerifyOptions) -> int:
    """Tokens to generate and to score in all, for a progress bar."""
    laws = len(options.laws)
    tested = sum(_num_texts(tokens, options) * options.length * laws for tokens in (options.tokens, options.tokens // CONTROL_SHARE))
    short = 3 * _tv_prompts(num_prompts, options) * options.tv_samples * (1 + options.tv_length + TAIL)
    return 2 * tested + 4 * num_prompts * options.length + short


def _ask(
    arm: Arm, prompts: Sequence[tuple[int, ...]], options: VerifyOptions, *, num_tokens: int, seeds: Sequence[int], advance: Advance
) -> _Answers:
    """Ask one engine everything; each of `seeds` starts one sample of short texts, the first one the texts of the law tests too."""
    greedy = SamplingParams(temperature=0.0, max_tokens=options.length, seed=0)
    *_, seeded = options.laws.values()  # all cuts and penalties
    asked = [Question(prompt, greedy) for prompt in prompts]
    drawn = [Question(prompt, replace(seeded, seed=options.seed + 1000 + index)) for index, prompt in enumerate(prompts)]
    laws = {}
    for number, (name, sampling) in enumerate(options.laws.items()):
        texts = _num_texts(num_tokens, options)
        first = seeds[0] + (number + 1) * 2**44
        questions = [Question(p, replace(sampling, seed=first + i)) for i, p in enumerate(islice(cycle(prompts), texts))]
        laws[name] = arm.answer(questions, advance=advance)
    short = [_ask_short(arm, prompts[: _tv_prompts(len(prompts), options)], options, seed=seed, advance=advance) for seed in seeds]
    return _Answers(arm.answer(asked, advance=advance), arm.answer(drawn, advance=advance), laws, short)


def _ask_short(arm: Arm, prompts: Sequence[tuple[int, ...]], options: VerifyOptions, *, seed: int, advance: Advance) -> list[list[Answer]]:
    sampling = replace(next(iter(options.laws.values())), max_tokens=1 + options.tv_length + TAIL)
    count = options.tv_samples
    questions = [Question(prompt, replace(sampling, seed=seed + p * count + i)) for p, prompt in enumerate(prompts) for i in range(count)]
    answers = arm.answer(questions, advance=advance)
    return [answers[start : start + count] for start in range(0, len(answers), count)]


def _num_texts(num_tokens: int, options: VerifyOptions) -> int:
    return -(-num_tokens // options.length)


def _tv_prompts(num_prompts: int, options: VerifyOptions) -> int:
    return min(options.tv_prompts, num_prompts)


def _texts(sample: list[list[Answer]], length: int) -> list[list[tuple[int, ...]]]:
    """The tokens to compare; the first one is left out, since it comes with the prompt and never from a draft."""
    return [[tuple(answer.token_ids[1 : 1 + length]) for answer in answers] for answers in sample]


def _law_results(
    scorer: Scorer, answers: dict[str, _Answers], rule: RuleFacts, *, options: VerifyOptions, advance: Advance
) -> list[LawResult]:
    generator = torch.Generator().manual_seed(options.seed)
    results = []
    for law in options.laws:
        for engine, answered in answers.items():
            texts = []
            for answer in answered.laws[law]:
                texts.append(_transform(scorer, answer, generator))
                advance(len(answer.token_ids))
            checks = pit_checks(texts, by_slot=rule.by_slot and engine == "speculative")
            outside = sum(text.outside for text in texts)
            num_tokens = sum(len(text.u) for text in texts)
            results.append(LawResult(law=law, engine=engine, num_tokens=num_tokens, outside=outside, checks=tuple(checks)))
    return results


def _transform(scorer: Scorer, answer: Answer, generator: torch.Generator) -> Transformed:
    laws = scorer.laws(answer.prompt, answer.token_ids, answer.sampling)
    return transform(laws, answer.token_ids, answer.slots, generator=generator)


def _law_findings(results: Sequence[LawResult], alpha: float, dtype: str, *, extra: Sequence[Check] = ()) -> list[str]:
    """What Holm's rule rejects among all checks together, and tokens that the law excludes."""
    named = [(f"{result.law}: {check.name}", check) for result in results for check in result.checks]
    named += [(check.name, check) for check in extra]
    rejected = holm([check.p_value for _, check in named], alpha)
    findings = [f"{name} has p = {check.p_value:.2g}" for (name, check), is_rejected in zip(named, rejected, strict=True) if is_rejected]
    for result in results:
        if result.outside > 2 + OUTSIDE_SHARE[dtype] * result.num_tokens:
            findings.append(f"{result.law}: {result.outside} of {result.num_tokens} tokens have probability 0")
    return findings


def _identity_finding(found: Identity) -> str:
    worst = max((x for x in found.differences if not x.explained), key=lambda difference: difference.gap)
    different = sum(not difference.explained for difference in found.differences)
    return f"{found.kind} answers: {different} of {found.num} differ, prompt {worst.prompt_index} at token {worst.position}: {worst.reason}"


def _require(name: str, value: object, ok: bool, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}, but it must {rule}")
