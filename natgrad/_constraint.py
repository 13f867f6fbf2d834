"""Sets of allowed parameters, and rules for steps that would leave them."""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from natgrad import _linalg
from natgrad._check import Requirement, caller, public, real_array, require
from natgrad._types import Scalar


class AbstractConstraint(eqx.Module):
    """A set of allowed parameters, kept away from its boundary by `margin`."""

    @abstractmethod
    def contains(self, w: Array) -> Bool[Array, ""]:
        """Whether `w` is allowed."""

    @abstractmethod
    def project(self, w: Array) -> Array:
        """The allowed point nearest to `w` in the Euclidean distance."""

    @abstractmethod
    def clip(self, w: Array) -> Array:
        """`w` with every coordinate (or eigenvalue) out of range set to the nearest allowed value."""

    @abstractmethod
    def barrier(self, w: Array) -> Scalar:
        """A convex function that grows without bound towards the boundary; infinite outside."""


class Simplex(AbstractConstraint):
    """Probability vectors along the last axis, with every entry at least `margin` (default 1e-6).

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    simplex = ng.Simplex(margin=0.0)
    assert jnp.allclose(simplex.project(jnp.array([1.5, 0.5])), jnp.array([1.0, 0.0]), atol=1e-6)
    ```
    """

    margin: float = 1e-6

    def contains(self, w):
        total = jnp.abs(jnp.sum(w, axis=-1) - 1)
        # With slack: a point that was projected or clipped misses the boundary by rounding.
        return jnp.all(w >= self.margin * (1 - 1e-3)) & jnp.all(total <= jnp.sqrt(jnp.finfo(w.dtype).eps))

    def project(self, w):
        # The projection onto {v >= margin, sum v = 1} shifts all entries by one number and cuts at the margin.
        size = w.shape[-1]
        mass = 1 - size * self.margin
        v = w - self.margin
        ordered = -jnp.sort(-v, axis=-1)
        counts = jnp.arange(1, size + 1, dtype=w.dtype).reshape((1,) * (w.ndim - 1) + (-1,))
        shifts = (jnp.cumsum(ordered, axis=-1) - mass) / counts
        active = jnp.sum(ordered > shifts, axis=-1, keepdims=True)
        shift = jnp.take_along_axis(shifts, active - 1, axis=-1)
        return jnp.maximum(v - shift, 0.0) + self.margin

    def clip(self, w):
        excess = jnp.maximum(w - self.margin, 0.0)
        return self.margin + (1 - w.shape[-1] * self.margin) * excess / jnp.sum(excess, axis=-1, keepdims=True)

    def barrier(self, w):
        # Outside, the logarithm is taken of 1: a NaN in the branch not taken would spoil derivatives.
        return jnp.sum(jnp.where(w > 0, -jnp.log(jnp.where(w > 0, w, 1.0)), jnp.inf))


class PositiveDefinite(AbstractConstraint):
    """Symmetric matrices with every eigenvalue at least `margin` (default 1e-6).

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    matrices = ng.PositiveDefinite(margin=0.1)
    assert jnp.allclose(matrices.project(jnp.diag(jnp.array([2.0, -1.0]))), jnp.diag(jnp.array([2.0, 0.1])))
    ```
    """

    margin: float = 1e-6

    def contains(self, w):
        # With slack, and of the symmetric part: a point that was projected misses both by rounding.
        return jnp.all(_linalg.eigvalsh((w + jnp.swapaxes(w, -1, -2)) / 2) >= self.margin * (1 - 1e-3))

    def project(self, w):
        # The nearest matrix in the Frobenius norm keeps the eigenvectors.
        values, vectors = _linalg.eigh((w + jnp.swapaxes(w, -1, -2)) / 2)
        return (vectors * jnp.maximum(values, self.margin)[..., None, :]) @ jnp.swapaxes(vectors, -1, -2)

    def clip(self, w):
        return self.project(w)

    def barrier(self, w):
        root = _linalg.cholesky((w + jnp.swapaxes(w, -1, -2)) / 2)
        value = -2 * jnp.sum(jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)))
        # The Cholesky factor of an indefinite matrix is NaN.
        return jnp.where(jnp.isfinite(value), value, jnp.inf)


class ConstrainedStep(eqx.Module):
    """The result of `constrained_step`.

    `value` is the new point, `was_outside` whether the whole step would have left the set, and `fraction` the fraction
    of the step that was taken (1 for rules that move the point by other means)."""

    value: Array
    was_outside: Bool[Array, ""]
    fraction: Scalar


class AbstractRule(eqx.Module):
    """A rule for steps that would leave the set."""

    @abstractmethod
    def apply(self, constraint: AbstractConstraint, w: Array, step: Array) -> tuple[Array, Scalar]:
        """The new point, and the fraction of the step that was taken."""


