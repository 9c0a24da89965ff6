"""What operators rely on: TLS, Unix sockets, keys from files, time limits, request ids, HTTP counters, the watchdog's dump, JSON logs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdec.errors import ConfigError
from specdec.server.listen import bind_unix, tls_of, unbind
from specdec.server.options import ServerOptions
from specdec.server.serve import make_server
from specdec.tools.api_keys import VARIABLE, collect_keys
from tests.server.serving import Served, serving

COMPLETION = "/v1/completions"
LONG = {"prompt": "abc", "max_tokens": 240, "ignore_eos": True}


# -- sockets and certificates --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate of its own for 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("NOT TESTED: there is no openssl on PATH to make a certificate with, so TLS was not tried")
    return cert, key


@contextmanager
def also_served(served: Served, sock: socket.socket, **options: Any) -> Iterator[None]:
    """Serve the same app on another socket."""
    server = make_server(served.server.config.app, **options)  # type: ignore[arg-type]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    try:
        until = time.monotonic() + 20
        while not server.started and time.monotonic() < until:
            time.sleep(0.02)
        yield
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def test_https_serves_those_who_trust_the_certificate_and_no_plain_text(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    sock = socket.create_server(("127.0.0.1", 0))
    with serving() as served, also_served(served, sock, tls=tls_of(cert, key)):
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        trusting = ssl.create_default_context(cafile=cert)
        assert httpx.get(f"https://{address}/health", verify=trusting).status_code == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"https://{address}/health")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://{address}/health")


def test_certificates_that_cannot_be_used_stop_the_start(certificate: tuple[str, str], tmp_path: Path) -> None:
    cert, key = certificate
    other = tmp_path / "other.pem"
    other.write_text("not a key", encoding="utf-8")
    for pair, message in (
        ((cert, None), "--ssl-certfile is given without --ssl-keyfile"),
        ((None, key), "--ssl-keyfile is given without --ssl-certfile"),
        ((cert, str(tmp_path / "none")), "ssl_keyfile is .* there is no such file"),
        ((cert, str(other)), "cannot be used"),
        ((key, cert), "cannot be used"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            tls_of(*pair)
        assert caught.value.hint
    assert tls_of(None, None) is None


def test_a_unix_socket_serves_and_goes_with_its_server(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    sock = bind_unix(path)
    with serving() as served, also_served(served, sock):
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://any") as client:
            assert client.post(COMPLETION, json={"prompt": "abc", "max_tokens": 2}).status_code == 200
        with pytest.raises(ConfigError, match="already in use"):
            bind_unix(path)
    unbind(sock, path)
    unbind(sock, path)
    assert not Path(path).exists()


def test_only_the_socket_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    bind_unix(str(path)).close()  # a server that was killed leaves its file
    unbind(bind_unix(str(path)), str(path))
    path.write_text("precious", encoding="utf-8")
    with pytest.raises(ConfigError, match="no socket"):
        bind_unix(str(path))
    assert path.read_text(encoding="utf-8") == "precious"
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        bind_unix("x" * 200)
    with pytest.raises(ConfigError, match="cannot listen on uds"):
        bind_unix(str(tmp_path / "no" / "folder"))


# -- keys ----------------------------------------------------------------------------------------------------------------


def test_keys_come_from_three_places_and_are_never_printed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# team a\nalpha\n\n  beta \n", encoding="utf-8")
    assert collect_keys(("given",), str(path), {VARIABLE: "gamma  alpha"}) == ("given", "alpha", "beta", "gamma")
    assert collect_keys((), None, {}) == ()
    path.write_text("two words\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="key number 1 has spaces") as caught:
        collect_keys((), str(path), {})
    assert "two words" not in caught.value.render()


@pytest.mark.parametrize(("text", "environ"), [("# nothing\n", {}), (None, {VARIABLE: " "}), ("missing", {})])
def test_an_empty_source_of_keys_does_not_open_the_server(text: str | None, environ: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "keys"
    if text is not None and text != "missing":
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"holds no key|cannot be read"):
        collect_keys((), None if text is None else str(path), environ)


def test_the_variable_with_keys_is_known_and_never_reported(caplog: pytest.LogCaptureFixture) -> None:
    from specdec.config import resolve

    assert VARIABLE in resolve.SECRETS
    assert VARIABLE not in resolve.VARIABLES  # those are printed with their values
    with caplog.at_level(logging.WARNING, "specdec"):
        resolve._warn_unknown_variables({VARIABLE: "alpha-secret", "SPECDEC_APIKEYS": "x"})
    assert [record.getMessage() for record in caplog.records] == [
        "environment variable SPECDEC_APIKEYS has no effect: did you mean SPECDEC_API_KEYS?"
    ]


# -- time limits ---------------------------------------------------------------------------------------------------------


def test_answers_that_take_too_long_end_with_an_error_and_free_the_engine() -> None:
    with serving(delay_s=0.05, options=ServerOptions(request_timeout_s=0.4)) as served:
        late = served.post(COMPLETION, LONG)
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "request_timeout"
        assert "0.4 s" in late.json()["error"]["message"]
        events = served.post(COMPLETION, LONG | {"stream": True}).text.split("\n\n")
        assert json.loads(events[0].removeprefix("data: "))["choices"]
        assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert events[-2] == "data: [DONE]"
        served.wait_idle(3)
        assert served.engine.stats.num_requests_by_reason["abort"] == 2
        assert served.post(COMPLETION, {"prompt": "abc", "max_tokens": 2}).status_code == 200


def test_bodies_that_trickle_in_get_408() -> None:
    with serving(options=ServerOptions(request_timeout_s=0.4)) as served:
        host, port = served.url.removeprefix("http://").split(":")
        head = f"POST {COMPLETION} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(head.encode() + b'{"prompt":')
            answer = b""
            while b"}" not in answer and (part := client.recv(65536)):
                answer += part
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body_timeout" in answer


# -- ids, counters, watchdog, logs -----------------------------------------------------------------------------------------


def test_every_answer_carries_a_request_id(served: Served) -> None:
    assert served.get("/health", **{"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    own = [served.get(path).headers["x-request-id"] for path in ("/health", "/health", "/none")]
    assert len(set(own)) == 3
    for bad in ("a b", "x" * 129, 'a"b'):
        given = served.get("/health", **{"X-Request-Id": bad}).headers["x-request-id"]
        assert given != bad
        assert len(given) == 32
    streamed = served.post(COMPLETION, {"prompt": "abc", "max_tokens": 2, "stream": True}, **{"X-Request-Id": "mine-2"})
    assert streamed.headers.get_list("x-request-id") == ["mine-2"]


def test_requests_are_counted_by_route_and_status() -> None:
    with serving(options=ServerOptions(api_keys=("k",))) as served:
        key = {"Authorization": "Bearer k"}
        served.post(COMPLETION, {"prompt": "abc", "max_tokens": 2}, **key)
        served.post(COMPLETION, {"prompt": 5}, **key)
        served.post(COMPLETION, {"prompt": "abc"})
        for number in range(3):
            served.get(f"/no/such/{number}", **key)
        served.get("/v1/models/toy", **key)
        counts = {}
        for family in text_string_to_metric_families(served.get("/metrics").text):
            for sample in family.samples:
                if sample.name == "specdec_http_requests_total":
                    assert sample.labels["model_name"] == "toy"
                    counts[(sample.labels["method"], sample.labels["route"], sample.labels["status"])] = sample.value
    assert counts.pop(("GET", "/ready", "200")) >= 1
    assert counts == {
        ("POST", COMPLETION, "200"): 1,
        ("POST", COMPLETION, "400"): 1,
        ("POST", "other", "401"): 1,
        ("GET", "other", "404"): 3,
        ("GET", "/v1/models/{name:path}", "200"): 1,
    }


def test_a_stall_is_logged_once_with_every_request_and_shown_by_health(caplog: pytest.LogCaptureFixture) -> None:
    with serving(is_open=False, options=ServerOptions(stall_after_s=0.2)) as served, caplog.at_level(logging.ERROR, "specdec"):
        thread = threading.Thread(target=lambda: served.post(COMPLETION, {"prompt": "very secret", "max_tokens": 2, "request_id": "who"}))
        thread.start()
        until = time.monotonic() + 10
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.05)  # nobody asks /health: the watchdog looks by itself
        stalled = served.get("/health")
        served.get("/health")
        served.runner.gate.set()
        thread.join(10)
        healthy = served.get("/health").json()
    assert stalled.status_code == 503
    state = stalled.json()["requests"][0]
    assert state["num_prompt_tokens"] > 0
    assert {"status", "num_computed_tokens", "num_blocks", "age_s"} <= state.keys()
    assert "who" not in stalled.text
    assert "requests" not in healthy
    dumps = [record.getMessage() for record in caplog.records if "their states" in record.getMessage()]
    assert len(dumps) == 1
    assert "cmpl-who" in dumps[0]
    assert "secret" not in dumps[0]


JSON_LOGS = """
import logging, warnings
from specdec.logging import configure
configure("DEBUG", "json")
logging.getLogger("specdec.server.access").debug("GET %s", "/x", extra={"fields": {"request_id": "r", "status": 200}})
logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
logging.getLogger("uvicorn.error").info("chatter")
logging.getLogger("asyncio").error("task exception was never retrieved")
"""


def test_json_logs_are_json_on_every_line() -> None:
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", JSON_LOGS], capture_output=True, text=True, timeout=60, check=True, env=environ)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["logger"], line["level"]) for line in lines] == [
        ("specdec.server.access", "DEBUG"),
        ("uvicorn.error", "WARNING"),
        ("asyncio", "ERROR"),
    ]
    assert (lines[0]["message"], lines[0]["request_id"], lines[0]["status"]) == ("GET /x", "r", 200)
