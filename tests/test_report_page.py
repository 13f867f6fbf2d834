"""The page of a report in a browser, and the files beside it."""

import csv
import json
import math
import re
import shutil
from importlib import resources

import pytest

from natgrad.report import write_report

NAMES = ("K-FAC", "EKFAC", "Exact", "Diagonal", "SGD", "Momentum", "Adam")
RATES = (0.001, 0.01, 0.1)
HOSTILE = "<script>alert(1)</script></script><img src=x onerror=alert(2)>&amp;"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def curve(position, points=40):
    """Losses that fall at a pace of their own, a little bumpy."""
    pace = (1.4, 1.6, 1.9, 0.6, 0.25, 0.45, 0.8)[position]
    fall = [math.exp(-pace * k / 5) * (1 + 0.08 * math.sin(k * (2 + position))) for k in range(points)]
    return [
        {
            "step": 12 * k,
            "seconds": 0.03 * k * (4 if position < 4 else 1),
            "loss": 2.3 * fall[k] + 3e-4,
            "held_out_loss": 2.31 * fall[k] + 0.08,
            "metrics": {"accuracy": 0.975 - 0.87 * min(fall[k], 1.0)},
        }
        for k in range(points)
    ]


def method(position, name):
    points = curve(position)
    is_natural = position < 4
    settings = {"structure": f"{name}()", "step": "CrossValidated()"} if is_natural else {"learning_rate": 0.1}
    reached = next((point for point in points if point["loss"] <= 0.005), {"step": None, "seconds": None})
    runs = [
        {
            "settings": {"learning_rate": rate},
            "status": "diverged" if rate == 1.0 else "complete",
            "steps": 468,
            "seconds": 0.7,
            "final_loss": math.nan if rate == 1.0 else 0.3 / (position * rate**0.5 * 100),
            "lowest_loss": 2.1 if rate == 1.0 else 0.3 / (position * rate**0.5 * 100),
        }
        for rate in (*RATES, *([1.0] if name == "SGD" else []))
        if not is_natural
    ]
    return {
        "name": name,
        "kind": "natural" if is_natural else "first-order",
        "settings": settings,
        "status": "out of time" if name == "Exact" else "complete",
        "note": "Stopped after 120 s." if name == "Exact" else "",
        "compilation": 5.1 - 0.7 * position,
        "seconds_per_step": 0.01 if is_natural else 0.0025,
        "state_bytes": 123456,
        "curve": points,
        "final_loss": points[-1]["loss"],
        "lowest_loss": min(point["loss"] for point in points),
        "final_held_out_loss": points[-1]["held_out_loss"],
        "final_metrics": points[-1]["metrics"],
        "steps_to_target": reached["step"],
        "seconds_to_target": reached["seconds"],
        "sweep": runs,
    }


def geometry(length):
    points = [
        {
            "name": name,
            "step": step,
            "examples": 128,
            "rank": int(0.9 * length),
            "nullity": 6570 - int(0.9 * length),
            "is_limited_by_examples": True,
            "is_proper": is_proper,
            "cutoff": 1e-6,
            "damping": 1e-3,
            "condition": 1.2e5,
            "spectrum": [scale * k**-1.8 if k < 0.9 * length else -1e-9 for k in range(1, length + 1)],
        }
        for name, step, is_proper, scale in (("at the start", 0, True, 4.0), ("at the end", 468, None, 0.6))
    ]
    blocks = [
        ("params[0]['w']", [64, 64], "Kronecker", [[65, 65], [64, 64]], "", False),
        ("params[1]['w']", [64, 32], "Kronecker", [[65, 65], [32, 32]], "", False),
        ("params[2]['scale']", [32], "Diagonal", [[32]], "Used in a way no layer is: its own diagonal.", True),
    ]
    approximations = [
        (point["name"], structure, angle + 9 * k, norm)
        for k, point in enumerate(points)
        for structure, angle, norm in (("K-FAC", 23.1, 0.9), ("EKFAC", 17.4, 0.95), ("Diagonal", 61.0, 0.4))
    ]
    return {
        "points": points,
        "structure": [
            dict(path=p, shape=s, uses=1, structure=k, factors=f, numbers=8321, bytes=33284, note=n, is_fallback=b)
            for p, s, k, f, n, b in blocks
        ],
        "approximations": [
            dict(point=p, structure=s, angle=a, norm=n, predicted_decrease=0.1, actual_decrease=0.09, note="")
            for p, s, a, n in approximations
        ],
    }


