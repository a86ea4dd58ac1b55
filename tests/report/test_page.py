"""The page: self-contained, markup in data stays text; in a browser it draws, sorts, and opens without a network."""

from __future__ import annotations

import re
import shutil

import pytest

from cbexp.report import load_runs
from cbexp.report.page import build_page
from tests.report.conftest import words_of

HOSTILE = (
    """<script>document.title='owned'</script><img src=x onerror="document.title='owned'"><b>bold</b>&lt;"""
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


def test_page_needs_nothing_else_escapes_markup_and_begins_with_the_winner(page_file):
    own = own_part(page_file.read_text(encoding="utf-8"))
    assert len(own) < 200_000
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!#)", own)
    assert "http" not in re.sub(r"http-equiv", "", own)
    assert "default-src 'none'" in own
    assert "owned" in own
    assert not re.search("<script>document|<img|<b>bold", own)
    winner = "Fastest of 5 configurations compile=reduce_overhead 396 output tokens/s"
    assert words_of(own[own.index("<main>") :]).startswith(winner)


def test_page_of_failures_alone(make_run):
    page = build_page(load_runs([make_run("1", status="killed", message="gone")]))
    assert "Runs without figures" in own_part(page)


# In a browser


@pytest.fixture
def page(page_file):
    """The page in headless Chromium, with what it said and asked for."""
    if BROWSER is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="dark")
        page.set_default_timeout(300_000)
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(page_file.as_uri())
        page.wait_for_function("document.querySelectorAll('.chart .main-svg').length > 0")
        yield page
        browser.close()


@pytest.mark.slow
def test_page_draws_all_its_charts_without_a_network_and_runs_no_markup(page, page_file):
    assert page.asked == [page_file.as_uri()]
    assert page.said == []
    ids = page.eval_on_selector_all(".chart", "divs => divs.map(div => div.dataset.chart)")
    assert ids == ["throughput_A", "roofline", "step_times", "time_use"]
    for chart_id in ids:
        marks = page.locator(f"[data-chart={chart_id}] :is(.point, .box, .lines) path").count()
        marks += page.locator(f"[data-chart={chart_id}] path:is(.point, .box, .js-line)").count()
        assert marks >= 5, chart_id
    assert HOSTILE in page.locator("#failures .reason").first.inner_text()
    ticks = page.locator("[data-chart=throughput_A] .ytick text")
    assert "name2=<script>" in (text := " ".join(ticks.all_text_contents())) and "&lt;script" not in text
    color = ticks.first.evaluate("text => getComputedStyle(text).fill")
    assert color == "rgb(230, 235, 241)"  # of the scheme
    box = page.locator("[data-chart=throughput_A] .bars .point").nth(4).bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator(".hoverlayer .hovertext").wait_for()
    assert "name2=<script>" in page.locator(".hoverlayer .hovertext").text_content()
    assert page.locator("main img, main script, main b b").count() == 0
    assert page.title() != "owned"


@pytest.mark.slow
def test_table_sorts_both_ways_and_a_row_opens_to_its_command(page):
    headings = page.locator("#table th").all_text_contents()

    def click(heading):
        page.locator("#table th button", has_text=heading).click()

    def column(heading):
        script = f"rows => rows.map(row => row.cells[{headings.index(heading)}].dataset.value)"
        values = page.eval_on_selector_all("tr.run", script)
        assert values[-1] == "None"  # whatever the order
        return [float(value) for value in values[:-1]]

    assert column("output tok/s") == sorted(column("output tok/s"), reverse=True)
    click("output tok/s")
    assert column("output tok/s") == sorted(column("output tok/s"))
    click("memory")
    assert column("memory") == sorted(column("memory"), reverse=True)
    sorting = page.locator("#table th").nth(headings.index("memory")).get_attribute("aria-sort")
    assert sorting == "descending"

    row = page.locator("tr.run", has_text="cuda_graph")
    opened = row.locator("xpath=following-sibling::tr")
    row.click()
    assert opened.inner_text().startswith("python -m cbexp model=tiny compile=cuda_graph")
    row.focus()
    page.keyboard.press("Enter")
    assert opened.is_hidden()
