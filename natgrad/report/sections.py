"""Sections of a report: loss curves, table of methods, learning-rate sweep, and geometry."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from natgrad._text import size
from natgrad.report.charts import Chart
from natgrad.report.html import Html, capitalised, count, element, join, number, seconds, section, settings, table

# Metrics with other names get no mark for the best value: nothing says whether higher or lower is better.
HIGHER_IS_BETTER = {"accuracy", "auc", "elbo", "explained variance", "f1", "precision", "r2", "recall"}
LOWER_IS_BETTER = {"error", "mae", "mse", "nll", "perplexity", "relative error", "rmse", "root mean squared error"}


class Column(NamedTuple):
    """A column of the table of methods.

    `value` reads the number of a method from the report, `form` writes it, and `best` chooses among several."""

    title: str
    value: Callable[[dict[str, Any]], Any]
    form: Callable[[Any], str]
    best: Callable[[list[Any]], Any] | None = min


def curve_section(report: dict[str, Any], loss: Chart | None, metrics: list[Chart]) -> Html:
    """Curves of the loss and of the metrics, with buttons to choose the axes."""
    if loss is None:
        return Html()
    description = loss.description
    buttons = [_buttons("x", "Horizontal axis", description["x"])]
    if len(description["y"]) > 1:
        buttons.append(_buttons("y", "Data", {"training": "Training", "held_out": "Held-out"}))
    if len(description["y_scales"]) > 1:
        buttons.append(_buttons("scale", "Loss axis", {"log": "Log", "linear": "Linear"}))
    caption = ""
    if {method["kind"] for method in report["methods"]} == {"natural", "first-order"}:
        caption = "Solid lines: natural-gradient methods; broken lines: first-order methods. "
    if "level" in description:
        caption += f"Thin line: the target loss of {number(report['target']['loss'])}, {report['target']['source']}."
    figures = [chart.figure() for chart in metrics]
    return section(
        "curves",
        "Loss curves",
        element("div", join(buttons), class_="toolbar"),
        loss.figure(caption),
        element("div", join(figures), class_="pair"),
    )


def method_section(report: dict[str, Any]) -> Html:
    """The table of methods, with the best value of each column marked."""
    methods = report["methods"]
    columns = [column for column in _columns(report) if any(column.value(method) is not None for method in methods)]
    best = [_best(column, methods) for column in columns]
    rows = []
    for method in methods:
        cells = [
            _mark(text) if text == best_text else text
            for column, best_text in zip(columns, best, strict=True)
            for text in [column.form(column.value(method))]
        ]
        details = element("div", settings(method["settings"]), class_="settings")
        outcome = element("div", join([_status(method), element("small", method["note"])], " "), class_="note")
        rows.append([_title(method), details, *cells, outcome])
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
        "Learning-rate sweep",
        element("p", "Each first-order method ran with several learning rates; its best run is in the table above."),
        chart.figure("Lowest loss against the learning rate. Hollow marks: runs that did not complete."),
    )


def _columns(report: dict[str, Any]) -> list[Column]:
    return [
        Column("Steps to target", itemgetter("steps_to_target"), count),
        Column("Time to target", itemgetter("seconds_to_target"), seconds),
        Column("Final loss", itemgetter("final_loss"), number),
        Column("Final held-out loss", itemgetter("final_held_out_loss"), number),
        *(_metric_column(name) for name in report["problem"]["metrics"]),
        Column("Time per step", itemgetter("seconds_per_step"), seconds),
        Column("Compilation", itemgetter("compilation"), seconds),
    ]


def _metric_column(name: str) -> Column:
    best = max if name.lower() in HIGHER_IS_BETTER else min if name.lower() in LOWER_IS_BETTER else None
    return Column(capitalised(name), lambda method: method["final_metrics"].get(name), number, best)


def _best(column: Column, methods: list[dict[str, Any]]) -> str:
    """The best value of a column as text, or nothing if all values are equal."""
    values = [value for method in methods if (value := column.value(method)) is not None]
    return column.form(column.best(values)) if column.best and len(set(values)) > 1 else ""


def _mark(text: str) -> Html:
    star = Html('<span class="star" aria-hidden="true">★</span><span class="hidden"> (best)</span>')
    return element("strong", join([star, text]))


def _title(method: dict[str, Any]) -> Html:
    """Name and kind of a method, and its status if it did not complete."""
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


APPROXIMATIONS = ("Structure", "Parameters", "Angle", "Length", "Predicted decrease", "Actual decrease", "Note")


def geometry_section(report: dict[str, Any], spectrum: Chart | None, angles: Chart | None) -> Html:
    """Rank and spectrum of the metric, the quality of its approximations, and the block of every parameter."""
    geometry = report["geometry"]
    if geometry is None:
        advice = join(["Not examined in this run. Run ", element("code", "natgrad inspect"), " to examine it."])
        return section("geometry", "Geometry", element("p", advice))
    parameters = report["problem"]["parameters"]
    sentences = [element("li", _rank(point, parameters)) for point in geometry["points"]]
    return section(
        "geometry",
        "Geometry",
        element("ul", join(sentences), class_="points"),
        spectrum.figure("Eigenvalues of the metric above numerical precision, from the largest to the smallest.")
        if spectrum
        else "",
        _approximations(geometry, angles),
        _block_table(geometry["structure"]),
    )


def _rank(point: dict[str, Any], parameters: int | None) -> Html:
    """Rank, nullity and condition number of the metric at a point, in words."""
    name = element("strong", capitalised(point["name"]))
    if point["rank"] is None:
        return join([name, ": rank not known."])
    plural = "" if point["examples"] == 1 else "s"
    examples = f" on {count(point['examples'])} example{plural}" if point["examples"] else ""
    text = f": rank {count(point['rank'])} of {count(parameters)} parameters{examples}."
    if point["nullity"]:
        text += f" {count(point['nullity'])} directions of the parameters do not change the outputs, to first order."
    if point["is_limited_by_examples"]:
        text += f" The examples limit the rank to {count(len(point['spectrum']))}; with more data it may be larger."
    if point["condition"] is not None:
        text += f" The condition number is {number(point['condition'])} (eigenvalues above the cutoff)."
    if point["is_proper"] is not None:
        text += {
            True: " The rank does not grow nearby: no singularity detected.",
            False: " The rank is larger nearby: these parameters are a singularity of the model, where some changes of "
            "the outputs are out of reach of a small step.",
        }[point["is_proper"]]
    return join([name, text])


def _approximations(geometry: dict[str, Any], angles: Chart | None) -> Html:
    rows = _approximation_table(geometry["approximations"])
    if not rows:
        return Html()
    words = (
        "Angle and length compare the step with the exact natural-gradient step, in the damped metric: the exact step "
        "has angle 0° and length 1. Predicted and actual decrease of the loss are for the step length that minimises "
        f"the quadratic model. {_dampings(geometry['points'])}"
    )
    chart = angles.figure("Angle to the exact step: smaller is better.") if angles else ""
    return join([element("h3", "Approximations"), element("p", words), rows, chart])


def _dampings(points: list[dict[str, Any]]) -> str:
    """The damping at every point."""
    dampings = [f"{number(point['damping'])} {point['name']}" for point in points if point["damping"] is not None]
    return f"Damping of all steps: {', '.join(dampings)}." if dampings else ""


def _approximation_table(approximations: list[dict[str, Any]]) -> Html:
    rows = [
        [
            row["structure"],
            row["point"],
            number(row["angle"]) + "°" * (row["angle"] is not None),
            number(row["norm"]),
            number(row["predicted_decrease"]),
            number(row["actual_decrease"]),
            row["note"],
        ]
        for row in approximations
    ]
    return table("Approximations to the metric", APPROXIMATIONS, rows, range(2, 6))


def _block_table(blocks: list[dict[str, Any]]) -> Html:
    """The block of every parameter."""
    rows = [
        [
            element("code", block["path"]),
            _product(block["shape"]),
            count(block["uses"]),
            join([Html('<span aria-hidden="true">⚠ </span>'), block["structure"], " (fallback)"])
            if block["is_fallback"]
            else block["structure"],
            ", ".join(map(_product, block["factors"])),
            count(block["numbers"]),
            size(block["bytes"]) if block["bytes"] is not None else None,
            block["note"],
        ]
        for block in blocks
    ]
    if not rows:
        return Html()
    header = ("Parameter", "Shape", "Uses", "Block", "Factors", "Entries", "Memory", "Note")
    return join([element("h3", "Blocks of the metric"), table("Blocks of the metric", header, rows, (2, 5, 6))])


def _product(shape: list[int]) -> str:
    return "\u00a0×\u00a0".join(map(count, shape)) or "scalar"
