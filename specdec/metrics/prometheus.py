"""Prometheus export of EngineStats, on its own registry, read at scrape time: serving pays nothing for it.

Owns: metric names, help texts, and vLLM's names for the same numbers. Must not know: how anything is counted (stats.py).
Names are an interface: tests/server/golden_metrics.txt freezes them, docs/reference/metrics.md explains them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from specdec.metrics.stats import DraftCounts, EngineStats, Histogram

Kind = Literal["counter", "gauge", "histogram"]
Value = float | Histogram
Read = Callable[[EngineStats], Value | Mapping[str, Value]]


@dataclass(frozen=True, slots=True)
class Row:
    """One metric. `read` gives a value, or a value per value of `label`. Counters get _total on the wire."""

    name: str
    kind: Kind
    help: str
    read: Read
    label: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Labels and constants of one engine. max_nodes: drafts per step at most, 0 without speculation."""

    model_name: str
    version: str
    method: str
    device: str
    dtype: str
    max_nodes: int


def _positions(counts: Sequence[int], max_nodes: int) -> dict[str, Value]:
    """All positions that can occur are there from the start, so that a rate over the first minute is right."""
    padded = [*counts, *[0] * (max_nodes - len(counts))]
    return {str(position): count for position, count in enumerate(padded)}


def _by_source(stats: EngineStats, read: Callable[[DraftCounts], int]) -> dict[str, Value]:
    return {source or "unknown": read(counts) for source, counts in sorted(stats.spec.by_source.items())}


def own_rows(max_nodes: int) -> tuple[Row, ...]:
    """Return the metrics under our names."""
    return (
        Row("specdec_num_requests_running", "gauge", "Requests in the running batch.", lambda s: s.gauges.num_running),
        Row("specdec_num_requests_waiting", "gauge", "Requests waiting for a place in the batch.", lambda s: s.gauges.num_waiting),
        Row("specdec_kv_cache_usage_ratio", "gauge", "KV cache blocks in use, 0 to 1.", lambda s: s.gauges.kv_cache_usage),
        Row("specdec_sleep_level", "gauge", "0: awake; 1: KV caches are given back; 2: weights too.", lambda s: s.gauges.sleep_level),
        Row(
            "specdec_num_preemptions",
            "counter",
            "Requests that lost their KV blocks to another and start over.",
            lambda s: s.gauges.num_preemptions,
        ),
        Row(
            "specdec_prefix_cache_query_tokens",
            "counter",
            "Prompt tokens looked up in the prefix cache.",
            lambda s: s.gauges.prefix_cache_queries,
        ),
        Row("specdec_prefix_cache_hit_tokens", "counter", "Prompt tokens found in the prefix cache.", lambda s: s.gauges.prefix_cache_hits),
        Row(
            "specdec_prompt_tokens",
            "counter",
            "Prompt tokens read, those found in the prefix cache included.",
            lambda s: s.num_prompt_tokens,
        ),
        Row("specdec_generation_tokens", "counter", "Tokens emitted, after trimming at stops.", lambda s: s.num_generation_tokens),
        Row("specdec_request_success", "counter", "Requests that ended, by how they ended.", _reasons, label="finished_reason"),
        Row("specdec_num_steps", "counter", "Engine steps.", lambda s: s.num_steps),
        *_draft_rows(),
        *_draft_detail_rows(max_nodes),
        *_draft_length_rows(),
        *_latency_rows(),
    )


def _draft_rows() -> tuple[Row, ...]:
    return (
        Row("specdec_num_drafts", "counter", "Verify steps of a request that had at least one draft.", lambda s: s.spec.total.num_drafts),
        Row("specdec_num_draft_tokens", "counter", "Draft tokens sent to verification.", lambda s: s.spec.total.num_draft_tokens),
        Row(
            "specdec_num_accepted_tokens",
            "counter",
            "Draft tokens accepted and emitted. Acceptance length is 1 + this over specdec_num_drafts_total.",
            lambda s: s.spec.total.num_accepted_tokens,
        ),
        Row(
            "specdec_num_verified_tokens",
            "counter",
            "Draft tokens that passed verification, before trimming at a stop: at least the accepted ones.",
            lambda s: s.spec.total.num_verified_tokens,
        ),
        Row(
            "specdec_num_decode_steps",
            "counter",
            "Target passes that emitted for a request after its first token, plain ones included.",
            lambda s: s.spec.num_decode_steps,
        ),
        Row(
            "specdec_num_decode_tokens",
            "counter",
            "Tokens those passes emitted. Over specdec_num_decode_steps_total: tokens per target pass, the honest gain of speculation.",
            lambda s: s.spec.num_decode_tokens,
        ),
    )


