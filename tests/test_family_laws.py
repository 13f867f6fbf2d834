"""Identities that hold for every exponential family.

Both sides of an identity are computed in one compiled function: op by op, JAX would compile each operation alone.
"""

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

families = pytest.mark.parametrize("name", FAMILIES)


@families
@pytest.mark.compat
def test_moments_are_the_gradient_of_the_log_partition(name):
    family, eta, *_ = FAMILIES[name]()
    moments, gradient = jax.jit(lambda eta: (family.to_moments(eta), jax.grad(family.log_partition)(eta)))(eta)
    assert_close(moments, gradient)


@families
@pytest.mark.compat
def test_fisher_is_the_hessian_of_the_log_partition_and_the_slope_of_the_moments(name):
    family, eta, *_ = FAMILIES[name]()
    vector, unravel = ravel_pytree(eta)

    @jax.jit
    def sides(v):
        hessian = jax.hessian(lambda v: family.log_partition(unravel(v)))(v)
        slope = jax.jacfwd(lambda v: ravel(family.to_moments(unravel(v))))(v)
        return family.fisher(unravel(v)), hessian, slope

    fisher, hessian, slope = sides(vector)
    assert_close(fisher, hessian, 1e-9)
    assert_close(fisher, slope)


@families
def test_fisher_is_the_covariance_of_statistics_and_of_scores(name, getkey):
    family, eta, *_ = FAMILIES[name]()

    @jax.jit
    def draw(eta, key):
        xs = family.sample(eta, key, (DRAWS,))
        statistics = jax.vmap(lambda x: ravel(family.sufficient_statistics(x)))(xs)
        return statistics, jax.vmap(lambda x: ravel(family.score(eta, x)))(xs)

    statistics, scores = map(np.asarray, draw(eta, getkey()))
    xi, fisher = flat(family.to_moments(eta)), family.fisher(eta)
    assert_mean(statistics, xi)
    centred = statistics - xi
    assert_mean(centred[:, :, None] * centred[:, None, :], fisher)
    assert_mean(scores[:, :, None] * scores[:, None, :], fisher)


@families
def test_score_is_statistics_minus_moments(name, getkey):
    family, eta, *_ = FAMILIES[name]()

    @jax.jit
    def sides(eta, key):
        x = family.sample(eta, key)
        difference = ravel(family.sufficient_statistics(x)) - ravel(family.to_moments(eta))
        return ravel(family.score(eta, x)), difference, ravel(jax.grad(family.log_prob)(eta, x))

    score, difference, gradient = sides(eta, getkey())
    assert_close(score, difference)
    assert_close(score, gradient, 1e-9)


@families
def test_hessian_of_the_negative_log_likelihood_is_the_fisher_whatever_the_data(name, getkey):
    family, eta, *_ = FAMILIES[name]()
    vector, unravel = ravel_pytree(eta)

    @jax.jit
    def sides(v, key):
        x = family.sample(unravel(v), key)
        return -jax.hessian(lambda v: family.log_prob(unravel(v), x))(v), family.fisher(unravel(v))

    assert_close(*sides(vector, getkey()), 1e-9)


@families
@pytest.mark.compat
def test_natural_parameters_invert_the_moments(name):
    """On the directions that change the distribution; for minimal families these are all."""
    case = FAMILIES[name]()
    vector, unravel = ravel_pytree(case.eta)

    @jax.jit
    def sides(v):
        xi = case.family.to_moments(unravel(v))
        back = case.family.to_natural(xi)
        slope = jax.jacfwd(lambda m: ravel(case.family.to_natural(unravel(m))))(ravel(xi))
        return xi, case.family.to_moments(back), ravel(back), slope @ case.family.fisher(unravel(v))

    xi, again, back, identity = sides(vector)
    assert_close(again, xi, 1e-11)
    assert_close(projection(case) @ back, projection(case) @ vector, 1e-9)
    assert_close(projection(case) @ identity, projection(case), 1e-8, 1e-10)


