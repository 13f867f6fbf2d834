"""Guards on a quadratic cost in three dimensions: which steps are taken, which are not, and which are taken back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from quadratic import METRIC, TARGET, expansion

import natgrad as ng

SOUND = ng.Soundness(jnp.array(True), jnp.array(True), jnp.array(False))
NOT_FINITE = SOUND._replace(is_finite=jnp.array(False))
INVALID = SOUND._replace(is_valid=jnp.array(False))
COUPLED = SOUND._replace(is_coupled=jnp.array(True))

UPDATE = np.array([0.1, -0.2, 0.05])
LAST = np.array([0.3, -0.1, 0.2])


def trial(w, *, steps=3, soundness=SOUND, update=UPDATE, last=LAST, was_rejected=False, **proposal) -> ng.Trial:
    proposed = ng.Proposal(jnp.asarray(update), 1.0, 0.0, **proposal)
    last = None if last is None else jnp.asarray(last)
    return ng.Trial(expansion(w, steps=steps), proposed, last, soundness, jnp.asarray(was_rejected))


def begun(guard, w, last=LAST):
    """The state of a guard after one step from `w`."""
    state = guard.init(jnp.asarray(w), None if last is None else jnp.asarray(last))
    return guard.conclude(state, trial(w, steps=0, last=last))


START = np.array([0.5, 0.0, -0.5])
GUARDS = {"rollback": ng.Rollback, "none": ng.NoGuard}


@pytest.mark.parametrize("name", GUARDS)
def test_sound_steps_are_taken_with_what_is_beside_them(name):
    guard = GUARDS[name]()
    found = guard.conclude(guard.init(jnp.asarray(START), jnp.asarray(LAST)), trial(START, beside=0.01))
    assert bool(found.is_accepted) and not bool(found.is_given_up)
    np.testing.assert_allclose(found.w, START + UPDATE + 0.01, rtol=1e-12)
    # What is beside a step does not become momentum.
    np.testing.assert_array_equal(found.last, UPDATE)


@pytest.mark.parametrize("name", GUARDS)
@pytest.mark.parametrize("reason", ["invalid", "coupled", "rule"])
def test_what_nobody_can_step_on_changes_nothing(name, reason):
    guard = GUARDS[name]()
    before = begun(guard, START)
    soundness = {"invalid": INVALID, "coupled": COUPLED, "rule": SOUND}[reason]
    found = guard.conclude(
        before.state, trial(before.w, soundness=soundness, is_accepted=jnp.asarray(reason != "rule"))
    )
    assert not bool(found.is_accepted)
    assert_close((found.w, found.last), (before.w, jnp.asarray(LAST)))


def test_no_guard_stores_nothing_and_takes_what_is_not_finite():
    guard = ng.NoGuard()
    assert guard.init(jnp.asarray(START), jnp.asarray(LAST)) == () and guard.before(()) is None
    found = guard.conclude((), trial(START, soundness=NOT_FINITE, update=np.full(3, np.nan)))
    assert bool(found.is_accepted) and np.all(np.isnan(found.w))
    assert not bool(guard.is_suspicious((), jnp.asarray(1e9)))


def test_rollback_returns_to_where_the_last_step_started():
    guard = ng.Rollback()
    first = begun(guard, START)
    second = guard.conclude(first.state, trial(first.w, last=first.last))
    back = guard.conclude(second.state, trial(second.w, last=second.last, soundness=NOT_FINITE))
    assert not bool(back.is_accepted)
    np.testing.assert_array_equal(back.w, first.w)
    np.testing.assert_array_equal(back.last, first.last)
    # And no further, however often.
    again = guard.conclude(back.state, trial(back.w, last=back.last, soundness=NOT_FINITE, was_rejected=True))
    np.testing.assert_array_equal(again.w, first.w)


def test_there_is_nowhere_to_return_to_from_the_first_step():
    guard = ng.Rollback()
    state = guard.init(jnp.zeros(3), jnp.zeros(3))
    found = guard.conclude(state, trial(START, steps=0, soundness=NOT_FINITE))
    assert not bool(found.is_accepted)
    np.testing.assert_array_equal(found.w, START)


def test_steps_that_are_not_finite_are_not_taken():
    guard = ng.Rollback()
    first = begun(guard, START)
    found = guard.conclude(first.state, trial(first.w, update=np.array([0.0, np.inf, 0.0])))
    assert not bool(found.is_accepted)
    np.testing.assert_array_equal(found.w, first.w)


def test_without_momentum_no_update_is_stored():
    guard = ng.Rollback()
    found = begun(guard, START, last=None)
    assert found.last is None
    assert sum(leaf.size for leaf in jax.tree.leaves(found.state)) == 3 + 5
    back = guard.conclude(found.state, trial(found.w, last=None, soundness=NOT_FINITE))
    np.testing.assert_array_equal(back.w, START)


@pytest.mark.parametrize("most", [0, 3])
def test_a_run_is_given_up_after_too_many_rejections(most):
    """Of steps in a row; a step that is taken counts only if the next one does not take it back."""
    guard = ng.Rollback(most)
    found = begun(guard, START)
    flags = []
    for number in range(most + 2):
        found = guard.conclude(found.state, trial(found.w, soundness=NOT_FINITE, was_rejected=number > 0))
        flags.append(bool(found.is_given_up))
    assert flags == [False] * most + [True, True]
    one = guard.conclude(found.state, trial(found.w, was_rejected=True))
    assert int(one.state.rejections) == most + 2
    assert int(guard.conclude(one.state, trial(one.w)).state.rejections) == 0


@pytest.mark.parametrize("threshold", [1.0, 3.0])
def test_losses_above_the_usual_spread_are_suspicious(threshold):
    """The spread is the running mean of distances from the running mean."""
    guard = ng.Rollback(threshold=threshold, decay=0.8)
    state = guard.init(jnp.zeros(3), jnp.zeros(3))
    assert not bool(guard.is_suspicious(state, jnp.asarray(1e9)))
    mean = spread = None
    for scale in (1.0, 1.3, 0.8, 1.1):
        w = TARGET + scale * np.ones(3)
        state = guard.conclude(state, trial(w)).state
        loss = scale**2 * METRIC.sum() / 2
        mean, spread = (
            (loss, loss) if mean is None else (0.8 * mean + 0.2 * loss, 0.8 * spread + 0.2 * abs(loss - mean))
        )
    np.testing.assert_allclose([state.mean, state.spread], [mean, spread], rtol=1e-12)
    for other, question in (
        (mean, guard.is_suspicious),
        (1.0, lambda *given: guard.is_diverging(*given, jnp.asarray(1.0))),
    ):
        limit = other + threshold * spread
        assert bool(question(state, jnp.asarray(limit * (1 + 1e-9))))
        assert not bool(question(state, jnp.asarray(limit * (1 - 1e-9))))


def test_bad_batches_teach_nothing_about_the_spread_of_losses():
    guard = ng.Rollback()
    first = begun(guard, START)
    for soundness in (NOT_FINITE, INVALID, COUPLED):
        after = guard.conclude(first.state, trial(TARGET + 9.0, soundness=soundness)).state
        assert_close(after[:4], first.state[:4])


def test_rounding_is_relative_to_the_loss_and_to_the_first_loss():
    guard, eps = ng.Rollback(), np.finfo(float).eps
    state = guard.init(jnp.zeros(3), None)._replace(first=jnp.asarray(7.0))
    np.testing.assert_allclose(guard.rounding(state, jnp.asarray(2.0)), 20 * eps + 700 * eps**2, rtol=1e-12)
    np.testing.assert_allclose(ng.NoGuard().rounding((), jnp.asarray(2.0)), 20 * eps, rtol=1e-12)
