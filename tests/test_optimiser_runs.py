"""Runs of the optimiser: what it remembers, what it refuses to do, and where it can be used."""

import functools
import itertools
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import compiled_step, one_step, ravel
from models import normal
from zoo import affine, classifier, classifier_problem, integers, libraries

import natgrad as ng
from natgrad._geometry.base import AbstractGeometry
from natgrad._optimiser.cost import Cost, Pass, term_on_batch


@functools.cache
def default():
    """The optimiser with its defaults, compiled once, and its state."""
    opt = ng.NaturalGradient(classifier, ng.Categorical())
    params, batch = classifier_problem()
    return compiled_step(opt), opt.init(params, batch), opt


def run(step, params, state, batch, count, start=0):
    infos = []
    for number in range(start, start + count):
        params, state, info = step(params, state, batch, jax.random.key(number))
        infos.append(info)
    return params, state, infos


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.compat
def test_a_hundred_steps_are_one_trace_and_one_scan():
    params, batch = classifier_problem()
    _, state, opt = default()
    traces = []

    def counted(*args):
        traces.append(None)
        return opt.step(*args)

    step = jax.jit(counted, donate_argnums=(0, 1))
    copied = lambda tree: jax.tree.map(jnp.array, tree)
    ends, last, infos = run(step, copied(params), copied(state), batch, 100)
    assert len(traces) == 1
    assert float(infos[-1].loss) < 0.05 < 1.0 < float(infos[0].loss)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(last))
    assert jax.tree.structure(last) == jax.tree.structure(state)

    def body(carry, number):
        params, state, info = opt.step(*carry, batch, jax.random.key(number))
        return (params, state), info.loss

    (scanned, _), losses = jax.jit(lambda carry: jax.lax.scan(body, carry, jnp.arange(100)))((params, state))
    np.testing.assert_allclose(losses[:20], [float(info.loss) for info in infos[:20]], rtol=1e-6)
    assert float(losses[-1]) < 0.05


def test_states_are_known_from_shapes():
    params, batch = classifier_problem()
    _, state, opt = default()
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, batch))
    assert jax.tree.structure(opt.init(*shapes)) == jax.tree.structure(state)
    assert same(opt.init(*shapes), state)


def test_damping_starts_at_the_mean_eigenvalue_and_follows_the_predictions():
    params, batch = classifier_problem()
    step, state, opt = default()
    _, first, _ = run(step, params, state, batch, 1)
    _, _, infos = run(step, params, state, batch, 12)
    strengths = [float(info.damping) for info in infos]
    metric = first.structure.average.total
    np.testing.assert_allclose(strengths[0], metric.trace() / metric.in_size(), rtol=1e-12)
    assert strengths[0] == strengths[4] and strengths[5] == strengths[9]
    for count in (4, 9):
        ratio = float(infos[count].actual_decrease / infos[count].predicted_decrease)
        factor = 0.9**5 if ratio > 0.75 else 0.9**-5 if ratio < 0.25 else 1.0
        np.testing.assert_allclose(strengths[count + 1], factor * strengths[count], rtol=1e-12)
        assert np.isnan(infos[count - 1].loss_after)


@pytest.mark.parametrize(
    ("ratio", "rejected", "expected"),
    [
        (0.9, False, 0.81),
        (0.5, False, 1.0),
        (0.1, False, 1 / 0.81),
        (-1.0, True, 4.0),
        (np.nan, True, 4.0),
        (np.nan, False, 1.0),
    ],
)
def test_thresholds_of_levenberg_and_marquardt(ratio, rejected, expected):
    from natgrad._optimiser.damping import Reduction
    from natgrad._optimiser.info import Quantity

    damping = ng.LevenbergMarquardt(initial=1.0, every=2, minimum=0.9, maximum=3.0)
    state = damping.start(damping.init(), jnp.asarray(5.0))
    number = jnp.asarray
    after = Quantity.of(10.0 - ratio, float, not np.isnan(ratio))
    predicted = Quantity.of(1.0, float)
    outcome = Reduction(number(1), number(10.0), after, predicted, number(rejected), number(0.0))
    found = damping.strength(damping.update(state, outcome), number(2))
    kept = damping.update(state, outcome._replace(steps=number(2), is_rejected=number(False)))
    assert float(kept.strength) == float(state.strength)
    np.testing.assert_allclose(found, np.clip(expected, 0.9, 3.0), rtol=1e-12)
    assert [bool(damping.wants_loss_after(number(k))) for k in range(4)] == [False, True, False, True]


