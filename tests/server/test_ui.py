"""The playground without a browser: files, headers, the two endpoints, traced streams, and the page's own arithmetic under node."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specdec.server.options import ServerOptions
from specdec.server.playground import FOLDER, assets
from tests.server.serving import Served, serving

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SAY = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 60, "ignore_eos": True, "temperature": 0}
NODE = shutil.which("node")


def stream(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    answer = served.post(path, body | {"stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


# -- files ---------------------------------------------------------------------------------------------------------------


def test_every_file_is_served_with_its_type_and_a_policy_that_allows_nothing_foreign(served: Served) -> None:
    for path, asset in assets().items():
        answer = served.get(path)
        assert answer.status_code == 200
        assert answer.content == asset.body
        assert answer.headers["content-type"] == asset.media_type
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "*" not in policy
    assert {"/", "/ui/app.mjs", "/ui/style.css"} <= assets().keys()
    assert served.http.head(served.url + "/").status_code == 200


@pytest.mark.parametrize("path", ["/ui/../app.py", "/ui/%2e%2e/app.py", "/ui/none.mjs", "/ui/", "/ui/index.html"])
def test_no_other_file_can_be_named(served: Served, path: str) -> None:
    assert served.get(path).status_code == 404


def test_nothing_on_the_page_is_loaded_from_elsewhere() -> None:
    for path in sorted(FOLDER.iterdir()):
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"(?:https?:)?//[\w-]+\.[\w.-]+", text) == [], path.name
        assert not re.search(r"\bon\w+=|style=\"|javascript:|innerHTML|\beval\(", text), path.name


class Page(HTMLParser):
    """What of the page can be checked without a browser."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.labelled: set[str] = set()
        self.unlabelled: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if "id" in found:
            self.ids.append(found["id"])
        for name in ("aria-controls", "aria-labelledby", "for"):
            if name in found:
                self.references.append(found[name])
        if tag == "label":
            self._open.append(tag)
            self.labelled.add(found.get("for", ""))
        if tag in ("input", "textarea") and not self._open:
            self.unlabelled.append(found["id"])

    def handle_endtag(self, tag: str) -> None:
        if tag == "label":
            self._open.pop()


def test_controls_have_labels_and_every_reference_has_its_element() -> None:
    page = Page()
    text = (FOLDER / "index.html").read_text(encoding="utf-8")
    page.feed(text)
    assert len(page.ids) == len(set(page.ids))
    assert set(page.references) <= set(page.ids)
    assert set(page.unlabelled) <= page.labelled
    assert '<html lang="en">' in text
    assert 'name="viewport"' in text
    used = re.findall(r'\$\("([\w-]+)"\)', (FOLDER / "app.mjs").read_text(encoding="utf-8"))
    assert len(used) > 15
    assert set(used) <= set(page.ids)


