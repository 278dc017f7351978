"""Every view of the page in Chromium: light, dark and narrow, on disk and live, with search."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.view.page import load, write_page
from megarl.view.page_server import Server
from megarl.view.view_runs import load_spans

sys.path.append(str(Path(__file__).resolve().parent))

import example_run  # noqa: E402
from headless_browser import Browser  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.alone, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]
WIDTHS = {"light": (1400, "light"), "dark": (1400, "dark"), "narrow": (390, "light")}
TABS = "[...document.querySelectorAll('#tabs button')].map((button) => button.textContent)"
MIN_CONTRAST = 4.5
"""That of WCAG 2, level AA."""
CONTRAST = """(() => {
  // Returns red, green and blue from 0 to 1 and alpha of a CSS color.
  const parse = (text) => {
    const [r, g, b, alpha = 1] = text.match(/[\\d.]+/g).map(Number);
    const isUnit = text.startsWith("color(");
    return [...[r, g, b].map((value) => (isUnit ? value : value / 255)), alpha];
  };
  const blend = ([r, g, b, alpha], below) => [r, g, b].map((value, i) => alpha * value + (1 - alpha) * below[i]);
  const findBackground = (element) => {
    if (!element) return [1, 1, 1];
    const color = parse(getComputedStyle(element).backgroundColor);
    return color[3] === 1 ? color.slice(0, 3) : blend(color, findBackground(element.parentElement));
  };
  const getLuminance = (color) => {
    const [r, g, b] = color.map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const measure = (element) => {
    const background = findBackground(element);
    const color = blend(parse(getComputedStyle(element).color), background);
    const [low, high] = [getLuminance(color), getLuminance(background)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const selectors = ["#tabs button.selected", "#tabs button:not(.selected)", "#status", "h3", ".muted", "mark",
    ".grid .head span", ".rows .row span", ".message .text", ".tokens span", ".keys td", ".error", "pre", "dt", "dd"];
  const isVisible = (element) => element.getClientRects().length && element.textContent.trim();
  const found = selectors.flatMap((selector) => {
    const element = [...document.querySelectorAll(selector)].find(isVisible);
    return element ? [[selector, measure(element)]] : [];
  });
  return Object.fromEntries(found);
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    running = Browser(CHROMIUM, tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = example_run.write_run(tmp_path_factory.mktemp("runs") / "first")
    for step, rewards in ((0, (0.0, 0.5)), (3, (1.0, 0.25))):
        example_run.write_evaluation(run, step, rewards)
    answer = {"role": "assistant", "content": "The Needle is 42."}
    question = {"role": "user", "content": "Where is the haystack?"}
    rollout = example_run.make_rollout(4, 0, 2.5, name="hay")
    prompt = dataclasses.replace(rollout.prompt, messages=(question,))
    rollout = dataclasses.replace(rollout, prompt=prompt, messages=(question, answer))
    example_run.write_step(run, 4, [rollout])
    (run / "code").mkdir()
    (run / "code/reward.py").write_text("x = 1\n" * 3 + "y" * 500)
    return run


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Path:
    file = run_dir.parent / "page.html"
    other = example_run.write_run(run_dir.parent / "second", last_response=(3, 5, 5))
    write_page([load(run_dir, load_spans), load(other, load_spans)], file)
    return file


@pytest.fixture(scope="module")
def server(run_dir: Path) -> Iterator[Server]:
    with Server([run_dir], 0, load_spans) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def open_tab(browser: Browser, tab: str) -> None:
    browser.evaluate(f"megarl.showView({json.dumps(tab)})")
    selected = "document.querySelector('#tabs button.selected').textContent"
    assert browser.evaluate(selected) == tab
    browser.wait("!document.querySelector('#views > :not([hidden])').textContent.includes('Loading')")


def type_text(browser: Browser, selector: str, text: str) -> None:
    browser.evaluate(
        f"""(() => {{
          const field = [...document.querySelectorAll({json.dumps(selector)})].find((element) => element.offsetParent);
          field.value = {json.dumps(text)};
          field.dispatchEvent(new Event("input"));
        }})()"""
    )


def wait_for_count(browser: Browser, start: str) -> str:
    """Wait until the visible count of matches begins like this, and return it."""
    visible = "[...document.querySelectorAll('.matches')].find((element) => element.offsetParent)?.textContent"
    browser.wait(f"({visible} ?? '').startsWith({json.dumps(start)})")
    return str(browser.evaluate(visible))


@pytest.mark.parametrize("look", WIDTHS)
@pytest.mark.parametrize("is_live", [False, True], ids=["page", "live"])
def test_every_tab(browser: Browser, page: Path, server: Server, look: str, is_live: bool) -> None:
    width, theme = WIDTHS[look]
    browser.open(server.address if is_live else page.as_uri(), width, 900, theme)
    tabs = browser.evaluate(TABS)
    first, last = (["Live"], []) if is_live else ([], ["Compare"])
    assert tabs == [*first, "Curves", "Time", "Rollouts", "Held-out", "Prompts", *last, "Configuration", "Files"]
    contrasts = {}
    for tab in tabs:
        open_tab(browser, tab)
        overflow = browser.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, f"{tab} is {overflow} pixels too wide"
        contrasts |= {(tab, name): ratio for name, ratio in browser.evaluate(CONTRAST).items()}
    assert browser.errors == []
    assert len(contrasts) > 20
    poor = {place: round(ratio, 2) for place, ratio in contrasts.items() if ratio < MIN_CONTRAST}
    assert not poor


def test_run_without_rollouts_has_no_tabs_for_them(browser: Browser, tmp_path: Path) -> None:
    run = load(example_run.write_sft_run(tmp_path / "sft"), load_spans)
    write_page([run], tmp_path / "page.html")
    browser.open((tmp_path / "page.html").as_uri())
    assert browser.evaluate(TABS) == ["Curves", "Time", "Configuration", "Files"]
    assert browser.evaluate("document.querySelector('#tabs button.selected').textContent") == "Curves"
    assert browser.evaluate("document.querySelector('.charts h3').firstChild.textContent") == "actor/nll"
    assert browser.evaluate("document.getElementById('notes').hidden") is True
    assert "rollouts" not in browser.evaluate("document.getElementById('status').textContent")


def test_titles_of_charts_stay_in_their_cards(browser: Browser, tmp_path: Path) -> None:
    runs = [example_run.write_run(tmp_path / name) for name in ("first", "second")]
    for run in runs:  # bands that no guard watches have the longest titles
        config = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(config.replace("alarms: true", "alarms: false"))
        rows = [{"step": step, "time": step, "actor/advantage_variance": 1 / (step + 6)} for step in range(1, 4)]
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    write_page([load(run) for run in runs], tmp_path / "page.html")
    browser.open((tmp_path / "page.html").as_uri(), width=1300)
    titles = browser.evaluate("[...document.querySelectorAll('.charts h3')].map((title) => title.textContent)")
    assert "actor/advantage_variancelast 0.1111 and 0.1111, typical ≤ 1PNG" in titles
    wide = "[...document.querySelectorAll('.card')].filter((card) => card.scrollWidth > card.clientWidth).length"
    assert browser.evaluate(wide) == 0
    assert browser.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_contrast_is_measured(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    browser.evaluate("document.getElementById('status').style.color = 'rgb(170, 170, 170)'")
    assert browser.evaluate(CONTRAST)["#status"] == pytest.approx(2.32, abs=0.02)


def test_overflow_and_errors_are_noticed(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri(), width=390)
    browser.evaluate("document.body.append(Object.assign(el('div', {}, 'x'), { style: 'width: 800px' }))")
    assert browser.evaluate("document.documentElement.scrollWidth - innerWidth") > 0
    browser.evaluate("setTimeout(() => { throw new Error('on purpose'); })")
    browser.wait("true")
    browser.evaluate("new Promise((resolve) => setTimeout(resolve, 50))")
    assert any("on purpose" in error for error in browser.errors)


@pytest.mark.parametrize("is_live", [False, True], ids=["page", "live"])
def test_search(browser: Browser, page: Path, server: Server, is_live: bool) -> None:
    browser.open(f"{server.address if is_live else page.as_uri()}#Rollouts")
    type_text(browser, "input[type=search]", "needle")
    assert wait_for_count(browser, "1 rollout has") == "1 rollout has “needle”; searched 13 of 13 "
    assert browser.evaluate("document.querySelector('.hits mark').textContent") == "Needle"
    assert browser.evaluate("document.querySelector('.hits .snippet').textContent") == "assistant: The Needle is 42."
    browser.wait("document.querySelector('.detail h3')?.textContent === 'step 4, rollout 0'")
    type_text(browser, "input[type=text]", "step<4")
    assert wait_for_count(browser, "0 rollouts have") == "0 rollouts have “needle”; searched 12 of 12 "
    type_text(browser, "input[type=search]", "document.title=")
    assert wait_for_count(browser, "12 rollouts have").endswith("searched 12 of 12 ")
    assert "RAN" not in browser.evaluate("document.title")
    type_text(browser, "input[type=search]", "")
    assert wait_for_count(browser, "12 of") == "12 of 13 rollouts"
    assert browser.evaluate("document.querySelector('.hits').offsetParent") is None and browser.errors == []


def test_search_pages_on(browser: Browser, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.view.text_search.search.__defaults__", (None, None, 5, 60.0))
    browser.open(f"{server.address}#Rollouts")
    type_text(browser, "input[type=search]", "img src")
    assert wait_for_count(browser, "5 rollouts").endswith("searched 6 of 13 more")
    for shown in (10, 12):
        browser.evaluate("document.querySelector('.matches button').click()")
        wait_for_count(browser, f"{shown} rollouts")
    assert browser.evaluate("document.querySelector('.matches button')") is None
    assert browser.evaluate("document.querySelectorAll('.hits .snippet').length") == 12


def test_static_page_searches_the_texts_that_it_has(browser: Browser, run_dir: Path, tmp_path: Path) -> None:
    write_page([load(run_dir)], tmp_path / "page.html", max_rollouts=4)
    browser.open(f"{(tmp_path / 'page.html').as_uri()}#Rollouts")
    type_text(browser, "input[type=search]", "needle")
    count = wait_for_count(browser, "1 rollout has")
    assert re.search(r"searched [1-4] of 13; the page has no text of the others", count), count


@pytest.mark.parametrize("is_live", [False, True], ids=["page", "live"])
def test_held_out_rollouts_by_set_step_and_mode(browser: Browser, page: Path, server: Server, is_live: bool) -> None:
    browser.open(f"{server.address if is_live else page.as_uri()}#Held-out")
    assert wait_for_count(browser, "4 of 4") == "4 of 4 rollouts, mean reward 0.4375"
    browser.wait("document.querySelector('.detail h3')?.textContent === 'step 3, rollout 0'")
    for column, value, expected in (
        ("mode", "greedy", "2 of 4 rollouts, mean reward 0.5"),
        ("step", "3", "1 of 4 rollouts, mean reward 1"),
        ("source", "sums", "1 of 4 rollouts, mean reward 1"),
    ):
        browser.evaluate(
            f"""(() => {{
              const selector = document.querySelector("select[data-column={column}]");
              selector.value = "{value}";
              selector.dispatchEvent(new Event("change"));
            }})()"""
        )
        assert wait_for_count(browser, expected[:6]) == expected
    field = "[...document.querySelectorAll('input[type=text]')].find((element) => element.offsetParent).value"
    assert browser.evaluate(field) == "mode='greedy' and step=3 and source='sums'"
    type_text(browser, "input[type=search]", "IMG SRC")
    assert wait_for_count(browser, "1 rollout has").endswith("searched 1 of 1 ") and browser.errors == []


def test_prompts_by_their_words(browser: Browser, page: Path) -> None:
    browser.open(f"{page.as_uri()}#Prompts")
    assert wait_for_count(browser, "3 of 3") == "3 of 3 prompts"
    type_text(browser, "input[type=search]", "HAYSTACK where")
    wait_for_count(browser, "1 of 3")
    cells = "[...document.querySelectorAll('.rows .row span')].filter((cell) => cell.offsetParent)"
    first = browser.evaluate(f"{cells}.slice(0, 2).map((cell) => cell.textContent)")
    assert first == ["Where is the haystack?", "hay0"]
    type_text(browser, "input[type=search]", "hay0 nowhere")
    wait_for_count(browser, "0 of 3")
    assert browser.errors == []


def test_live_page_follows_a_run(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.view.page_server.REFRESH_S", 0.0)
    run = example_run.write_run(tmp_path / "live")
    (run / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    (run / "live").mkdir()
    status = {"rank": 0, "step": 4, "phase": "actor_update", "category": "actor", "since": time.time() - 7}
    status |= {"time": time.time(), "running": 12, "waiting": 34, "conversations": 46, "cache_usage": 0.5}
    (run / "live/rank_00000.json").write_text(json.dumps(status))
    with Server([run]) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        browser.open(server.address)
        text = browser.evaluate("document.querySelector('.live').textContent")
        assert "actor update" in text and "50 %" in text and "34" in text
        assert "above 0.6" in text and "lower loss.entropy_coef" in text, "a metric outside its band, with its remedy"
        assert "2026-01-01 10:00:00 step 2: actor/entropy is 0.7" in text and "step 3, rollout 0: reward 0" in text
        example_run.write_step(run, 4, [example_run.make_rollout(4, 0, 9.0)])
        (run / "live/rank_00000.json").write_text(json.dumps({**status, "phase": "generate"}))
        with (run / "log.txt").open("a") as log:
            log.write("2026-01-01 11:00:00  ALARM: step 4: something else\n")
        browser.wait("document.querySelector('.live').textContent.includes('step 4, rollout 0: reward 9')")
        text = browser.evaluate("document.querySelector('.live').textContent")
        assert "generate" in text and "something else" in text and "actor update" not in text
        status_text = browser.evaluate("document.getElementById('status').textContent")
        assert status_text == "grpo, step 3, 13 rollouts, running, live"
        assert browser.errors == []
        server.shutdown()
        thread.join()