@pytest.mark.compat
def test_a_batch_with_nan_takes_the_run_back_and_no_further():
    params, (x, y) = classifier_problem()
    step, state, _ = default()
    params, state, _ = run(step, params, state, (x, y), 3)
    after, later, _ = step(params, state, (x, y), jax.random.key(9))
    broken = (x.at[2].set(jnp.nan), y)
    back, restored, info = step(after, later, broken, jax.random.key(10))
    assert not bool(info.accepted) and info.result == ng.STEP_RESULTS.restored
    assert same(back, params) and np.array_equal(restored.last, state.last)
    np.testing.assert_allclose(restored.damping.strength, 4 * later.damping.strength, rtol=1e-12)
    assert same(restored.structure.average, later.structure.average)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((back, restored)))
    again, more, info = step(back, restored, (x, y), jax.random.key(11))
    assert bool(info.accepted) and int(more.guard.rejections) == 1
    _, more, _ = step(again, more, (x, y), jax.random.key(12))
    assert int(more.guard.rejections) == 0
    _, _, infos = run(step, back, restored, broken, 11)
    assert infos[0].result == ng.STEP_RESULTS.restored
    assert infos[-1].result == ng.STEP_RESULTS.too_many_rejections
    assert "max_rejections" in ng.STEP_RESULTS[infos[-1].result]


def test_a_first_batch_with_nan_changes_nothing():
    params, (x, y) = classifier_problem()
    step, state, _ = default()
    broken = (x.at[2].set(jnp.nan), y)
    stays, state, info = step(params, state, broken, jax.random.key(0))
    assert same(stays, params) and not bool(info.accepted)
    stays, state, info = step(stays, state, broken, jax.random.key(1))
    assert same(stays, params)
    moved, state, info = step(stays, state, (x, y), jax.random.key(2))
    assert bool(info.accepted) and not same(moved, params)


def test_steps_that_raise_the_loss_are_rejected_with_their_momentum():
    """A step that is far too long, at a step where losses are compared."""
    params, batch = classifier_problem()
    make = lambda every: ng.NaturalGradient(
        classifier,
        ng.Categorical(),
        ng.Exact(),
        ng.LevenbergMarquardt(initial=1e-3, every=every),
        step=ng.ConstantStep(60.0),
        momentum=ng.HeavyBall(0.5),
    )
    opt = make(1)
    state = opt.init(params, batch)
    stays, after, info = compiled_step(opt)(params, state, batch, None)
    assert not bool(info.accepted) and info.result == ng.STEP_RESULTS.rejected
    assert same(stays, params) and np.array_equal(after.last, state.last) and info.loss_after > info.loss
    np.testing.assert_allclose(after.damping.strength, 4e-3, rtol=1e-12)
    moved, _, info = compiled_step(make(5))(params, state, batch, None)
    assert bool(info.accepted) and not same(moved, params)


def test_a_loss_that_explodes_is_taken_back():
    params, batch = classifier_problem()
    opt = ng.NaturalGradient(
        classifier, ng.Categorical(), ng.Exact(), ng.ConstantDamping(1e-3), step=ng.ConstantStep(300.0)
    )
    step, state = compiled_step(opt), opt.init(params, batch)
    far, state, _ = step(params, state, batch, None)
    back, state, info = step(far, state, batch, None)
    assert same(back, params) and info.result == ng.STEP_RESULTS.restored and float(info.loss) > 10


