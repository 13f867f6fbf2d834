"""One problem and its approximations: what each step solves, where they agree, and where they do not."""

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from helpers import FAMILIES, GEOMETRIES, assert_close, flat, projection, ravel
from jax.flatten_util import ravel_pytree

import natgrad as ng

OK = ng.PROXIMAL_RESULTS.successful
STEPS = {
    "proximal_point": ng.proximal_point,
    "mirror_step": ng.mirror_step,
    "natural_step": ng.natural_step,
    "damped_newton_step": ng.damped_newton_step,
}


def rosenbrock(w):
    return jnp.array([1 - w[0], 10 * (w[1] - w[0] ** 2)])


def squared(w):
    return jnp.sum(rosenbrock(w) ** 2)


def bowl(w):
    """A cost of any tree of parameters, not quadratic; of the symmetric part of matrices that have one."""
    is_square = lambda leaf: leaf.ndim == 2 and leaf.shape[0] == leaf.shape[1]
    v = ravel(jax.tree.map(lambda leaf: (leaf + leaf.T) / 2 if is_square(leaf) else leaf, w))
    return jnp.sum(jnp.cos(v + jnp.arange(v.size, dtype=v.dtype)) + 0.1 * v**2) / v.size


def solved(step, cost, dissimilarity, strength, w, **options):
    run = jax.jit(lambda w: step(ng.ProximalProblem(cost, dissimilarity, strength), w, **options))
    return run(w)


# Textbook forms -----------------------------------------------------------------------------------------


# As NumPy's, since arrays of JAX would be made before a test has set their precision.
H = np.array([[3.0, 1.0], [1.0, 2.0]])
B = np.array([1.0, -2.0])
W = np.array([0.5, -0.3])


def quadratic(u):
    return u @ H @ u / 2 - B @ u


def test_euclid_gives_the_textbook_forms():
    mu, eye = 1.7, np.eye(2)
    gradient = H @ W - B
    implicit = np.linalg.solve(H + mu * eye, mu * W + B)
    expected = {
        "proximal_point": implicit,
        "mirror_step": W - gradient / mu,
        "natural_step": W - gradient / mu,
        # Of a quadratic cost, Newton's step is the proximal point.
        "damped_newton_step": implicit,
    }
    for name, step in STEPS.items():
        found = solved(step, quadratic, ng.Euclidean(), mu, W)
        assert found.result == OK and found.residual < 1e-8
        np.testing.assert_allclose(found.value, expected[name], rtol=1e-7)
        np.testing.assert_allclose(found.divergence, np.sum((found.value - W) ** 2) / 2, rtol=1e-9)
        np.testing.assert_allclose(found.cost, quadratic(found.value), rtol=1e-9)
    u = solved(ng.proximal_point, bowl, ng.Euclidean(), mu, W).value
    np.testing.assert_allclose(u, W - jax.grad(bowl)(u) / mu, rtol=1e-7)


def test_implicit_descent_on_the_outputs_shrinks_them():
    w, mu = jnp.array([-1.2, 1.0]), 3.0
    space = ng.FunctionSpace(rosenbrock, ng.Euclidean())
    found = solved(ng.proximal_point, squared, space, mu, w)
    assert found.result == OK and found.num_steps > 0
    np.testing.assert_allclose(rosenbrock(found.value), rosenbrock(w) * mu / (mu + 2), rtol=1e-6)
    # Rate 1/2, the Gauss-Newton step: two steps to the minimum.
    twice = w
    for _ in range(2):
        twice = solved(ng.natural_step, squared, space, 2.0, twice).value
    np.testing.assert_allclose(twice, 1.0, rtol=1e-9)


