import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import natgrad as ng
from natgrad.plots._style import canvas, themed

NAMES = ("Hessian", "Gauss-Newton", "Fisher", "empirical Fisher", "gradient covariance")


class Situation(NamedTuple):
    """A regression of counts: how outputs are read, and where."""

    title: str
    is_linear: bool
    is_charted: bool
    is_fitted: bool


SITUATIONS = (
    Situation("linear model,\nnatural parameters", True, False, False),
    Situation("network,\nnatural parameters", False, False, False),
    Situation("network,\noutputs are rates", False, True, False),
    Situation("linear model,\nat its minimum", True, False, True),
)


def matrices(situation: Situation) -> dict[str, np.ndarray]:
    """The five matrices, dense."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(12, 2)))
    y = jnp.asarray(np.random.default_rng(1).poisson(2.0, 12).astype(float))

    def model(w, x):
        z = x @ w[:2] if situation.is_linear else jnp.tanh(x @ w[:2]) * w[2] + w[3]
        # Softplus rates, whose logarithm is the natural parameter.
        return jax.nn.softplus(z) + 0.1 if situation.is_charted else z

    read = jnp.log if situation.is_charted else lambda z: z
    loss = lambda z, y: jnp.exp(read(z)) - y * read(z)
    geometry = ng.Fisher(ng.Poisson(), chart=jnp.log) if situation.is_charted else ng.Fisher(ng.Poisson())
    cost = lambda w: jnp.mean(jax.vmap(loss)(model(w, x), y))
    newton = lambda _, w: w - jnp.linalg.solve(jax.hessian(cost)(w), jax.grad(cost)(w))

    @jax.jit
    def found(w):
        w = jax.lax.fori_loop(0, 20 if situation.is_fitted else 0, newton, w)
        each = [
            ng.hessian(cost, w),
            ng.gauss_newton(model, loss, w, x, y),
            ng.pullback(model, geometry, w, x),
            ng.empirical_fisher(model, loss, w, x, y),
            ng.gradient_covariance(model, loss, w, x, y),
        ]
        return [matrix.as_matrix() for matrix in each]

    w = jnp.array([0.3, -0.2]) if situation.is_linear else jnp.array([0.3, -0.2, 0.7, 0.4])
    return {name: np.asarray(matrix) for name, matrix in zip(NAMES, found(w), strict=True)}


@functools.cache
def differences(situation: Situation) -> np.ndarray:
    """How far apart they are, in pairs: the norm of the difference over the mean norm."""
    found = list(matrices(situation).values())
    size = np.linalg.norm
    return np.array([[2 * size(a - b) / (size(a) + size(b)) for b in found] for a in found])


@themed
def matrix_map(palette):
    """Five matrices that go by similar names, and how far apart they are. The Fisher matrix is
    that of Gauss-Newton where outputs are natural parameters, and the Hessian too if the model is linear in them; the
    empirical Fisher is neither, and differs from the covariance of gradients by the mean gradient."""
    figure, axes = canvas(len(SITUATIONS), height=4.4, width=13.0, sharey=True)
    for panel, situation in zip(axes, SITUATIONS, strict=True):
        table = differences(situation)
        panel.imshow(np.minimum(table, 1.0), vmin=0, vmax=1, cmap="cividis")
        for row in range(len(NAMES)):
            for column in range(len(NAMES)):
                value = table[row, column]
                text = "=" if value < 1e-6 else f"{value:.2f}".removeprefix("0")
                color = "white" if value < 0.55 else "black"
                panel.text(column, row, text, ha="center", va="center", color=color, fontsize=9)
        panel.set_xticks(range(len(NAMES)), NAMES, rotation=55, ha="right")
        panel.set_yticks(range(len(NAMES)), NAMES)
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
        panel.set_title(situation.title)
    bar = figure.colorbar(axes[0].images[0], ax=axes, shrink=0.7, pad=0.01)
    bar.set_label("relative difference")
    bar.outline.set_visible(False)
    return figure
