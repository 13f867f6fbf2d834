r"""An equation solved by a network: $-\Delta u = f$ on the unit square, with $u = 0$ on its boundary."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import natgrad as ng
from natgrad._problem import Problem
from natgrad.problems._perceptron import normal

POINTS_A_SIDE = 30
WIDTH = 32


def exact(x: Float[Array, "N 2"]) -> Float[Array, " N"]:
    return jnp.sin(jnp.pi * x[:, 0]) * jnp.sin(jnp.pi * x[:, 1])


def force(x: Float[Array, "N 2"]) -> Float[Array, " N"]:
    return 2 * jnp.pi**2 * exact(x)


def laplacian(function: Callable, x: Float[Array, "N 2"]) -> Float[Array, " N"]:
    """The sum of second derivatives of a function of points, each by differentiating forward twice."""

    def second(axis):
        along = jnp.zeros_like(x).at[:, axis].set(1)
        slope = lambda x: jax.jvp(function, (x,), (along,))[1]
        return jax.jvp(slope, (x,), (along,))[1]

    return second(0) + second(1)


def solution(params, x: Float[Array, "N 2"]) -> Float[Array, " N"]:
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["last"]["w"] + params["last"]["b"]


def residual(params, x: Float[Array, "N 2"]) -> Float[Array, " N"]:
    return laplacian(lambda x: solution(params, x), x) + force(x)


def grid() -> tuple[np.ndarray, np.ndarray]:
    """Centres of cells inside the square, and of the pieces of its four sides."""
    centres = (np.arange(POINTS_A_SIDE) + 0.5) / POINTS_A_SIDE
    interior = np.stack(np.meshgrid(centres, centres), axis=-1).reshape(-1, 2)
    sides = [np.stack([centres, np.full_like(centres, end)], axis=-1) for end in (0.0, 1.0)]
    return interior, np.concatenate([*sides, *(side[:, ::-1] for side in sides)])


def initial(seed: int):
    """Glorot's: variances of two over the numbers of inputs and outputs."""
    random = np.random.default_rng(seed)
    return {
        "hidden": {"w": normal(random, (2, WIDTH), (2 / (2 + WIDTH)) ** 0.5), "b": jnp.zeros(WIDTH)},
        "last": {"w": normal(random, (WIDTH,), (2 / (WIDTH + 1)) ** 0.5), "b": jnp.zeros(())},
    }


def poisson_pde(seed: int = 0) -> Problem:
    r"""The equation of Poisson with the solution $\sin(\pi x)\sin(\pi y)$: a network 2-32-1, at 900 points inside and
    120 on the boundary, whose length is the weight of its term."""
    interior, boundary = (jnp.asarray(points, float) for points in grid())
    terms = ng.Terms(
        interior=ng.Term(residual, ng.LeastSquares()),
        boundary=ng.Term(solution, ng.LeastSquares(), weight=4.0),
    )
    return Problem(
        terms,
        None,
        initial(seed),
        {"interior": (interior, None), "boundary": (boundary, None)},
        steps=200,
        name="poisson-pde",
        about="The equation of Poisson on the unit square, with the solution sin(πx) sin(πy), by a network 2-32-1 with "
        "tanh: the squared residuals at 900 points inside, and four times those at 120 on the boundary.",
    )
