r"""A map with Jacobian $J$ pushes vectors forward, $J v$, and pulls covectors, $J^\top c$, and metrics, $J^\top J$,
back."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import natgrad as ng
from natgrad.plots._style import arrow, canvas, ellipse, themed

POINT = (0.5, 0.3)
STEP = (0.55, 0.15)
SLOPE = (1.0, -0.6)


def f(w: Array) -> Array:
    return jnp.array([w[0] + 0.4 * w[1] ** 2, 0.9 * w[1] + 0.7 * w[0] ** 2])


def objects() -> dict[str, np.ndarray]:
    """A vector and its pushforward, a covector and its pullback, and the pullback of the Euclidean metric, at one
    point."""
    w = jnp.array(POINT)
    vector, covector = ng.Vector(jnp.array(STEP)), ng.Covector(jnp.array(SLOPE))
    arrays = {
        "vector": vector.tree,
        "pushed": ng.pushforward(f, w, vector).tree,
        "covector": covector.tree,
        "pulled": ng.pullback_covector(f, w, covector).tree,
        "metric": ng.pullback(f, ng.Euclidean(), w).as_matrix(),
        "jacobian": jax.jacobian(f)(w),
    }
    return {name: np.asarray(value) for name, value in arrays.items()}


@themed
def pullback(palette):
    """Vectors are pushed forward along a map. Covectors, drawn by their level lines, are pulled back, and so is a
    metric: the circle of the outputs is the image of an ellipse of the parameters. A vector crosses equally many lines
    on both sides."""
    figure, (left, right) = canvas(2, height=4.3)
    arrays, radius = objects(), 0.45
    w, z = np.array(POINT), np.asarray(f(jnp.array(POINT)))
    grid = np.linspace(-1, 2, 13)
    for value in grid:
        for line in (
            np.stack([np.full(60, value), np.linspace(-1, 2, 60)]),
            np.stack([np.linspace(-1, 2, 60), np.full(60, value)]),
        ):
            left.plot(*line, color=palette.fill, linewidth=0.8, zorder=0)
            right.plot(*np.asarray(jax.vmap(f)(jnp.asarray(line.T))).T, color=palette.fill, linewidth=0.8, zorder=0)
    sides = (
        (left, w, arrays["vector"], arrays["pulled"], arrays["metric"], "Parameters"),
        (right, z, arrays["pushed"], arrays["covector"], np.eye(2), "Outputs"),
    )
    for axes, point, vector, covector, metric, title in sides:
        along = np.array([-covector[1], covector[0]]) / np.linalg.norm(covector)
        for height in np.arange(-6, 7) * 0.15:
            foot = point + height * covector / (covector @ covector)
            axes.plot(*np.stack([foot - 3 * along, foot + 3 * along]).T, color=palette.red, linewidth=0.7, alpha=0.7)
        axes.plot([], [], color=palette.red, linewidth=0.9, label="covector: pulled back")
        axes.plot(*ellipse(metric, point, radius).T, color=palette.green, label="metric: pulled back")
        arrow(axes, point, vector, palette.blue, "vector: pushed forward")
        axes.plot(*point, "o", color=palette.ink, zorder=5)
        axes.set(
            aspect="equal", title=title, xlim=point[0] + np.array([-0.85, 0.95]), ylim=point[1] + np.array([-0.9, 0.9])
        )
    left.set(xlabel="$w_1$", ylabel="$w_2$")
    right.set(xlabel="$z_1$", ylabel="$z_2$")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
