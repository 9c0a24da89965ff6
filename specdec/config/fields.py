"""SpeculativeBase: the keys that every draft method shares, and the checks that only look at those.

Owns: common keys of --speculative-config and the rules between them. Must not know: any single method (method_configs.py).
Read next: speculative.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from specdec.errors import ConfigError

Count: TypeAlias = Annotated[int, Field(strict=True, ge=1)]
Natural: TypeAlias = Annotated[int, Field(strict=True, ge=0)]
Whole: TypeAlias = Annotated[int, Field(strict=True)]
Flag: TypeAlias = Annotated[bool, Field(strict=True)]
Text: TypeAlias = Annotated[str, Field(strict=True, min_length=1)]
Probability: TypeAlias = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
NonNegative: TypeAlias = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Finite: TypeAlias = Annotated[float, Field(strict=True, allow_inf_nan=False)]
RejectionRule: TypeAlias = Literal["standard", "synthetic", "block", "fly", "typical"]
DraftSampling: TypeAlias = Literal["greedy", "probabilistic", "coupled"]

LOSSY_RULES = frozenset({"synthetic", "fly", "typical"})
_RULE_FIELDS = {
    "fly": ("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"),
    "synthetic": ("synthetic_acceptance_rates", "synthetic_acceptance_length"),
    "typical": ("typical_acceptance_sampler_posterior_threshold", "typical_acceptance_sampler_posterior_alpha"),
}


class SpeculativeBase(BaseModel):
    """Keys common to all methods. num_speculative_tokens: drafts per request and step at most; None: the checkpoint's own depth.

    num_speculative_tokens_per_batch_size: (first, last, drafts) by number of requests in a step, both ends included.
    synthetic_acceptance_rates: probability that the first i drafts are all accepted, i = 1..num_speculative_tokens.
    enforce_eager: true keeps drafting out of CUDA graphs; else it follows the target, whose --enforce-eager keeps both out.
    policy: `adaptive` lets the engine choose the length by load and acceptance. Entropies are in nats.

    Raises:
        ConfigError: keys contradict each other. pydantic.ValidationError: a value has the wrong type or range, or a key is unknown
            (parse_speculative turns this into a ConfigError too).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    method: str
    model: Text | None = None
    num_speculative_tokens: Count | None = None
    policy: Literal["fixed", "adaptive"] = "fixed"
    rejection_sample_method: RejectionRule = "standard"
    draft_sample_method: DraftSampling = "greedy"
    num_speculative_tokens_per_batch_size: tuple[tuple[Whole, Whole, Whole], ...] | None = None
    synthetic_acceptance_rates: tuple[Finite, ...] | None = None
    synthetic_acceptance_length: Finite | None = None
    fly_window_size: Count | None = None
    fly_entropy_threshold: NonNegative = 0.3
    fly_entropy_top_k: Count = 3
    typical_acceptance_sampler_posterior_threshold: Probability = 0.09
    typical_acceptance_sampler_posterior_alpha: Probability = 0.3
    enforce_eager: Flag | None = None

    _is_inferred: bool = PrivateAttr(default=False)

    @property
    def is_method_inferred(self) -> bool:
        """True when the user named no method: the checkpoint may then choose another one."""
        return self._is_inferred

    @property
    def is_lossy(self) -> bool:
        """True when the rule of verification does not keep the target's law."""
        return self.rejection_sample_method in LOSSY_RULES

    @property
    def effective_fly_window_size(self) -> int:
        """fly_window_size, or its default min(6, num_speculative_tokens - 1)."""
        return self.fly_window_size or min(6, (self.num_speculative_tokens or 2) - 1)

    @model_validator(mode="after")
    def _check_common(self) -> SpeculativeBase:
        _check_rule_fields(self)
        _check_synthetic(self)
        _check_fly(self)
        if self.num_speculative_tokens_per_batch_size is not None:
            check_schedule(self.num_speculative_tokens_per_batch_size)
            if self.policy == "adaptive":
                refuse(
                    "num_speculative_tokens_per_batch_size",
                    "is a fixed table, which policy `adaptive` overrules",
                    "drop one of the two",
                )
        return self


