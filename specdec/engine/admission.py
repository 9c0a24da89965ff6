"""Admission: what the engine refuses before a request costs anything, and the ids it adds to a request.

Owns: checks against the resolved model that SamplingParams cannot make alone. Must not know: queues, HTTP.
Read next: engine/core.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from specdec.config.engine import ResolvedConfig
from specdec.engine.tokenizer import Tokenizer
from specdec.engine.types import EngineRequest
from specdec.errors import RequestRejected
from specdec.sampling_params import SamplingParams
from specdec.structured.compiler import GrammarCompiler


def check_request(request: EngineRequest, resolved: ResolvedConfig) -> None:
    """Refuse a request that this model cannot serve exactly as asked. Reads immutable data only: any thread may call it.

    Raises:
        RequestRejected: `param` names the field.
    """
    num_prompt, limit = len(request.prompt_token_ids), resolved.max_model_len
    if num_prompt == 0:
        raise RequestRejected("prompt is empty, but must hold at least one token", param="prompt")
    if num_prompt >= limit:
        raise RequestRejected(
            f"prompt has {num_prompt} tokens, but the model takes at most {limit} tokens with at least one of them generated",
            param="prompt",
            hint="shorten the prompt",
        )
    _require_ids("prompt", request.prompt_token_ids, resolved.vocab_size)
    sampling = request.sampling
    _require_ids("logit_bias", sampling.logit_bias, resolved.vocab_size)
    _require_ids("stop_token_ids", sampling.stop_token_ids, resolved.vocab_size)
    if sampling.allowed_token_ids is not None:
        _require_ids("allowed_token_ids", sampling.allowed_token_ids, resolved.vocab_size)
        if not sampling.allowed_token_ids:
            raise RequestRejected("allowed_token_ids is empty, so that no token could be drawn", param="allowed_token_ids")
    if sampling.structured is not None and sampling.ignore_eos:
        raise RequestRejected(
            "ignore_eos is true, but a structured output ends where its grammar does", param="ignore_eos", hint="leave it out"
        )
    if sampling.n != 1:
        raise RequestRejected(f"n is {sampling.n}, but the engine takes one sample per request", param="n", hint="send n requests")
    if num_prompt + sampling.min_tokens > limit:
        raise RequestRejected(
            f"min_tokens is {sampling.min_tokens}, but only {limit - num_prompt} tokens fit after a prompt of {num_prompt}",
            param="min_tokens",
        )


def with_token_ids(request: EngineRequest, tokenizer: Tokenizer) -> EngineRequest:
    """Return the request with its bad words as ids."""
    sampling = with_bad_word_ids(request.sampling, tokenizer)
    return request if sampling is request.sampling else replace(request, sampling=sampling)


def with_bad_word_ids(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return the parameters with their bad words as ids, each as it reads at the start of a text and after a space."""
    if not sampling.bad_words:
        return sampling
    known = dict.fromkeys(sampling.bad_words_token_ids)
    for word in sampling.bad_words:
        for text in (word, " " + word.lstrip()):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            if token_ids:
                known[token_ids] = None
    return replace(sampling, bad_words=(), bad_words_token_ids=tuple(known))


def with_grammar(request: EngineRequest, grammars: GrammarCompiler) -> EngineRequest:
    """Return the request with its constraint compiled, waiting for the compiler unless it was done before.

    Raises:
        RequestRejected: the constraint cannot be used; `param` is "structured". QueueFull: too many are being compiled.
    """
    wish = request.sampling.structured
    if wish is None or wish.compiled is not None:
        return request
    structured = replace(wish, compiled=grammars.compile(wish, field="structured"))
    return replace(request, sampling=replace(request.sampling, structured=structured))


def _require_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    bad = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if bad is not None:
        raise RequestRejected(f"{name} holds token id {bad}, but ids are 0..{vocab_size - 1}", param=name)
