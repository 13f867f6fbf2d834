"""Numbers of an optimiser are leaves: another number compiles nothing, and a sweep is a `vmap`."""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from zoo import classifier, classifier_problem

import natgrad as ng


def optimiser(damping=0.1, rate=0.5, **options):
    options = {"structure": ng.Diagonal()} | options
    return ng.NaturalGradient(
        classifier, ng.Categorical(), damping=ng.ConstantDamping(damping), step=ng.ConstantStep(rate), **options
    )


def counted():
    """A compiled step that takes the optimiser as an argument, and how often it was traced."""
    traces = []

    @eqx.filter_jit
    def step(opt, params, state, batch):
        traces.append(None)
        return opt.step(params, state, batch)

    return step, traces


def test_other_numbers_compile_nothing():
    params, batch = classifier_problem()
    make = lambda damping, rate, decay, l2, threshold: optimiser(
        damping,
        rate,
        structure=ng.Diagonal(decay),
        momentum=ng.HeavyBall(decay),
        penalty=ng.L2({"params['first']": l2}),
        guard=ng.Rollback(threshold=threshold),
    )
    step, traces = counted()
    ends = []
    for numbers in ((0.1, 0.5, 0.9, 0.01, 3.0), (0.2, 0.3, 0.8, 0.02, 2.0), (1, 1, 0.5, 1, 4)):
        opt = make(*numbers)
        found = step(opt, params, opt.init(params, batch), batch)[0]
        assert_close(found, jax.jit(opt.step)(params, opt.init(params, batch), batch)[0], rtol=1e-9)
        ends.append(found)
    assert len(traces) == 1
    assert not np.allclose(ends[0]["first"]["w"], ends[1]["first"]["w"])
    # A count is part of the program.
    other = optimiser(micro_batches=2, momentum=ng.HeavyBall(0.5))
    step(other, params, other.init(params, batch), batch)
    assert len(traces) == 2


def test_other_weights_of_terms_compile_nothing():
    params, batch = classifier_problem()
    step, traces = counted()
    ends = []
    for weight in (0.5, 2.0):
        terms = ng.Terms(
            heavy=ng.Term(classifier, ng.Categorical(), weight), light=ng.Term(classifier, ng.Categorical())
        )
        exact = ng.Exact(ng.CG(1e-12, max_steps=200))
        opt = ng.NaturalGradient(terms, structure=exact, damping=ng.ConstantDamping(0.1))
        batches = {"heavy": batch, "light": batch}
        found, _, info = step(opt, params, opt.init(params, batches), batches)
        ends.append(found)
        single = ng.NaturalGradient(
            classifier,
            ng.Categorical(),
            exact,
            ng.ConstantDamping(0.1 / (1 + weight)),
        )
        expected, _, alone = jax.jit(single.step)(params, single.init(params, batch), batch)
        assert_close(info.loss, (1 + weight) * alone.loss, rtol=1e-12)
        assert_close(found, expected, rtol=1e-9)
    assert len(traces) == 1
    assert not np.allclose(ends[0]["first"]["w"], ends[1]["first"]["w"])


def test_the_method_itself_compiles_once_for_all_numbers():
    params, batch = classifier_problem()
    traces = []

    def model(params, x):
        traces.append(None)
        return classifier(params, x)

    for damping in (0.1, 0.2):
        opt = ng.NaturalGradient(
            model, ng.Categorical(), ng.Exact(), ng.ConstantDamping(damping), step=ng.ConstantStep(0.1)
        )
        state = opt.init(params, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch))
        before = len(traces)
        eqx.filter_jit(opt.step)(params, state, batch, None)
        assert (len(traces) > before) == (damping == 0.1)


def test_sweeps_are_ensembles():
    """Optimisers with different dampings and learning rates, at once and one by one, for three steps."""
    params, batch = classifier_problem()
    dampings, rates = jnp.asarray([0.05, 0.3, 2.0]), jnp.asarray([0.1, 0.5, 1.0])
    opts = eqx.filter_vmap(optimiser)(dampings, rates)
    state = optimiser().init(params, batch)

    def run(opt):
        now, own = params, state
        for _ in range(3):
            now, own, info = opt.step(now, own, batch)
        return now, info.loss

    together = eqx.filter_jit(eqx.filter_vmap(run))(opts)
    alone = [jax.jit(lambda d, r: run(optimiser(d, r)))(d, r) for d, r in zip(dampings, rates, strict=True)]
    assert_close(together, jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone), rtol=1e-9)


def test_numbers_promote_like_python_numbers():
    """In steps of single precision, with numbers made in double precision; arrays keep their type."""
    opt = optimiser(structure=ng.KFAC(), guard=ng.Rollback(threshold=2.0), penalty=ng.WeightDecay(0.1))
    numbers = jax.tree.leaves(eqx.filter(opt, eqx.is_array))
    assert len(numbers) >= 6 and all(leaf.weak_type and leaf.dtype == jnp.float64 for leaf in numbers)
    params, batch = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.float64 else leaf, classifier_problem()
    )
    after, _, _ = jax.eval_shape(opt.step, params, opt.init(params, batch), batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype(jnp.float32)}
    assert not ng.ConstantStep(jnp.float32(0.1)).learning_rate.weak_type


