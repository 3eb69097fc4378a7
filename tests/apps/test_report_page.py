# SPDX-License-Identifier: Apache-2.0
"""report.html in a real browser without a network: what is drawn, what the keyboard can do, light and dark, wide and
narrow, and names that try to be markup. Every test also fails if the browser reported an error or requested anything.

Needs Chromium, its driver and selenium (tools/setup.sh has them); the test is skipped without.
"""

import json

import pytest

from report_records import CODECS, comparison, record, save
from test_report import HOSTILE, report

pytest.importorskip("selenium.webdriver")
from browser_fixture import BrowserPage, needs_browser, start_browser  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

pytestmark = needs_browser
LABELS = [
    "fp32",
    "dqsgd:budget=4.5",
    "qsgd:bits=4",
    "optquant:bits=3 \u00b7 gather",
    "optquant:bits=3 \u00b7 scatter",
    "fft:theta=0.85",
    "casq:bits=2",
]
CHARTS = ["epochs", "bytes", "time", "split", "bits", "layers", "levels-3", "levels-4"]


@pytest.fixture(scope="module")
def browser():
    driver = start_browser()
    yield driver
    driver.quit()


class Page(BrowserPage):
    def __init__(self, browser, folder):
        super().__init__(browser)
        self.url = f"file://{folder}/report.html"
        browser.get(self.url)

    def chart(self, name):
        """Type, and the visible means: {label: [[x, y], ...]}."""
        shown = self.run(
            """
            const chart = Chart.getChart(document.querySelector("#figure-" + arguments[0] + " canvas"));
            const lines = [];
            for (const set of chart.data.datasets)
              if (!set.band) lines.push([set.label, set.data.map((p) => typeof p === "number" ? p : [p.x, p.y])]);
            return {type: chart.config.type, lines, labels: chart.data.labels,
                    bands: chart.data.datasets.filter((set) => set.band).length,
                    tick: chart.options.scales.x.ticks.color};""",
            name,
        )
        return {**shown, "lines": dict(shown["lines"])}  # a list until here: the driver sorts the names of an object

    def box(self, label):
        boxes = self.browser.find_elements(By.CSS_SELECTOR, "#legend input")
        return next(box for box in boxes if label in box.find_element(By.XPATH, "..").text)

    def check_quiet(self):
        assert self.browser.get_log("browser") == []
        assert self.run("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []
        for entry in self.browser.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                asked = message["params"]["request"]["url"]
                assert asked == self.url or asked.startswith("data:"), asked


@pytest.fixture
def show(browser, tmp_path):
    """show(runs): the page of these records; checked for complaints and requests when the test ends."""
    pages = []

    def open_page(runs):
        report(save(tmp_path, runs))
        pages.append(Page(browser, tmp_path))
        return pages[-1]

    yield open_page
    for page in pages:
        page.check_quiet()


@pytest.fixture
def page(show):
    return show(comparison())


# Charts --------------------------------------------------------------------------------------------------------------


def test_every_chart_is_drawn(page):
    assert page.run("return [...document.querySelectorAll('canvas')].map((canvas) => canvas.closest('figure').id)") == [
        f"figure-{name}" for name in CHARTS
    ]
    for name in CHARTS:
        inked = page.run(
            """
            const canvas = document.querySelector("#figure-" + arguments[0] + " canvas");
            const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const colours = new Set();
            let inked = 0;
            for (let i = 0; i < data.length; i += 4) {
              if (data[i + 3] === 0) continue;
              ++inked;
              colours.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
            }
            return [inked, colours.size];""",
            name,
        )
        assert inked[0] > 1500 and inked[1] > 5, (name, inked)


def test_the_link_speed_below_which_a_codec_pays_follows_from_its_bytes_and_seconds(page):
    for label in LABELS:
        series = page.run("return data.series.find((series) => series.label === arguments[0])", label)
        seconds = series["split"][1] + series["split"][3]
        for pays, rival in zip(series["pays"], (1, 0.5)):
            saved = max(0, rival * series["ratio"] - 1) * series["bytes"]
            assert pays == pytest.approx(saved * 8e-9 / seconds), label
    heads = page.run("return [...document.querySelectorAll('#headline thead th')].map((cell) => cell.textContent)")
    column = [head.startswith("Pays below") for head in heads].index(True)
    cells = page.run(
        "return [...document.querySelectorAll('#headline tbody tr')]"
        ".map((row) => row.children[arguments[0]].textContent)",
        column,
    )
    assert cells[0] == "never / never" and all(float(cell.split(" / ")[0]) > 0 for cell in cells[1:])


def test_charts_hold_the_means_of_all_series(page):
    runs = comparison()
    epochs = page.chart("epochs")
    assert list(epochs["lines"]) == LABELS and epochs["bands"] == 2 * len(LABELS)
    for points in epochs["lines"].values():
        assert [x for x, _ in points] == [1, 2, 3, 4, 5]
    values = [run["epochs"][4]["test_accuracy"] for run in runs if run["codec"] == "casq:bits=2"]
    assert epochs["lines"]["casq:bits=2"][4][1] == pytest.approx(sum(values) / 3)
    assert page.chart("bytes")["lines"]["fp32"][4][0] == pytest.approx(runs[0]["epochs"][4]["bytes_sent"])
    split = page.chart("split")
    assert (
        split["type"] == "bar"
        and len(split["labels"]) == len(LABELS)
        and list(split["lines"]) == ["compute", "encode", "wait", "decode"]
    )
    assert split["lines"]["wait"] == pytest.approx([1.3 * 5] * len(LABELS))
    assert list(page.chart("bits")["lines"]) == ["dqsgd:budget=4.5"], "only its bits change"
    layers = page.chart("layers")["lines"]
    assert layers["fp32"] == [], "exact: no place on a logarithmic axis"
    assert all(len(layers[label]) == 8 for label in LABELS[1:])
    assert len(page.chart("levels-3")["lines"][LABELS[3]]) == 5 * 7


def test_bits_that_stay_the_same_are_said_and_not_drawn(show):
    page = show([record(codec, collective=how) for codec in ("fp32", "qsgd:bits=4") for how in ("gather", "scatter")])
    assert page.run("return document.querySelectorAll('#figure-bits canvas').length") == 0
    assert "No codec that is shown changes its bits" in page.text("#figure-bits .finding")
    page.run("document.querySelector('#figure-bits details').open = true")
    assert "4.06" in page.text("#figure-bits table")


def test_a_colour_is_a_codec_and_dashes_are_a_collective(show):
    page = show([record(codec, collective=how) for codec in CODECS for how in ("gather", "scatter")])
    looks = page.run("return data.series.map((s) => [s.codec, s.collective, look(s).colour, look(s).mark, "
                     "look(s).dash.join()])")
    by_codec = {codec: {(colour, mark) for name, _, colour, mark, _ in looks if name == codec} for codec in CODECS}
    assert all(len(seen) == 1 for seen in by_codec.values())
    assert len(set.union(*by_codec.values())) == len(CODECS)
    dashes = {how: {dash for _, name, _, _, dash in looks if name == how} for how in ("gather", "scatter")}
    assert all(len(seen) == 1 for seen in dashes.values()) and dashes["gather"] != dashes["scatter"]


def test_the_link_changes_the_projected_times(page):
    data = page.run("return data")
    fp32 = next(series for series in data["series"] if series["label"] == "fp32")
    finding = None
    for number, words in enumerate(["100 Mb/s", "1 Gb/s", "10 Gb/s", "25 Gb/s"]):
        choice = page.browser.find_elements(By.CSS_SELECTOR, "#link input")[number]
        choice.send_keys(Keys.SPACE)
        assert [x for x, _ in page.chart("time")["lines"]["fp32"]] == [
            point["seconds"][number] for point in fp32["curve"]
        ]
        assert page.text("#figure-time .finding") != finding
        finding = page.text("#figure-time .finding")
        assert words in finding.replace("\u00a0", " ")
        assert words in page.run(
            "return document.querySelector('#figure-time canvas').getAttribute('aria-label')"
        ).replace("\u00a0", " ")
    assert "These times are projected, not measured" in page.text("section[aria-labelledby=time] p")


# Keyboard and screen reader ------------------------------------------------------------------------------------------


def test_the_keyboard_reaches_a_checkbox_that_hides_a_codec_in_all_charts(page):
    for _ in range(60):
        page.browser.switch_to.active_element.send_keys(Keys.TAB)
        if page.run("return document.activeElement.closest('#legend') !== null"):
            break
    page.browser.switch_to.active_element.send_keys(Keys.TAB)
    page.browser.switch_to.active_element.send_keys(Keys.SPACE)  # the second: dqsgd
    assert not page.box("dqsgd:budget=4.5").is_selected()
    for name in "epochs", "bytes", "time", "layers":
        assert list(page.chart(name)["lines"]) == [label for label in LABELS if label != "dqsgd:budget=4.5"], name
    assert "dqsgd:budget=4.5" not in page.chart("split")["labels"]
    assert page.run("return document.querySelector('#figure-bits .canvas').hidden"), "nothing else changes its bits"
    assert page.run("return document.activeElement.closest('#legend') !== null"), "the focus stays"
    page.browser.switch_to.active_element.send_keys(Keys.SPACE)
    assert list(page.chart("epochs")["lines"]) == LABELS and list(page.chart("bits")["lines"]) == ["dqsgd:budget=4.5"]


def test_a_codec_with_levels_can_be_hidden_and_everything_at_once(page):
    page.box(LABELS[3]).send_keys(Keys.SPACE)
    assert page.run("return document.getElementById('figure-levels-3')") is None
    for label in LABELS:
        if label != LABELS[3]:
            page.box(label).send_keys(Keys.SPACE)
    assert page.run("return document.querySelectorAll('canvas').length") == 0
    assert "Nothing of what is chosen" in page.text("#figure-epochs .finding")
    page.box("fp32").send_keys(Keys.SPACE)
    assert list(page.chart("epochs")["lines"]) == ["fp32"]


def test_every_chart_says_in_words_and_in_a_table_what_it_shows(page):
    for name in CHARTS:
        role, label, rows, caption = page.run(
            """
            const figure = document.getElementById("figure-" + arguments[0]), canvas = figure.querySelector("canvas");
            return [canvas.getAttribute("role"), canvas.getAttribute("aria-label"),
                    figure.querySelectorAll("details tbody tr").length,
                    figure.querySelector("details caption").textContent];""",
            name,
        )
        assert role == "img" and any(codec in label for codec in CODECS) and rows >= 1 and caption, name
    assert "91." in page.run("return document.querySelector('#figure-epochs canvas').getAttribute('aria-label')")


def test_tables_have_captions_heads_with_a_scope_and_cells_for_every_head(page):
    assert page.run("return document.querySelectorAll('table').length") >= 12
    assert page.run("""
        return [...document.querySelectorAll("table")].filter((table) => {
          const heads = [...table.querySelectorAll("thead th")], rows = [...table.querySelectorAll("tbody tr")];
          return !table.caption?.textContent || !heads.length ||
            heads.some((th) => th.scope !== "col" || !th.textContent) ||
            rows.some((row) => row.cells.length !== heads.length || row.cells[0].tagName !== "TH" ||
                               row.cells[0].scope !== "row");
        }).map((table) => table.outerHTML.slice(0, 300));""") == []
    assert page.run(
        "return [...document.querySelectorAll('.scroll')]"
        ".every((box) => box.tabIndex === 0 && box.getAttribute('aria-label'))"
    )
    assert (
        page.run("return document.documentElement.lang") == "en"
        and "6 codecs on fashion-mnist, cnn" in page.browser.title
    )


# What the tables say -------------------------------------------------------------------------------------------------


def test_the_first_table_has_the_results(page):
    rows = page.run(
        "return [...document.querySelectorAll('#headline tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    assert [row[0] for row in rows] == LABELS
    assert rows[0][2] == "reference" and rows[0][4] == "1.00\u00d7" and rows[0][7] == "gather"
    casq = dict(zip(LABELS, rows))["casq:bits=2"]
    assert (
        casq[1].startswith("90.9")
        and "\u00b1" in casq[1]
        and casq[2].startswith("\u22120.")
        and casq[3] == "2.08"
        and casq[4] == "15.4\u00d7"
    )
    assert rows[4][7] == "scatter" and rows[4][10] == "2 of 3", "one run is unfinished"
    assert "stopped after epoch 2" in page.text("#how")
    assert page.text("#how pre").startswith("gradwire compare --task fashion-mnist")


def test_one_seed_is_a_warning_in_yellow(show):
    page = show([record("fp32"), record("qsgd:bits=4")])
    assert "One seed" in page.text("#one-seed") and "--seeds" in page.text("#one-seed")
    red, green, blue = map(int, page.run(
        "return getComputedStyle(document.getElementById('one-seed')).backgroundColor.match(/\\d+/g)")[:3])
    assert min(red, green) > blue + 30, "yellow"


def test_several_seeds_need_no_warning(page):
    assert page.run("return document.getElementById('one-seed').hidden")


def test_the_page_says_which_program_made_it_when_and_where(show):
    made = {"gradwire": "9.8.7", "commit": "abc1234", "date": "2031-02-03T04:05:06Z", "host": "box"}
    page = show([record("fp32", 1, **made), record("qsgd:bits=4", 1, **{**made, "date": "2031-02-03T05:00:00Z"})])
    for place in "#made", "#how":
        for word in "9.8.7", "abc1234", "box", "2031-02-03 04:05:06 UTC to 2031-02-03 05:00:00 UTC":
            assert word in page.text(place), (place, word)


def test_the_page_says_what_compute_is_and_why_a_projection_is_sooner_than_the_clock(page):
    words = page.text("#compute-note")
    assert "median of all" in words and "noise of the machine" in words
    assert "shared the cores" in words and "by the clock" in words


def test_an_unfinished_codec_is_marked_as_such(show):
    page = show(
        [
            record("fp32"),
            record("qsgd:bits=4", epochs=2, finished=False),
            record("casq:bits=2", epochs=0, finished=False),
        ]
    )
    marked = page.run(
        "return [...document.querySelectorAll('#headline tbody tr')].filter((row) => row.querySelector('.badge'))"
        ".map((row) => row.querySelector('.code').textContent)"
    )
    assert sorted(marked) == ["casq:bits=2", "qsgd:bits=4"]
    assert "2 of them" not in page.text("#summary") and "1 of them finished" in page.text("#summary")
    assert "no epoch yet" in page.text("#how")


def test_nothing_finished_at_all_is_still_a_page(show):
    page = show([record("fp32", epochs=0, finished=False)])
    assert "none of them finished" in page.text("#summary")
    assert page.run("return document.querySelectorAll('canvas').length") == 0


def test_a_run_that_diverged_is_shown_as_not_a_number(show):
    diverged = record("qsgd:bits=4", metric="perplexity")
    for epoch in diverged["epochs"][2:]:
        epoch["test_loss"] = epoch["train_loss"] = None
    diverged["layers"][-1]["tensors"][0].update(error=None, cosine=None)
    page = show([record("fp32", metric="perplexity"), diverged])
    assert "not a number" in page.text("#headline")
    assert len(page.chart("epochs")["lines"]["qsgd:bits=4"]) == 2 and len(page.chart("epochs")["lines"]["fp32"]) == 5
    assert page.text("#epochs") == "Test perplexity by epoch"


def test_tasks_and_models_take_turns_in_the_charts_and_are_named_in_the_rows(show):
    page = show([record("fp32"), record("qsgd:bits=4"), record("fp32", task="text", model="gpt", metric="perplexity")])
    assert page.text("#headline").count("text") == 1 and page.text("#headline").count("fashion-mnist") == 2
    assert page.browser.find_element(By.ID, "group").is_displayed()
    assert len(page.chart("epochs")["lines"]) == 2
    page.browser.find_elements(By.CSS_SELECTOR, "#group input")[1].send_keys(Keys.SPACE)
    assert page.text("#epochs") == "Test perplexity by epoch" and len(page.chart("epochs")["lines"]) == 1
    assert page.run("return document.activeElement.name") == "group"


def test_one_task_needs_no_choice(page):
    assert not page.browser.find_element(By.ID, "group").is_displayed()


def test_one_worker_that_sends_nothing_is_no_trouble(show):
    run = record("fp32", workers=1)
    for epoch in run["epochs"]:
        epoch["bytes_sent"] = epoch["bits"] = 0
    page = show([run])
    assert "Nothing of what is chosen" in page.text("#figure-bytes .finding")


def test_names_that_are_markup_stay_text(show):
    run = record(
        HOSTILE,
        canonical=HOSTILE,
        machine=HOSTILE,
        task=HOSTILE,
        model=HOSTILE,
        command=HOSTILE,
        collective=HOSTILE,
        weights=HOSTILE,
    )
    run["layers"][-1]["tensors"][0]["name"] = HOSTILE
    run["tables"] = [
        {"step": 1, "side": HOSTILE, "codec": HOSTILE, "tensors": [HOSTILE], "lines": [HOSTILE], "levels": [-1, 0, 1]}
    ]
    page = show([run])
    assert page.run("return document.querySelectorAll('img, iframe, object').length") == 0
    assert page.run("return window.harmed === undefined")
    assert page.text("#headline .code") == HOSTILE and page.text("#how pre") == HOSTILE
    assert (
        HOSTILE in page.text("#title")
        and HOSTILE in page.text("#figure-layers table")
        and HOSTILE in page.text("#tables")
    )
    page.width(360)
    page.wait("return document.documentElement.scrollWidth <= 360")  # charts are redrawn after the window has changed


# Light, dark, narrow, paper ------------------------------------------------------------------------------------------

CONTRAST = """
    const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (rgb) => {
      const [r, g, b] = rgb.slice(0, 3).map((c) => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
      return .2126 * r + .7152 * g + .0722 * b; };
    const behind = (element) => { for (; element; element = element.parentElement) {
      const rgb = parse(getComputedStyle(element).backgroundColor);
      if (rgb.length < 4 || rgb[3] > 0) return rgb; } return [255, 255, 255]; };
    const ratio = (a, b) => {
      const [x, y] = [light(a), light(b)].sort((m, n) => n - m);
      return (x + .05) / (y + .05);
    };
    for (const details of document.querySelectorAll("details")) details.open = true;
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), poor = [];
    let seen = 0;
    for (let node; node = walker.nextNode();) {
      const element = node.parentElement;
      if (!node.data.trim() || !element.getClientRects().length) continue;
      if (["SCRIPT", "NOSCRIPT", "CANVAS"].includes(element.tagName)) continue;
      ++seen;
      const r = ratio(parse(getComputedStyle(element).color), behind(element));
      if (r < 4.5) poor.push([node.data.slice(0, 40), r]);
    }
    const hex = (text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));
    const tick = Chart.getChart(document.querySelector("canvas")).options.scales.x.ticks.color;
    if (ratio(hex(tick), behind(document.body)) < 4.5) poor.push(["ticks", tick]);
    return {seen, poor, background: getComputedStyle(document.body).backgroundColor, tick};"""


def test_text_is_readable_in_light_and_dark_and_charts_follow_a_change(page):
    light = page.run(CONTRAST)
    page.emulate("dark")
    page.wait(
        "return Chart.getChart(document.querySelector('canvas')).options.scales.x.ticks.color !== '"
        + light["tick"]
        + "'"
    )
    dark = page.run(CONTRAST)
    assert light["seen"] > 200 and dark["seen"] > 200
    assert light["poor"] == [] and dark["poor"] == []
    assert light["background"] == "rgb(255, 255, 255)" and dark["background"] != light["background"]


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_the_page_never_scrolls_sideways(page, width):
    page.width(width)
    page.browser.get(page.url)
    page.run("for (const details of document.querySelectorAll('details')) details.open = true;")
    page.wait(f"return document.documentElement.scrollWidth <= {width}")
    assert page.run("""
        return [...document.body.querySelectorAll("*")].filter((element) =>
          element.getBoundingClientRect().right > innerWidth + 1 &&
          !element.closest(".scroll, pre")).map((element) => element.outerHTML.slice(0, 200));""") == []


def test_a_table_that_is_cut_says_so_and_its_caption_is_whole(page):
    page.width(400)
    page.browser.get(page.url)
    page.wait("return document.querySelector('#headline .table').classList.contains('wide')")
    assert page.run("return getComputedStyle(document.querySelector('#headline .hint')).display") == "block"
    assert page.run("return document.querySelector('#headline .scroll').classList.contains('more')")
    assert page.run("""
        return [...document.querySelectorAll("caption span")].filter((span) => span.offsetParent &&
          span.getBoundingClientRect().right > innerWidth).map((span) => span.textContent);""") == []
    page.run("const box = document.querySelector('#headline .scroll'); box.scrollLeft = box.scrollWidth;")
    page.wait("return !document.querySelector('#headline .scroll').classList.contains('more')")
    page.width(1400)
    page.wait("return !document.querySelector('#projection .table').classList.contains('wide')")


def test_paper_is_light_even_when_the_screen_is_dark(page):
    page.emulate("dark")
    page.wait("return getComputedStyle(document.body).backgroundColor !== 'rgb(255, 255, 255)'")
    page.run(
        "window.seen = []; addEventListener('beforeprint', () => "
        "seen.push(Chart.getChart(document.querySelector('canvas')).data.datasets[0].borderColor));"
    )
    paper = page.browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert len(paper["data"]) > 50_000
    assert page.run("return seen") == ["#000000"], "fp32 is black on paper"
    assert (
        page.run("return Chart.getChart(document.querySelector('canvas')).data.datasets[0].borderColor") == "#FFFFFF"
    ), "and white again on a dark screen"
