"""Comparisons: equal budgets, recommended code that does what was measured, and the geometry of dense matrices."""

import itertools
import math
import re
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import natgrad as ng
from natgrad.experiment import verdict as judgement
from natgrad.experiment.compare import Comparison, MethodRuns, TrialBudget, compare
from natgrad.experiment.document import document
from natgrad.experiment.examination import Examination
from natgrad.experiment.methods import METHODS, FirstOrder
from natgrad.experiment.run import CompiledMethod, Reading, Run

pytestmark = pytest.mark.users_defaults


def model(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


def classes(batch_size=None, **options) -> ng.Problem:
    """Three classes of 30 points in the plane, five of which are held out."""
    x = jax.random.normal(jax.random.key(0), (30, 2))
    y = jnp.argmax(x @ jax.random.normal(jax.random.key(1), (2, 3)), axis=-1)
    params = {"in": jax.random.normal(jax.random.key(2), (2, 6)), "out": jax.random.normal(jax.random.key(3), (6, 3))}
    data, held_out = (x[:25], y[:25]), (x[25:], y[25:])
    return ng.Problem(model, ng.Categorical(), params, data, batch_size=batch_size, held_out=held_out, **options)


def chosen(*names: str) -> list:
    return [METHODS[name] for name in names]


# Problems ------------------------------------------------------------------------------------------------------------


def test_an_epoch_sees_every_example_once_in_an_order_that_depends_on_the_seed():
    problem = classes(batch_size=7)
    for seed, epoch in itertools.product((0, 5), (0, 3)):
        rows = np.concatenate([problem.rows(3 * epoch + k, seed) for k in range(3)])
        assert len(set(rows.tolist())) == 21 and rows.max() < 25
    assert not np.array_equal(problem.rows(0, 0), problem.rows(0, 1))
    assert not np.array_equal(problem.rows(0, 0), problem.rows(3, 0))
    x, y = problem.batch(2, seed=4)
    np.testing.assert_array_equal(y, problem.data[1][problem.rows(2, 4)])


def test_scores():
    problem = classes()
    score = problem.score(problem.params, problem.shown(), problem.held_out)
    x, y = problem.held_out
    z = np.asarray(model(problem.params, x))
    probabilities = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(score.held_out_loss, -np.log(probabilities[np.arange(5), y]).mean(), rtol=1e-9)
    np.testing.assert_allclose(score.metrics["accuracy"], (z.argmax(axis=1) == y).mean())


def test_minimal_labels_and_residuals_are_judged_too():
    own = classes()
    less = lambda params, x: model(params, x)[:, :2] - model(params, x)[:, 2:]
    minimal = ng.Problem(less, ng.MinimalCategorical(), own.params, own.data)
    scores = [each.score(each.params, each.data, None) for each in (own, minimal)]
    np.testing.assert_allclose(scores[0].metrics["accuracy"], scores[1].metrics["accuracy"])
    np.testing.assert_allclose(scores[0].loss, scores[1].loss, rtol=1e-9)
    y = jax.random.normal(jax.random.key(9), (25, 3))
    squares = ng.Problem(model, ng.LeastSquares(), own.params, (own.data[0], y))
    explained = squares.score(own.params, squares.data, None).metrics["explained variance"]
    residual = y - model(own.params, own.data[0])
    np.testing.assert_allclose(explained, 1 - np.square(residual).sum() / np.square(y - y.mean(axis=0)).sum())
    line = ng.Problem(lambda w, x: x @ w, ng.LeastSquares(), jnp.ones((2, 1)), (own.data[0], own.data[0].sum(axis=1)))
    assert line.score(line.params, line.data, None).metrics["explained variance"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(steps=0), "a whole number above 0 for `steps`, but got 0"),
        (dict(metrics={"each": lambda z, y: z[:, 0]}), r"the metric `each` must be one number .* has shape \(25,\)"),
        (dict(steps=None), "a whole number above 0 for `steps`, but got None"),
        (dict(batch_size=5.0), "a whole number above 0 for `batch_size`, but got 5.0"),
        (dict(data=(jnp.array([[1.0, jnp.nan]]), jnp.array([0]))), r"`data\[0\]` with 1 of its 2 entries not finite"),
        (dict(held_out=(jnp.array([[jnp.inf, 1.0]]), jnp.array([0]))), r"`held_out\[0\]` with 1 of its 2 entries"),
        (dict(params={"in": jnp.ones((2, 6), int)}), "floating-point arrays"),
        (dict(data=jnp.ones(3)), r"must be `\(x, y\)`"),
    ],
)
def test_problems_that_cannot_work(change, match):
    own = classes()
    given = dict(params=own.params, data=own.data) | change
    with pytest.raises((ValueError, TypeError), match=match):
        ng.Problem(model, ng.Categorical(), given.pop("params"), given.pop("data"), **given)


