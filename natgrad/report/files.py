"""Write the files of a report. Each is written whole or not at all."""

import csv
import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from natgrad._atomic_write import write_whole
from natgrad.report.page import page

# Columns of `methods.csv`, before settings and metrics.
FIELDS = (
    "name",
    "kind",
    "status",
    "note",
    "compilation",
    "seconds_per_step",
    "state_bytes",
    "final_loss",
    "lowest_loss",
    "final_held_out_loss",
    "steps_to_target",
    "seconds_to_target",
)


def write_report(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write `report.html`, `report.json`, `methods.csv` and `curves.csv` to a folder, which is created if needed.

    `schema.json` beside this file describes the fields of `report`. The page links to the other three files. Numbers
    that are not finite become null in the JSON and empty in the CSV. Needs plotly."""
    report = finite(report)
    contents = {
        "report.html": page(report),
        "report.json": json.dumps(report, allow_nan=False, ensure_ascii=False, indent=1) + "\n",
        "methods.csv": _csv(_method_rows(report)),
        "curves.csv": _csv(_curve_rows(report)),
    }
    return [write_whole(Path(folder) / name, text) for name, text in contents.items()]


def finite(value: Any) -> Any:
    """A value in the types of JSON, with `None` for numbers that are not finite."""
    if isinstance(value, np.ndarray | np.generic):
        # As Python numbers, since `json` writes no others.
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _csv(rows: Iterable[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _method_rows(report: dict[str, Any]) -> Iterable[list[Any]]:
    metrics = report["problem"]["metrics"]
    yield [*FIELDS, "settings", *(f"final_{name}" for name in metrics)]
    for method in report["methods"]:
        final = [method["final_metrics"].get(name) for name in metrics]
        yield [*(method[field] for field in FIELDS), _settings(method), *final]


def _curve_rows(report: dict[str, Any]) -> Iterable[list[Any]]:
    metrics = report["problem"]["metrics"]
    yield ["method", "settings", "step", "seconds", "loss", "held_out_loss", *metrics]
    for method in report["methods"]:
        for point in method["curve"]:
            values = [point[field] for field in ("step", "seconds", "loss", "held_out_loss")]
            yield [method["name"], _settings(method), *values, *(point["metrics"].get(name) for name in metrics)]


def _settings(method: dict[str, Any]) -> str:
    return json.dumps(method["settings"], ensure_ascii=False)
