"""Corrections to the literature, as statements that hold, next to the printed ones where they fail.

The numbers are those of the errata page. Elsewhere are E15 (test_metric_dense.py), E22 (test_invariance.py), E28
(test_benchmarks.py) and E30 (test_geometry_laws.py).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, spd

import natgrad as ng


def rosenbrock(x):
    return jnp.stack([1 - x[0], 10 * (x[1] - x[0] ** 2)])


def natural_steps(rate: float, count: int) -> jax.Array:
    """Points of natural gradient descent on Rosenbrock's function, the start included."""
    start = jnp.array([-1.2, 1.0])

    def step(x, _):
        gradient = jax.grad(lambda x: jnp.sum(rosenbrock(x) ** 2))(x)
        return x - rate * ng.natural_gradient(rosenbrock, ng.Euclidean(), x, None, gradient), x

    return jax.jit(lambda: jax.lax.scan(step, start, length=count + 1)[1])()


def test_e1_partition_function_of_a_gaussian_grows_with_its_parameter():
    variance, eta = 0.7, 1.3
    x = np.linspace(-12.0, 12.0, 4001)
    integral = np.trapezoid(np.exp(-(x**2) / (2 * variance) + eta * x), x)
    scale, exponent = np.sqrt(2 * np.pi * variance), variance * eta**2 / 2
    assert_close(integral, scale * np.exp(exponent))
    assert abs(integral / (scale * np.exp(-exponent)) - 1) > 1
    # In the library the density of N(0, Sigma) is the base measure, which leaves the exponent.
    assert_close(ng.GaussianMean(variance).log_partition(eta), jnp.array(exponent))


def test_e2_gradient_of_the_log_likelihood_has_a_factor_of_the_number_of_observations():
    family, eta, xs = ng.Poisson(), jnp.array(0.3), jnp.array([2.0, 0.0, 1.0, 5.0])

    @jax.jit
    def sides(eta):
        total = lambda eta: jnp.sum(jax.vmap(lambda x: family.log_prob(eta, x))(xs))
        return jax.grad(total)(eta), jnp.mean(xs) - family.to_moments(eta)

    gradient, gap = sides(eta)
    assert_close(gradient, len(xs) * gap)
    assert abs(gradient - gap) > 1


def test_e4_a_step_of_one_half_on_the_outputs_reaches_the_minimum():
    z = rosenbrock(jnp.array([-1.2, 1.0]))
    gradient = jax.grad(lambda z: jnp.sum(z**2))(z)
    assert_close(z - gradient / 2, jnp.zeros(2))
    assert_close(z - gradient, -z)


def test_e5_rate_one_half_converges_in_two_steps_and_rate_one_cycles():
    assert_close(natural_steps(0.5, 2)[-1], jnp.ones(2), 1e-12)
    points = natural_steps(1.0, 6)
    assert_close(points[2], points[0])
    assert_close(points[6], points[0])
    assert jnp.sum(rosenbrock(points[1]) ** 2) > 1


def test_e5_the_pulled_back_metric_is_half_the_gauss_newton_matrix():
    @jax.jit
    def sides(x):
        J, z = jax.jacobian(rosenbrock)(x), rosenbrock(x)
        loss_hessian = jax.hessian(lambda z: jnp.sum(z**2))(z)
        return 2 * J.T @ ng.Euclidean().metric_matrix(z) @ J, J.T @ loss_hessian @ J

    assert_close(*sides(jnp.array([-1.2, 1.0])))


def test_e6_the_step_that_absorbs_example_k_has_size_one_over_k():
    family, labels = ng.Categorical(3), jnp.array([0, 2, 1, 1, 0, 2, 2])
    statistics = family.sufficient_statistics(labels)

    def online(size):
        def absorb(xi, step):
            k, t = step
            xi = xi + size(k) * (t - xi)
            return xi, xi

        counts = jnp.arange(1, len(statistics), dtype=statistics.dtype)
        return jax.lax.scan(absorb, statistics[0], (counts, statistics[1:]))[1]

    right, printed = jax.jit(lambda: (online(lambda k: 1 / (k + 1)), online(lambda k: 1 / k)))()
    running = jnp.cumsum(statistics, axis=0) / jnp.arange(1.0, len(labels) + 1)[:, None]
    assert_close(right, running[1:])
    assert_close(family.to_natural(right[-1]), family.maximum_likelihood(labels))
    assert_close(printed[0], statistics[1])


