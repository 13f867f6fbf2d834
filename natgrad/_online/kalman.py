r"""The natural gradient on a stream, which is the extended Kalman filter for constant parameters.

$\Lambda \leftarrow \Lambda + J^\top F J$ and $w \leftarrow w - \Lambda^{-1}\nabla\ell$ for every example or batch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from natgrad import _tree
from natgrad._check import as_number, caller, check_number, public
from natgrad._model import check_params
from natgrad._online.precision import AbstractPrecision, DensePrecision
from natgrad._optimiser.cost import Cost, Pass, term_on_batch
from natgrad._optimiser.info import Quantity
from natgrad._optimiser.method import compilable
from natgrad._optimiser.structure.exact import metric_of
from natgrad._optimiser.term import Term, as_batch
from natgrad._tree import check_paths, option_for
from natgrad._types import Matrix, Scalar


class OnlineGradientState(NamedTuple):
    """The number of examples so far (the sum of their weights), and the precision of the parameters.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    opt = ng.OnlineNaturalGradient(lambda w, x: x @ w, ng.LeastSquares())
    state = opt.init(jnp.zeros(1))
    assert state.examples == 0
    ```
    """

    examples: Scalar
    precision: PyTree


class OnlineInfo(NamedTuple):
    """What happened in a step of `OnlineNaturalGradient`.

    **Attributes:**

    - `loss`: the mean loss of the batch before the step.
    - `accepted`: whether the step was taken. It is rejected, and parameters and state stay as they were, if numbers are
      not finite or if rounding has made the precision indefinite: use float64, or a larger `prior_precision`.
    - `divergence`: half the squared length of the step in the precision.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    opt = ng.OnlineNaturalGradient(lambda w, x: x @ w, ng.LeastSquares())
    w = jnp.zeros(1)
    w, state, info = opt.step(w, opt.init(w), (jnp.array([[1.0]]), jnp.array([2.0])))
    assert info.accepted and jnp.allclose(info.loss, 2.0)
    ```
    """

    loss: Scalar
    accepted: Bool[Array, ""]
    divergence: Quantity


class OnlineNaturalGradient(eqx.Module):
    r"""Online learning without a learning rate, each example used once.

    $\Lambda \leftarrow \Lambda + F_x(w)$, then $w \leftarrow w - \Lambda^{-1}\nabla\ell_x(w)$.

    The precision $\Lambda$ of the parameters starts as the precision of a prior and grows by the Fisher information
    $F_x$ of every example at the parameters before the step. For a linear model with Gaussian noise this is the Kalman
    filter, or recursive least squares: after every example the mean and covariance of the posterior. For any model and
    an exponential family it is the extended Kalman filter (Ollivier, 2018). The examples of a batch share the
    parameters at which they are linearised.

    Immutable, and a tree whose leaves are its numbers, like `NaturalGradient`.

    **Arguments:**

    - `model`, `objective`: as for `NaturalGradient`.
    - `prior_precision`: one number for all parameters (default 1.0), or a mapping from paths to numbers.
    - `precision`: how to store $\Lambda$: `DensePrecision()` (the default), `LowRankPrecision(rank)` or
      `DiagonalPrecision()`.
    - `forget`: factor in (0, 1] on the precision before every step. Below 1, old examples count less; default 1.0.
    - `process_noise`: variance added to every parameter before every step, for parameters that drift; default 0.0.
    - `has_aux`: whether the model returns `(z, aux)`, of which `aux` is ignored; default `False`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    opt = ng.OnlineNaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), prior_precision=0.1)
    params, state = jnp.zeros(2), opt.init(jnp.zeros(2))
    params, state, info = opt.step(params, state, (jnp.eye(2), jnp.ones(2)))
    ```
    """

    term: Term
    prior_precision: dict[str, Any]
    precision: AbstractPrecision
    forget: Any
    process_noise: Any

    @public
    def __init__(
        self,
        model: Any,
        objective: Any,
        *,
        prior_precision: Any = 1.0,
        precision: Any = None,
        forget: Any = 1.0,
        process_noise: Any = 0.0,
        has_aux: bool = False,
    ):
        self.term = Term(model, objective, has_aux=has_aux)
        self.precision = DensePrecision() if precision is None else precision
        if not isinstance(self.precision, AbstractPrecision):
            raise TypeError(
                f"{caller()} needs `precision` to be `DensePrecision()`, `LowRankPrecision(rank)` or "
                f"`DiagonalPrecision()`, but got `{type(self.precision).__name__}`."
            )
        by_path = prior_precision if isinstance(prior_precision, Mapping) else {"": prior_precision}
        if not all(_is_number(value) and value > 0 for value in by_path.values()):
            raise ValueError(
                f"{caller()} needs a `prior_precision` above 0, one number or a mapping from paths to numbers, but got "
                f"{prior_precision}."
            )
        self.prior_precision = {path: as_number(value) for path, value in by_path.items()}
        check_number(forget, "`forget`", above=0, most=1)
        check_number(process_noise, "`process_noise`", least=0)
        # Without noise a step is cheaper, so zero is part of the program.
        has_noise = not (isinstance(process_noise, int | float) and process_noise == 0)
        self.forget, self.process_noise = as_number(forget), as_number(process_noise) if has_noise else 0.0

    @compilable
    @public
    def init(self, params: PyTree) -> OnlineGradientState:
        """The state before the first example. The parameters are the mean of the prior."""
        check_params(params)
        names = _tree.names(params)
        check_paths(self.prior_precision, names, "prior_precision")
        w, diagonal = _tree.flatten(params)[0], []
        for name, leaf in zip(names, jax.tree.leaves(params), strict=True):
            precision = option_for(self.prior_precision, name)
            if precision is None:
                raise ValueError(
                    f"{caller()} got no `prior_precision` for `{name}`. Give a default under the empty path: "
                    '`{"": 1.0, ...}`.'
                )
            diagonal.append(jnp.full(leaf.size, precision, w.dtype))
        return OnlineGradientState(jnp.zeros((), w.dtype), self.precision.init(jnp.concatenate(diagonal)))

    @compilable
    @public
    def step(
        self, params: PyTree, state: OnlineGradientState, batch: Any
    ) -> tuple[PyTree, OnlineGradientState, OnlineInfo]:
        """New parameters, new state and an `OnlineInfo`.

        `batch` is `(x, y)` or `(x, y, weights)`, with the examples along the leading axis."""
        examples = as_batch(batch, "The batch", self.term.objective)
        cost = Cost([term_on_batch(self.term, examples)])
        cost_point = cost.at(params, Pass(1.0, jnp.array(0), has_sites=False))
        (term_point,) = cost_point.points
        term_point.batch_term.refuse_invalid(term_point.z)
        loss, gradient = term_point.loss_and_gradient()
        w, unflatten = _tree.flatten(params)
        total = jnp.asarray(examples.total, w.dtype)

        def summed(mean: Array, count: Array) -> Array:
            # Where all weights are zero, the means are 0/0, and the batch changes nothing.
            return jnp.where(total > 0, count * mean.astype(w.dtype), 0.0)

        g = summed(_tree.flatten(gradient)[0], total)
        rows = summed(metric_of([term_point]).root_rows(), jnp.sqrt(total))

        faded = self.precision.faded(state.precision, self.forget, self.process_noise)
        precision = self.precision.grown(faded, rows)
        change = -self.precision.solve(precision, g)
        numbers = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves((loss, change, precision))]
        # In exact arithmetic the step never goes uphill: if it does, rounding has made the precision indefinite.
        is_good = jnp.all(jnp.stack(numbers)) & (change @ g <= 0) & cost_point.is_valid()

        def accept(new: PyTree, old: PyTree) -> PyTree:
            return _tree.where(is_good, new, old)

        after = accept(OnlineGradientState(state.examples + total, precision), state)
        info = OnlineInfo(loss, is_good, Quantity.of(-(change @ g) / 2, w.dtype, is_good))
        return unflatten(accept(w + change, w)), after, info

    @compilable
    def covariance(self, state: OnlineGradientState) -> Matrix:
        """The covariance of the parameters as a dense matrix, in the order of `jax.flatten_util.ravel_pytree`."""
        return self.precision.covariance(state.precision)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number)