def test_the_natural_gradient_interpolates_to_the_gradient():
    w = jnp.array([-1.2, 1.0])
    space, gradient = ng.FunctionSpace(rosenbrock, ng.Euclidean()), jax.grad(squared)(w)
    J = jax.jacobian(rosenbrock)(w)
    for damping in (0.0, 0.1, 1e9):
        found = solved(ng.natural_step, squared, space, 2.0, w, damping=damping)
        step = np.linalg.solve(J.T @ J + damping * np.eye(2), gradient) / 2
        np.testing.assert_allclose(found.value, w - step, rtol=1e-9)
        assert gradient @ (found.value - w) < 0 and found.residual < 1e-9


# To first order they are one ----------------------------------------------------------------------------


SPACES = {
    "model": lambda: (
        ng.FunctionSpace(lambda w, x: jnp.tanh(x @ w), ng.Fisher(ng.Bernoulli()), jnp.array([[1.0, 0.3], [0.2, -1.0]])),
        jnp.array([[0.3, -0.2, 0.4], [0.5, 0.1, -0.6]]),
    ),
    "bregman": lambda: (ng.Bregman(lambda z: jnp.sum(jnp.cosh(z))), jnp.array([0.3, -0.8])),
    **{
        name: lambda name=name: (GEOMETRIES[name]().geometry, GEOMETRIES[name]().z)
        for name in ("euclidean_tree", "dissimilarity", "minimal_categorical", "gaussian", "gammas")
    },
    "dual": lambda: (ng.DualFisher(ng.Poisson()), jnp.array([0.7, 2.0])),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SPACES)
def test_steps_agree_to_first_order_as_the_strength_grows(name):
    """Differences fall with the square of the strength, and what remains is the natural gradient."""
    dissimilarity, w = SPACES[name]()
    found = {}
    for label, step in STEPS.items():
        run = jax.jit(lambda w, mu, step=step: step(ng.ProximalProblem(bowl, dissimilarity, mu), w))
        for mu in (2e2, 4e2):
            one = run(w, mu)
            assert one.result == OK
            found[label, mu] = mu * (flat(one.value) - flat(w))
    for label in STEPS:
        gap = lambda mu, label=label: np.linalg.norm(found[label, mu] - found["natural_step", mu])
        assert gap(4e2) < 0.6 * gap(2e2) + 2e-6
    problem = ng.ProximalProblem(bowl, dissimilarity)
    G = problem.space.metric(w).as_matrix()
    np.testing.assert_allclose(G @ found["natural_step", 4e2], -flat(jax.grad(bowl)(w)), rtol=1e-7, atol=1e-9)


# Mirror descent on exponential families -----------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_mirror_descent_moves_the_dual_coordinates(name):
    """In both directions, and each is exactly the natural gradient in the coordinates that it moves."""
    case = FAMILIES[name]()
    family, eta, mu = case.family, case.eta, 50.0
    seen = jnp.asarray(projection(case))
    cost = lambda e: bowl(ravel_pytree(e)[1](seen @ ravel(e)))
    of_moments = lambda x: cost(family.to_natural(x))
    xi = family.to_moments(eta)
    first = solved(ng.mirror_step, cost, ng.Fisher(family), mu, eta)
    assert first.result == OK and first.residual < 1e-6 and first.num_steps == 0
    expected = flat(xi) - flat(jax.grad(cost)(eta)) / mu
    np.testing.assert_allclose(flat(family.to_moments(first.value)), expected, rtol=1e-6, atol=1e-8)
    natural = solved(ng.natural_step, of_moments, ng.DualFisher(family), mu, xi)
    np.testing.assert_allclose(flat(natural.value), expected, rtol=1e-6, atol=1e-8)

    second = solved(ng.mirror_step, of_moments, ng.DualFisher(family), mu, xi)
    assert second.result == OK and second.residual < 1e-6
    moved = flat(eta) - flat(jax.grad(of_moments)(xi)) / mu
    found = flat(family.to_natural(second.value))
    np.testing.assert_allclose(seen @ found, seen @ moved, rtol=1e-6, atol=1e-8)
    natural = solved(ng.natural_step, cost, ng.Fisher(family), mu, eta)
    np.testing.assert_allclose(seen @ flat(natural.value), seen @ moved, rtol=1e-6, atol=1e-8)
    # The two directions differ from each other, unless the Fisher information is the same everywhere.
    assert name.startswith("gaussian_mean") or np.linalg.norm(seen @ (flat(first.value) - found)) > 1e-8