def _draft_detail_rows(max_nodes: int) -> tuple[Row, ...]:
    """Drafts by position, by fate and by source."""
    return (
        Row(
            "specdec_num_accepted_tokens_per_pos",
            "counter",
            "Draft tokens accepted and emitted, by position in the draft (0 is the first).",
            lambda s: _positions(s.spec.accepted_per_pos, max_nodes),
            label="position",
        ),
        Row(
            "specdec_num_draft_tokens_per_pos",
            "counter",
            "Draft tokens sent to verification, by position in the draft.",
            lambda s: _positions(s.spec.drafted_per_pos, max_nodes),
            label="position",
        ),
        Row(
            "specdec_num_invalid_draft_tokens",
            "counter",
            "Draft tokens that a grammar refused before verification; not among the draft tokens.",
            lambda s: s.spec.num_invalid_tokens,
        ),
        Row(
            "specdec_source_draft_tokens",
            "counter",
            "Draft tokens by the drafter that proposed them.",
            lambda s: _by_source(s, lambda counts: counts.num_draft_tokens),
            label="source",
        ),
        Row(
            "specdec_source_accepted_tokens",
            "counter",
            "Accepted draft tokens by the drafter that proposed them.",
            lambda s: _by_source(s, lambda counts: counts.num_accepted_tokens),
            label="source",
        ),
    )


def _draft_length_rows() -> tuple[Row, ...]:
    """What the policy does, and whether drafting works at all."""
    return (
        Row("specdec_draft_length", "gauge", "Drafts per request in the newest orders, on average.", lambda s: s.gauges.draft_length),
        Row(
            "specdec_draft_length_changes",
            "counter",
            "Times that the policy chose other draft lengths, none included.",
            lambda s: s.gauges.num_draft_length_changes,
        ),
        Row(
            "specdec_draft_bank_seconds",
            "gauge",
            "What drafting has earned against plain decoding lately (policy adaptive): below zero, drafting soon stops.",
            lambda s: s.gauges.draft_bank_s,
        ),
        Row(
            "specdec_drafter_memory_bytes",
            "gauge",
            "Host memory of drafters that grow with what they read: texts, past responses and corpora of suffix.",
            lambda s: s.gauges.drafter_bytes,
        ),
        Row(
            "specdec_drafter_faults",
            "counter",
            "What went wrong in a custom_class; each costs the drafts of a step, never a request.",
            lambda s: s.gauges.drafter_faults,
            label="kind",
        ),
        Row(
            "specdec_acceptance_collapsed",
            "gauge",
            "1 while drafting is dead: the last 200 steps with drafts kept none of them.",
            lambda s: int(s.collapse.is_collapsed),
        ),
    )


def _latency_rows() -> tuple[Row, ...]:
    return (
        Row("specdec_time_to_first_token_seconds", "histogram", "From arrival to the first token.", lambda s: s.time_to_first_token_s),
        Row(
            "specdec_inter_token_latency_seconds",
            "histogram",
            "Between two outputs of a request, one sample per output event. With speculation an event carries several tokens and its step "
            "takes longer, so this looks worse while text comes faster; compare specdec_request_time_per_output_token_seconds instead.",
            lambda s: s.inter_token_latency_s,
        ),
        Row(
            "specdec_request_time_per_output_token_seconds",
            "histogram",
            "Decode time over (tokens - 1), one sample per request: what a reader feels, and what speculation makes smaller.",
            lambda s: s.time_per_output_token_s,
        ),
        Row("specdec_e2e_request_latency_seconds", "histogram", "From arrival to the last token.", lambda s: s.e2e_latency_s),
        Row("specdec_request_queue_time_seconds", "histogram", "From arrival to the first scheduled step.", lambda s: s.queue_time_s),
        Row(
            "specdec_request_prefill_time_seconds",
            "histogram",
            "From the first scheduled step to the first token.",
            lambda s: s.prefill_time_s,
        ),
        Row("specdec_request_decode_time_seconds", "histogram", "From the first token to the last.", lambda s: s.decode_time_s),
        Row(
            "specdec_step_duration_seconds",
            "histogram",
            "Wall time of one engine step, by phase.",
            lambda s: {**s.step_duration_s},
            label="phase",
        ),
        Row("specdec_step_tokens", "histogram", "Query rows of one step: prompt tokens, anchors and drafts.", lambda s: s.iteration_tokens),
        Row("specdec_request_prompt_tokens", "histogram", "Prompt length of finished requests.", lambda s: s.request_prompt_tokens),
        Row("specdec_request_generation_tokens", "histogram", "Answer length of finished requests.", lambda s: s.request_generation_tokens),
    )


