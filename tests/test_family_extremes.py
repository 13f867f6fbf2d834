"""Families where floating point runs out of digits or of range, against arithmetic with many digits.

A computed value passes if rounding the parameters by a few units in the last place could explain its error:
$|f - \\hat f| \\le C\\epsilon\\,(|f| + \\sum_k |\\eta_k\\,\\partial_k f|)$, with $\\epsilon$ of the precision in use.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from helpers import FAMILIES
from jax.flatten_util import ravel_pytree

import natgrad as ng

# Typed loosely: SciPy does not say which frozen distributions are discrete.
stats: Any = scipy.stats

# Units in the last place: a sum of a few dozen rounded terms.
UNITS = 64
DIGITS = 50

precisions = pytest.mark.parametrize(
    "dtype", [np.float64, pytest.param(np.float32, marks=pytest.mark.float32)], ids=["float64", "float32"]
)

# Relative changes of the parameters between two members.
NEAR, FAR = 1e-3, 0.5

SCALES = (1e-8, 0.3, 1.0, 8.0, 1e3, 1e8)
SHAPE = np.array([[2.0, 0.5], [0.5, 1.0]])


# The families once more, over lists of numbers of any precision -------------------------------------------


class Exact(NamedTuple):
    log_partition: Callable
    moments: Callable
    # E log h as a function of parameters and moments; `None` where there is no closed form.
    mean_log_base: Any = lambda eta, xi: mp.mpf(0)


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


# Members far out ------------------------------------------------------------------------------------------


class Edge(NamedTuple):
    """Members of a family, one a row, with the parameters flattened."""

    family: Callable[[], Any]
    exact: Exact
    etas: np.ndarray
    unravel: Callable[[jax.Array], Any] = lambda eta: eta

    def neighbours(self, size: float) -> np.ndarray:
        """Each parameter changed relative to itself; matrices by a common factor, so that they stay definite."""
        count = self.etas.shape[1]
        changes = {4: np.ones(4), 6: np.array([0.5, -0.5, 1, 1, 1, 1])}.get(count, np.array([1, -0.7, 0.4])[:count])
        return self.etas * (1 + size * changes)


def scales(sign: float = 1.0) -> np.ndarray:
    return sign * np.array(SCALES)[:, None]


def pairs(sign: float) -> np.ndarray:
    return np.array([[a, sign * b] for a in SCALES for b in (1e-8, 1.0, 1e8)])


DISCRETE = {"bernoulli", "categorical", "minimal_categorical", "geometric"}
DIGAMMA = {"beta", "dirichlet"}
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
    "categorical": Edge(ng.Categorical, Exact(log_sum_exp, softmax), np.array([[logit, 0.0, 1.0] for logit in LOGITS])),
    "minimal_categorical": Edge(
        ng.MinimalCategorical,
        Exact(lambda eta: log_sum_exp(with_last_class(eta)), lambda eta: softmax(with_last_class(eta))[:-1]),
        np.array([[logit, 1.0] for logit in LOGITS]),
    ),
    "gaussian_mean": Edge(
        # Powers of two, which are the same in every precision.
        lambda: ng.GaussianMean([2.0**-27, 2.0**27]),
        Exact(
            lambda eta: (eta[0] ** 2 * 2**-27 + eta[1] ** 2 * 2**27) / 2,
            lambda eta: [eta[0] * 2**-27, eta[1] * 2**27],
            lambda eta, xi: -mp.fdot(eta, xi) / 2 - 1 - mp.log(2 * mp.pi),
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
    "dirichlet": Edge(ng.Dirichlet, DIRICHLET, np.array([row for s in SCALES for row in ([s, s, s], [s, 1.0, 1e3])])),
    "geometric": Edge(ng.Geometric, FAILURES, scales(-1), lambda eta: eta[0]),
    "negative_binomial": Edge(
        lambda: ng.NegativeBinomial(2.5),
        Exact(lambda eta: 2.5 * FAILURES.log_partition(eta), lambda eta: [2.5 * FAILURES.moments(eta)[0]], None),
        scales(-1),
        lambda eta: eta[0],
    ),
}

edges = pytest.mark.parametrize("name", EDGES)


@functools.cache
def computed(name: str, dtype: type) -> dict[str, np.ndarray]:
    """What a family says about its members far out, compiled in one go."""
    edge = EDGES[name]
    family, geometry = edge.family(), ng.Fisher(edge.family())
    flatten = lambda tree: ravel_pytree(tree)[0]

    @jax.jit
    @jax.vmap
    def of_family(row):
        eta = edge.unravel(row)
        return {
            "log_partition": family.log_partition(eta),
            "moments": flatten(family.to_moments(eta)),
            "entropy": family.entropy(eta),
        }

    # Without checks, so that the compilation cache takes it.
    @jax.jit
    @jax.vmap
    def of_geometry(row, near, far, key):
        eta = edge.unravel(row)
        columns = jax.vmap(flatten)(geometry.factor(eta))
        others = jax.tree.map(lambda *leaves: jnp.stack(leaves), edge.unravel(near), edge.unravel(far))
        return {
            "fisher": geometry.metric_matrix(eta),
            "squared_factor": columns.T @ columns,
            "divergences": jax.vmap(geometry.dissimilarity, (0, None))(others, eta),
            "scores": jax.vmap(lambda key: flatten(geometry.sample(eta, key)))(jax.random.split(key, 20)),
        }

    rows = [np.asarray(etas, dtype) for etas in (edge.etas, edge.neighbours(NEAR), edge.neighbours(FAR))]
    keys = jax.random.split(jax.random.key(0), len(edge.etas))
    return jax.tree.map(np.asarray, of_family(rows[0]) | of_geometry(*rows, keys))


def sensitivity(function, eta, k):
    """$\\eta_k\\,\\partial_k f$."""
    return mp.diff(lambda t: function([*eta[:k], eta[k] * (1 + t), *eta[k + 1 :]]), 0)


def slope(function, eta, k):
    return mp.diff(lambda x: function([*eta[:k], x, *eta[k + 1 :]]), eta[k], relative=bool(eta[k]))


def with_slack(function, eta):
    """An exact value, and by how much it changes, relative to that of the parameters, under rounding."""
    value = function(eta)
    return value, abs(value) + mp.fsum(abs(sensitivity(function, eta, k)) for k in range(len(eta)) if eta[k])


def assert_rounded(actual, exact, slack, dtype):
    """`actual` is `exact` up to rounding, unless that overflows; what underflows may be zero."""
    limits = np.finfo(dtype)
    if abs(exact) < float(limits.max):
        floor = max(float(limits.tiny), 10.0 ** (10 - DIGITS))
        assert abs(mp.mpf(float(actual)) - exact) <= UNITS * float(limits.eps) * slack + floor


def exact_rows(name, dtype):
    return [[mp.mpf(float(x)) for x in row] for row in EDGES[name].etas.astype(dtype)]


@pytest.mark.sample(1)
@edges
@precisions
@mp.workdps(DIGITS)
def test_log_partition_moments_and_fisher(name, dtype):
    exact, ours = EDGES[name].exact, computed(name, dtype)
    for i, eta in enumerate(exact_rows(name, dtype)):
        assert_rounded(ours["log_partition"][i], *with_slack(exact.log_partition, eta), dtype)
        size = range(len(eta))
        fisher = [[slope(lambda e, k=k: exact.moments(e)[k], eta, m) for m in size] for k in size]
        for k in size:
            # A mean of logarithms is a difference of two digamma functions, and cannot be better than either.
            digamma = [abs(mp.psi(order, eta[k])) for order in (0, 1)] if name in DIGAMMA else [0, 0]
            slack = digamma[0] + mp.fsum(abs(fisher[k][m] * eta[m]) for m in size)
            assert_rounded(ours["moments"][i, k], exact.moments(eta)[k], slack + abs(exact.moments(eta)[k]), dtype)
            for m in size:
                slack = mp.sqrt(abs(fisher[k][k] * fisher[m][m])) + digamma[1] * (k == m)
                assert_rounded(ours["fisher"][i, k, m], fisher[k][m], slack, dtype)
                assert_rounded(ours["squared_factor"][i, k, m], fisher[k][m], slack, dtype)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name, edge in EDGES.items() if edge.exact.mean_log_base])
@precisions
@mp.workdps(DIGITS)
def test_entropy(name, dtype):
    exact, ours = EDGES[name].exact, computed(name, dtype)

    def entropy(eta):
        xi = exact.moments(eta)
        return exact.log_partition(eta) - mp.fdot(eta, xi) - exact.mean_log_base(eta, xi)

    for actual, eta in zip(ours["entropy"], exact_rows(name, dtype), strict=True):
        value, slack = with_slack(entropy, eta)
        # The zero of a differential entropy is that of a unit, not of information.
        assert_rounded(actual, value, slack + (name not in DISCRETE), dtype)


@pytest.mark.sample(1)
@edges
@precisions
@mp.workdps(DIGITS)
def test_divergence(name, dtype):
    exact, ours = EDGES[name].exact, computed(name, dtype)
    count = EDGES[name].etas.shape[1]

    def divergence(both):
        eta1, eta2 = both[:count], both[count:]
        step = [b - a for a, b in zip(eta1, eta2, strict=True)]
        gap = exact.log_partition(eta2) - exact.log_partition(eta1)
        return gap - mp.fdot(step, exact.moments(eta1))

    for divergences, size in zip(ours["divergences"].T, (NEAR, FAR), strict=True):
        neighbours = EDGES[name].neighbours(size).astype(dtype)
        for actual, eta, other in zip(divergences, exact_rows(name, dtype), neighbours, strict=True):
            assert actual >= 0
            assert_rounded(actual, *with_slack(divergence, eta + [mp.mpf(float(x)) for x in other]), dtype)


@pytest.mark.sample(6)
@edges
@precisions
def test_scores_of_samples_are_finite(name, dtype):
    assert np.all(np.isfinite(computed(name, dtype)["scores"]))


# What has no closed form, or is best said with numbers ----------------------------------------------------


def poisson_entropy(rate: float) -> float:
    if rate > 1e3:
        # The terms left out are of order 1 / rate^3.
        return 0.5 * np.log(2 * np.pi * np.e * rate) - 1 / (12 * rate) - 1 / (24 * rate**2)
    return sum_of_entropy(stats.poisson(rate).logpmf(np.arange(20 + 4 * rate)))


def sum_of_entropy(log_p: np.ndarray) -> float:
    log_p = log_p[np.isfinite(log_p)]
    return float(-np.exp(log_p) @ log_p)


@precisions
def test_poisson_entropy(dtype):
    etas = np.log(np.array([1e-8, 1e-3, 0.3, 1.0, 30.0, 99.0, 100.0, 101.0, 1e5, 1e8])).astype(dtype)
    entropies = jax.jit(jax.vmap(ng.Poisson().entropy))(etas)
    for eta, entropy in zip(etas.astype(np.float64), entropies, strict=True):
        # Up to a rate of 100 the entropy (and its reference) is a sum of parts of size `rate * eta`.
        parts = np.exp(eta) * eta if 0 < eta <= np.log(100) else 0.0
        eps = np.finfo(dtype).eps
        np.testing.assert_allclose(entropy, poisson_entropy(np.exp(eta)), UNITS * eps, 4 * eps * parts)


def test_poisson_entropy_is_smooth_where_the_formulas_change():
    eta = np.log(100.0)
    slopes = jax.jit(jax.vmap(jax.grad(ng.Poisson().entropy)))(np.array([eta - 1e-9, eta, eta + 1e-9]))
    np.testing.assert_allclose(slopes, 0.5 + 1 / 1200 + 1 / 120000 + 19 / 1.2e8, rtol=1e-8)


@precisions
def test_negative_binomial_entropy(dtype):
    eps = np.finfo(dtype).eps
    for count in (1e-3, 0.1, 1.0, 2.5, 100.0):
        etas = np.array([-40.0, -1.0, -0.1, -1e-6], dtype)
        entropies = np.asarray(jax.jit(jax.vmap(ng.NegativeBinomial(count).entropy))(etas))
        x = np.arange(5000)
        for eta, entropy in zip(etas[:3].astype(np.float64), entropies[:3], strict=True):
            expected = sum_of_entropy(stats.nbinom(count, -np.expm1(eta)).logpmf(x))
            # The parts are as large as the count.
            np.testing.assert_allclose(entropy, expected, UNITS * eps, UNITS * eps * (1 + count))
        if count >= 1:
            # Many failures are a continuous waiting time.
            limit = stats.gamma(count, scale=1e6).entropy()
            np.testing.assert_allclose(entropies[3], limit, rtol=1e-5 + UNITS * eps)


@precisions
@mp.workdps(DIGITS)
def test_counts_of_zero_and_of_many(dtype):
    family = ng.Poisson()
    points = [(rate, x) for rate in (1e-8, 1.0, 1e8) for x in (0, 1, 10**8)]
    etas, xs = np.log([rate for rate, _ in points]).astype(dtype), np.array([x for _, x in points], dtype)
    for eta, x, log_prob in zip(etas, xs, jax.jit(jax.vmap(family.log_prob))(etas, xs), strict=True):
        eta, x = mp.mpf(float(eta)), mp.mpf(float(x))
        parts = [eta * x, -mp.exp(eta), -mp.loggamma(x + 1)]
        assert_rounded(log_prob, mp.fsum(parts), mp.fsum(map(abs, parts)) + abs(eta) * mp.exp(eta), dtype)


@precisions
def test_outcomes_of_probability_zero_and_one(dtype):
    bernoulli, categorical = ng.Bernoulli(), ng.Categorical()

    @jax.jit
    def found(large, x, labels):
        logits = jnp.stack([large, jnp.zeros_like(large), -large])
        log_prob = lambda family, eta, x: jax.vmap(lambda x: family.log_prob(eta, x))(x)
        return (
            (log_prob(bernoulli, large, x), log_prob(bernoulli, -large, x), log_prob(categorical, logits, labels)),
            categorical.score(logits, labels[2]),
            (bernoulli.kl(large, -large), categorical.kl(logits, -logits)),
        )

    log_probs, score, divergences = found(jnp.array(1e4, dtype), np.array([0, 0.5, 1], dtype), np.arange(3))
    np.testing.assert_array_equal(log_probs, [[-1e4, -5e3, 0], [0, -5e3, -1e4], [0, -1e4, -2e4]])
    np.testing.assert_array_equal(score, [-1, 0, 1])
    assert divergences == (1e4, 2e4)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "sign"), [(ng.Gamma, -1), (ng.Beta, 1), (ng.Dirichlet, 1)], ids=["gamma", "beta", "dirichlet"]
)
def test_natural_parameters_invert_the_moments(family, sign):
    """Also where Newton's method has to start from a poor guess. What rounding of the moments moves, may move."""
    scales = (1e-8, 1e-4, 0.3, 1.0, 8.0, 12.0, 1e3, 1e8)
    etas = np.array([[a, sign * b] for a in scales for b in scales])
    etas = etas if family is not ng.Dirichlet else np.pad(etas, [(0, 0), (0, 1)], constant_values=1.0)

    @jax.jit
    def divergences(etas):
        back = family().to_natural(family().to_moments(etas))
        there, here = jnp.concatenate([etas, back]), jnp.concatenate([back, etas])
        return jax.vmap(ng.Fisher(family()).dissimilarity)(there, here)

    assert np.max(divergences(etas)) < 1e-13