def test_exponentiated_gradient_is_mirror_descent_on_the_simplex():
    p, losses, rate = jnp.array([0.2, 0.5, 0.3]), jnp.array([1.0, -0.4, 0.3]), 0.7
    found = solved(ng.mirror_step, lambda p: losses @ p, ng.DualFisher(ng.Categorical(3)), 1 / rate, p)
    weights = p * np.exp(-rate * losses)
    np.testing.assert_allclose(found.value, weights / weights.sum(), rtol=1e-12)
    assert found.residual < 1e-12
    # And it minimises what mirror descent minimises, on the simplex.
    objective = lambda q: losses @ q + np.sum(q * np.log(q / p)) / rate
    for direction in ([1, -1, 0], [0, 1, -1], [1, 1, -2]):
        for size in (1e-3, -1e-3):
            assert objective(found.value + size * np.array(direction)) > objective(found.value)


@pytest.mark.parametrize(
    ("step", "family", "dual", "cost", "start"),
    [
        (ng.mirror_step, ng.Bernoulli(), False, lambda e: jnp.sum(5 * e), [0.3]),
        (ng.mirror_step, ng.Gaussian(1), False, lambda e: -jnp.sum(9 * e[1]), ([0.3], [[1.0]])),
        (ng.mirror_step, ng.Gamma(), False, lambda e: jnp.sum(50 * e), [1.7, -0.6]),
        (ng.mirror_step, ng.Exponential(), True, lambda m: -jnp.sum(7 * m), [0.5]),
        (ng.natural_step, ng.Exponential(), False, lambda e: -jnp.sum(9 * e), [-0.5]),
    ],
)
def test_steps_that_would_leave_the_domain_are_shorter_and_say_so(step, family, dual, cost, start):
    w = jax.tree.map(jnp.asarray, start, is_leaf=lambda leaf: isinstance(leaf, list))
    geometry = (ng.DualFisher if dual else ng.Fisher)(family)
    found = solved(step, cost, geometry, 1.0, w)
    assert found.result == ng.PROXIMAL_RESULTS.shortened and found.strength > 1
    assert geometry._contains(found.value) and not np.allclose(flat(found.value), flat(w))
    assert found.cost < cost(w)


def test_closed_forms_of_products_and_multiples():
    parts = {"a": ng.Fisher(ng.Poisson()), "b": 2.0 * ng.Euclidean()}
    w = {"a": jnp.array([0.7]), "b": jnp.array([1.0, 2.0])}
    both = solved(ng.mirror_step, bowl, ng.ProductGeometry(parts), 3.0, w)
    gradient = jax.grad(bowl)(w)
    np.testing.assert_allclose(jnp.exp(both.value["a"]), jnp.exp(w["a"]) - gradient["a"] / 3, rtol=1e-12)
    np.testing.assert_allclose(both.value["b"], w["b"] - gradient["b"] / 6, rtol=1e-12)
    assert both.num_steps == 0
    mixed = solved(
        ng.mirror_step, bowl, ng.ProductGeometry({**parts, "b": ng.Bregman(lambda z: jnp.sum(z**2))}), 3.0, w
    )
    assert mixed.num_steps > 0
    assert_close(mixed.value, both.value, rtol=1e-6)


# Expectations -------------------------------------------------------------------------------------------


