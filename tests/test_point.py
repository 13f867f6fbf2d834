"""One forward pass serves every metric and statistic at a point."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ravel
from zoo import ZOO, normal

import natgrad as ng

GEOMETRY = ng.Euclidean()
KEY = jax.random.key(7)
FUNCTIONS = {
    "pullback": lambda *at: ng.pullback(*at).as_matrix(),
    "sampled": lambda *at: ng.pullback(*at, key=KEY).diagonal(),
    "diagonal": lambda *at: ng.diagonal(*at).entries,
    "kfac": lambda *at: ng.kfac(*at, key=KEY).diagonal(),
    "ekfac": lambda *at: ng.ekfac(*at, key=KEY, num_samples=2).diagonal(),
    "gram": lambda *at: ng.gram(*at),
    "natural_gradient": lambda *at: ng.natural_gradient(
        *at, gradient=jax.tree.map(jnp.ones_like, (at[0].params if len(at) == 1 else at[2])), damping=0.1
    ),
}


def assert_all_close(trees, others):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), trees, others)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ZOO)
def test_a_point_in_place_of_the_model_gives_the_same(name):
    case = ZOO[name]()
    batch = ng.Batch(case.x, in_axes=case.in_axes)

    @jax.jit
    def both(params):
        point = ng.evaluate(case.model, GEOMETRY, params, batch)
        u = jax.tree.map(lambda z: jnp.cos(jnp.arange(z.size, dtype=z.dtype)).reshape(z.shape), point.z)
        v = jax.tree.map(jnp.ones_like, params)
        z, pull = jax.vjp(lambda w: case.model(w, case.x), params)
        products = point.z, point.push(v), point.pull(u), ng.per_example(point, cotangents=u).squared_sum()
        direct = z, jax.jvp(lambda w: case.model(w, case.x), (params,), (v,))[1], pull(u)[0]
        rows = ng.per_example(case.model, params, batch, u).squared_sum()
        names = [name for name in FUNCTIONS if name != "pullback"]
        at_point = {name: FUNCTIONS[name](point) for name in names}
        at_model = {name: FUNCTIONS[name](case.model, GEOMETRY, params, batch) for name in names}
        return (products, at_point), ((*direct, rows), at_model)

    assert_all_close(*both(case.params))


def mlp(params, x):
    return jnp.tanh(x @ params["w"] + params["b"][None]) @ params["v"]


def mlp_params(seed=0):
    return {"w": normal(seed, 3, 4), "b": normal(seed + 1, 4), "v": normal(seed + 2, 4, 2)}


def test_points_of_equal_shapes_share_what_is_compiled_and_the_model_is_not_run_again():
    traces = []

    def traced(params, x):
        traces.append(None)
        return mlp(params, x)

    points = [ng.evaluate(traced, GEOMETRY, mlp_params(seed), normal(9, 5, 3), check=False) for seed in (0, 10)]
    assert points[0].program is points[1].program
    before = len(traces)
    for point in points:
        jax.block_until_ready([function(point) for function in FUNCTIONS.values()])
    assert len(traces) == before


def test_no_tracer_outlives_a_point_that_closes_over_one():
    @jax.jit
    def length(scale):
        point = ng.evaluate(lambda w, x: scale * mlp(w, x), GEOMETRY, mlp_params(), normal(9, 5, 3))
        return jnp.sum(ravel(ng.diagonal(point).entries))

    with jax.check_tracer_leaks():
        first, second = length(1.0), length(2.0)
    np.testing.assert_allclose(second, 4 * first, rtol=1e-12)


WEIGHED = {
    "pullback": lambda x: ng.pullback(mlp, GEOMETRY, mlp_params(), x).as_matrix(),
    "by_columns": lambda x: ng.pullback(mlp, GEOMETRY, mlp_params(), x)._by_columns(lambda column, index: column),
    "gauss_newton": lambda x: ng.gauss_newton(mlp, lambda z, y: jnp.sum(z**4), mlp_params(), x).as_matrix(),
    "empirical_fisher": lambda x: ng.empirical_fisher(mlp, lambda z, y: jnp.sum(z**4), mlp_params(), x).as_matrix(),
    "diagonal": lambda x: ravel(ng.diagonal(mlp, GEOMETRY, mlp_params(), x).entries),
    "kfac": lambda x: ng.kfac(mlp, GEOMETRY, mlp_params(), x).as_matrix(),
    "ekfac": lambda x: ng.ekfac(mlp, GEOMETRY, mlp_params(), x).as_matrix(),
    "function_distance": lambda x: ng.function_distance(mlp, GEOMETRY, mlp_params(), mlp_params(5), x),
}


@pytest.mark.parametrize("name", WEIGHED)
def test_a_weight_of_two_is_an_example_twice_and_of_zero_none(name):
    x, counts = normal(3, 4, 3), np.array([1, 2, 0, 1])
    weighed = WEIGHED[name](ng.Batch(x, weights=counts))
    repeated = WEIGHED[name](np.repeat(x, counts, axis=0))
    np.testing.assert_allclose(weighed, repeated, rtol=1e-9, atol=1e-12)


def point():
    return ng.evaluate(mlp, GEOMETRY, mlp_params(), normal(9, 5, 3))


REFUSED = {
    "no_gradient": (
        lambda: ng.natural_gradient(point()),
        TypeError,
        "`natural_gradient` needs the `gradient` of a cost",
    ),
    "others": (lambda: ng.kfac(point(), GEOMETRY), TypeError, "`kfac` got a `Point` and more positional arguments"),
    "no_geometry": (
        lambda: ng.gram(ng.evaluate(mlp, None, mlp_params(), normal(9, 5, 3))),
        TypeError,
        "`gram` needs a geometry of the outputs.*but got `NoneType`.*also to `evaluate`",
    ),
    "weights_of_others": (
        lambda: ng.diagonal(mlp, GEOMETRY, mlp_params(), ng.Batch(normal(9, 5, 3), weights=np.ones(4))),
        ValueError,
        r"`diagonal` needs weights for 5 examples, but got weights of shape \(4,\)",
    ),
    "negative_weights": (
        lambda: ng.diagonal(mlp, GEOMETRY, mlp_params(), ng.Batch(normal(9, 5, 3), weights=-np.ones(5))),
        ValueError,
        "`diagonal` needs weights that are finite and not negative",
    ),
    "no_weight": (
        lambda: ng.kfac(mlp, GEOMETRY, mlp_params(), ng.Batch(normal(9, 5, 3), weights=np.zeros(5))),
        ValueError,
        "not all of them zero",
    ),
    "weights_of_positions": (
        lambda: ng.function_distance(
            mlp, GEOMETRY, mlp_params(), mlp_params(5), ng.Batch(normal(9, 5, 3), weights=np.ones((5, 2)))
        ),
        ValueError,
        r"`function_distance` needs one weight for each example.*\(5, 2\)",
    ),
    "axes_in_a_step": (
        lambda: ng.NaturalGradient(mlp, ng.LeastSquares()).init(
            mlp_params(), ng.Batch(normal(9, 5, 3), normal(8, 5, 2), in_axes=1)
        ),
        ValueError,
        r"The batch needs the examples along the leading axis.*`in_axes` are \(1,\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