def test_e7_the_partition_function_sees_the_symmetric_part_of_the_precision():
    family = ng.GaussianPrecision(2)
    precision = spd([1.0, 0.2], [0.0, 0.5])
    turn = jnp.array([[0.0, 1.0], [-1.0, 0.0]])

    @jax.jit
    def curvatures(precision):
        along = lambda function: jax.hessian(lambda s: function(precision + s * turn))(0.0)
        printed = along(lambda L: -jnp.linalg.slogdet(L)[1] / 2)
        return along(family.log_partition), printed, family.fisher(precision)

    library, printed, fisher = curvatures(precision)
    assert printed < -0.05
    assert_close(library, 0.0)
    assert_close(fisher @ turn.ravel(), jnp.zeros(4))
    assert np.linalg.eigvalsh(fisher).min() > -1e-12


def test_e8_upper_triangles_need_doubled_off_diagonal_entries():
    family = ng.GaussianPrecision(2)
    precision, x = spd([1.0, 0.2], [0.0, 0.5]), jnp.array([0.7, -1.1])
    t = family.sufficient_statistics(x)
    exponent = family.log_prob(precision, x) + family.log_partition(precision)
    upper = np.triu_indices(2)
    twice = jnp.array([1.0, 2.0, 1.0])
    assert_close(jnp.sum(twice * precision[upper] * t[upper]), exponent)
    assert abs(jnp.sum(precision[upper] * t[upper]) - exponent) > 0.01


def test_e10_differences_of_logits_are_log_odds():
    p = jnp.array([0.2, 0.5, 0.3])
    logits = ng.Categorical().to_natural(p)
    assert_close(logits, jnp.log(p))
    assert_close(ng.MinimalCategorical().to_natural(p[:-1]), logits[:-1] - logits[-1])


def test_e11_the_fisher_matrix_has_an_inverse_only_for_minimal_families():
    logits = jnp.array([0.5, -1.0, 2.0])

    @jax.jit
    def slopes_times_fisher(logits):
        return [
            jax.jacobian(family.to_natural)(family.to_moments(eta)) @ family.fisher(eta)
            for family, eta in ((ng.Categorical(), logits), (ng.MinimalCategorical(), logits[:-1]))
        ]

    redundant, minimal = slopes_times_fisher(logits)
    assert_close(minimal, jnp.eye(2))
    assert_close(redundant @ jnp.ones(3), jnp.zeros(3))
    assert np.linalg.matrix_rank(redundant) == 2
    # On differences between logits, which are all that matters, the statement holds.
    centre = jnp.eye(3) - 1 / 3
    assert_close(centre @ redundant, centre)


def test_e13_the_bregman_divergence_of_the_log_partition_reverses_the_order():
    family, eta1, eta2 = ng.Poisson(), jnp.array(0.7), jnp.array(-0.4)

    @jax.jit
    def sides(eta1, eta2):
        natural = ng.Bregman(family.log_partition)
        dual = ng.Bregman(family.dual).dissimilarity(family.to_moments(eta1), family.to_moments(eta2))
        return family.kl(eta1, eta2), natural.dissimilarity(eta2, eta1), natural.dissimilarity(eta1, eta2), dual

    kl, reversed_order, printed, dual = sides(eta1, eta2)
    assert_close(reversed_order, kl)
    assert_close(dual, kl)
    assert abs(printed - kl) > 0.1


def test_e21_only_one_direction_of_the_divergence_is_mirror_descent():
    family, w, u = ng.Gamma(), jnp.array([1.7, -0.6]), jnp.array([2.0, -1.1])

    @jax.jit
    def sides(u):
        mirror = jax.grad(lambda u: family.kl(w, u))(u), family.to_moments(u) - family.to_moments(w)
        other = jax.grad(lambda u: family.kl(u, w))(u), family.fisher(u) @ (u - w)
        return mirror, other

    (mirror, gap), (other, product) = sides(u)
    assert_close(mirror, gap, 1e-9)
    assert_close(other, product, 1e-9)
    assert jnp.max(jnp.abs(other - gap)) > 0.05


