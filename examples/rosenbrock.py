r"""Natural gradient against gradient descent on the Rosenbrock function.

The cost $(1 - x_1)^2 + 100\,(x_2 - x_1^2)^2$ is the squared length $|z|^2$ of the output
$z = f(x) = (1 - x_1,\ 10\,(x_2 - x_1^2))$: a curved valley over the parameters, a round bowl over
the outputs. The natural gradient descends in the geometry of the bowl.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from jax import Array
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import natgrad as ng

START = (-1.2, 1.0)
GOAL = 1e-8
MAX_STEPS = 20_000
OUT = Path("out")

Limits = tuple[float, float]

# Okabe and Ito's colours, which the colour-blind can tell apart.
STYLES = (
    {"color": "#D55E00", "linewidth": 1.3},
    {"color": "#0072B2", "linewidth": 1.8, "marker": "o", "markersize": 3.0},
    {"color": "#009E73", "linewidth": 1.8, "marker": "s", "markersize": 5.0, "linestyle": "--"},
)


def f(x: Array) -> Array:
    return jnp.array([1 - x[0], 10 * (x[1] - x[0] ** 2)])


def cost(x: Array) -> Array:
    return jnp.sum(f(x) ** 2)


def gradient_descent(x: Array, rate: float | Array) -> Array:
    return x - rate * jax.grad(cost)(x)


@jax.jit
def natural_gradient(x: Array, rate: float | Array) -> Array:
    """In the Euclidean metric of the outputs, pulled back: half the Gauss-Newton matrix."""
    return x - rate * ng.natural_gradient(f, ng.Euclidean(), x, None, jax.grad(cost)(x))


def steps_to_goal(step: Callable, rate: float | Array) -> Array:
    """The number of steps until the cost falls below the goal, `MAX_STEPS` if it never does."""
    running = lambda state: (state[1] < MAX_STEPS) & ~(cost(state[0]) < GOAL)
    advance = lambda state: (step(state[0], rate), state[1] + 1)
    return jax.lax.while_loop(running, advance, (jnp.array(START), jnp.array(0)))[1]


def trajectory(step: Callable, rate: float) -> Array:
    """The start, and the point after each step, until the goal is reached."""
    length = int(steps_to_goal(step, rate)) + 1
    return jax.lax.scan(lambda x, _: (step(x, rate), x), jnp.array(START), length=length)[1]


def best_rate(step: Callable, rates: Array) -> float:
    """The rate that reaches the goal first."""
    return float(rates[jnp.argmin(jax.vmap(lambda rate: steps_to_goal(step, rate))(rates))])


def draw(ax: Axes, height: Callable, paths: Iterable[Array], xlim: Limits, ylim: Limits) -> None:
    """The paths over the contours of `height`, one line to every half power of ten."""
    u, v = jnp.linspace(*xlim, 400), jnp.linspace(*ylim, 400)
    values = jax.vmap(jax.vmap(height))(jnp.stack(jnp.meshgrid(u, v), axis=-1))
    levels = jnp.arange(-1.5, 4.5, 0.5)
    ax.contourf(u, v, jnp.log10(values), levels, cmap="Greys", vmin=-1, vmax=12, extend="min")
    ax.contour(u, v, jnp.log10(values), levels, colors="white", linewidths=0.8)
    for path, style in zip(paths, STYLES, strict=True):
        ax.plot(*path.T, **style)
    ax.set(xlim=xlim, ylim=ylim, box_aspect=1)


def figure(runs: dict[str, Array]) -> Figure:
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 5), layout="constrained")
    draw(left, cost, runs.values(), (-1.8, 1.8), (-4.3, 2.3))
    left.set(title="Parameters: a curved valley", xlabel="$x_1$", ylabel="$x_2$")
    outputs = [jax.vmap(f)(path) for path in runs.values()]
    draw(right, lambda z: jnp.sum(z**2), outputs, (-6.3, 6.3), (-6.3, 6.3))
    right.set(title="Outputs: a round bowl", xlabel="$z_1$", ylabel="$z_2$")
    for ax, start, end in ((left, jnp.array(START), (1, 1)), (right, outputs[0][0], (0, 0))):
        ax.plot(*start, "o", color="black", markersize=6, zorder=3)
        ax.plot(*end, "*", color="black", markersize=13, zorder=3)
    fig.legend(left.lines[: len(runs)], runs, loc="outside lower center", ncols=3, frameon=False)
    return fig


def main() -> None:
    rate = best_rate(gradient_descent, jnp.geomspace(1e-4, 1e-2, 60))
    runs = {
        f"gradient descent, rate {rate:.4f}": trajectory(gradient_descent, rate),
        "natural gradient, rate 1/50": trajectory(natural_gradient, 1 / 50),
        "natural gradient, rate 1/2": trajectory(natural_gradient, 1 / 2),
    }
    print(f"{'steps to cost < ' + format(GOAL, 'g'):>42}")
    for name, path in runs.items():
        print(f"{name:32}{len(path) - 1:10,}")

    OUT.mkdir(exist_ok=True)
    fig = figure(runs)
    for suffix in ("png", "svg"):
        fig.savefig(OUT / f"rosenbrock.{suffix}", dpi=200)
    print(f"\nThe figure is {OUT / 'rosenbrock.png'} (and .svg).")


if __name__ == "__main__":
    with jax.enable_x64(True):
        main()
