r"""Exponential families: what follows from $\log Z$, the sufficient statistics and the domains of a family."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from natgrad import _linalg, _tree
from natgrad._check import Requirement, aligned, caller, integer_array, public, real_array, require
from natgrad._family.newton import natural_by_newton
from natgrad._types import Key, Matrix, Moments, Natural, Observation, Scalar


class AbstractFamily(eqx.Module):
    r"""An exponential family $p(x\mid\eta) = h(x)\exp(\langle\eta, t(x)\rangle - \log Z(\eta))$.

    $\eta$ are the natural parameters, $t$ the sufficient statistics and $\xi = \mathbb{E}\,t(x)$ the
    moments: two coordinate systems for the same distributions, with $\xi = \nabla\log Z(\eta)$.

    Scalar families act elementwise on arrays of any shape, vector families on the last axis, matrix
    families on the last two. All leading axes are independent entries of one observation, and results that are
    numbers (`log_partition`, `log_prob`, `kl`, `entropy`, `dual`) is summed over them. Map over a batch
    of observations with `jax.vmap`. Arithmetic is in single precision at least.

    To write a family, state the private methods marked abstract; everything else follows by
    differentiation. Replace a default only where a closed form is faster or stabler.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng


    class Rayleigh(ng.AbstractFamily):
        # The length of a Gaussian vector in the plane.

        @property
        def _event_shapes(self):
            return ((),)

        def _log_partition(self, eta):
            return -jnp.sum(jnp.log(-2 * eta))

        def _statistics(self, x):
            return x**2

        def _draw(self, eta, key):
            return jnp.sqrt(jax.random.exponential(key, eta.shape, eta.dtype) / -eta)

        def _natural_domain(self, eta):
            return [ng.Requirement(jnp.all(eta < 0), "negative numbers", "Pass `-1 / (2 * scale**2)`.")]

        def _moment_domain(self, xi):
            return [ng.Requirement(jnp.all(xi > 0), "mean squares above 0", "Average over more data.")]

        def _support(self, x):
            return [ng.Requirement(jnp.all(x > 0), "lengths above 0", "Drop the zeros.")]


    assert jnp.allclose(Rayleigh().to_moments(jnp.array(-0.5)), 2.0)
    assert jnp.allclose(Rayleigh().fisher(jnp.array(-0.5)), 4.0)
    ```
    """

    # What dtype an observation has: `float` for anything countable or real, `int` for labels.
    observation_type: ClassVar[type] = float

    @property
    def moves_samples(self) -> bool:
        """Whether `sample` with a given key is a differentiable function of the parameters, as for all continuous
        observations."""
        return False

    @property
    def observation_ndim(self) -> int:
        """How many trailing axes of an observation make one event: 0 for numbers and labels, 1 for vectors."""
        return 0

    # What a family states ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _event_shapes(self) -> tuple[tuple[int | None, ...], ...]:
        """Trailing shape of each parameter array of one event; `None` where any size will do."""

    @abstractmethod
    def _log_partition(self, eta: Natural) -> Scalar: ...

    @abstractmethod
    def _statistics(self, x: Observation) -> Moments: ...

    @abstractmethod
    def _draw(self, eta: Natural, key: Key) -> Observation: ...

    @abstractmethod
    def _natural_domain(self, eta: Natural) -> list[Requirement]: ...

    @abstractmethod
    def _moment_domain(self, xi: Moments) -> list[Requirement]: ...

    @abstractmethod
    def _support(self, x: Observation) -> list[Requirement]: ...

    def _target_domain(self, x: Observation) -> list[Requirement]:
        """What the target of a likelihood must be: an observation, or a mean of some."""
        return [all_finite(x), *self._support(x)]

    def _tangent_moments(self, v: Moments) -> Moments:
        """A change of moments, projected to the space of moments where that is smaller than the space of arrays."""
        return v

    def _log_base_measure(self, x: Observation) -> Scalar | float:
        del x
        return 0.0

    def _mean_log_base_measure(self, eta: Natural) -> Scalar | float:
        del eta
        return 0.0

    # What follows, unless a closed form is faster or stabler -------------------------------------------

    def _to_moments(self, eta: Natural) -> Moments:
        return jax.grad(self._log_partition)(eta)

    def _to_natural(self, xi: Moments) -> Natural:
        return natural_by_newton(self, xi)

    def _initial_natural(self, xi: Array) -> Array:
        """Where Newton's method starts, for one event; needed only without a closed `_to_natural`."""
        raise ValueError(
            f"`{type(self).__name__}` has neither a closed form for `to_natural` nor a starting point "
            "for Newton's method. State `_to_natural` or `_initial_natural`."
        )

    def _fisher_mv(self, eta: Natural, v: Natural) -> Moments:
        return jax.jvp(self._to_moments, (eta,), (v,))[1]

    def _event_factor(self, eta: Natural) -> Moments:
        """Columns $S$ with $S S^\\top$ the Fisher matrix of one event, along a new leading axis."""
        covariance = _linalg.dense(lambda v: self._fisher_mv(eta, v), eta)
        # By way of the correlations: statistics may differ in scale by more than the digits of a float.
        variances = jnp.diagonal(covariance)
        scales = jnp.sqrt(jnp.where(variances > 0, variances, 1.0))
        columns = _linalg.square_root(covariance / jnp.outer(scales, scales)).T * scales[None, :]
        return jax.vmap(_tree.unravel_like(eta))(columns)

    def _log_prob(self, eta: Natural, x: Observation) -> Scalar:
        return _tree.vdot(eta, self._statistics(x)) - self._log_partition(eta) + self._log_base_measure(x)

    def _score(self, eta: Natural, x: Observation) -> Moments:
        return _tree.subtract(self._statistics(x), self._to_moments(eta))

    def _draw_score(self, eta: Natural, key: Key) -> Moments:
        return self._score(eta, self._draw(eta, key))

    def _kl(self, eta1: Natural, eta2: Natural) -> Scalar:
        step = _tree.subtract(eta2, eta1)
        return self._log_partition(eta2) - self._log_partition(eta1) - _tree.vdot(step, self._to_moments(eta1))

    def _entropy(self, eta: Natural) -> Scalar:
        pairing = _tree.vdot(eta, self._to_moments(eta))
        return self._log_partition(eta) - pairing - self._mean_log_base_measure(eta)

    # The public face -----------------------------------------------------------------------------------

    @public
    def log_partition(self, eta: Natural) -> Scalar:
        r"""$\log Z(\eta)$: convex, and all moments of $t$ are its derivatives."""
        return self._log_partition(self._check_natural(eta))

    @public
    def sufficient_statistics(self, x: Observation) -> Moments:
        r"""$t(x)$, with the structure of the natural parameters."""
        return self._statistics(self._check_observation(x))

    @public
    def to_moments(self, eta: Natural) -> Moments:
        r"""The moments $\xi = \mathbb{E}\,t(x) = \nabla\log Z(\eta)$."""
        return self._to_moments(self._check_natural(eta))

    @public
    def to_natural(self, xi: Moments) -> Natural:
        r"""The natural parameters with moments $\xi$, the inverse of `to_moments`.

        Where there is no closed form this is Newton's method on the convex problem
        $\min_\eta \log Z(\eta) - \langle\eta,\xi\rangle$, and it raises if that does not converge."""
        return self._to_natural(self._check_moments(xi))

    @public
    def fisher(self, eta: Natural) -> Matrix:
        r"""The Fisher information $F = \nabla^2\log Z(\eta) = \operatorname{Cov} t(x)$ as a dense matrix
        over the flattened parameters (in the order of `jax.flatten_util.ravel_pytree`).

        Symmetric-matrix parameters: the matrix acts on all $d^2$ entries and annihilates antisymmetric
        directions, which move no distribution."""
        eta = self._check_natural(eta)
        return _linalg.dense(lambda v: self._fisher_mv(eta, v), eta)

    @public
    def kl(self, eta1: Natural, eta2: Natural) -> Scalar:
        r"""$\mathrm{KL}(p_{\eta_1}, p_{\eta_2})$, the Bregman divergence of $\log Z$ from $\eta_1$ to
        $\eta_2$ (mind the order)."""
        eta1, eta2 = self._check_natural(eta1, "eta1"), self._check_natural(eta2, "eta2")
        same_shapes(eta1, eta2, caller())
        return self._kl(*_tree.promote(eta1, eta2))

    @public
    def log_prob(self, eta: Natural, x: Observation) -> Scalar:
        r"""$\log p(x\mid\eta)$."""
        eta = self._check_natural(eta)
        return self._log_prob(eta, self._check_observation(x, eta))

    @public
    def score(self, eta: Natural, x: Observation) -> Moments:
        r"""$\nabla_\eta\log p(x\mid\eta) = t(x) - \xi$."""
        eta = self._check_natural(eta)
        return self._score(eta, self._check_observation(x, eta))

    @public
    def entropy(self, eta: Natural) -> Scalar:
        r"""$-\mathbb{E}\log p(x\mid\eta)$, in nats; differential entropy for continuous families."""
        return self._entropy(self._check_natural(eta))

    @public
    def dual(self, xi: Moments) -> Scalar:
        r"""The Legendre dual $\phi(\xi) = \max_\eta\,\langle\eta,\xi\rangle - \log Z(\eta)$, which is
        $-\mathrm{entropy} - \mathbb{E}\log h$."""
        xi = self._check_moments(xi)
        eta = self._to_natural(xi)
        return _tree.vdot(eta, xi) - self._log_partition(eta)

    @public
    def sample(self, eta: Natural, key: Key, shape: tuple[int, ...] = ()) -> Observation:
        """One observation, or an array of independent ones with leading axes `shape`."""
        eta = self._check_natural(eta)
        draw = self._draw
        for _ in shape:
            draw = jax.vmap(draw, (None, 0))
        return draw(eta, jax.random.split(key, shape) if shape else key)

    @public
    def maximum_likelihood(self, xs: Observation) -> Natural:
        r"""Natural parameters that make the observations `xs` (along the leading axis) most likely. Their
        moments are the average statistics, $\xi = \frac1N\sum_i t(x_i)$."""
        xs = self._check_observation(xs, name="observation array `xs`")
        counts = {leaf.shape[:1] for leaf in jax.tree.leaves(xs)}
        if counts & {(), (0,)} or len(counts) != 1:
            raise ValueError(
                f"{caller()} needs at least one observation along the leading axis of `xs`, but got shapes "
                f"{[leaf.shape for leaf in jax.tree.leaves(xs)]}. Stack the observations first."
            )
        xi = jax.tree.map(lambda t: jnp.mean(t, axis=0), self._statistics(xs))
        return self._to_natural(self._check_moments(xi, "the average statistic of `xs`"))

    @public
    def natural_gradient(self, cost: Callable[[Natural], Scalar], eta: Natural) -> Natural:
        r"""The natural gradient $F^{-1}\nabla J(\eta)$ of a cost of the natural parameters, obtained as
        the ordinary gradient in the moments: no Fisher matrix, and no solve where `to_natural` has a
        closed form. Follow it downhill in $\eta$."""
        eta = self._check_natural(eta)
        xi = require(
            self._to_moments(eta),
            self._moment_domain(self._to_moments(eta)),
            f"{caller()}: the distribution is so close to the boundary that its moments round to it; it",
        )
        _, pull = jax.vjp(self._to_natural, xi)
        return pull(jax.grad(cost)(eta))[0]

    # Validated inputs ----------------------------------------------------------------------------------

    def _check_natural(self, eta: Natural, name: str = "eta") -> Natural:
        """`eta` as arrays of this family's shapes, inside its domain; or an error that says why not."""
        label = f"{caller()}: natural parameter `{name}`"
        eta = self._arrays(eta, label)
        return require(eta, [all_finite(eta), *self._natural_domain(eta)], label)

    def _check_moments(self, xi: Moments, name: str = "moment `xi`") -> Moments:
        """`xi` as arrays of this family's shapes, inside its domain; or an error that says why not."""
        label = f"{caller()}: {name}"
        xi = self._arrays(xi, label)
        return require(xi, [all_finite(xi), *self._moment_domain(xi)], label)

    def _check_observation(
        self, x: Observation, eta: Natural | None = None, name: str = "observation `x`"
    ) -> Observation:
        """`x` as an array this family can have produced, of the shape that belongs to `eta`."""
        label = f"{caller()}: {name}"
        x = self._observed(x, label, None if eta is None else jax.tree.leaves(eta)[0].dtype)
        family = self if eta is None else self._sized(eta)
        shape = jax.tree.map(jnp.shape, x)
        if eta is not None and (expected := self._observation_shape(eta)) != shape:
            raise ValueError(
                f"{label} must have shape {expected} to match the parameters, but got {shape}. "
                "A family takes one observation at a time: map over a batch with `jax.vmap`."
            )
        return require(x, [all_finite(x), *family._support(x)], label)

    def _sized(self, eta: Natural) -> "AbstractFamily":
        """This family, with what its parameters reveal about the support."""
        del eta
        return self

    def _arrays(self, value: PyTree, label: str) -> PyTree:
        shapes = self._event_shapes
        parts = value if len(shapes) > 1 else (value,)
        if not isinstance(parts, tuple | list) or len(parts) != len(shapes):
            raise TypeError(f"{label} must be a tuple of {len(shapes)} arrays, but got `{type(value).__name__}`.")
        arrays = _tree.promote(*(real_array(part, label) for part in parts))
        leads = set()
        for array, shape in zip(arrays, shapes, strict=True):
            lead, event = check_event(array, shape, label)
            if len(event) == 2 and event[0] != event[1]:
                raise ValueError(
                    f"{label} must be square matrices, but got shape {array.shape}. "
                    "Pass the whole symmetric matrix, not a triangle."
                )
            leads.add(lead)
        if len(leads) > 1:
            raise ValueError(f"{label} must agree in their leading axes, but got {sorted(leads)}.")
        return tuple(arrays) if len(shapes) > 1 else arrays[0]

    def _observed(self, x: Observation, label: str, dtype: jnp.dtype | None) -> Observation:
        if self.observation_type is int:
            return integer_array(x, label)
        x_dtype: Any = getattr(x, "dtype", None)
        if x_dtype is not None and (jnp.issubdtype(x_dtype, jnp.integer) or jnp.issubdtype(x_dtype, jnp.bool_)):
            x = x.astype(dtype or jnp.result_type(float))
        x = real_array(x, label, dtype)
        check_event(x, self._event_shapes[0][: self.observation_ndim], label)
        return x

    def _target(self, eta: Natural, y: Any) -> Observation:
        """The target of a likelihood, as this family observes it where the parameters are `eta`."""
        label = f"The target of `{type(self).__name__}`"
        observed = self._observed(y, label, jax.tree.leaves(eta)[0].dtype)
        return aligned(observed, self._observation_shape(eta), label)

    def _observation_shape(self, eta: Natural) -> tuple[int, ...]:
        first = jax.tree.leaves(eta)[0]
        lead = self._lead(eta)
        return lead + first.shape[len(lead) :][: self.observation_ndim]

    def _lead(self, eta: Natural) -> tuple[int, ...]:
        first = jax.tree.leaves(eta)[0]
        return first.shape[: first.ndim - len(self._event_shapes[0])]

    def _fisher_factor(self, eta: Natural) -> Moments:
        r"""Columns $S$ with $S S^\top = F$, along a new leading axis: the columns of one event after the other."""
        lead = self._lead(eta)
        count = len(lead)
        events = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[count:]), eta)
        blocks = jax.vmap(self._event_factor)(events)

        def place(block: Array) -> Array:
            number, columns, *event = block.shape
            placed = jnp.zeros((number, columns, number, *event), block.dtype)
            index = jnp.arange(number)
            return placed.at[index, :, index].set(block).reshape(number * columns, *lead, *event)

        return jax.tree.map(place, blocks)


def all_finite(tree: PyTree) -> Requirement:
    finite = jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)])
    return Requirement(jnp.all(finite), "finite numbers", "Look for an overflow or a division by zero upstream.")


def same_shapes(x: PyTree, y: PyTree, label: str) -> None:
    shapes = [[leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (x, y)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{label} needs two parameters of the same shape, but got {shapes[0]} and {shapes[1]}.")


def check_event(array: Array, wanted: tuple[int | None, ...], label: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Leading shape and event shape of an array, the latter as wanted; or an error that says why not."""
    split = max(array.ndim - len(wanted), 0)
    lead, event = array.shape[:split], array.shape[split:]
    fits = len(event) == len(wanted) and all(
        size > 0 and want in (None, size) for want, size in zip(wanted, event, strict=True)
    )
    if not fits:
        sizes = ", ".join("any above 0" if want is None else str(want) for want in wanted)
        raise ValueError(f"{label} must have trailing shape (..., {sizes}), but got {array.shape}.")
    return lead, event
