"""Identities that hold for every exponential family.

What the identities need of one family is computed in one compiled function and kept: op by op, or law by law, JAX would
compile the same mathematics many times over.
"""

import functools
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FAMILIES, assert_close, assert_mean, flat, projection, ravel
from jax.flatten_util import ravel_pytree

import natgrad as ng

DRAWS = 20_000

families = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in FAMILIES]
)


@functools.cache
def facts(name) -> SimpleNamespace:
    """Both sides of the identities that involve no sampling."""
    case = FAMILIES[name]()
    family = case.family
    vector, unravel = ravel_pytree(case.eta)

    @jax.jit
    def compute(v, w):
        eta, other = unravel(v), unravel(w)
        log_partition = lambda v: family.log_partition(unravel(v))
        moments = lambda v: ravel(family.to_moments(unravel(v)))
        natural = lambda m: ravel(family.to_natural(unravel(m)))
        cost = lambda eta: family.kl(eta, other) ** 2
        xi, other_xi = moments(v), moments(w)
        back, other_back = jax.vmap(natural)(jnp.stack([xi, other_xi]))
        slope_of_natural = jax.jacfwd(natural)(xi)
        gradient = ravel(jax.grad(cost)(eta))
        return dict(
            xi=xi,
            gradient_of_log_partition=jax.grad(log_partition)(v),
            fisher=family.fisher(eta),
            hessian_of_log_partition=jax.hessian(log_partition)(v),
            slope_of_moments=jax.jacfwd(moments)(v),
            slope_of_natural=slope_of_natural,
            back=back,
            there_and_back=moments(back),
            kl=family.kl(eta, other),
            kl_back=family.kl(other, eta),
            kl_itself=family.kl(eta, eta),
            bregman=ng.Bregman(family.log_partition).dissimilarity(other, eta),
            dual=family.dual(unravel(xi)),
            other_dual=other_back @ other_xi - log_partition(other_back),
            other_xi=other_xi,
            other_back=other_back,
            entropy=family.entropy(eta),
            log_partition=log_partition(v),
            other_log_partition=log_partition(w),
            gradient=gradient,
            natural_gradient=ravel(family.natural_gradient(cost, eta)),
            gradient_in_moments=slope_of_natural.T @ gradient,
            kl_gradients=[
                jax.grad(kl)(v) for kl in (lambda u: family.kl(eta, unravel(u)), lambda u: family.kl(unravel(u), eta))
            ],
            kl_hessians=[
                jax.hessian(kl)(v)
                for kl in (lambda u: family.kl(eta, unravel(u)), lambda u: family.kl(unravel(u), eta))
            ],
        )

    values = jax.tree.map(np.asarray, compute(vector, ravel(case.other)))
    return SimpleNamespace(case=case, family=family, eta=np.asarray(vector), other=flat(case.other), **values)


@functools.cache
def draws(name) -> SimpleNamespace:
    """What the identities need of a large sample."""
    family, eta, other, _ = FAMILIES[name]()

    @jax.jit
    def compute(eta, other, key):
        xs = family.sample(eta, key, (DRAWS,))

        def one(x):
            statistics = ravel(family.sufficient_statistics(x))
            log_p = family.log_prob(eta, x)
            log_h = log_p - jnp.vdot(ravel(eta), statistics) + family.log_partition(eta)
            return dict(statistics=statistics, score=ravel(family.score(eta, x)), log_p=log_p, log_h=log_h)

        first = jax.tree.map(lambda x: x[0], xs)
        few = jax.tree.map(lambda x: x[:200], xs)
        likelihood = lambda eta: jnp.mean(jax.vmap(lambda x: family.log_prob(eta, x))(few))
        best = family.maximum_likelihood(few)
        vector, unravel = ravel_pytree(eta)
        return dict(
            **jax.vmap(one)(xs),
            log_q=jax.vmap(lambda x: family.log_prob(other, x))(xs),
            gradient_of_log_prob=ravel(jax.grad(family.log_prob)(eta, first)),
            hessian_of_log_prob=jax.hessian(lambda v: family.log_prob(unravel(v), first))(vector),
            best_moments=ravel(family.to_moments(best)),
            gradient_of_likelihood=ravel(jax.grad(likelihood)(eta)),
            gain=likelihood(best) - likelihood(eta),
        )

    values = compute(eta, other, jax.random.key(7))
    return SimpleNamespace(**jax.tree.map(np.asarray, values))


@families
def test_moments_are_the_gradient_of_the_log_partition(name):
    assert_close(facts(name).xi, facts(name).gradient_of_log_partition)


@families
def test_fisher_is_the_hessian_of_the_log_partition_and_the_slope_of_the_moments(name):
    known = facts(name)
    assert_close(known.fisher, known.hessian_of_log_partition, 1e-9)
    assert_close(known.fisher, known.slope_of_moments)


@families
def test_fisher_is_the_covariance_of_statistics_and_of_scores(name):
    known, drawn = facts(name), draws(name)
    assert_mean(drawn.statistics, known.xi)
    centred = drawn.statistics - known.xi
    assert_mean(centred[:, :, None] * centred[:, None, :], known.fisher)
    assert_mean(drawn.score[:, :, None] * drawn.score[:, None, :], known.fisher)


@families
def test_score_is_statistics_minus_moments(name):
    known, drawn = facts(name), draws(name)
    assert_close(drawn.score, drawn.statistics - known.xi)
    assert_close(drawn.score[0], drawn.gradient_of_log_prob, 1e-9)


