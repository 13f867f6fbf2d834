r"""The distance between two parameters as functions: $\frac1N\sum_i\frac12|f(x_i, w') - f(x_i, w)|^2$."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import natgrad as ng
from natgrad.plots._style import canvas, themed

POINTS = np.array([-1.6, -0.5, 0.7, 1.7])


def model(params: dict[str, Array], x: Array) -> Array:
    return jnp.tanh(x[:, None] * params["a"][None] + params["b"][None]) @ params["c"]


def two_parameters() -> tuple[dict[str, Array], dict[str, Array]]:
    first = {"a": jnp.array([1.5, -2.0]), "b": jnp.array([0.5, 1.0]), "c": jnp.array([1.0, 0.8])}
    second = {"a": jnp.array([1.1, -1.5]), "b": jnp.array([0.1, 0.4]), "c": jnp.array([1.3, 0.5])}
    return first, second


def gaps() -> tuple[np.ndarray, float]:
    """The differences of the outputs at the four points, and the distance of the parameters as functions."""
    first, second = two_parameters()
    x = jnp.asarray(POINTS)
    distance = ng.function_distance(model, ng.Euclidean(), first, second, x)
    return np.asarray(model(second, x) - model(first, x)), float(distance)


@themed
def function_space(palette):
    """The distance between two parameters as functions depends on the data only: here it is the mean over four inputs
    of half the squared gap."""
    figure, axes = canvas(1, height=3.8, width=6.0)
    first, second = two_parameters()
    x = jnp.linspace(-2.4, 2.4, 300)
    axes.plot(x, jax.jit(model)(first, x), color=palette.blue, label="$f(x, w)$")
    axes.plot(x, jax.jit(model)(second, x), color=palette.red, label="$f(x, w')$")
    low, high = model(first, jnp.asarray(POINTS)), model(second, jnp.asarray(POINTS))
    axes.vlines(POINTS, low, high, color=palette.ink, linewidth=2.5)
    axes.plot(POINTS, low, "o", color=palette.blue)
    axes.plot(POINTS, high, "o", color=palette.red)
    axes.set(xlabel="$x$", ylabel="output")
    axes.set_title(rf"Distance as functions: $\frac{{1}}{{4}}\sum_i\frac{{1}}{{2}}|\Delta z_i|^2$ = {gaps()[1]:.3f}")
    axes.legend(loc="upper left")
    return figure
