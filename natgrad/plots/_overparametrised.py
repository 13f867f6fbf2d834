"""Two ways in which a model is overparametrised: redundant parameters, and a model that crosses itself."""

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


def natural_gradient(f, w: Array, covector: Array) -> Array:
    """The natural gradient at `w` of a cost whose gradient in the outputs of `f` is `covector`."""
    metric = ng.pullback(f, ng.Euclidean(), w)
    return ng.sharp(metric, ng.pullback_covector(f, w, ng.Covector(covector))).tree


def redundant() -> dict[str, np.ndarray]:
    """Natural gradients in two coordinate systems of redundant parameters, both as vectors in the first, and the
    changes of the outputs that they cause."""
    theta = jnp.array(THETA)
    w = chart(theta)
    gradient = jax.grad(lambda z: z[0] ** 2)(model(w))
    in_w = natural_gradient(model, w, gradient)
    in_theta = ng.pushforward(chart, theta, natural_gradient(ng.reparametrise(model, chart), theta, gradient)).tree
    pushed = [ng.pushforward(model, w, step).tree for step in (in_w, in_theta)]
    arrays = {"w": w, "in_w": in_w, "in_theta": in_theta, "pushed": pushed}
    return {name: np.asarray(array) for name, array in arrays.items()}


def curve(t: Array) -> Array:
    """A curve that crosses itself: two parameters have the same output."""
    return jnp.stack([jnp.sin(2 * t), jnp.sin(t)])


def crossing() -> dict[str, np.ndarray]:
    """The natural gradients of one cost at both parameters of the crossing, as changes of the outputs."""
    gradient = jnp.array([1.0, 0.0])
    pushed = [ng.pushforward(curve, t, natural_gradient(curve, t, gradient)).tree for t in jnp.array([0.0, np.pi])]
    return {"pushed": np.asarray(pushed), "point": np.asarray(curve(jnp.array(0.0)))}


@themed
def overparametrised(palette):
    """Left: with redundant parameters the natural gradient depends on the coordinates, but the change of the outputs
    does not: both steps end on one level line. Right: where a model crosses itself, one cost has two natural gradients,
    along the two tangents."""
    figure, (left, right) = canvas(2, height=4.1)
    steps = redundant()
    for level in np.arange(-10, 11, 1.0):
        left.axline((0, level), slope=-1, color=palette.fill, linewidth=0.8, zorder=0)
    end = steps["w"] - 0.25 * steps["in_w"]
    left.axline(end, slope=-1, color=palette.green, linewidth=1.4, label="same outputs")
    arrow(left, steps["w"], -0.25 * steps["in_w"], palette.blue, "natural gradient in $w$")
    arrow(left, steps["w"], -0.25 * steps["in_theta"], palette.red, r"in $\theta$, $w = (2\theta_1, \theta_2)$")
    left.plot(*steps["w"], "o", color=palette.ink)
    left.set(xlabel="$w_1$", ylabel="$w_2$", xlim=(0.2, 2.6), ylim=(-0.4, 2.0), aspect="equal")
    left.set_title("Redundant parameters")
    left.legend(loc="upper left")
    double_point = crossing()
    t = jnp.linspace(-0.45 * np.pi, 1.45 * np.pi, 300)
    right.plot(*np.asarray(jax.vmap(curve)(t)).T, color=palette.faint)
    for pushed, color, label in zip(
        double_point["pushed"], (palette.blue, palette.red), ("$t = 0$", r"$t = \pi$"), strict=True
    ):
        arrow(right, double_point["point"], -0.6 * pushed, color, f"natural gradient at {label}")
    right.plot(*double_point["point"], "o", color=palette.ink)
    right.set(xlabel="$z_1$", ylabel="$z_2$", aspect="equal", xlim=(-1.25, 1.25), ylim=(-1.1, 1.35))
    right.set_title("A model that crosses itself")
    right.legend(loc="upper right")
    return figure