@families
def test_hessian_of_the_negative_log_likelihood_is_the_fisher_whatever_the_data(name):
    assert_close(-draws(name).hessian_of_log_prob, facts(name).fisher, 1e-9)


@families
def test_natural_parameters_invert_the_moments(name):
    """On the directions that change the distribution; for minimal families these are all."""
    known = facts(name)
    directions = projection(known.case)
    assert_close(known.there_and_back, known.xi, 1e-11)
    assert_close(directions @ known.back, directions @ known.eta, 1e-9)
    assert_close(directions @ known.slope_of_natural @ known.fisher, directions, 1e-8, 1e-10)


@families
def test_maximum_likelihood_matches_moments(name):
    """Erratum E2: the gradient of the mean log-likelihood is the average statistics minus the moments."""
    known, drawn = facts(name), draws(name)
    average = drawn.statistics[:200].mean(axis=0)
    assert_close(drawn.best_moments, average, 1e-9)
    assert_close(drawn.gradient_of_likelihood, average - known.xi, 1e-9, 1e-11)
    assert drawn.gain > 0


@families
def test_divergence_is_the_bregman_divergence_in_both_coordinates(name):
    """`KL(p1, p2)` is that of the log partition at eta2 from eta1, and that of the dual at xi1 from xi2."""
    known = facts(name)
    assert_close(known.bregman, known.kl, 1e-9)
    dual = known.dual - known.other_dual - known.other_back @ (known.xi - known.other_xi)
    assert_close(dual, known.kl, 1e-8)
    assert known.kl > 0.01
    assert abs(known.kl_itself) < 1e-14
    assert abs(known.kl - known.kl_back) > 1e-6 or name.startswith("gaussian_mean")


@families
def test_divergence_has_the_fisher_for_a_hessian_at_coincidence_in_either_argument(name):
    known = facts(name)
    for gradient, hessian in zip(known.kl_gradients, known.kl_hessians, strict=True):
        assert_close(gradient, np.zeros_like(known.eta), atol=1e-10)
        assert_close(hessian, known.fisher, 1e-7, 1e-9)


@families
def test_divergence_entropy_and_dual_are_expectations(name):
    known, drawn = facts(name), draws(name)
    assert_mean(-drawn.log_p, known.entropy, slack=1e-9)
    assert_mean(drawn.log_p - drawn.log_q, known.kl, slack=1e-9)
    assert_mean(-known.entropy - drawn.log_h, known.dual, slack=1e-9)


@families
def test_dual_is_the_largest_gap(name):
    known = facts(name)
    assert_close(known.dual, known.eta @ known.xi - known.log_partition, 1e-9)
    assert known.other @ known.xi - known.other_log_partition < known.dual


@families
def test_natural_gradient_is_the_gradient_in_the_moments_and_the_reverse(name):
    known = facts(name)
    assert_close(known.fisher @ known.natural_gradient, known.gradient, 1e-8, 1e-10)
    assert_close(known.natural_gradient, known.gradient_in_moments, 1e-8, 1e-10)
    # The natural gradient in the moments, F times the gradient there, is the gradient in the natural parameters.
    assert_close(known.slope_of_moments @ known.gradient_in_moments, known.gradient, 1e-7, 1e-10)


@families
def test_leading_axes_are_independent_and_summed(name):
    family, eta, other, _ = FAMILIES[name]()

    def everything(eta, other):
        xi = family.to_moments(eta)
        numbers = family.log_partition(eta), family.entropy(eta), family.kl(eta, other)
        return numbers, (xi, family.to_natural(xi))

    eta, other = (jax.tree.map(lambda a, b: jnp.stack([a, b]), *pair) for pair in [(eta, other), (other, eta)])
    together, each = jax.jit(lambda e, o: (everything(e, o), jax.vmap(everything)(e, o)))(eta, other)
    assert_close(together[0], jax.tree.map(lambda n: n.sum(), each[0]), 1e-9)
    assert_close(together[1], each[1], 1e-9)


@families
@pytest.mark.compat
def test_eager_compiled_and_half_precision_evaluation_agree(name):
    family, eta, *_ = FAMILIES[name]()
    assert_close(family.to_moments(eta), jax.jit(lambda e: family.to_moments(e))(eta), 1e-12)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), eta)
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half)
    # A family may be an argument of a compiled function.
    computed, expected = jax.jit(lambda f, a, b: (f.to_moments(a), f.to_moments(b)))(family, half, single)
    assert {leaf.dtype for leaf in jax.tree.leaves(computed)} == {jnp.dtype("float32")}
    assert_close(computed, expected)


@hypothesis.given(st.lists(st.integers(0, 3), max_size=3), st.integers(1, 4))
@hypothesis.settings(max_examples=10)
def test_any_leading_shape(lead, classes):
    shape = (*lead, classes)
    eta = jnp.asarray(np.linspace(-1.0, 1.0, int(np.prod(shape))).reshape(shape))
    for family in (ng.Bernoulli(), ng.Categorical(), ng.MinimalCategorical()):
        number, moments, fisher, back = jax.eval_shape(
            lambda e, f=family: (f.log_partition(e), f.to_moments(e), f.fisher(e), f.to_natural(f.to_moments(e))), eta
        )
        assert number.shape == ()
        assert moments.shape == back.shape == shape
        assert fisher.shape == (eta.size, eta.size)
