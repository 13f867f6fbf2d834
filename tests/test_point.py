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


# The callback of this model runs in a thread of its own, where tests have not switched to double precision.
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", sorted(set(ZOO) - {"custom_kernel"}))
def test_a_point_in_place_of_the_model_gives_the_same(name):
    case = ZOO[name]()
    batch = ng.Batch(case.x, in_axes=case.in_axes)

    @jax.jit
    def both(params):
        point = ng.evaluate(case.model, GEOMETRY, params, batch)
        u = jax.tree.map(lambda z: jnp.cos(jnp.arange(z.size, dtype=z.dtype)).reshape(z.shape), point.z)
        v = jax.tree.map(jnp.ones_like, params)
        z, pull = jax.vjp(lambda w: case.model(w, case.x), params)
        along = lambda a, b: ravel(a) @ ravel(b)
        squares = ng.per_example(point, cotangents=u).squared_sum()
        products = point.z, along(point.push(v), u), point.pull(u), squares
        # By the transpose: some models have no forward mode.
        direct = z, along(pull(u)[0], v), pull(u)[0]
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


def centred(params, x):
    z = mlp(params, x)
    return z - jnp.mean(z, axis=0, keepdims=True)


@pytest.mark.parametrize("compile_it", [lambda f: f, jax.jit])
def test_the_metric_of_a_model_that_couples_examples_is_the_metric_of_the_batch(compile_it):
    """Also where the point was made of single examples, and where nothing tests it."""
    params, x = mlp_params(), normal(9, 5, 3)

    def metrics(params):
        point = ng.evaluate(centred, GEOMETRY, params, x, check=False)
        return ng.pullback(point).as_matrix(), ng.pullback(centred, GEOMETRY, params, x, check=False).as_matrix()

    J = jax.vmap(jax.vmap(ravel))(jax.jacobian(centred)(params, x)).reshape(10, -1)
    for matrix in compile_it(metrics)(params):
        np.testing.assert_allclose(matrix, J.T @ J / 5, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["pullback", "diagonal", "kfac"])
def test_accumulated_batches_count_by_their_weights(name):
    x, counts = normal(3, 6, 3), np.array([1.0, 2.0, 0.0, 1.0, 3.0, 1.0])
    function = getattr(ng, name)
    batches = [ng.Batch(x[:2], weights=counts[:2]), ng.Batch(x[2:4], weights=counts[2:4])]
    batches += [ng.Batch(x[4:], weights=counts[4:])]
    # One output and a linear model: factors of inputs are averages too.
    model, params = (lambda w, x: x @ w), normal(1, 3, 1)
    whole = function(model, GEOMETRY, params, ng.Batch(x, weights=counts))
    split = ng.accumulate(lambda batch: function(model, GEOMETRY, params, batch), batches, progress=False)
    np.testing.assert_allclose(split.as_matrix(), whole.as_matrix(), rtol=1e-9, atol=1e-12)


def test_a_point_and_weights_from_outside_are_constants_of_a_compiled_function():
    weights, x = jnp.array([1.0, 0.0, 2.0, 1.0, 1.0]), normal(9, 5, 3)
    outside = ng.evaluate(mlp, ng.Fisher(ng.Categorical()), mlp_params(), x)
    expected = ravel(ng.diagonal(outside).entries)
    np.testing.assert_allclose(jax.jit(lambda: ravel(ng.diagonal(outside).entries))(), expected, rtol=1e-12)
    batch = ng.Batch(x, weights=weights)
    trace = lambda params: ng.pullback(mlp, GEOMETRY, params, batch).trace()
    np.testing.assert_allclose(jax.jit(trace)(mlp_params()), trace(mlp_params()), rtol=1e-12)


def test_outputs_of_weight_zero_may_be_outside_the_domain():
    x = np.array([[-1.0], [1.0], [-2.0]])
    model, geometry = (lambda w, x: x @ w), ng.Fisher(ng.Exponential())
    weighed = ng.diagonal(model, geometry, np.ones((1, 1)), ng.Batch(x, weights=[1.0, 0.0, 1.0]))
    without = ng.diagonal(model, geometry, np.ones((1, 1)), x[[0, 2]])
    np.testing.assert_allclose(weighed.entries, without.entries, rtol=1e-12)


