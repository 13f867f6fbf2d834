"""Five matrices that are often confused: Hessian, Gauss-Newton, Fisher, empirical Fisher and gradient covariance."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import natgrad as ng
from natgrad.plots._style import canvas, themed

NAMES = ("Hessian", "Gauss-Newton", "Fisher", "empirical Fisher", "gradient covariance")


class Situation(NamedTuple):
    """A Poisson regression: linear model or network, outputs as rates or natural parameters, at the minimum or not."""

    title: str
    is_linear: bool
    has_rates: bool
    is_fitted: bool


SITUATIONS = (
    Situation("linear model,\nnatural parameters", True, False, False),
    Situation("network,\nnatural parameters", False, False, False),
    Situation("network,\noutputs are rates", False, True, False),
    Situation("linear model,\nat its minimum", True, False, True),
)


def matrices(situation: Situation) -> dict[str, np.ndarray]:
    """The five matrices of a situation, dense."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(12, 2)))
    y = jnp.asarray(np.random.default_rng(1).poisson(2.0, 12).astype(float))

    def model(w, x):
        z = x @ w[:2] if situation.is_linear else jnp.tanh(x @ w[:2]) * w[2] + w[3]
        # Softplus rates, whose logarithm is the natural parameter.
        return jax.nn.softplus(z) + 0.1 if situation.has_rates else z

    def loss(z, y):
        eta = jnp.log(z) if situation.has_rates else z
        return jnp.exp(eta) - y * eta

    def cost(w):
        return jnp.mean(jax.vmap(loss)(model(w, x), y))

    def newton_step(_, w):
        return w - jnp.linalg.solve(jax.hessian(cost)(w), jax.grad(cost)(w))

    geometry = ng.Fisher(ng.Poisson(), chart=jnp.log) if situation.has_rates else ng.Fisher(ng.Poisson())

    @jax.jit
    def matrices_at(w):
        w = jax.lax.fori_loop(0, 20 if situation.is_fitted else 0, newton_step, w)
        metrics = [
            ng.hessian(cost, w),
            ng.gauss_newton(model, loss, w, x, y),
            ng.pullback(model, geometry, w, x),
            ng.empirical_fisher(model, loss, w, x, y),
            ng.gradient_covariance(model, loss, w, x, y),
        ]
        return [metric.as_matrix() for metric in metrics]

    w = jnp.array([0.3, -0.2]) if situation.is_linear else jnp.array([0.3, -0.2, 0.7, 0.4])
    return {name: np.asarray(matrix) for name, matrix in zip(NAMES, matrices_at(w), strict=True)}


@functools.cache
def differences(situation: Situation) -> np.ndarray:
    r"""Relative differences $2|A - B| / (|A| + |B|)$ between all pairs of matrices."""
    dense = list(matrices(situation).values())
    norm = np.linalg.norm
    return np.array([[2 * norm(a - b) / (norm(a) + norm(b)) for b in dense] for a in dense])


@themed
def matrix_map(palette):
    """Relative differences between five matrices with similar names, in four situations.

    The Fisher matrix equals the Gauss-Newton matrix where the outputs are natural parameters, and also the Hessian if
    the model is linear. The empirical Fisher matrix equals neither, and differs from the covariance of the gradients by
    the mean gradient."""
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