class BackProjection(AbstractRule):
    """Take the step, then move to the nearest allowed point.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    simplex, p, step = ng.Simplex(0.1), jnp.array([0.5, 0.5]), jnp.array([0.7, -0.7])
    moved = ng.constrained_step(simplex, p, step, rule=ng.BackProjection())
    assert moved.was_outside and jnp.allclose(moved.value, jnp.array([0.9, 0.1]))
    ```
    """

    def apply(self, constraint, w, step):
        return constraint.project(w + step), jnp.ones((), w.dtype)


class Clipping(AbstractRule):
    """Take the step, then set coordinates (or eigenvalues) that are out of range to the nearest allowed value.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    matrices, step = ng.PositiveDefinite(0.1), jnp.diag(jnp.array([-2.0, -0.2]))
    moved = ng.constrained_step(matrices, jnp.eye(2), step, rule=ng.Clipping())
    assert jnp.allclose(moved.value, jnp.diag(jnp.array([0.1, 0.8])))
    ```
    """

    def apply(self, constraint, w, step):
        return constraint.clip(w + step), jnp.ones((), w.dtype)


class Backtracking(AbstractRule):
    """Halve the step until it stays inside; take no step after `max_halvings` (default 30).

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    simplex, p, step = ng.Simplex(), jnp.array([0.5, 0.5]), jnp.array([0.6, -0.6])
    moved = ng.constrained_step(simplex, p, step, rule=ng.Backtracking())
    assert moved.fraction == 0.5 and jnp.allclose(moved.value, jnp.array([0.8, 0.2]))
    ```
    """

    max_halvings: int = 30

    def apply(self, constraint, w, step):
        def is_outside(state):
            fraction, count = state
            return ~constraint.contains(w + fraction * step) & (count < self.max_halvings)

        def halve(state):
            fraction, count = state
            return fraction / 2, count + 1

        fraction, _ = jax.lax.while_loop(is_outside, halve, (jnp.ones((), w.dtype), 0))
        fraction = jnp.where(constraint.contains(w + fraction * step), fraction, 0.0)
        return w + fraction * step, fraction


class Penalty(AbstractRule):
    r"""Stop before the boundary, where a barrier outweighs the progress along the step.

    Of `num_candidates` (default 30) fractions $t = 1, \frac12, \frac14, \dots$ the one with the least
    $\text{strength}\cdot(b(w + t d) - b(w)) - t$, where $b$ is the barrier of the set; `strength` is 0.1 by default.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    simplex, p, step = ng.Simplex(), jnp.array([0.5, 0.5]), jnp.array([0.6, -0.6])
    moved = ng.constrained_step(simplex, p, step, rule=ng.Penalty())
    assert moved.fraction < 1 and jnp.all(moved.value > 0)
    ```
    """

    strength: float = 0.1
    num_candidates: int = 30

    def apply(self, constraint, w, step):
        fractions = 0.5 ** jnp.arange(self.num_candidates, dtype=w.dtype)

        def score(fraction):
            point = w + fraction * step
            penalty = self.strength * (constraint.barrier(point) - constraint.barrier(w))
            return jnp.where(constraint.contains(point), penalty - fraction, jnp.inf)

        scores = jax.vmap(score)(fractions)
        best = jnp.argmin(scores)
        fraction = jnp.where(jnp.isfinite(scores[best]), fractions[best], 0.0)
        return w + fraction * step, fraction


@public
def constrained_step(
    constraint: AbstractConstraint, w: Any, step: Any, *, rule: AbstractRule | None = None
) -> ConstrainedStep:
    """Move the parameters `w` by `step` without leaving the set.

    A step that stays inside is taken whole. A step that is not finite is not taken.

    **Arguments:**

    - `constraint`: the set, `Simplex()` or `PositiveDefinite()`.
    - `w`: an array inside the set.
    - `step`: an array of the same shape.
    - `rule`: for a step that would leave the set, `Backtracking()` (the default), `BackProjection()`, `Clipping()` or
      `Penalty()`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    ng.constrained_step(ng.Simplex(), jnp.array([0.2, 0.8]), jnp.array([-0.3, 0.3])).value  # half of the step
    ```
    """
    w = real_array(w, f"{caller()}: `w`")
    step = real_array(step, f"{caller()}: `step`", w.dtype)
    if w.shape != step.shape:
        raise ValueError(f"{caller()} needs a step of the shape of `w`, {w.shape}, but got {step.shape}.")
    inside = Requirement(
        constraint.contains(w), f"to start inside `{type(constraint).__name__}`", "Apply its `project` first."
    )
    w = require(w, [inside], traced=False)
    rule = Backtracking() if rule is None else rule
    is_finite = jnp.all(jnp.isfinite(step))
    step = jnp.where(is_finite, step, 0.0)
    is_outside = ~constraint.contains(w + step)
    ruled, fraction = rule.apply(constraint, w, step)
    value = jnp.where(is_outside, ruled, w + step)
    fraction = jnp.where(is_finite, jnp.where(is_outside, fraction, 1.0), 0.0)
    return ConstrainedStep(value, is_outside | ~is_finite, fraction)
