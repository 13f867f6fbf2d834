"""A model at a point: its outputs, and its derivative in both directions, computed once."""

from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._check import require
from natgrad._model import check_examples, check_outputs, check_params, finite, num_examples, of_params
from natgrad._per_example.forward import Forward, forward_with_derivative
from natgrad._sites import compat
from natgrad._types import Output


class Linearisation(eqx.Module):
    r"""The outputs $z = f(w, x)$ of a batch and the Jacobian $J$ at $w$, as products in both directions.

    The forward pass is done once; a product with $J$ or its transpose reuses what it stored."""

    z: Output
    forward: Callable[[PyTree], Output]
    is_reverse_only: bool = eqx.field(static=True)
    _structure: tuple = eqx.field(static=True)

    def push(self, v: PyTree) -> Output:
        r"""$J v$."""
        if self.is_reverse_only:
            # Some part has a rule for the transpose alone: transpose twice.
            return jax.linear_transpose(self.pull, self.z)(v)[0]
        return self.forward(v)

    def pull(self, u: Output) -> PyTree:
        r"""$J^\top u$."""
        return jax.linear_transpose(self.forward, self.structure)(u)[0]

    @property
    def structure(self) -> PyTree:
        leaves, treedef = self._structure
        return jax.tree.unflatten(treedef, leaves)

    @property
    def num_examples(self) -> int:
        return jax.tree.leaves(self.z)[0].shape[0]


def linearise(model: Callable, params: PyTree, x: PyTree, *, check: bool, subject: str) -> Linearisation:
    """Check a model and its data, and differentiate it."""
    check_params(params, subject)
    function = of_params(model, x, subject)
    check_outputs(jax.eval_shape(function, params), num_examples(x, subject), subject)
    found = linearised(function, params)
    require(found.z, [finite(found.z)], f"{subject}: the output of the model", traced=False)
    if check:
        check_examples(model, params, x, found.z, subject)
    return found


def linearised(function: Callable[[PyTree], Output], params: PyTree) -> Linearisation:
    """A function of the parameters with its derivative."""
    z, forward = jax.linearize(function, params)
    return Linearisation(z, forward, _is_reverse_only(forward, params), _structure_of(params))


def linearise_tapped(model: Callable, params: PyTree, x: PyTree, subject: str) -> tuple[Linearisation, Forward]:
    """A model with its derivative, and with taps at its sites for statistics of single examples, from one pass."""
    forward, push = forward_with_derivative(model, params, x, in_axes=0, budget=2**26, subject=subject)
    return Linearisation(forward.z, push, _is_reverse_only(push, params), _structure_of(params)), forward


def _structure_of(params: PyTree) -> tuple:
    leaves, treedef = jax.tree.flatten(_tree.structure(params))
    return tuple(leaves), treedef


def _is_reverse_only(forward: Callable, params: PyTree) -> bool:
    return compat.uses(jax.make_jaxpr(forward)(params).jaxpr, "custom_lin")
