"""Streams: estimates that equal those of all examples at once, and filters that equal those of the textbooks."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FAMILIES, assert_close, flat
from jax.flatten_util import ravel_pytree
from models import normal

import natgrad as ng

# Maximum likelihood -------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_estimate_of_a_stream_is_that_of_the_batch_after_every_example(name):
    case = FAMILIES[name]()
    online = ng.OnlineMaximumLikelihood(case.family)
    xs = case.family.sample(case.eta, jax.random.key(1), (40,))
    one = lambda k: jax.tree.map(lambda leaf: leaf[k], xs)
    statistics = jax.vmap(case.family.sufficient_statistics)(xs)

    def step(state, x):
        state = online.update(state, x)
        return state, (state.moments, online.is_inside(state))

    start = online.init(one(0))
    last, (moments, inside) = jax.jit(lambda xs: jax.lax.scan(step, start, xs))(xs)
    counts = jnp.arange(1, 41)
    means = lambda leaf: jnp.cumsum(leaf, axis=0) / counts.reshape(-1, *[1] * (leaf.ndim - 1)).astype(leaf.dtype)
    assert_close(moments, jax.tree.map(means, statistics), rtol=1e-12, atol=1e-13)
    assert last.examples == 40 and bool(inside[-1]) and not bool(online.is_inside(start))
    assert_close(online.natural(last), case.family.maximum_likelihood(xs), rtol=1e-7, atol=1e-9)
    # In pieces, and put together from shards.
    halves = [jax.tree.map(lambda leaf, part=part: leaf[part], xs) for part in (slice(0, 13), slice(13, None))]
    states = [online.update_many(start, half) for half in halves]
    for other in (online.update_many(states[0], halves[1]), online.merge(*states), online.update_all(start, halves)):
        assert other.examples == 40
        assert_close(other.moments, last.moments, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rate", [0.2, lambda k: 1 / (k + 1)])
def test_other_rates_are_other_averages(rate):
    xs = normal(1, 30)
    online = ng.OnlineMaximumLikelihood(ng.GaussianMean(1.0), rate)
    state = online.update_many(online.init(xs[0]), xs)
    expected = xs[0]
    for k, x in enumerate(xs[1:], 2):
        expected += (rate if isinstance(rate, float) else rate(k)) * (x - expected)
    np.testing.assert_allclose(state.moments, expected, rtol=1e-12)
    with pytest.raises(ValueError, match="^`OnlineMaximumLikelihood.merge` needs the rate 1/k"):
        online.merge(state, state)


@pytest.mark.float32
def test_single_precision_loses_nothing_to_the_length_of_a_stream():
    """A million examples one by one, each of which changes the moments by less than their rounding."""
    xs = 100 + np.random.default_rng(0).normal(size=1_000_000).astype(np.float32)
    online = ng.OnlineMaximumLikelihood(ng.GaussianMean(1.0))
    run = jax.jit(lambda xs: jax.lax.scan(lambda s, x: (online.update(s, x), None), online.init(xs[0]), xs)[0])
    state = run(jnp.asarray(xs))
    assert state.moments.dtype == jnp.float32
    np.testing.assert_allclose(float(state.moments), xs.astype(np.float64).mean(), rtol=1e-7)
    naive = jax.jit(lambda xs: jax.lax.scan(lambda s, x: ((s[0] + (x - s[0]) / s[1], s[1] + 1), None), (0.0, 1.0), xs))
    assert abs(float(naive(jnp.asarray(xs))[0][0]) - xs.astype(np.float64).mean()) > 1e-4


@pytest.mark.float32
def test_counts_do_not_wrap_around():
    online = ng.OnlineMaximumLikelihood(ng.GaussianMean(1.0))
    many = ng.OnlineState(jnp.array(2**31 - 2), jnp.array(0.5), jnp.array(0.0))
    state = online.update_many(many, jnp.ones(5))
    assert int(state.examples) == 2**31 - 1
    np.testing.assert_allclose(state.moments, 0.5, rtol=1e-6)


# Filters ------------------------------------------------------------------------------------------------


def network(params, x):
    hidden = jnp.tanh(x @ params["first"])
    return hidden @ params["second"]


def problem(outputs: int = 2):
    params = {"first": normal(1, 3, 4), "second": normal(2, 4, outputs)}
    return params, normal(3, 25, 3)


def textbook_filter(family, model, params, x, y, prior, forget=1.0, noise=0.0):
    """The extended Kalman filter for observations t(y) with mean xi(w) and covariance R, in its usual form."""
    w, unravel = jax.flatten_util.ravel_pytree(params)

    @jax.jit
    def step(w, P, x, y):
        P = P / forget + noise * jnp.eye(w.size)
        eta = lambda w: model(unravel(w), x[None])[0]
        mean = lambda w: family.to_moments(eta(w))
        H, R = jax.jacobian(mean)(w), family.fisher(eta(w))
        K = jnp.linalg.solve(H @ P @ H.T + R, H @ P).T
        return w + K @ (family.sufficient_statistics(y) - mean(w)), P - K @ H @ P

    P = jnp.eye(w.size) / prior
    for one in zip(x, y, strict=True):
        w, P = step(w, P, *one)
    return w, P


def streamed(opt, params, x, y):
    """The parameters and the state after every example of a stream, in one program."""
    step = lambda carry, batch: (opt.step(*carry, jax.tree.map(lambda leaf: leaf[None], batch))[:2], None)
    return jax.jit(lambda start: jax.lax.scan(step, start, (x, y)))((params, opt.init(params)))[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("forget", "noise"), [(1.0, 0.0), (0.9, 0.0), (1.0, 0.05)])
@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson", "categorical"])
def test_online_natural_gradient_is_the_extended_kalman_filter(name, forget, noise):
    family, outputs = {
        "gaussian": (ng.GaussianMean(0.7), 2),
        "bernoulli": (ng.Bernoulli(), 2),
        "poisson": (ng.Poisson(), 1),
        "categorical": (ng.MinimalCategorical(3), 2),
    }[name]
    params, x = problem(outputs)
    y = jax.vmap(family.sample)(network(params, x), jax.random.split(jax.random.key(4), len(x)))
    start = jax.tree.map(lambda leaf: 0.5 * leaf, params)
    opt = ng.OnlineNaturalGradient(network, family, prior_precision=2.0, forget=forget, process_noise=noise)
    after, state = streamed(opt, start, x, y)
    w, P = textbook_filter(family, network, start, x, y, 2.0, forget, noise)
    np.testing.assert_allclose(flat(after), w, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(opt.covariance(state), P, rtol=1e-8, atol=1e-10)
    assert state.examples == 25


def test_linear_gaussian_models_give_the_posterior_and_recursive_least_squares():
    x, w = normal(1, 30, 4), normal(2, 4)
    y = x @ w + normal(3, 30)
    opt = ng.OnlineNaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), prior_precision=0.1)
    after, state = streamed(opt, jnp.zeros(4), x, y)
    precision = x.T @ x + 0.1 * np.eye(4)
    np.testing.assert_allclose(after, np.linalg.solve(precision, x.T @ y), rtol=1e-10)
    np.testing.assert_allclose(opt.covariance(state), np.linalg.inv(precision), rtol=1e-10, atol=1e-12)
    # All at once, or with weights, it is the same.
    together, _, info = opt.step(jnp.zeros(4), opt.init(jnp.zeros(4)), (x, y))
    np.testing.assert_allclose(together, after, rtol=1e-10)
    assert info.accepted and info.loss > 0
    twice, *_ = opt.step(jnp.zeros(4), opt.init(jnp.zeros(4)), (x[:5], y[:5], 2 * jnp.ones(5)))
    doubled, *_ = opt.step(jnp.zeros(4), opt.init(jnp.zeros(4)), (jnp.tile(x[:5], (2, 1)), jnp.tile(y[:5], 2)))
    np.testing.assert_allclose(twice, doubled, rtol=1e-10)
    # Weighted recursive least squares with a fading memory.
    faded, _ = streamed(
        ng.OnlineNaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), prior_precision=0.1, forget=0.8),
        jnp.zeros(4),
        x,
        y,
    )
    weights = 0.8 ** np.arange(30)[None, ::-1]
    matrix = (x.T * weights) @ x + 0.1 * 0.8**30 * np.eye(4)
    np.testing.assert_allclose(faded, np.linalg.solve(matrix, (x.T * weights) @ y), rtol=1e-8)


def test_the_average_of_fisher_matrices_with_rate_one_over_k_is_the_same_filter():
    params, x = problem(1)
    y = jnp.asarray(np.random.default_rng(5).integers(0, 2, (25, 1)), float)
    start = jax.tree.map(lambda leaf: 0.5 * leaf, params)
    opt = ng.OnlineNaturalGradient(network, ng.Bernoulli(), prior_precision=2.0)
    after, state = streamed(opt, start, x, y)
    w, unravel = jax.flatten_util.ravel_pytree(start)
    average = 2.0 * np.eye(w.size)
    fisher = jax.jit(lambda w, x: ng.pullback(network, ng.Fisher(ng.Bernoulli()), unravel(w), x).as_matrix())
    loss = lambda z, y: jnp.sum(jax.nn.softplus(z) - y * z)
    gradient = jax.jit(jax.grad(lambda w, x, y: loss(network(unravel(w), x), y)))
    for k in range(1, 26):
        own = x[k - 1 : k], y[k - 1 : k]
        average += (fisher(w, own[0]) - average) / (k + 1)
        w = w - np.linalg.solve(average, gradient(w, *own)) / (k + 1)
    np.testing.assert_allclose(flat(after), w, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(np.linalg.inv(opt.covariance(state)) / 26, average, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_the_online_natural_gradient_is_efficient_beyond_exponential_families():
    """The location of a Cauchy distribution, of Fisher information 1/2: k times the mean squared error tends to 2."""
    chains, length = 4000, 2000
    y = jnp.asarray(np.random.default_rng(0).standard_cauchy((length, chains)))
    cauchy = ng.Objective(lambda z, y: jnp.log1p((y - z) ** 2), 0.5 * ng.Euclidean())
    opt = ng.OnlineNaturalGradient(lambda w, x: w + 0 * x, cauchy, prior_precision=0.5)
    state = jax.eval_shape(opt.init, jnp.array(0.0))

    def step(carry, y):
        one = lambda w, s, y: opt.step(w, s, (jnp.zeros(1), y[None]))[:2]
        return jax.vmap(one)(*carry, y), None

    start = jnp.asarray(np.random.default_rng(1).normal(size=chains)), jax.vmap(opt.init)(jnp.zeros(chains))
    (w, state), _ = jax.jit(lambda start: jax.lax.scan(step, start, y))(start)
    errors = length * np.asarray(w) ** 2
    assert abs(errors.mean() - 2) < 5 * errors.std() / np.sqrt(chains) + 0.1
    np.testing.assert_allclose(state.precision[:, 0, 0] ** 2, 2 / (length + 1), rtol=1e-8)


def test_other_numbers_compile_nothing_and_are_an_ensemble():
    params, x = problem()
    batch = x, normal(5, len(x), 2)
    traces = []

    @eqx.filter_jit
    def step(opt):
        traces.append(None)
        return ravel_pytree(opt.step(params, opt.init(params), batch)[0])[0]

    def make(prior, forget, noise):
        opt = ng.OnlineNaturalGradient(network, ng.LeastSquares(), prior_precision=0.5, forget=0.9, process_noise=0.1)
        numbers = lambda opt: (opt.prior_precision[""], opt.forget, opt.process_noise)
        return eqx.tree_at(numbers, opt, (prior, forget, noise))

    settings = np.array([[0.5, 0.9, 0.1], [2.0, 0.5, 0.3]])
    alone = [step(make(*map(jnp.asarray, numbers))) for numbers in settings]
    assert len(traces) == 1 and not np.allclose(*alone)
    together = eqx.filter_jit(eqx.filter_vmap(lambda numbers: step(make(*numbers))))(jnp.asarray(settings))
    np.testing.assert_allclose(together, alone, rtol=1e-9)
    # What is changed and what is given are the same.
    given = ng.OnlineNaturalGradient(network, ng.LeastSquares(), prior_precision=2.0, forget=0.5, process_noise=0.3)
    after = jax.jit(given.step)(params, given.init(params), batch)[0]
    np.testing.assert_allclose(ravel_pytree(after)[0], alone[1], rtol=1e-9)


@pytest.mark.slow
def test_diagonals_and_low_rank_are_what_they_say():
    params, x = problem()
    y = normal(5, 25, 2)
    make = functools.partial(ng.OnlineNaturalGradient, network, ng.LeastSquares(), prior_precision=0.5)
    for forget, noise in ((1.0, 0.0), (0.95, 0.02)):
        runs = {}
        for structure in (
            ng.DensePrecision(),
            ng.LowRankPrecision(20),
            ng.LowRankPrecision(3),
            ng.DiagonalPrecision(),
        ):
            opt = make(precision=structure, forget=forget, process_noise=noise)
            after, state = streamed(opt, params, x, y)
            runs[structure] = flat(after), np.asarray(opt.covariance(state))
        (dense, P), (full, P20), (few, P3), (diagonal, P0) = runs.values()
        # Twenty directions are all there are.
        np.testing.assert_allclose(full, dense, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(P20, P, rtol=1e-6, atol=1e-9)
        distance = lambda other, P=P: np.linalg.norm(np.linalg.inv(other) - np.linalg.inv(P))
        assert np.linalg.eigvalsh(P3).min() > 0 and np.count_nonzero(P0 - np.diag(np.diag(P0))) == 0
        if noise == 0:
            assert distance(P3) < distance(P0)


def test_a_low_rank_update_keeps_the_diagonal_of_the_precision():
    structure = ng.LowRankPrecision(2)
    state, rows = structure.init(jnp.full(5, 0.3)), normal(1, 6, 5)
    grown = structure.grown(state, rows)
    precision = np.linalg.inv(structure.covariance(grown))
    np.testing.assert_allclose(np.diag(precision), np.diag(0.3 * np.eye(5) + rows.T @ rows), rtol=1e-10)
    g = normal(2, 5)
    np.testing.assert_allclose(structure.solve(grown, g), np.linalg.solve(precision, g), rtol=1e-9)


@pytest.mark.float32
@pytest.mark.parametrize("structure", [ng.DensePrecision(), ng.LowRankPrecision(20)])
def test_single_precision_does_not_spoil_the_precision_in_silence(structure):
    """A vague prior, whose variances are a million times those in the end."""
    x, w = normal(1, 200, 20), normal(2, 20)
    opt = ng.OnlineNaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), prior_precision=1e-6, precision=structure)
    params, state, step, accepted = jnp.zeros(20), opt.init(jnp.zeros(20)), jax.jit(opt.step), []
    for own in x:
        params, state, info = step(params, state, (own[None], (own @ w)[None]))
        accepted.append(bool(info.accepted))
    error = np.abs(params - w).max()
    if isinstance(structure, ng.DensePrecision):
        assert all(accepted) and error < 1e-2 and np.linalg.eigvalsh(opt.covariance(state)).min() > 0
    assert error < 1e-2 or not all(accepted)


def test_examples_without_weight_teach_nothing():
    params, x = problem()
    opt = ng.OnlineNaturalGradient(network, ng.LeastSquares())
    state = opt.init(params)
    after, same, info = jax.jit(opt.step)(params, state, (x, normal(5, 25, 2), jnp.zeros(25)))
    assert info.accepted and info.divergence == 0
    assert_close((after, same), (params, state))


def test_a_batch_with_nan_is_not_absorbed():
    params, x = problem()
    opt = ng.OnlineNaturalGradient(network, ng.LeastSquares())
    state = opt.init(params)
    after, same, info = jax.jit(opt.step)(params, state, (x.at[1].set(jnp.nan), normal(5, 25, 2)))
    assert not info.accepted and np.isnan(info.divergence) and same.examples == 0
    assert_close(after, params)
    assert_close(same.precision, state.precision)


def test_priors_of_single_parameters():
    params, x = problem()
    opt = ng.OnlineNaturalGradient(network, ng.LeastSquares(), prior_precision={"": 1.0, "params['second']": 4.0})
    np.testing.assert_allclose(np.diag(opt.covariance(opt.init(params))), [1.0] * 12 + [0.25] * 8)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ng.OnlineMaximumLikelihood("poisson"), TypeError, "needs an exponential family"),
        (lambda: ng.OnlineMaximumLikelihood(ng.Poisson(), 1.5), ValueError, "needs a `rate` above 0 and at most 1"),
        (
            lambda: ng.OnlineMaximumLikelihood(ng.Poisson()).update_many(
                ng.OnlineMaximumLikelihood(ng.Poisson()).init(jnp.array(1.0)), jnp.array(1.0)
            ),
            ValueError,
            "needs observations along the leading axis",
        ),
        (
            lambda: ng.OnlineMaximumLikelihood(ng.Poisson()).update(
                ng.OnlineMaximumLikelihood(ng.Poisson()).init(jnp.array(1.0)), jnp.ones(5)
            ),
            ValueError,
            "needs one observation; several go to `update_many`",
        ),
        (
            lambda: ng.OnlineNaturalGradient(network, ng.LeastSquares(), prior_precision=jnp.ones(3)),
            ValueError,
            "one number or a mapping",
        ),
        (
            lambda: ng.OnlineMaximumLikelihood(ng.Poisson()).natural(
                ng.OnlineMaximumLikelihood(ng.Poisson()).init(jnp.array(1.0))
            ),
            ValueError,
            "the average statistic of the stream",
        ),
        (
            lambda: ng.OnlineNaturalGradient(network, ng.LeastSquares(), precision=ng.KFAC()),
            TypeError,
            "DensePrecision",
        ),
        (
            lambda: ng.OnlineNaturalGradient(network, ng.LeastSquares(), prior_precision=0.0),
            ValueError,
            "`prior_precision` above 0",
        ),
        (lambda: ng.OnlineNaturalGradient(network, ng.LeastSquares(), forget=1.1), ValueError, "needs `forget`"),
        (lambda: ng.OnlineNaturalGradient(network, ng.LeastSquares(), process_noise=-1), ValueError, "process_noise"),
        (lambda: ng.LowRankPrecision(0), ValueError, "needs a `rank` of at least 1"),
        (
            lambda: ng.OnlineNaturalGradient(network, ng.LeastSquares(), prior_precision={"params['first']": 1.0}).init(
                problem()[0]
            ),
            ValueError,
            "got no `prior_precision` for",
        ),
    ],
)
def test_bad_input_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
