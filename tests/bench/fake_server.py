"""An OpenAI-compatible server of forty lines with a scripted answer, for tests of clients."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PIECES = ("Once ", "upon ", "a ", "time", ".")  # 5 events
TOKENS_PER_ANSWER = 9  # so that 4 tokens are drafts that were accepted, over 4 verify steps


class Handler(BaseHTTPRequestHandler):
    """Streams PIECES for every chat completion; a prompt with FAIL is refused; counts drafts as our server does."""

    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(json.dumps({"data": [{"id": "fake"}]}))
        elif self.path == "/metrics":
            steps = 4 * self.server.num_answers
            self._send("\n".join(line.format(steps) for line in self.server.metric_lines) + "\n")
        else:
            self._send("{}", status=404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if "FAIL" in body["messages"][-1]["content"]:
            self._send(json.dumps({"error": {"message": "told to fail", "type": "invalid_request_error"}}), status=400)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for piece in PIECES:
            self._event({"choices": [{"index": 0, "delta": {"content": piece}}]})
        self._event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": TOKENS_PER_ANSWER}})
        with self.server.lock:
            self.server.num_answers += 1
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def _send(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


class FakeServer(ThreadingHTTPServer):
    """metric_lines: text of /metrics, with {} where the number of verify steps (and of accepted drafts) goes."""

    daemon_threads = True
    metric_lines = (
        "# TYPE specdec_num_drafts_total counter",
        'specdec_num_drafts_total{{model_name="fake"}} {}',
        'specdec_num_draft_tokens_total{{model_name="fake"}} 1e3',
        'specdec_num_accepted_tokens_total{{model_name="fake"}} {}',
        'specdec_num_accepted_tokens_per_pos_total{{model_name="fake",position="0"}} 77',
    )

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.num_answers = 0
        self.bodies: list[dict[str, Any]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        return  # a client that hangs up is part of the tests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