def test_batches_of_different_difficulty_are_all_accepted():
    """A loss is high because of its batch, not because of the last step."""
    linear = lambda params, x: x @ params
    x, w = normal(1, 16, 3), jnp.zeros((3, 1))
    batches = [(x, 0.1 * x[:, :1]), (x, 30.0 + x[:, :1])]
    opt = ng.NaturalGradient(linear, ng.LeastSquares(), ng.Exact(), ng.ConstantDamping(1.0), step=ng.ConstantStep(0.1))
    step, state = compiled_step(opt), opt.init(w, batches[0])
    for number in range(40):
        w, state, info = step(w, state, batches[number % 2])
        assert bool(info.accepted)


def test_a_batch_out_of_the_ordinary_is_not_averaged_but_judged_like_any_other():
    """Its step is taken, as the last one was not to blame, if the loss falls."""
    linear = lambda params, x: x @ params
    x = normal(1, 16, 3)
    easy, hard = (x, x[:, :1]), (x, 30.0 + x[:, :1])
    make = lambda step, momentum=None: ng.NaturalGradient(
        linear, ng.LeastSquares(), ng.Diagonal(), ng.LevenbergMarquardt(every=1), step=step, momentum=momentum
    )
    opt, w = make(ng.QuadraticModel()), jnp.zeros((3, 1))
    w, state, _ = run(compiled_step(opt), w, opt.init(w, easy), easy, 3)
    moved, after, info = compiled_step(opt)(w, state, hard, jax.random.key(0))
    assert info.accepted and info.loss_after < info.loss and not same(moved, w)
    assert same(after.structure.average, state.structure.average)
    bold = make(ng.ConstantStep(1e3), ng.HeavyBall(0.0))
    stays, _, info = compiled_step(bold)(w, state.replace(last=jnp.zeros(3)), hard, jax.random.key(0))
    assert not info.accepted and info.loss_after > info.loss and same(stays, w)


def test_steps_that_are_always_taken_back_are_given_up():
    params, batch = classifier_problem()
    opt = ng.NaturalGradient(
        classifier,
        ng.Categorical(),
        ng.Exact(),
        ng.ConstantDamping(1e-3),
        step=ng.ConstantStep(300.0),
        guard=ng.Rollback(3),
    )
    _, _, infos = run(compiled_step(opt), params, opt.init(params, batch), batch, 12)
    assert any(bool(info.result == ng.STEP_RESULTS.too_many_rejections) for info in infos)


@pytest.mark.sample(1)
@pytest.mark.parametrize("damping", [ng.ConstantDamping, ng.LevenbergMarquardt])
def test_damping_starts_with_the_first_batch_that_is_sound(damping):
    params, (x, y) = classifier_problem()
    opt = ng.NaturalGradient(classifier, ng.Categorical(), ng.Diagonal(), damping(), step=ng.ConstantStep(0.01))
    step, state = compiled_step(opt), opt.init(params, (x, y))
    _, state, _ = step(params, state, (x.at[0].set(jnp.nan), y))
    _, state, info = step(params, state, (x, y))
    _, _, fresh = step(params, opt.init(params, (x, y)), (x, y))
    np.testing.assert_allclose(info.damping, fresh.damping, rtol=1e-12)
    assert bool(info.accepted)


def test_weight_decay_is_no_momentum():
    still = lambda w, x: x @ (0.0 * w)
    opt = ng.NaturalGradient(
        still,
        ng.LeastSquares(),
        ng.Diagonal(),
        ng.ConstantDamping(1.0),
        step=ng.ConstantStep(0.1),
        momentum=ng.HeavyBall(0.9),
        penalty=ng.WeightDecay(0.1),
    )
    w, x = jnp.ones((2, 1)), normal(1, 4, 2)
    step, state = compiled_step(opt), opt.init(w, (x, None))
    for _ in range(20):
        w, state, _ = step(w, state, (x, None))
    np.testing.assert_allclose(w, 0.99**20 * np.ones((2, 1)), rtol=1e-10)


