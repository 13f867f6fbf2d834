import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import natgrad as ng
from natgrad.plots._style import arrow, canvas, themed

THETA = (1.0, 1.0)


def model(w: Array) -> Array:
    return jnp.stack([w[0] + w[1], 0.0 * w[0]])


def chart(theta: Array) -> Array:
    return jnp.stack([2 * theta[0], theta[1]])


def natural_step(f, at: Array, covector: Array) -> Array:
    metric = ng.pullback(f, ng.Euclidean(), at)
    return ng.sharp(metric, ng.pullback_covector(f, at, ng.Covector(covector))).tree


def redundant() -> dict[str, np.ndarray]:
    """Natural gradients in two coordinate systems of the same redundant parameters, both brought to the first, and what
    they do to the model."""
    theta = jnp.array(THETA)
    w = chart(theta)
    gradient = jax.grad(lambda z: z[0] ** 2)(model(w))
    own = natural_step(model, w, gradient)
    other = ng.pushforward(chart, theta, natural_step(ng.reparametrise(model, chart), theta, gradient)).tree
    pushed = [ng.pushforward(model, w, step).tree for step in (own, other)]
    return {"w": np.asarray(w), "own": np.asarray(own), "other": np.asarray(other), "pushed": np.asarray(pushed)}


def curve(t: Array) -> Array:
    """A figure that crosses itself: one point, two parameters."""
    return jnp.stack([jnp.sin(2 * t), jnp.sin(t)])


def crossing() -> dict[str, np.ndarray]:
    """At the crossing, the natural gradients of the same cost at both parameters, as motions of the model."""
    gradient = jnp.array([1.0, 0.0])
    at = jnp.array([0.0, np.pi])
    pushed = [ng.pushforward(curve, t, natural_step(curve, t, gradient)).tree for t in at]
    return {"at": np.asarray(at), "pushed": np.asarray(pushed), "point": np.asarray(curve(at[0]))}


@themed
def overparametrised(palette):
    """Left: with redundant parameters the natural gradient depends on the coordinates, but what it does to the model
    does not; both steps end on one level line. Right: where a model meets itself, the same cost has two natural
    gradients, one for every parameter of the point, along the two tangents."""
    figure, (left, right) = canvas(2, height=4.1)
    found = redundant()
    for level in np.arange(-10, 11, 1.0):
        left.axline((0, level), slope=-1, color=palette.fill, linewidth=0.8, zorder=0)
    end = found["w"] - 0.25 * found["own"]
    left.axline(end, slope=-1, color=palette.green, linewidth=1.4, label="the same function")
    arrow(left, found["w"], -0.25 * found["own"], palette.blue, "natural gradient in $w$")
    arrow(left, found["w"], -0.25 * found["other"], palette.red, r"in $\theta$, $w = (2\theta_1, \theta_2)$")
    left.plot(*found["w"], "o", color=palette.ink)
    left.set(xlabel="$w_1$", ylabel="$w_2$", xlim=(0.2, 2.6), ylim=(-0.4, 2.0), aspect="equal")
    left.set_title("Redundant parameters")
    left.legend(loc="upper left")
    other = crossing()
    t = jnp.linspace(-0.45 * np.pi, 1.45 * np.pi, 300)
    right.plot(*np.asarray(jax.vmap(curve)(t)).T, color=palette.faint)
    for pushed, color, label in zip(
        other["pushed"], (palette.blue, palette.red), ("$t = 0$", r"$t = \pi$"), strict=True
    ):
        arrow(right, other["point"], -0.6 * pushed, color, f"natural gradient at {label}")
    right.plot(*other["point"], "o", color=palette.ink)
    right.set(xlabel="$z_1$", ylabel="$z_2$", aspect="equal", xlim=(-1.25, 1.25), ylim=(-1.1, 1.35))
    right.set_title("A model that meets itself")
    right.legend(loc="upper right")
    return figure