def test_mean_far_from_zero():
    family = ng.Gaussian(1)
    mean, covariance = family.to_mean(family.from_mean([1e9], [[2.0]]))
    np.testing.assert_allclose([*mean, *covariance[0]], [1e9, 2.0], rtol=1e-15)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("family", "eta"),
    [(ng.Poisson, 60.0), (lambda: ng.NegativeBinomial(1e8), -1e-12)],
    ids=["poisson", "negative_binomial"],
)
@precisions
def test_rates_beyond_the_integers(family, eta, dtype, getkey):
    """Counts larger than an integer of 32 or 64 bits can be."""
    geometry, eta = ng.Fisher(family()), jnp.asarray(eta, dtype)

    @jax.jit
    def found(eta, key):
        scores = jax.vmap(lambda key: geometry.sample(eta, key))(jax.random.split(key, 1000))
        return scores, geometry.metric_matrix(eta)[0, 0], family().to_moments(eta)

    scores, variance, mean = map(np.asarray, found(eta, getkey()))
    error = np.sqrt(variance / 1000) + np.finfo(dtype).eps * mean
    np.testing.assert_allclose(np.mean(np.asarray(scores, np.float64)), 0, atol=5 * error)


def test_derivatives_of_the_bernoulli_likelihood_at_zero_and_far_away():
    """By automatic differentiation: the slope x - p and the curvature -p(1 - p), with all digits of small numbers."""
    eta = np.array([-700.0, -30.0, -1.0, 0.0, 1.0, 30.0, 700.0])
    yes, no = scipy.special.expit(eta), scipy.special.expit(-eta)
    log_prob = ng.Bernoulli().log_prob
    derivatives = jax.jit(jax.vmap(lambda e, x: [f(log_prob)(e, x) for f in (lambda f: f, jax.grad, jax.hessian)]))
    for x, slope in ((0.0, -yes), (1.0, no), (0.25, 0.25 * no - 0.75 * yes)):
        value, first, second = derivatives(eta, np.full_like(eta, x))
        np.testing.assert_allclose(first, slope, rtol=1e-14)
        np.testing.assert_allclose(second, -yes * no, rtol=1e-13)
        expected = -x * np.logaddexp(0, -eta) - (1 - x) * np.logaddexp(0, eta)
        np.testing.assert_allclose(value, expected, rtol=1e-14)


