"""The style of all figures: a light and a dark theme with colours that colour-blind readers can tell apart."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np


class Palette(NamedTuple):
    """Colours of a theme. The colours of lines are by Okabe and Ito, or lighter versions for a dark background."""

    paper: str
    ink: str
    faint: str
    fill: str
    blue: str
    red: str
    green: str
    purple: str
    shades: str


PALETTES = {
    "light": Palette("#ffffff", "#1f2328", "#8c959f", "#eaeef2", "#0072B2", "#D55E00", "#009E73", "#B0508A", "Greys"),
    "dark": Palette("#11161d", "#e6edf3", "#7d8590", "#222b36", "#56B4E9", "#FF9155", "#35C99B", "#E69AC4", "bone"),
}


def themed(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Turn `draw(palette)` into a function of a theme, `"light"` or `"dark"`, that computes in double precision."""

    @functools.wraps(draw)
    def figure(theme: str = "light"):
        import matplotlib

        if theme not in PALETTES:
            raise ValueError(f"There is no theme `{theme}`. Choose from {', '.join(PALETTES)}.")
        with matplotlib.rc_context(rc=_settings(PALETTES[theme])), jax.enable_x64(True):
            return draw(PALETTES[theme])

    return figure


def canvas(columns: int = 1, *, height: float = 3.6, width: float | None = None, sharey: bool = False) -> Any:
    """A figure with panels side by side, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width or 4.0 * columns, height), layout="constrained")
    axes = figure.subplots(1, columns, sharey=sharey)
    return figure, axes


def arrow(axes: Any, start: Any, step: Any, color: str, label: str | None = None) -> None:
    """Draw an arrow from a point, with an entry in the legend."""
    start, step = np.asarray(start), np.asarray(step)
    options = dict(arrowstyle="-|>", color=color, linewidth=2.0, shrinkA=0, shrinkB=0, mutation_scale=14)
    axes.annotate("", start + step, start, arrowprops=options, zorder=4)
    axes.plot([], [], color=color, linewidth=2.0, label=label)
    axes.update_datalim([start, start + step])


def ellipse(metric: Any, centre: Any, radius: float = 1.0, count: int = 200) -> np.ndarray:
    """Points at distance `radius` from a centre, in a metric of the plane."""
    angles = np.linspace(0, 2 * np.pi, count)
    circle = np.stack([np.cos(angles), np.sin(angles)])
    root = np.linalg.cholesky(np.linalg.inv(np.asarray(metric)))
    return np.asarray(centre) + radius * (root @ circle).T


def _settings(palette: Palette) -> Any:
    return {
        "figure.facecolor": palette.paper,
        "axes.facecolor": palette.paper,
        "savefig.facecolor": palette.paper,
        "text.color": palette.ink,
        "axes.labelcolor": palette.ink,
        "axes.edgecolor": palette.faint,
        "xtick.color": palette.ink,
        "ytick.color": palette.ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "font.size": 10,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.linewidth": 1.8,
        "mathtext.fontset": "cm",
    }
