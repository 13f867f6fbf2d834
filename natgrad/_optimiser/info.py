"""What a step tells its user: numbers that are known or absent, and a result in words."""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from natgrad._check import is_concrete
from natgrad._solve.base import RESULTS
from natgrad._types import Scalar


class STEP_RESULTS(RESULTS):  # pyright: ignore[reportGeneralTypeIssues]
    """Outcomes of a step: those of its solve, and these.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares())
    w, batch = jnp.zeros((1, 1)), (jnp.ones((2, 1)), jnp.ones((2, 1)))
    broken = (jnp.ones((2, 1)), jnp.full((2, 1), jnp.nan))
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), broken)
    assert info.result == ng.STEP_RESULTS.invalid_batch
    print(ng.STEP_RESULTS[info.result])
    ```
    """

    restored = (
        "The loss or its gradient was not finite, or the last step raised the loss far above its usual values, so the "
        "step went back to the parameters before the last one, with more damping where that is adaptive. Look for NaN "
        "in the batch, or lower the learning rate."
    )
    rejected = (
        "The step would not have lowered the loss, so the parameters stay as they were. With adaptive damping the next "
        "step is shorter; otherwise lower the learning rate or raise the damping."
    )
    too_many_rejections = (
        "More steps in a row were rejected than `Rollback(max_rejections=...)` allows. Likely causes: (a) NaN in the "
        "data; (b) a loss that is at its minimum up to rounding; (c) a gradient that is not the gradient of the "
        "loss (a custom rule); (d) a learning rate or a damping that cannot work."
    )
    inner_diverged = (
        "The optimiser of `InnerSolve` did not lower the loss of the linearised model, so the step was not taken. "
        "Lower its learning rate."
    )
    kept_inverse = (
        "Some factor could not be inverted when that was last due, and the inverse before it is still in use. Raise "
        "the damping, or use float64."
    )
    coupled = (
        "The output for an example changes with the rest of its batch, so the examples have no gradients of their own "
        "and the step was not taken. Common causes: batch normalisation in training mode, one random mask for "
        "the whole batch, a hard-coded batch size. Use inference mode, or give each example its own key inside `x`; or "
        "use `Exact()`; or `Term(model, objective, check=False)`, for the gradient of the whole batch and a metric "
        "from examples one by one."
    )
    invalid_batch = (
        "A target is invalid (a label below 0 or not below the number of classes, NaN), a weight is negative or not "
        "finite, or all weights are zero (in the batch, or in the fraction of it that `batch_fraction` or "
        "`micro_batches` selects for the metric), so the step was not taken. Call `opt.step` outside `jit` to see "
        "which example it is. A weight of zero, or `Likelihood(family, ignore_label=...)`, leaves examples out."
    )


def _as_arrays(operation: Callable) -> Callable:
    return lambda self, other: operation(jnp.asarray(self), other)


class Quantity(eqx.Module):
    """A number that a step may not have computed.

    Where `is_known` is false, the field `value` is zero, and conversions (`float`, arrays, arithmetic) give NaN. Inside
    `jit` under `jax.debug_nans`, use the two fields.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    known, unknown = (ng.Quantity(jnp.array(2.0), jnp.array(is_known)) for is_known in (True, False))
    assert float(known) == 2.0 and jnp.isnan(float(unknown))
    ```
    """

    value: Float[Array, "..."]
    is_known: Bool[Array, "..."]

    @classmethod
    def of(cls, value: Any, dtype: Any, is_known: Any = True) -> "Quantity":
        """A number, if there is one; a quantity as it is."""
        if value is None:
            return cls(jnp.zeros((), dtype), jnp.array(False))
        if isinstance(value, cls):
            return cls(value.value.astype(dtype), value.is_known)
        return cls(jnp.where(is_known, jnp.asarray(value, dtype), 0.0), jnp.asarray(is_known))

    def known_if(self, condition: Bool[Array, ""]) -> "Quantity":
        """The same number, or an unknown one."""
        return Quantity.of(self.value, self.value.dtype, self.is_known & condition)

    def __float__(self) -> float:
        return float(self.value) if bool(self.is_known) else math.nan

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        del copy
        return np.where(np.asarray(self.is_known), np.asarray(self.value), np.nan).astype(dtype or self.value.dtype)

    def __jax_array__(self) -> Array:
        return jnp.where(self.is_known, self.value, jnp.nan)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        if not is_concrete(self) or jnp.ndim(self.value):
            return f"Quantity({self.value}, is_known={self.is_known})"
        return f"Quantity({self.value})" if bool(self.is_known) else "Quantity(not measured)"

    __add__, __sub__ = _as_arrays(operator.add), _as_arrays(operator.sub)
    __mul__, __truediv__ = _as_arrays(operator.mul), _as_arrays(operator.truediv)
    __eq__, __ne__ = _as_arrays(operator.eq), _as_arrays(operator.ne)
    __lt__, __le__ = _as_arrays(operator.lt), _as_arrays(operator.le)
    __gt__, __ge__ = _as_arrays(operator.gt), _as_arrays(operator.ge)


class Info(NamedTuple):
    r"""What happened in a step.

    A `Quantity` says whether it was computed: the chosen parts decide. If the step was not `accepted`, `loss_after` and
    the other numbers describe the proposed step.

    - `loss`: of the whole batch before the step, penalties included.
    - `loss_after`: the same after the step.
    - `damping`: the strength that was used.
    - `step_size`: how much of the natural gradient was taken, and `momentum` how much of the last update.
    - `predicted_decrease` of the loss by the quadratic model with the exact metric, and `actual_decrease`.
    - `divergence`: how far the outputs moved, in the geometry, and `predicted_divergence` by its quadratic model.
    - `cosine`: between the step $d$ and the natural gradient $n$ of the structure, $\langle d, n\rangle\,/\,|d|\,|n|$
      with inner products in the exact damped metric. It is one without momentum.
    - `accepted`: whether the step was taken.
    - `result`: a member of `STEP_RESULTS`, whose text says what happened.
    - `failures`: how often an inverse of a block was not finite, so far, and the one before it was kept. Damping
      below the rounding error of a factor is raised automatically and not counted.
    - `aux`: what the model returned besides its outputs.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0], [2.0]])
    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares())
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert info.accepted and jnp.allclose(info.loss, 11.25)
    assert not info.loss_after.is_known  # by default computed at every fifth step
    print(ng.STEP_RESULTS[info.result])
    ```
    """

    loss: Scalar
    loss_after: Quantity
    damping: Scalar
    step_size: Scalar
    momentum: Scalar
    predicted_decrease: Quantity
    actual_decrease: Quantity
    divergence: Quantity
    predicted_divergence: Quantity
    cosine: Quantity
    accepted: Bool[Array, ""]
    result: STEP_RESULTS
    failures: Array
    aux: PyTree
