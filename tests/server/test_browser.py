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
        page.press("right")
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


TOO_PALE = """
const channels = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (element) => {
  const layers = [];
  for (let at = element; at; at = at.parentElement) layers.push(channels(getComputedStyle(at).backgroundColor));
  return layers.reverse().reduce((under, [r, g, b, a = 1]) => [r, g, b].map((c, i) => c * a + under[i] * (1 - a)), [255, 255, 255]);
};
return [...document.querySelectorAll('body *')].filter((e) => e.checkVisibility() && !e.disabled
  && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())).map((e) => {
    const [a, b] = [light(channels(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.outerHTML.slice(0, 80)];
  }).filter(([ratio]) => ratio < 4.5);
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_on_the_page_can_be_read(page: Browser, paced: Served, scheme: str) -> None:
    """Colours as they come out, coloured drafts on whatever lies behind them included: WCAG's 4.5 to 1."""
    page.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    try:
        ready(page, paced)
        page.click("#show-rejected")
        page.write("#prompt", "hello" + KEYS["enter"])
        page.wait("return !document.getElementById('send').disabled && document.querySelectorAll('#log .draft').length > 0")
        for tab in ("chat", "race", "charts", "config"):
            page.click(f"#tab-{tab}")
            assert page.run(TOO_PALE) == [], tab
        page.run("document.body.style.color = '#999'; document.body.style.background = '#aaa'")
        assert page.run(TOO_PALE), "the measure sees a pale page"
    finally:
        page.devtools("Emulation.setEmulatedMedia", features=[])


def test_every_control_is_named_reached_by_tab_and_shows_that_it_is(page: Browser, paced: Served) -> None:
    """Names are those of the accessibility tree, which is what a screen reader says."""
    ready(page, paced)
    page.run("for (const e of document.querySelectorAll('details')) e.open = true")
    roles = {"button", "tab", "textbox", "spinbutton", "checkbox"}
    nodes = page.devtools("Accessibility.getFullAXTree")["nodes"]
    controls = [node for node in nodes if not node["ignored"] and node["role"]["value"] in roles]
    assert len(controls) >= 15
    assert [node for node in controls if not node["name"]["value"].strip()] == []
    wanted = (
        "return [...document.querySelectorAll('#panel-chat button, #panel-chat input, #panel-chat textarea, #panel-chat summary')]"
        ".filter((e) => !e.disabled && e.checkVisibility()).map((e) => e.id || e.textContent)"
    )
    focused = (
        "const e = document.activeElement; const s = getComputedStyle(e);"
        "return [e.id || e.textContent, s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0]"
    )
    page.run("document.getElementById('tab-chat').focus()")
    reached = {}
    for _ in range(40):
        page.press("tab")
        name, is_shown = page.run(focused)
        reached[name] = is_shown
    assert set(page.run(wanted)) <= set(reached)
    assert [name for name in page.run(wanted) if not reached[name]] == [], "focus must be seen"


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
