r"""A Bregman divergence $D_\phi(z, z_0) = \phi(z) - \phi(z_0) - \phi'(z_0)(z - z_0)$ as a gap under a convex $\phi$."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import natgrad as ng
from natgrad.plots._style import canvas, themed

# The points z_0 and z.
AT, TO = -0.4, 1.9


def phi(z: Array) -> Array:
    return jax.nn.softplus(2 * z) + z**2 / 8


def tangent(z: Array) -> Array:
    value, slope = jax.value_and_grad(phi)(jnp.array(AT))
    return value + slope * (z - AT)


def gap() -> float:
    """The divergence between the two points."""
    return float(ng.Bregman(phi).dissimilarity(jnp.array(TO), jnp.array(AT)))


@themed
def bregman(palette):
    r"""The Bregman divergence from $z_0$ to $z$ is the gap between a convex function and its tangent. Not symmetric:
    the tangent is taken at $z_0$."""
    figure, axes = canvas(1, height=3.8, width=5.6)
    z = jnp.linspace(-3.2, 2.6, 300)
    axes.plot(z, jax.vmap(phi)(z), color=palette.blue, label=r"$\phi$")
    axes.plot(z, jax.vmap(tangent)(z), color=palette.faint, linestyle="--", label="tangent at $z_0$")
    low, high = float(tangent(jnp.array(TO))), float(phi(jnp.array(TO)))
    axes.plot([TO, TO], [low, high], color=palette.red, linewidth=3, solid_capstyle="butt")
    axes.plot(AT, float(phi(jnp.array(AT))), "o", color=palette.ink)
    axes.plot(TO, high, "o", color=palette.ink)
    axes.annotate(rf"$D_\phi(z, z_0) = {gap():.2f}$", (TO, np.mean([low, high])), (TO - 1.75, 3.4), color=palette.red)
    axes.annotate("$z_0$", (AT, 0), (AT - 0.05, -0.85), color=palette.ink)
    axes.annotate("$z$", (TO, 0), (TO - 0.05, -0.85), color=palette.ink)
    axes.set(ylim=(-1.1, 5.6), xlabel="output", ylabel="")
    axes.set_title("A Bregman divergence is a gap")
    axes.legend(loc="upper left")
    return figure
