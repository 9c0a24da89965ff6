"""Traces: one OpenTelemetry span for each request, made when it ends, so that nothing is added to a step.

Owns: names of spans and attributes, and the export. Must not know: HTTP, the engine's insides. Nothing of OpenTelemetry is imported
before `open_tracer` or `RequestTracer` is called.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specdec import __version__
from specdec.errors import ConfigError

if TYPE_CHECKING:
    from specdec.engine.types import EngineRequest, SpecDecodeRequestStats
    from specdec.metrics.stats import FinishedTimes

SPAN = "llm_request"
FLUSH_LIMIT_MS = 5000


def open_tracer(endpoint: str, *, model_name: str) -> RequestTracer:
    """Return a tracer that sends spans to `endpoint` (OTLP, http/protobuf) from a thread of its own.

    Raises:
        ConfigError: the endpoint is no URL, or OpenTelemetry is not installed.
    """
    where = urlsplit(endpoint)
    if where.scheme not in ("http", "https") or not where.netloc:
        hint = "give the whole URL, such as http://127.0.0.1:4318/v1/traces; gRPC is not spoken"
        raise ConfigError(f"--otlp-traces-endpoint is {endpoint!r}, but it must be an http or https URL", hint=hint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        hint = "pip install 'specdec[otel]', or drop the option"
        raise ConfigError(f"--otlp-traces-endpoint is given, but OpenTelemetry is not installed ({error})", hint=hint) from None
    resource = Resource.create({"service.name": "specdec", "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return RequestTracer(provider, model_name=model_name)


class RequestTracer:
    """Makes the spans. provider: an OpenTelemetry TracerProvider, which this object shuts down."""

    def __init__(self, provider: Any, *, model_name: str) -> None:
        from opentelemetry.trace import Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._model_name = provider, model_name
        self._tracer = provider.get_tracer("specdec", __version__)
        self._failed = Status(StatusCode.ERROR, "the engine could not finish this request")
        self._propagator = TraceContextTextMapPropagator()

    def finished(self, request: EngineRequest, times: FinishedTimes, speculation: SpecDecodeRequestStats) -> None:
        """Record a request that has just ended; called by the engine's thread. A span goes back to the request's arrival."""
        context = self._propagator.extract({"traceparent": request.trace_parent}) if request.trace_parent else None
        end_ns = time.time_ns()
        start_ns = end_ns - int(1e9 * max(times.finished_s - times.arrival_s, 0.0))
        attributes = request_attributes(request, times, speculation) | {"gen_ai.response.model": self._model_name}
        span = self._tracer.start_span(SPAN, context=context, start_time=start_ns, attributes=attributes)
        if times.reason == "error":
            span.set_status(self._failed)
        span.end(end_ns)

    def close(self) -> None:
        """Send what is left, for at most a few seconds."""
        self._provider.force_flush(FLUSH_LIMIT_MS)
        self._provider.shutdown()


def request_attributes(request: EngineRequest, times: FinishedTimes, speculation: SpecDecodeRequestStats) -> dict[str, Any]:
    """Attributes in vLLM's names, and speculation in ours. Durations in seconds; those of phases never reached are left out."""
    sampling = request.sampling
    known: dict[str, Any] = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.usage.prompt_tokens": times.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": times.num_output_tokens,
        "gen_ai.response.finish_reasons": (times.reason,),
        "gen_ai.latency.e2e": times.finished_s - times.arrival_s,
        "gen_ai.latency.time_in_queue": _between(times.arrival_s, times.scheduled_s),
        "gen_ai.latency.time_to_first_token": _between(times.arrival_s, times.first_token_s),
        "gen_ai.latency.time_in_model_prefill": _between(times.scheduled_s, times.first_token_s),
        "gen_ai.latency.time_in_model_decode": _between(times.first_token_s, times.last_token_s),
        "specdec.num_steps": speculation.num_steps,
        "specdec.num_drafts": speculation.num_drafts,
        "specdec.num_draft_tokens": speculation.num_draft_tokens,
        "specdec.num_accepted_tokens": speculation.num_accepted_tokens,
        "specdec.is_lossy": speculation.is_lossy,
        "specdec.sources": tuple(speculation.by_source),
    }
    return {name: value for name, value in known.items() if value is not None}


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s