def _luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_have_enough_contrast(scheme: int) -> None:
    blocks = re.findall(r":root \{([^}]*)\}", (FOLDER / "style.css").read_text(encoding="utf-8"))
    colours = dict(re.findall(r"--(\w[\w-]*): (#\w{6})", blocks[scheme]))
    pairs = [
        ("ink", "back"),
        ("ink", "panel"),
        ("soft", "back"),
        ("soft", "panel"),
        ("bad", "panel"),
        ("bad", "back"),
        ("on-accent", "accent"),
    ]
    pairs += [("ink", f"s{index}") for index in range(6)]
    for front, back in pairs:
        high, low = sorted((_luminance(colours[front]), _luminance(colours[back])), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (front, back)


def test_without_ui_there_is_neither_page_nor_endpoint() -> None:
    with serving(options=ServerOptions(has_ui=False)) as served:
        for path in ("/", "/ui/app.mjs", "/specdec/stats", "/specdec/config"):
            assert served.get(path).status_code == 404


def test_with_keys_the_page_is_open_and_its_numbers_are_not() -> None:
    with serving(options=ServerOptions(api_keys=("k",))) as served:
        assert served.get("/").status_code == served.get("/ui/app.mjs").status_code == 200
        for path in ("/specdec/stats", "/specdec/config", "/ui/../specdec/stats"):
            assert served.get(path).status_code == 401
        assert served.get("/specdec/stats", Authorization="Bearer k").status_code == 200


# -- endpoints -----------------------------------------------------------------------------------------------------------


def test_stats_count_what_metrics_count() -> None:
    with serving() as served:
        fresh = served.get("/specdec/stats").json()
        assert fresh["num_accepted_tokens_per_pos"] == [0, 0, 0]
        served.post(CHAT, SAY)
        stats = served.get("/specdec/stats").json()
        engine = served.engine.stats
    assert stats["generation_tokens"] == 60
    assert stats["max_draft_length"] == 3
    assert stats["num_accepted_tokens"] == engine.spec.total.num_accepted_tokens == sum(stats["num_accepted_tokens_per_pos"]) > 0
    assert stats["by_source"]["ngram"]["num_draft_tokens"] == stats["num_draft_tokens"]
    assert stats["num_requests_running"] == stats["num_requests_waiting"] == 0
    assert stats["time_s"] > fresh["time_s"]


def test_config_says_what_was_decided(served: Served) -> None:
    config = served.get("/specdec/config").json()
    assert (config["model"], config["device"], config["sources"], config["num_speculative_tokens"]) == ("toy", "cpu", ["ngram"], 3)
    assert isinstance(config["report"], list)


# -- traces --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [(CHAT, SAY), (COMPLETION, {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "seed": 3})])
def test_a_traced_stream_tells_each_token_and_its_origin(served: Served, path: str, body: dict[str, Any]) -> None:
    wish = {"speculative": {"trace": True}, "return_token_ids": True, "per_request_spec_decode_metrics": "detailed"}
    events = stream(served, path, body | wish | {"stream_options": {"include_usage": True}})
    figures = events[-1]["metrics"]["speculative_decoding"]
    choices = [event["choices"][0] for event in events if event["choices"] and "specdec" in event["choices"][0]]
    traces = [choice["specdec"] for choice in choices]
    assert [[token["id"] for token in trace["tokens"]] for trace in traces] == [choice["token_ids"] for choice in choices]
    assert sum(len(trace["tokens"]) for trace in traces) == 60
    assert sum(trace["num_accepted"] for trace in traces) == figures["num_accepted_draft_tokens"] > 0
    assert sum(trace["num_accepted"] + len(trace["rejected"]) for trace in traces) == figures["num_draft_tokens"]
    assert any(trace["rejected"] for trace in traces)
    assert {trace["source"] for trace in traces} == {None, "ngram"}
    for trace in traces:
        assert trace["num_accepted"] <= len(trace["tokens"])
        assert all(token["text"] == served.tokenizer.token_text(token["id"]) for token in trace["tokens"] + trace["rejected"])


def test_tracing_changes_no_text_and_every_choice_gets_its_own(served: Served) -> None:
    body = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, "temperature": 0, "n": 2}
    plain, traced = stream(served, COMPLETION, body), stream(served, COMPLETION, body | {"speculative": {"trace": True}})

    def text(events: list[dict[str, Any]], index: int) -> str:
        return "".join(choice["text"] for event in events for choice in event["choices"] if choice["index"] == index)

    for index in (0, 1):
        assert text(plain, index) == text(traced, index) != ""
        mine = [choice for event in traced for choice in event["choices"] if choice["index"] == index]
        assert sum(len(choice["specdec"]["tokens"]) for choice in mine) == 40
    assert not any("specdec" in choice for event in plain for choice in event["choices"])


def test_without_drafts_a_trace_says_so(served: Served) -> None:
    events = stream(served, CHAT, SAY | {"speculative": {"trace": True, "enabled": False}})
    traces = [choice["specdec"] for event in events for choice in event["choices"] if "specdec" in choice]
    assert {(trace["source"], trace["num_accepted"], len(trace["rejected"])) for trace in traces} == {(None, 0, 0)}