@pytest.mark.slow
def test_examples_without_weight_hurt_nobody():
    """Padding: pieces and parts in which no example counts."""
    params, (x, y) = classifier_problem()
    padded = (x, y, jnp.ones(12).at[8:].set(0.0))
    plain = ng.NaturalGradient(
        classifier, ng.Categorical(), ng.KFAC(), ng.ConstantDamping(0.1), step=ng.ConstantStep(0.1)
    )
    pieces = ng.NaturalGradient(
        classifier, ng.Categorical(), ng.KFAC(), ng.ConstantDamping(0.1), step=ng.ConstantStep(0.1), micro_batches=3
    )
    losses = [float(one_step(o, params, padded)[2].loss) for o in (plain, pieces)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-12)
    half = ng.NaturalGradient(
        classifier, ng.Categorical(), ng.KFAC(batch_fraction=0.5), ng.ConstantDamping(0.1), step=ng.ConstantStep(0.1)
    )
    step, state = compiled_step(half), half.init(params, padded)
    moved, state, _ = step(params, state, (x, y, jnp.asarray([0.0, 1.0] * 6)))
    moved, state, info = step(moved, state, (x, y, jnp.ones(12)))
    assert bool(info.accepted) and not same(moved, params)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state.structure.average))


def test_steps_and_terms_draw_different_samples():
    cost = Cost([term_on_batch(ng.Term(lambda w, x: x @ w, ng.LeastSquares()), ng.Batch(jnp.ones((5, 3))))])
    (point,) = cost.at(jnp.ones((3, 1)), Pass(1.0, jnp.array(0), has_sites=False)).points
    draws = [point.columns(jax.random.key(step), 2, term).reshape(-1) for step in range(4) for term in (0, 1)]
    assert len(np.unique(np.concatenate(draws))) == 8 * 10


@pytest.mark.float32
@pytest.mark.users_defaults
def test_damping_stays_put_at_the_minimum():
    x = normal(1, 20, 3).astype(jnp.float32)
    y = x @ jnp.ones((3, 1), jnp.float32)
    w = jnp.zeros((3, 1), jnp.float32)
    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), ng.Exact())
    step, state = compiled_step(opt), opt.init(w, (x, y))
    strengths = []
    for _ in range(60):
        w, state, info = step(w, state, (x, y))
        strengths.append(float(info.damping))
    assert max(strengths) <= strengths[0] and float(info.loss) < 1e-10
    for _ in range(80):
        w, state, info = step(w, state, (x * jnp.nan, y))
    assert np.isfinite(state.damping.strength)


def test_checkpoints_continue_bit_by_bit(tmp_path):
    params, batch = classifier_problem()
    step, state, opt = default()
    params, state, _ = run(step, params, state, batch, 4)
    tree = {"params": params, "state": state, "key": jax.random.key(3), "epoch": 2, "half": jnp.ones(3, jnp.bfloat16)}
    ng.save_checkpoint(tmp_path / "here.npz", tree)
    like = {**tree, "params": classifier_problem()[0], "state": opt.init(*classifier_problem())}
    found = ng.load_checkpoint(tmp_path / "here.npz", like)
    bare = lambda tree: jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, tree)
    assert (
        same(bare(found), bare(tree)) and found["epoch"] == 2 and jax.tree.structure(found) == jax.tree.structure(tree)
    )
    first, _, _ = run(step, params, state, batch, 3, start=4)
    second, _, _ = run(step, found["params"], found["state"], batch, 3, start=4)
    assert same(first, second)
    assert [path.name for path in tmp_path.iterdir()] == ["here.npz"]