@families
def test_maximum_likelihood_matches_moments(name, getkey):
    family, eta, *_ = FAMILIES[name]()

    def log_likelihood(eta, xs):
        return jnp.mean(jax.vmap(lambda x: family.log_prob(eta, x))(xs))

    @jax.jit
    def sides(eta, key):
        xs = family.sample(eta, key, (200,))
        average = jax.tree.map(lambda t: t.mean(0), jax.vmap(family.sufficient_statistics)(xs))
        best = family.maximum_likelihood(xs)
        # Erratum E2: the gradient of the mean log-likelihood is the average statistics minus the moments.
        gradients = jax.grad(log_likelihood)(eta, xs), ravel(average) - ravel(family.to_moments(eta))
        gain = log_likelihood(best, xs) - log_likelihood(eta, xs)
        return family.to_moments(best), average, gradients, gain

    moments, average, (gradient, difference), gain = sides(eta, getkey())
    assert_close(moments, average, 1e-9)
    assert_close(flat(gradient), difference, 1e-9)
    assert gain > 0


@families
def test_divergence_is_the_bregman_divergence_in_both_coordinates(name):
    """`KL(p1, p2)` is that of the log partition at eta2 from eta1, and that of the dual at xi1 from xi2."""
    family, eta1, eta2, _ = FAMILIES[name]()

    @jax.jit
    def sides(eta1, eta2):
        xi1, xi2 = family.to_moments(eta1), family.to_moments(eta2)
        natural = ng.Bregman(family.log_partition).dissimilarity(eta2, eta1)
        slope = ravel(family.to_natural(xi2))
        dual = family.dual(xi1) - family.dual(xi2) - slope @ (ravel(xi1) - ravel(xi2))
        return family.kl(eta1, eta2), natural, dual, family.kl(eta2, eta1), family.kl(eta1, eta1)

    kl, natural, dual, reverse, none = sides(eta1, eta2)
    assert_close(natural, kl, 1e-9)
    assert_close(dual, kl, 1e-8)
    assert kl > 0.01
    assert abs(none) < 1e-14
    assert abs(kl - reverse) > 1e-6 or name.startswith("gaussian_mean")


@families
def test_divergence_entropy_and_dual_are_expectations(name, getkey):
    family, eta, other, _ = FAMILIES[name]()

    @jax.jit
    def draw(eta, other, key):
        xs = family.sample(eta, key, (DRAWS,))

        def logs(x):
            log_p = family.log_prob(eta, x)
            pairing = jnp.vdot(ravel(eta), ravel(family.sufficient_statistics(x)))
            return log_p, family.log_prob(other, x), log_p - pairing + family.log_partition(eta)

        expected = family.entropy(eta), family.kl(eta, other), family.dual(family.to_moments(eta))
        return jax.vmap(logs)(xs), expected

    (log_p, log_q, log_h), (entropy, kl, dual) = draw(eta, other, getkey())
    assert_mean(-log_p, entropy, slack=1e-9)
    assert_mean(log_p - log_q, kl, slack=1e-9)
    assert_mean(-entropy - log_h, dual, slack=1e-9)


@families
def test_dual_is_the_largest_gap(name):
    family, eta, other, _ = FAMILIES[name]()

    @jax.jit
    def sides(eta, other):
        xi = family.to_moments(eta)
        gap = lambda eta: jnp.vdot(ravel(eta), ravel(xi)) - family.log_partition(eta)
        return family.dual(xi), gap(eta), gap(other)

    dual, here, elsewhere = sides(eta, other)
    assert_close(dual, here, 1e-9)
    assert elsewhere < dual


@families
def test_natural_gradient_is_the_gradient_in_the_moments_and_the_reverse(name):
    family, eta, target, _ = FAMILIES[name]()
    cost = lambda eta: family.kl(eta, target) ** 2

    @jax.jit
    def sides(eta):
        natural = family.natural_gradient(cost, eta)
        gradient = jax.grad(cost)(eta)
        in_moments = jax.grad(lambda xi: cost(family.to_natural(xi)))(family.to_moments(eta))
        pushed = jax.jvp(family.to_moments, (eta,), (in_moments,))[1]
        return ravel(natural), family.fisher(eta), ravel(gradient), ravel(in_moments), ravel(pushed)

    natural, fisher, gradient, in_moments, pushed = sides(eta)
    assert_close(fisher @ natural, gradient, 1e-8, 1e-10)
    assert_close(natural, in_moments, 1e-8, 1e-10)
    # The natural gradient in the moments, F times the gradient there, is the gradient in the natural parameters.
    assert_close(pushed, gradient, 1e-7, 1e-10)


