"""/metrics: names are an interface, numbers add up, vLLM's names come when asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from specdec.metrics.prometheus import Exporter, Identity, own_rows
from specdec.metrics.stats import EngineStats
from specdec.server.options import ServerOptions
from tests.server.serving import Served, serving

GOLDEN = Path(__file__).with_name("golden_metrics.txt")
WHO = Identity(model_name="m", version="1", method="ngram", device="cpu", dtype="float32", max_nodes=2)


def _samples(served: Served) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(served.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def _names(text: str) -> list[str]:
    """One line a family: its name on the wire, its type, its labels."""
    lines = []
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = sorted({label for sample in family.samples for label in sample.labels if label != "le"})
        lines.append(f"{name} {family.type} {' '.join(labels)}")
    return sorted(lines)


def test_names_types_and_labels_are_frozen() -> None:
    """A change of this list breaks dashboards: say so in the changelog."""
    stats = EngineStats()
    stats.spec.observe("ngram", 2, num_accepted=1, num_verified=2)
    text = Exporter(lambda: stats, WHO, has_vllm_names=True).render()[0].decode()
    assert _names(text) == GOLDEN.read_text().splitlines()


def test_counters_tell_accepted_from_verified() -> None:
    stats = EngineStats()
    stats.spec.observe("ngram", 2, num_accepted=1, num_verified=2)
    text = Exporter(lambda: stats, WHO, has_vllm_names=True).render()[0].decode()
    for line in (
        'specdec_num_accepted_tokens_total{model_name="m"} 1.0',
        'specdec_num_verified_tokens_total{model_name="m"} 2.0',
        'specdec_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 1.0',
        'specdec_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 0.0',
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 2.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 1.0',
        'specdec_source_accepted_tokens_total{model_name="m",source="ngram"} 1.0',
    ):
        assert line in text.splitlines()


def test_numbers_follow_the_requests() -> None:
    with serving() as served:
        body = {"prompt": "count me", "max_tokens": 40, "ignore_eos": True, "per_request_spec_decode_metrics": "detailed"}
        answer = served.post("/v1/completions", body).json()
        figures = answer["metrics"]["speculative_decoding"]
        found = _samples(served)

        def value(name: str) -> float:
            assert all(sample.labels["model_name"] == "toy" for sample in found[name])
            return sum(sample.value for sample in found[name])

        assert value("specdec_generation_tokens_total") == 40 == answer["usage"]["completion_tokens"]
        assert value("specdec_prompt_tokens_total") == answer["usage"]["prompt_tokens"]
        assert value("specdec_num_drafts_total") == figures["num_spec_steps"]
        assert value("specdec_num_draft_tokens_total") == figures["num_draft_tokens"]
        assert value("specdec_num_accepted_tokens_total") == figures["num_accepted_draft_tokens"] > 0
        assert value("specdec_num_accepted_tokens_per_pos_total") == figures["num_accepted_draft_tokens"]
        assert [sample.labels["position"] for sample in found["specdec_num_accepted_tokens_per_pos_total"]] == ["0", "1", "2"]
        reasons = {sample.labels["finished_reason"]: sample.value for sample in found["specdec_request_success_total"]}
        assert reasons == {"stop": 0, "length": 1, "abort": 0, "error": 0}
        assert value("specdec_time_to_first_token_seconds_count") == 1
        assert value("specdec_inter_token_latency_seconds_count") < 39, "one sample per event, and events carry several tokens"
        assert value("specdec_request_time_per_output_token_seconds_count") == 1
        assert value("specdec_num_requests_running") == value("specdec_num_requests_waiting") == 0
        phases = {sample.labels["phase"] for sample in found["specdec_step_duration_seconds_count"]}
        assert {"schedule", "forward", "verify", "propose"} <= phases
        info = found["specdec_info"][0]
        assert (info.labels["method"], info.labels["device"]) == ("ngram", "cpu")


def test_histogram_buckets_add_up() -> None:
    stats = EngineStats()
    for seconds in (0.0005, 0.03, 0.03, 5000.0):
        stats.time_to_first_token_s.observe(seconds)
    text = Exporter(lambda: stats, WHO).render()[0].decode()
    lines = [line for line in text.splitlines() if line.startswith("specdec_time_to_first_token_seconds")]
    assert 'specdec_time_to_first_token_seconds_bucket{le="0.001",model_name="m"} 1.0' in lines
    assert 'specdec_time_to_first_token_seconds_bucket{le="0.04",model_name="m"} 3.0' in lines
    assert 'specdec_time_to_first_token_seconds_bucket{le="2560.0",model_name="m"} 3.0' in lines
    assert 'specdec_time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 4.0' in lines
    assert 'specdec_time_to_first_token_seconds_count{model_name="m"} 4.0' in lines


@pytest.mark.parametrize("compat", ["none", "vllm"])
def test_vllm_names_come_only_when_asked_for(compat: str) -> None:
    with serving(options=ServerOptions(metrics_compat=compat)) as served:  # type: ignore[arg-type]
        names = _samples(served).keys()
        assert any(name.startswith("specdec_") for name in names)
        assert ("vllm:spec_decode_num_drafts_total" in names) == (compat == "vllm")
        assert ("vllm:num_requests_running" in names) == (compat == "vllm")


def test_openmetrics_is_served_to_those_who_ask(served: Served) -> None:
    asked = served.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert asked.headers["content-type"].startswith("application/openmetrics-text")
    assert asked.text.endswith("# EOF\n")
    assert served.get("/metrics").headers["content-type"].startswith("text/plain")


def test_two_exporters_in_one_process_do_not_collide() -> None:
    first, second = (Exporter(EngineStats, WHO) for _ in range(2))
    assert first.render() == second.render()


def test_every_metric_says_what_it_is() -> None:
    for row in own_rows(2):
        assert row.help.endswith(".")
        assert row.name.startswith("specdec_")
    latency = next(row for row in own_rows(2) if row.name == "specdec_inter_token_latency_seconds")
    assert "looks worse" in latency.help