def _is_key(leaf):
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def test_a_directory_keeps_the_newest_checkpoints_and_says_what_is_broken(tmp_path):
    store = ng.Checkpoints(tmp_path / "run", keep=2)
    assert store.steps() == []
    with pytest.raises(FileNotFoundError, match="There is no checkpoint in"):
        store.restore(jnp.zeros(3))
    for step in (1, 5, 9):
        store.save(step, jnp.full(3, float(step)))
    assert store.steps() == [5, 9]
    assert store.restore(jnp.zeros(3))[0] == 9 and float(store.restore(jnp.zeros(3), step=5)[1][0]) == 5
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 1 .*Steps there: \\[5, 9\\]"):
        store.restore(jnp.zeros(3), step=1)
    assert store.save(2, jnp.zeros(3)).exists() and store.steps() == [2, 9]
    store.save(5, jnp.full(3, 5.0))
    assert store.steps() == [5, 9]
    newest = tmp_path / "run" / "step-000000009.npz"
    whole = newest.read_bytes()
    newest.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a checkpoint, or not a whole one .*restore\\(like, step=5\\)"):
        store.restore(jnp.zeros(3))
    flipped = bytearray(whole)
    flipped[whole.index(np.float64(9.0).tobytes())] ^= 1
    newest.write_bytes(bytes(flipped))
    with pytest.raises(ValueError, match="not a checkpoint, or not a whole one"):
        store.restore(jnp.zeros(3))
    np.savez(newest, header=np.frombuffer(b'{"format": "other"}', np.uint8))
    with pytest.raises(ValueError, match="no checkpoint of natgrad"):
        store.restore(jnp.zeros(3))
    np.savez(newest, header=np.frombuffer(b'{"format": "natgrad checkpoint", "version": 99}', np.uint8))
    with pytest.raises(ValueError, match="written by a newer natgrad"):
        store.restore(jnp.zeros(3))
    with pytest.raises(ValueError, match="holds another tree: .*'a'.* missing"):
        store.restore({"a": jnp.zeros(3)}, step=5)
    with pytest.raises(ValueError, match="float64 of shape \\[3\\], but float32 of shape \\[4\\] is needed"):
        store.restore(jnp.zeros(4, jnp.float32), step=5)
    with pytest.raises(ValueError, match="at least 1"):
        ng.Checkpoints(tmp_path, keep=0)


def test_checkpoints_of_older_versions_are_read_unless_the_state_has_changed(tmp_path, monkeypatch):
    path = tmp_path / "old.npz"
    monkeypatch.setattr("natgrad._optimiser.checkpoint.VERSION", 1)
    ng.save_checkpoint(path, {"history": jnp.ones(2)})
    monkeypatch.undo()
    assert float(ng.load_checkpoint(path, {"history": jnp.zeros(2)})["history"][0]) == 1
    message = "written by an older natgrad \\(version 1 .*'guard'.* missing.*'history'.* in excess.*or start anew"
    with pytest.raises(ValueError, match=message):
        ng.load_checkpoint(path, {"guard": jnp.zeros(2)})


def test_an_interrupted_save_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "state.npz"
    ng.save_checkpoint(path, jnp.ones(2))

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(KeyboardInterrupt):
        ng.save_checkpoint(path, jnp.zeros(2))
    monkeypatch.undo()
    assert float(ng.load_checkpoint(path, jnp.zeros(2))[0]) == 1 and len(list(tmp_path.iterdir())) == 1


def test_optax_preconditions_what_it_is_given():
    params, batch = classifier_problem()
    opt = ng.NaturalGradient(
        classifier, ng.Categorical(), ng.KFAC(), ng.ConstantDamping(0.1), step=ng.ConstantStep(0.5)
    )
    transform = ng.as_optax(opt, batch)
    loss = lambda params: (
        -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(classifier(params, batch[0])), batch[1][:, None], axis=1))
    )
    grads = jax.grad(loss)(params)
    updates, _ = jax.jit(transform.update)(grads, transform.init(params), params, batch=batch, key=None)
    moved, _, _ = one_step(opt, params, batch)
    np.testing.assert_allclose(ravel(optax.apply_updates(params, updates)), ravel(moved), rtol=1e-9, atol=1e-11)
    chain = optax.chain(
        optax.scale(2.0),
        ng.scale_by_natural_gradient(classifier, ng.Categorical(), batch, ng.KFAC(), ng.ConstantDamping(0.1)),
        optax.scale(-0.25),
    )
    chained, _ = jax.jit(chain.update)(grads, chain.init(params), params, batch=batch, key=None)
    np.testing.assert_allclose(ravel(chained), ravel(updates), rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="needs the parameters and the batch"):
        transform.update(grads, transform.init(params), params)