@families
def test_leading_axes_are_independent_and_summed(name, getkey):
    family, eta, other, _ = FAMILIES[name]()

    def everything(eta, other, x):
        xi = family.to_moments(eta)
        numbers = family.log_partition(eta), family.entropy(eta), family.kl(eta, other), family.log_prob(eta, x)
        return numbers, (xi, family.to_natural(xi), family.score(eta, x))

    eta, other = (jax.tree.map(lambda a, b: jnp.stack([a, b]), *pair) for pair in [(eta, other), (other, eta)])
    x = jax.jit(lambda e, k: family.sample(e, k))(eta, getkey())
    numbers, arrays = jax.jit(everything)(eta, other, x)
    numbers_each, arrays_each = jax.jit(jax.vmap(everything))(eta, other, x)
    assert_close(numbers, jax.tree.map(lambda n: n.sum(), numbers_each), 1e-9)
    assert_close(arrays, arrays_each, 1e-9)


@families
@pytest.mark.compat
def test_eager_evaluation_agrees_with_compiled(name):
    family, eta, *_ = FAMILIES[name]()
    assert_close(jax.jit(lambda e: family.to_moments(e))(eta), family.to_moments(eta), 1e-12)
    assert_close(jax.jit(lambda e: family.log_partition(e))(eta), family.log_partition(eta), 1e-12)


@families
def test_families_pass_through_jit(name):
    family, eta, *_ = FAMILIES[name]()
    inside = jax.jit(lambda f, e: f.to_moments(e))(family, eta)
    assert_close(inside, jax.jit(lambda e: family.to_moments(e))(eta), 1e-12)


@families
def test_half_precision_is_computed_in_single(name):
    family, eta, *_ = FAMILIES[name]()
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), eta)
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half)
    computed = jax.jit(lambda e: family.to_moments(e))(half)
    assert {leaf.dtype for leaf in jax.tree.leaves(computed)} == {jnp.dtype("float32")}
    assert_close(computed, jax.jit(lambda e: family.to_moments(e))(single))


@hypothesis.given(st.lists(st.integers(0, 3), max_size=3), st.integers(1, 4))
@hypothesis.settings(max_examples=10)
def test_any_leading_shape(lead, classes):
    shape = (*lead, classes)
    eta = jnp.linspace(-1.0, 1.0, int(np.prod(shape))).reshape(shape)
    for family in (ng.Bernoulli(), ng.Categorical(), ng.MinimalCategorical()):
        assert family.log_partition(eta).shape == ()
        assert family.to_moments(eta).shape == shape
        assert family.fisher(eta).shape == (eta.size, eta.size)
        assert family.to_natural(family.to_moments(eta)).shape == shape


@families
def test_divergence_has_the_fisher_for_a_hessian_at_coincidence_in_either_argument(name):
    family, eta, *_ = FAMILIES[name]()
    vector, unravel = ravel_pytree(eta)

    @jax.jit
    def sides(v):
        here = unravel(v)
        from_here = lambda w: family.kl(here, unravel(w))
        to_here = lambda w: family.kl(unravel(w), here)
        return family.fisher(here), *(f(kl)(v) for f in (jax.grad, jax.hessian) for kl in (from_here, to_here))

    fisher, *gradients_and_hessians = sides(vector)
    for gradient in gradients_and_hessians[:2]:
        assert_close(gradient, jnp.zeros_like(vector), atol=1e-10)
    for hessian in gradients_and_hessians[2:]:
        assert_close(hessian, fisher, 1e-7, 1e-9)
