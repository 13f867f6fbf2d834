"""Every family against SciPy, and against sums and integrals of its own density.

Integrals are trapezoid sums in a coordinate in which the density is smooth and decays at both ends. They
converge exponentially in the step, so that with the steps below only rounding is left.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.flatten_util import ravel_pytree
from scipy import special

import natgrad as ng

# Typed loosely: SciPy does not say which frozen distributions are discrete.
stats: Any = scipy.stats

COVARIANCE = np.array([[1.5, 0.4], [0.4, 0.7]])
PRECISION = np.linalg.inv(COVARIANCE)
MEAN = np.array([0.3, -0.8])
LOGITS = np.array([0.5, -1.0, 1.2])


class Case(NamedTuple):
    """A member of a family, another one, and the same member in SciPy."""

    family: Callable[[], Any]
    eta: Any
    other: Any
    log_prob: Callable[[np.ndarray], np.ndarray]
    entropy: float
    # All observations along the leading axis, and the measure of each.
    support: tuple[np.ndarray, np.ndarray]


def counts(stop: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(stop, dtype=float), np.ones(stop)


def labels(stop: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(stop), np.ones(stop)


def line() -> tuple[np.ndarray, np.ndarray]:
    u = np.arange(-15.0, 15.0, 0.1)
    return u, np.full_like(u, 0.1)


def half_line() -> tuple[np.ndarray, np.ndarray]:
    u = np.arange(-40.0, 6.0, 0.05)
    return np.exp(u), 0.05 * np.exp(u)


def interval() -> tuple[np.ndarray, np.ndarray]:
    u = np.arange(-30.0, 30.0, 0.05)
    return special.expit(u), 0.05 * special.expit(u) * special.expit(-u)


def plane() -> tuple[np.ndarray, np.ndarray]:
    u = np.arange(-12.0, 12.0, 0.2)
    x = np.stack(np.meshgrid(u, u), axis=-1).reshape(-1, 2)
    return x, np.full(len(x), 0.2**2)


def triangle() -> tuple[np.ndarray, np.ndarray]:
    """The simplex of three classes, as the softmax of two numbers and zero."""
    u = np.arange(-28.0, 28.0, 0.25)
    logits = np.stack(np.meshgrid(u, u), axis=-1).reshape(-1, 2)
    x = special.softmax(np.pad(logits, [(0, 0), (0, 1)]), axis=-1)
    return x, 0.25**2 * np.prod(x, axis=-1)


def pairs(xs, ys) -> tuple[Any, np.ndarray]:
    (x, x_weight), (y, y_weight) = xs, ys
    i, j = map(np.ravel, np.indices((len(x), len(y))))
    return (x[i], y[j]), x_weight[i] * y_weight[j]


def gaussian(mean, covariance) -> dict[str, Any]:
    frozen = stats.multivariate_normal(mean, covariance)
    return {"log_prob": frozen.logpdf, "entropy": frozen.entropy(), "support": plane()}


def gamma(shape, rate):
    return stats.gamma(shape, scale=1 / rate)


CASES = {
    "bernoulli": Case(
        ng.Bernoulli,
        np.array(0.7),
        np.array(-1.1),
        stats.bernoulli(special.expit(0.7)).logpmf,
        stats.bernoulli(special.expit(0.7)).entropy(),
        counts(2),
    ),
    "categorical": Case(
        ng.Categorical,
        LOGITS,
        np.zeros(3),
        lambda x: special.log_softmax(LOGITS)[x],
        stats.entropy(special.softmax(LOGITS)),
        labels(3),
    ),
    "minimal_categorical": Case(
        lambda: ng.MinimalCategorical(3),
        LOGITS[:2] - LOGITS[2],
        np.zeros(2),
        lambda x: special.log_softmax(LOGITS)[x],
        stats.entropy(special.softmax(LOGITS)),
        labels(3),
    ),
    "gaussian_mean_number": Case(
        lambda: ng.GaussianMean(0.7),
        np.array(0.4),
        np.array(-1.0),
        stats.norm(0.28, np.sqrt(0.7)).logpdf,
        stats.norm(0.28, np.sqrt(0.7)).entropy(),
        line(),
    ),
    "gaussian_mean_vector": Case(
        lambda: ng.GaussianMean([0.7, 1.5]),
        np.array([0.4, -0.2]),
        np.array([0.1, 0.3]),
        **gaussian([0.28, -0.3], np.diag([0.7, 1.5])),
    ),
    "gaussian_mean_matrix": Case(
        lambda: ng.GaussianMean(COVARIANCE),
        PRECISION @ MEAN,
        np.array([0.1, 0.3]),
        **gaussian(MEAN, COVARIANCE),
    ),
    "gaussian_precision": Case(
        ng.GaussianPrecision, PRECISION, np.diag([0.5, 2.0]), **gaussian(np.zeros(2), COVARIANCE)
    ),
    "gaussian": Case(
        lambda: ng.Gaussian(2),
        (PRECISION @ MEAN, PRECISION),
        (np.array([0.1, 0.3]), np.diag([0.5, 2.0])),
        **gaussian(MEAN, COVARIANCE),
    ),
    "poisson": Case(
        ng.Poisson,
        np.array(np.log(3.5)),
        np.array(np.log(1.2)),
        stats.poisson(3.5).logpmf,
        stats.poisson(3.5).entropy(),
        counts(60),
    ),
    "exponential": Case(
        ng.Exponential,
        np.array(-0.6),
        np.array(-2.0),
        stats.expon(scale=1 / 0.6).logpdf,
        stats.expon(scale=1 / 0.6).entropy(),
        half_line(),
    ),
    "gamma": Case(
        ng.Gamma,
        np.array([1.7, -0.6]),
        np.array([3.0, -1.1]),
        gamma(1.7, 0.6).logpdf,
        gamma(1.7, 0.6).entropy(),
        half_line(),
    ),
    "beta": Case(
        ng.Beta,
        np.array([1.3, 2.4]),
        np.array([2.0, 1.5]),
        stats.beta(1.3, 2.4).logpdf,
        stats.beta(1.3, 2.4).entropy(),
        interval(),
    ),
    "dirichlet": Case(
        ng.Dirichlet,
        np.array([1.3, 2.4, 3.1]),
        np.array([2.0, 1.5, 1.5]),
        lambda x: stats.dirichlet([1.3, 2.4, 3.1]).logpdf(x.T),
        stats.dirichlet([1.3, 2.4, 3.1]).entropy(),
        triangle(),
    ),
    "geometric": Case(
        # SciPy counts the trials up to the first success, we the failures before it.
        ng.Geometric,
        np.log(0.4),
        np.log(0.7),
        stats.geom(0.6, loc=-1).logpmf,
        stats.geom(0.6).entropy(),
        counts(150),
    ),
    "negative_binomial": Case(
        lambda: ng.NegativeBinomial(2.5),
        np.log(0.4),
        np.log(0.7),
        stats.nbinom(2.5, 0.6).logpmf,
        stats.nbinom(2.5, 0.6).entropy(),
        counts(200),
    ),
    "product": Case(
        lambda: ng.Product((ng.Poisson(), ng.Gamma())),
        (np.log(3.5), np.array([1.7, -0.6])),
        (np.log(1.2), np.array([3.0, -1.1])),
        lambda x: stats.poisson(3.5).logpmf(x[0]) + gamma(1.7, 0.6).logpdf(x[1]),
        stats.poisson(3.5).entropy() + gamma(1.7, 0.6).entropy(),
        pairs(counts(40), half_line()),
    ),
}

cases = pytest.mark.parametrize("name", CASES)


@functools.cache
def computed(name: str) -> dict[str, Any]:
    """What the family says about the two members."""
    case = CASES[name]
    family = ng.Categorical(3) if name == "categorical" else case.family()

    members = jax.tree.map(lambda *leaves: jnp.stack(leaves), case.eta, case.other)
    xs, weights = case.support

    @jax.jit
    def compute(members, xs):
        def of_observation(x):
            log_probs = jax.vmap(family.log_prob, (0, None))(members, x)
            return log_probs, ravel_pytree(family.sufficient_statistics(x))[0]

        eta = jax.tree.map(lambda leaf: leaf[0], members)
        others = jax.tree.map(lambda leaf: leaf[::-1], members)
        log_probs, statistics = jax.vmap(of_observation)(xs)
        kl, kl_to_itself = jax.vmap(family.kl, (None, 0))(eta, others)
        return {
            "log_p": log_probs[:, 0],
            "log_q": log_probs[:, 1],
            "statistics": statistics,
            "moments": ravel_pytree(family.to_moments(eta))[0],
            "fisher": family.fisher(eta),
            "entropy": family.entropy(eta),
            "kl": kl,
            "kl_to_itself": kl_to_itself,
        }

    ours = jax.tree.map(np.asarray, compute(members, xs))
    return ours | {"p": weights * np.exp(ours["log_p"]), "q": weights * np.exp(ours["log_q"])}


@pytest.mark.sample(3)
@cases
def test_log_prob_and_entropy_are_those_of_scipy(name):
    case, ours = CASES[name], computed(name)
    # Parts of the log density cancel, so that the error is relative to the largest of them.
    np.testing.assert_allclose(ours["log_p"], case.log_prob(case.support[0]), 1e-12, 1e-12)
    # SciPy sums the entropies of counts up to terms of about 1e-11.
    np.testing.assert_allclose(ours["entropy"], case.entropy, rtol=1e-9)


@pytest.mark.sample(3)
@cases
def test_probabilities_sum_to_one(name):
    np.testing.assert_allclose(np.sum(computed(name)["p"]), 1.0, rtol=1e-12)
    np.testing.assert_allclose(np.sum(computed(name)["q"]), 1.0, rtol=1e-12)


@pytest.mark.sample(5)
@cases
def test_moments_and_fisher_are_mean_and_covariance_of_the_statistics(name):
    ours = computed(name)
    t, p = ours["statistics"], ours["p"]
    mean = p @ t
    np.testing.assert_allclose(ours["moments"], mean, 1e-11, 1e-13)
    np.testing.assert_allclose(ours["fisher"], (p[:, None] * (t - mean)).T @ (t - mean), 1e-10, 1e-12)


@pytest.mark.sample(5)
@cases
def test_entropy_and_divergence_are_expectations(name):
    ours = computed(name)
    p = ours["p"]
    np.testing.assert_allclose(ours["entropy"], -p @ ours["log_p"], rtol=1e-11)
    np.testing.assert_allclose(ours["kl"], p @ (ours["log_p"] - ours["log_q"]), rtol=1e-10)
    np.testing.assert_allclose(ours["kl_to_itself"], 0.0, atol=1e-30)


@pytest.mark.parametrize(
    ("family", "eta", "frozen"),
    [
        (ng.Bernoulli, special.logit(0.2), stats.bernoulli(0.2)),
        (ng.Poisson, np.log(3.5), stats.poisson(3.5)),
        (ng.Exponential, -0.6, stats.expon(scale=1 / 0.6)),
        (ng.Geometric, np.log(0.4), stats.geom(0.6, loc=-1)),
        (lambda: ng.NegativeBinomial(2.5), np.log(0.4), stats.nbinom(2.5, 0.6)),
        (lambda: ng.GaussianMean(0.7), 0.4, stats.norm(0.28, np.sqrt(0.7))),
    ],
    ids=["bernoulli", "poisson", "exponential", "geometric", "negative_binomial", "gaussian_mean"],
)
def test_moments_and_fisher_are_mean_and_variance(family, eta, frozen):
    np.testing.assert_allclose(family().to_moments(eta), frozen.mean(), rtol=1e-13)
    np.testing.assert_allclose(family().fisher(eta), [[frozen.var()]], rtol=1e-13)


def test_gamma_moments_contain_the_mean():
    family, eta = ng.Gamma(), np.array([1.7, -0.6])
    np.testing.assert_allclose(family.to_moments(eta)[1], gamma(1.7, 0.6).mean(), rtol=1e-14)
    np.testing.assert_allclose(family.fisher(eta)[1, 1], gamma(1.7, 0.6).var(), rtol=1e-14)


def test_gaussian_converts_to_mean_and_covariance():
    family = ng.Gaussian(2)
    eta = family.from_mean(MEAN, COVARIANCE)
    np.testing.assert_allclose(eta[0], PRECISION @ MEAN, rtol=1e-14)
    np.testing.assert_allclose(eta[1], PRECISION, rtol=1e-14)
    mean, covariance = family.to_mean(eta)
    np.testing.assert_allclose(mean, MEAN, rtol=1e-14)
    np.testing.assert_allclose(covariance, COVARIANCE, rtol=1e-14)


def test_maximum_likelihood_is_that_of_scipy():
    """For the two families that SciPy fits by itself and that need Newton's method here."""
    xs = gamma(1.7, 0.6).rvs(200, random_state=0)
    shape, _, scale = stats.gamma.fit(xs, floc=0)
    np.testing.assert_allclose(ng.Gamma().maximum_likelihood(xs), [shape, -1 / scale], rtol=1e-6)
    xs = stats.beta(1.3, 2.4).rvs(200, random_state=0)
    alpha, beta, *_ = stats.beta.fit(xs, floc=0, fscale=1)
    np.testing.assert_allclose(jax.jit(ng.Beta().maximum_likelihood)(xs), [alpha, beta], rtol=1e-6)