def test_only_what_is_trainable_moves():
    """Integers and functions in the parameters, and a layer that is held fixed."""
    params, (x, y) = classifier_problem()
    tree = {**params, "counts": jnp.arange(3), "act": jnp.tanh}

    def with_rest(tree, x):
        hidden = tree["act"](affine(x, **tree["first"])) + 0.0 * tree["counts"][0].astype(x.dtype)
        return affine(hidden, **tree["second"])

    spec = jax.tree.map(lambda leaf: eqx.is_inexact_array(leaf), tree)
    spec["first"] = jax.tree.map(lambda leaf: False, tree["first"])
    opt = ng.NaturalGradient(
        with_rest, ng.Categorical(), ng.KFAC(), ng.ConstantDamping(0.1), step=ng.ConstantStep(0.5), trainable=spec
    )
    state = opt.init(tree, (x, y))
    moved, _, _ = eqx.filter_jit(opt.step)(tree, state, (x, y), None)
    assert same(moved["first"], tree["first"]) and not same(moved["second"], tree["second"])
    assert moved["act"] is jnp.tanh and state.guard.before[0].size == 15
    alone = ng.NaturalGradient(
        lambda second, x: affine(jnp.tanh(affine(x, **params["first"])), **second),
        ng.Categorical(),
        ng.KFAC(),
        ng.ConstantDamping(0.1),
        step=ng.ConstantStep(0.5),
    )
    expected, _, _ = compiled_step(alone)(params["second"], alone.init(params["second"], (x, y)), (x, y), None)
    np.testing.assert_allclose(ravel(moved["second"]), ravel(expected), rtol=1e-10)


def test_auxiliary_outputs_and_keys_of_examples():
    params, (x, y) = classifier_problem()

    def dropped(params, x):
        inputs, keys = x
        masks = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (4,)))(keys)
        hidden = jnp.tanh(affine(inputs, **params["first"])) * masks.astype(inputs.dtype)
        return affine(hidden, **params["second"]), {"used": jnp.mean(masks)}

    opt = ng.NaturalGradient(ng.Term(dropped, ng.Categorical(), has_aux=True))
    data = lambda seed: ((x, jax.random.split(jax.random.key(seed), 12)), y)
    step, state = compiled_step(opt), opt.init(params, data(0))
    losses = []
    for seed in range(12):
        params, state, info = step(params, state, data(seed), jax.random.key(100 + seed))
        losses.append(float(info.loss))
    assert 0.5 < float(info.aux["used"]) < 1 and losses[-1] < 0.6 * losses[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("structure", [ng.KFAC, ng.Diagonal, ng.EKFAC, ng.Exact])
def test_small_batches_by_scan_and_after_a_bad_one(structure):
    """A batch with NaN makes the next steps shorter."""
    params, (x, y) = classifier_problem()
    batches = x.reshape(3, 4, 3), y.reshape(3, 4)
    batches = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * 6), batches)
    opt = ng.NaturalGradient(classifier, ng.Categorical(), structure(), step=ng.CrossValidated(), penalty=ng.L2(1e-3))
    assert isinstance(opt.damping, ng.ConstantDamping)
    first = jax.tree.map(lambda leaf: leaf[0], batches)

    def step(carry, batch):
        after, state, info = opt.step(*carry, batch, jax.random.key(0))
        return (after, state), info

    (w, state), infos = jax.jit(lambda start: jax.lax.scan(step, start, batches))((params, opt.init(params, first)))
    assert np.mean(infos.loss[-3:]) < 0.7 * np.mean(infos.loss[:3])
    assert np.all(infos.accepted) and np.all(infos.predicted_divergence <= 0.5 * (1 + 1e-6))
    bad = first[0].at[0].set(jnp.nan), first[1]
    _, after, info = compiled_step(opt)(w, state, bad, jax.random.key(1))
    assert not info.accepted
    assert after.rule.limit == state.rule.limit / 4
    np.testing.assert_array_equal(after.rule.direction, state.rule.direction)


