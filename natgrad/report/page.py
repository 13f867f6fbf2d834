"""The page: one HTML file with its style, its script and its numbers inside."""

import json
from importlib import resources
from string import Template
from typing import Any

from natgrad.report.charts import angle_chart, loss_chart, metric_chart, spectrum_chart, sweep_chart
from natgrad.report.html import DASH, Html, count, element, escape, join, seconds, section
from natgrad.report.sections import curve_section, geometry_section, method_section, sweep_section

HOW_TO_READ = (
    "Seconds count the steps only, without compilation and without the evaluation of losses and metrics. Compilation "
    "happens once a process and has its own column.",
    "A method reaches the target at the first point of its curve at or below the target. Curves have a point every few "
    "steps, so steps and time to the target are rounded up to the next point.",
    "Times were measured in one run with one random seed on one computer. Differences of a few per cent are noise.",
)


def page(report: dict[str, Any]) -> str:
    """The report as a page that needs no network. All numbers in `report` must be finite or `None`."""
    from plotly.offline import get_plotlyjs

    loss, sweep = loss_chart(report), sweep_chart(report)
    positions = range(len(report["problem"]["metrics"]))
    metrics = [chart for position in positions if (chart := metric_chart(report, position))]
    geometry = report["geometry"] or {"points": [], "approximations": []}
    spectrum = spectrum_chart(geometry["points"])
    angles = angle_chart(geometry["approximations"])
    charts = [chart for chart in (loss, *metrics, sweep, spectrum, angles) if chart]
    content = join(
        [
            curve_section(report, loss, metrics),
            method_section(report),
            sweep_section(sweep),
            geometry_section(report, spectrum, angles),
            _recommendations(report["recommended"]),
            _environment(report),
        ]
    )
    return Template(_read("page.html")).substitute(
        title=escape(report["problem"]["name"]),
        style=_read("page.css"),
        header=_header(report),
        content=content,
        charts=_inline([chart.description for chart in charts]),
        plotly=get_plotlyjs() if charts else "",
        script=_read("page.js"),
    )


def _read(name: str) -> str:
    return resources.files("natgrad.report").joinpath(name).read_text(encoding="utf-8")


def _inline(value: Any) -> str:
    """JSON for inside a `<script>`, with `<` escaped so that no text can end the script."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _header(report: dict[str, Any]) -> Html:
    """Name of the problem, facts, verdict, and a warning if the results are partial."""
    problem = report["problem"]
    statuses = {
        "interrupted": "The run was interrupted; results are partial.",
        "out of time": "Time limit reached; results are partial.",
    }
    status = statuses.get(report["status"], "")
    return join(
        [
            element("p", f"natgrad {report['settings']['command']}", class_="eyebrow"),
            element("h1", problem["name"]),
            element("p", problem["about"], class_="about"),
            element("dl", join(_fact(name, value) for name, value in _facts(report).items()), class_="facts"),
            element("p", report["verdict"], class_="verdict"),
            element("p", join([Html('<span aria-hidden="true">⚠ </span>'), status]), class_="status") if status else "",
        ]
    )


def _facts(report: dict[str, Any]) -> dict[str, Any]:
    problem, options = report["problem"], report["settings"]
    return {
        "Parameters": count(problem["parameters"]),
        "Training examples": count(problem["examples"]),
        "Held-out examples": count(problem["held_out_examples"]),
        "Batch size": "all" if problem["batch_size"] is None else count(problem["batch_size"]),
        "Objective": problem["objective"],
        "Precision": problem["precision"],
        "Steps": count(options["steps"]),
        "Time limit": seconds(options["seconds"]),
        "Random seed": options["seed"],
        "Total time": seconds(report["seconds"]["total"]),
        "Compilation": seconds(report["seconds"]["compilation"]),
    }


def _fact(name: str, value: Any) -> Html:
    return Html() if value in (None, DASH) else element("div", join([element("dt", name), element("dd", value)]))


def _recommendations(recommended: list[dict[str, Any]]) -> Html:
    """The methods to use, with code to copy."""
    cards = [
        element(
            "article",
            join(
                [
                    element("h3", choice["title"]),
                    element("p", join([element("strong", choice["method"]), ". ", choice["reason"]])),
                    element("div", join([_code(choice["code"]), _copy_button()]), class_="code"),
                ]
            ),
        )
        for choice in recommended
    ]
    return section("recommended", "Recommended methods", *cards)


def _code(code: str) -> Html:
    return element("pre", element("code", code), tabindex="0", aria_label="Code", role="region")


def _copy_button() -> Html:
    return element("button", "Copy", type="button", class_="copy", aria_live="polite")


def _environment(report: dict[str, Any]) -> Html:
    """How the numbers were measured, versions and hardware, and links to the other files."""
    names = {"python": "Python", "jax": "JAX", "devices": "Devices", "platform": "Platform", "processors": "Processors"}
    facts = {"natgrad": report["natgrad"]} | {name: report["environment"][key] for key, name in names.items()}
    links = [
        ("report.json", "all numbers and texts of this page"),
        ("methods.csv", "one row for each method"),
        ("curves.csv", "one row for each point of a curve"),
    ]
    files = [element("li", join([element("a", name, href=name), f": {about}"])) for name, about in links]
    return section(
        "about",
        "How the numbers were measured",
        element("ul", join(element("li", line) for line in HOW_TO_READ)) if report["methods"] else "",
        element("dl", join(_fact(name, value) for name, value in facts.items()), class_="facts"),
        element("p", "The same numbers for other programs, in files beside this page:"),
        element("ul", join(files)),
    )
