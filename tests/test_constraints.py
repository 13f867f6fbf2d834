"""Steps that would leave the set of allowed parameters."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

import natgrad as ng

RULES = {
    "backtracking": ng.Backtracking,
    "back_projection": ng.BackProjection,
    "clipping": ng.Clipping,
    "penalty": ng.Penalty,
}

rules = pytest.mark.parametrize("rule", RULES)

PROBABILITIES = np.array([0.2, 0.3, 0.5])
COVARIANCE = np.array([[2.0, 0.4], [0.4, 1.0]])


@rules
def test_steps_that_stay_inside_are_taken_whole(rule):
    step = np.array([0.05, 0.05, -0.1])
    taken = ng.constrained_step(ng.Simplex(), jnp.asarray(PROBABILITIES), step, rule=RULES[rule]())
    assert_close(taken.value, jnp.asarray(PROBABILITIES + step))
    assert not taken.was_outside
    assert taken.fraction == 1


@rules
@hypothesis.given(st.lists(st.floats(-100, 100), min_size=2, max_size=2))
@hypothesis.settings(max_examples=15)
def test_no_step_leaves_the_simplex(rule, step):
    step = np.array([*step, -sum(step)])
    taken = compiled(rule, ng.Simplex)(jnp.asarray(PROBABILITIES), jnp.asarray(step))
    assert np.all(np.asarray(taken.value) >= 1e-6 * (1 - 1e-3))
    assert abs(float(jnp.sum(taken.value)) - 1) < 1e-9
    assert bool(taken.was_outside) == bool(np.any(PROBABILITIES + step < 1e-6 * (1 - 1e-3)))


@rules
@hypothesis.given(st.lists(st.floats(-50, 50), min_size=3, max_size=3))
@hypothesis.settings(max_examples=15)
def test_no_step_leaves_the_positive_definite_matrices(rule, entries):
    a, b, c = entries
    taken = compiled(rule, ng.PositiveDefinite)(jnp.asarray(COVARIANCE), jnp.array([[a, b], [b, c]]))
    assert np.linalg.eigvalsh(np.asarray(taken.value)).min() >= 1e-6 * (1 - 1e-2)
    assert 0 <= taken.fraction <= 1


@functools.cache
def compiled(rule, constraint):
    return jax.jit(lambda w, step: ng.constrained_step(constraint(), w, step, rule=RULES[rule]()))


def test_back_projection_finds_the_nearest_point():
    """No other allowed point is nearer: tried on a grid of the simplex."""
    w, step = jnp.asarray(PROBABILITIES), jnp.array([-0.5, 0.4, 0.3])
    nearest = ng.constrained_step(ng.Simplex(), w, step, rule=ng.BackProjection()).value
    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, 101)] * 2), -1).reshape(-1, 2)
    grid = np.concatenate([grid, 1 - grid.sum(1, keepdims=True)], 1)
    grid = grid[grid[:, 2] >= 0]
    target = PROBABILITIES + np.asarray(step)
    assert np.linalg.norm(nearest - target) <= np.linalg.norm(grid - target, axis=1).min() + 1e-4


def test_penalty_keeps_further_from_the_boundary_than_backtracking():
    w, step = jnp.asarray(PROBABILITIES), jnp.array([-0.39999, 0.2, 0.19999])
    strong = ng.constrained_step(ng.Simplex(), w, step, rule=ng.Penalty(strength=2.0))
    plain = ng.constrained_step(ng.Simplex(), w, step, rule=ng.Backtracking())
    assert strong.value.min() > plain.value.min()


@rules
def test_a_step_that_is_not_finite_is_not_taken(rule):
    taken = ng.constrained_step(ng.Simplex(), jnp.asarray(PROBABILITIES), jnp.full(3, jnp.nan), rule=RULES[rule]())
    assert_close(taken.value, jnp.asarray(PROBABILITIES))
    assert taken.fraction == 0
    assert taken.was_outside


def test_refused_with_a_reason():
    with pytest.raises(ValueError, match=r"needs to start inside `Simplex`, but got .*`project`"):
        ng.constrained_step(ng.Simplex(), jnp.array([0.5, 0.6]), jnp.zeros(2))
    with pytest.raises(ValueError, match=r"step of the shape of `w`, \(3,\), but got \(2,\)"):
        ng.constrained_step(ng.Simplex(), jnp.asarray(PROBABILITIES), jnp.zeros(2))
