"""A step is what its formula says: against dense algebra, closed forms and another library's iterations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import compiled_step, one_step, ravel
from models import normal
from zoo import affine, classifier, classifier_problem

import natgrad as ng


@jax.jit
def loss(params, x, y):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(classifier(params, x)), y[:, None], axis=1))


# Compiled once for all tests: outside `jit` every call of these would compile its own programs.
loss_gradient = jax.jit(jax.grad(loss))
METRICS = {ng.Diagonal: ng.diagonal, ng.KFAC: ng.kfac, ng.EKFAC: ng.ekfac, ng.Exact: ng.pullback}


@functools.partial(jax.jit, static_argnums=0)
def metric_matrix(kind, params, x):
    """The metric that a structure stands for, exact backward passes."""
    return METRICS[kind](classifier, ng.Fisher(ng.Categorical()), params, x).as_matrix()


def dense(structure):
    params, (x, _) = classifier_problem()
    return metric_matrix(type(structure), params, x)


STRUCTURES = {
    "exact": lambda: ng.Exact(),
    "conjugate_gradients": lambda: ng.Exact(ng.CG(rtol=1e-12)),
    "sample_space": lambda: ng.Exact(ng.SampleSpace()),
    "cholesky": lambda: ng.Exact(ng.Cholesky()),
    "diagonal": lambda: ng.Diagonal(),
    "kfac": lambda: ng.KFAC(factored=False),
}


@pytest.mark.sample(2)
@pytest.mark.compat
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_step_solves_with_the_damped_metric(name):
    params, (x, y) = classifier_problem()
    structure = STRUCTURES[name]()
    opt = ng.NaturalGradient(
        classifier,
        ng.Categorical(),
        structure,
        ng.ConstantDamping(0.1),
        step=ng.ConstantStep(0.5),
        momentum=ng.NoMomentum(),
    )
    found, _, info = one_step(opt, params, (x, y))
    value, gradient = loss(params, x, y), loss_gradient(params, x, y)
    matrix = np.asarray(dense(structure)) + 0.1 * np.eye(len(ravel(params)))
    expected = ravel(params) - 0.5 * np.linalg.solve(matrix, ravel(gradient))
    np.testing.assert_allclose(ravel(found), expected, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(info.loss, value, rtol=1e-12)
    assert bool(info.accepted) and info.result == ng.STEP_RESULTS.successful


@pytest.mark.compat
def test_factored_damping_is_that_of_the_metric():
    params, (x, y) = classifier_problem()
    opt = ng.NaturalGradient(
        classifier,
        ng.Categorical(),
        ng.KFAC(),
        ng.ConstantDamping(0.1),
        step=ng.ConstantStep(1.0),
        momentum=ng.NoMomentum(),
    )
    found, *_ = one_step(opt, params, (x, y))
    factored = lambda params, x: ng.kfac(classifier, ng.Fisher(ng.Categorical()), params, x).inverse(0.1, factored=True)
    step = jax.jit(lambda params, x, g: factored(params, x).mv(g))(params, x, loss_gradient(params, x, y))
    np.testing.assert_allclose(ravel(found), ravel(params) - ravel(step), rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_corrected_eigenvalues_are_averaged_from_those_of_the_factors():
    """At the first step, half of the values are products of eigenvalues and half are second moments: the average has
    forgotten nothing yet."""
    params, (x, y) = classifier_problem()
    opt = ng.NaturalGradient(
        classifier, ng.Categorical(), ng.EKFAC(), ng.ConstantDamping(0.1), step=ng.ConstantStep(1.0)
    )
    _, state, _ = one_step(opt, params, (x, y))
    geometry = ng.Fisher(ng.Categorical())
    K = ng.kfac(classifier, geometry, params, x)
    E = ng.ekfac(classifier, geometry, params, x, basis=K)
    expected = (0.95 * np.asarray(K.as_matrix()) + np.asarray(E.as_matrix())) / 1.95
    np.testing.assert_allclose(state.structure.metric.as_matrix(), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.sample(1)
@pytest.mark.parametrize("structure", ["exact", "diagonal", "kfac"])
def test_damping_relative_to_the_diagonal_knows_no_units(structure):
    """Parameters in other units: the same function after the step. Damping by the identity fails this."""
    params, (x, y) = classifier_problem()
    scales = jax.tree.map(
        lambda leaf: jnp.asarray(10.0) ** jnp.sin(7 * jnp.arange(leaf.size)).reshape(leaf.shape), params
    )
    if structure == "kfac":  # One unit for all: entries of their own have no Kronecker factors.
        scales = jax.tree.map(lambda leaf: jnp.asarray(7.0), params)
    scaled = lambda params, x: classifier(jax.tree.map(jnp.multiply, params, scales), x)
    outputs = {}
    for shape in ("identity", "diagonal"):
        for name, own, start in (
            ("plain", classifier, params),
            ("scaled", scaled, jax.tree.map(jnp.divide, params, scales)),
        ):
            opt = ng.NaturalGradient(
                own,
                ng.Categorical(),
                STRUCTURES[structure](),
                ng.ConstantDamping(0.3, shape=shape),
                step=ng.ConstantStep(0.5),
            )
            moved, *_ = one_step(opt, start, (x, y))
            outputs[shape, name] = own(moved, x)
    np.testing.assert_allclose(outputs["diagonal", "scaled"], outputs["diagonal", "plain"], rtol=1e-7, atol=1e-8)
    assert np.abs(outputs["identity", "scaled"] - outputs["identity", "plain"]).max() > 1e-3


def test_multipliers_and_l2_are_added_where_they_belong():
    params, (x, y) = classifier_problem()
    opt = ng.NaturalGradient(
        classifier,
        ng.Categorical(),
        ng.Exact(),
        ng.ConstantDamping(0.1, multipliers={"params['second']": 3.0}),
        step=ng.ConstantStep(1.0),
        penalty=ng.L2({"params['first']": 0.2, "params['second']['w']": 0.4}),
    )
    found, _, info = one_step(opt, params, (x, y))
    each = lambda first, second_b, second_w: np.concatenate(
        [np.full(16, first), np.full(3, second_b), np.full(12, second_w)]
    )
    l2, damping = each(0.2, 0.0, 0.4), each(0.1, 0.3, 0.3)
    w = np.asarray(ravel(params))
    gradient = ravel(loss_gradient(params, x, y)) + l2 * w
    expected = w - np.linalg.solve(np.asarray(dense(ng.Exact())) + np.diag(l2 + damping), gradient)
    np.testing.assert_allclose(ravel(found), expected, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(info.loss, loss(params, x, y) + np.sum(l2 * w**2) / 2, rtol=1e-12)


def test_least_squares_is_solved_in_one_step():
    """With a bias and `l2`: the ridge regression."""
    x, y = normal(1, 20, 4), normal(2, 20, 2)
    params = {"w": normal(3, 4, 2), "b": normal(4, 2)}
    linear = lambda params, x: affine(x, **params)
    for structure in (ng.Exact(), ng.KFAC()):
        for l2 in (0.0, 0.1):
            if isinstance(structure, ng.KFAC) and l2:
                continue  # A sum of a product and the identity is no product.
            opt = ng.NaturalGradient(
                linear,
                ng.LeastSquares(),
                structure,
                ng.ConstantDamping(0.0),
                step=ng.ConstantStep(1.0),
                penalty=ng.L2(l2),
            )
            found, *_ = one_step(opt, params, (x, y))
            ones = np.concatenate([x, np.ones((20, 1))], axis=1)
            expected = np.linalg.solve(ones.T @ ones / 20 + l2 * np.eye(5), ones.T @ np.asarray(y) / 20)
            both = np.concatenate([found["w"], found["b"][None]])
            np.testing.assert_allclose(both, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["Poisson", "Bernoulli", "GaussianMean"])
def test_steps_are_those_of_fisher_scoring(family):
    """Every iteration of statsmodels' generalised linear models, from the same start."""
    import statsmodels.api as sm

    x = np.concatenate([np.asarray(normal(1, 40, 3)), np.ones((40, 1))], axis=1)
    eta = x @ np.array([0.4, -0.3, 0.2, 0.1])
    kinds = {
        "Poisson": sm.families.Poisson(),
        "Bernoulli": sm.families.Binomial(),
        "GaussianMean": sm.families.Gaussian(),
    }
    rng = np.random.default_rng(0)
    y = {
        "Poisson": lambda: rng.poisson(np.exp(eta)).astype(float),
        "Bernoulli": lambda: (rng.random(40) < 1 / (1 + np.exp(-eta))).astype(float),
        "GaussianMean": lambda: eta + rng.normal(size=40),
    }[family]()
    start = np.zeros(4)
    ours = ng.GaussianMean(1.0) if family == "GaussianMean" else getattr(ng, family)()
    opt = ng.NaturalGradient(
        lambda w, x: x @ w, ours, ng.Exact(ng.Cholesky()), ng.ConstantDamping(0.0), step=ng.ConstantStep(1.0)
    )
    w = jnp.asarray(start)
    step, state = compiled_step(opt), opt.init(w, (jnp.asarray(x), jnp.asarray(y)))
    glm = sm.GLM(y, x, family=kinds[family])
    for count in range(1, 5):
        w, state, _ = step(w, state, (jnp.asarray(x), jnp.asarray(y)))
        expected = glm.fit(start_params=start, maxiter=count, tol=0.0, tol_criterion="params").params
        np.testing.assert_allclose(w, expected, rtol=1e-8, atol=1e-8)