def test_batches_of_terms_cannot_be_cut():
    own = classes()
    terms = ng.Terms(one=ng.Term(model, ng.Categorical()), two=ng.Term(model, ng.Categorical()))
    with pytest.raises(ValueError, match="^`Problem` cannot split the data of `Terms`"):
        ng.Problem(terms, None, own.params, {"one": own.data, "two": own.data}, batch_size=5)


def test_problems_are_immutable_trees_whose_methods_compile():
    problem = classes()
    with pytest.raises(AttributeError):
        problem.steps = 3
    loss = problem.loss(problem.params, problem.data)
    np.testing.assert_allclose(jax.jit(problem.loss)(problem.params, problem.data), loss, rtol=1e-6)
    scaled = eqx.tree_at(lambda problem: problem.params["out"], problem, 0 * problem.params["out"])
    uniform = eqx.filter_jit(lambda problem: problem.loss(problem.params, problem.data))(scaled)
    np.testing.assert_allclose(uniform, np.log(3), rtol=1e-6)


def test_what_a_model_returns_besides_its_outputs_is_ignored():
    own = classes()
    term = ng.Term(lambda params, x: (model(params, x), {"inputs": x}), ng.Categorical(), has_aux=True)
    problem = ng.Problem(term, None, own.params, own.data)
    assert problem.score(own.params, own.data, None) == own.score(own.params, own.data, None)
    code = METHODS["kfac"].code(problem, {}).format(steps=1, seed=0)
    names = {"problem": problem, "ng": ng, "jax": jax}
    exec(code, names)
    np.testing.assert_array_equal(names["info"].aux["inputs"], own.data[0])


# Geometry ------------------------------------------------------------------------------------------------------------


def dense_metric(problem: ng.Problem) -> np.ndarray:
    return np.asarray(ng.pullback(model, ng.Fisher(ng.Categorical()), problem.params, problem.data[0]).as_matrix())


@pytest.mark.compat
def test_geometry_is_that_of_dense_matrices():
    problem = classes()
    examination = Examination(problem, {"K-FAC": ng.KFAC()})
    examination.look("at the start", 0, problem.params)
    geometry = examination.geometry()
    (point,), metric = geometry.points, dense_metric(problem)
    values = np.linalg.eigvalsh(metric)[::-1]
    np.testing.assert_allclose(point.spectrum, np.maximum(values, 0), atol=1e-12)
    assert (point.rank, point.nullity) == (np.sum(values > point.cutoff), 30 - point.rank)
    # A constant added to all logits changes nothing, and so do six directions of the output weights.
    assert point.rank == 24 and not point.is_limited_by_examples and point.is_proper

    by_name = {each.structure: each for each in geometry.approximations}
    assert set(by_name) == {"exact", "gradient", "K-FAC"}
    damped = metric + geometry.damping[0] * np.eye(30)
    gradient = jax.grad(problem.loss)(problem.params, problem.data)
    flat, _ = jax.flatten_util.ravel_pytree(gradient)
    exact = -np.linalg.solve(damped, flat)
    cosine = -(exact @ damped @ flat) / np.sqrt((exact @ damped @ exact) * (flat @ damped @ flat))
    np.testing.assert_allclose(by_name["gradient"].angle, np.degrees(np.arccos(cosine)), rtol=1e-6)
    np.testing.assert_allclose(by_name["exact"].predicted_decrease, -(exact @ flat) / 2, rtol=1e-6)
    assert by_name["exact"].angle < 1e-3 and by_name["exact"].norm == pytest.approx(1)
    # Scaled to its best length, a step is predicted to gain the squared cosine of what the exact one does.
    for each in geometry.approximations:
        gain = np.cos(np.radians(each.angle)) ** 2 * by_name["exact"].predicted_decrease
        np.testing.assert_allclose(each.predicted_decrease, gain, rtol=1e-5)
    assert {row.path: row.structure for row in geometry.structure} == {
        "params['in']": "kronecker",
        "params['out']": "kronecker",
    }