def vllm_rows(max_nodes: int) -> tuple[Row, ...]:
    """Return the same numbers under vLLM's names, for dashboards that exist. Accepted counts are those before trimming, as vLLM's are."""
    rows = (
        Row("vllm:num_requests_running", "gauge", "As specdec_num_requests_running.", lambda s: s.gauges.num_running),
        Row("vllm:num_requests_waiting", "gauge", "As specdec_num_requests_waiting.", lambda s: s.gauges.num_waiting),
        Row("vllm:kv_cache_usage_perc", "gauge", "As specdec_kv_cache_usage_ratio: 1 is full.", lambda s: s.gauges.kv_cache_usage),
        Row("vllm:engine_sleep_state", "gauge", "1 for the state of specdec_sleep_level.", _sleep_states, label="sleep_state"),
        Row("vllm:num_preemptions", "counter", "As specdec_num_preemptions_total.", lambda s: s.gauges.num_preemptions),
        Row("vllm:prefix_cache_queries", "counter", "As specdec_prefix_cache_query_tokens_total.", lambda s: s.gauges.prefix_cache_queries),
        Row("vllm:prefix_cache_hits", "counter", "As specdec_prefix_cache_hit_tokens_total.", lambda s: s.gauges.prefix_cache_hits),
        Row("vllm:prompt_tokens", "counter", "As specdec_prompt_tokens_total.", lambda s: s.num_prompt_tokens),
        Row("vllm:prompt_tokens_cached", "counter", "Prompt tokens that needed no computing.", lambda s: s.num_cached_prompt_tokens),
        Row("vllm:generation_tokens", "counter", "As specdec_generation_tokens_total.", lambda s: s.num_generation_tokens),
        Row("vllm:request_success", "counter", "As specdec_request_success_total.", _reasons, label="finished_reason"),
        Row("vllm:time_to_first_token_seconds", "histogram", "As specdec_time_to_first_token_seconds.", lambda s: s.time_to_first_token_s),
        Row("vllm:inter_token_latency_seconds", "histogram", "As specdec_inter_token_latency_seconds.", lambda s: s.inter_token_latency_s),
        Row(
            "vllm:request_time_per_output_token_seconds",
            "histogram",
            "As specdec_request_time_per_output_token_seconds.",
            lambda s: s.time_per_output_token_s,
        ),
        Row("vllm:e2e_request_latency_seconds", "histogram", "As specdec_e2e_request_latency_seconds.", lambda s: s.e2e_latency_s),
        Row("vllm:request_queue_time_seconds", "histogram", "As specdec_request_queue_time_seconds.", lambda s: s.queue_time_s),
        Row("vllm:request_prefill_time_seconds", "histogram", "As specdec_request_prefill_time_seconds.", lambda s: s.prefill_time_s),
        Row("vllm:request_decode_time_seconds", "histogram", "As specdec_request_decode_time_seconds.", lambda s: s.decode_time_s),
        Row("vllm:iteration_tokens_total", "histogram", "As specdec_step_tokens.", lambda s: s.iteration_tokens),
        Row("vllm:request_prompt_tokens", "histogram", "As specdec_request_prompt_tokens.", lambda s: s.request_prompt_tokens),
        Row("vllm:request_generation_tokens", "histogram", "As specdec_request_generation_tokens.", lambda s: s.request_generation_tokens),
    )
    return rows + _vllm_speculation_rows(max_nodes) if max_nodes else rows