def refuse(field: str, rule: str, hint: str | None = None) -> None:
    """Raise the ConfigError of one key: `speculative_config.<field> <rule>`."""
    raise ConfigError(f"speculative_config.{field} {rule}", hint=hint)


def check_schedule(entries: Sequence[tuple[int, int, int]]) -> None:
    """Check a table of (first, last, drafts) ranges over the number of requests in a step.

    Raises:
        ConfigError: empty, bounds below 1 or swapped, negative drafts, ranges that overlap, or none that starts at 1.
    """
    name = "num_speculative_tokens_per_batch_size"
    if not entries:
        refuse(name, "is empty, but it needs at least one [first, last, drafts] entry", "drop it to use one length for all")
    for first, last, drafts in entries:
        if first < 1 or last < 1:
            refuse(name, f"has the range {first}..{last}, but batch sizes start at 1")
        if first > last:
            refuse(name, f"has the range {first}..{last}, but the first batch size must not exceed the last", "swap them")
        if drafts < 0:
            refuse(name, f"asks for {drafts} drafts at {first}..{last}, but it must be 0 (no drafting) or more")
    ordered = sorted(entries)
    for before, after in pairwise(ordered):
        if after[0] <= before[1]:
            refuse(name, f"has overlapping ranges {before[0]}..{before[1]} and {after[0]}..{after[1]}", "give each batch size to one range")
    if ordered[0][0] != 1:
        refuse(name, f"starts at batch size {ordered[0][0]}, but the first range must start at 1", "add an entry for the small batches")


def idle_fields(rule: str) -> frozenset[str]:
    """Return the keys that belong to other rules than this one."""
    return frozenset(name for owner, names in _RULE_FIELDS.items() if owner != rule for name in names)


def _check_rule_fields(config: SpeculativeBase) -> None:
    """A key of one rule may not be set beside another rule, where it would do nothing."""
    chosen = config.rejection_sample_method
    for name in sorted(idle_fields(chosen) & config.model_fields_set):
        if getattr(config, name) is not None:
            rule = next(rule for rule, names in _RULE_FIELDS.items() if name in names)
            hint = f'set "rejection_sample_method": "{rule}", or drop {name}'
            refuse(name, f"belongs to rejection_sample_method `{rule}`, but that is `{chosen}`", hint)


def _check_synthetic(config: SpeculativeBase) -> None:
    if config.rejection_sample_method != "synthetic":
        return
    rates, length, drafts = config.synthetic_acceptance_rates, config.synthetic_acceptance_length, config.num_speculative_tokens
    if (rates is None) == (length is None):
        state = "neither is set" if rates is None else "both are set"
        rule = f"`synthetic` needs exactly one of synthetic_acceptance_rates and synthetic_acceptance_length, and {state}"
        refuse("rejection_sample_method", rule, "give the rates per position, or one mean length")
    if rates is not None:
        name = "synthetic_acceptance_rates"
        if drafts is not None and len(rates) != drafts:
            refuse(name, f"has {len(rates)} entries, but num_speculative_tokens is {drafts}", "give one rate per draft position")
        if not all(0 <= rate <= 1 for rate in rates):
            refuse(name, f"is {list(rates)}, but every entry must be in [0, 1]")
        if any(later > earlier for earlier, later in pairwise(rates)):
            hint = "entry i is the probability that the first i drafts are all accepted"
            refuse(name, f"is {list(rates)}, but it must not increase", hint)
    if length is not None and (length < 1 or (drafts is not None and length > drafts + 1)):
        limit = drafts + 1 if drafts is not None else "num_speculative_tokens + 1"
        refuse("synthetic_acceptance_length", f"is {length}, but it must be in [1, {limit}]", "it counts the target's own token too")


def _check_fly(config: SpeculativeBase) -> None:
    if config.rejection_sample_method != "fly" or config.num_speculative_tokens is None:
        return
    drafts, window = config.num_speculative_tokens, config.fly_window_size
    if drafts < 2:
        refuse("num_speculative_tokens", f"is {drafts}, but rejection_sample_method `fly` needs at least 2", "raise it, or use `standard`")
    if window is not None and window >= drafts:
        hint = f"use at most {drafts - 1}, or drop it"
        refuse("fly_window_size", f"is {window}, but it must be smaller than num_speculative_tokens {drafts}", hint)