def test_outputs_that_are_infinite_on_purpose_do_not_couple_examples():
    params, batch = classifier_problem()
    masked = lambda params, x: jnp.where(jnp.asarray([True, True, False])[None], classifier(params, x), -jnp.inf)
    coupled = lambda params, x: masked(params, x - jnp.mean(x, axis=0, keepdims=True))
    assert ng.NaturalGradient(masked, ng.Categorical()).init(params, batch).steps == 0
    with pytest.raises(ValueError, match="couples examples"):
        ng.NaturalGradient(coupled, ng.Categorical()).init(params, batch)


@pytest.mark.sample(1)
@pytest.mark.parametrize("step", [ng.CrossValidated, ng.QuadraticModel])
def test_damping_waits_for_a_metric(step):
    """Of a batch whose examples have no weight there is none."""
    params, (x, y) = classifier_problem()
    opt = ng.NaturalGradient(classifier, ng.Categorical(), ng.Diagonal(), step=step())
    empty, full = (x, y, jnp.zeros(12)), (x, y, jnp.ones(12))
    advance, state = compiled_step(opt), opt.init(params, full)
    moved, state, info = advance(params, state, empty)
    assert same(moved, params) and info.result == ng.STEP_RESULTS.invalid_batch
    with pytest.raises(ValueError, match="weights of the batch are all zero"):
        opt.step(params, state, empty)
    _, state, info = advance(moved, state, full)
    expected = np.mean(ravel(ng.diagonal(classifier, ng.Fisher(ng.Categorical()), params, x).entries))
    np.testing.assert_allclose(info.damping, expected, rtol=1e-6)


@pytest.mark.users_defaults
@pytest.mark.slow
def test_the_same_steps_in_every_library():
    models, x = libraries()
    batch = x, integers(7, 0, 3, 6)
    losses = {}
    for name, (model, params) in models.items():
        opt = ng.NaturalGradient(model, ng.Categorical(), damping=ng.ConstantDamping(0.1))
        _, _, infos = run(compiled_step(opt), params, opt.init(params, batch), batch, 4)
        losses[name] = [info.loss for info in infos]
    assert losses["plain"][-1] < 0.5 * losses["plain"][0]
    for name, own in losses.items():
        np.testing.assert_allclose(own, losses["plain"], rtol=1e-8, err_msg=name)


@pytest.mark.slow
@pytest.mark.float32
@pytest.mark.users_defaults
def test_mixed_precision_trains():
    params, (x, y) = classifier_problem()
    mixed = {"first": jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params["first"]), "second": params["second"]}
    mixed = jax.tree.map(lambda leaf: leaf if leaf.dtype == jnp.bfloat16 else leaf.astype(jnp.float32), mixed)
    x, y = x.astype(jnp.float32), jnp.asarray(np.asarray(y, np.int32))

    def half(params, x):
        hidden = jnp.tanh(affine(x.astype(jnp.bfloat16), **params["first"]))
        return affine(hidden.astype(jnp.float32), **params["second"])

    opt = ng.NaturalGradient(half, ng.Categorical())
    ends, state, infos = run(compiled_step(opt), mixed, opt.init(mixed, (x, y)), (x, y), 25)
    assert jax.tree.map(lambda leaf: leaf.dtype, ends) == jax.tree.map(lambda leaf: leaf.dtype, mixed)
    assert float(infos[-1].loss) < 0.4 * float(infos[0].loss)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_enable_x64", True)
