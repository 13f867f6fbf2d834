"""Sections on the methods: curves, table and sweep."""

from collections.abc import Callable
from typing import Any, NamedTuple

from natgrad.report.charts import Chart
from natgrad.report.text import Html, capitalised, count, element, join, number, seconds, section, settings, table

# A metric with another name has no best value, since nothing says which way it improves.
HIGHER_IS_BETTER = {"accuracy", "auc", "elbo", "explained variance", "f1", "precision", "r2", "recall"}
LOWER_IS_BETTER = {"error", "mae", "mse", "nll", "perplexity", "relative error", "rmse", "root mean squared error"}


class Column(NamedTuple):
    """A column of numbers: its title, the value of a method, how it is written, and the best of several values."""

    title: str
    value: Callable[[dict[str, Any]], Any]
    written: Callable[[Any], str]
    best: Callable[[list[Any]], Any] | None = min


def curve_section(report: dict[str, Any], loss: Chart | None, metrics: list[Chart]) -> Html:
    """The loss and the metrics along the way, with the buttons that choose the axes."""
    if loss is None:
        return Html()
    description = loss.description
    buttons = [_buttons("x", "Horizontal axis", description["x"])]
    if len(description["y"]) > 1:
        buttons.append(_buttons("y", "Examples", {"training": "Training", "held_out": "Held-out"}))
    if len(description["y_scales"]) > 1:
        buttons.append(_buttons("scale", "Scale of the loss", {"log": "Log", "linear": "Linear"}))
    caption = ""
    if {method["kind"] for method in report["methods"]} == {"natural", "first-order"}:
        caption = "Natural-gradient methods are solid lines, first-order methods broken ones. "
    if "level" in description:
        caption += f"The thin line is the target, {number(report['target']['loss'])}: {report['target']['source']}."
    figures = [chart.figure() for chart in metrics]
    return section(
        "curves",
        "Along the way",
        element("div", join(buttons), class_="toolbar"),
        loss.figure(caption),
        element("div", join(figures), class_="pair"),
    )


def method_section(report: dict[str, Any]) -> Html:
    """The table of methods, the best value of each column marked."""
    methods = report["methods"]
    columns = [column for column in _columns(report) if any(column.value(m) is not None for m in methods)]
    best = [_best(column, methods) for column in columns]
    rows = []
    for method in methods:
        cells = [
            _mark(text) if text == best_text else text
            for column, best_text in zip(columns, best, strict=True)
            for text in [column.written(column.value(method))]
        ]
        chosen = element("div", settings(method["settings"]), class_="settings")
        outcome = element("div", join([_status(method), element("small", method["note"])], " "), class_="note")
        rows.append([_title(method), chosen, *cells, outcome])
    header = ["Method", "Settings", *(column.title for column in columns), "Status"]
    content = table("Methods", header, rows, range(2, 2 + len(columns)))
    legend = Html('<p class="quiet"><span class="star">★</span> marks the best value of a column.</p>')
    return section("methods", "Methods", content, legend if any(best) else "")


def sweep_section(chart: Chart | None) -> Html:
    """Lowest loss against the learning rate."""
    if chart is None:
        return Html()
    return section(
        "rates",
        "Learning rates",
        element("p", "Each first-order method is run with several learning rates, and the best one is compared above."),
        chart.figure("Lowest loss against the learning rate. A hollow mark is a run that did not complete."),
    )


def _columns(report: dict[str, Any]) -> list[Column]:
    columns = [
        Column("Steps to target", lambda m: m["steps_to_target"], count),
        Column("Time to target", lambda m: m["seconds_to_target"], seconds),
        Column("Final loss", lambda m: m["final_loss"], number),
        Column("Held-out loss", lambda m: m["final_held_out_loss"], number),
    ]
    for name in report["problem"]["metrics"]:
        best = max if name.lower() in HIGHER_IS_BETTER else min if name.lower() in LOWER_IS_BETTER else None
        columns.append(Column(capitalised(name), lambda m, name=name: m["final_metrics"].get(name), number, best))
    return [
        *columns,
        Column("Time a step", lambda m: m["seconds_per_step"], seconds),
        Column("Compilation", lambda m: m["compilation"], seconds),
    ]


def _best(column: Column, methods: list[dict[str, Any]]) -> str:
    """The best value of a column as it is written, if there are different ones to choose from."""
    values = [value for method in methods if (value := column.value(method)) is not None]
    return column.written(column.best(values)) if column.best and len(set(values)) > 1 else ""


def _mark(text: str) -> Html:
    star = Html('<span class="star" aria-hidden="true">★</span><span class="hidden"> (best)</span>')
    return element("strong", join([star, text]))


def _title(method: dict[str, Any]) -> Html:
    """Name and kind of a method, and its status where that is not as it should be."""
    status = "" if method["status"] == "complete" else element("small", _status(method))
    return join([method["name"], element("small", method["kind"]), status], " ")


def _status(method: dict[str, Any]) -> Html:
    sign = "" if method["status"] == "complete" else Html('<span aria-hidden="true">⚠ </span>')
    return join([sign, method["status"]])


def _buttons(name: str, label: str, choices: dict[str, str]) -> Html:
    buttons = [
        element("button", text, type="button", data_choice=name, data_value=value, aria_pressed=str(k == 0).lower())
        for k, (value, text) in enumerate(choices.items())
    ]
    title = element("span", label, class_="group-name", aria_hidden="true")
    return element("div", join([title, element("div", join(buttons), role="group", aria_label=label)]), class_="choice")