def test_e25_a_dissimilarity_summed_over_the_batch_gives_as_many_times_the_metric():
    xs, w, v = jnp.array([[1.0, 0.5], [-0.3, 2.0], [0.7, -1.1]]), jnp.array([0.2, -0.4]), jnp.array([1.0, 2.0])
    model = lambda w, x: jnp.tanh(x @ w)

    @jax.jit
    def sides(w):
        summed = lambda u: jnp.sum((model(u, xs) - model(w, xs)) ** 2) / 2
        return jax.jvp(jax.grad(summed), (w,), (v,))[1], ng.pullback(model, ng.Euclidean(), w, xs).mv(v)

    summed, metric = sides(w)
    assert_close(summed, len(xs) * metric)


def test_e29_the_curvature_of_a_loss_is_positive_on_average_only():
    """The location of a Cauchy distribution: negative at a residual of 3, and a Fisher information of one half."""
    loss = lambda z, x: jnp.log1p((x - z) ** 2)
    curvature = jax.jit(jax.vmap(lambda x: jax.hessian(loss)(jnp.array(0.0), x)))
    assert_close(curvature(jnp.array([3.0])), jnp.array([-0.16]))
    angles = (np.arange(2000) + 0.5) / 2000 * np.pi - np.pi / 2  # quantiles are their tangents
    assert_close(jnp.mean(curvature(jnp.tan(angles))), jnp.array(0.5))


def test_e35_the_crossing_of_the_figure_of_eight():
    """What happens there is tested in test_invariance.py."""
    eight = lambda t: np.stack([np.sin(2 * t), np.sin(t)])
    theta = np.linspace(-np.pi / 4, 5 * np.pi / 4, 7)
    assert_close(eight(np.pi - theta), eight(theta) * np.array([[-1.0], [1.0]]))
    assert_close(eight(np.array(np.pi)), eight(np.array(0.0)))
    # In print: f(theta) = pi / 4 - theta, for a second crossing at pi / 2.
    assert np.abs(eight(np.pi / 4 - theta) - eight(theta) * np.array([[-1.0], [1.0]])).max() > 0.5
    assert np.abs(eight(np.array(np.pi / 2))).max() == 1


@pytest.mark.parametrize("name", ["affine", "sinh"])
def test_e43_invertible_maps_leave_the_divergence_alone(name):
    family = ng.GaussianMean(1.0)
    means = jnp.array(0.6), jnp.array(-0.2)
    forward, slope = {"affine": (lambda x: 3 * x - 1, lambda x: 3 + 0 * x), "sinh": (np.sinh, np.cosh)}[name]
    x = np.linspace(-8.0, 8.0, 8001)
    y = forward(x)
    log_p, log_q = (-((x - float(mean)) ** 2) / 2 - np.log(2 * np.pi) / 2 - np.log(slope(x)) for mean in means)
    after = np.trapezoid(np.exp(log_p) * (log_p - log_q), y)
    assert_close(after, family.kl(*means), 1e-6)


def test_e43_a_map_that_is_not_invertible_may_lose_the_divergence():
    """Squaring cannot tell a mean from its opposite: each square then has the density of both signs together."""
    family, mean = ng.GaussianMean(1.0), jnp.array(0.5)
    x = jnp.linspace(0.0, 9.0, 301)

    @jax.jit
    def sides(mean):
        density = lambda mean, x: jnp.exp(jax.vmap(lambda x: family.log_prob(mean, x))(x))
        folded = [density(m, x) + density(m, -x) for m in (mean, -mean)]
        return family.kl(mean, -mean), jnp.trapezoid(folded[0] * jnp.log(folded[0] / folded[1]), x)

    before, after = sides(mean)
    assert_close(before, jnp.array(0.5))
    assert_close(after, jnp.array(0.0))