DISCRETE = ("bernoullis", "categoricals", "minimal_categorical", "poisson", "geometric", "negative_binomial", "product")


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_natural_gradient_of_an_expectation_is_the_gradient_in_moments(name):
    """Of a mean statistic that is its coefficients, and both estimators find them."""
    case = FAMILIES[name]()
    family, eta = case.family, case.eta
    xi = family.to_moments(eta)
    seen = projection(case)
    direction = ravel_pytree(xi)[1](jnp.asarray(seen @ np.cos(np.arange(flat(xi).size))))
    function = lambda x: jnp.vdot(ravel(direction), ravel(family.sufficient_statistics(x)))
    assert family.moves_samples == (name not in DISCRETE)
    kinds = (False, True) if family.moves_samples else (False,)
    for pathwise in kinds:
        run = lambda key, pathwise=pathwise: ng.expectation_gradient(
            family, function, eta, key, num_samples=2000, pathwise=pathwise
        )
        found = jax.jit(run)(jax.random.key(3))
        error = np.abs(seen @ (flat(found.value) - flat(direction)))
        assert np.all(error <= 6 * np.linalg.norm(flat(found.standard_error)) + 1e-9)
        assert np.linalg.norm(flat(found.standard_error)) < np.linalg.norm(flat(direction))


def test_a_step_of_variational_inference_is_the_conjugate_update():
    """The posterior of a Gaussian mean, from anywhere, with rate one."""
    data, precision = jnp.array([[0.3, 1.0], [-0.5, 2.0], [0.1, 0.7]]), jnp.array([[2.0, 0.5], [0.5, 1.0]])
    energy = lambda x: jnp.sum(jax.vmap(lambda y: (y - x) @ precision @ (y - x) / 2)(data)) + x @ x / 2
    eta = (jnp.array([5.0, -3.0]), 7.0 * jnp.eye(2))
    run = jax.jit(lambda key: ng.expectation_gradient(ng.Gaussian(2), energy, eta, key, num_samples=4000))
    found = run(jax.random.key(0))
    expected = precision @ data.sum(0), 3 * precision + jnp.eye(2)
    for got, error, wanted in zip(found.value, found.standard_error, expected, strict=True):
        np.testing.assert_array_less(np.abs(-got - wanted), 5 * error + 1e-9)


# Trust regions ------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SPACES)
def test_a_proximal_point_solves_the_trust_region_of_its_own_radius(name):
    dissimilarity, w = SPACES[name]()
    point = solved(ng.proximal_point, bowl, dissimilarity, 20.0, w)
    problem = ng.ProximalProblem(bowl, dissimilarity)
    found = jax.jit(lambda w, radius: ng.trust_region_step(problem, w, radius))(w, point.divergence)
    assert found.result == OK and found.residual < 1e-6
    np.testing.assert_allclose(found.strength, 20.0, rtol=1e-4)
    np.testing.assert_allclose(flat(found.value), flat(point.value), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.divergence, point.divergence, rtol=1e-6)


@pytest.mark.slow
def test_of_convex_problems_every_trust_region_is_a_proximal_point():
    problem = lambda strength: ng.ProximalProblem(quadratic, ng.Euclidean(), strength)
    region = jax.jit(lambda radius: ng.trust_region_step(problem(1.0), jnp.asarray(W), radius))
    point = jax.jit(lambda strength: ng.proximal_point(problem(strength), jnp.asarray(W)))
    for radius in (1e-3, 1e-2, 0.1):
        found = region(radius)
        assert found.result == OK and found.strength > 0
        np.testing.assert_allclose(found.divergence, radius, rtol=1e-6)
        np.testing.assert_allclose(point(found.strength).value, found.value, rtol=1e-6)
    inside = region(10.0)
    assert inside.result == OK and inside.strength == 0 and inside.residual < 1e-7
    np.testing.assert_allclose(inside.value, np.linalg.solve(H, B), rtol=1e-6)


