"""Identities of metrics: their algebra, their samples, their estimates."""

import functools

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from helpers import assert_close, assert_mean, flat, ravel
from jax.flatten_util import ravel_pytree
from models import MODELS, normal

import natgrad as ng
from natgrad._metric.rescaled import RescaledMetric


def metric_and_matrix(name="dense", **options):
    case = MODELS[name]()
    metric = ng.pullback(jax.jit(case.model), case.geometry, case.params, case.x, **options)
    return case, metric, jax.jit(lambda m: m.as_matrix())(metric)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["dense", "recurrent", "charted"])
def test_samples_have_the_metric_for_a_covariance(name, getkey):
    _, metric, matrix = metric_and_matrix(name)
    draw = jax.jit(jax.vmap(lambda key: ravel(metric.sample(key))))
    draws = np.asarray(draw(jax.random.split(getkey(), 4000)))
    assert_mean(draws, np.zeros(draws.shape[1]))
    assert_mean(draws[:, :, None] * draws[:, None, :], matrix, 6.0)


def test_sampled_fisher_is_unbiased_and_its_error_falls_with_the_root_of_the_samples(getkey):
    case, _, matrix = metric_and_matrix()

    def error(num_samples, key):
        sampled = ng.pullback(case.model, case.geometry, case.params, case.x, key=key, num_samples=num_samples)
        return jnp.linalg.norm(sampled.as_matrix() - matrix)

    sizes = [4, 16, 64, 256]
    errors = [
        np.sqrt(np.mean(np.square(jax.jit(jax.vmap(lambda k, n=n: error(n, k)))(jax.random.split(getkey(), 24)))))
        for n in sizes
    ]
    slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    # 24 repetitions know each error to about 15 %, hence the slope over a factor of 64 to about 0.05.
    assert abs(slope + 0.5) < 0.15


def test_sums_multiples_and_restrictions_are_metrics():
    case, metric, matrix = metric_and_matrix()
    euclidean = ng.pullback(case.model, ng.Euclidean(), case.params, case.x)
    other = jax.jit(lambda m: m.as_matrix())(euclidean)
    chosen = np.array([True] * 4 + [False] * 9 + [True] * 12)  # b and w, not v: flattened as b, v, w
    combined = (metric + 0.5 * euclidean + 0.1 * ng.identity(case.params)) / 2.0
    dense = (matrix + 0.5 * other + 0.1 * np.eye(len(matrix))) / 2
    chosen = np.concatenate([np.full(np.size(v), k != "v") for k, v in sorted(case.params.items())])
    restricted = combined.restrict({"w": True, "b": True, "v": False})

    @jax.jit
    def everything(metric, restricted):
        return metric.as_matrix(), metric.diagonal(), restricted.as_matrix(), restricted.diagonal()

    whole, diagonal, part, part_diagonal = everything(combined, restricted)
    assert_close(whole, jnp.asarray(dense), 1e-10)
    assert_close(flat(diagonal), np.diagonal(dense), 1e-10)
    assert_close(part, jnp.asarray(dense[np.ix_(chosen, chosen)]), 1e-10)
    assert_close(flat(part_diagonal), np.diagonal(dense)[chosen], 1e-10)
    assert part_diagonal["v"] is None
    assert lx.is_positive_semidefinite(restricted)
    assert lx.is_symmetric(combined)
    rows = jax.jit(lambda m: m.root_rows())(restricted)
    assert_close(rows.T @ rows, part, 1e-9, 1e-12)


def products_matrix(metric):
    """The dense matrix, by products alone."""
    flat, unflatten = ravel_pytree(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), metric.in_structure()))
    return jax.vmap(lambda e: ravel_pytree(metric.mv(unflatten(e)))[0])(jnp.eye(flat.size))


def combinations():
    """Metrics made of two, of which one has more rows than there are parameters."""
    case = MODELS["dense"]()
    many = normal(9, 60, *case.x.shape[1:])
    first = ng.pullback(jax.jit(case.model), case.geometry, case.params, case.x)
    second = ng.pullback(jax.jit(lambda params, x: case.model(params, x)[:, :1]), ng.Euclidean(), case.params, many)
    scales = jax.tree.map(lambda leaf: 0.5 + np.abs(np.cos(np.arange(leaf.size))).reshape(leaf.shape), case.params)
    total = first + 0.3 * second
    return {
        "many": second,
        "multiple": 0.3 * second,
        "sum": total,
        "units": RescaledMetric(total, scales),
        "restriction": total.restrict({"w": True, "b": False, "v": True}),
        "condition": total.restrict(lambda leaf: leaf.ndim == 2),
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["many", "multiple", "sum", "units", "restriction", "condition"])
@pytest.mark.parametrize("limit", [None, 100])
def test_matrices_rows_and_kernels_of_combinations_agree_with_products(name, limit, monkeypatch):
    """Also where rows are too many to be held at once."""
    if limit is not None:
        monkeypatch.setattr("natgrad._metric.base.MAX_ROW_ENTRIES", limit)
        monkeypatch.setattr("natgrad._metric.pullback.MAX_ROW_ENTRIES", limit)
    metric = combinations()[name]

    @jax.jit
    def everything(metric):
        return products_matrix(metric), metric.as_matrix(), metric.root_rows(), metric.root_gram(), metric.diagonal()

    matrix, whole, rows, gram, diagonal = jax.tree.map(np.asarray, everything(metric))
    assert rows.shape == (metric.root_size, metric.in_size())
    assert_close(whole, matrix, rtol=1e-10, atol=1e-12)
    assert_close(rows.T @ rows, matrix, rtol=1e-10, atol=1e-12)
    assert_close(gram, rows @ rows.T, rtol=1e-10, atol=1e-12)
    assert_close(flat(diagonal), np.diagonal(matrix), rtol=1e-10, atol=1e-12)


