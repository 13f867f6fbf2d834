"""The gradients of single examples as a linear map, held in factors."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from natgrad import _tree
from natgrad._model import check_structure
from natgrad._point import statistics
from natgrad._point.explain import Explanation, explain
from natgrad._point.records import MemoryBudget, SiteRecords, stacked
from natgrad._point.rematerialised import RematerialisedUse, Statistic, form_all
from natgrad._point.statistics import rows_of, use_factors
from natgrad._program.trace import Program
from natgrad._program.values import evaluate
from natgrad._uses.base import Use, local, local_vjp
from natgrad._uses.parameter_uses import ParameterUses


class SiteFactors(NamedTuple):
    """One use of a parameter, in `G` groups (with weights of their own) at `T` positions (which share them)."""

    inputs: Float[Array, "N G T d"]
    cotangents: Float[Array, "*C N G T o"]


class PerExample(eqx.Module):
    r"""The matrix whose rows are the gradients of single examples, without forming the rows.

    The rows are $g_i = J_i^\top u_i$ for cotangents $u_i$ of the outputs.

    One forward and one backward pass have left, at every place where a parameter meets the data, the input $a_i$ and
    the cotangent $h_i$ of the result; every statistic is computed from these. Nothing is averaged over examples. If
    `cotangents` had an axis of $C$ in front, so do the results: norms are `(C, N)` and the Gram matrix is
    `(C, N, C, N)`.

    Use it inside `jax.jit`, where statistics that are not asked for cost nothing. Statistics are in single precision
    at least, and can be differentiated.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0, 0.0], [3.0, 4.0]])
    gradients = ng.per_example(lambda w, x: x @ w, jnp.zeros(2), x, jnp.ones(2))
    assert jnp.allclose(gradients.gram(), x @ x.T)
    assert jnp.allclose(gradients.squared_sum(), jnp.array([10.0, 16.0]))
    ```
    """

    leaves: list[Array]
    x: PyTree
    output_cotangents: list[Array]
    records: list[Array]
    cotangents: dict[int, list[Array]]
    program: Program = eqx.field(static=True)
    parameters: tuple[ParameterUses, ...] = eqx.field(static=True)
    formed: tuple[RematerialisedUse, ...] = eqx.field(static=True)
    budget: MemoryBudget = eqx.field(static=True)
    is_stacked: bool = eqx.field(static=True)

    def gradient(self) -> PyTree:
        r"""$\sum_i g_i$ over examples and cotangents: a covector like the parameters."""
        return self._transposed(jnp.ones(self._shape))

    def squared_sum(self) -> PyTree:
        r"""$\sum_i g_i^2$, entry by entry, over examples and cotangents: a tree like the parameters."""
        return self.power_sum(2)

    def power_sum(self, power: int) -> PyTree:
        r"""$\sum_i g_i^p$, entry by entry, for an even power."""
        if power < 2 or power % 2:
            raise ValueError(f"`PerExample.power_sum` needs an even power, 2 or more, but got {power}.")
        statistic = functools.partial(statistics.power_sum, power=power)
        recording, formed = self._visit(statistic)
        powers = {use.leaf: use.copy.collect(total) for use, total in formed}
        for parameter in self.parameters:
            if parameter.leaf not in powers:
                powers[parameter.leaf] = statistic(recording, parameter, self.budget)
        return self._unflatten([powers[parameter.leaf] for parameter in self.parameters])

    def norms(self) -> Float[Array, "*C N"]:
        r"""$|g_i|$ over all parameters."""
        squares = jnp.maximum(self._summed(statistics.squared_norms, self._shape), 0)
        # The gradient of a root at zero is taken to be zero.
        is_zero = squares == 0
        return self._by_cotangent(jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, squares))))

    def gram(self) -> Float[Array, "..."]:
        r"""$\langle g_i, g_j\rangle$ over all parameters, for all pairs of examples and of cotangents."""
        total = self._summed(statistics.gram, 2 * self._shape)
        return total.transpose(1, 0, 3, 2) if self.is_stacked else total[:, 0, :, 0]

    def rows(self, examples: slice = slice(None)) -> PyTree:
        """The gradients themselves, a tree like the parameters with axes `(N,)` or `(C, N)` in front, for a slice of
        the examples. Needs the memory this library exists to save: take few examples at a time."""
        recording = self.recording()
        count = len(range(*examples.indices(self._shape[0])))

        def of(parameter: ParameterUses) -> Array:
            leaf = self.leaves[parameter.leaf]
            # Not every model runs on no examples at all.
            if not parameter.uses or not count:
                return jnp.zeros((count, self._shape[1], *leaf.shape), _tree.wide(leaf))
            block = rows_of(recording, parameter)
            return stacked(block.expand, _tree.take(block.data, examples), block.chunk(self.budget))

        return self._unflatten([self._by_cotangent(of(parameter)) for parameter in self.parameters])

    def matvec(self, v: PyTree) -> Float[Array, "*C N"]:
        r"""$\langle g_i, v\rangle$ for a vector like the parameters."""
        structs = self._unflatten(self.program.param_structs)
        check_structure(structs, v, "`PerExample.matvec`")
        v = _tree.cast_like(v, structs)
        try:
            # By transposition twice, so that rules for backward passes alone suffice.
            _, pull = jax.vjp(self._transposed, jnp.zeros(self._shape, self._dtype))
            return self._by_cotangent(pull(v)[0])
        except Exception:
            # Loops with checkpoints, as in Equinox and diffrax, have a backward pass that cannot be transposed.
            return self._by_cotangent(self._products(jax.tree.leaves(v)))

    def rmatvec(self, u: Any) -> PyTree:
        r"""$\sum_i u_i g_i$: a covector like the parameters."""
        count, columns = self._shape
        expected = (columns, count) if self.is_stacked else (count,)
        if jnp.shape(u) != expected:
            raise ValueError(
                f"`PerExample.rmatvec` needs one weight a row, of shape {expected}, but got {jnp.shape(u)}."
            )
        return self._transposed(jnp.asarray(u).reshape(columns, count).T)

    def factors(self) -> dict[str, list[SiteFactors]]:
        r"""For every parameter that takes part in products, and for each of its uses, the inputs and cotangents whose
        products, summed over positions, are the gradients: what Kronecker factors are made of."""
        recording = self.recording()
        return {
            self.program.names[parameter.leaf]: [
                SiteFactors(inputs, cotangents.swapaxes(0, 1) if self.is_stacked else cotangents[:, 0])
                for group in parameter.groups
                for inputs, cotangents in map(functools.partial(use_factors, recording), group.members)
            ]
            for parameter in self.parameters
            if any(group.members for group in parameter.groups)
        }

    def explain(self) -> Explanation:
        """Every site with its rule, its parameters and the memory it needs, and how each parameter is reached."""
        return explain(self.program, self.parameters, self.formed, self._shape[1])

    def _transposed(self, weights: Float[Array, "N C"]) -> PyTree:
        recording = self.recording()
        totals: dict[Any, Any] = {}
        for site in self.program.sites:
            records, cotangents = recording.of(site)
            weighed = tuple(
                jnp.einsum("nc,nc...->n...", weights.astype(_tree.wide(h)), h.astype(_tree.wide(h))) for h in cotangents
            )
            function = local(site, site.meeting, recording.free, self.program.lengths)
            batched = jax.vmap(function, in_axes=(None, 0), axis_size=self._shape[0])
            given: list[Any] = [recording.free[Use(site, k).value] for k in site.meeting]
            results, pull = local_vjp(site, batched, given, records)
            gradients = pull(_tree.cast_like(weighed, results))
            for k, gradient in zip(site.meeting, gradients, strict=True):
                value = site.operands[k]
                totals[value] = totals[value] + gradient if value in totals else gradient
        values = list(totals)
        num_params = len(self.parameters)
        shared = self.leaves[num_params:]
        _, carry_on = jax.vjp(lambda params: evaluate(values, [*params, *shared]), self.leaves[:num_params])
        return self._unflatten(carry_on(list(totals.values()))[0])

    def _products(self, v: list[Array]) -> Float[Array, "N C"]:
        """Inner products with a vector, of gradients that are formed a few examples at a time."""
        recording, total = self.recording(), jnp.zeros(self._shape, self._dtype)
        for parameter, along in zip(self.parameters, v, strict=True):
            if parameter.uses:
                block = rows_of(recording, parameter)

                def product(part, expand=block.expand, v=along):
                    return jnp.tensordot(expand(part), v, v.ndim)

                total = total + stacked(product, block.data, block.chunk(self.budget)).astype(total.dtype)
        return total

    def _summed(self, statistic: Statistic, shape: tuple[int, ...]) -> Array:
        """A statistic that parameters add to, summed over them."""
        recording, formed = self._visit(statistic)
        left = {parameter.leaf for parameter in self.parameters} - {use.leaf for use, _ in formed}
        parts = [
            statistic(recording, parameter, self.budget)
            for parameter in self.parameters
            if parameter.leaf in left and parameter.uses
        ]
        parts += [jnp.sum(total.reshape(-1, *total.shape[len(use.site.loops) :]), axis=0) for use, total in formed]
        return _tree.sum_leaves(parts) if parts else jnp.zeros(shape, self._dtype)

    def _visit(self, statistic: Statistic) -> tuple[SiteRecords, list[tuple[RematerialisedUse, Array]]]:
        """The recording, without those sites at which the statistic is formed in the backward pass."""
        if not self.formed:
            return self.recording(), []
        first = [u[0] for u in self.output_cotangents]
        return form_all(self.program, self.formed, self.leaves, self.x, first, statistic, self.budget)

    def recording(self) -> SiteRecords:
        free = self.program.free_values(self.leaves)
        records = dict(zip(self.program.recorded(), self.records, strict=True))
        return SiteRecords(self.leaves, free, records, self.cotangents, self.program.lengths)

    @property
    def _shape(self) -> tuple[int, int]:
        """Examples, and cotangents of each."""
        return self.program.num_examples, self.output_cotangents[0].shape[0]

    def _by_cotangent(self, rows: Array) -> Array:
        """`(N, C, ...)` as `(C, N, ...)`, or without the second axis if there was no axis of cotangents."""
        return rows.swapaxes(0, 1) if self.is_stacked else rows[:, 0]

    def _unflatten(self, leaves: list[Any]) -> PyTree:
        return jax.tree.unflatten(jax.tree.structure(self.program.params), leaves)

    @property
    def _dtype(self):
        return _tree.flatten(self._unflatten(self.leaves[: len(self.parameters)]))[0].dtype