def test_approximations_that_are_missing_say_why(monkeypatch):
    problem = classes()
    examination = Examination(problem, {"K-FAC": ng.KFAC()})

    def refused(structure, params, deadline):
        raise ValueError("no such thing")

    monkeypatch.setattr(examination, "_compiled_step", refused)
    examination.look("at the start", 0, problem.params)
    (missing,) = examination.geometry().approximations
    assert (missing.structure, missing.note) == ("exact", "no such thing") and math.isnan(missing.angle)


def test_points_that_are_not_proper():
    problem = ng.Problem(
        lambda params, x: x * params["a"] * params["b"],
        ng.LeastSquares(),
        {"a": jnp.zeros(()), "b": jnp.zeros(())},
        (jnp.ones((4, 1)), jnp.ones((4, 1))),
    )
    examination = Examination(problem, {})
    examination.look("at the start", 0, problem.params)
    examination.look("elsewhere", 1, {"a": jnp.ones(()), "b": jnp.ones(())})
    start, elsewhere = examination.geometry().points
    assert (start.rank, start.nullity, start.is_proper, start.condition) == (0, 2, False, None)
    assert (elsewhere.rank, elsewhere.nullity, elsewhere.is_proper) == (1, 1, True)


# Runs ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def comparison():
    # Runs of hundreds of roundings: only in double precision are they the same once more.
    with jax.enable_x64(True):
        return compare(classes(batch_size=10), TrialBudget(20), methods=chosen("kfac", "adam"), seed=3)


@pytest.mark.slow
@pytest.mark.compat
def test_every_run_has_the_same_budget(comparison):
    assert comparison.status == "complete"
    runs = [run for outcome in comparison.outcomes for run in outcome.runs]
    assert len(runs) >= 6
    for run in runs:
        assert run.steps == 20 and run.status == "complete"
        assert [point.step for point in run.curve] == list(range(21))
        assert all(a.seconds < b.seconds for a, b in itertools.pairwise(run.curve))


def test_recommended_code_does_what_was_measured(comparison):
    problem_code = "from own import problem\n"
    for each in judgement.contenders(comparison, None):
        written = judgement._recommend("", each, problem_code).code
        assert problem_code in written
        names = {"problem": comparison.problem}
        exec(written.replace(problem_code, ""), names)
        loss = comparison.problem.loss(names["params"], comparison.problem.data)
        np.testing.assert_allclose(loss, each.run.curve[-1].loss, rtol=1e-6)


def test_other_numbers_of_an_optimiser_compile_nothing():
    traces = []

    def counted(params, x):
        traces.append(x.shape)
        return model(params, x)

    own = classes()
    problem = ng.Problem(counted, ng.Categorical(), own.params, own.data)
    method = METHODS["kfac"]
    program = CompiledMethod.compile(method, problem, seed=0)
    for decay in (0.9, 0.5):
        run = Run(program, {}, problem, seed=0)
        opt = eqx.tree_at(lambda opt: opt.damping.decay, method.optimiser(problem), jnp.asarray(decay))
        run.numbers = eqx.filter(opt, eqx.is_array)
        traces.clear()
        first, *_, last = (run.advance().damping for _ in range(opt.damping.every + 1))
        assert not traces
        # Steps on all data are predicted well, so that damping decays.
        np.testing.assert_allclose(last / first, decay**opt.damping.every, rtol=1e-5)


def test_an_interruption_leaves_runs_equally_far():
    def interrupt(progress):
        if progress.stage == "training" and progress.done > 0.5:
            raise KeyboardInterrupt

    found = compare(classes(), TrialBudget(50), methods=chosen("adam", "sgd"), watch=interrupt)
    steps = [run.steps for outcome in found.outcomes for run in outcome.runs]
    assert found.status == "interrupted" and 20 < min(steps) and max(steps) - min(steps) <= 1
    report = document(found, command="compare", problem_code="")
    assert [each["status"] for each in report["methods"]] == ["interrupted"] * 2


