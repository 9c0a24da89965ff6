"""Admission: what this server refuses although the body is well formed, all offenders in one message.

Owns: rules that need the resolved model, and parameters that contradict one another.
Must not know: bodies (sampling.py has translated them). Read next: engine/admission.py, the engine's own last check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from specdec.config.engine import ResolvedConfig
from specdec.errors import RequestRejected
from specdec.sampling_params import SamplingParams, SpeculationParams


def check(sampling: SamplingParams, resolved: ResolvedConfig, *, priority: int = 0) -> None:
    """Refuse parameters that this model and this server cannot honour exactly.

    Raises:
        RequestRejected: the message lists every offender; `param` is the first.
    """
    faults = [*_bad_structure(sampling), *_bad_ids(sampling, resolved.vocab_size), *_bad_speculation(sampling.speculation, resolved)]
    if priority != 0 and resolved.engine.scheduler.policy != "priority":
        faults.append(
            (
                "priority",
                f"priority is {priority}, but this server runs first come, first served; send 0",
            )
        )
    if faults:
        raise RequestRejected("; ".join(text for _, text in faults), param=faults[0][0])


def _bad_structure(sampling: SamplingParams) -> Iterator[tuple[str, str]]:
    if sampling.structured is not None and sampling.ignore_eos:
        yield "ignore_eos", "ignore_eos is true, but a structured output ends where its grammar does; leave it out"
    choices = sampling.structured.choice if sampling.structured is not None else None
    if choices:
        longest = max(len(choice.encode(errors="replace")) for choice in choices) + 1  # a token for each byte, then the end
        if sampling.min_tokens > longest:
            yield "min_tokens", f"min_tokens is {sampling.min_tokens}, but the longest of the choices has at most {longest} tokens"


def _bad_ids(sampling: SamplingParams, vocab_size: int) -> Iterator[tuple[str, str]]:
    lists: tuple[tuple[str, Iterable[int]], ...] = (
        ("logit_bias", sampling.logit_bias),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("stop_token_ids", sampling.stop_token_ids),
    )
    for name, token_ids in lists:
        bad = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
        if bad is not None:
            yield name, f"{name} holds token id {bad}, but ids are 0..{vocab_size - 1}"
    if sampling.allowed_token_ids == ():
        yield "allowed_token_ids", "allowed_token_ids is empty, so that no token could be drawn; leave it out to allow all"


def _bad_speculation(wish: SpeculationParams, resolved: ResolvedConfig) -> Iterator[tuple[str, str]]:
    """A request may ask for less drafting than the server runs, never for more or for another method."""
    traits = resolved.traits
    if not wish.enabled:
        return
    if traits is None:
        if wish.num_speculative_tokens is not None or wish.method is not None:
            yield "speculative", "speculative asks for drafts, but this server runs without speculation; remove it"
        return
    if wish.num_speculative_tokens is not None and wish.num_speculative_tokens > traits.max_nodes:
        asked = wish.num_speculative_tokens
        name = "speculative.num_speculative_tokens"
        yield name, f"{name} is {asked}, but this server drafts at most {traits.max_nodes}"
    sources = draft_sources(resolved)
    if wish.method is not None and wish.method not in sources:
        yield "speculative.method", f"speculative.method is {wish.method!r}, but this server drafts with {' and '.join(sources)}"


def draft_sources(resolved: ResolvedConfig) -> tuple[str, ...]:
    """Return the methods a request may name: the sources of a hybrid, else the one method; () without speculation."""
    if resolved.traits is None:
        return ()
    config = resolved.engine.speculative
    if config is not None and config.method == "hybrid":
        return tuple(source.method for source in config.sources)
    return (resolved.traits.method,)
