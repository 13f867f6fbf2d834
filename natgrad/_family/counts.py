"""Counts of failures, and expectations under distributions of counts."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from natgrad._check import Requirement
from natgrad._family.special import log_gamma, measure_kl
from natgrad._types import Key

LogLaplace = Callable[[Array], Array]

# Nodes of the trapezoid rule in u = log t. The integrand is analytic in a strip of half-width pi/2, so the error
# is about exp(-pi^2 / STEP). It decays like the mean times exp(u) to the left and doubly exponentially to the right,
# if s is small from u = -log s on.
STEP = 0.25
NODES = np.exp(np.arange(-60.0, 25.0, STEP))


# Above this rate a Poisson count is a Gaussian for all purposes: the skewness is 1e-4.
MANY = 1e8


def whole_numbers(x: Array) -> list[Requirement]:
    return [Requirement(jnp.all((x >= 0) & (x == jnp.floor(x))), "whole numbers of at least 0", "Check the data.")]


def mean_count(x: Array) -> Requirement:
    """Targets of a likelihood may be means of counts."""
    return Requirement(jnp.all((x >= 0) & jnp.isfinite(x)), "numbers of at least 0", "Check the data.")


def log_probability(eta: Array) -> Requirement:
    return Requirement(jnp.all(eta < 0), "negative numbers (log probabilities of failure)", "Pass `log(1 - p)`.")


def positive_mean(xi: Array) -> Requirement:
    return Requirement(jnp.all(xi > 0), "means above 0", "Add a pseudo-count if nothing was counted.")


def log_success(eta: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    r"""$\log(1 - e^\eta)$, by whichever formula keeps its digits."""
    is_small = eta > -math.log(2)
    # Both formulas are computed everywhere: outside its own half, each sees -1, at which it is finite.
    small, large = jnp.where(is_small, eta, -1.0), jnp.where(is_small, -1.0, eta)
    return jnp.where(is_small, jnp.log(-jnp.expm1(small)), jnp.log1p(-jnp.exp(large)))


def mean_failures(eta: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    r"""Before one success: $e^\eta / (1 - e^\eta)$."""
    return jnp.exp(eta) / -jnp.expm1(eta)


def failures_kl(eta1: Float[Array, "*shape"], eta2: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The divergence of failures before one success: the divergence of one trial times the mean number of trials."""
    success1, success2 = -jnp.expm1(eta1), -jnp.expm1(eta2)
    failure = measure_kl(jnp.exp(eta1), jnp.exp(eta2), eta2 - eta1)
    return (failure + measure_kl(success1, success2, jnp.log(success2 / success1))) / success1


def log_factorial(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Exactly zero where it is: the log probability of counting nothing may be tiny."""
    is_zero = x < 2
    return jnp.where(is_zero, 0.0, log_gamma(jnp.where(is_zero, 2.0, x + 1)))


def draw_poisson(rate: Float[Array, "*shape"], key: Key) -> Float[Array, "*shape"]:
    """Counts with rates: from `MANY` on, where integers overflow, rounded Gaussians with the same moments."""
    is_many = rate > MANY
    # The same key for both, since only one of the two draws is used.
    few = jax.random.poisson(key, jnp.where(is_many, MANY, rate)).astype(rate.dtype)
    many = jnp.round(rate + jnp.sqrt(rate) * jax.random.normal(key, rate.shape, rate.dtype))
    return jnp.where(is_many, many, few)


def mean_log_factorial(mean: Float[Array, "*shape"], log_laplace: LogLaplace) -> Float[Array, "*shape"]:
    r"""$\mathbb{E}\log x!$ for counts $x$, from the Laplace transform $M(t) = \mathbb{E}e^{-tx}$ alone.

    Malmsten's formula gives $\log\Gamma(z)$ as an integral in which $z$ appears linearly and in $e^{-zt}$, so its
    expectation at $z = x + 1$ is $\int_0^\infty \big[\bar x -
    \frac{1 - M(t)}{1 - e^{-t}}\big]e^{-t}\,\frac{dt}{t}$, and $dt/t = du$ for $u = \log t$."""
    return integral(lambda t: jnp.exp(-t) * (mean + jnp.expm1(log_laplace(t)) / -jnp.expm1(-t)), mean.dtype)


def mean_log_rising(shift: Float[Array, ""], log_laplace: LogLaplace) -> Float[Array, "*shape"]:
    r"""$\mathbb{E}\log\Gamma(x + s)/\Gamma(x + 1)$ likewise, as $\int_0^\infty \big[(s - 1)e^{-t} -
    M(t)\frac{e^{-t} - e^{-st}}{1 - e^{-t}}\big]\frac{dt}{t}$: no part of it grows with the counts."""
    # The difference of exponentials, with the larger one factored out, so that `expm1` gets a negative argument.
    is_below = shift < 1
    rest = jnp.abs(jnp.where(is_below, 1 - shift, shift - 1))

    def integrand(t):
        gap = jnp.where(is_below, jnp.exp(-shift * t), -jnp.exp(-t)) * jnp.expm1(-rest * t)
        return (shift - 1) * jnp.exp(-t) - jnp.exp(log_laplace(t)) * gap / -jnp.expm1(-t)

    return integral(integrand, shift.dtype)


def integral(integrand: Callable[[Array], Array], dtype) -> Array:
    r"""$\int_0^\infty f(t)\,dt/t$."""
    return STEP * jnp.sum(jax.vmap(integrand)(jnp.asarray(NODES, dtype)), axis=0)