def sample_report(length=60):
    """A comparison of seven methods with everything that a report may have; `length` eigenvalues."""
    return {
        "schema": 1,
        "natgrad": "0.1.0",
        "problem": {
            "name": "digits",
            "about": "Handwritten digits of 8 by 8 pixels, classified by a perceptron with two hidden layers.",
            "parameters": 6570,
            "examples": 1437,
            "batch_size": 128,
            "held_out_examples": 360,
            "objective": "Categorical",
            "precision": "float32",
            "metrics": ["accuracy"],
        },
        "settings": {"command": "compare", "steps": 468, "seconds": None, "seed": 0},
        "status": "complete",
        "seconds": {"total": 80.1, "compilation": 30.2},
        "verdict": "K-FAC needs 228 steps and 2.28 s for what the best first-order method, Adam at 0.01, reaches in "
        "468 steps and 1.2 s.",
        "target": {"loss": 0.005, "source": "the lowest loss of the best first-order method"},
        "methods": [method(position, name) for position, name in enumerate(NAMES)],
        "geometry": geometry(length),
        "recommended": [
            {
                "title": "Fastest here",
                "method": "K-FAC",
                "reason": "It reaches the target in the fewest seconds.",
                "code": "import natgrad as ng\n\noptimiser = ng.NaturalGradient(structure=ng.KFAC())\n",
            }
        ],
        "environment": {
            "python": "3.13.0",
            "jax": "0.10.2",
            "devices": "2 x cpu",
            "platform": "Linux-6.1-x86_64",
            "processors": 2,
        },
    }


def inspect_report():
    """No methods, and much that is not known."""
    report = sample_report()
    report["settings"] = {"command": "inspect", "steps": None, "seconds": None, "seed": 0}
    point = report["geometry"]["points"][0] | {"condition": math.inf, "is_proper": None, "step": None}
    report["geometry"] |= {"points": [point], "approximations": []}
    return report | {"methods": [], "recommended": [], "target": None, "verdict": ""}


def train_report():
    """One method whose loss is negative and ends up not a number, on a point without a metric."""
    report = sample_report()
    only = report["methods"][0] | {"status": "diverged", "final_loss": math.nan, "final_metrics": {"accuracy": None}}
    only |= {"final_held_out_loss": None, "steps_to_target": None, "seconds_to_target": None}
    for k, point in enumerate(only["curve"]):
        point |= {"loss": 1.0 - k if k < 30 else math.inf, "held_out_loss": None, "metrics": {}}
    report["settings"] = {"command": "train", "steps": 500, "seconds": 120.0, "seed": 0}
    report["problem"] |= {"about": "", "batch_size": None, "held_out_examples": None, "parameters": None}
    report["seconds"]["compilation"] = None
    return report | {"methods": [only], "geometry": None, "target": None, "status": "interrupted"}


def hostile_report():
    """Names and notes that would run as code if they were not escaped."""
    report = sample_report()
    report["problem"] |= {"name": HOSTILE, "about": HOSTILE, "objective": HOSTILE, "metrics": [HOSTILE]}
    report["verdict"] = HOSTILE
    for each in report["methods"]:
        each |= {"name": HOSTILE, "note": HOSTILE, "settings": {HOSTILE: HOSTILE}, "final_metrics": {HOSTILE: 1.0}}
        for point in each["curve"]:
            point["metrics"] = {HOSTILE: 1.0}
    for each in report["geometry"]["points"]:
        each["name"] = HOSTILE
    for each in report["geometry"]["approximations"]:
        each |= {"point": HOSTILE, "structure": HOSTILE}
    report["recommended"][0] |= {"title": HOSTILE, "code": HOSTILE}
    return report