def test_no_damping_is_known_while_a_step_is_traced():
    """A constant of zero is no damping: a pseudo-inverse, not a factor of a singular matrix."""
    assert isinstance(optimiser(0.0).damping, ng.NoDamping)
    redundant = lambda w, x: x @ (w[:2] + w[2:])
    w, x = jnp.zeros(4), jnp.asarray(np.random.default_rng(0).normal(size=(8, 2)))
    y = x @ jnp.asarray([1.0, -2.0])
    ends = []
    for damping in (ng.NoDamping(), ng.ConstantDamping(0.0)):
        opt = ng.NaturalGradient(redundant, ng.LeastSquares(), ng.Exact(), damping, step=ng.ConstantStep(1.0))
        found, _, info = eqx.filter_jit(opt.step)(w, opt.init(w, (x, y)), (x, y), None)
        assert info.result == ng.STEP_RESULTS.successful and float(info.damping) == 0
        ends.append(found)
    np.testing.assert_allclose(ends[0], [0.5, -1.0, 0.5, -1.0], rtol=1e-9)
    np.testing.assert_array_equal(ends[0], ends[1])


def test_terms_keep_their_order_as_arguments_of_compiled_functions():
    """Their samples are drawn by place."""
    params, (x, y) = classifier_problem()
    terms = ng.Terms(z=ng.Term(classifier, ng.Categorical()), a=ng.Term(classifier, ng.LeastSquares()))
    opt = ng.NaturalGradient(terms, None, ng.Diagonal(), ng.ConstantDamping(0.1), step=ng.ConstantStep(0.1))
    batch = {"z": (x, y), "a": (x, None)}
    state, key = opt.init(params, batch), jax.random.key(3)
    closed = jax.jit(opt.step)(params, state, batch, key)[0]
    assert_close(eqx.filter_jit(opt.step)(params, state, batch, key)[0], closed, rtol=1e-10)
    assert list(opt.terms) == ["z", "a"]


def test_states_hold_vectors_only_if_something_uses_them():
    params, batch = classifier_problem()
    size = sum(leaf.size for leaf in jax.tree.leaves(params))

    def vectors(**options):
        state = optimiser(structure=ng.Exact(), **options).init(params, batch)
        return sum(leaf.size for leaf in jax.tree.leaves(state)) // size

    ball = ng.HeavyBall(0.9)
    counts = [
        vectors(guard=ng.NoGuard()),
        vectors(),
        vectors(guard=ng.NoGuard(), momentum=ball),
        vectors(momentum=ball),
    ]
    assert counts == [0, 1, 1, 3]


def test_steps_without_a_guard_are_taken_whatever_comes_of_them():
    params, batch = classifier_problem()
    bold = lambda guard: optimiser(1e-3, 300.0, structure=ng.Exact(), guard=guard)
    for guard in (ng.NoGuard(), ng.Rollback()):
        opt = bold(guard)
        step, state, now = jax.jit(opt.step), opt.init(params, batch), params
        taken = []
        for _ in range(3):
            now, state, info = step(now, state, batch)
            taken.append(bool(info.accepted))
        assert all(taken) == isinstance(guard, ng.NoGuard)


def test_optimisers_are_immutable_and_have_few_arguments():
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimiser().damping = ng.NoDamping()
    parameters = list(inspect.signature(ng.NaturalGradient).parameters.values())
    assert len(parameters) <= 10
    assert sum(each.kind is not inspect.Parameter.KEYWORD_ONLY for each in parameters) <= 4


def test_nothing_is_computed_when_the_package_is_imported():
    code = "import natgrad, natgrad.cli, natgrad.experiment.compare, jax; assert not jax.live_arrays()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr


def test_a_number_that_is_left_out_of_the_program_is_no_leaf():
    """It could not be changed without a new compilation, and a change of it would do nothing."""
    assert not jax.tree.leaves(ng.L2(0.0)) and len(jax.tree.leaves(ng.L2(0.1))) == 1


def test_equal_numbers_by_path_are_one_number():
    """A weight and its bias share a block, and with it their damping."""
    params, batch = classifier_problem()
    both = {"params['first']['w']": 0.1, "params['first']['b']": 0.1}
    for penalty in (ng.L2(both), ng.L2({"params['first']": 0.1, "params['second']": 0.0})):
        opt = optimiser(structure=ng.KFAC(), penalty=penalty)
        jax.eval_shape(opt.step, params, opt.init(params, batch), batch)
    assert len(ng.L2(both).value.numbers) == 1 and ng.L2({"params['first']": 0.0}).value.is_default


def test_an_optimiser_can_be_built_inside_a_compiled_function():
    def loss_after(damping):
        opt = ng.NaturalGradient(
            lambda w, x: x @ w, ng.LeastSquares(), ng.Exact(), ng.LevenbergMarquardt(damping), penalty=ng.L2(0.1)
        )
        x = jnp.eye(3)
        state = opt.init(jnp.ones(3), (x, x[0]))
        return opt.step(jnp.ones(3), state, (x, x[0]))[2].loss

    np.testing.assert_allclose(jax.jit(loss_after)(0.5), loss_after(0.5), rtol=1e-12)
