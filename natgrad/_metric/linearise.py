"""A model at a point: its outputs, and its derivative in both directions, computed once."""

from collections.abc import Callable

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._check import caller, is_concrete, require
from natgrad._model import (
    check_outputs,
    check_params,
    coupling_message,
    differing,
    finite,
    num_examples,
    of_params,
)
from natgrad._point.forward import Forward, forward_with_derivative, traced
from natgrad._program import compat
from natgrad._program.call import call_of, compare_programs
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
        if not self.is_reverse_only:
            return self.forward(v)
        # Some part has a rule for the transpose alone: transpose twice.
        try:
            return jax.linear_transpose(self.pull, self.z)(v)[0]
        except Exception as error:
            raise TypeError(
                "The model can be differentiated in reverse mode only, as loops with checkpoints can, but a product "
                "with its Jacobian is needed. Use `adjoint=diffrax.DirectAdjoint()` in solves of diffrax, `lax.scan` "
                "in place of a loop of equinox, or `KFAC`, `EKFAC` or `Diagonal` with `KLClip()` or `ConstantStep()`, "
                "which need no such product."
            ) from error

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


def linearise(model: Callable, params: PyTree, x: PyTree) -> Linearisation:
    """Check a model and its data, and differentiate it."""
    check_params(params)
    function = of_params(model, x)
    check_outputs(jax.eval_shape(function, params), num_examples(x))
    found = linearised(function, params)
    require(found.z, [finite(found.z)], f"{caller()}: the output of the model", traced=False)
    return found


def check_independent(model: Callable, params: PyTree, x: PyTree, z: Output) -> bool:
    """Refuse a model that couples examples: read off its program, or else by running every example alone. Returns
    whether that could be found out, because everything is concrete."""
    if not is_concrete((params, x, z)):
        return False
    call = call_of(model, params, x, 0)
    _, coupling = compare_programs(call, num_examples(x))
    if not coupling:
        return True
    shared, data = call.split(jax.tree.leaves(x))
    one = lambda data: jax.tree.map(lambda z: z[0], call.of_one(jax.tree.leaves(params), shared, data))
    with jax.ensure_compile_time_eval():
        alone = jax.jit(jax.vmap(one, in_axes=([axis for _, axis in data],)))([leaf for leaf, _ in data])
        are_coupled = differing(z, alone)
    if not is_concrete(are_coupled):
        return False
    if np.any(are_coupled):
        raise ValueError(coupling_message(coupling, np.flatnonzero(are_coupled)))
    return True


def may_couple(model: Callable, params: PyTree, x: PyTree) -> bool:
    """Whether the program of a model does not show that it treats examples independently."""
    try:
        _, coupling = compare_programs(call_of(model, params, x, 0), num_examples(x))
    except ValueError:
        return True
    return bool(coupling)


def linearised(function: Callable[[PyTree], Output], params: PyTree) -> Linearisation:
    """A function of the parameters with its derivative."""
    z, forward = jax.linearize(function, params)
    return Linearisation(z, forward, _is_reverse_only(forward, params), _structure_of(params))


def linearise_tapped(model: Callable, params: PyTree, x: PyTree) -> tuple[Linearisation, Forward]:
    """A model with its derivative, and with taps at its sites for statistics of single examples, from one pass."""
    forward, push = forward_with_derivative(*traced(model, params, x, 0, 2**26), x)
    return Linearisation(forward.z, push, _is_reverse_only(push, params), _structure_of(params)), forward


def _structure_of(params: PyTree) -> tuple:
    leaves, treedef = jax.tree.flatten(_tree.structure(params))
    return tuple(leaves), treedef


def _is_reverse_only(forward: Callable, params: PyTree) -> bool:
    return compat.uses(jax.make_jaxpr(forward)(params).jaxpr, "custom_lin")