def test_a_trace_without_a_stream_is_refused(served: Served) -> None:
    refused = served.post(CHAT, SAY | {"speculative": {"trace": True}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "speculative.trace"
    assert "stream: true only" in refused.json()["error"]["message"]


# -- the page's arithmetic -----------------------------------------------------------------------------------------------


def node(script: str) -> Any:
    if NODE is None:
        pytest.skip("NOT TESTED: there is no node on PATH, so the playground's JavaScript was not run")
    done = subprocess.run([NODE, "--input-type=module", "-"], input=script, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def imports(name: str, *symbols: str) -> str:
    return f"import {{ {', '.join(symbols)} }} from {json.dumps((FOLDER / name).as_uri())};\n"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.mjs")), ids=lambda path: path.name)
def test_scripts_parse(path: Path) -> None:
    if NODE is None:
        pytest.skip("NOT TESTED: there is no node on PATH, so the playground's JavaScript was not parsed")
    done = subprocess.run([NODE, "--check", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# Events as [text, accepted, tokens], and the pieces that the page shows for them.
ALIGNED = {
    "one to one": ([["ab c", 1, ["ab", " c"]]], [["ab", "toy"], [" c", None]]),
    "neighbours join": ([["abcd", 2, ["a", "bc", "d"]]], [["abc", "toy"], ["d", None]]),
    "held back by a stop string": ([["", 0, ["a"]], ["", 1, ["b", "c"]], ["abc", 0, []]], [["a", None], ["b", "toy"], ["c", None]]),
    "a character over three tokens": (
        [["", 2, ["\ufffd", "\ufffd"]], ["\u20ac x", 1, ["\ufffd", " x"]]],
        [["\u20ac", "toy"], [" x", None]],
    ),
    "a special token without text": ([["ab", 1, ["<s>", "a", "b"]]], [["ab", None]]),
    "text without tokens": ([["tail", 0, []]], [["tail", None]]),
}


@pytest.mark.parametrize("case", ALIGNED)
def test_pieces_carry_the_origin_of_their_tokens(case: str) -> None:
    events, expected = ALIGNED[case]
    found = node(
        imports("align.mjs", "Aligner", "joined") + f"const events = {json.dumps(events)};\n"
        "const aligner = new Aligner();\n"
        "const trace = ([, num_accepted, texts]) =>"
        " ({ source: 'toy', num_accepted, tokens: texts.map((text) => ({ text })), rejected: [] });\n"
        "const pieces = events.flatMap((event) => aligner.push(event[0], trace(event)));\n"
        "console.log(JSON.stringify(joined(pieces).map(({ text, source }) => [text, source])));"
    )
    assert found == expected


def test_pieces_of_a_real_stream_add_up_to_its_text(served: Served) -> None:
    events = stream(served, CHAT, SAY | {"speculative": {"trace": True}})
    choices = [event["choices"][0] for event in events if event["choices"]]
    found = node(
        imports("align.mjs", "Aligner", "Tally") + f"const choices = {json.dumps(choices)};\n"
        "const [aligner, tally] = [new Aligner(), new Tally()];\n"
        "const pieces = choices.flatMap((c) => { tally.add(c.specdec); return aligner.push(c.delta.content ?? '', c.specdec); });\n"
        "console.log(JSON.stringify({ text: pieces.map((p) => p.text).join(''), sources: [...new Set(pieces.map((p) => p.source))],"
        " tokens: tally.tokens, accepted: tally.accepted, drafted: tally.drafted }));"
    )
    traces = [choice["specdec"] for choice in choices if "specdec" in choice]
    assert found["text"] == "".join(choice["delta"].get("content", "") for choice in choices)
    assert set(found["sources"]) == {None, "ngram"}
    assert found["tokens"] == 60
    assert found["accepted"] == sum(trace["num_accepted"] for trace in traces)
    assert found["drafted"] == found["accepted"] + sum(len(trace["rejected"]) for trace in traces)


def test_the_charts_divide_differences(served: Served) -> None:
    first = served.get("/specdec/stats").json()
    served.post(CHAT, SAY)
    second = served.get("/specdec/stats").json() | {"time_s": first["time_s"] + 2}
    found = node(
        imports("series.mjs", "CHARTS", "Readings", "acceptanceByPosition") + f"const [a, b] = {json.dumps([first, second])};\n"
        "const readings = new Readings();\n"
        "readings.push(a); readings.push(b);\n"
        "const lines = Object.fromEntries(CHARTS.map((chart) => [chart.title, readings.line(chart)]));\n"
        "readings.push({ ...a, num_steps: 0, time_s: b.time_s + 1 });\n"
        "console.log(JSON.stringify({ lines, shares: acceptanceByPosition(a, b), left: readings.all.length }));"
    )
    drafts = second["num_drafts"] - first["num_drafts"]
    accepted = second["num_accepted_tokens"] - first["num_accepted_tokens"]
    assert found["lines"]["Tokens a second"] == [30]
    assert found["lines"]["Acceptance length"] == [pytest.approx(1 + accepted / drafts)]
    assert found["lines"]["KV cache in use"] == [100 * second["kv_cache_usage_ratio"]]
    assert sum(found["shares"]) == pytest.approx(accepted / drafts)
    assert found["left"] == 1, "a server that was restarted starts new lines"


def test_the_curl_command_of_the_page_is_the_request_it_sends(served: Served) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("NOT TESTED: there is no bash, so the page's curl command was not run")
    settings = {"speculate": True, "drafts": 2, "temperature": 0, "maxTokens": 8, "seed": 1}
    messages = [{"role": "user", "content": 'it\'s "quoted" & $HOME `x` \\ \n two'}]
    command = node(
        imports("api.mjs", "chatBody", "curlCommand")
        + f"console.log(JSON.stringify(curlCommand('http://h', chatBody({json.dumps(messages)}, {json.dumps(settings)}), true)));"
    )
    script = f"SPECDEC_API_KEY=secret; curl() {{ printf '%s\\0' \"$@\"; }}; {command}"
    arguments = subprocess.run([bash, "-c", script], capture_output=True, text=True, timeout=30, check=True).stdout.split("\0")
    assert arguments[1] == "http://h/v1/chat/completions"
    assert "Authorization: Bearer secret" in arguments
    body = json.loads(arguments[arguments.index("-d") + 1])
    assert body["messages"] == messages
    assert served.post(CHAT, body).status_code == 200


def test_events_are_found_whatever_the_pieces(served: Served) -> None:
    text = served.post(CHAT, SAY | {"stream": True}).text
    found = node(
        imports("api.mjs", "EventBuffer") + f"const text = {json.dumps(text)};\n"
        "const split = (size) => { const buffer = new EventBuffer(); const out = [];\n"
        "for (let at = 0; at < text.length; at += size) out.push(...buffer.push(text.slice(at, at + size))); return out; };\n"
        "console.log(JSON.stringify([1, 7, 1e9].map(split)));"
    )
    expected = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert found == [expected, expected, expected]
