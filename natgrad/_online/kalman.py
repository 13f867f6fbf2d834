"""The natural gradient on a stream, which is the extended Kalman filter of parameters that do not move."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from natgrad import _tree
from natgrad._check import caller, public
from natgrad._model import check_params
from natgrad._online.precision import AbstractPrecision, DensePrecision
from natgrad._optimiser.batch import as_batch
from natgrad._optimiser.evaluation import Pass, evaluate
from natgrad._optimiser.info import Quantity
from natgrad._optimiser.problem import Bound, Term
from natgrad._optimiser.structure.exact import metric_of
from natgrad._tree import check_paths, option_for
from natgrad._types import Matrix, Scalar


class OnlineGradientState(NamedTuple):
    """How many examples were absorbed, or the sum of their weights, and the precision of the parameters."""

    examples: Scalar
    precision: PyTree


class OnlineInfo(NamedTuple):
    """The mean loss of a batch before it was absorbed; whether it was, which it is not if there is NaN in it or if
    rounding has spoilt the precision (use float64, or a prior that is less vague); and how far the parameters moved in
    the precision, half the squared length."""

    loss: Scalar
    accepted: Bool[Array, ""]
    divergence: Quantity


class OnlineNaturalGradient:
    r"""Learns from every example once, without a learning rate: the precision $\Lambda$ of the parameters, at first
    that of a prior, grows by the Fisher information of every example at the parameters before it, and then
    $w \leftarrow w - \Lambda^{-1}\nabla\ell$.

    For a linear model with Gaussian noise this is the Kalman filter and recursive least squares: after every example
    the mean and covariance of the posterior. For any model and an exponential family it is the extended Kalman filter
    (Ollivier, 2018). The examples of one batch are absorbed together, at the same parameters.

    **Arguments:**

    - `model`, `objective`: as for `NaturalGradient`.
    - `prior_precision`: of all parameters, or a mapping from paths to that of the parameters at or below them.
    - `structure`: `DensePrecision()`, `LowRankPrecision(rank)` or `DiagonalPrecision()`.
    - `forget`: by what the precision is multiplied before every step, below 1 for a memory that fades: old examples
      count less.
    - `process_noise`: what is added to the variance of every parameter before every step, for parameters that wander.
    - `has_aux`: whether the model returns `(z, aux)`; `aux` is then left out.
    """

    @public
    def __init__(
        self,
        model: Any,
        objective: Any,
        *,
        prior_precision: Any = 1.0,
        structure: Any = None,
        forget: Any = 1.0,
        process_noise: Any = 0.0,
        has_aux: bool = False,
    ):
        self.term = Term(model, objective, has_aux=has_aux)
        self.structure = DensePrecision() if structure is None else structure
        self.forget, self.process_noise = forget, process_noise
        if not isinstance(self.structure, AbstractPrecision):
            raise TypeError(
                f"{caller()} needs `structure` to be `DensePrecision()`, `LowRankPrecision(rank)` or "
                f"`DiagonalPrecision()`, but got `{type(self.structure).__name__}`."
            )
        given = prior_precision if isinstance(prior_precision, Mapping) else {"": prior_precision}
        if not all(_is_number(value) and value > 0 for value in given.values()):
            raise ValueError(
                f"{caller()} needs a `prior_precision` above 0, one number or a mapping from paths to numbers, but got "
                f"{prior_precision}."
            )
        self.prior_precision = dict(given)
        if not _is_number(forget) or not 0 < forget <= 1:
            raise ValueError(f"{caller()} needs `forget` to be a number above 0 and at most 1, but got {forget}.")
        if not _is_number(process_noise) or not process_noise >= 0:
            raise ValueError(f"{caller()} needs `process_noise` to be a number of at least 0, but got {process_noise}.")

    @public
    def init(self, params: PyTree) -> OnlineGradientState:
        """The state before the first example. The parameters are the mean of the prior."""
        check_params(params)
        names = _tree.names(params)
        check_paths(self.prior_precision, names, "prior_precision")
        w, spread = _tree.flatten(params)[0], []
        for name, leaf in zip(names, jax.tree.leaves(params), strict=True):
            own = option_for(self.prior_precision, name)
            if own is None:
                raise ValueError(
                    f"`OnlineNaturalGradient` got no `prior_precision` for `{name}`. Give one for all others under the "
                    'empty path: `{"": 1.0, ...}`.'
                )
            spread.append(jnp.full(leaf.size, own, w.dtype))
        return OnlineGradientState(jnp.zeros((), w.dtype), self.structure.init(jnp.concatenate(spread)))

    @public
    def step(
        self, params: PyTree, state: OnlineGradientState, batch: Any
    ) -> tuple[PyTree, OnlineGradientState, OnlineInfo]:
        """New parameters, the new state, and what happened. `batch` is `(x, y)` or `(x, y, weights)`, with the examples
        along the leading axis."""
        own = as_batch(batch, "The batch", self.term.objective)
        bound = Bound(self.term, self.term.outputs, own)
        evaluation = evaluate([bound], params, Pass(1.0, jnp.array(0), has_sites=False))
        (part,) = evaluation.parts
        bound.refuse_invalid(part.z)
        loss, gradient = part.loss_and_gradient()
        w, unflatten = _tree.flatten(params)
        total = jnp.asarray(own.total, w.dtype)
        # Of examples without weight there is neither a mean gradient nor a mean metric, and nothing to learn.
        summed = lambda mean, count: jnp.where(total > 0, count * mean.astype(w.dtype), 0.0)
        g = summed(_tree.flatten(gradient)[0], total)
        rows = summed(metric_of([part])._root_rows(), jnp.sqrt(total))

        faded = self.structure.faded(state.precision, self.forget, self.process_noise)
        precision = self.structure.grown(faded, rows)
        change = -self.structure.solve(precision, g)
        numbers = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves((loss, change, precision))]
        # Uphill, only rounding can lead.
        is_good = jnp.all(jnp.stack(numbers)) & (change @ g <= 0) & evaluation.is_valid([bound])
        keep = lambda new, old: jax.tree.map(lambda new, old: jnp.where(is_good, new, old), new, old)
        after = keep(OnlineGradientState(state.examples + total, precision), state)
        info = OnlineInfo(loss, is_good, Quantity.of(-(change @ g) / 2, w.dtype, is_good))
        return unflatten(keep(w + change, w)), after, info

    def covariance(self, state: OnlineGradientState) -> Matrix:
        """The covariance of the parameters as a dense matrix, in the order of `jax.flatten_util.ravel_pytree`."""
        return self.structure.covariance(state.precision)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number)
