"""Diagonals, sample-space matrices and running averages: their laws, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import flat_rows, gradients
from helpers import assert_close, assert_mean, flat, ravel
from models import MODELS, normal
from zoo import ZooCase

import natgrad as ng
from natgrad._solve.direct import Elementwise


def root(case):
    """Rows of the root by brute force, columns of the factor in front: (C, N, P)."""

    @jax.jit
    def rows(params, x):
        columns = jax.vmap(case.geometry.factor, out_axes=1)(case.model(params, x))
        return gradients(ZooCase(case.model, params, x), columns)

    found = rows(case.params, case.x)
    return flat_rows(found, 2).reshape(*jax.tree.leaves(found)[0].shape[:2], -1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_exact_diagonal_and_gram_equal_brute_force(name):
    case = MODELS[name]()
    R = root(case)
    count = R.shape[1]

    @jax.jit
    def found(params, x):
        D = ng.diagonal(case.model, case.geometry, params, x, standard_error=True)
        # One column at a time.
        lean = ng.diagonal(ng.evaluate(case.model, case.geometry, params, x, budget=1))
        metric = ng.pullback(case.model, case.geometry, params, x)
        return D, lean, ng.gram(case.model, case.geometry, params, x), metric.diagonal(), metric.root_gram()

    D, lean, gram, of_pullback, root_gram = found(case.params, case.x)
    diagonal = np.sum(R**2, axis=(0, 1)) / count
    for entries in (D.entries, lean.entries, of_pullback):
        np.testing.assert_allclose(flat(entries), diagonal, rtol=1e-10, atol=1e-14)
    assert not np.any(flat(D.standard_error))
    np.testing.assert_allclose(gram, np.einsum("cnp,dmp->cndm", R, R), rtol=1e-10, atol=1e-12)
    rows = R.reshape(-1, R.shape[-1]) / np.sqrt(count)
    np.testing.assert_allclose(root_gram, rows @ rows.T, rtol=1e-10, atol=1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["dense", "recurrent", "charted"])
def test_sampled_diagonal_is_unbiased_and_knows_its_error(name):
    """Over many keys the mean is the exact diagonal; the stated error covers the spread that is seen."""
    case = MODELS[name]()
    exact = flat(jax.jit(lambda p: ng.diagonal(case.model, case.geometry, p, case.x).entries)(case.params))

    def draw(key):
        D = ng.diagonal(case.model, case.geometry, case.params, case.x, key=key, num_samples=8, standard_error=True)
        return ravel(D.entries), ravel(D.standard_error)

    draws, errors = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(1), 400))
    assert_mean(draws, exact)
    # The spread between examples is counted too, so the stated error is not smaller, up to the noise of 400 draws.
    spread, stated = np.std(draws, axis=0), np.sqrt(np.mean(errors**2, axis=0))
    assert np.all(stated > 0.8 * spread)
    assert np.median(stated / spread) < 2.0


def test_standard_error_of_gaussian_draws():
    """With examples alike and gradients normal, the error of a mean of squares is known: d sqrt(2 / M)."""
    model = lambda params, x: params["w"][None, :] + 0.0 * x
    params, x = {"w": jnp.array([1.0, 2.0])}, jnp.zeros((50, 2))
    options = dict(num_samples=40, standard_error=True)
    D = jax.jit(lambda p, key: ng.diagonal(model, 4.0 * ng.Euclidean(), p, x, key=key, **options))(
        params, jax.random.key(0)
    )
    np.testing.assert_allclose(D.standard_error["w"], 4.0 * np.sqrt(2 / 2000), rtol=0.1)


def test_a_diagonal_metric_is_a_metric(getkey):
    case = MODELS["dense"]()
    D = jax.jit(lambda p: ng.diagonal(case.model, case.geometry, p, case.x))(case.params)
    d = flat(D.entries)
    v = jax.tree.map(lambda p: np.cos(3 * p), case.params)

    @jax.jit
    def everything(D, v, key):
        draws = jax.vmap(lambda key: ravel(D.sample(key)))(jax.random.split(key, 4000))
        return D.mv(v), D.as_matrix(), D.root_gram(), draws

    product, matrix, gram, draws = everything(D, v, getkey())
    np.testing.assert_allclose(flat(product), d * flat(v), rtol=1e-12)
    np.testing.assert_allclose(matrix, np.diag(d), rtol=1e-12)
    np.testing.assert_allclose(gram, np.diag(d), rtol=1e-12, atol=1e-15)
    assert_mean(np.square(draws), d)


def test_solving_with_a_diagonal_is_one_division():
    D = ng.DiagonalMetric({"a": jnp.array([2.0, 0.0]), "b": jnp.array(0.5)})
    g = {"a": jnp.array([1.0, 0.0]), "b": jnp.array(3.0)}
    damped = ng.solve(D, g, damping=0.5)
    assert damped.solver.startswith("Elementwise")
    assert_close(damped.value, {"a": jnp.array([0.4, 0.0]), "b": jnp.array(3.0)})
    undamped = ng.solve(D, g)
    assert undamped.result == ng.RESULTS.successful
    assert_close(undamped.value, {"a": jnp.array([0.5, 0.0]), "b": jnp.array(6.0)})
    outside = ng.solve(D, {"a": jnp.array([1.0, 1.0]), "b": jnp.array(3.0)})
    assert_close(outside.value, undamped.value)
    assert_close(outside.stats["residual"], jnp.array(11**-0.5))


def test_sums_multiples_and_restrictions_of_diagonals_are_diagonal():
    D = ng.DiagonalMetric({"a": jnp.array([2.0, 0.0]), "b": jnp.array(0.5)})
    metric = (0.5 * D + 2.0 * ng.identity(D.entries)).restrict({"a": True, "b": False})
    solution = ng.solve(metric, {"a": jnp.array([3.0, 4.0]), "b": None})
    assert solution.solver.startswith("Elementwise")
    assert_close(solution.value, {"a": jnp.array([1.0, 2.0]), "b": None})


def test_diagonals_of_batches_add_up_to_that_of_all():
    case = MODELS["dense"]()
    build = jax.jit(lambda batch: ng.diagonal(case.model, case.geometry, case.params, batch))
    batches = [case.x[:3], case.x[3:]]
    accumulated = ng.accumulate(build, batches, progress=False)
    assert isinstance(accumulated, ng.DiagonalMetric)
    assert accumulated.num_examples == 5
    assert_close(accumulated.entries, build(case.x).entries)


def test_errors_of_batches_add_like_variances():
    case = MODELS["dense"]()

    @jax.jit
    def build(batch):
        x, key = batch
        return ng.diagonal(case.model, case.geometry, case.params, x, key=key, num_samples=2, standard_error=True)

    batches = [(case.x, jax.random.key(0)), (case.x, jax.random.key(1))]
    parts = [build(batch).standard_error for batch in batches]
    expected = jax.tree.map(lambda a, b: np.hypot(a, b) / 2, *parts)
    assert_close(ng.accumulate(build, batches, progress=False).standard_error, expected)


@pytest.mark.parametrize("decay", [0.5, 0.95, 1.0])
def test_running_averages_are_unbiased_from_the_first_step(decay):
    average = ng.RunningAverage(decay)
    estimates = [{"d": jnp.array([1.0, 2.0])}, {"d": jnp.array([3.0, -1.0])}, {"d": jnp.array([0.5, 4.0])}]
    state, seen = average.init(estimates[0]), []
    update, value = jax.jit(average.update), jax.jit(average.value)
    for estimate in estimates:
        state = update(state, estimate)
        seen.append(np.asarray(estimate["d"]))
        weights = decay ** np.arange(len(seen))[::-1]
        np.testing.assert_allclose(value(state)["d"], np.average(seen, axis=0, weights=weights), rtol=1e-12)


def test_running_average_of_a_metric_is_a_metric():
    D = ng.DiagonalMetric({"a": jnp.array([2.0, 4.0])})
    average = ng.RunningAverage()
    state = average.update(average.update(average.init(D), D), D)
    assert_close(average.value(state).mv({"a": jnp.ones(2)}), {"a": jnp.array([2.0, 4.0])})


def test_running_averages_are_in_single_precision_at_least():
    """Added up in half precision, a thousand ones would stop at 256."""
    average = ng.RunningAverage(1.0)
    one = jnp.ones(2, jnp.bfloat16)
    state, _ = jax.lax.scan(lambda s, _: (average.update(s, one), None), average.init(one), None, length=1000)
    assert state.total.dtype == jnp.float32
    np.testing.assert_array_equal(state.total, 1000.0)


def test_refusals():
    case = MODELS["dense"]()
    build = lambda **options: ng.diagonal(case.model, case.geometry, case.params, case.x, **options)
    with pytest.raises(ValueError, match="`num_samples` to be a whole number of at least 1, but got 0"):
        build(key=jax.random.key(0), num_samples=0)
    with pytest.raises(ValueError, match="`gram` needs `num_samples` to be a whole number of at least 1"):
        ng.gram(case.model, case.geometry, case.params, case.x, key=jax.random.key(0), num_samples=0)
    with pytest.raises(ValueError, match="two pseudo-gradients for a standard error"):
        ng.diagonal(case.model, case.geometry, case.params, case.x[:1], key=jax.random.key(0), standard_error=True)
    with pytest.raises(ValueError, match="`decay` above 0 and at most 1, but got 0"):
        ng.RunningAverage(0.0)
    with pytest.raises(ValueError, match="an average of nothing has no value"):
        average = ng.RunningAverage()
        average.value(average.init(case.params))
    with pytest.raises(TypeError, match="`Elementwise` needs a diagonal metric, but got `PullbackMetric`"):
        metric = ng.pullback(case.model, case.geometry, case.params, case.x)
        ng.solve(metric, case.params, damping=1.0, solver=Elementwise())
    with pytest.raises(ValueError, match="`DiagonalMetric` needs entries of at least 0"):
        ng.DiagonalMetric({"w": np.array([1.0, -2.0])})
    with pytest.raises(ValueError, match="needs a tree like the one given to `init`.*Start another average"):
        average = ng.RunningAverage()
        average.update(average.init(ng.DiagonalMetric(case.params["b"] ** 2)), ng.identity(case.params))


def test_sampled_gram_estimates_the_metric():
    """Rows of the root are sampled; their mean square is the trace of the metric."""
    case = MODELS["dense"]()
    gram = jax.jit(lambda p: ng.pullback(case.model, case.geometry, p, case.x).root_gram())(case.params)
    draw = lambda key: ng.gram(case.model, case.geometry, case.params, case.x, key=key, num_samples=2)
    grams = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(3), 200))
    assert grams.shape == (200, 2, 5, 2, 5)
    assert_mean(np.einsum("kcncn->k", grams) / 5, np.trace(gram))


def test_a_shared_input_is_not_batched():
    """`in_axes` reaches the diagonal and the kernel."""
    model = lambda params, x: x[0] @ x[1] @ params["w"]
    params, x = {"w": normal(1, 3, 2)}, (normal(2, 4, 5), normal(3, 5, 3))

    @jax.jit
    def statistics(params, x):
        batch = ng.Batch(x, in_axes=(0, None))
        return [function(model, ng.Euclidean(), params, batch) for function in (ng.diagonal, ng.gram)]

    D, kernel = statistics(params, x)
    inputs = np.asarray(x[0]) @ np.asarray(x[1])
    np.testing.assert_allclose(D.entries["w"], np.tile(np.mean(inputs**2, axis=0)[:, None], (1, 2)), rtol=1e-12)
    np.testing.assert_allclose(kernel, np.einsum("cd,nm->cndm", np.eye(2), inputs @ inputs.T), rtol=1e-12, atol=1e-14)
