"""Figures of the theory, from the library's own computations. Each function returns a figure of matplotlib, for the
theme `"light"` or `"dark"`."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from natgrad._text import track
from natgrad.plots._bregman import bregman as bregman
from natgrad.plots._contours import contours as contours
from natgrad.plots._function_space import function_space as function_space
from natgrad.plots._gaussians import fisher_ellipses as fisher_ellipses
from natgrad.plots._gaussians import steepest_descent as steepest_descent
from natgrad.plots._matrices import matrix_map as matrix_map
from natgrad.plots._overparametrised import overparametrised as overparametrised
from natgrad.plots._pullback import pullback as pullback
from natgrad.plots._rosenbrock import rosenbrock as rosenbrock
from natgrad.plots._rosenbrock import rosenbrock_steps as rosenbrock_steps
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
    """Draw figures, by name or all if none is given, into a folder: `<name>-light` and `<name>-dark`, each in all
    formats. Returns the paths."""
    chosen = list(names) or list(FIGURES)
    if unknown := [name for name in chosen if name not in FIGURES]:
        raise ValueError(f"There is no figure named {', '.join(unknown)}. Choose from {', '.join(FIGURES)}.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    pairs = [(name, theme) for name in chosen for theme in PALETTES]
    for name, theme in track(pairs, "Figures", show=progress):
        figure = FIGURES[name](theme)
        for suffix in formats:
            path = folder / f"{name}-{theme}.{suffix}"
            figure.savefig(path, dpi=200, metadata={"Date": None} if suffix == "svg" else None)
            paths.append(path)
    return paths