def test_the_quadratic_model_is_exact_and_knows_the_minimum_of_a_quadratic():
    x, y = normal(1, 20, 4), normal(2, 20, 2)
    params = {"w": normal(3, 4, 2), "b": normal(4, 2)}
    linear = lambda params, x: affine(x, **params)
    opt = ng.NaturalGradient(linear, ng.LeastSquares(), ng.Exact(), ng.LevenbergMarquardt(initial=1e-9, every=1))
    step, state = compiled_step(opt), opt.init(params, (x, y))
    moved, state, info = step(params, state, (x, y))
    np.testing.assert_allclose([info.step_size, info.momentum, info.cosine], [1.0, 0.0, 1.0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(info.actual_decrease / info.predicted_decrease, 1.0, rtol=1e-8)
    change = ravel(moved) - ravel(params)
    matrix = ng.pullback(linear, ng.Euclidean(), params, x).as_matrix()
    np.testing.assert_allclose(info.predicted_divergence, change @ matrix @ change / 2, rtol=1e-8)
    order = jax.random.permutation(jax.random.key(0), 20)
    _, _, shuffled = step(params, opt.init(params, (x, y)), (x[order], y[order]))
    np.testing.assert_allclose(shuffled.predicted_decrease, info.predicted_decrease, rtol=1e-8)


def test_step_size_and_momentum_minimise_the_quadratic_model():
    params, (x, y) = classifier_problem()
    opt = ng.NaturalGradient(classifier, ng.Categorical(), ng.KFAC(), ng.ConstantDamping(0.1))
    step, state = compiled_step(opt), opt.init(params, (x, y))
    before, state, _ = step(params, state, (x, y))
    after, new, info = step(before, state, (x, y))
    gradient = ravel(loss_gradient(before, x, y))
    matrix = np.asarray(metric_matrix(ng.Exact, before, x)) + 0.1 * np.eye(31)
    last, change = ravel(before) - ravel(params), ravel(after) - ravel(before)
    direction = (change - info.momentum * last) / info.step_size
    basis = np.stack([direction, last], axis=1)
    expected = np.linalg.solve(basis.T @ matrix @ basis, -basis.T @ gradient)
    np.testing.assert_allclose([info.step_size, info.momentum], expected, rtol=1e-6)
    assert abs(info.momentum) > 1e-3


def test_spring_stays_close_to_the_last_update():
    params, (x, y) = classifier_problem()
    opt = ng.NaturalGradient(
        classifier,
        ng.Categorical(),
        ng.Exact(),
        ng.ConstantDamping(0.1),
        step=ng.ConstantStep(1.0),
        momentum=ng.Spring(0.9),
    )
    step, state = compiled_step(opt), opt.init(params, (x, y))
    before, state, _ = step(params, state, (x, y))
    after, *_ = step(before, state, (x, y))
    last = ravel(before) - ravel(params)
    matrix = np.asarray(metric_matrix(ng.Exact, before, x))
    gradient = ravel(loss_gradient(before, x, y))
    kept = 0.9 * last
    expected = kept - np.linalg.solve(matrix + 0.1 * np.eye(31), gradient + matrix @ kept)
    np.testing.assert_allclose(ravel(after) - ravel(before), expected, rtol=1e-7, atol=1e-9)


def test_clipped_steps_move_no_further_than_the_radius():
    params, (x, y) = classifier_problem()
    make = lambda radius: ng.NaturalGradient(
        classifier,
        ng.Categorical(),
        ng.Exact(),
        ng.ConstantDamping(0.1),
        step=ng.ConstantStep(1.0) if radius is None else ng.KLClip(radius),
        momentum=ng.NoMomentum(),
    )
    free, _, _ = one_step(make(None), params, (x, y))
    loose, _, info = one_step(make(1e3), params, (x, y))
    np.testing.assert_array_equal(ravel(loose), ravel(free))
    tight, _, info = one_step(make(1e-3), params, (x, y))
    change, whole = ravel(tight) - ravel(params), ravel(free) - ravel(params)
    gradient = ravel(loss_gradient(params, x, y))
    # Half the squared length of the whole step is half its product with the gradient.
    np.testing.assert_allclose(-info.step_size * (gradient @ change) / 2, 1e-3, rtol=1e-6)
    np.testing.assert_allclose(change, info.step_size * whole, rtol=1e-8)


def test_steps_are_as_long_as_new_batches_agree():
    """Four batches, against dense algebra; and with a radius that is too small for what they say."""
    params, (x, y) = classifier_problem()
    batches = [(x[k : k + 3], y[k : k + 3]) for k in (0, 3, 6, 9)]
    mean = lambda values: np.average(values, axis=0, weights=0.8 ** np.arange(len(values))[::-1])
    for radius in (1e3, 1e-6):
        rule = ng.CrossValidated(0.8, patience=0.5, radius=radius)
        opt = ng.NaturalGradient(classifier, ng.Categorical(), ng.Exact(), ng.ConstantDamping(0.1), step=rule)
        w, state, step = params, opt.init(params, batches[0]), compiled_step(opt)
        directions, cosines, length, size = [], [], 1.0, 0.0
        for batch in batches:
            g = ravel(loss_gradient(w, *batch))
            matrix = metric_matrix(ng.Exact, w, batch[0])
            matrix = np.asarray(matrix) + 0.1 * np.eye(len(g))
            natural = np.linalg.solve(matrix, g)
            own = np.sqrt(g @ natural)
            if directions:
                cosines.append(0.5 * (g @ mean(directions)) / (own * length))
            directions.append(natural)
            length = np.sqrt(mean(directions) @ matrix @ mean(directions))
            size = min(max(mean(cosines), 0) * own, np.sqrt(2 * radius)) / length if cosines else 0.0
            after, state, info = step(w, state, batch)
            np.testing.assert_allclose(info.step_size, size, rtol=1e-7)
            taken = size * mean(directions)
            moved = taken @ matrix @ taken - 0.1 * taken @ taken
            np.testing.assert_allclose(info.predicted_divergence, moved / 2, rtol=1e-7, atol=1e-15)
            np.testing.assert_allclose(ravel(after) - ravel(w), -size * mean(directions), rtol=1e-7, atol=1e-12)
            w = after
        assert 0 < size < 1


def test_steps_are_whole_without_noise_and_short_where_all_is_noise():
    """Least squares from its minimum and away from it, on batches that agree and on batches that do not."""
    x, noise = normal(1, 400, 3), normal(2, 400)
    noise = noise - x @ jnp.linalg.lstsq(x, noise)[0]
    opt = ng.NaturalGradient(
        lambda w, x: x @ w, ng.LeastSquares(), ng.Exact(), ng.ConstantDamping(1e-9), step=ng.CrossValidated(radius=1e9)
    )
    w = jnp.ones(3)
    state, step = opt.init(w, (x, noise)), compiled_step(opt)
    for expected in (0.0, 1.0):
        w, state, info = step(w, state, (x, noise))
        np.testing.assert_allclose(info.step_size, expected, rtol=1e-6)
    np.testing.assert_allclose(w, 0.0, atol=1e-6)

    w, sizes = jnp.zeros(3), []
    rows = np.random.default_rng(0).integers(0, 400, (60, 8))
    state = opt.init(w, (x[:8], noise[:8]))
    for chosen in rows:
        w, state, info = step(w, state, (x[chosen], noise[chosen]))
        sizes.append(float(info.step_size))
    assert np.mean(sizes[10:]) < 0.2


def test_an_average_that_batches_speak_against_is_begun_anew():
    opt = ng.NaturalGradient(
        lambda w, x: x * w, ng.LeastSquares(), ng.Exact(), ng.ConstantDamping(1e-3), step=ng.CrossValidated(radius=1e-3)
    )
    w, x = jnp.zeros(()), jnp.ones(4)
    state, step = opt.init(w, (x, x)), compiled_step(opt)
    for target in [1000.0] * 4 + [-1.0] * 14:
        w, state, info = step(w, state, (x, target * x))
    # Averaged with those of the first batches, it would still be above 100.
    assert -2 < state.rule.direction[0] < 0
    assert info.step_size > 0


@pytest.mark.slow
def test_huge_natural_gradients_at_first_do_not_lead_past_the_minimum():
    """A rate that is far too small, whose natural gradient is huge and the metric small."""
    rate = lambda w, x: w + jnp.zeros_like(x)
    opt = ng.NaturalGradient(rate, ng.Poisson(), ng.Exact(), step=ng.CrossValidated())
    w, batch = jnp.asarray(-5.0), (jnp.zeros(4), jnp.asarray([0.0, 1.0, 1.0, 2.8]))
    state, step = opt.init(w, batch), compiled_step(opt)
    accepted = []
    for _ in range(50):
        w, state, info = step(w, state, batch)
        accepted.append(bool(info.accepted))
    assert not all(accepted[:10]) and all(accepted[10:])
    np.testing.assert_allclose(w, np.log(1.2), atol=0.02)


def test_trust_regions_hold_in_the_true_divergence():
    params, (x, y) = classifier_problem()
    for radius in (1e-4, 0.3):
        opt = ng.NaturalGradient(
            classifier,
            ng.Categorical(),
            ng.Exact(),
            ng.ConstantDamping(1e-3),
            step=ng.TrustRegion(radius, learning_rate=5.0),
        )
        moved, _, info = one_step(opt, params, (x, y))
        achieved = ng.function_distance(classifier, ng.Fisher(ng.Categorical()), params, moved, x)
        assert achieved <= radius * (1 + 2e-3) and info.loss_after <= info.loss
        np.testing.assert_allclose(info.divergence, achieved, rtol=1e-8)
        np.testing.assert_allclose(info.loss_after, loss(moved, x, y), rtol=1e-10)
        if radius < 1e-3:  # For short steps, what was predicted is what is achieved.
            np.testing.assert_allclose(info.predicted_divergence, info.divergence, rtol=0.1)


@pytest.mark.slow
def test_line_searches_find_what_they_look_for():
    params, (x, y) = classifier_problem()
    make = lambda rule: ng.NaturalGradient(
        classifier, ng.Categorical(), ng.Exact(), ng.ConstantDamping(0.01), step=rule
    )
    sizes = (4.0, 1.0, 0.25)
    free, _, _ = one_step(make(ng.ConstantStep(1.0)), params, (x, y))
    along = lambda size: jax.tree.map(lambda a, b: a + size * (b - a), params, free)
    losses = [float(loss(along(size), x, y)) for size in sizes]
    _, _, info = one_step(make(ng.GridLineSearch(sizes)), params, (x, y))
    assert float(info.step_size) == sizes[int(np.argmin(losses))]
    np.testing.assert_allclose(info.loss_after, min(losses), rtol=1e-10)
    rule = ng.ArmijoLineSearch(initial=64.0, sufficient=0.3)
    moved, _, info = one_step(make(rule), params, (x, y))
    slope = ravel(loss_gradient(params, x, y)) @ (ravel(free) - ravel(params))
    enough = lambda size: loss(along(size), x, y) <= info.loss + 0.3 * size * slope
    assert bool(enough(float(info.step_size))) and not bool(enough(2 * float(info.step_size)))


@pytest.mark.slow
def test_terms_add_losses_and_metrics():
    params, (x, y) = classifier_problem()
    x2, y2 = normal(9, 7, 3), normal(10, 7, 3)
    problem = ng.Terms(
        labels=ng.Term(classifier, ng.Categorical()), fit=ng.Term(classifier, ng.LeastSquares(), weight=0.3)
    )
    data = {"labels": (x, y), "fit": (x2, y2)}
    total = lambda params: loss(params, x, y) + 0.3 * jnp.mean(jnp.sum((classifier(params, x2) - y2) ** 2, axis=1)) / 2
    value, gradient = jax.value_and_grad(total)(params)
    metrics = {
        "exact": ng.pullback(classifier, ng.Fisher(ng.Categorical()), params, x)
        + 0.3 * ng.pullback(classifier, ng.Euclidean(), params, x2),
        "diagonal": ng.diagonal(classifier, ng.Fisher(ng.Categorical()), params, x)
        + 0.3 * ng.diagonal(classifier, ng.Euclidean(), params, x2),
    }
    for name, metric in metrics.items():
        opt = ng.NaturalGradient(
            problem, structure=STRUCTURES[name](), damping=ng.ConstantDamping(0.1), step=ng.ConstantStep(1.0)
        )
        found, _, info = one_step(opt, params, data)
        expected = ravel(params) - np.linalg.solve(np.asarray(metric.as_matrix()) + 0.1 * np.eye(31), ravel(gradient))
        np.testing.assert_allclose(ravel(found), expected, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(info.loss, value, rtol=1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("structure", [ng.KFAC, ng.EKFAC])
def test_factors_of_terms_have_the_traces_of_their_sum(structure):
    params, (x, y) = classifier_problem()
    problem = ng.Terms(
        labels=ng.Term(classifier, ng.Categorical()), fit=ng.Term(classifier, ng.LeastSquares(), weight=0.3)
    )
    opt = ng.NaturalGradient(problem, structure=structure(), damping=ng.ConstantDamping(0.1), step=ng.ConstantStep(0.1))
    data = {"labels": (x, y), "fit": (normal(9, 7, 3), None)}
    _, state, _ = one_step(opt, params, data)
    trace = lambda geometry: lambda params, x: ng.kfac(classifier, geometry, params, x).trace()
    first = jax.jit(trace(ng.Fisher(ng.Categorical())))(params, x)
    second = jax.jit(trace(ng.Euclidean()))(params, data["fit"][0])
    np.testing.assert_allclose(state.structure.average.total.trace(), first + 0.3 * second, rtol=1e-10)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["exact", "diagonal", "kfac"])
def test_a_weight_of_two_is_an_example_given_twice(name):
    params, (x, y) = classifier_problem()
    opt = ng.NaturalGradient(
        classifier, ng.Categorical(), STRUCTURES[name](), ng.ConstantDamping(0.1), step=ng.ConstantStep(1.0)
    )
    weights = jnp.ones(12).at[3].set(2.0).at[5].set(0.0)
    index = np.array([0, 1, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11])
    weighed, _, info = one_step(opt, params, (x, y, weights))
    repeated, _, plain = one_step(opt, params, (x[index], y[index]))
    np.testing.assert_allclose(ravel(weighed), ravel(repeated), rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(info.loss, plain.loss, rtol=1e-12)


def test_micro_batches_change_nothing_but_the_metric():
    params, (x, y) = classifier_problem()
    make = lambda count: ng.NaturalGradient(
        classifier,
        ng.Categorical(),
        ng.KFAC(),
        ng.ConstantDamping(1e12),
        step=ng.ConstantStep(1e12),
        micro_batches=count,
    )
    whole, _, info = one_step(make(1), params, (x, y))
    for count in (5,):
        found, _, own = one_step(make(count), params, (x, y))
        np.testing.assert_allclose(ravel(found), ravel(whole), rtol=1e-5)
        np.testing.assert_allclose(own.loss, info.loss, rtol=1e-12)


def test_factors_are_averaged_and_inverted_when_they_are_due():
    params, (x, y) = classifier_problem()
    structure = ng.KFAC(decay=0.8, refresh_every=4, update_every=2)
    opt = ng.NaturalGradient(
        classifier, ng.Categorical(), structure, ng.ConstantDamping(0.1), step=ng.ConstantStep(0.01)
    )
    step, state = compiled_step(opt), opt.init(params, (x, y))
    weights, inverses = [], []
    for _ in range(9):
        params, state, _ = step(params, state, (x, y))
        weights.append(float(state.structure.average.weight))
        inverses.append(np.asarray(jax.tree.leaves(state.structure.inverse)[0]))
    expected = [1.0, 1.8, 2.44, 2.44, 2.952, 2.952, 3.3616, 3.3616, 3.68928]
    np.testing.assert_allclose(weights, expected, rtol=1e-12)
    factors, traces = state.structure.average.total.operator, state.structure.traces.total
    np.testing.assert_allclose(traces, factors.traces(), rtol=1e-12)
    np.testing.assert_allclose(factors.trace(traces), np.trace(factors.as_matrix()), rtol=1e-12)
    changes = [count for count in range(1, 9) if not np.array_equal(inverses[count], inverses[count - 1])]
    assert changes == [1, 2, 4, 8]


@pytest.mark.slow
def test_staggered_blocks_take_turns():
    params, (x, y) = classifier_problem()
    structure = ng.KFAC(refresh_every=4, stagger=True)
    opt = ng.NaturalGradient(
        classifier, ng.Categorical(), structure, ng.ConstantDamping(0.1), step=ng.ConstantStep(0.01)
    )
    step, state = compiled_step(opt), opt.init(params, (x, y))
    seen = []
    for _ in range(13):
        params, state, _ = step(params, state, (x, y))
        seen.append([np.asarray(block.A) for block in state.structure.inverse.blocks])
    changed = lambda k: [n for n in range(5, 13) if not np.array_equal(seen[n][k], seen[n - 1][k])]
    assert sorted([changed(0), changed(1)]) == [[6, 10], [8, 12]]


# Inner solves -------------------------------------------------------------------------------------------


@pytest.mark.users_defaults
@pytest.mark.slow
def test_an_inner_solve_goes_to_the_minimum_of_the_linearised_loss():
    """Of a linear model that is the minimum itself, in one step, with and without `l2`; Gauss-Newton takes many."""
    x, w = normal(1, 40, 3), jnp.zeros(3)
    y = (x @ jnp.array([1.0, -2.0, 0.5]) + normal(2, 40) > 0).astype(float)
    linear = lambda w, x: x @ w
    for l2 in (0.0, 0.1):
        make = lambda structure, l2=l2: ng.NaturalGradient(
            linear, ng.Bernoulli(), structure, ng.ConstantDamping(0.0), step=ng.ConstantStep(1.0), penalty=ng.L2(l2)
        )
        cost = lambda w, l2=l2: jnp.mean(jax.nn.softplus(x @ w) - y * (x @ w)) + l2 / 2 * w @ w
        moved, _, info = one_step(make(ng.InnerSolve(optax.lbfgs(), num_steps=40)), w, (x, y))
        assert info.accepted and np.linalg.norm(jax.grad(cost)(moved)) < 1e-6
        assert cost(moved) < cost(one_step(make(ng.Exact()), w, (x, y))[0]) - 1e-5


@pytest.mark.users_defaults
@pytest.mark.slow
def test_inner_solves_of_networks_lower_the_loss_and_follow_given_gradients():
    params, (x, y) = classifier_problem()
    opt = ng.NaturalGradient(classifier, ng.Categorical(), ng.InnerSolve(optax.adam(0.1), 5), step=ng.ConstantStep(1.0))
    assert isinstance(opt.damping, ng.NoDamping)
    w, state, step = params, opt.init(params, (x, y)), compiled_step(opt)
    losses = []
    for _ in range(8):
        w, state, info = step(w, state, (x, y))
        losses.append(float(info.loss))
    assert losses[-1] < 0.3 * losses[0]
    # Against the gradient of something else, the inner problem starts downhill of that.
    other = jax.tree.map(jnp.ones_like, params)
    gentle = ng.NaturalGradient(
        classifier, ng.Categorical(), ng.InnerSolve(optax.sgd(1e-3), 1), step=ng.ConstantStep(1.0)
    )
    change, _, _ = jax.jit(gentle.update)(other, gentle.init(params, (x, y)), params, (x, y))
    np.testing.assert_allclose(ravel(change), -1e-3, rtol=1e-9)


@pytest.mark.users_defaults
def test_inner_solves_that_diverge_are_not_taken():
    x, w = normal(1, 40, 3), jnp.ones(3)
    opt = ng.NaturalGradient(
        lambda w, x: x @ w, ng.LeastSquares(), ng.InnerSolve(optax.sgd(300.0), 20), step=ng.ConstantStep(1.0)
    )
    stays, _, info = one_step(opt, w, (x, jnp.zeros(40)))
    assert not info.accepted and info.result == ng.STEP_RESULTS.inner_diverged
    np.testing.assert_array_equal(stays, w)
