"""Step rules on a quadratic cost in three dimensions: no model, nothing but its matrix."""

import jax.numpy as jnp
import numpy as np
import pytest
from quadratic import DAMPING, METRIC, TARGET, expansion

import natgrad as ng
from natgrad import Expansion, Search


def search(point: Expansion, rule, *, momentum=0.0, last=None) -> Search:
    natural = -jnp.linalg.solve(jnp.asarray(METRIC) + DAMPING * jnp.eye(3), point.gradient)
    last = jnp.array([0.3, -0.1, 0.2]) if last is None else last
    return Search(natural, last, momentum, rule.init(point.w))


def propose(rule, point: Expansion, **options):
    found = search(point, rule, **options)
    return found, rule.propose(point, found)


def test_a_constant_step_is_the_rate_times_the_natural_gradient_and_the_last_step():
    found, proposal = propose(ng.ConstantStep(0.2), expansion(), momentum=0.7)
    np.testing.assert_allclose(proposal.update, 0.2 * found.natural + 0.7 * found.last, rtol=1e-12)


def test_schedules_see_the_number_of_steps():
    rule = ng.ConstantStep(lambda steps: 1.0 / (1 + steps))
    found, proposal = propose(rule, expansion(steps=4))
    np.testing.assert_allclose(proposal.update, found.natural / 5, rtol=1e-12)


@pytest.mark.parametrize("radius", [1e-4, 1e-2, 1e3])
def test_a_clipped_step_is_no_longer_than_its_radius_and_never_longer_than_the_rate(radius):
    rule = ng.KLClip(learning_rate=0.5, radius=radius)
    point = expansion()
    found, proposal = propose(rule, point)
    half = -jnp.vdot(point.gradient, found.natural) / 2
    assert proposal.step_size**2 * half <= radius * (1 + 1e-9)
    assert proposal.step_size <= 0.5
    assert (proposal.step_size == 0.5) == (0.25 * half <= radius)


def test_step_size_and_momentum_minimise_the_damped_quadratic_model():
    point = expansion()
    # Along another direction than the solution, as an approximate metric would give it.
    found = Search(-point.gradient / jnp.diagonal(METRIC), jnp.array([0.3, -0.1, 0.2]), None, ())
    proposal = ng.QuadraticModel().propose(point, found)
    basis = np.stack([found.natural, found.last])
    damped = basis @ (METRIC + DAMPING * np.eye(3)) @ basis.T
    best = -np.linalg.solve(damped, basis @ np.asarray(point.gradient))
    np.testing.assert_allclose([proposal.step_size, proposal.momentum], best, rtol=1e-8)
    update = best @ basis
    decrease = -(np.asarray(point.gradient) @ update + update @ METRIC @ update / 2)
    np.testing.assert_allclose(proposal.predicted_decrease, decrease, rtol=1e-10)
    np.testing.assert_allclose(point.loss - point.loss_at(point.w + proposal.update), decrease, rtol=1e-10)


def test_the_quadratic_model_goes_the_whole_way_without_damping():
    point = expansion()._replace(damping=jnp.asarray(0.0))
    natural = -jnp.linalg.solve(jnp.asarray(METRIC), point.gradient)
    proposal = ng.QuadraticModel().propose(point, Search(natural, jnp.zeros(3), None, ()))
    np.testing.assert_allclose(point.w + proposal.update, TARGET, rtol=1e-6)
    np.testing.assert_allclose(proposal.step_size, 1.0, rtol=1e-6)


@pytest.mark.parametrize("radius", [1e-3, 1e-1, 1e2])
def test_a_trust_region_holds_and_lowers_the_loss(radius):
    point = expansion(curvature=10 * METRIC)
    _, proposal = propose(ng.TrustRegion(radius), point)
    after = point.w + proposal.update
    assert bool(proposal.is_accepted)
    assert point.divergence(after) <= radius * (1 + 1e-2)
    assert point.loss_at(after) <= point.loss


def test_a_grid_takes_the_size_of_the_lowest_loss():
    point = expansion(curvature=2 * METRIC)
    rule = ng.GridLineSearch()
    found, proposal = propose(rule, point)
    losses = [float(point.loss_at(point.w + size * found.natural)) for size in rule.sizes]
    assert float(proposal.step_size) == pytest.approx(rule.sizes[int(np.argmin(losses))])


def test_an_armijo_search_takes_the_first_size_with_enough_decrease():
    point = expansion(curvature=30 * METRIC)
    rule = ng.ArmijoLineSearch()
    found, proposal = propose(rule, point)
    slope = float(jnp.vdot(point.gradient, found.natural))
    enough = lambda size: point.loss_at(point.w + size * found.natural) <= point.loss + rule.sufficient * size * slope
    assert bool(proposal.is_accepted) and enough(float(proposal.step_size))
    assert not enough(float(proposal.step_size) / rule.shrink)


def test_an_uphill_direction_is_rejected_by_line_searches():
    point = expansion()
    for rule in (ng.GridLineSearch(), ng.ArmijoLineSearch()):
        uphill = Search(point.gradient, jnp.zeros(3), 0.0, rule.init(point.w))
        assert not bool(rule.propose(point, uphill).is_accepted)
