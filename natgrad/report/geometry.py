"""The section on the geometry: rank and spectrum of the metric, approximations to it, and its blocks."""

from typing import Any

from natgrad._text import size
from natgrad.report.charts import Chart
from natgrad.report.text import Html, capitalised, count, element, join, number, section, table

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
