"""Steps in different coordinates, and the worked examples of the theory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, flat
from models import normal

import natgrad as ng


def logistic_task():
    """A regression with as many outputs as it needs: the metric is not singular."""
    model = lambda w, x: x @ w
    y = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    loss = lambda z, y: -ng.Bernoulli().log_prob(z, y)
    return ng.Task(model, ng.Fisher(ng.Bernoulli()), loss, normal(1, 6, 3), y), normal(2, 3)


def redundant_task():
    """A product of two weights: the metric is singular everywhere."""
    model = lambda w, x: x @ (w[:2] * w[2:])
    loss = lambda z, y: (z - y) ** 2 / 2
    return ng.Task(model, ng.Euclidean(), loss, normal(1, 6, 2), normal(3, 6)), 1.0 + normal(2, 4)


MIXING = np.array([[2.0, 0.3, 0.0], [0.1, 0.5, 1.0], [0.0, 1.0, 8.0]])


def test_affine_charts_leave_whole_trajectories_of_the_natural_gradient_unchanged():
    task, w = logistic_task()
    chart = lambda theta: MIXING @ theta + 1.0
    theta = jnp.asarray(np.linalg.solve(MIXING, w - 1.0))
    report = ng.check_invariance(task, w, chart, theta, rates=(0.3, 0.1), num_steps=6)
    assert report.movement.min() > 0.1
    assert report.natural_error.max() < 1e-9
    assert report.gradient_error.min() > 1e-2


@pytest.mark.parametrize("make", [logistic_task, redundant_task])
def test_nonlinear_charts_agree_to_first_order(make):
    task, w = make()
    report = ng.check_invariance(task, w, jnp.sinh, jnp.arcsinh(w), rates=(1e-2, 1e-3, 1e-4))
    assert abs(report.order - 2) < 0.05
    assert abs(report.gradient_order - 1) < 0.05


def test_damping_by_the_identity_breaks_what_damping_by_the_diagonal_keeps():
    """Changing units: `lam * diag(G)` scales with them, `lam * I` does not."""
    task, w = logistic_task()
    units = np.array([60.0, 1.0, 1.0])
    other = ng.reparametrise(task.model, lambda theta: theta / units)

    def push(model, w, by_diagonal):
        cost = lambda w: jnp.mean(jax.vmap(task.loss)(model(w, task.x), task.y))
        matrix = ng.pullback(model, task.geometry, w, task.x).as_matrix()
        damping = jnp.diag(jnp.diagonal(matrix)) if by_diagonal else jnp.eye(3)
        step = jnp.linalg.solve(matrix + 0.1 * damping, jax.grad(cost)(w))
        return jax.jvp(lambda w: model(w, task.x), (w,), (step,))[1]

    for by_diagonal, agrees in ((True, True), (False, False)):
        one, two = push(task.model, w, by_diagonal), push(other, w * units, by_diagonal)
        assert np.allclose(one, two, rtol=1e-9) is agrees


@pytest.mark.parametrize("make", [logistic_task, redundant_task])
def test_natural_gradients_push_forward_to_projections(make):
    """Theorem 1: the projection of the gradient on the outputs onto what the parameters can reach."""
    task, w = make()
    report = jax.jit(lambda w: ng.check_projection(task, w))(w)
    assert report.error < 1e-9
    assert np.abs(report.pushforward).max() > 1e-2
    # Not the whole gradient: six outputs, at most three directions.
    ambient = jax.vmap(jax.grad(task.loss))(task.outputs(w), task.y)
    assert np.abs(report.pushforward - flat(ambient)).max() > 1e-3


def test_projection_with_a_tree_of_outputs():
    model = lambda w, x: {"a": x @ w, "b": jnp.tanh(x[:, :1] * w[:1][None, :])}
    loss = lambda z, y: jnp.sum((z["a"] - y) ** 2) + jnp.sum(z["b"] ** 4)
    geometry = ng.ProductGeometry({"a": ng.Euclidean(), "b": 3.0 * ng.Euclidean()})
    task = ng.Task(model, geometry, loss, normal(1, 4, 2), normal(2, 4))
    assert jax.jit(lambda w: ng.check_projection(task, w))(normal(3, 2)).error < 1e-9


def natural(f, w, covector):
    """The natural parameter gradient of a map without data, and its pushforward."""
    metric = ng.pullback(f, ng.Euclidean(), w)
    step = ng.sharp(metric, ng.pullback_covector(f, w, ng.Covector(covector)))
    return flat(step.tree), flat(ng.pushforward(f, w, step).tree)


def test_redundant_parameters_move_differently_for_the_same_motion():
    """Appendix A.3: the step in w is (3, 3); taken in theta and brought to w it is (4.8, 1.2); the model
    moves alike."""
    model = lambda w: jnp.stack([w[0] + w[1], 0.0 * w[0]])
    chart = lambda theta: jnp.stack([2 * theta[0], theta[1]])
    theta = jnp.array([1.0, 1.0])
    w = chart(theta)
    gradient = jax.grad(lambda z: z[0] ** 2)(model(w))
    step, pushed = natural(model, w, gradient)
    theta_step, theta_pushed = natural(ng.reparametrise(model, chart), theta, gradient)
    assert_close(step, np.array([3.0, 3.0]), 1e-9)
    brought = ng.pushforward(chart, theta, ng.Vector(jnp.asarray(theta_step)))
    assert_close(flat(brought.tree), np.array([4.8, 1.2]), 1e-9)
    assert_close(pushed, theta_pushed, 1e-9)


def test_minutes_and_seconds():
    """A regression weight for a duration: rate 0.01 and slope 2 move it by -0.02 per minute. With the duration in
    seconds
    the gradient is 60 times larger, and the step, back in minutes, is -72. The natural gradient does not notice."""
    minutes = jnp.array([[1.0, 0.5], [2.0, -1.0], [0.5, 1.0]])
    units = np.array([60.0, 1.0])
    seconds = minutes * units[None, :]
    model = lambda w, x: x @ w
    w = jnp.array([0.3, -0.2])
    # A cost whose slope in the first weight is 2 where the duration is in minutes.
    weights = jnp.linalg.lstsq(minutes.T, jnp.array([2.0, 0.0]))[0]
    cost = lambda w, x: jnp.vdot(weights, model(w, x))
    rate = 0.01
    in_minutes = -rate * jax.grad(cost)(w, minutes)
    in_seconds = -rate * jax.grad(cost)(w / units, seconds)
    assert_close(in_minutes[0], jnp.array(-0.02), 1e-9)
    assert_close(in_seconds[0], jnp.array(-1.2), 1e-9)
    assert_close((in_seconds * units)[0], jnp.array(-72.0), 1e-9)

    def prediction(w, x):
        step = ng.natural_gradient(model, ng.Euclidean(), w, x, jax.grad(cost)(w, x))
        return model(w - rate * step, x)

    assert_close(prediction(w, minutes), prediction(w / units, seconds), 1e-9)


def test_one_point_two_parameters_with_different_tangents():
    """Appendix A.2, corrected: a curve that crosses itself. The metric is 5 at both parameters of the crossing, and
    the pushforwards of the gradient of L = x differ; neither parameter alone can tell."""
    curve = lambda t: jnp.stack([jnp.sin(2 * t), jnp.sin(t)]).reshape(2)
    at = [jnp.array(0.0), jnp.array(jnp.pi)]
    points = [curve(t) for t in at]
    assert_close(points[0], points[1], atol=1e-12)
    gradient = jnp.array([1.0, 0.0])
    for t, expected in zip(at, ([0.8, 0.4], [0.8, -0.4]), strict=True):
        metric = ng.pullback(curve, ng.Euclidean(), t)
        assert_close(metric.as_matrix(), jnp.array([[5.0]]), 1e-9)
        assert ng.rank(metric).rank == 1
        _, pushed = natural(curve, t, gradient)
        assert_close(pushed, np.array(expected), 1e-9)


def test_non_proper_points_depend_on_the_coordinates_and_lose_rank():
    """Example 1: (u, v^3) and (u^3, v) at zero see one direction each of the same plane."""
    gradient = jnp.array([0.7, -0.3])
    zero = jnp.zeros(2)
    for f, expected in (
        (lambda w: jnp.stack([w[0], w[1] ** 3]), [0.7, 0.0]),
        (lambda w: jnp.stack([w[0] ** 3, w[1]]), [0.0, -0.3]),
    ):
        _, pushed = natural(f, zero, gradient)
        assert_close(pushed, np.array(expected), 1e-9)
        here, generic = (ng.rank(ng.pullback(f, ng.Euclidean(), w)) for w in (zero, zero + 0.5))
        assert (int(here.rank), int(here.nullity), int(generic.rank)) == (1, 1, 2)


def test_rank_from_either_side():
    """The Gram matrix in sample space and the matrix on parameters have the same rank."""
    task, w = redundant_task()
    few = ng.pullback(task.model, task.geometry, w, task.x[:1])
    many = ng.pullback(task.model, task.geometry, w, task.x)
    assert (int(ng.rank(few).rank), int(ng.rank(few).nullity)) == (1, 3)
    assert (int(ng.rank(many).rank), int(ng.rank(many).nullity)) == (2, 2)
    basis = ng.null_space(many)
    assert basis.shape == (2, 4)
    assert np.abs(np.stack([many.mv(v) for v in basis])).max() < 1e-12


def test_sharp_and_flat_invert_each_other_up_to_the_null_space():
    task, w = redundant_task()
    metric = ng.pullback(task.model, task.geometry, w, task.x)
    v = ng.Vector(normal(5, 4))
    back = ng.sharp(metric, ng.flat(metric, v))
    matrix = np.asarray(metric.as_matrix())
    assert_close(flat(back.tree), np.linalg.pinv(matrix, hermitian=True) @ matrix @ flat(v.tree), 1e-8)
    damped = metric + 0.1 * ng.identity(w)
    assert_close(flat(ng.sharp(damped, ng.flat(damped, v)).tree), flat(v.tree), 1e-9)


def test_vectors_push_forward_and_covectors_pull_back():
    f = lambda w: jnp.stack([w[0] * w[1], jnp.sin(w[0])])
    w, v, c = jnp.array([0.3, 2.0]), ng.Vector(jnp.array([1.0, -2.0])), ng.Covector(jnp.array([0.5, 4.0]))
    assert_close(c(ng.pushforward(f, w, v)), ng.pullback_covector(f, w, c)(v), 1e-12)
    assert_close((2.0 * v + v - v / 2.0).tree, 2.5 * v.tree)
    assert_close(v.displace(w, -0.1), w - 0.1 * v.tree)
    assert isinstance(ng.solve(ng.identity(w), c, damping=0.0).value, ng.Vector)
    assert isinstance(ng.identity(w).mv(v), ng.Covector)


def test_adding_a_gradient_to_parameters_is_an_error_that_teaches():
    w, v, c = jnp.ones(2), ng.Vector(jnp.ones(2)), ng.Covector(jnp.ones(2))
    for wrong in (
        lambda: v + c,
        lambda: c - v,
        lambda: w - c,
        lambda: w + v,
        lambda: c.displace(w, -0.1),
        lambda: ng.flat(ng.identity(w), c),
        lambda: ng.sharp(ng.identity(w), v),
        lambda: ng.identity(w).mv(c),
        lambda: ng.solve(ng.identity(w), v),
    ):
        with pytest.raises(TypeError, match=r"natgrad.sharp\(metric, covector\)"):
            wrong()
    with pytest.raises(TypeError, match="A covector takes a `Vector`"):
        c(w)
