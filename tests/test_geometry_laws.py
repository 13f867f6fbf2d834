"""Identities that hold for every geometry of an output."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FAMILIES, GEOMETRIES, assert_close, assert_mean, columns, flat, projection, ravel
from jax.flatten_util import ravel_pytree

import natgrad as ng

DRAWS = 20_000

geometries = pytest.mark.parametrize("name", GEOMETRIES)


@geometries
@pytest.mark.compat
def test_metric_is_the_hessian_of_the_dissimilarity_at_coincidence(name):
    geometry, z, *_ = GEOMETRIES[name]()
    vector, unravel = ravel_pytree(z)

    @jax.jit
    def sides(v):
        here = unravel(v)
        rho = lambda w: geometry.dissimilarity(unravel(w), here)
        return geometry.metric_matrix(here), jax.hessian(rho)(v), jax.grad(rho)(v), rho(v)

    matrix, hessian, gradient, least = sides(vector)
    assert_close(matrix, hessian, 1e-8, 1e-10)
    assert_close(gradient, jnp.zeros_like(vector), atol=1e-10)
    assert abs(least) < 1e-13


@geometries
@pytest.mark.compat
def test_product_matrix_and_factor_agree(name, getkey):
    geometry, z, _, at_most = GEOMETRIES[name]()
    v = jax.random.normal(getkey(), flat(z).shape)
    unravel = ravel_pytree(z)[1]
    parts = jax.jit(lambda z: (geometry.metric_mv(z, unravel(v)), geometry.metric_matrix(z), geometry.factor(z)))
    product, matrix, factor = parts(z)
    S = columns(factor)
    assert_close(S.T @ S, matrix, 1e-9, 1e-11)
    assert_close(flat(product), matrix @ v, 1e-9, 1e-11)
    assert_close(matrix, matrix.T, 1e-9, 1e-12)
    assert np.linalg.eigvalsh(matrix).min() > -1e-12
    assert len(S) <= at_most
    assert jax.tree.structure(factor) == jax.tree.structure(product) == jax.tree.structure(z)


@geometries
def test_samples_have_mean_zero_and_the_metric_for_a_covariance(name, getkey):
    geometry, z, *_ = GEOMETRIES[name]()
    keys = jax.random.split(getkey(), DRAWS)
    draws = np.asarray(jax.jit(jax.vmap(lambda key: ravel(geometry.sample(z, key))))(keys))
    assert_mean(draws, np.zeros(draws.shape[1:]))
    assert_mean(draws[:, :, None] * draws[:, None, :], jax.jit(lambda z: geometry.metric_matrix(z))(z))


@geometries
def test_dissimilarity_is_positive_between_different_outputs(name):
    geometry, z, other, _ = GEOMETRIES[name]()
    there, back = jax.jit(lambda z, w: (geometry.dissimilarity(z, w), geometry.dissimilarity(w, z)))(z, other)
    assert there > 1e-3
    assert back > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_fisher_geometry_is_the_bregman_geometry_of_the_log_partition(name):
    family, eta, other, _ = FAMILIES[name]()

    @jax.jit
    def sides(z, z0):
        fisher, bregman = ng.Fisher(family), ng.Bregman(family.log_partition)
        return [(g.dissimilarity(z, z0), g.metric_matrix(z)) for g in (fisher, bregman)] + [family.kl(z0, z)]

    (rho, matrix), (bregman, hessian), kl = sides(eta, other)
    assert_close(rho, kl)
    assert_close(rho, bregman, 1e-9)
    assert_close(matrix, hessian, 1e-8, 1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_minimal_families_separate_distributions_and_others_along_the_rest(name):
    """Moving in a direction that changes no distribution changes no divergence; any other direction does."""
    case = FAMILIES[name]()
    vector, unravel = ravel_pytree(case.eta)
    size = vector.size
    moves = np.asarray(projection(case))
    step = 0.01 * np.linspace(1.0, 2.0, size)
    distance = jax.jit(lambda step: ng.Fisher(case.family).dissimilarity(unravel(vector + step), case.eta))
    assert distance(jnp.asarray(moves @ step)) > 1e-8
    assert abs(distance(jnp.asarray(step - moves @ step))) < 1e-9


def test_chart_pulls_the_fisher_metric_back():
    """Erratum E30: for a Poisson rate as output the Fisher metric is 1/rate, not the Hessian of the loss."""
    rate = jnp.array([2.0])
    geometry = ng.Fisher(ng.Poisson(), chart=jnp.log)
    assert_close(geometry.metric_matrix(rate), jnp.array([[0.5]]))
    loss = lambda rate, y: -ng.Poisson().log_prob(jnp.log(rate), y)
    hessian = jax.hessian(loss)(rate, jnp.array([5.0]))
    assert_close(hessian, jnp.array([[1.25]]))


def test_categorical_product_needs_no_matrix():
    """No intermediate of the product has K x K entries."""
    K = 50
    z = jnp.zeros(K)
    for family in (ng.Categorical(), ng.MinimalCategorical(), ng.Bernoulli()):
        jaxpr = jax.make_jaxpr(ng.Fisher(family).metric_mv)(z, z)
        sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars]
        assert max(sizes) <= 2 * K


def test_scaling_twice_multiplies_and_heads_add():
    z, z0 = jnp.array([0.3, 1.0]), jnp.array([0.0, -1.0])
    assert_close((2.0 * (3.0 * ng.Euclidean())).dissimilarity(z, z0), 6.0 * ng.Euclidean().dissimilarity(z, z0))
    assert_close((ng.Euclidean() * 2.0).metric_mv(z, z0), 2.0 * z0)
    heads = ng.ProductGeometry((ng.Euclidean(), 4.0 * ng.Euclidean()))
    assert_close(heads.dissimilarity((z, z), (z0, z0)), 5.0 * ng.Euclidean().dissimilarity(z, z0))


shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)


@hypothesis.given(st.recursive(shapes, lambda children: st.lists(children, min_size=1, max_size=3), max_leaves=4))
@hypothesis.settings(max_examples=15)
def test_euclidean_geometry_takes_any_pytree(tree):
    leaf = lambda x: isinstance(x, tuple)
    z = jax.tree.map(lambda shape: jnp.ones(shape), tree, is_leaf=leaf)
    geometry = ng.Euclidean()
    size = flat(z).size
    assert_close(geometry.dissimilarity(z, jax.tree.map(jnp.zeros_like, z)), jnp.asarray(size / 2.0))
    assert_close(geometry.metric_matrix(z), jnp.eye(size))
    assert_close(columns(geometry.factor(z)), np.eye(size))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", ["euclidean_tree", "categoricals", "heads", "bernoullis", "bregman"])
def test_cotangents_have_the_dtype_of_the_output(name, dtype, getkey):
    geometry, z, other, _ = GEOMETRIES[name]()
    z, other = (jax.tree.map(lambda leaf: leaf.astype(dtype), tree) for tree in (z, other))

    @jax.jit
    def everything(z, v, key):
        return geometry.metric_mv(z, v), geometry.sample(z, key), geometry.factor(z), geometry.dissimilarity(z, v)

    product, sample, factor, rho = everything(z, other, getkey())
    assert {leaf.dtype for leaf in jax.tree.leaves((product, sample, factor))} == {jnp.dtype(dtype)}
    assert rho.dtype == jnp.float32
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (z, other))
    digits = float(jnp.finfo(dtype).eps)
    assert_close(
        jax.tree.map(jnp.float32, product), jax.jit(lambda z, v: geometry.metric_mv(z, v))(*wide), 2 * digits, digits
    )


@pytest.mark.float32
@geometries
def test_float32_agrees_with_float64(name):
    geometry, z, other, _ = GEOMETRIES[name]()
    single = jax.jit(lambda z, w: (geometry.metric_matrix(z), geometry.dissimilarity(z, w)))(z, other)
    with jax.enable_x64(True):
        geometry, *_ = GEOMETRIES[name]()
        z, other = (jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), tree) for tree in (z, other))
        double = jax.jit(lambda z, w: (geometry.metric_matrix(z), geometry.dissimilarity(z, w)))(z, other)
    assert_close(single, jax.tree.map(np.asarray, double), 2e-5, 1e-5)