def test_without_convexity_a_trust_region_may_be_no_proximal_point():
    """The cost -u and the dissimilarity 1 - exp(-u^2 / 2): no strength gives a step beyond its inflection."""
    problem = ng.ProximalProblem(lambda u: -u, lambda u, w: 1 - jnp.exp(-((u - w) ** 2) / 2))
    found = jax.jit(lambda w: ng.trust_region_step(problem, w, 0.8))(jnp.array(0.0))
    assert found.result == OK
    np.testing.assert_allclose(found.value, np.sqrt(-2 * np.log(0.2)), rtol=1e-7)
    whole = lambda u: -u + found.strength * (1 - jnp.exp(-(u**2) / 2))
    assert abs(jax.grad(whole)(found.value)) < 1e-7
    # Stationary, but a maximum.
    assert jax.grad(jax.grad(whole))(found.value) < 0 and whole(found.value + 1) < whole(found.value)
    unbounded = solved(ng.proximal_point, lambda u: -u, problem.space, found.strength, jnp.array(0.0))
    assert abs(unbounded.value - found.value) > 1


def test_steps_respect_the_radius_even_where_no_multiplier_is_found():
    problem = ng.ProximalProblem(lambda u: -u, lambda u, w: 1 - jnp.exp(-((u - w) ** 2) / 2))
    found = jax.jit(lambda w: ng.trust_region_step(problem, w, 0.8, max_steps=1))(jnp.array(0.0))
    assert found.result == ng.PROXIMAL_RESULTS.no_multiplier
    assert 0.1 < found.divergence <= 0.8 and found.cost < 0


# Saddles ------------------------------------------------------------------------------------------------


def test_newton_is_attracted_by_a_saddle_and_the_natural_gradient_is_not():
    saddle = lambda w: (w[0] ** 2 - w[1] ** 2) / 2 + w[1] ** 4 / 4
    problem = lambda strength: ng.ProximalProblem(saddle, ng.Euclidean(), strength)
    to_saddle = jax.jit(lambda w: ng.damped_newton_step(problem(1e-3), w))
    downhill = jax.jit(lambda w: ng.natural_step(problem(2.0), w).value)
    newton = natural = jnp.array([0.4, 0.1])
    for _ in range(12):
        step = to_saddle(newton)
        newton, natural = step.value, downhill(natural)
    assert np.linalg.norm(newton) < 1e-6
    assert step.result == ng.PROXIMAL_RESULTS.not_positive_definite
    np.testing.assert_allclose(natural, [0.0, 1.0], atol=1e-2)


def test_newton_is_invariant_to_affine_maps_only():
    A, b = jnp.array([[2.0, 1.0], [0.0, 1.0]]), jnp.array([0.3, -1.0])
    newton = lambda cost, w: solved(ng.damped_newton_step, cost, ng.Euclidean(), 1e-12, w).value
    w = jnp.array([-1.2, 1.0])
    inside = newton(lambda v: squared(A @ v + b), jnp.linalg.solve(A, w - b))
    np.testing.assert_allclose(A @ inside + b, newton(squared, w), rtol=1e-6)
    bent = lambda v: jnp.array([v[0], v[1] + v[0] ** 2])
    curved = newton(lambda v: squared(bent(v)), jnp.array([w[0], w[1] - w[0] ** 2]))
    assert np.max(np.abs(bent(curved) - newton(squared, w))) > 0.1


# What they are told, and what they say ------------------------------------------------------------------


def test_a_solver_of_ones_own_and_too_few_steps():
    w = jnp.array([-1.2, 1.0])
    space = ng.FunctionSpace(rosenbrock, ng.Euclidean())
    own = solved(ng.proximal_point, squared, space, 3.0, w, solver=optx.NonlinearCG(rtol=1e-9, atol=1e-9))
    np.testing.assert_allclose(rosenbrock(own.value), rosenbrock(w) * 0.6, rtol=1e-5)
    short = solved(ng.proximal_point, squared, space, 3.0, w, max_steps=2)
    assert short.result == ng.PROXIMAL_RESULTS.unfinished and short.residual > 1e-3