def test_samples_of_combinations(getkey):
    case, metric, matrix = metric_and_matrix()
    combined = (2.0 * metric + ng.identity(case.params)).restrict({"w": True, "b": False, "v": False})
    expected = (2.0 * matrix + np.eye(len(matrix)))[-12:, -12:]
    draws = np.asarray(jax.jit(jax.vmap(lambda k: ravel(combined.sample(k))))(jax.random.split(getkey(), 4000)))
    assert_mean(draws[:, :, None] * draws[:, None, :], expected, 6.0)


def test_stochastic_diagonal_and_trace_know_their_error(getkey):
    _, metric, matrix = metric_and_matrix()
    diagonal = jax.jit(lambda k: ng.diagonal_estimate(metric, k, num_samples=400))(getkey())
    off = np.abs(flat(diagonal.value) - np.diagonal(matrix)) / flat(diagonal.standard_error)
    assert off.max() < 5
    assert off.mean() > 0.3  # an error bar that is far too wide would pass the line above
    trace = jax.jit(lambda k: ng.trace_estimate(metric, k, num_samples=400))(getkey())
    assert abs(trace.value - np.trace(matrix)) < 5 * trace.standard_error
    assert trace.standard_error < 0.2 * np.trace(matrix)


@pytest.mark.slow
def test_accumulation_over_batches_is_the_metric_of_all_data(getkey):
    case, metric, matrix = metric_and_matrix()
    build = lambda x: ng.pullback(case.model, case.geometry, case.params, x)
    batches = [case.x[:2], case.x[2:4], case.x[4:]]
    loader = ng.accumulate(build, batches, progress=False)
    assert_close(loader.as_matrix(), matrix, 1e-10)
    assert_close(flat(loader.diagonal()), np.diagonal(matrix), 1e-10)
    assert_close(flat(loader.mv(case.params)), matrix @ flat(case.params), 1e-9)
    covector = jax.tree.map(jnp.ones_like, case.params)
    solution = ng.solve(loader, covector, damping=0.1, solver=ng.CG(rtol=1e-10))
    expected = np.linalg.solve(matrix + 0.1 * np.eye(len(matrix)), flat(covector))
    assert solution.result == ng.RESULTS.successful
    assert_close(flat(solution.value), expected, 1e-8)
    draws = np.stack([flat(loader.sample(key)) for key in jax.random.split(getkey(), 200)])
    assert_mean(draws[:, :, None] * draws[:, None, :], matrix, 6.0)
    damped = loader + 0.1 * ng.identity(case.params)
    assert_close(flat(damped.mv(covector)), (matrix + 0.1 * np.eye(len(matrix))) @ flat(covector), 1e-9)


@pytest.mark.compat
@pytest.mark.parametrize("solver", ["cg", "cholesky"])
def test_lineax_solves_with_metrics(solver):
    case, metric, matrix = metric_and_matrix()
    damped = metric + 0.1 * ng.identity(case.params)
    covector = jax.tree.map(jnp.ones_like, case.params)
    how = {"cg": lx.CG(1e-11, 1e-11), "cholesky": lx.Cholesky()}[solver]
    expected = np.linalg.solve(matrix + 0.1 * np.eye(len(matrix)), flat(covector))
    solution = jax.jit(lambda m, c: lx.linear_solve(m, c, how).value)(damped, covector)
    assert_close(flat(solution), expected, 1e-8)


@pytest.mark.compat
def test_solves_differentiate_and_map(getkey):
    """A derivative through lineax agrees with finite differences, and a mapped solve with single ones."""
    case = MODELS["dense"]()
    covector = jax.tree.map(jnp.ones_like, case.params)

    def answer(scale):
        params = jax.tree.map(lambda leaf: scale * leaf, case.params)
        metric = ng.pullback(case.model, case.geometry, params, case.x, check=False) + 0.1 * ng.identity(params)
        value = lx.linear_solve(metric, covector, lx.CG(1e-12, 1e-12)).value
        return jnp.vdot(ravel(value), ravel(covector))

    points = jnp.array([0.7, 1.0])
    mapped = jax.jit(jax.vmap(answer))(points)
    single = jax.jit(answer)
    assert_close(mapped, jnp.stack([single(p) for p in points]), 1e-8)
    slope, tangent = jax.jit(lambda p: (jax.grad(answer)(p), jax.jvp(answer, (p,), (jnp.ones_like(p),))[1]))(points[1])
    difference = (single(points[1] + 1e-5) - single(points[1] - 1e-5)) / 2e-5
    assert_close(slope, difference, 1e-6)
    assert_close(tangent, difference, 1e-6)


