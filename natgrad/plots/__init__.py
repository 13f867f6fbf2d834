"""Figures of the documentation, computed by natgrad. Each function takes a theme, `"light"` or `"dark"`, and returns a
matplotlib figure."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from natgrad._text import track
from natgrad.plots._bregman_gap import bregman as bregman
from natgrad.plots._contours import contours as contours
from natgrad.plots._function_space import function_space as function_space
from natgrad.plots._gaussians import fisher_ellipses as fisher_ellipses
from natgrad.plots._gaussians import steepest_descent as steepest_descent
from natgrad.plots._matrices import matrix_map as matrix_map
from natgrad.plots._overparametrised import overparametrised as overparametrised
from natgrad.plots._push_and_pull import pullback as pullback
from natgrad.plots._rosenbrock_descent import rosenbrock as rosenbrock
from natgrad.plots._rosenbrock_descent import rosenbrock_steps as rosenbrock_steps
from natgrad.plots._style import PALETTES

FIGURES: dict[str, Callable[..., Any]] = {
    "rosenbrock": rosenbrock,
    "contours": contours,
    "function-space": function_space,
    "bregman": bregman,
    "fisher-ellipses": fisher_ellipses,
    "steepest-descent": steepest_descent,
    "matrix-map": matrix_map,
    "pullback": pullback,
    "overparametrised": overparametrised,
}


def save_figures(
    names: Iterable[str], folder: Any, *, formats: Sequence[str] = ("svg", "png"), progress: bool = False
) -> list[Path]:
    """Draw figures in both themes, and return the paths of the files `<name>-light` and `<name>-dark` in all formats.

    **Arguments:**

    - `names`: names of figures, keys of `FIGURES`; all of them if empty.
    - `folder`: the folder to write to, created if it does not exist.
    - `formats`: file formats of matplotlib, by default SVG and PNG.
    - `progress`: whether to show a progress bar, by default not.

    ```python
    from natgrad import plots

    plots.save_figures(["bregman"], "figures", formats=["svg"])
    ```
    """
    names = list(names) or list(FIGURES)
    if unknown := [name for name in names if name not in FIGURES]:
        raise ValueError(f"There is no figure named {', '.join(unknown)}. Choose from {', '.join(FIGURES)}.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    pairs = [(name, theme) for name in names for theme in PALETTES]
    for name, theme in track(pairs, "Figures", show=progress):
        figure = FIGURES[name](theme)
        for suffix in formats:
            path = folder / f"{name}-{theme}.{suffix}"
            figure.savefig(path, dpi=200, metadata={"Date": None} if suffix == "svg" else None)
            paths.append(path)
    return paths
