# SPDX-License-Identifier: Apache-2.0
"""The live page of a server in a real browser: figures, curve and workers from made-up statuses, what changes from one
second to the next, a server that goes and comes back, names that try to be markup, light and dark, wide and narrow.

watch_fixture serves every status it is sent. Needs Chromium, its driver and selenium; the test is skipped without.
"""

import copy
import json
import os
import re
import subprocess

import pytest

pytest.importorskip("selenium.webdriver")
from browser_fixture import BrowserPage, needs_browser, start_browser  # noqa: E402

pytestmark = needs_browser
FIXTURE = os.environ.get("WATCH_FIXTURE", os.path.join(os.environ.get("GRADWIRE_BUILD", ""), "bin", "watch_fixture"))
HOSTILE = [
    "<img src=x onerror='window.struck=1'>",
    "</td></tr></table><script>window.struck=1</script>",
    '" onmouseover="window.struck=1',
    "\u202eright to left",
    "n" * 300,
    "",
]


def worker(number, **changes):
    return {
        "id": f"{number:08x}",
        "name": f"node-{number}",
        "peer": f"10.0.0.{number}:4{number:04}",
        "state": "present",
        "step": 12344,
        "staleness": number % 3,
        "lag_s": 0.3 * number,
        "updates": 12000 + number,
        "late": number % 4,
        "loss": 0.43 + 0.01 * number,
        "bytes_up": 40_000_000 + number,
        "bytes_down": 110_000_000,
        "joined_s": 4000.0,
        **changes,
    }


def status(**changes):
    made = {
        "version": 1,
        "name": "gradwire",
        "mode": "sync",
        "state": "training",
        "uptime_s": 7265.0,
        "step": 12345,
        "durable_step": 12300,
        "steps_per_s": 3.4216,
        "loss": 0.43214,
        "losses": [
            [step, 0.4 + 2 / (1 + step / 900) + 0.05 * ((step * 7919) % 13) / 13] for step in range(1, 12345, 40)
        ],
        "model": {"tensors": 65, "elements": 272474, "parts": 4},
        "up": "loggrid:k=2",
        "down": "unigrid:bits=8",
        "send": "weights",
        "workers": {
            "present": 3,
            "min": 2,
            "max": 64,
            "list": [worker(9, state="lost", loss=None), worker(1), worker(2, state="lagging", lag_s=14.2), worker(3)],
        },
        "bytes": {"up": 123_456_789, "down": 345_678_901, "fp32_up": 1_320_000_000, "fp32_down": 1_340_000_000},
        "staleness": {"mean": 0.4567, "max": 2, "bound": None},
        "ledger": {"computed": 1234.5, "applied": 1200.25, "held": 33.25, "lost": 1.0, "difference": 2e-12,
                   "magnitude": 9e4, "relative": 2.2e-17},
        "refused": {"late": 4, "corrupt": 0, "token": 1, "signature": 0, "version": 0, "full": 0, "oversize": 0},
        "checkpoint": {"path": "runs/ps.gwc", "every": 100, "saved": 123, "failed": 0, "last_error": None,
                       "last_s": 14.0, "bytes": 3_300_000},
        "memory_bytes": 152_000_000,
        "connections": 4,
    }  # fmt: skip
    return {**made, **changes}


