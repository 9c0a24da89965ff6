"""Usage counts and the speculation figures of one response.

Owns: what is counted where. Must not know: HTTP. Counts are of kept tokens: trimmed at a stop, drafts that were refused apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from specdec.config.hidden_states import hidden_states_directory, hidden_states_path
from specdec.config.method_configs import ExtractHiddenStatesConfig
from specdec.config.speculative import SpeculativeConfig
from specdec.engine.types import SpecDecodeRequestStats
from specdec.server.generation import Collected
from specdec.server.options import SpecMetricsLevel


def usage(
    *, num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int, choices: Sequence[Collected] = ()
) -> dict[str, Any]:
    """Return OpenAI's usage object; `lossy` is there, and true, only where a finished choice did not keep the target's law."""
    figures = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
    is_lossy = any(choice.stats is not None and choice.stats.is_lossy for choice in choices)
    return figures | {"lossy": True} if is_lossy else figures


def cached_tokens(choices: Sequence[Collected], *, per_prompt: int) -> int:
    """Return prompt tokens found in the cache, once per prompt: its later choices find what the first one left."""
    return sum(choice.num_cached_tokens for choice in choices[::per_prompt])


def transfer_params(request_ids: Sequence[str], config: SpeculativeConfig | None) -> dict[str, Any]:
    """Return the member that names the files of hidden states, as vLLM spells it, where the server writes some; else nothing.

    One request: a path; several (n, or several prompts): a list of paths in the order of the choices. A file without a lock is whole.
    """
    if not isinstance(config, ExtractHiddenStatesConfig):
        return {}
    directory = hidden_states_directory(config.shared_storage_path)
    paths = [str(hidden_states_path(directory, request_id)) for request_id in request_ids]
    return {"kv_transfer_params": {"hidden_states_path": paths[0] if len(paths) == 1 else paths}}


def response_metrics(choices: Sequence[Collected], level: SpecMetricsLevel, *, max_nodes: int) -> dict[str, Any] | None:
    """Return the `metrics` object, None at level none. Figures of several choices would not add up, so those get null.

    max_nodes: the server's draft length, 0 without speculation.
    """
    if level == "none":
        return None
    stats = choices[0].stats if len(choices) == 1 else None
    if stats is None:
        return {"speculative_decoding": None}
    figures = _summary(stats, max_nodes)
    if level == "detailed":
        figures["per_step_accepted"] = [trace.num_accepted for trace in choices[0].traces]
        figures["per_step_drafted"] = [len(trace.draft_token_ids) for trace in choices[0].traces]
    return {"speculative_decoding": figures}


def _summary(stats: SpecDecodeRequestStats, max_nodes: int) -> dict[str, Any]:
    steps, drafted, accepted = stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens
    return {
        "mean_acceptance_length": 1.0 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": _histogram(stats, max_nodes),
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max_nodes,
        "num_target_steps": stats.num_steps,
        "lossy": stats.is_lossy,
        "by_source": {name: _source(counts) for name, counts in stats.by_source.items()},
    }


def _source(counts: Sequence[int]) -> dict[str, int]:
    return {"num_draft_tokens": counts[0], "num_accepted_draft_tokens": counts[1]}


def _histogram(stats: SpecDecodeRequestStats, max_nodes: int) -> list[int]:
    """Entry j: speculative steps that accepted exactly j drafts. accepted_per_pos[j] counts steps that accepted more than j."""
    at_least = [stats.num_drafts, *stats.accepted_per_pos]
    at_least += [0] * (max_nodes + 2 - len(at_least))
    return [now - after for now, after in pairwise(at_least)]