def test_a_method_that_fails_on_its_way_leaves_the_others_alone(monkeypatch):
    advance = Run.advance

    def failing(run):
        if run.steps == 3 and run.settings["learning_rate"] == 0.01:
            raise RuntimeError("out of memory")
        return advance(run)

    monkeypatch.setattr(Run, "advance", failing)
    (found,) = compare(classes(), TrialBudget(10), methods=chosen("adam")).outcomes
    failed = {run.settings["learning_rate"]: (run.steps, run.note) for run in found.runs if run.status == "failed"}
    assert failed == {0.01: (3, "out of memory")}
    assert {run.steps for run in found.runs if run.status == "complete"} == {10}


def test_seconds_are_shared_and_methods_without_time_are_named(monkeypatch):
    # A clock that advances by a millisecond whenever it is read, however busy the machine is.
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) / 1000)
    start = time.perf_counter()
    found = compare(classes(), TrialBudget(None, 3.0, start), methods=chosen("adam"))
    seconds = [run.seconds for run in found.outcomes[0].runs]
    assert max(seconds) < 3 and min(run.steps for run in found.outcomes[0].runs) > 0
    late = compare(classes(), TrialBudget(None, 3.0, start - 2.5), methods=chosen("kfac", "adam"))
    assert [(each.status, each.note) for each in late.outcomes] == [
        ("not run", "There was no time left to compile it.")
    ] * 2


@pytest.mark.slow
def test_sweeps_go_on_beyond_their_ends():
    own = classes()
    steep = ng.Problem(lambda w, x: 30 * w * x, ng.LeastSquares(), jnp.ones(()), (jnp.ones(5), jnp.zeros(5)))
    rates = lambda problem, sweep: [
        run.settings["learning_rate"]
        for run in compare(problem, TrialBudget(10), methods=[FirstOrder("SGD", optax.sgd, sweep, "")]).outcomes[0].runs
    ]
    # The best rate is 1/900.
    assert rates(steep, (0.01, 0.03)) == pytest.approx([0.0003, 0.001, 0.003, 0.01, 0.03])
    assert rates(steep, (1e-4, 3e-4)) == pytest.approx([1e-4, 3e-4, 1e-3, 3e-3])
    assert len(rates(own, (1e-9, 3e-9))) == 6
    # Where all diverge, lower ones are settings.
    steepest = ng.Problem(lambda w, x: 1e15 * w * x, ng.LeastSquares(), jnp.ones(()), (jnp.ones(5), jnp.zeros(5)))
    assert rates(steepest, (1.0, 3.0)) == pytest.approx([0.01, 0.03, 0.1, 0.3, 1.0, 3.0])


def test_methods_that_are_too_large_are_refused_with_a_reason():
    wide = ng.Problem(
        lambda w, x: x @ w, ng.LeastSquares(), jnp.zeros((50, 50)), (jnp.ones((100, 50)), jnp.ones((100, 50)))
    )
    assert "2,500 parameters and 5,000 outputs a batch" in METHODS["exact"].refusal(wide)
    assert METHODS["exact"].refusal(classes()) is None and METHODS["kfac"].refusal(wide) is None


# Verdicts ------------------------------------------------------------------------------------------------------------


def outcome(name: str, *curves: list[tuple[int, float, float]], status="complete") -> MethodRuns:
    """A method whose runs went through these steps, seconds and losses."""
    method, runs = METHODS[name], []
    for settings, curve in zip(method.sweep, curves, strict=False):
        run = Run.__new__(Run)
        run.settings, run.status, run.note, run.problem, run.seed = settings, status, "", classes(), 0
        run.curve = [Reading(step, seconds, loss, None, {}) for step, seconds, loss in curve]
        run.steps, run.seconds = curve[-1][:2]
        runs.append(run)
    return MethodRuns(method, None, runs, status, "")


def verdict(*outcomes: MethodRuns) -> str:
    comparison = Comparison(classes(), TrialBudget(10), 0, list(outcomes), None, "complete", 1.0)
    return judgement.verdict(comparison, judgement.target_of(comparison))


SLOW_ADAM = outcome("adam", [(0, 0.0, 2.0), (50, 1.0, 1.0), (100, 2.0, 0.5)], [(0, 0.0, 2.0), (100, 2.0, 0.9)])