def _vllm_speculation_rows(max_nodes: int) -> tuple[Row, ...]:
    """vLLM has these only where speculation is configured."""
    return (
        Row("vllm:spec_decode_num_drafts", "counter", "As specdec_num_drafts_total.", lambda s: s.spec.total.num_drafts),
        Row("vllm:spec_decode_num_draft_tokens", "counter", "As specdec_num_draft_tokens_total.", lambda s: s.spec.total.num_draft_tokens),
        Row(
            "vllm:spec_decode_num_accepted_tokens",
            "counter",
            "As specdec_num_verified_tokens_total.",
            lambda s: s.spec.total.num_verified_tokens,
        ),
        Row(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "counter",
            "Draft tokens that passed verification, before trimming at a stop, by position in the draft.",
            lambda s: _positions(s.spec.verified_per_pos, max_nodes),
            label="position",
        ),
    )


def _sleep_states(stats: EngineStats) -> dict[str, Value]:
    """vLLM's names of the levels; its first one keeps the weights in host memory."""
    return {name: int(stats.gauges.sleep_level == level) for level, name in enumerate(("awake", "weights_offloaded", "discard_all"))}


def _reasons(stats: EngineStats) -> dict[str, Value]:
    return {**stats.num_requests_by_reason}


class EngineCollector(Collector):
    """Turns a snapshot of the engine's numbers into metric families."""

    def __init__(self, read_stats: Callable[[], EngineStats], identity: Identity, *, has_vllm_names: bool) -> None:
        self._read_stats = read_stats
        self._identity = identity
        self._own = own_rows(identity.max_nodes)
        self._vllm = vllm_rows(identity.max_nodes) if has_vllm_names else ()

    def collect(self) -> Iterator[Metric]:
        """Yield every family (called once per scrape)."""
        stats, who = self._read_stats(), self._identity
        labels = {"model_name": who.model_name, "version": who.version, "method": who.method, "device": who.device, "dtype": who.dtype}
        info = GaugeMetricFamily("specdec_info", "Always 1; the labels say what is running.", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        yield info
        for row in self._own:
            yield _family(row, stats, {"model_name": who.model_name})
        for row in self._vllm:
            yield _family(row, stats, {"model_name": who.model_name, "engine": "0"})


class Exporter:
    """The text of /metrics, on a registry of its own: two engines in one process do not collide."""

    def __init__(
        self,
        read_stats: Callable[[], EngineStats],
        identity: Identity,
        *,
        has_vllm_names: bool = False,
        more: Sequence[Collector] = (),  # what is not the engine's
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        for collector in (EngineCollector(read_stats, identity, has_vllm_names=has_vllm_names), *more):
            self._registry.register(collector)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the body and its content type, in the format that an Accept header asks for."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type


def _family(row: Row, stats: EngineStats, labels: Mapping[str, str]) -> Metric:
    names = [*labels, *([row.label] if row.label else [])]
    family = _new_family(row, names)
    found = row.read(stats)
    values = found if isinstance(found, Mapping) else {"": found}
    for label, value in values.items():
        at = [*labels.values(), *([label] if row.label else [])]
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(value, Histogram), f"{row.name} is a histogram, but {type(value).__name__} was read"
            family.add_metric(at, buckets=_buckets(value), sum_value=value.sum)
        else:
            assert not isinstance(value, Histogram), f"{row.name} is a {row.kind}, but a histogram was read"
            family.add_metric(at, value)
    return family


def _new_family(row: Row, names: list[str]) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    match row.kind:
        case "counter":
            return CounterMetricFamily(row.name, row.help, labels=names)
        case "gauge":
            return GaugeMetricFamily(row.name, row.help, labels=names)
        case "histogram":
            return HistogramMetricFamily(row.name, row.help, labels=names)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Prometheus counts values up to each edge, the overflow at +Inf."""
    edges = [str(floatToGoString(edge)) for edge in histogram.edges]  # type: ignore[no-untyped-call]
    return list(zip([*edges, "+Inf"], accumulate(histogram.counts), strict=True))
