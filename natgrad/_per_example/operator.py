"""The gradients of single examples as a linear map, held in factors."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from natgrad import _tree
from natgrad._check import require
from natgrad._model import check_examples, check_params, finite
from natgrad._per_example import statistics
from natgrad._per_example.blocks import rows_of
from natgrad._per_example.chunks import Budget, stacked
from natgrad._per_example.in_backward import Formed, Statistic, form_all, formed_in_backward
from natgrad._per_example.recording import Recording
from natgrad._per_example.statistics import sum_of, wide
from natgrad._sites.routes import Route, find_route, uses_of
from natgrad._sites.trace import Trace, tapped, trace_example
from natgrad._sites.uses import local
from natgrad._sites.values import evaluate


class PerExample(eqx.Module):
    r"""The matrix whose rows are the gradients $g_i = J_i^\top u_i$ of single examples, for cotangents $u_i$ of their
    outputs, without its rows.

    One forward and one backward pass have left, at every place where a parameter meets the data, the input $a_i$ and the
    cotangent $h_i$ of the result; every statistic is computed from these. Nothing is averaged over examples. If
    `cotangents` had an axis of $C$ in front, so do the results: norms are `(C, N)` and the Gram matrix is
    `(C, N, C, N)`.

    Use it inside `jax.jit`, where statistics that are not asked for cost nothing. Statistics are in single precision
    at least, and can be differentiated."""

    leaves: list[Array]
    x: PyTree
    output_cotangents: list[Array]
    records: list[Array]
    cotangents: dict[int, list[Array]]
    trace: Trace = eqx.field(static=True)
    routes: tuple[Route, ...] = eqx.field(static=True)
    formed: tuple[Formed, ...] = eqx.field(static=True)
    budget: Budget = eqx.field(static=True)
    is_stacked: bool = eqx.field(static=True)

    def gradient(self) -> PyTree:
        r"""$\sum_i g_i$ over examples and cotangents: a covector like the parameters."""
        return self._transposed(jnp.ones(self._shape))

    def squared_sum(self) -> PyTree:
        r"""$\sum_i g_i^2$, entry by entry, over examples and cotangents: a tree like the parameters."""
        recording, formed = self._visit(statistics.squared_sum)
        squares = {one.leaf: one.copy.collect(total) for one, total in formed}
        for route in self.routes:
            if route.leaf not in squares:
                squares[route.leaf] = statistics.squared_sum(recording, route, self.budget)
        return self._unflatten([squares[route.leaf] for route in self.routes])

    def norms(self) -> Float[Array, "*C N"]:
        r"""$|g_i|$ over all parameters."""
        squares = self._summed(statistics.squared_norms)
        # The gradient of a root at zero is taken to be zero.
        positive = squares > 0
        return self._by_cotangent(jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0))

    def gram(self) -> Float[Array, "..."]:
        r"""$\langle g_i, g_j\rangle$ over all parameters, for all pairs of examples and of cotangents."""
        total = self._summed(statistics.gram)
        return total.transpose(1, 0, 3, 2) if self.is_stacked else total[:, 0, :, 0]

    def rows(self, examples: slice = slice(None)) -> PyTree:
        """The gradients themselves, a tree like the parameters with axes `(N,)` or `(C, N)` in front, for a slice of
        the examples. Needs the memory this library exists to save: take few examples at a time."""
        recording = self._recording()

        def of(route: Route) -> Array:
            leaf = self.leaves[route.leaf]
            if not route.uses:
                count = len(range(*examples.indices(self._shape[0])))
                return jnp.zeros((count, self._shape[1], *leaf.shape), wide(leaf))
            block = rows_of(recording, route)
            return stacked(block.expand, jax.tree.map(lambda x: x[examples], block.data), block.chunk(self.budget))

        return self._unflatten([self._by_cotangent(of(route)) for route in self.routes])

    def matvec(self, v: PyTree) -> Float[Array, "*C N"]:
        r"""$\langle g_i, v\rangle$ for a vector like the parameters."""
        check_like(self._unflatten(self.trace.param_structs), v, "`PerExample.matvec`")
        like = jnp.zeros(self._shape, self._dtype)
        # By transposition twice, so that rules for backward passes alone suffice.
        _, pull = jax.vjp(self._transposed, like)
        return self._by_cotangent(pull(_tree.cast_like(v, self._unflatten(self.trace.param_structs)))[0])

    def rmatvec(self, u: Float[Array, "*C N"]) -> PyTree:
        r"""$\sum_i u_i g_i$: a covector like the parameters."""
        count, columns = self._shape
        expected = (columns, count) if self.is_stacked else (count,)
        if jnp.shape(u) != expected:
            raise ValueError(f"`PerExample.rmatvec` needs one weight a row, of shape {expected}, but got {jnp.shape(u)}.")
        return self._transposed(jnp.asarray(u).reshape(columns, count).T)

    def _transposed(self, weights: Float[Array, "N C"]) -> PyTree:
        recording = self._recording()
        totals: dict[Any, Any] = {}
        for site in self.trace.sites:
            records, cotangents = recording.of(site)
            weighed = tuple(jnp.einsum("nc,nc...->n...", weights.astype(wide(h)), h.astype(wide(h))) for h in cotangents)
            function = local(site, site.meeting, recording.free, self.trace.lengths)
            batched = jax.vmap(function, in_axes=(None, 0), axis_size=self._shape[0])
            given = [recording.free[site.operands[k]] for k in site.meeting]
            results, pull = jax.vjp(lambda given: batched(given, records), given)  # noqa: B023
            (gradients,) = pull(_tree.cast_like(weighed, results))
            for k, gradient in zip(site.meeting, gradients, strict=True):
                value = site.operands[k]
                totals[value] = totals[value] + gradient if value in totals else gradient
        values = list(totals)
        num_params = len(self.routes)
        shared = self.leaves[num_params:]
        _, carry_on = jax.vjp(lambda params: evaluate(values, [*params, *shared]), self.leaves[:num_params])
        return self._unflatten(carry_on(list(totals.values()))[0])

    def _summed(self, statistic: Statistic) -> Array:
        """A statistic that parameters add to, summed over them."""
        recording, formed = self._visit(statistic)
        left = {route.leaf for route in self.routes} - {one.leaf for one, _ in formed}
        parts = [statistic(recording, route, self.budget) for route in self.routes if route.leaf in left and route.uses]
        parts += [jnp.sum(total.reshape(-1, *total.shape[len(one.site.loops) :]), axis=0) for one, total in formed]
        return sum_of(parts)

    def _visit(self, statistic: Statistic) -> tuple[Recording, list[tuple[Formed, Array]]]:
        """The recording, without those sites at which the statistic is formed in the backward pass."""
        if not self.formed:
            return self._recording(), []
        first = [u[0] for u in self.output_cotangents]
        return form_all(self.trace, self.formed, self.leaves, self.x, first, statistic, self.budget)

    def _recording(self) -> Recording:
        free = self.trace.free_values(self.leaves)
        records = dict(zip(self.trace.recorded(), self.records, strict=True))
        return Recording(self.leaves, free, records, self.cotangents, self.trace.lengths)

    @property
    def _shape(self) -> tuple[int, int]:
        """Examples, and cotangents of each."""
        return self.trace.num_examples, self.output_cotangents[0].shape[0]

    def _by_cotangent(self, rows: Array) -> Array:
        """`(N, C, ...)` as `(C, N, ...)`, or without the second axis if there was no axis of cotangents."""
        return rows.swapaxes(0, 1) if self.is_stacked else rows[:, 0]

    def _unflatten(self, leaves: list[Any]) -> PyTree:
        return jax.tree.unflatten(jax.tree.structure(self.trace.params), leaves)

    @property
    def _dtype(self):
        return _tree.flatten(self._unflatten(self.leaves[: len(self.routes)]))[0].dtype


def per_example(
    model: Callable,
    params: PyTree,
    x: PyTree,
    cotangents: PyTree,
    *,
    in_axes: PyTree = 0,
    check: bool = True,
    budget: int = 2**26,
) -> PerExample:
    r"""The gradients $g_i = J_i^\top u_i$ of single examples as a linear map, at the cost of about one gradient.

    **Arguments:**

    - `model`: `model(params, x) -> z`, with examples along the leading axis of `z`. With `x=None` it is
      `model(params)`, one example.
    - `cotangents`: $u_i$, like the outputs: for the gradients of a loss, its derivative with respect to `z`. An axis in
      front of all leaves gives several to each example, for which the forward pass is shared.
    - `in_axes`: as in `jax.vmap`, where the examples are in `x`: an axis, `None` for arrays that all examples share, or
      a tree of these.
    - `check`: whether to test, on concrete data, that the model treats examples independently.
    - `budget`: how many bytes may be used at once for what has to be formed for each example.
    """
    subject = "`per_example`"
    check_params(params, subject)
    trace = trace_example(model, params, x, in_axes, subject)
    is_stacked = check_cotangents(cotangents, trace.outputs, x, subject)
    leaves = [jnp.asarray(leaf) for leaf in trace.leaves(params, x)]
    forward = tapped(trace, leaves, x)
    z = jax.tree.unflatten(jax.tree.structure(trace.outputs), forward.z)
    require(z, [finite(z)], f"{subject}: the output of the model", traced=False)
    if check:
        check_examples(model, params, x, z, subject, in_axes)
    shaped = [
        jnp.asarray(u).astype(out.dtype).reshape(-1, *out.shape)
        for u, out in zip(jax.tree.leaves(cotangents), forward.z, strict=True)
    ]
    at_sites = jax.vmap(forward.pull, out_axes=1)(shaped)
    records = [forward.records[value] for value in trace.recorded()]
    routes = [find_route(uses_of(trace.sites, leaf), leaf, trace.lengths) for leaf in range(len(trace.names))]
    # Several cotangents share what is recorded, so nothing is gained by forming their statistics one after the other.
    candidates = [formed_in_backward(route, trace.lengths) for route in routes] if len(shaped[0]) == 1 else []
    formed = tuple(one for one in candidates if one is not None)
    return PerExample(
        leaves, x, shaped, records, at_sites, trace, tuple(routes), formed, Budget(budget), is_stacked
    )


def check_cotangents(cotangents: PyTree, outputs: PyTree, x: PyTree, subject: str) -> bool:
    """Whether there is an axis of several cotangents an example; anything else unlike the outputs is refused."""
    without_data = (lambda shape: shape[1:]) if x is None else (lambda shape: shape)
    expected = jax.tree.map(lambda leaf: without_data(leaf.shape), outputs)
    given = jax.tree.map(jnp.shape, cotangents)
    if given == expected:
        return False
    same_tree = jax.tree.structure(cotangents) == jax.tree.structure(outputs)
    pairs = list(
        zip(map(jnp.shape, jax.tree.leaves(cotangents)), map(lambda o: without_data(o.shape), jax.tree.leaves(outputs)))
    )
    if same_tree and all(u[1:] == z for u, z in pairs) and len({u[:1] for u, _ in pairs}) == 1 and pairs[0][0][:1] != (0,):
        return True
    raise ValueError(
        f"{subject} needs `cotangents` like the outputs of the model, of shape {expected}, perhaps with one more axis in "
        f"front, but got {given}."
    )


def check_like(expected: PyTree, given: PyTree, subject: str) -> None:
    shapes = [jax.tree.map(lambda leaf: tuple(jnp.shape(leaf)), tree) for tree in (expected, given)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{subject} needs a tree with the structure and shapes of the parameters, {shapes[0]}, but got {shapes[1]}."
        )