@pytest.mark.slow
def test_inner_iterations_stay_on_the_simplex():
    p, losses = jnp.array([0.2, 0.5, 0.3]), jnp.array([1.0, -0.4, 0.3])
    geometry, linear = ng.DualFisher(ng.Categorical(3)), lambda p: losses @ p
    mirror = solved(ng.mirror_step, linear, geometry, 2.0, p)
    # Of a linear cost, the mirror step is the proximal point.
    point = solved(ng.proximal_point, linear, geometry, 2.0, p)
    assert point.result == OK
    np.testing.assert_allclose(point.value, mirror.value, rtol=1e-5)
    curved = lambda p: 5 * (p - jnp.array([1.0, 0.0, 0.0])) @ (p - jnp.array([1.0, 0.0, 0.0]))
    region = solved(lambda problem, p: ng.trust_region_step(problem, p, 0.05), curved, geometry, 1.0, p)
    assert region.result == OK and abs(region.value.sum() - 1) < 1e-9 and region.value[0] > p[0]
    np.testing.assert_allclose(region.divergence, 0.05, rtol=1e-6)


def test_run_aways_are_not_taken_for_solutions():
    found = solved(ng.proximal_point, lambda u: -u @ u, ng.Euclidean(), 1.0, jnp.array([1.0, 0.0]))
    assert found.result in (ng.PROXIMAL_RESULTS.unfinished, ng.PROXIMAL_RESULTS.not_finite)


@pytest.mark.slow
def test_costs_that_refuse_points_outside_are_not_asked_there():
    family = ng.Gaussian(1)
    xi = family.to_moments((jnp.array([0.3]), jnp.array([[1.0]])))
    target = (jnp.array([4.0]), jnp.array([[9.0]]))
    cost = lambda xi: family.kl(family.to_natural(xi), target)
    found = solved(ng.proximal_point, cost, ng.DualFisher(family), 1.0, xi)
    # Half way between the two, in natural parameters.
    assert found.result == OK
    expected = [(0.3 + 4.0) / 2, (1.0 + 9.0) / 2]
    np.testing.assert_allclose(flat(family.to_natural(found.value)), expected, rtol=1e-5)


def test_a_minimum_is_its_own_trust_region():
    region = lambda problem, w: ng.trust_region_step(problem, w, 0.5)
    found = solved(region, lambda u: u @ u, ng.Euclidean(), 1.0, jnp.zeros(2))
    assert found.result == OK and found.strength == 0
    np.testing.assert_array_equal(found.value, jnp.zeros(2))


@pytest.mark.users_defaults
@pytest.mark.slow
def test_parameters_of_several_dtypes():
    w = {"a": jnp.array([1.0, 2.0], jnp.float32), "b": jnp.array([0.5])}
    cost = lambda w: jnp.sum(w["a"].astype(float) ** 2) + jnp.sum(jnp.cos(w["b"]))
    region = lambda problem, w: ng.trust_region_step(problem, w, 0.1)
    for step in (*STEPS.values(), region):
        found = solved(step, cost, ng.Euclidean(), 3.0, w)
        assert found.cost < cost(w)
        assert found.value["a"].dtype == jnp.float32 and found.value["b"].dtype == jnp.float64
    narrow = {"a": w["a"]}
    found = solved(region, lambda w: jnp.sum(w["a"] ** 2), ng.Euclidean(), 3.0, narrow)
    np.testing.assert_allclose(found.divergence, 0.1, rtol=1e-3)


@pytest.mark.slow
def test_steps_have_derivatives():
    w = jnp.array([-0.5])
    for step in (ng.mirror_step, ng.natural_step):
        value = lambda mu, step=step: step(ng.ProximalProblem(jnp.sum, ng.Fisher(ng.Exponential()), mu), w).value[0]
        slope = (value(20.0 + 1e-5) - value(20.0 - 1e-5)) / 2e-5
        np.testing.assert_allclose(jax.grad(value)(20.0), slope, rtol=1e-5)


def test_steps_that_never_get_inside_say_so():
    cost = lambda e: -1e30 * jnp.sum(e)
    found = solved(ng.natural_step, cost, ng.Fisher(ng.Exponential()), 1e-6, jnp.array([-0.5]))
    assert found.result == ng.PROXIMAL_RESULTS.left_domain
    np.testing.assert_array_equal(found.value, jnp.array([-0.5]))


