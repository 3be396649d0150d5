"""The page on runs in a real Chromium: it loads, filters, compares, grows with a run, and works
with the keyboard alone.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from tests.support.browsers import MISSING, chromium
from tests.support.hostile import HOSTILE, SHOWN
from tests.support.view_runs import append, group, make_large, make_run, metrics, served
from torchrl_grpo.extras.report.report import write_report

if MISSING is None:
    from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Locator, Page, Route

pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
VIEWS = ("curves", "groups", "tokens?row=1", "timeline", "alarms", "config")
FIRST_PAINT_S = 300.0  # 1 on an idle machine (benchmarks/bench_view.py): here it must only not hang


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    first = make_run(folder / "one", steps=30)
    append(
        first,
        "samples.jsonl",
        group(30, "add", ['<tool_call>{"name": "add"}</tool_call>[5]so 5', "x\n\ny"], group=99),
    )
    append(first, "samples.jsonl", group(30, HOSTILE, [HOSTILE], group=100))
    append(
        first,
        "metrics.jsonl",
        [metrics(step) | {"rollout/truncated": 0.9} for step in range(31, 40)],
    )
    return [first, make_run(folder / "two", steps=20, rate="1e-3")]


@pytest.fixture(scope="module")
def address(runs: list[Path]) -> Iterator[str]:
    with served(*runs) as address:
        yield address


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        yield context


@pytest.fixture
def page(context: BrowserContext, address: str) -> Iterator[Page]:
    """Yield a page on which a failing script, or a request to another host, is an error."""
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
    page.on("request", lambda request: request.url.startswith(address) or wrong.append(request.url))
    yield page
    assert wrong == []


def show(page: Page, address: str, view: str) -> None:
    page.goto("about:blank")
    page.goto(f"{address}#{view}")
    marks = {
        "curves": "figure",
        "groups": "section",
        "tokens": ".token",
        "timeline": ".lanes",
        "config": "tbody tr",
    }
    page.wait_for_selector(marks.get(view.partition("?")[0], "main h2"))


def marks(figure: Locator) -> list[list[str]]:
    """Return shape, color, and dashes or corners of each entry of a legend."""
    entries: list[list[str]] = figure.locator(".legend svg > *").evaluate_all(
        """all => all.map(one => [one.tagName, one.getAttribute("stroke") ?? one.getAttribute("fill"),
            one.getAttribute("stroke-dasharray") ?? one.getAttribute("points") ?? ""])"""
    )
    return entries


def queries(page: Page) -> list[str]:
    return page.locator("section > .prompt").all_inner_texts()


def test_the_current_tab_keeps_its_mark_under_the_mouse(page: Page, address: str) -> None:
    show(page, address, "curves")
    tab = page.locator("nav a[aria-current]")
    color = "one => getComputedStyle(one).borderBottomColor"
    before = tab.evaluate(color)
    tab.hover()
    assert tab.evaluate(color) == before
    other = page.locator("nav a:not([aria-current])").first
    other.hover()
    assert other.evaluate(color) not in (before, "rgba(0, 0, 0, 0)")


def test_curves_of_two_runs_are_overlaid(page: Page, address: str) -> None:
    show(page, address, "curves")
    reward = page.locator("figure", has_text="Reward").first
    assert marks(reward) == [["line", "#3b82f6", ""], ["line", "#f59e0b", ""]]
    page.get_by_label("two").uncheck()
    expect(reward.locator(".legend li")).to_have_count(1)
    assert page.url.endswith("#curves?hide=1")
    page.go_back()
    expect(reward.locator(".legend li")).to_have_count(2)


def test_each_series_of_each_run_has_a_color_and_dash_of_its_own(
    browser: Browser, tmp_path: Path
) -> None:
    folders = [make_run(tmp_path / name) for name in ("one", "two")]
    names = [
        "eval/pass@1",
        *(f"eval/pass@1/{name}" for name in "abc"),
        "eval/pass@8",
        "rollout/accuracy",
    ]
    for folder in folders:
        append(
            folder,
            "metrics.jsonl",
            [metrics(step) | dict.fromkeys(names, 0.1 * step) for step in (4, 5)],
        )
    with served(*folders) as address, browser.new_page() as page:
        show(page, address, "curves")
        accuracy = page.locator("figure", has_text="Accuracy")
        drawn = marks(accuracy)
        assert len(drawn) == 12 and len({tuple(mark) for mark in drawn}) == 12
        assert len({color for _, color, _ in drawn}) == 2
        page.get_by_label("two").uncheck()  # the colors stay those of the runs
        expect(accuracy.locator(".legend li")).to_have_count(6)
        assert {color for _, color, _ in marks(accuracy)} == {drawn[0][1]}


def test_a_cursor_tells_the_values_of_a_step_in_all_panels(page: Page, address: str) -> None:
    show(page, address, "curves?hide=1")
    expect(page.locator("figure").first.locator(".legend li")).to_have_count(1)
    entropy = page.get_by_role("slider", name="Entropy")
    page.get_by_role("slider", name="Reward").focus()
    page.keyboard.press("Home")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert entropy.get_attribute("aria-valuetext") == "step 4: one 0.25"
    accuracy = page.get_by_role("slider", name="Accuracy").get_attribute("aria-valuetext") or ""
    assert "test pass@1 (greedy) 25.0% (step 0)" in accuracy  # the last value before
    entropy.hover(position={"x": 200, "y": 60})
    [step_text] = set(page.locator(".plot .at").all_inner_texts())
    assert re.fullmatch(r"step \d+", step_text)
    page.mouse.move(0, 0)
    expect(page.locator(".plot .at").first).to_have_text("")


def test_a_part_of_the_steps_is_dragged_over(page: Page, address: str) -> None:
    show(page, address, "curves")
    box = page.get_by_role("slider", name="Reward").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 100, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 180, box["y"] + 60, steps=4)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"from=\d+&to=\d+"))


def test_any_metric_is_found_shown_and_remembered(
    context: BrowserContext, page: Page, address: str, runs: list[Path]
) -> None:
    show(page, address, "curves")
    before = page.locator("figure").count()
    page.get_by_text("shown)").click()
    page.get_by_label("search metrics").fill("SEQUEN")
    expect(page.locator(".picks label:visible")).to_have_text(["rollout/sequences"])
    page.get_by_label("rollout/sequences").check()
    expect(page.locator("figure")).to_have_count(before + 1)
    page.get_by_label("search metrics").fill("")
    page.get_by_label("Entropy (nats per token)", exact=True).uncheck()
    expect(page.locator("figure")).to_have_count(before)
    sequences = page.locator("figure", has_text="rollout/sequences")
    expect(sequences.locator("b").first).to_have_text("4")
    assert "panels=" in page.url
    with served(*runs) as other:  # another port, like at the next start
        again = context.new_page()
        show(again, other, "curves")
        expect(again.locator("figure", has_text="rollout/sequences")).to_be_visible()
        expect(again.get_by_role("slider", name="Entropy")).to_have_count(0)


def test_values_and_picture_of_a_panel_are_saved(page: Page, address: str) -> None:
    show(page, address, "curves")
    with page.expect_download() as csv:
        page.get_by_role("button", name="Entropy (nats per token): values as CSV").click()
    lines = csv.value.path().read_text().splitlines()
    assert lines[:3] == [
        "run,metric,step,value",
        '"one","train/entropy",1,1',
        '"one","train/entropy",2,0.5',
    ]
    assert sum(line.startswith('"two"') for line in lines) == 20
    with page.expect_download() as png:
        page.get_by_role("button", name="Reward: picture as PNG").click()
    assert png.value.suggested_filename == "Reward.png"
    assert png.value.path().read_bytes().startswith(b"\x89PNG")


def test_axes_are_logarithmic_and_over_tokens_or_time(page: Page, address: str) -> None:
    show(page, address, "curves?hide=1&over=time")
    entropy = page.get_by_role("slider", name="Entropy")
    assert (entropy.get_attribute("aria-valuetext") or "").startswith(
        "19.5 s: "
    )  # 39 steps of 0.5 s
    page.get_by_label("horizontal axis").select_option("tokens")
    expect(entropy).to_have_attribute("aria-valuetext", re.compile("tokens: "))
    log = page.get_by_role("button", name="Entropy (nats per token): log axis")
    log.click()
    expect(log).to_have_attribute("aria-pressed", "true")
    assert "log=Entropy" in page.url
    page.get_by_label("smoothing").select_option("0")
    expect(page).to_have_url(re.compile("smoothing=0"))


def test_no_legend_reserves_height(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    sets = {f"eval/pass@1/{name}": 0.5 for name in "abcdefgh"}
    append(run, "metrics.jsonl", [metrics(4) | sets])
    with served(run) as address, browser.new_page() as page:
        show(page, address, "curves")
        gaps = page.locator("figure").evaluate_all(
            """all => all.map(one => one.querySelector(".plot").getBoundingClientRect().top
                - one.querySelector(".legend").getBoundingClientRect().bottom)"""
        )
    assert all(gap < 10 for gap in gaps)


def test_an_activity_has_one_color(page: Page, address: str) -> None:
    show(page, address, "curves?hide=1")
    [stage] = [mark for mark in marks(page.locator("figure").last) if mark[0] == "rect"][1:2]
    show(page, address, "timeline")
    trained = page.locator(".legend li", has_text="train: ").locator("rect")
    assert trained.get_attribute("fill") == stage[1]


def test_groups_are_filtered_and_the_link_keeps_it(page: Page, address: str) -> None:
    show(page, address, "groups")
    assert len(queries(page)) == 10
    page.get_by_label("from step").fill("5")
    page.get_by_label("to step").fill("6")
    expect(page.locator("section > .prompt")).to_have_text(["6+6=", "5+5="])
    page.get_by_label("text in prompt").fill("5+5")
    expect(page.locator("section")).to_have_count(1)
    assert page.evaluate("document.activeElement.name") == "text"
    page.locator("select[name=run]").select_option("1")
    expect(page).to_have_url(re.compile("run=1"))
    show(page, address, page.url.partition("#")[2])
    assert queries(page) == ["5+5="]
    page.get_by_label("min reward").fill("2")
    page.wait_for_selector("text=0 of 21 groups")


def test_a_filter_applies_even_if_the_page_polls_while_it_is_slow(
    browser: Browser, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    waiting: list[Route] = []

    def answer() -> None:
        while waiting:
            waiting.pop().continue_()

    with served(run) as address, browser.new_page() as page:
        show(page, address, "groups?text=2%2B2")
        text, section = page.get_by_label("text in prompt"), page.locator("section")
        page.route("**/api/groups*", lambda route: waiting.append(route))
        with page.expect_request("**/api/groups*"):
            text.fill("3+3")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        answer()
        expect(section).to_have_count(1)
        expect(section).to_contain_text("3+3=")
        with page.expect_request("**/api/groups*"):
            text.fill("+")
        with page.expect_request("**/api/groups*"):  # the run has grown
            append(run, "samples.jsonl", group(4, "9+9=", ["18"], group=77))
        answer()
        expect(section.first).to_contain_text("9+9=")


def test_a_response_leads_to_its_tokens_and_back(page: Page, address: str) -> None:
    show(page, address, "groups?split=train&from=7&to=7")
    assert "finished: end of text" in page.locator("section > p").inner_text()  # of both
    assert page.get_by_role("row", name="advantage").locator("td").all_inner_texts() == ["-1", "1"]
    expect(page.get_by_role("row", name="finished")).to_have_count(0)
    page.get_by_role("link", name="response 2").click()
    page.wait_for_selector(".token")
    assert "".join(page.locator(".token").all_inner_texts()) == "#### 14"
    about = page.locator("main").inner_text()
    assert "reward 1 · right 1 · advantage 1" in about and "finished: end of text" in about
    page.get_by_role("link", name="Previous response").click()
    expect(page.locator(".strip")).to_contain_text("no 7")
    page.go_back()
    expect(page.locator(".strip")).not_to_contain_text("no 7")  # or the next one would be lost
    page.go_back()
    page.wait_for_selector("section")


def test_tokens_are_colored_by_what_is_chosen(page: Page, address: str) -> None:
    show(page, address, "tokens?row=60")
    classes = {}
    names = {"kl": "KL to the reference", "ratio": "ratio to the trainer", "log_prob": "log-prob"}
    for by in ("kl", "ratio", "log_prob", "entropy", "advantage", "mask"):
        name = names.get(by, by)
        page.get_by_label("color by").select_option(by)
        expect(page.get_by_role("listbox")).to_have_attribute(
            "aria-label", f"Tokens, colored by {name}"
        )
        classes[by] = page.locator(".token").first.get_attribute("class")
        assert page.locator(".scale li").count() >= 2
    assert classes["log_prob"] == "token q1"
    assert (classes["ratio"], classes["advantage"], classes["mask"]) == (
        "token d3",
        "token d6",
        "token q2",
    )


def test_turns_and_tool_calls_are_told_apart(page: Page, address: str) -> None:
    show(page, address, "tokens?row=61")
    assert page.locator(".turn .name").all_inner_texts() == [
        "turn 1, 38 tokens, calls add",
        "not sampled (a tool's answer, another's turn or the template), 3 tokens",
        "turn 2, 4 tokens",
    ]
    assert page.locator(".given .token").first.get_attribute("class") == "token "


def test_tokens_are_walked_through_by_keyboard(page: Page, address: str) -> None:
    show(page, address, "tokens?row=2")
    page.get_by_role("listbox").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    readout = page.locator(".readout").inner_text()
    assert re.fullmatch(
        r'" " token 5 of 6: log-prob -0\.25 \(77\.9%\), ratio to the trainer 1\.04, .*', readout
    )
    page.locator(".token").first.hover()
    assert page.locator(".readout").inner_text().startswith('"#" token 1 of 6')


def test_the_whole_page_works_by_keyboard(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector("figure")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    for view in ("Curves", "Groups", "Timeline"):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == view
    page.keyboard.press("Enter")
    page.wait_for_selector(".lanes")
    page.get_by_role("listbox").focus()
    page.keyboard.press("Home")
    assert page.locator(".readout").inner_text() == "sampler 0: sample, step 1, 1 s starting at 0 s"


def test_a_part_of_the_timeline_is_zoomed_in_on(page: Page, address: str) -> None:
    show(page, address, "timeline?run=1")
    assert page.locator(".lanes .restart").count() == 20
    page.get_by_role("button", name="Zoom in").click()
    expect(page.locator(".lanes .restart")).to_have_count(10)
    assert "from=" in page.url
    page.get_by_role("button", name="Whole run").click()
    expect(page.locator(".lanes .restart")).to_have_count(20)


def test_kinds_of_spans_have_colors_apart_and_are_explained(
    browser: Browser, tmp_path: Path
) -> None:
    kinds = [
        "sample",
        "score",
        "train",
        "publish",
        "update",
        "wait",
        "evaluate",
        "save",
        "start",
        "restart",
        "stopped",
    ]
    run = make_run(tmp_path / "run")
    rows = [
        {"actor": "a", "kind": kind, "start": 1e9 + at, "seconds": 1.0}
        for at, kind in enumerate(kinds)
    ]
    append(run, "timeline.jsonl", rows)
    with served(run) as address, browser.new_page() as page:
        show(page, address, "timeline")
        expect(page.locator("main")).to_contain_text("One lane per actor")
        legend = page.locator("main > div > .legend li")
        explanations = dict(text.split(": ") for text in legend.all_inner_texts())
        assert set(explanations) == set(kinds)
        assert explanations["score"] == "computes rewards or reference log-probs"
        fills = page.locator(".legend rect").evaluate_all(
            "all => all.map(one => one.getAttribute('fill'))"
        )
    colors = [[int(fill[at : at + 2], 16) for at in (1, 3, 5)] for fill in fills]
    apart = min(math.dist(one, other) for one, other in itertools.combinations(colors, 2))
    assert apart > 70


def test_the_axis_of_the_timeline_has_round_times_in_one_unit(
    browser: Browser, tmp_path: Path
) -> None:
    ticks = {
        1.5: ["0 s", "0.2 s", "0.4 s"],
        600: ["0 min", "1 min", "2 min"],
        5 * 3600 + 1800: ["0 h", "0.5 h", "1 h"],
        250 * 3600: ["0 d", "1 d", "2 d"],
    }
    runs = [make_run(tmp_path / str(seconds)) for seconds in ticks]
    for run, seconds in zip(runs, ticks, strict=True):
        (run / "timeline.jsonl").unlink()
        span = {"actor": "trainer", "kind": "train", "start": 0.0, "seconds": seconds}
        append(run, "timeline.jsonl", [span])
    with served(*runs) as address, browser.new_page() as page:
        for number, texts in enumerate(ticks.values()):
            show(page, address, f"timeline?run={number}")
            labels = page.locator(".lanes text[text-anchor]").all_text_contents()
            assert labels[: len(texts)] == texts


def test_the_times_of_the_timeline_do_not_overlap(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "timeline.jsonl").unlink()
    append(
        run,
        "timeline.jsonl",
        [{"actor": "trainer", "kind": "train", "start": 0.0, "seconds": 200.0}],
    )
    with served(run) as address, browser.new_page(viewport={"width": 1280, "height": 640}) as page:
        show(page, address, "timeline?from=86&to=166")
        texts = page.locator(".lanes text[text-anchor]")
        sides = texts.evaluate_all(
            "all => all.map(one => one.getBoundingClientRect()).map(at => [at.left, at.right])"
        )
    assert len(sides) > 3
    assert all(right < left for (_, right), (left, _) in itertools.pairwise(sides))


def test_alarms_and_what_differs_between_configs(page: Page, address: str) -> None:
    show(page, address, "alarms")
    expect(page.locator("td.bad")).to_contain_text(
        ["entropy: the entropy fell", "truncated: 90% of the responses"]
    )
    assert page.locator("#to-alarms").inner_text() == "Alarms (2)"
    show(page, address, "config")
    assert page.locator("tbody tr").all_inner_texts() == ["optimizer.lr\t1e-4\t1e-3"]
    page.get_by_label("only differences").uncheck()
    page.get_by_label("key or value").fill("repeats")
    expect(page.locator("tbody tr")).to_have_text(["env.repeats22"])


def test_what_a_model_wrote_runs_nothing(page: Page, address: str) -> None:
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    show(page, address, "groups?text=alert(1)")
    assert queries(page) == [SHOWN]
    assert page.locator("main script").count() == 0


def test_it_grows_with_a_run(page: Page, browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with served(run) as address, browser.new_page() as page:
        show(page, address, "curves")
        slider = page.get_by_role("slider", name="Reward")
        assert slider.get_attribute("aria-valuemax") == "3"
        append(run, "metrics.jsonl", [metrics(4, reward=0.875)])
        page.wait_for_selector("text=0.875")
        assert slider.get_attribute("aria-valuemax") == "4"
        assert "step 4" in page.locator("#status").inner_text()
        show(page, address, "groups")
        append(run, "samples.jsonl", group(4, "4+4=", ["8"]))
        page.get_by_role("button", name="Show 1 newer group").click()
        expect(page.locator("section")).to_have_count(5)
        assert queries(page)[0] == "4+4="


def test_a_run_that_is_being_read_is_not_called_one_without_steps(
    browser: Browser, tmp_path: Path
) -> None:
    with served(make_run(tmp_path / "run")) as address, browser.new_page() as page:

        def reading(route: Route) -> None:
            runs = route.fetch().json()
            route.fulfill(
                json=[one | {"reading": True, "versions": {"metrics": 0}} for one in runs]
            )

        page.route("**/api/status", reading)
        nothing = {"choices": [], "panels": []}
        page.route("**/api/curves*", lambda route: route.fulfill(json=nothing))
        page.goto(f"{address}#curves")
        expect(page.get_by_text("Reading the run's files.")).to_be_visible()
        page.unroute_all(behavior="wait")
        expect(page.get_by_role("slider", name="Reward")).to_be_visible()


def test_a_first_test_row_leaves_what_is_being_typed(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "samples.jsonl").unlink()
    append(run, "samples.jsonl", group(1, "1+1=", ["2"]))
    with served(run) as address, browser.new_page() as page:
        show(page, address, "groups")
        text = page.get_by_label("text in prompt")
        text.focus()
        text.evaluate("input => { input.value = '1+' }")  # as if typed a moment ago: not sent yet
        append(run, "samples.jsonl", group(1, "2+2=", ["4"], split="test", group=2))
        expect(page.locator("select[name=split] option")).to_have_text(["any", "train", "test"])
        page.keyboard.press("End")
        page.keyboard.type("1")
        expect(page).to_have_url(re.compile(r"#groups\?text=1%2B1$"))
        expect(page.locator(".notice")).to_contain_text("1 of 2 groups")


def test_another_run_is_chosen_without_losing_the_keyboard(page: Page, address: str) -> None:
    show(page, address, "groups")
    page.locator("select[name=run]").focus()
    page.keyboard.press("ArrowDown")
    expect(page).to_have_url(re.compile("run=1"))
    expect(page.locator(".notice")).to_contain_text("of 21 groups")
    assert page.evaluate("document.activeElement.name") == "run"


def test_it_fits_a_phone(browser: Browser, address: str) -> None:
    with browser.new_page(viewport={"width": 360, "height": 740}) as page:
        for view in VIEWS:
            show(page, address, view)
            page.wait_for_timeout(100)
            assert page.evaluate("document.documentElement.scrollWidth") == 360, view


def test_a_phone_shows_all_views_in_one_row_and_values_of_the_config(
    browser: Browser, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    config = {"train_model": {"gradient_checkpointing_reentrant": False}}
    (run / ".hydra" / "config.yaml").write_text(json.dumps(config))
    with (
        served(run) as address,
        browser.new_page(viewport={"width": 390, "height": 844}) as page,
    ):
        show(page, address, "config")
        tops = page.locator("nav a").evaluate_all("all => all.map((one) => one.offsetTop)")
        assert len(set(tops)) == 1
        boxes = page.locator("tbody td").evaluate_all(
            "all => all.map((one) => one.getBoundingClientRect().right)"
        )
        assert boxes and max(boxes) <= 390


def test_keys_of_the_config_stay_readable_beside_many_runs(
    browser: Browser, tmp_path: Path
) -> None:
    runs = [make_run(tmp_path / str(at), rate=f"{at + 1}e-4") for at in range(8)]
    with served(*runs) as address, browser.new_page(viewport={"width": 390, "height": 844}) as page:
        show(page, address, "config")
        key = page.get_by_role("rowheader", name="optimizer.lr")
        assert key.evaluate("key => key.getBoundingClientRect().width") > 110
        assert key.evaluate("key => key.getBoundingClientRect().height") < 60
        page.set_viewport_size({"width": 1400, "height": 900})
        assert key.evaluate("key => key.getBoundingClientRect().width") > 110


def test_what_all_responses_have_in_common_is_no_row(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    append(run, "samples.jsonl", group(2, "2+2=", ["#### 4"]))
    with served(run) as address, browser.new_page() as page:
        show(page, address, "groups?split=train")
        abouts = page.locator("section > p").all_inner_texts()
        assert abouts[0].startswith("right: 0 · advantage: -1 · tokens: 6 · finished: end of text")
        assert abouts[1].startswith("all responses · finished: end of text")
        assert page.locator("section").first.get_by_role("row").count() == 3


def test_pictures_stand_above_the_prompt(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "images").mkdir()
    hashes = [64 * letter for letter in "abc"]
    for one, size in zip(hashes, [(128, 64), (32, 32), (8, 8)], strict=True):
        Image.new("RGB", size, "red").save(run / f"images/{one[:16]}.png")
    rows = group(9, "<image><image>?", ["1", "2"], images=[*hashes[:2], 64 * "d"])
    rows[1]["images"] = hashes  # of a later turn is the third
    append(run, "samples.jsonl", rows)
    with served(run) as address, browser.new_page() as page:
        for view, widths in (("groups", [128, 32]), ("tokens?row=8", [128, 32, 8])):
            show(page, address, view)
            images = page.locator(".pictures img")
            expect(images).to_have_count(len(widths))
            for image, width in zip(images.all(), widths, strict=True):
                expect(image).to_have_js_property("naturalWidth", width)
                assert image.bounding_box()["height"] > 70  # also a picture of a few pixels
            alts = [image.get_attribute("alt") for image in images.all()]
            assert alts == [f"image {at + 1} of {len(widths)}" for at in range(len(widths))]
        show(page, address, "tokens?row=7")  # without the thumbnail that is missing
        expect(page.locator(".pictures img")).to_have_count(2)


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_axe_finds_nothing(browser: Browser, address: str, scheme: Any) -> None:
    from axe_playwright_python.sync_playwright import Axe

    # Axe is a script of its own, which the page's policy keeps out.
    with browser.new_page(
        color_scheme=scheme, bypass_csp=True, viewport={"width": 1000, "height": 900}
    ) as page:
        for view in VIEWS:
            show(page, address, view)
            background = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert background == {"light": "rgb(246, 247, 249)", "dark": "rgb(18, 21, 26)"}[scheme]
            page.evaluate(
                "document.querySelectorAll('details').forEach(one => { one.open = true })"
            )
            results = Axe().run(page)
            assert results.violations_count == 0, results.generate_report()


def test_axe_finds_nothing_in_a_report_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    from axe_playwright_python.sync_playwright import Axe

    run = make_run(tmp_path / "run")
    append(run, "samples.jsonl", group(3, "4+4=", ["word " * 200, "1\n" * 30], group=9))
    report = write_report(run)
    with browser.new_page(viewport={"width": 390, "height": 844}) as page:
        page.goto(report.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
        results = Axe().run(page)
        assert results.violations_count == 0, results.generate_report()


@pytest.mark.nightly
def test_100000_responses_are_painted_soon(browser: Browser, tmp_path: Path) -> None:
    run = make_large(tmp_path / "run", groups=12_500)
    with served(run) as address, browser.new_page() as page:
        page.goto(f"{address}#groups")
        page.wait_for_selector("section")
        painted = (
            page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            / 1000
        )
        assert painted < FIRST_PAINT_S
        expect(page.locator(".notice")).to_contain_text("100,007 responses")
        page.get_by_label("text in prompt").fill("nobody wrote this")
        page.wait_for_selector("text=0 of")
