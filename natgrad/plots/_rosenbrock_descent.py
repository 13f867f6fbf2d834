r"""Descent on the Rosenbrock function $|z|^2$ with $z = (1 - x_1, 10(x_2 - x_1^2))$, in parameters and in outputs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import natgrad as ng
from natgrad.plots._style import canvas, themed

START = (-1.2, 1.0)
MAX_STEPS = 20_000


def outputs(x: Array) -> Array:
    return jnp.array([1 - x[0], 10 * (x[1] - x[0] ** 2)])


def parameters(z: Array) -> Array:
    """The inverse of `outputs`."""
    return jnp.array([1 - z[0], z[1] / 10 + (1 - z[0]) ** 2])


def cost(x: Array) -> Array:
    return jnp.sum(outputs(x) ** 2)


def problem(strength: Any, in_outputs: bool = True) -> ng.ProximalProblem:
    """The proximal problem with the distance of the outputs or of the parameters."""
    space = ng.FunctionSpace(outputs, ng.Euclidean()) if in_outputs else ng.Euclidean()
    return ng.ProximalProblem(cost, space, strength)


def gradient_descent(x: Array, rate: Any) -> Array:
    return ng.natural_step(problem(1 / rate, in_outputs=False), x).value


def plain_descent(x: Array, rate: Any) -> Array:
    """Gradient descent without a solve, fast enough for tens of thousands of steps."""
    return x - rate * jax.grad(cost)(x)


def natural_gradient(x: Array, rate: Any) -> Array:
    return ng.natural_step(problem(1 / rate), x).value


def output_descent(x: Array, rate: Any) -> Array:
    """Gradient descent on the outputs, mapped back: here every output belongs to one parameter."""
    z = outputs(x)
    return parameters(z - rate * 2 * z)


def proximal_in_parameters(x: Array, rate: Any) -> Array:
    return ng.proximal_point(problem(1 / rate, in_outputs=False), x).value


def proximal_in_outputs(x: Array, rate: Any) -> Array:
    return ng.proximal_point(problem(1 / rate), x).value


def path(step: Callable, rate: float, length: int) -> Array:
    """The start and the points after each step."""

    @jax.jit
    def run(x: Array) -> Array:
        return jax.lax.scan(lambda x, _: (step(x, rate), x), x, length=length + 1)[1]

    return run(jnp.array(START))


def steps_to(step: Callable, rate: Any, goal: float = 1e-8) -> Array:
    """The number of steps until the cost is below the goal, at most `MAX_STEPS`."""

    def is_running(state: tuple[Array, Array]) -> Array:
        x, count = state
        return (count < MAX_STEPS) & ~(cost(x) < goal)

    def advance(state: tuple[Array, Array]) -> tuple[Array, Array]:
        x, count = state
        return step(x, rate), count + 1

    return jax.lax.while_loop(is_running, advance, (jnp.array(START), jnp.array(0)))[1]


def rosenbrock_steps(goal: float = 1e-8) -> list[tuple[str, int]]:
    """Steps from the usual start (-1.2, 1) to a cost below `goal` (default 1e-8), as pairs of method and number.

    ```python
    from natgrad import plots

    for method, steps in plots.rosenbrock_steps(goal=1e-3):
        print(method, steps)
    ```
    """
    with jax.enable_x64(True):
        rates = jnp.geomspace(1e-4, 1e-2, 60)
        descent = jax.jit(jax.vmap(lambda rate: steps_to(plain_descent, rate, goal)))(rates)

        def count(step: Callable, rate: float) -> int:
            return int(jax.jit(lambda: steps_to(step, rate, goal))())

        return [
            (
                f"gradient descent, learning rate {float(rates[jnp.argmin(descent)]):.4f}, the best of 60",
                int(jnp.min(descent)),
            ),
            ("natural gradient, learning rate 1/2", count(natural_gradient, 0.5)),
            ("proximal point in the outputs, strength 1", count(proximal_in_outputs, 1.0)),
            ("proximal point in the parameters, strength 1", count(proximal_in_parameters, 1.0)),
            ("gradient descent on the outputs, learning rate 1/2", count(output_descent, 0.5)),
        ]


@functools.cache
def paths() -> dict[str, np.ndarray]:
    """The points of every method in the figure, as parameters."""
    runs = {
        "gradient descent": path(gradient_descent, 1 / 900, 300),
        "descent on the outputs": path(output_descent, 0.06, 30),
        "natural gradient": path(natural_gradient, 0.01, 300),
        "proximal, parameters": path(proximal_in_parameters, 0.06, 60),
        "proximal, outputs": path(proximal_in_outputs, 0.5, 12),
    }
    return {name: np.asarray(points) for name, points in runs.items()}


@themed
def rosenbrock(palette):
    """A curved valley over the parameters is a round bowl over the outputs. Gradient descent on the outputs goes
    straight to the minimum, and the natural gradient follows the same path."""
    figure, (left, right) = canvas(2, height=4.4)
    runs = paths()
    styles = {
        "gradient descent": dict(color=palette.red, linewidth=1.2),
        "proximal, parameters": dict(color=palette.purple, marker="^", markersize=4),
        "descent on the outputs": dict(color=palette.ink, linewidth=4.5, alpha=0.35),
        "natural gradient": dict(color=palette.blue, marker="o", markersize=3.5, markevery=10),
        "proximal, outputs": dict(color=palette.green, marker="s", markersize=5, linestyle="none"),
    }
    wide, high = np.linspace(-1.7, 1.6, 300), np.linspace(-0.9, 2.1, 300)
    heights = jax.vmap(jax.vmap(cost))(jnp.stack(jnp.meshgrid(wide, high), axis=-1))
    levels = np.arange(-2, 3.6, 0.5)
    left.contour(wide, high, np.log10(heights), levels, cmap=palette.shades, linewidths=0.7, alpha=0.6)
    span = np.linspace(-6, 6, 300)
    bowl = span[:, None] ** 2 + span[None, :] ** 2
    right.contour(span, span, np.log10(np.maximum(bowl, 1e-3)), levels, cmap=palette.shades, linewidths=0.7, alpha=0.6)
    for name, style in styles.items():
        left.plot(*runs[name].T, label=name, **style)
        right.plot(*np.asarray(jax.vmap(outputs)(jnp.asarray(runs[name]))).T, **style)
    for axes, start, end in ((left, START, (1, 1)), (right, np.asarray(outputs(jnp.array(START))), (0, 0))):
        axes.plot(*start, "o", color=palette.ink, markersize=7)
        axes.plot(*end, "*", color=palette.ink, markersize=13)
    left.set(title="Parameters: a curved valley", xlabel="$x_1$", ylabel="$x_2$", xlim=(-1.7, 1.6), ylim=(-0.9, 2.1))
    right.set(
        title="Outputs: a round bowl", xlabel="$z_1$", ylabel="$z_2$", xlim=(-4, 4), ylim=(-5.5, 2.5), aspect="equal"
    )
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
