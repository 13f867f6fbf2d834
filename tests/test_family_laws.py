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
FEW = 200

families = pytest.mark.parametrize("name", FAMILIES)


@functools.cache
def facts(name) -> SimpleNamespace:
    """Both sides of the identities that involve no sampling.

    Points that a function is needed at are stacked, and its value and gradient are kept next to its Hessian, so that
    each function is compiled once."""
    case = FAMILIES[name]()
    family = case.family
    vector, unravel = ravel_pytree(case.eta)
    directions = projection(case)

    @jax.jit
    def compute(v, w):
        eta, other = unravel(v), unravel(w)
        log_partition = lambda v: family.log_partition(unravel(v))
        moments = lambda v: ravel(family.to_moments(unravel(v)))
        natural = lambda m: ravel(family.to_natural(unravel(m)))
        kl = lambda pair: family.kl(*map(unravel, pair))
        # Any cost will do that, like the distribution, changes in some directions only.
        cost = lambda eta: jnp.sum(jnp.sin(directions @ ravel(eta)))
        xis = jax.vmap(moments)(jnp.stack([v, w]))
        slopes_of_natural, backs = jax.vmap(with_value(jax.jacfwd, natural))(xis)
        log_partitions = jax.vmap(log_partition)(jnp.stack([v, w, backs[1]]))
        hessian, gradient = with_value(jax.jacfwd, jax.grad(log_partition))(v)
        kls = jax.vmap(kl)((jnp.stack([v, w, v]), jnp.stack([w, v, v])))
        divergences = lambda u: kl((v, u)), lambda u: kl((u, v))
        kl_hessians, kl_gradients = zip(*(with_value(jax.jacfwd, jax.grad(f))(v) for f in divergences), strict=True)
        return dict(
            xi=xis[0],
            other_xi=xis[1],
            gradient_of_log_partition=gradient,
            fisher=family.fisher(eta),
            hessian_of_log_partition=hessian,
            slope_of_moments=jax.jacfwd(moments)(v),
            slope_of_natural=slopes_of_natural[0],
            back=backs[0],
            other_back=backs[1],
            there_and_back=moments(backs[0]),
            kl=kls[0],
            kl_back=kls[1],
            kl_itself=kls[2],
            bregman=ng.Bregman(family.log_partition).dissimilarity(other, eta),
            dual=family.dual(unravel(xis[0])),
            other_dual=backs[1] @ xis[1] - log_partitions[2],
            entropies=jax.vmap(lambda v: family.entropy(unravel(v)))(jnp.stack([v, w])),
            log_partition=log_partitions[0],
            other_log_partition=log_partitions[1],
            gradient=ravel(jax.grad(cost)(eta)),
            natural_gradient=ravel(family.natural_gradient(cost, eta)),
            kl_gradients=kl_gradients,
            kl_hessians=kl_hessians,
        )

    values = jax.tree.map(np.asarray, compute(vector, ravel(case.other)))
    return SimpleNamespace(
        case=case, family=family, eta=np.asarray(vector), other=flat(case.other), directions=directions, **values
    )


def with_value(derivative, function):
    """A derivative, and the value."""

    def twice(x):
        value = function(x)
        return value, value

    return derivative(twice, has_aux=True)


@functools.cache
def draws(name) -> SimpleNamespace:
    """What the identities need of a large sample, or of its first few observations."""
    family, eta, other, _ = FAMILIES[name]()

    @jax.jit
    def compute(eta, other, key):
        xs = family.sample(eta, key, (DRAWS,))
        few = jax.tree.map(lambda x: x[:FEW], xs)
        best = family.maximum_likelihood(few)
        members = jax.tree.map(lambda *leaves: jnp.stack(leaves), eta, other, best)

        def one(x):
            log_probs = jax.vmap(lambda member: family.log_prob(member, x))(members)
            return log_probs, ravel(family.sufficient_statistics(x)), ravel(family.score(eta, x))

        vector, unravel = ravel_pytree(eta)
        derivatives = jax.vmap(
            lambda x: with_value(jax.jacfwd, jax.grad(lambda v: family.log_prob(unravel(v), x)))(vector)
        )
        log_probs, statistics, scores = jax.vmap(one)(xs)
        hessians, gradients = derivatives(few)
        return dict(
            statistics=statistics,
            score=scores,
            log_p=log_probs[:, 0],
            log_q=log_probs[:, 1],
            log_best=log_probs[:FEW, 2],
            gradients_of_log_prob=gradients,
            hessians_of_log_prob=hessians,
            best_moments=ravel(family.to_moments(best)),
        )

    values = compute(eta, other, jax.random.key(7))
    return SimpleNamespace(**jax.tree.map(np.asarray, values))


@pytest.mark.sample(2)
@families
def test_moments_are_the_gradient_of_the_log_partition(name):
    assert_close(facts(name).xi, facts(name).gradient_of_log_partition)


@pytest.mark.sample(3)
@families
def test_fisher_is_the_hessian_of_the_log_partition_and_the_slope_of_the_moments(name):
    known = facts(name)
    assert_close(known.fisher, known.hessian_of_log_partition, 1e-9)
    assert_close(known.fisher, known.slope_of_moments)


@pytest.mark.sample(2)
@families
def test_fisher_is_the_covariance_of_statistics_and_of_scores(name):
    known, drawn = facts(name), draws(name)
    assert_mean(drawn.statistics, known.xi)
    centred = drawn.statistics - known.xi
    assert_mean(centred[:, :, None] * centred[:, None, :], known.fisher)
    assert_mean(drawn.score[:, :, None] * drawn.score[:, None, :], known.fisher)