@pytest.mark.float32
def test_weights_of_any_size_count_by_their_ratios():
    x, counts = normal(3, 4, 3).astype(np.float32), np.array([2.0, 1.0, 0.0, 3.0], np.float32)
    params = jax.tree.map(lambda leaf: leaf.astype(np.float32), mlp_params())
    matrices = [
        ng.pullback(mlp, GEOMETRY, params, ng.Batch(x, weights=counts * np.float32(scale))).as_matrix()
        for scale in (1.0, 1e38, 1e-37)
    ]
    np.testing.assert_allclose(matrices[1], matrices[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(matrices[2], matrices[0], rtol=1e-5, atol=1e-6)
    opt = ng.NaturalGradient(mlp, ng.LeastSquares(), ng.Exact(), ng.ConstantDamping(0.1), step=ng.ConstantStep(0.1))
    batches = [(x, x[:, :2], counts * np.float32(scale)) for scale in (1.0, 1e38)]
    states = [opt.init(params, batch) for batch in batches]
    (after, _, info), (same, _, other) = map(jax.jit(opt.step), [params] * 2, states, batches)
    np.testing.assert_allclose(other.loss, info.loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), same, after)


@pytest.mark.parametrize("weight", [-1.0, np.nan])
def test_bad_weights_are_seen_in_a_compiled_metric(weight):
    """Where they cannot be refused, since they are traced."""
    x = normal(3, 4, 3)

    @jax.jit
    def numbers(weights):
        params, batch = mlp_params(), ng.Batch(x, weights=weights)
        distance = ng.function_distance(mlp, GEOMETRY, params, jax.tree.map(jnp.sin, params), batch)
        return jnp.stack([ng.diagonal(mlp, GEOMETRY, params, batch).trace(), distance])

    assert np.all(np.isfinite(numbers(jnp.ones(4))))
    assert np.all(np.isnan(numbers(jnp.array([1.0, weight, 1.0, 1.0]))))
    assert np.all(np.isnan(numbers(jnp.full(4, weight))))


def test_every_term_has_its_own_check():
    x, y = normal(9, 5, 3), normal(8, 5, 2)
    terms = ng.Terms(coupled=ng.Term(centred, ng.LeastSquares()), plain=ng.Term(mlp, ng.LeastSquares(), check=False))
    with pytest.raises(ValueError, match="couples examples"):
        ng.NaturalGradient(terms).init(mlp_params(), {"coupled": (x, y), "plain": (x, y)})


def tagger(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


@pytest.mark.parametrize("structure", [ng.KFAC, ng.EKFAC])
def test_a_step_with_a_mask_does_not_see_padded_positions(structure):
    params = {"w": normal(1, 3, 4), "v": normal(2, 4, 2)}
    mask = np.arange(4)[None] < np.array([4, 2, 3])[:, None]
    y = normal(4, 3, 4, 2)
    opt = ng.NaturalGradient(tagger, ng.LeastSquares(), structure())
    after = []
    for garbage in (0.0, 9.0):
        x = np.where(mask[..., None], normal(3, 3, 4, 3), garbage)
        batch = ng.Batch(x, y, mask.astype(float), mask=mask)
        after.append(ravel(opt.step(params, opt.init(params, batch), batch)[0]))
    np.testing.assert_allclose(after[0], after[1], rtol=1e-9)


def point():
    return ng.evaluate(mlp, GEOMETRY, mlp_params(), normal(9, 5, 3))


def step_with(structure, **options):
    params, x = {"w": normal(1, 3, 4), "v": normal(2, 4, 2)}, normal(3, 3, 4, 3)
    batch = ng.Batch(x, normal(4, 3, 4, 2), mask=np.ones((3, 4)), **options)
    return ng.NaturalGradient(tagger, ng.LeastSquares(), structure).init(params, batch)


WEIGHTED = ng.Batch(np.ones((4, 3)), weights=np.ones(4))
REFUSED = {
    "has_aux": (lambda: ng.kfac(point(), has_aux=True), TypeError, "`kfac` got a `Point` and more arguments"),
    "batch_of_a_batch": (lambda: ng.Batch(ng.Batch(np.ones((4, 3)))), TypeError, "`Batch` needs arrays as `x`"),
    "batch_in_a_pair": (
        lambda: ng.NaturalGradient(mlp, ng.LeastSquares()).init(mlp_params(), (ng.Batch(np.ones((4, 3))), None)),
        TypeError,
        "needs arrays as `x`, but got a `Batch`",
    ),
    "weights_of_classes": (
        lambda: ng.pullback(
            mlp, ng.Fisher(ng.Categorical()), mlp_params(), ng.Batch(np.ones((4, 3)), weights=np.ones((4, 2)))
        ),
        ValueError,
        r"`pullback` needs weights of examples or of positions, but got weights of shape \(4, 2\).*axis of classes",
    ),
    "weights_of_another_shape": (
        lambda: ng.kfac(mlp, GEOMETRY, mlp_params(), ng.Batch(np.ones((4, 3)), weights=np.ones((4, 7)))),
        ValueError,
        r"have shape \(4, 7\), but outputs have \[\(4, 2\)\]",
    ),
    "weights_of_per_example": (
        lambda: ng.per_example(mlp, mlp_params(), WEIGHTED, np.ones((4, 2))),
        ValueError,
        "`per_example` does not take weights here. Cotangents carry",
    ),
    "weights_and_centred": (
        lambda: ng.pullback(mlp, GEOMETRY, mlp_params(), WEIGHTED, centred=True),
        ValueError,
        "`pullback` does not take weights here. `centred=True`",
    ),
    "weights_and_covariance": (
        lambda: ng.gradient_covariance(mlp, lambda z, y: jnp.sum(z), mlp_params(), WEIGHTED),
        ValueError,
        "`gradient_covariance` does not take weights here. The mean gradient",
    ),
    "positions_and_gradients": (
        lambda: ng.empirical_fisher(
            mlp, lambda z, y: jnp.sum(z), mlp_params(), ng.Batch(np.ones((4, 3)), weights=np.ones((4, 2)))
        ),
        ValueError,
        "`empirical_fisher` does not take weights here. The gradient of a loss over positions",
    ),
    "mask_of_a_pullback": (
        lambda: ng.pullback(mlp, GEOMETRY, mlp_params(), ng.Batch(np.ones((4, 3)), mask=np.ones((4, 2)))),
        ValueError,
        "`pullback` got a batch with a `mask`, which only `kfac` and `ekfac` use",
    ),
    "mask_of_a_diagonal": (
        lambda: ng.diagonal(mlp, GEOMETRY, mlp_params(), ng.Batch(np.ones((4, 3)), mask=np.ones((4, 2)))),
        ValueError,
        "`diagonal` got a batch with a `mask`",
    ),
    "mask_of_another_structure": (
        lambda: step_with(ng.Diagonal(), weights=np.ones((3, 4))),
        ValueError,
        "`NaturalGradient.init` got a batch with a `mask`, which only `KFAC` and `EKFAC` use",
    ),
    "mask_without_weights": (
        lambda: step_with(ng.KFAC()),
        ValueError,
        "`NaturalGradient.init` got a batch with a `mask` but without weights",
    ),
    "outside_of_a_distance": (
        lambda: ng.function_distance(
            lambda w, x: x @ w, ng.Fisher(ng.Exponential()), np.ones(1), -np.ones(1), np.array([[-1.0], [1.0]])
        ),
        ValueError,
        "`function_distance`: .*natural parameter `z` of `Exponential` needs negative",
    ),
    "pullback_without_geometry": (
        lambda: ng.pullback(mlp, None, mlp_params(), np.ones((4, 3))),
        TypeError,
        "`pullback` needs a geometry of the outputs",
    ),
    "no_gradient": (
        lambda: ng.natural_gradient(point()),
        TypeError,
        "`natural_gradient` needs the `gradient` of a cost",
    ),
    "others": (lambda: ng.kfac(point(), GEOMETRY), TypeError, "`kfac` got a `Point` and more arguments"),
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