# Single precision ------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.float32
@pytest.mark.parametrize("name", FAMILIES)
def test_float32_agrees_with_float64(name, getkey):
    """What is not tested above, at members of moderate size, in the digits that single precision has."""
    family, eta, *_ = FAMILIES[name]()
    x = family.sample(eta, getkey())

    @jax.jit
    def compute(family, eta, x):
        return family.log_prob(eta, x), family.score(eta, x)

    single = jax.tree.map(np.asarray, compute(family, eta, x))
    # The same numbers in double precision, those inside the family included.
    widen = lambda leaf: np.asarray(leaf, np.float64 if leaf.dtype == np.float32 else leaf.dtype)
    widened = jax.tree.map(widen, (family, eta, x))
    if name == "dirichlet":  # sums to one in single precision only
        widened = (*widened[:2], widened[2] / np.sum(widened[2], axis=-1, keepdims=True))
    with jax.enable_x64(True):
        double = jax.tree.map(np.asarray, compute(*jax.tree.map(jnp.asarray, widened)))

    def compare(actual, expected):
        assert (actual.dtype, expected.dtype) == (np.float32, np.float64)
        scale = 1 + np.max(np.abs(expected))
        np.testing.assert_allclose(actual, expected, 0, UNITS * np.finfo(np.float32).eps * scale)

    jax.tree.map(compare, single, double)
