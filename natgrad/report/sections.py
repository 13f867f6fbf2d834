"""Sections on the methods: curves, table and sweep."""

from collections.abc import Callable
from typing import Any, NamedTuple

from natgrad._text import size
from natgrad.report.charts import Chart
from natgrad.report.html import Html, capitalised, count, element, join, number, seconds, section, settings, table

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


APPROXIMATIONS = ("Structure", "At", "Angle", "Length", "Predicted decrease", "Actual decrease", "Note")


def geometry_section(report: dict[str, Any], spectrum: Chart | None, angles: Chart | None) -> Html:
    """What the metric looks like, and how well its approximations do."""
    geometry = report["geometry"]
    if geometry is None:
        left_out = join(["It was not looked at. ", element("code", "natgrad inspect"), " does."])
        return section("geometry", "Geometry", element("p", left_out))
    parameters = report["problem"]["parameters"]
    sentences = [element("li", _rank(point, parameters)) for point in geometry["points"]]
    return section(
        "geometry",
        "Geometry",
        element("ul", join(sentences), class_="points"),
        spectrum.figure("Eigenvalues of the metric that are not rounding, from the largest to the smallest.")
        if spectrum
        else "",
        _approximations(geometry, angles),
        _structure(geometry["structure"]),
    )


def _rank(point: dict[str, Any], parameters: int | None) -> Html:
    name = element("strong", capitalised(point["name"]))
    if point["rank"] is None:
        return join([name, ": the rank is not known."])
    plural = "" if point["examples"] == 1 else "s"
    examples = f" on {count(point['examples'])} example{plural}" if point["examples"] else ""
    text = f": rank {count(point['rank'])} of {count(parameters)} parameters{examples}."
    if point["nullity"]:
        text += f" To first order, {count(point['nullity'])} directions of the parameters leave the outputs alone."
    if point["is_limited_by_examples"]:
        text += f" With so few examples it is at most {count(len(point['spectrum']))}; with more it may be higher."
    if point["condition"] is not None:
        text += f" Above the cutoff the condition number is {number(point['condition'])}."
    if point["is_proper"] is not None:
        text += {
            True: " Nearby it is no larger: the point is proper, as far as that shows.",
            False: " Nearby it is larger: the point is not proper, and some directions of the model are out of reach "
            "from here.",
        }[point["is_proper"]]
    return join([name, text])


def _approximations(geometry: dict[str, Any], angles: Chart | None) -> Html:
    rows = _approximation_table(geometry["approximations"])
    if not rows:
        return Html()
    words = (
        "Angle and length compare the step with the exact natural-gradient step, in the damped metric: 0° and 1 are "
        "the exact step. The decreases are those of the loss after a step of the length that the quadratic model finds "
        f"best, as that predicts it and as it turned out. {_dampings(geometry['points'])}"
    )
    chart = angles.figure("Angles to the exact step; shorter is better.") if angles else ""
    return join([element("h3", "Approximations"), element("p", words), rows, chart])


def _dampings(points: list[dict[str, Any]]) -> str:
    known = [f"{number(point['damping'])} {point['name']}" for point in points if point["damping"] is not None]
    return f"All are damped by {', '.join(known)}." if known else ""


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


def _structure(blocks: list[dict[str, Any]]) -> Html:
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
    header = ("Parameter", "Shape", "Uses", "Structure", "Factors", "Numbers", "Memory", "Note")
    return join([element("h3", "Blocks of the metric"), table("Blocks of the metric", header, rows, (2, 5, 6))])


def _product(shape: list[int]) -> str:
    return "\u00a0×\u00a0".join(map(count, shape)) or "scalar"
