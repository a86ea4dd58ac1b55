"""The page: self-contained, markup in data stays text; in a browser it draws, sorts, and opens without a network."""

from __future__ import annotations

import re
import shutil

import pytest

from cbexp.report import ReportError, load_runs
from cbexp.report.page import build_page

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><b>bold</b>&lt;"
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)


@pytest.fixture
def page_file(make_run, tmp_path):
    for index, mode in enumerate(("eager", "default", "cuda_graph", "reduce_overhead")):
        walls_s = tuple(wall_s / (1 + index) for wall_s in (1.0, 1.01, 1.02))
        overrides = ["model=tiny", f"compile={mode}"]
        make_run(f"sweep/{index}", overrides, walls_s, peak_allocated_gib=9.0 - index)
    hostile = {"warnings": [HOSTILE], "model": HOSTILE, "dataset": HOSTILE, "name": HOSTILE}
    environment = {"versions": {"torch": HOSTILE, HOSTILE: "1"}, "variables": {HOSTILE: HOSTILE}}
    overrides = ["model=tiny", f"name2={HOSTILE}"]
    make_run("sweep/8", overrides, (3.0, 3.0, 3.0), environment=environment, **hostile)
    bad = make_run("sweep/9", ["model=tiny", f"dataset.name={HOSTILE}"], status="failed", message=HOSTILE)
    (bad / "log.txt").write_text(f"line\n{HOSTILE}\n")
    path = tmp_path / "report.html"
    path.write_text(build_page(load_runs([tmp_path / "sweep"])), encoding="utf-8")
    return path


def own_part(text):
    """The page without plotly's script, which is a third party's."""
    return re.sub(r"<script>/\*\*.*?</script>", "", text, flags=re.DOTALL)


def test_page_needs_nothing_else_and_escapes_what_looks_like_markup(page_file):
    own = own_part(page_file.read_text(encoding="utf-8"))
    assert len(own) < 200_000
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!#)", own)
    assert "http" not in re.sub(r"http-equiv", "", own)
    assert "default-src 'none'" in own
    assert "owned" in own
    assert not re.search("<script>document|<img|<b>bold", own)


def test_winner_is_the_first_thing_on_the_page(page_file):
    own = own_part(page_file.read_text(encoding="utf-8"))
    words = " ".join(re.sub(r"<[^>]+>", "", own[own.index("<main>") :]).split())
    assert words.startswith("Fastest of 5 configurations compile=reduce_overhead 396 output tokens/s")


def test_page_of_failures_alone_and_of_nothing(make_run):
    page = build_page(load_runs([make_run("1", status="killed", message="gone")]))
    assert "Runs without figures" in own_part(page)
    with pytest.raises(ReportError, match="no runs"):
        build_page([])


# In a browser


@pytest.fixture
def open_page(page_file):
    """Opens the page in headless Chromium; returns it with what it said and asked for."""
    if BROWSER is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])

        def open_(color_scheme="light"):
            page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme=color_scheme)
            page.set_default_timeout(300_000)
            page.said, page.asked = [], []
            page.on("console", lambda message: page.said.append(message.text))
            page.on("pageerror", lambda error: page.said.append(str(error)))
            page.on("request", lambda request: page.asked.append(request.url))
            page.goto(page_file.as_uri())
            page.wait_for_function("document.querySelectorAll('.chart .main-svg').length > 0")
            return page

        yield open_
        browser.close()


@pytest.mark.slow
def test_page_draws_all_its_charts_without_a_network_and_runs_no_markup(open_page, page_file):
    page = open_page()
    assert page.asked == [page_file.as_uri()]
    assert page.said == []
    ids = page.eval_on_selector_all(".chart", "divs => divs.map(div => div.dataset.chart)")
    assert ids == ["throughput_A", "roofline", "step_times", "time_use"]
    for chart_id in ids:
        marks = page.locator(f"[data-chart={chart_id}] :is(.point, .box, .lines) path").count()
        marks += page.locator(f"[data-chart={chart_id}] path:is(.point, .box, .js-line)").count()
        assert marks >= 5, chart_id
    assert HOSTILE in page.locator("#failures .reason").first.inner_text()
    ticks = " ".join(page.locator("[data-chart=throughput_A] .ytick").all_text_contents())
    assert "name2=<script>" in ticks and "&lt;script" not in ticks
    box = page.locator("[data-chart=throughput_A] .bars .point").nth(4).bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator(".hoverlayer .hovertext").wait_for()
    assert "name2=<script>" in page.locator(".hoverlayer .hovertext").text_content()
    assert page.locator("main img, main script, main b b").count() == 0
    assert page.title() != "owned"


@pytest.mark.slow
def test_table_sorts_both_ways_and_a_row_opens_to_its_command(open_page):
    page = open_page()

    def column(index):
        return page.eval_on_selector_all(
            "tr.run", f"rows => rows.map(row => row.cells[{index}].dataset.value)"
        )

    def numbers(index):
        return [float(value) for value in column(index) if value not in ("None", "")]

    headings = page.locator("#table th").all_text_contents()
    throughput, memory = headings.index("output tok/s"), headings.index("memory")
    assert numbers(throughput) == sorted(numbers(throughput), reverse=True)
    page.locator("#table th button", has_text="output tok/s").click()
    assert numbers(throughput) == sorted(numbers(throughput))
    assert column(throughput)[-1] == "None"
    page.locator("#table th button", has_text="memory").click()
    assert numbers(memory) == sorted(numbers(memory), reverse=True)
    assert column(memory)[-1] == "None"
    assert page.locator("#table th").nth(memory).get_attribute("aria-sort") == "descending"
    page.locator("#table th button", has_text="status").click()
    assert column(2) == sorted(column(2))

    row = page.locator("tr.run", has_text="cuda_graph")
    opened = row.locator("xpath=following-sibling::tr")
    row.click()
    assert opened.inner_text().startswith("python -m cbexp model=tiny compile=cuda_graph")
    row.focus()
    page.keyboard.press("Enter")
    assert opened.is_hidden()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_schemes(open_page, scheme):
    """WCAG AA: 4.5 to 1 for text, of the page's own colours on the card."""
    page = open_page(scheme)
    names = ["card", "text", "muted", "accent", "fastest", "bad", "warn"]
    values = page.evaluate(
        "names => names.map(name => getComputedStyle(document.documentElement).getPropertyValue('--' + name))",
        names,
    )
    colors = dict(zip(names, map(str.strip, values), strict=True))
    for name in ("text", "muted", "accent", "bad", "warn"):
        assert contrast(colors[name], colors["card"]) >= 4.5, name
    assert contrast(colors["fastest"], colors["card"]) >= 3.0
    tick = page.locator("[data-chart=throughput_A] .ytick text").first
    red, green, blue = rgb(colors["text"])
    assert tick.evaluate("text => getComputedStyle(text).fill") == f"rgb({red}, {green}, {blue})"


def rgb(color):
    return [int(color[index : index + 2], 16) for index in (1, 3, 5)]


def luminance(color):
    parts = [value / 255 for value in rgb(color)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