class Served:
    """watch_fixture, with the status it was last given."""

    def __init__(self, first, port=0):
        self.process = subprocess.Popen([FIXTURE, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.write(first)
        self.port = int(self.process.stdout.readline())

    def write(self, what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def send(self, what):
        self.write(what)
        assert self.process.stdout.readline() == "ok\n"

    def stop(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def browser():
    driver = start_browser(reaches="127.0.0.1")
    yield driver
    driver.quit()


class Page(BrowserPage):
    def __init__(self, browser, first):
        super().__init__(browser)
        self.server, self.may_complain = Served(first), False
        browser.get(f"http://127.0.0.1:{self.server.port}/")
        self.wait("return document.querySelectorAll('#highlights > div').length > 0")

    def text(self, selector):
        return super().text(selector).replace("\u00a0", " ")

    def figures(self):
        """{name: (figure, words)} of the headline."""
        found = self.run(
            "return [...document.querySelectorAll('#highlights > div')]"
            ".map((box) => [...box.children].map((child) => child.textContent))"
        )
        return {name: (figure.replace("\u00a0", " "), words) for name, figure, words in found}

    def rows(self):
        return self.run(
            "return [...document.querySelectorAll('#workers tr')]"
            ".map((row) => [...row.cells].map((cell) => cell.textContent.replaceAll('\u00a0', ' ')))"
        )

    def close(self):
        try:
            if not self.may_complain:
                assert self.browser.get_log("browser") == []
            for entry in self.browser.get_log("performance"):
                message = json.loads(entry["message"])["message"]
                if message["method"] == "Network.requestWillBeSent":
                    asked = message["params"]["request"]["url"]
                    files = r"(|page\.css|page\.js|status\.json)"
                    ours = rf"http://127\.0\.0\.1:{self.server.port}/{files}|data:,?|about:blank"
                    assert re.fullmatch(ours, asked), asked
        finally:
            self.browser.get("about:blank")
            self.server.stop()


@pytest.fixture
def show(browser):
    pages = []

    def open_page(first):
        pages.append(Page(browser, first))
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()


def test_the_figures_come_first(show):
    page = show(status())
    assert page.text("#state") == "training" and page.browser.title == "step 12,345, training \u00b7 gradwire"
    assert page.text("#summary") == (
        "sync, up 2 h 1 min. Workers send loggrid:k=2; the server sends weights as unigrid:bits=8."
    )
    assert page.figures() == {
        "step": ("12,345", "on disk: 12,300"),
        "steps per second": ("3.42", "over the last minute"),
        "loss": ("0.4321", "mean of the workers"),
        "workers": ("3", "2 needed, 64 at most"),
        "bytes up": ("123 MB", "0.094 of fp32"),
        "bytes down": ("346 MB", "0.258 of fp32"),
        "staleness": ("0.457", "largest 2"),
        "ledger": ("ok", "off by 2.2e-17 relative"),
    }
    assert page.run("return document.querySelectorAll('.bad').length") == 0
    assert "no step" in page.text("#faults-lines")
    assert "4 late, 1 token" in page.text("#faults-lines") and "runs/ps.gwc" in page.text("#faults-lines")


def test_what_is_wrong_stands_out(show):
    wrong = status(state="waiting for workers", ledger={**status()["ledger"], "relative": 3.1e-5})
    wrong["workers"]["present"] = 1
    wrong["checkpoint"].update(failed=2, last_error="No space left on device")
    wrong.update(skipped_steps=7000, failed=True)
    page = show(wrong)
    assert page.figures()["ledger"] == ("off", "off by 3.1e-5 relative")
    bad = page.run("return [...document.querySelectorAll('.bad')].map((box) => box.children[0].textContent)")
    assert bad == ["workers", "ledger", "skipped", "failed", "difference"]
    assert "2, the last: No space left on device" in page.text("#faults-lines")
    assert "7,000 steps, not finite: more than half" in page.text("#faults-lines")


def test_the_curve_is_drawn_where_the_losses_are(show):
    page = show(status(losses=[[0, 2.0], [50, 1.0], [60, None], [70, 1.5], [100, 0.5]]))
    path = page.run("return document.querySelector('#curve .line').getAttribute('d')")
    assert re.fullmatch(r"M\S+ \S+L\S+ \S+M\S+ \S+L\S+ \S+", path), "a gap where there was no loss"
    x, y = zip(*[map(float, point.split()) for point in re.split("[ML]", path)[1:]])
    assert x == tuple(sorted(x)) and x[1] - x[0] == pytest.approx((x[3] - x[0]) / 2, abs=0.2)
    assert y[0] < y[2] < y[1] < y[3], "small losses are low"
    width, height = page.run("const box = document.getElementById('curve'); return [box.clientWidth, box.clientHeight]")
    assert 0 <= min(x) and max(x) <= width and 0 <= min(y) and max(y) <= height and max(x) - min(x) > 0.8 * width
    labels = page.run("return [...document.querySelectorAll('#curve text')].map((text) => text.textContent)")
    assert {"0.5", "1", "1.5", "2", "0", "20", "100"} <= set(labels)
    assert page.run("return document.getElementById('curve').getAttribute('aria-label')") == (
        "Loss from 2 at step 0 to 0.5 at step 100."
    )
    page.run(
        "const box = document.getElementById('curve'), at = box.getBoundingClientRect();"
        "box.dispatchEvent(new PointerEvent('pointermove', {clientX: at.left + arguments[0], clientY: at.top + 20}));",
        x[1],
    )
    assert page.text("#reading") == "Step 50: 1"


@pytest.mark.parametrize("losses", [[], [[5, 1.25]], [[5, 1.25], [6, 1.25]], [[0, 0], [1, 0]], [[1, None]]])
def test_few_or_equal_losses_are_no_trouble(show, losses):
    page = show(status(losses=losses, loss=None))
    assert page.figures()["loss"][0] == "\u2013"
    assert page.run("return document.querySelectorAll('#curve .mark').length") == int(
        any(loss is not None for _, loss in losses)
    )
    assert "NaN" not in page.run("return document.getElementById('curve').outerHTML")
    assert (page.text("#reading") == "No loss was reported yet.") == all(loss is None for _, loss in losses)


def test_losses_that_begin_anew_take_their_curve_with_them(show):
    page = show(status(losses=[]))
    assert page.run("return document.querySelector('figure').hidden")
    page.server.send(status())
    page.wait("return document.querySelectorAll('#curve .line').length === 1")
    page.server.send(status(losses=[]))
    page.wait("return document.querySelector('figure').hidden")
    assert page.text("#reading") == "No loss was reported yet."


def test_workers_have_rows_and_those_present_come_first(show):
    rows = show(status()).rows()
    assert [row[0] for row in rows] == ["node-1", "node-2", "node-3", "node-9"]
    assert rows[1] == [
        "node-2", "lagging", "12,344", "2", "14 s", "2", "12,002", "0.45", "40 MB", "110 MB", "10.0.0.2:40002",
    ]  # fmt: skip
    assert rows[3][1] == "lost" and rows[3][7] == "\u2013"


def test_it_is_live(show):
    now = status()
    page = show(now)
    page.run("document.querySelector('#workers tr').kept = 1")
    now = copy.deepcopy(now)
    now.update(step=12346, loss=0.125)
    now["losses"].append([12346, 0.125])
    now["workers"]["list"].append(worker(4))
    page.server.send(now)
    page.wait("return document.querySelector('#highlights .figure').textContent === '12,346'")
    assert page.figures()["loss"][0] == "0.125" and len(page.rows()) == 5
    assert "to 0.125 at step 12,346" in page.run("return document.getElementById('curve').getAttribute('aria-label')")
    assert page.run("return document.querySelector('#workers tr').kept") == 1, "rows are kept, a selection survives"
    now["workers"]["list"] = []
    page.server.send(now)
    page.wait("return !document.getElementById('no-workers').hidden")
    assert page.run("return document.getElementById('workers-box').hidden")


def test_a_server_that_goes_is_said_and_one_that_comes_back_is_shown(show):
    page = show(status())
    page.may_complain = True  # the browser notes every request that fails
    assert page.run("return document.getElementById('gone').hidden")
    page.server.stop()
    page.wait("return !document.getElementById('gone').hidden")
    said = page.text("#gone")
    assert re.match(r"The server does not answer since \d\d:\d\d:\d\d\.", said)
    assert page.figures()["step"][0] == "12,345", "the last figures stay"
    asked = page.run("return performance.getEntriesByType('resource').length")
    page.wait(f"return performance.getEntriesByType('resource').length > {asked} + 1")
    assert page.text("#gone") == said, "since the first failure, not the last"
    page.server = Served(status(step=20000), page.server.port)
    page.wait("return document.getElementById('gone').hidden")
    assert page.figures()["step"][0] == "20,000"
    assert not page.run("return document.body.classList.contains('old')")


def hostile():
    made = status(up=HOSTILE[0], down=HOSTILE[1], state=HOSTILE[1])
    made["workers"]["list"] = [
        worker(i, name=name, peer=name, state=name if i == 2 else "present") for i, name in enumerate(HOSTILE)
    ]
    made["checkpoint"].update(path=HOSTILE[0], failed=1, last_error=HOSTILE[1])
    made["refused"] = {HOSTILE[0]: 3}
    return made


def test_hostile_names_are_text(show):
    page = show(hostile())
    page.wait("return document.querySelectorAll('#workers tr').length === 6")
    assert {row[0] for row in page.rows()} == {name or f"{5:08x}" for name in HOSTILE}
    assert page.text("#state") == HOSTILE[1]
    assert page.run("return window.struck") is None
    assert page.run("return document.querySelectorAll('img, body script, [onerror], [onmouseover]').length") == 0


@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("made", [status, hostile])
def test_the_page_never_scrolls_sideways(show, width, made):
    page = show(made())
    page.width(width)
    page.wait(f"return innerWidth === {width} && document.querySelectorAll('#workers tr').length > 0")
    page.wait(  # until it is redrawn
        "return document.querySelector('#curve .grid').getAttribute('x2')"
        " <= document.getElementById('curve').clientWidth"
    )
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert page.run("""
        return [...document.body.querySelectorAll("*")].filter((element) =>
            element.getBoundingClientRect().right > innerWidth + 1 &&
          !element.closest(".scroll")).map((element) => element.outerHTML.slice(0, 200));""") == []  # fmt: skip


def test_columns_beyond_the_edge_are_announced(show):
    page = show(status())
    shaded = "return document.getElementById('workers-box').classList.contains('more')"
    announced = "return document.getElementById('beyond').getClientRects().length > 0"
    page.width(1400)
    page.wait("return innerWidth === 1400 && document.querySelectorAll('#workers tr').length > 0")
    page.wait(f"{announced} === false")
    page.width(400)
    page.wait(announced)
    page.wait(shaded)
    page.run("document.getElementById('workers-box').scrollLeft = 10000")
    page.wait(f"{shaded} === false")
    assert page.run(announced)


CONTRAST = """
    const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b]
      .map((c) => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
      .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
    const behind = (element) => {
      for (; element; element = element.parentElement) {
        const c = rgb(getComputedStyle(element).backgroundColor);
        if (c.length < 4 || c[3] > 0) return c;
      }
      return [255, 255, 255];
    };
    const poor = [];
    let seen = 0;
    for (const element of document.body.querySelectorAll("*")) {
      const words = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
      if (!element.getClientRects().length || !words) continue;
      const style = getComputedStyle(element), svg = element instanceof SVGElement;
      const [a, b] = [light(rgb(svg ? style.fill : style.color)), light(behind(element))].sort((x, y) => y - x);
      ++seen;
      if ((a + .05) / (b + .05) < 4.5) poor.push(element.outerHTML.slice(0, 120));
    }
    return {seen, poor, background: getComputedStyle(document.body).backgroundColor};"""


def test_text_is_readable_in_light_and_dark(show):
    wrong = status()
    wrong["workers"]["present"] = 1
    page = show(wrong)
    light = page.run(CONTRAST)
    page.emulate("dark")
    page.wait("return getComputedStyle(document.body).backgroundColor !== 'rgb(255, 255, 255)'")
    dark = page.run(CONTRAST)
    assert light["seen"] > 80 and dark["seen"] > 80 and light["poor"] == [] and dark["poor"] == []
    assert light["background"] == "rgb(255, 255, 255)" and dark["background"] != light["background"]