@pytest.mark.parametrize(
    ("natural", "match"),
    [
        (
            [(0, 0.0, 2.0), (10, 1.0, 0.4)],
            r"K-FAC is fastest: .* 0.5 in 10 steps and 1 s\. .* Adam \(learning",
        ),
        ([(0, 0.0, 2.0), (10, 1.0, 0.4)], "took 100 steps and 2 s, 2 times as long"),
        ([(0, 0.0, 2.0), (10, 1.0, 0.4), (20, 2.0, 1e-3)], r"K-FAC went on to a loss of 0.001\.$"),
        (
            [(0, 0.0, 2.0), (10, 2.1, 0.4)],
            "K-FAC and Adam are equally fast: K-FAC .* in 10 steps and 2.1 s",
        ),
        ([(0, 0.0, 2.0), (10, 4.0, 0.4)], "K-FAC needs fewer steps, Adam less time: K-FAC .* in 10 steps and 4 s"),
        ([(0, 0.0, 2.0), (100, 4.0, 0.4)], r"Adam \(learning rate 0.001\) is ahead: .* K-FAC took 100 steps and 4 s"),
        ([(0, 0.0, 2.0), (100, 1.0, 0.7)], "No natural-gradient method did; K-FAC came closest with 0.7"),
    ],
)
def test_verdicts(natural, match):
    text = verdict(outcome("kfac", natural), SLOW_ADAM)
    assert re.search(match, text), text


def test_verdicts_without_a_duel():
    lost = outcome("adam", [(0, 0.0, 2.0), (1, 1.0, math.nan)], status="diverged")
    assert "No run has a finite loss" in verdict(lost)
    won = outcome("kfac", [(0, 0.0, 2.0), (10, 1.0, 0.4)])
    assert verdict(won, lost) == "K-FAC has the lowest loss, 0.4 after 10 steps."
    worse = outcome("kfac", [(0, 0.0, 2.0), (10, 1.0, 0.4), (20, 2.0, 0.5)])
    assert verdict(worse) == "K-FAC has the lowest loss, 0.4 after 10 steps."
    idle = [outcome(name, [(0, 0.0, 2.0), (10, 1.0, 2.0)]) for name in ("kfac", "adam")]
    assert verdict(*idle) == "No method lowered the initial loss of 2."
    assert verdict(won, idle[1]) == (
        "K-FAC reached a loss of 0.4. No first-order method did; Adam (learning rate 0.001) came closest with 2."
    )


def test_verdicts_on_losses_below_zero():
    below = lambda name: outcome(name, [(0, 0.0, 0.0), (10, 1.0, -100.0)])
    assert "went on" not in verdict(below("kfac"), below("adam"))


def test_verdicts_on_held_out_data():
    both = [outcome(name, [(0, 0.0, 2.0), (10, 1.0, 0.4)]) for name in ("kfac", "adam")]
    run = both[0].runs[0]
    run.curve = [point._replace(held_out_loss=loss) for point, loss in zip(run.curve, (3.0, 5.0), strict=True)]
    assert verdict(*both).endswith("Best held-out loss: K-FAC, 3 at step 0.")


def test_an_interruption_of_the_last_look_keeps_the_first(monkeypatch):
    problem = classes()
    examination = Examination(problem, {})
    examination.look("at the start", 0, problem.params)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(examination, "_compare_steps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        examination.look("at the end", 1, problem.params)
    geometry = examination.geometry()
    assert len(geometry.points) == len(geometry.damping) == 1 and len(geometry.approximations) == 2


def test_the_target_may_be_given():
    comparison = Comparison(classes(), TrialBudget(10), 0, [SLOW_ADAM], None, "complete", 1.0)
    target = judgement.target_of(comparison, 1.0)
    (adam,) = judgement.contenders(comparison, target)
    both = comparison._replace(outcomes=[outcome("kfac", [(0, 0.0, 2.0), (9, 1.0, 0.7)]), SLOW_ADAM])
    assert judgement.verdict(both, judgement.target_of(both, 0.1)) == (
        "No method reached a loss of 0.1; Adam (learning rate 0.001) came closest with 0.5."
    )
    assert adam.reached == Reading(50, 1.0, 1.0, None, {}) and adam.run is SLOW_ADAM.runs[0]


def test_the_end_of_a_sweep_is_told():
    inside = outcome("sgd", *([(0, 0.0, 2.0), (9, 1.0, loss)] for loss in (1.0, 0.5, 1.0)))
    comparison = Comparison(classes(), TrialBudget(10), 0, [SLOW_ADAM, inside], None, "complete", 1.0)
    notes = [each["note"] for each in document(comparison, command="compare", problem_code="")["methods"]]
    assert notes == ["Its best learning rate, 0.001, is the smallest tried; a smaller one may be better.", ""]