@pytest.mark.sample(3)
@families
def test_score_is_statistics_minus_moments(name):
    known, drawn = facts(name), draws(name)
    assert_close(drawn.score, drawn.statistics - known.xi)
    assert_close(drawn.score[:FEW], drawn.gradients_of_log_prob, 1e-9, 1e-11)


@pytest.mark.sample(3)
@families
def test_hessian_of_the_negative_log_likelihood_is_the_fisher_whatever_the_data(name):
    fisher, hessians = facts(name).fisher, draws(name).hessians_of_log_prob
    assert_close(-hessians, np.broadcast_to(fisher, hessians.shape), 1e-9)


@pytest.mark.sample(3)
@families
def test_natural_parameters_invert_the_moments(name):
    """On the directions that change the distribution; for minimal families these are all."""
    known = facts(name)
    directions = known.directions
    assert_close(known.there_and_back, known.xi, 1e-11)
    assert_close(directions @ known.back, directions @ known.eta, 1e-9)
    assert_close(directions @ known.slope_of_natural @ known.fisher, directions, 1e-8, 1e-10)


@pytest.mark.sample(3)
@families
def test_maximum_likelihood_matches_moments(name):
    """Erratum E2: the gradient of the mean log-likelihood is the average statistics minus the moments."""
    known, drawn = facts(name), draws(name)
    average = drawn.statistics[:FEW].mean(axis=0)
    assert_close(drawn.best_moments, average, 1e-9)
    assert_close(drawn.gradients_of_log_prob.mean(axis=0), average - known.xi, 1e-9, 1e-11)
    assert drawn.log_best.mean() > drawn.log_p[:FEW].mean()


@pytest.mark.sample(3)
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


@pytest.mark.sample(3)
@families
def test_divergence_has_the_fisher_for_a_hessian_at_coincidence_in_either_argument(name):
    known = facts(name)
    for gradient, hessian in zip(known.kl_gradients, known.kl_hessians, strict=True):
        assert_close(gradient, np.zeros_like(known.eta), atol=1e-10)
        assert_close(hessian, known.fisher, 1e-7, 1e-9)


@pytest.mark.sample(3)
@families
def test_divergence_entropy_and_dual_are_expectations(name):
    known, drawn = facts(name), draws(name)
    entropy = known.entropies[0]
    assert_mean(-drawn.log_p, entropy, slack=1e-9)
    assert_mean(drawn.log_p - drawn.log_q, known.kl, slack=1e-9)
    log_h = drawn.log_p - drawn.statistics @ known.eta + known.log_partition
    assert_mean(-entropy - log_h, known.dual, slack=1e-9)


@pytest.mark.sample(3)
@families
def test_dual_is_the_largest_gap(name):
    known = facts(name)
    assert_close(known.dual, known.eta @ known.xi - known.log_partition, 1e-9)
    assert known.other @ known.xi - known.other_log_partition < known.dual


@pytest.mark.sample(3)
@families
def test_natural_gradient_is_the_gradient_in_the_moments_and_the_reverse(name):
    known = facts(name)
    assert_close(known.fisher @ known.natural_gradient, known.gradient, 1e-8, 1e-10)
    gradient_in_moments = known.slope_of_natural.T @ known.gradient
    assert_close(known.natural_gradient, gradient_in_moments, 1e-8, 1e-10)
    # The natural gradient in the moments, F times the gradient there, is the gradient in the natural parameters.
    assert_close(known.slope_of_moments @ gradient_in_moments, known.gradient, 1e-7, 1e-10)


@pytest.mark.sample(3)
@families
def test_leading_axes_are_independent_and_summed(name):
    known = facts(name)
    family, eta, other, _ = known.case

    @jax.jit
    def together(eta, other):
        xi = family.to_moments(eta)
        numbers = family.log_partition(eta), family.entropy(eta), family.kl(eta, other)
        return numbers, (xi, family.to_natural(xi))

    one, two = (jax.tree.map(lambda a, b: jnp.stack([a, b]), *pair) for pair in [(eta, other), (other, eta)])
    numbers, arrays = together(one, two)
    each = known.log_partition + known.other_log_partition, known.entropies.sum(), known.kl + known.kl_back
    assert_close(numbers, each, 1e-9)
    for array, expected in zip(arrays, ([known.xi, known.other_xi], [known.back, known.other_back]), strict=True):
        assert_close(array, jax.vmap(ravel_pytree(eta)[1])(np.stack(expected)), 1e-9)


@pytest.mark.sample(3)
@families
@pytest.mark.compat
def test_eager_compiled_and_half_precision_evaluation_agree(name):
    family, eta, *_ = FAMILIES[name]()
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), eta)
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half)
    # A family may be an argument of a compiled function.
    compiled, computed, expected = jax.jit(lambda f, *etas: [f.to_moments(eta) for eta in etas])(
        family, eta, half, single
    )
    assert_close(family.to_moments(eta), compiled, 1e-12)
    assert {leaf.dtype for leaf in jax.tree.leaves(computed)} == {jnp.dtype("float32")}
    assert_close(computed, expected)


@hypothesis.given(st.lists(st.integers(0, 3), max_size=3), st.integers(1, 4))
@hypothesis.settings(max_examples=4)
@pytest.mark.slow
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
