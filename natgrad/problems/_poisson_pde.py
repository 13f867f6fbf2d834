r"""A physics-informed network for Poisson's equation: $-\Delta u = f$ on the unit square, $u = 0$ on the boundary."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import natgrad as ng
from natgrad._problem import Problem
from natgrad.problems._mlp import normal

POINTS_A_SIDE = 30
WIDTH = 32


def exact(x: Float[Array, "N 2"]) -> Float[Array, " N"]:
    r"""The solution $u(x, y) = \sin(\pi x)\sin(\pi y)$."""
    return jnp.sin(jnp.pi * x[:, 0]) * jnp.sin(jnp.pi * x[:, 1])


def force(x: Float[Array, "N 2"]) -> Float[Array, " N"]:
    r"""The right-hand side $f = -\Delta u = 2\pi^2 u$."""
    return 2 * jnp.pi**2 * exact(x)


def laplacian(function: Callable, x: Float[Array, "N 2"]) -> Float[Array, " N"]:
    r"""$\Delta u = \partial_x^2 u + \partial_y^2 u$ at every point, each by two forward-mode derivatives."""

    def second(axis):
        along = jnp.zeros_like(x).at[:, axis].set(1)

        def slope(x):
            return jax.jvp(function, (x,), (along,))[1]

        return jax.jvp(slope, (x,), (along,))[1]

    return second(0) + second(1)


def solution(params, x: Float[Array, "N 2"]) -> Float[Array, " N"]:
    """The network: one hidden layer with tanh."""
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["last"]["w"] + params["last"]["b"]


def residual(params, x: Float[Array, "N 2"]) -> Float[Array, " N"]:
    r"""$\Delta u + f$, which is zero for the solution."""
    return laplacian(lambda x: solution(params, x), x) + force(x)


def grid() -> tuple[np.ndarray, np.ndarray]:
    """The centres of 30 × 30 cells in the square, and of 30 segments on each of its four sides."""
    centres = (np.arange(POINTS_A_SIDE) + 0.5) / POINTS_A_SIDE
    interior = np.stack(np.meshgrid(centres, centres), axis=-1).reshape(-1, 2)
    sides = [np.stack([centres, np.full_like(centres, end)], axis=-1) for end in (0.0, 1.0)]
    return interior, np.concatenate([*sides, *(side[:, ::-1] for side in sides)])


def initial_params(seed: int):
    r"""Glorot's initialisation: variance $2 / (\text{inputs} + \text{outputs})$."""
    random = np.random.default_rng(seed)
    return {
        "hidden": {"w": normal(random, (2, WIDTH), (2 / (2 + WIDTH)) ** 0.5), "b": jnp.zeros(WIDTH)},
        "last": {"w": normal(random, (WIDTH,), (2 / (WIDTH + 1)) ** 0.5), "b": jnp.zeros(())},
    }


def poisson_pde(seed: int = 0) -> Problem:
    r"""Poisson's equation with the solution $\sin(\pi x)\sin(\pi y)$: MLP 2-32-1, 900 points inside, 120 on the sides.

    The loss is $\int (\Delta u + f)^2 / 2$ over the square plus $\int u^2 / 2$ along the boundary, whose length
    of four is the weight of its mean. `seed` (default 0) is the random seed of the initial parameters."""
    interior, boundary = (jnp.asarray(points, float) for points in grid())
    terms = ng.Terms(
        interior=ng.Term(residual, ng.LeastSquares()),
        boundary=ng.Term(solution, ng.LeastSquares(), weight=4.0),
    )
    return Problem(
        terms,
        None,
        initial_params(seed),
        {"interior": (interior, None), "boundary": (boundary, None)},
        steps=200,
        name="poisson-pde",
        about="Poisson's equation on the unit square with the solution sin(πx) sin(πy), physics-informed MLP 2-32-1 "
        "with tanh: squared residuals at 900 points inside, plus four times the squared values at 120 boundary points.",
    )
