r"""A dissimilarity $\rho(f(x), f(x_0))$ of outputs, and the metric as its quadratic approximation."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import natgrad as ng
from natgrad.plots._rosenbrock_descent import outputs
from natgrad.plots._style import canvas, ellipse, themed

CENTRE = (-0.6, 0.4)
LEVELS = (0.05, 0.5, 2.0)


def distances(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The dissimilarity between the outputs of points and of the centre, and its quadratic approximation."""
    centre = jnp.array(CENTRE)
    metric = ng.pullback(outputs, ng.Euclidean(), centre)

    def both(x: Array) -> tuple[Array, Array]:
        step = x - centre
        return ng.function_distance(outputs, ng.Euclidean(), centre, x), metric.inner(step, step) / 2

    exact, quadratic = jax.jit(jax.vmap(both))(jnp.asarray(points).reshape(-1, 2))
    shape = points.shape[:-1]
    return np.asarray(exact).reshape(shape), np.asarray(quadratic).reshape(shape)


@themed
def contours(palette):
    """Points whose outputs are equally far from the output of the centre, for the residuals of the Rosenbrock function.

    Close to the centre, the contours of the dissimilarity are the ellipses of the metric."""
    figure, axes = canvas(1, height=4.2, width=5.4)
    wide, high = np.linspace(-2.2, 1.2, 400), np.linspace(-0.9, 2.9, 400)
    exact, _ = distances(np.stack(np.meshgrid(wide, high), axis=-1))
    axes.contour(wide, high, exact, LEVELS, colors=palette.green, linewidths=1.8)
    metric = ng.pullback(outputs, ng.Euclidean(), jnp.array(CENTRE)).as_matrix()
    for level in LEVELS:
        axes.plot(*ellipse(metric, CENTRE, np.sqrt(2 * level)).T, color=palette.blue, linestyle="--", linewidth=1.5)
    axes.plot(*CENTRE, "o", color=palette.ink)
    axes.plot([], [], color=palette.green, label=r"exact, $\rho(f(x), f(x_0))$")
    axes.plot([], [], color=palette.blue, linestyle="--", label=r"quadratic, $\frac{1}{2}(x - x_0)^\top G\,(x - x_0)$")
    axes.set(xlim=(-2.2, 1.2), ylim=(-0.9, 2.9), xlabel="$x_1$", ylabel="$x_2$")
    axes.set_title("Equally far apart as outputs")
    axes.legend(loc="upper right")
    return figure
