"""Identities that hold for every geometry of an output."""

import functools
from types import SimpleNamespace

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
fisher_geometries = pytest.mark.parametrize("name", FAMILIES)


@functools.cache
def facts(name) -> SimpleNamespace:
    """What the identities need of one geometry, computed in one compiled function."""
    geometry, z, other, most_columns = GEOMETRIES[name]()
    vector, unravel = ravel_pytree(z)

    @jax.jit
    def compute(v, w, keys):
        here, there = unravel(v), unravel(w)
        rho = lambda u: geometry.dissimilarity(unravel(u), here)
        return dict(
            matrix=geometry.metric_matrix(here),
            product=geometry.metric_mv(here, unravel(jnp.cos(v))),
            factor=geometry.factor(here),
            hessian=jax.hessian(rho)(v),
            gradient=jax.grad(rho)(v),
            least=rho(v),
            there=rho(w),
            back=geometry.dissimilarity(here, there),
            samples=jax.vmap(lambda key: ravel(geometry.sample(here, key)))(keys),
        )

    values = jax.tree.map(np.asarray, compute(vector, ravel(other), jax.random.split(jax.random.key(3), DRAWS)))
    return SimpleNamespace(z=z, direction=np.cos(vector), most_columns=most_columns, **values)


@pytest.mark.sample(3)
@geometries
def test_metric_is_the_hessian_of_the_dissimilarity_at_coincidence(name):
    known = facts(name)
    assert_close(known.matrix, known.hessian, 1e-8, 1e-10)
    assert_close(known.gradient, jnp.zeros_like(known.gradient), atol=1e-10)
    assert abs(known.least) < 1e-13


@pytest.mark.sample(5)
@geometries
def test_product_matrix_and_factor_agree(name):
    known = facts(name)
    S = columns(known.factor)
    assert_close(S.T @ S, known.matrix, 1e-9, 1e-11)
    assert_close(flat(known.product), known.matrix @ known.direction, 1e-9, 1e-11)
    assert_close(known.matrix, known.matrix.T, 1e-9, 1e-12)
    assert np.linalg.eigvalsh(known.matrix).min() > -1e-12
    assert len(S) <= known.most_columns
    assert jax.tree.structure(known.factor) == jax.tree.structure(known.product) == jax.tree.structure(known.z)


@pytest.mark.sample(5)
@geometries
def test_samples_have_mean_zero_and_the_metric_for_a_covariance(name):
    draws = np.asarray(facts(name).samples)
    assert_mean(draws, np.zeros(draws.shape[1:]))
    assert_mean(draws[:, :, None] * draws[:, None, :], facts(name).matrix)


@pytest.mark.sample(5)
@geometries
def test_dissimilarity_is_positive_between_different_outputs(name):
    assert facts(name).there > 1e-3
    assert facts(name).back > 1e-3


@pytest.mark.sample(3)
@fisher_geometries
def test_fisher_geometry_is_the_bregman_geometry_of_the_log_partition(name):
    """And it cannot tell apart parameters of the same distribution, nor confuses any others."""
    case = FAMILIES[name]()
    family = case.family
    vector, unravel = ravel_pytree(case.eta)
    step = 0.01 * np.linspace(1.0, 2.0, vector.size)
    moves = np.asarray(projection(case)) @ step

    @jax.jit
    def sides(v, w):
        fisher, bregman = ng.Fisher(family), ng.Bregman(family.log_partition)
        pairs = [(g.dissimilarity(unravel(v), unravel(w)), g.metric_matrix(unravel(v))) for g in (fisher, bregman)]
        distance = lambda step: fisher.dissimilarity(unravel(v + step), unravel(v))
        return pairs, family.kl(unravel(w), unravel(v)), distance(moves), distance(step - moves)

    ((rho, matrix), (bregman, hessian)), kl, moved, still = sides(vector, ravel(case.other))
    assert_close(rho, kl)
    assert_close(rho, bregman, 1e-9)
    assert_close(matrix, hessian, 1e-8, 1e-10)
    assert moved > 1e-8
    assert abs(still) < 1e-9


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
@hypothesis.settings(max_examples=8)
def test_euclidean_geometry_takes_any_pytree(tree):
    leaf = lambda x: isinstance(x, tuple)
    z = jax.tree.map(np.ones, tree, is_leaf=leaf)
    size = flat(z).size

    @jax.jit
    def everything(z, other):
        geometry = ng.Euclidean()
        return geometry.dissimilarity(z, other), geometry.metric_matrix(z), geometry.factor(z)

    distance, matrix, factor = everything(z, jax.tree.map(np.zeros_like, z))
    assert_close(distance, np.asarray(size / 2.0))
    assert_close(matrix, np.eye(size))
    assert_close(columns(factor), np.eye(size))


@pytest.mark.sample(4)
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
@pytest.mark.compat
@pytest.mark.parametrize("name", ["categoricals", "heads", "softplus_rate", "bregman", "dissimilarity", "scaled"])
def test_float32_agrees_with_float64(name):
    geometry, z, other, _ = GEOMETRIES[name]()
    single = jax.jit(lambda z, w: (geometry.metric_matrix(z), geometry.dissimilarity(z, w)))(z, other)
    with jax.enable_x64(True):
        geometry, *_ = GEOMETRIES[name]()
        z, other = (jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), tree) for tree in (z, other))
        double = jax.jit(lambda z, w: (geometry.metric_matrix(z), geometry.dissimilarity(z, w)))(z, other)
    assert_close(single, jax.tree.map(np.asarray, double), 2e-5, 1e-5)