def test_model_is_linearised_once():
    """Repeated products trace the model's nonlinearity once, when the metric is made."""
    calls = []

    def model(params, x):
        calls.append(None)
        return jnp.tanh(x @ params)

    metric = ng.pullback(model, ng.Euclidean(), normal(1, 3, 2), normal(2, 5, 3), check=False)
    before = len(calls)
    products = [metric.mv(normal(seed, 3, 2)) for seed in range(3)]
    assert len(calls) == before
    assert "tanh" not in str(jax.make_jaxpr(metric.mv)(products[0]))


def test_empirical_fisher_points_elsewhere_than_the_fisher():
    """Far from a good fit the two directions differ by tens of degrees."""
    case = MODELS["dense"]()

    @jax.jit
    def directions(params):
        gradient = jax.grad(lambda p: jnp.mean(jax.vmap(case.loss)(case.model(p, case.x), case.y)))(params)
        fisher = ng.pullback(case.model, case.geometry, params, case.x)
        empirical = ng.empirical_fisher(case.model, case.loss, params, case.x, case.y)
        return [ng.solve(m, gradient, damping=1e-4, solver=ng.Cholesky()).value for m in (fisher, empirical)]

    one, two = map(flat, directions(case.params))
    cosine = one @ two / np.linalg.norm(one) / np.linalg.norm(two)
    assert cosine < 0.9
    assert "not the Fisher" in ng.empirical_fisher.__doc__


def test_product_costs_about_a_gradient():
    """By XLA's own count: no more than 1.3 gradients on a wide network, whatever the clock says."""
    sizes = (64, 128, 128, 10)
    params = [normal(i, a, b) for i, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False))]
    x = normal(9, 128, 64)

    def model(params, x):
        for w in params[:-1]:
            x = jax.nn.relu(x @ w)
        return x @ params[-1]

    metric = ng.pullback(model, ng.Fisher(ng.Categorical()), params, x)
    cotangent = jnp.ones((128, 10))
    flops = lambda f, *a: jax.jit(f).lower(*a).compile().cost_analysis()["flops"]
    gradient = flops(lambda p: jax.vjp(lambda p: model(p, x), p)[1](cotangent)[0], params)
    product = flops(lambda m, v: m.mv(v), metric, params)
    assert product / gradient < 1.3


WITH_AUX = {
    "pullback": lambda model, case, **options: ng.pullback(
        model, case.geometry, case.params, case.x, **options
    ).trace(),
    "gauss_newton": lambda model, case, **options: ng.gauss_newton(
        model, case.loss, case.params, case.x, case.y, **options
    ).trace(),
    "empirical_fisher": lambda model, case, **options: ng.empirical_fisher(
        model, case.loss, case.params, case.x, case.y, **options
    ).trace(),
    "gradient_covariance": lambda model, case, **options: ng.gradient_covariance(
        model, case.loss, case.params, case.x, case.y, **options
    ).trace(),
    "diagonal": lambda model, case, **options: (
        ng.diagonal(model, case.geometry, case.params, case.x, **options).entries
    ),
    "kfac": lambda model, case, **options: ng.kfac(model, case.geometry, case.params, case.x, **options).trace(),
    "ekfac": lambda model, case, **options: ng.ekfac(model, case.geometry, case.params, case.x, **options).trace(),
    "gram": lambda model, case, **options: ng.gram(model, case.geometry, case.params, case.x, **options),
    "per_example": lambda model, case, **options: ng.per_example(
        model, case.params, case.x, jnp.cos, **options
    ).squared_sum(),
    "natural_gradient": lambda model, case, **options: ng.natural_gradient(
        model, case.geometry, case.params, case.x, case.params, damping=0.1, **options
    ),
    "function_distance": lambda model, case, **options: ng.function_distance(
        model, case.geometry, case.params, jax.tree.map(lambda leaf: 1.1 * leaf, case.params), case.x, **options
    ),
    "FunctionSpace": lambda model, case, **options: (
        ng.FunctionSpace(model, case.geometry, case.x, **options).metric(case.params).trace()
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", WITH_AUX)
def test_auxiliary_outputs_do_not_count(name):
    case = MODELS["dense"]()
    with_aux = lambda params, x: (case.model(params, x), {"length": jnp.sum(x**2), "params": params["w"]})
    compute = WITH_AUX[name]

    @functools.partial(jax.jit, static_argnames="has_aux")
    def found(params, has_aux):
        of_params = case._replace(params=params)
        return compute(with_aux, of_params, has_aux=True) if has_aux else compute(case.model, of_params)

    assert_close(found(case.params, has_aux=True), found(case.params, has_aux=False))
    with pytest.raises(TypeError, match="`has_aux=True` needs a model that returns a pair"):
        compute(case.model, case, has_aux=True)
