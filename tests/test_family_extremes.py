"""Families where floating point runs out of digits or of range, against arithmetic with many digits.

A computed value passes if rounding the parameters by a few units in the last place could explain its error:
$|f - \\hat f| \\le C\\epsilon\\,(|f| + \\sum_k |\\eta_k\\,\\partial_k f|)$, with $\\epsilon$ of the precision in use.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mpmath as mp
import natgrad as ng
import numpy as np
import pytest
from helpers import FAMILIES, flat
from jax.flatten_util import ravel_pytree
from scipy import stats

# Units in the last place: a sum of a few dozen rounded terms.
UNITS = 64
DIGITS = 50

precisions = pytest.mark.parametrize(
    "dtype", [np.float64, pytest.param(np.float32, marks=pytest.mark.float32)], ids=["float64", "float32"]
)

SCALES = (1e-8, 0.3, 1.0, 8.0, 12.0, 1e3, 1e8)
SHAPE = np.array([[2.0, 0.5], [0.5, 1.0]])


# The families once more, over lists of numbers of any precision -------------------------------------------


class Exact(NamedTuple):
    log_partition: Callable
    moments: Callable
    # E log h as a function of parameters and moments; `None` where there is no closed form.
    mean_log_base: Callable | None = lambda eta, xi: mp.mpf(0)


def softmax(logits):
    total = mp.fsum(map(mp.exp, logits))
    return [mp.exp(logit) / total for logit in logits]


def log_sum_exp(logits):
    return mp.log(mp.fsum(map(mp.exp, logits)))


def with_last_class(eta):
    return [*eta, mp.mpf(0)]


def log_beta(alpha):
    return mp.fsum(map(mp.loggamma, alpha)) - mp.loggamma(mp.fsum(alpha))


def mean_logs(alpha):
    return [mp.digamma(a) - mp.digamma(mp.fsum(alpha)) for a in alpha]


def inverse(a, b, c, d):
    b = c = (b + c) / 2
    determinant = a * d - b * c
    return determinant, (d / determinant, -b / determinant, -c / determinant, a / determinant)


def centred_log_partition(precision):
    return mp.log(2 * mp.pi) - mp.log(inverse(*precision)[0]) / 2


def gaussian_mean(eta):
    _, (a, b, c, d) = inverse(*eta[2:])
    return a * eta[0] + b * eta[1], c * eta[0] + d * eta[1]


def gaussian_log_partition(eta):
    return mp.fdot(eta[:2], gaussian_mean(eta)) / 2 + centred_log_partition(eta[2:])


def gaussian_moments(eta):
    mean = gaussian_mean(eta)
    second = [x * y for x in mean for y in mean]
    return [*mean, *(-(s + xy) / 2 for s, xy in zip(inverse(*eta[2:])[1], second, strict=True))]


class Edge(NamedTuple):
    """Members of a family far out, one a row, with the parameters flattened."""

    family: Callable[[], Any]
    exact: Exact
    etas: np.ndarray
    unravel: Callable[[jax.Array], Any] = lambda eta: eta


def scales(sign: float = 1.0) -> np.ndarray:
    return sign * np.array(SCALES)[:, None]


def pairs(sign: float) -> np.ndarray:
    return np.array([[a, sign * b] for a in SCALES for b in (1e-8, 1.0, 12.0, 1e8)])


LOGITS = (-1e4, -40.0, -1.0, 0.0, 1.0, 40.0, 1e4)
DIRICHLET = Exact(log_beta, mean_logs, lambda eta, xi: -mp.fsum(xi))
FAILURES = Exact(lambda eta: -mp.log(-mp.expm1(eta[0])), lambda eta: [1 / mp.expm1(-eta[0])])

EDGES = {
    "bernoulli": Edge(
        ng.Bernoulli,
        Exact(lambda eta: mp.log1p(mp.exp(eta[0])), lambda eta: [1 / (1 + mp.exp(-eta[0]))]),
        np.array(LOGITS)[:, None],
        lambda eta: eta[0],
    ),
    "categorical": Edge(
        ng.Categorical, Exact(log_sum_exp, softmax), np.array([[logit, 0.0, 1.0] for logit in LOGITS])
    ),
    "minimal_categorical": Edge(
        ng.MinimalCategorical,
        Exact(
            lambda eta: log_sum_exp(with_last_class(eta)), lambda eta: softmax(with_last_class(eta))[:-1]
        ),
        np.array([[logit, 1.0] for logit in LOGITS]),
    ),
    "gaussian_mean": Edge(
        lambda: ng.GaussianMean([1e-8, 1e8]),
        Exact(
            lambda eta: (SMALL * eta[0] ** 2 + LARGE * eta[1] ** 2) / 2,
            lambda eta: [SMALL * eta[0], LARGE * eta[1]],
            lambda eta, xi: -mp.fdot(eta, xi) / 2 - 1 - mp.log(2 * mp.pi) - mp.log(SMALL * LARGE) / 2,
        ),
        np.array([[1.0, 1.0], [1e8, 1e-8], [1e-8, 1e8]]),
    ),
    "gaussian_precision": Edge(
        ng.GaussianPrecision,
        Exact(centred_log_partition, lambda eta: [-x / 2 for x in inverse(*eta)[1]]),
        scales() * SHAPE.reshape(1, 4),
        lambda eta: eta.reshape(2, 2),
    ),
    "gaussian": Edge(
        lambda: ng.Gaussian(2),
        Exact(gaussian_log_partition, gaussian_moments),
        np.array([[scale**0.5, -2 * scale**0.5, *(scale * SHAPE).flat] for scale in SCALES]),
        lambda eta: (eta[:2], eta[2:].reshape(2, 2)),
    ),
    "poisson": Edge(
        ng.Poisson,
        Exact(lambda eta: mp.exp(eta[0]), lambda eta: [mp.exp(eta[0])], None),
        np.log(scales()),
        lambda eta: eta[0],
    ),
    "exponential": Edge(
        ng.Exponential,
        Exact(lambda eta: -mp.log(-eta[0]), lambda eta: [-1 / eta[0]]),
        scales(-1),
        lambda eta: eta[0],
    ),
    "gamma": Edge(
        ng.Gamma,
        Exact(
            lambda eta: mp.loggamma(eta[0]) - eta[0] * mp.log(-eta[1]),
            lambda eta: [mp.digamma(eta[0]) - mp.log(-eta[1]), -eta[0] / eta[1]],
            lambda eta, xi: -xi[0],
        ),
        pairs(-1),
    ),
    "beta": Edge(ng.Beta, DIRICHLET, pairs(1)),
    "dirichlet": Edge(
        ng.Dirichlet, DIRICHLET, np.array([row for s in SCALES for row in ([s, s, s], [s, 1.0, 1e3])])
    ),
    "geometric": Edge(ng.Geometric, FAILURES, scales(-1), lambda eta: eta[0]),
    "negative_binomial": Edge(
        lambda: ng.NegativeBinomial(2.5),
        Exact(
            lambda eta: 2.5 * FAILURES.log_partition(eta), lambda eta: [2.5 * FAILURES.moments(eta)[0]], None
        ),
        scales(-1),
        lambda eta: eta[0],
    ),
}
