"""The playground in a headless Chromium: type, stream, see drafts coloured, race, watch charts, with keyboard, phone and dark mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdec.server.options import ServerOptions
from tests.server.browser import KEYS, Browser, browser, programs
from tests.server.serving import Served, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    """One browser for the module; each test opens its own page."""
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def paced() -> Iterator[Served]:
    """A server slow enough for charts to move while it answers."""
    programs()
    with serving(delay_s=0.02) as running:
        yield running


def ready(page: Browser, served: Served) -> None:
    page.errors()  # of the page before
    page.open(served.url + "/")
    page.wait("return document.getElementById('what-runs').textContent.startsWith('toy on cpu')")


def test_chat_streams_and_colours_accepted_drafts(page: Browser, paced: Served) -> None:
    ready(page, paced)
    page.write("#prompt", "hello" + KEYS["enter"])
    page.wait("return !document.getElementById('send').disabled && document.querySelector('#log .figures')?.textContent.includes('tok/s')")
    shown = page.run("return document.querySelector('#log .answer').textContent")
    kept = page.run("return [...document.querySelectorAll('#log .answer .rejected')].map((e) => e.textContent).join('')")
    assert shown
    assert kept, "the toy drafter is wrong now and then"
    coloured = page.run(
        "const e = document.querySelector('#log .answer .draft.s0'); const s = getComputedStyle(e);"
        "return [e.textContent, s.backgroundColor, s.textDecorationLine]"
    )
    assert coloured[0]
    assert coloured[1] != "rgba(0, 0, 0, 0)"
    assert coloured[2] == "underline"
    assert "drafted by ngram" in page.run("return document.getElementById('legend').textContent")
    visible = "return getComputedStyle(document.querySelector('#log .rejected')).display"
    assert page.run(visible) == "none"
    page.click("#show-rejected")
    assert page.run(visible) == "inline"
    assert '"role":"user","content":"hello"' in page.run("return document.getElementById('curl').textContent")
    assert page.errors() == []


def test_stop_ends_the_answer_and_frees_the_engine(page: Browser, paced: Served) -> None:
    ready(page, paced)
    page.run("document.getElementById('max-tokens').value = 200")
    page.write("#prompt", "again")
    page.click("#send")
    page.wait("return document.querySelector('#log .answer').textContent.length > 3")
    page.click("#stop")
    page.wait("return document.querySelector('#log .error') !== null || !document.getElementById('send').disabled")
    paced.wait_idle(5)


def test_the_race_gives_the_same_text_twice_and_a_verdict(page: Browser, paced: Served) -> None:
    ready(page, paced)
    page.click("#tab-race")
    page.run("document.getElementById('race-prompt').value = 'abc'")
    page.click("#race-start")
    verdict = page.wait("return document.getElementById('verdict').textContent")
    assert verdict.startswith("Both gave the same text. With speculation the tokens came ")
    assert page.run("return document.querySelectorAll('#lane-off .draft').length") == 0
    assert page.run("return document.querySelectorAll('#lane-on .draft').length") > 0
    assert page.errors() == []


def test_tabs_work_by_keyboard_and_charts_move(page: Browser, paced: Served) -> None:
    ready(page, paced)
    page.run("document.getElementById('tab-chat').focus()")
    for _ in range(2):
        page.run("return document.activeElement.id")
        page.command(
            "actions",
            {
                "actions": [
                    {
                        "type": "key",
                        "id": "k",
                        "actions": [{"type": "keyDown", "value": KEYS["right"]}, {"type": "keyUp", "value": KEYS["right"]}],
                    }
                ]
            },
        )
    assert page.run("return document.activeElement.id") == "tab-charts"
    paced.post("/v1/completions", {"prompt": "abc", "max_tokens": 120, "ignore_eos": True})
    page.wait("return [...document.querySelectorAll('#charts output')].filter((o) => o.textContent !== '–').length === 8")
    painted = (
        "return [...document.querySelectorAll('#charts canvas')].map((c) =>"
        " new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size)"
    )
    assert min(page.run(painted)) > 2, "each chart has an axis and a line"
    labels = page.run("return [...document.querySelectorAll('#charts canvas')].map((c) => c.getAttribute('aria-label'))")
    assert any(label.startswith("Acceptance by position: ") for label in labels)
    assert page.errors() == []


def test_a_phone_scrolls_in_one_direction_only_and_dark_mode_is_dark(page: Browser, paced: Served) -> None:
    page.devtools("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    page.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    try:
        ready(page, paced)
        for tab in ("race", "charts", "config", "chat"):
            page.click(f"#tab-{tab}")
            assert page.run("return document.documentElement.scrollWidth <= window.innerWidth"), tab
        assert page.run("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        small = (
            "return [...document.querySelectorAll('button')].filter((b) => b.offsetParent && b.getBoundingClientRect().height < 44).length"
        )
        assert page.run(small) == 0, "fingers need 44 pixels"
    finally:
        page.devtools("Emulation.clearDeviceMetricsOverride")
        page.devtools("Emulation.setEmulatedMedia", features=[])


def test_a_server_with_keys_asks_for_one_and_then_works(page: Browser) -> None:
    with serving(options=ServerOptions(api_keys=("letmein",))) as served:
        page.open(served.url + "/")
        page.wait("return !document.getElementById('key-field').hidden")
        assert "API key is missing" in page.run("return document.getElementById('notice').textContent")
        page.write("#key", "letmein")
        page.wait("return document.getElementById('what-runs').textContent.startsWith('toy on cpu')")
        page.write("#prompt", "hello" + KEYS["enter"])
        page.wait("return document.querySelector('#log .draft') !== null")
        assert "letmein" not in page.run("return document.getElementById('curl').textContent")
        assert all("401" in error for error in page.errors())
        page.open("about:blank")
