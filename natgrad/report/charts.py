"""Charts of a report: a description that `page.js` draws in the colours of the page, and the numbers as a table."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from natgrad.report.html import Html, capitalised, count, element, folded, join, number, seconds, table

DASHES = ("dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down")
# How many colours `page.css` defines for lines.
COLOURS = 8


class Chart(NamedTuple):
    """A chart: the description that `page.js` draws, a sentence for screen readers, and the numbers as a table."""

    description: dict[str, Any]
    label: str
    numbers: Html

    def figure(self, caption: str = "") -> Html:
        """The place of the chart on the page."""
        plot = element("div", " ", class_="plot", id=self.description["id"], role="img", aria_label=self.label)
        legend = Html('<div class="legend" role="group" aria-label="Lines of the chart"></div>')
        folds = folded("Show the numbers", self.numbers)
        return element("figure", join([element("figcaption", caption), plot, legend, folds]))


def loss_chart(report: dict[str, Any]) -> Chart | None:
    """The loss of every method against steps or seconds, on training or held-out examples."""
    methods = _with_curves(report)
    held_out = any(point["held_out_loss"] is not None for method in methods for point in method["curve"])
    heights = {"training": "Training loss"} | ({"held_out": "Held-out loss"} if held_out else {})
    fields = {"training": "loss", "held_out": "held_out_loss"}
    lines = [
        _curve(report, method, {name: [point[fields[name]] for point in method["curve"]] for name in heights})
        for method in methods
    ]
    losses = [y for line in lines for values in line["y"].values() for y in values if y is not None]
    if not losses:
        return None
    description = _chart("loss", lines, heights)
    # A logarithmic axis leaves out a loss of zero, which is tolerable; losses below zero need a linear axis.
    description["y_scales"] = ["log", "linear"] if min(losses) >= 0 < max(losses) else ["linear"]
    if report["target"] and report["target"]["loss"] is not None:
        description["level"] = {"value": report["target"]["loss"], "name": "target"}
    columns = ["Training loss", "Held-out loss"][: 1 + held_out]

    def losses_at(point: dict[str, Any]) -> list[Any]:
        return [point["loss"], point["held_out_loss"]][: len(columns)]

    numbers = _curve_table("Loss by step", report, columns, losses_at)
    ends = [f"{method['name']} ends at {number(method['final_loss'])}" for method in methods]
    return Chart(description, f"Line chart of the loss against steps or seconds. {'; '.join(ends)}.", numbers)


def metric_chart(report: dict[str, Any], position: int) -> Chart | None:
    """One metric of every method against steps or seconds."""
    name = report["problem"]["metrics"][position]

    def values(method: dict[str, Any]) -> list[Any]:
        return [point["metrics"].get(name) for point in method["curve"]]

    methods = [method for method in _with_curves(report) if any(value is not None for value in values(method))]
    if not methods:
        return None
    lines = [_curve(report, method, {"metric": values(method)}) for method in methods]
    description = _chart(f"metric-{position}", lines, {"metric": capitalised(name)})
    numbers = _curve_table(f"{name} by step", report, [name], lambda point: [point["metrics"].get(name)])
    ends = [f"{method['name']} ends at {number(method['final_metrics'].get(name))}" for method in methods]
    return Chart(description, f"Line chart of {name} against steps or seconds. {'; '.join(ends)}.", numbers)


def sweep_chart(report: dict[str, Any]) -> Chart | None:
    """Lowest loss against the learning rate, one line a method."""
    lines, rows = [], []
    for position, method in enumerate(report["methods"]):
        for run in method["sweep"]:
            values = [count(run["steps"]), seconds(run["seconds"]), number(run["final_loss"])]
            row = [method["name"], _short(run["settings"]), *values, number(run["lowest_loss"]), run["status"]]
            rows.append(row)
        if runs := rated_runs(method):
            line = _line("method", position, method["name"], False, {"rate": [rate for rate, _ in runs]})
            losses = [run["lowest_loss"] for _, run in runs]
            lines.append(line | {"y": {"loss": losses}, "notes": [run["status"] for _, run in runs]})
    if not lines:
        return None
    description = _chart("sweep", lines, {"loss": "Lowest loss"}, {"rate": "Learning rate"})
    losses = [y for line in lines for y in line["y"]["loss"] if y is not None]
    scales = ["log"] if losses and min(losses) > 0 else ["linear"]
    description |= {"x_scale": "log", "y_scales": scales}
    header = ["Method", "Learning rate", "Steps", "Seconds", "Final loss", "Lowest loss", "Status"]
    numbers = table("All runs of the sweep", header, rows, range(1, 6))
    names = ", ".join(line["name"] for line in lines)
    return Chart(description, f"Line chart of the lowest loss against the learning rate, for {names}.", numbers)


def spectrum_chart(points: list[dict[str, Any]]) -> Chart | None:
    """Eigenvalues of the metric from the largest to the smallest, one line a point of parameter space."""
    lines, columns = [], []
    for position, point in enumerate(points):
        least = point["cutoff"] or 0.0
        shown = [(k, value) for k, value in enumerate(point["spectrum"], start=1) if (value or 0.0) > least]
        if shown:
            x, y = map(list, zip(*shown, strict=True))
            lines.append(_line("point", position, point["name"], True, {"index": x}) | {"y": {"eigenvalue": y}})
            columns.append(point)
    if not lines:
        return None
    description = _chart("spectrum", lines, {"eigenvalue": "Eigenvalue"}, {"index": "Index"})
    description |= {"x_scale": "log", "y_scales": ["log"]}
    # An empty cell where the spectrum of one point is shorter than the spectrum of another.
    spectra = itertools.zip_longest(*(map(number, point["spectrum"]) for point in columns), fillvalue="")
    rows = ([count(k), *eigenvalues] for k, eigenvalues in enumerate(spectra, start=1))
    header = ["Index", *(point["name"] for point in columns)]
    names = ", ".join(point["name"] for point in columns)
    label = f"Eigenvalues of the metric against their index, both axes logarithmic: {names}."
    return Chart(description, label, table("Eigenvalues", header, rows, range(1, len(header))))


def angle_chart(approximations: list[dict[str, Any]]) -> Chart | None:
    """Angles between the steps of approximations and the exact step, as bars."""
    shown = [row for row in approximations if row["angle"] is not None]
    if not shown:
        return None
    lines = []
    for position, point in enumerate(dict.fromkeys(row["point"] for row in shown)):
        rows = [row for row in shown if row["point"] == point]
        line = _line("point", position, point, True, {"angle": [row["angle"] for row in rows]})
        lines.append(line | {"y": {"structure": [row["structure"] for row in rows]}})
    description = _chart("angles", lines, {"structure": ""}, {"angle": "Angle to the exact step, in degrees"})
    description["kind"] = "bar"
    angles = "; ".join(f"{row['structure']} {row['point']} {number(row['angle'])}" for row in shown)
    rows = [[row["structure"], row["point"], f"{number(row['angle'])}°"] for row in shown]
    numbers = table("Angles to the exact step", ["Structure", "Parameters", "Angle"], rows, [2])
    return Chart(description, f"Bar chart of angles to the exact step, in degrees: {angles}.", numbers)


def rated_runs(method: dict[str, Any]) -> list[tuple[float, dict[str, Any]]]:
    """The runs of a learning-rate sweep, each after its learning rate, from the smallest to the largest."""
    runs = [(run["settings"].get("learning_rate"), run) for run in method["sweep"]]
    rated = [(rate, run) for rate, run in runs if isinstance(rate, int | float) and rate > 0]
    return sorted(rated, key=lambda pair: pair[0])


def _short(settings: dict[str, Any]) -> str:
    """The settings of a run in a cell: the learning rate, or else all of them."""
    written = {
        name: number(value) if isinstance(value, float | None) else str(value) for name, value in settings.items()
    }
    return written.get("learning_rate") or ", ".join(f"{name} {value}" for name, value in written.items())


def _with_curves(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [method for method in report["methods"] if method["curve"]]


def _chart(anchor: str, lines: list[Any], heights: dict[str, str], axes: dict[str, str] | None = None) -> dict:
    return {
        "id": anchor,
        "kind": "line",
        "x": axes or {"step": "Steps", "seconds": "Seconds"},
        "y": heights,
        "x_scale": "linear",
        "y_scales": ["linear"],
        "lines": lines,
    }


def _line(group: str, position: int, name: str, is_solid: bool, x: dict[str, list[Any]]) -> dict[str, Any]:
    """A line of a chart. Its colour and marks follow from its position, so a method looks the same in all charts."""
    return {
        "key": f"{group}-{position}",
        "name": name,
        "colour": position % COLOURS,
        "dash": "solid" if is_solid else DASHES[position % len(DASHES)],
        "symbol": SYMBOLS[position % len(SYMBOLS)],
        "frames": True,
        "x": x,
    }


def _curve(report: dict[str, Any], method: dict[str, Any], heights: dict[str, list[Any]]) -> dict[str, Any]:
    """The line of a method against steps and seconds."""
    # By identity: two methods may be equal in all their fields.
    position = next(k for k, other in enumerate(report["methods"]) if other is method)
    x = {axis: [point[axis] for point in method["curve"]] for axis in ("step", "seconds")}
    line = _line("method", position, method["name"], method["kind"] == "natural", x)
    return line | {"y": heights, "frames": method["status"] not in ("diverged", "failed")}


def _curve_table(
    caption: str, report: dict[str, Any], columns: list[str], values: Callable[[dict[str, Any]], list[Any]]
) -> Html:
    """The points of all curves, one a row; `values` returns the cells of `columns` for a point."""
    rows: Iterable[list[str]] = (
        [method["name"], count(point["step"]), seconds(point["seconds"]), *map(number, values(point))]
        for method in report["methods"]
        for point in method["curve"]
    )
    return table(caption, ["Method", "Step", "Seconds", *columns], rows, range(1, 3 + len(columns)))