@pytest.mark.parametrize("step", STEPS.values())
def test_what_is_not_finite_is_not_taken(step):
    w = jnp.array([1.0, 2.0])
    found = solved(step, lambda w: jnp.sum(w) * jnp.nan, ng.Euclidean(), 1.0, w)
    assert found.result == ng.PROXIMAL_RESULTS.not_finite
    np.testing.assert_array_equal(found.value, w)
    assert np.isnan(found.residual)


def test_a_newton_step_out_of_the_domain_is_not_taken():
    w = jnp.array([-0.5])
    found = solved(ng.damped_newton_step, lambda e: -jnp.sum(9 * e), ng.Fisher(ng.Exponential()), 1.0, w)
    assert found.result == ng.PROXIMAL_RESULTS.left_domain
    np.testing.assert_array_equal(found.value, w)


@pytest.mark.float32
def test_single_precision_and_trees():
    w = {"a": jnp.ones((2, 1)), "b": [jnp.zeros(())]}
    for step in STEPS.values():
        found = solved(step, bowl, ng.Euclidean(), 5.0, w)
        assert found.result == OK
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found.value))
        assert found.cost < bowl(w) and found.residual < 1e-2


SUMMED = lambda: ng.FunctionSpace(lambda w, x: jnp.sum(x @ w), ng.Euclidean(), jnp.ones((3, 2)))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ng.ProximalProblem(3.0, ng.Euclidean()), TypeError, "needs a `cost` that is a function"),
        (lambda: ng.ProximalProblem(bowl, 3.0), TypeError, "needs a dissimilarity"),
        (lambda: ng.ProximalProblem(bowl, ng.Euclidean), TypeError, "needs a dissimilarity.* but got `Euclidean`"),
        (lambda: ng.FunctionSpace(rosenbrock, ng.Euclidean), TypeError, "`FunctionSpace` needs a geometry"),
        (
            lambda: ng.natural_step(ng.ProximalProblem(jnp.sum, SUMMED()), jnp.ones(2)),
            ValueError,
            "along its leading axis",
        ),
        (lambda: ng.ProximalProblem(bowl, ng.Euclidean(), -1.0), ValueError, "needs a `strength` above 0"),
        (lambda: ng.ProximalProblem(bowl, ng.Euclidean(), [1.0, 2.0]), ValueError, "one number for `strength`"),
        (
            lambda: ng.natural_step(ng.ProximalProblem(lambda w: w, ng.Euclidean()), jnp.ones(2)),
            TypeError,
            "`natural_step` needs a `cost` that returns one real number",
        ),
        (
            lambda: ng.mirror_step(ng.ProximalProblem(bowl, ng.Fisher(ng.Exponential())), jnp.ones(2)),
            ValueError,
            "`mirror_step` needs a point at which the geometry is defined",
        ),
        (
            lambda: ng.trust_region_step(ng.ProximalProblem(bowl, ng.Euclidean()), jnp.ones(2), 0.0),
            ValueError,
            "`trust_region_step` needs a `radius` above 0",
        ),
        (
            lambda: ng.trust_region_step(ng.ProximalProblem(bowl, ng.Euclidean()), jnp.ones(2), jnp.ones(2)),
            ValueError,
            "one number for `radius`",
        ),
        (
            lambda: ng.expectation_gradient(ng.Poisson(), jnp.sum, jnp.ones(2), jax.random.key(0), pathwise=True),
            ValueError,
            "cannot move samples of `Poisson`",
        ),
        (
            lambda: ng.expectation_gradient(ng.Poisson(), jnp.sum, jnp.ones(2), jax.random.key(0), num_samples=1),
            ValueError,
            "needs `num_samples` of at least 2",
        ),
        (
            lambda: ng.proximal_point(ng.ProximalProblem(bowl, ng.Euclidean()), jnp.ones(2, int)),
            TypeError,
            "`proximal_point` needs parameters that are real floating-point",
        ),
    ],
)
def test_bad_input_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