REPORTS = {"compare": sample_report, "inspect": inspect_report, "train": train_report, "hostile": hostile_report}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files of every report, by name."""
    parent = tmp_path_factory.mktemp("reports")
    for name, report in REPORTS.items():
        write_report(report(), parent / name)
    return parent


def strict_json(path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.mark.parametrize("name", REPORTS)
def test_json_is_strict_and_follows_the_schema(folder, name):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(resources.files("natgrad.report").joinpath("schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(strict_json(folder / name / "report.json"), schema)


def undescribed(schema, path="report"):
    """Fields of a schema without a description."""
    for field, inner in schema.get("properties", {}).items():
        if not inner.get("description"):
            yield f"{path}.{field}"
        yield from undescribed(inner, f"{path}.{field}")
    if "items" in schema:
        yield from undescribed(schema["items"], f"{path}[]")


def test_every_field_is_described():
    schema = json.loads(resources.files("natgrad.report").joinpath("schema.json").read_text(encoding="utf-8"))
    assert list(undescribed(schema)) == []
    assert list(undescribed({"properties": {"a": {"type": "null"}}})) == ["report.a"]


def test_files_are_named_and_no_draft_stays(tmp_path):
    names = ["report.html", "report.json", "methods.csv", "curves.csv"]
    for _ in range(2):
        assert [path.name for path in write_report(sample_report(), tmp_path / "new" / "folder")] == names
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == sorted(names)


def test_curves_csv_has_the_points_of_the_curves(folder):
    with (folder / "compare" / "curves.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    expected = [
        (each["name"], each["settings"], point["step"], point["seconds"], point["loss"], point["metrics"]["accuracy"])
        for each in sample_report()["methods"]
        for point in each["curve"]
    ]
    found = [
        (
            r["method"],
            json.loads(r["settings"]),
            int(r["step"]),
            *(float(r[k]) for k in ("seconds", "loss", "accuracy")),
        )
        for r in rows
    ]
    assert found == expected


def test_methods_csv_has_a_row_a_method(folder):
    with (folder / "compare" / "methods.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    methods = sample_report()["methods"]
    assert [row["name"] for row in rows] == list(NAMES)
    assert [float(row["final_accuracy"]) for row in rows] == [m["final_metrics"]["accuracy"] for m in methods]
    with (folder / "train" / "methods.csv").open(encoding="utf-8", newline="") as file:
        assert [row["final_loss"] for row in csv.DictReader(file)] == [""]


@pytest.mark.parametrize("name", REPORTS)
def test_unknown_numbers_are_dashes(folder, name):
    page = (folder / name / "report.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]*>", " ", page[page.index("<body>") : page.index('<script type="application/json"')])
    assert re.search(r"\b(None|nan|null|inf|undefined)\b", text, re.IGNORECASE) is None


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium is installed; see tests/install_browser")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, folder):
    """A function that opens a report. At the end nothing may have gone wrong or been asked for on its pages."""
    contexts, complaints, requests = [], [], []

    def open_report(name="compare", width=1280, **options):
        address = (folder / name / "report.html").as_uri()
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        assert page.evaluate("document.readyState") == "complete"
        assert [url for url in requests if url != address and not url.startswith(("data:", "blob:file:"))] == []
        return page

    yield open_report
    for context in contexts:
        context.close()
    assert complaints == []
    assert {url.split(":")[0] for url in requests} <= {"file", "data", "blob"}
    assert len([url for url in requests if url.startswith("file:")]) == len(contexts)


def position_of(page, line, point):
    """Where on the screen a point of the loss chart is."""
    page.locator("#loss").scroll_into_view_if_needed()
    return page.evaluate(
        """([line, point]) => {
            const chart = document.querySelector("#loss"), box = chart.getBoundingClientRect();
            const {xaxis, yaxis} = chart._fullLayout, {x, y} = chart.data[line];
            return [box.left + xaxis._offset + xaxis.d2p(x[point]), box.top + yaxis._offset + yaxis.d2p(y[point])];
        }""",
        [line, point],
    )


def hover_text(page, line, point):
    """What the loss chart says when the mouse is on a point."""
    x, y = position_of(page, line, point)
    page.mouse.move(x - 3, y)
    page.mouse.move(x, y)
    page.locator("#loss .hoverlayer .hovertext").wait_for()
    return page.locator("#loss .hoverlayer").text_content()


def section_names(page):
    return page.locator("section").evaluate_all("all => all.map(one => one.id)")


def assert_fits_a_phone(page):
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_timeout(300)  # the charts follow a moment later
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


# Opening a page takes two seconds, so that each test looks at several things.


def test_the_charts_hold_every_line_and_answer_the_mouse(open_page):
    page = open_page()
    lines = page.evaluate("document.querySelector('#loss').data.map(line => [line.name, line.y, line.line.dash])")
    methods = sample_report()["methods"]
    assert [(name, y) for name, y, _ in lines] == [(m["name"], [p["loss"] for p in m["curve"]]) for m in methods]
    assert [dash == "solid" for *_, dash in lines] == [m["kind"] == "natural" for m in methods]
    assert page.locator("#loss .scatterlayer .trace").count() == len(methods)
    lengths = "['metric-0', 'sweep', 'spectrum', 'angles'].map(id => document.getElementById(id).data.length)"
    assert page.evaluate(lengths) == [len(methods), 3, 2, 2]

    bar = page.locator("#loss .modebar-btn").evaluate_all("all => all.map(one => one.dataset.title)")
    assert bar == ["Download plot as a PNG", "Zoom", "Pan", "Reset axes"]

    text = hover_text(page, 6, 20)
    assert "Adam" in text and "Steps 240" in text and f"{methods[6]['curve'][20]['loss']:.3g}" in text

    ranges = "['xaxis', 'yaxis'].map(axis => document.querySelector('#loss')._fullLayout[axis].range)"
    before = page.evaluate(ranges)
    x, y = position_of(page, 6, 10)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 200, y + 120, steps=4)
    page.mouse.up()
    (left, right), (low, high) = page.evaluate(ranges)
    assert before[0][0] < left < right < before[0][1] and before[1][0] < low < high < before[1][1]


@pytest.mark.slow
def test_buttons_work_from_the_keyboard(open_page):
    page = open_page()
    steps, time = page.get_by_role("button", name="Steps"), page.get_by_role("button", name="Seconds")
    steps.focus()
    page.keyboard.press("Tab")
    assert time.evaluate("button => button === document.activeElement")
    page.keyboard.press("Enter")
    assert (steps.get_attribute("aria-pressed"), time.get_attribute("aria-pressed")) == ("false", "true")
    adam = sample_report()["methods"][6]["curve"]
    for chart in ("#loss", "#metric-0"):
        assert page.evaluate(f"document.querySelector('{chart}').data[6].x") == [p["seconds"] for p in adam]
    page.get_by_role("button", name="Held-out").press("Space")
    assert page.evaluate("document.querySelector('#loss').data[6].y") == [p["held_out_loss"] for p in adam]
    assert page.evaluate("document.querySelector('#loss')._fullLayout.yaxis.type") == "log"
    page.get_by_role("button", name="Linear").press("Space")
    assert page.evaluate("document.querySelector('#loss')._fullLayout.yaxis.type") == "linear"

    page.locator("#curves .legend").first.get_by_role("button", name="SGD").press("Enter")
    for chart, line in (("#loss", 4), ("#metric-0", 4), ("#sweep", 0)):
        assert page.evaluate(f"document.querySelector('{chart}').data[{line}].visible") is False
    assert page.locator(".legend button[aria-pressed=false]").count() == 3


@pytest.mark.slow
def test_a_phone_in_the_dark_and_in_the_light(open_page):
    page = open_page(width=390, has_touch=True, is_mobile=True, color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("document.querySelector('#loss')._fullLayout.width") <= 390
    assert page.evaluate("document.querySelector('#loss')._fullLayout.dragmode") is False
    methods = page.locator("#methods .scroll")
    assert methods.evaluate("box => box.scrollWidth > box.clientWidth")
    methods.evaluate("box => { box.scrollLeft = 200 }")
    assert methods.locator("tbody th").first.bounding_box()["x"] < 40

    look = """[getComputedStyle(document.body).backgroundColor,
               document.querySelector('#loss').layout.font.color,
               document.querySelector('#loss').data[0].line.color]"""
    button = page.get_by_role("button", name="Dark")
    dark = page.evaluate(look)
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    light = page.evaluate(look)
    assert button.get_attribute("aria-pressed") == "false"
    assert all(one != other for one, other in zip(light, dark, strict=True))
    button.click()
    assert page.evaluate(look) == dark
    page.evaluate("delete document.documentElement.dataset.theme")
    page.emulate_media(color_scheme="light")
    page.wait_for_timeout(300)  # the page hears of it a moment later
    assert page.evaluate(look) == light


def test_hostile_names_are_text(open_page):
    page = open_page("hostile")
    assert page.locator("h1").inner_text() == HOSTILE
    assert page.locator("#methods tbody th").first.inner_text().startswith(HOSTILE)
    assert page.locator("#curves .legend button").first.inner_text() == HOSTILE
    assert page.locator("#recommended pre").inner_text() == HOSTILE
    assert page.locator("#angles .ytick text").first.text_content().strip() == HOSTILE
    assert page.locator("img, main script").count() == 0
    assert HOSTILE in hover_text(page, 6, 20)
    assert_fits_a_phone(page)


def test_an_inspection_has_geometry_alone(open_page):
    page = open_page("inspect")
    assert section_names(page) == ["geometry", "about"]
    assert page.evaluate("document.querySelector('#spectrum').data.length") == 1
    assert_fits_a_phone(page)


@pytest.mark.slow
def test_a_single_training_run_and_its_code(open_page):
    page = open_page("train", permissions=["clipboard-read", "clipboard-write"])
    assert section_names(page) == ["curves", "methods", "geometry", "recommended", "about"]
    assert page.evaluate("document.querySelector('#loss')._fullLayout.yaxis.type") == "linear"
    assert page.get_by_role("button", name="Held-out").count() == 0
    assert "interrupted" in page.locator(".status").first.inner_text()
    assert_fits_a_phone(page)

    code = sample_report()["recommended"][0]["code"]
    button = page.locator(".copy")
    button.click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == code
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('forbidden')) }")
    button.click()
    page.get_by_role("button", name="Selected").wait_for()
    assert page.evaluate("getSelection().toString()").strip() == code.strip()
