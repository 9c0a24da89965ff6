"""Spans of requests: what they say of queue, prefill, decode and speculation, under whose trace, and that they load nothing when off."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from specdec.engine.core import EngineCore
from specdec.engine.types import EngineRequest
from specdec.errors import ConfigError
from specdec.sampling_params import SamplingParams
from specdec.server.options import ServerOptions
from tests.engine.tokenizers_for_tests import TOY_EOS, toy_tokenizer
from tests.server.serving import serving
from tests.toy import ToyRunner, coin, toy_resolved

ROOT = Path(__file__).resolve().parents[2]
REASON = "TRACES ARE NOT TESTED: install the extra otel"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Clock:
    """Seconds that go on by one at each look."""

    now_s = 100.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@contextmanager
def remembered() -> Iterator[tuple[Any, Any]]:
    """(tracer, the spans that it made)."""
    pytest.importorskip("opentelemetry.sdk", reason=REASON)
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from specdec.metrics.tracing import RequestTracer

    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = RequestTracer(provider, model_name="toy")
    try:
        yield tracer, exporter
    finally:
        tracer.close()


def asked(request_id: str, **more: Any) -> EngineRequest:
    sampling = SamplingParams(max_tokens=12, temperature=0.5, seed=1, ignore_eos=True)
    return EngineRequest(request_id=request_id, prompt_token_ids=(5, 6, 7), sampling=sampling, **more)


def test_a_span_tells_of_queue_prefill_decode_and_speculation() -> None:
    resolved = toy_resolved(num_drafts=3)
    clock = Clock()
    core = EngineCore(resolved, ToyRunner.for_config(resolved, drafter=coin(0.7)), tokenizer=toy_tokenizer(), clock=clock)
    with remembered() as (tracer, exporter):
        core.trace_with(tracer)
        core.add_request(asked("a", arrival_s=50.0))
        core.add_request(asked("gone"))
        core.abort("gone")
        outputs = []
        while core.has_work:
            outputs += core.step()
        gone, span = exporter.get_finished_spans()
    assert gone.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert "gen_ai.latency.time_to_first_token" not in gone.attributes, "it never got so far"
    given, stats = span.attributes, outputs[-1].stats
    assert span.name == "llm_request"
    assert span.parent is None
    assert stats is not None
    assert (given["gen_ai.request.id"], given["gen_ai.response.model"]) == ("a", "toy")
    assert (given["gen_ai.usage.prompt_tokens"], given["gen_ai.usage.completion_tokens"]) == (3, 12)
    assert (given["gen_ai.request.temperature"], given["gen_ai.request.max_tokens"]) == (0.5, 12)
    assert given["gen_ai.response.finish_reasons"] == ("length",)
    assert given["specdec.num_draft_tokens"] == stats.num_draft_tokens > 0
    assert given["specdec.num_accepted_tokens"] == stats.num_accepted_tokens > 0
    assert given["specdec.sources"] == ("ngram",)
    queue, first = given["gen_ai.latency.time_in_queue"], given["gen_ai.latency.time_to_first_token"]
    prefill, decode = given["gen_ai.latency.time_in_model_prefill"], given["gen_ai.latency.time_in_model_decode"]
    whole = given["gen_ai.latency.e2e"]
    assert queue > 50, "it had waited since second 50 when the clock stood at 100"
    assert queue + prefill == pytest.approx(first)
    assert first + decode == pytest.approx(whole)
    assert min(prefill, decode) > 0
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(whole)


def test_a_request_that_failed_is_marked() -> None:
    resolved = toy_resolved()
    runner = ToyRunner.for_config(resolved)
    runner.errors["bad"] = "no finite logit"
    core = EngineCore(resolved, runner, tokenizer=toy_tokenizer())
    with remembered() as (tracer, exporter):
        core.trace_with(tracer)
        core.add_request(asked("bad"))
        while core.has_work:
            core.step()
        (span,) = exporter.get_finished_spans()
    assert not span.status.is_ok
    assert span.attributes["gen_ai.response.finish_reasons"] == ("error",)


@pytest.mark.parametrize(
    ("header", "is_used"), [(PARENT, True), ("", False), ("00-xyz", False), ("0" * 5000, False), (PARENT.upper(), False)]
)
def test_the_span_lies_under_the_callers_trace(header: str, is_used: bool) -> None:
    options = ServerOptions(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")  # the test's own exporter is used
    with remembered() as (tracer, exporter), serving(options=options) as served:
        served.engine.core.trace_with(tracer)
        answer = served.post("/v1/completions", {"prompt": "abc", "max_tokens": 3, "n": 2}, traceparent=header)
        assert answer.status_code == 200
        served.wait_idle()
        spans = exporter.get_finished_spans()
    assert len(spans) == 2, "one for each choice"
    for span in spans:
        if is_used:
            assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
            assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
        else:
            assert span.parent is None


def test_spans_are_sent_as_otlp() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=REASON)
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    from specdec.metrics.tracing import open_tracer

    bodies: list[tuple[str, bytes, str]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append((self.path, body, self.headers.get("Content-Encoding", "")))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        resolved = toy_resolved(eos_token_ids=(TOY_EOS,))
        core = EngineCore(resolved, ToyRunner.for_config(resolved), tokenizer=toy_tokenizer())
        tracer = open_tracer(f"http://127.0.0.1:{collector.server_port}/v1/traces", model_name="toy")
        core.trace_with(tracer)
        core.add_request(asked("sent"))
        while core.has_work:
            core.step()
        tracer.close()
        collector.shutdown()
        thread.join()
    ((path, body, encoding),) = bodies
    assert (path, encoding) == ("/v1/traces", "")
    message = ExportTraceServiceRequest.FromString(body)
    (resource,) = message.resource_spans
    assert "specdec" in [item.value.string_value for item in resource.resource.attributes if item.key == "service.name"]
    (span,) = resource.scope_spans[0].spans
    assert "sent" in [item.value.string_value for item in span.attributes if item.key == "gen_ai.request.id"]


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://host:4317", "http://", ""])
def test_an_endpoint_that_is_no_url_stops_the_start(endpoint: str) -> None:
    from specdec.metrics.tracing import open_tracer

    with pytest.raises(ConfigError, match="must be an http or https URL"):
        open_tracer(endpoint, model_name="toy")


def test_without_the_extra_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.metrics.tracing import open_tracer

    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match="OpenTelemetry is not installed") as caught:
        open_tracer("http://127.0.0.1:4318/v1/traces", model_name="toy")
    assert caught.value.hint == "pip install 'specdec[otel]', or drop the option"


PROGRAM = """
import sys
from tests.server.serving import serving
with serving() as served:
    assert served.post("/v1/completions", {"prompt": "abc", "max_tokens": 3}).status_code == 200
ours = {name for name, module in list(sys.modules.items()) if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))}
print(sorted(ours | ({"specdec.metrics.tracing"} & sys.modules.keys())))
"""


@pytest.mark.slow
def test_nothing_is_imported_when_no_traces_are_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