import natgrad as ng
from jax.sharding import AxisType, NamedSharding, PartitionSpec
w = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)))
x = jnp.asarray(np.random.default_rng(1).normal(size=(16, 4)))
y = jnp.arange(16) % 3
model = lambda w, x: jnp.tanh(x) @ w
opt = ng.NaturalGradient(model, ng.Categorical(), ng.KFAC(batch_fraction=0.5))
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
spread, same = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
def run(batch, w, state):
    step = jax.jit(opt.step)
    for _ in range(8):
        w, state, info = step(w, state, batch, None)
    return w, info
state = opt.init(w, (x, y))
alone, info = run((x, y), w, state)
batch = jax.device_put((x, y), spread)
both, _ = run(batch, jax.device_put(w, same), jax.device_put(state, same))
np.testing.assert_allclose(both, alone, rtol=1e-7, atol=1e-9)
copies = [np.asarray(shard.data) for shard in jax.device_put(both, same).addressable_shards]
assert len(copies) == 2 and np.array_equal(*copies)
print("ok", float(info.loss))
"""


@pytest.mark.slow
def test_batches_may_be_spread_over_devices():
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert done.returncode == 0 and done.stdout.startswith("ok"), done.stderr


class Empirical(AbstractGeometry):
    """The second moment of gradients of a Bernoulli likelihood at the data, which are part of the output."""

    def _dissimilarity(self, z, z0):
        return ng.Fisher(ng.Bernoulli()).dissimilarity(z[0], z0[0])

    def _metric_mv(self, z, v):
        gradient = jax.nn.sigmoid(z[0]) - z[1]
        return gradient * jnp.vdot(gradient, v[0]), jnp.zeros_like(v[1])

    def _factor(self, z):
        return (jax.nn.sigmoid(z[0]) - z[1])[None], jnp.zeros_like(z[1])[None]

    def _sample(self, z, key):
        return jax.tree.map(lambda s: s[0] * jax.random.rademacher(key, (), s.dtype), self._factor(z))


@pytest.mark.slow
@pytest.mark.float32
@pytest.mark.users_defaults
def test_an_autoencoder_is_trained_and_the_empirical_fisher_does_visibly_worse():
    """Of the digits of scikit-learn, in one batch. The floor is the entropy of the grey pixels."""
    from sklearn.datasets import load_digits

    x = jnp.asarray(load_digits().data / 16, jnp.float32)
    sizes = (64, 48, 12, 48, 64)
    params = [(normal(k, m, n) * (2 / m) ** 0.5, jnp.zeros(n)) for k, (m, n) in enumerate(itertools.pairwise(sizes))]

    def model(params, x):
        for k, (w, b) in enumerate(params):
            x = x @ w + b
            x = x if k in (1, 3) else jnp.tanh(x)
        return x

    entropy = jnp.mean(jnp.sum(-jax.scipy.special.xlogy(x, x) - jax.scipy.special.xlog1py(1 - x, -x), axis=1))
    nats = lambda z, x: jnp.sum(jax.nn.softplus(z) - x * z)
    wrong = ng.Objective(lambda z, x: nats(z[0], x), Empirical())
    found = {}
    for name, network, objective in (
        ("fisher", model, ng.Bernoulli()),
        ("empirical", lambda params, x: (model(params, x), x), wrong),
    ):
        opt = ng.NaturalGradient(network, objective)
        _, _, infos = run(compiled_step(opt), params, opt.init(params, (x, x)), (x, x), 60)
        found[name] = [float(info.loss - entropy) for info in infos]
    assert found["fisher"][-1] < 0.1 * found["fisher"][0]
    assert found["fisher"][20] < 0.5 * found["empirical"][20]
    assert found["fisher"][-1] < 0.5 * found["empirical"][-1]
