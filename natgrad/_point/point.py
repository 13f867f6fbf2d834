"""A model at its parameters on a batch, after one forward pass: everything else is derived from it."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from natgrad import _tree
from natgrad._check import caller
from natgrad._geometry.base import AbstractGeometry
from natgrad._geometry.bregman import LossGeometry
from natgrad._model import coupling_message, differing
from natgrad._point.batch import Batch, check_weights, weigh
from natgrad._point.per_example import PerExample
from natgrad._point.records import MemoryBudget, summed
from natgrad._point.rematerialised import formed_in_backward
from natgrad._program import compat
from natgrad._program.trace import Program, linearise_with_taps, trace_example
from natgrad._types import Key, Output
from natgrad._uses.parameter_uses import ParameterUses, find_uses, uses_of


class OutputMap(eqx.Module):
    r"""The map $w \mapsto z = f(w, x)$ from parameters to the outputs of a batch, and the geometry of the outputs."""

    model: Callable = eqx.field(converter=_tree.as_callable)
    batch: Batch
    geometry: AbstractGeometry | LossGeometry | None = None
    budget: MemoryBudget = eqx.field(default=MemoryBudget(), static=True)

    def __call__(self, params: PyTree) -> Output:
        if self.batch.x is None:
            # A model without data counts as a batch of one example.
            return jax.tree.map(lambda z: jnp.asarray(z)[None], self.model(params))
        return self.model(params, self.batch.x)

    def at(self, params: PyTree) -> "Point":
        """The map at its parameters: outputs, and products with the Jacobian."""
        z, tangent = jax.linearize(lambda params: self(params), params)
        return Point(self, params, z, tangent, is_reverse_only=_is_reverse_only(tangent, params))

    def with_sites(self, params: PyTree, *, check: bool = False) -> "Point":
        """As `at`, with what statistics of single examples need.

        With `check`, a model whose program may couple examples is also run on the batch as it is."""
        point = self.traced(params, self.trace(params))
        if not check or not point.program.coupling:
            return point
        are_coupled = differing(self(params), point.z)
        return eqx.tree_at(lambda point: point.are_coupled, point, are_coupled, is_leaf=lambda leaf: leaf is None)

    def trace(self, params: PyTree) -> Program:
        """The program of one example."""
        return trace_example(self.model, params, self.batch.x, self.batch.in_axes)

    def traced(self, params: PyTree, program: Program) -> "Point":
        """The map at its parameters, given the program of one example."""
        leaves = [jnp.asarray(leaf) for leaf in program.leaves(params, self.batch.x)]
        z, tangent, records = linearise_with_taps(program, leaves, self.batch.x)
        z = jax.tree.unflatten(jax.tree.structure(program.outputs), z)
        sites = Sites(
            program,
            tuple(find_uses(uses_of(program.sites, leaf), leaf, program.lengths) for leaf in range(len(program.names))),
        )
        is_reverse_only = _is_reverse_only(tangent, jax.tree.leaves(params), program.taps())
        return Point(self, params, z, tangent, records, sites=sites, is_reverse_only=is_reverse_only)


class Sites(NamedTuple):
    """Where the parameters of a program meet the data, and how each parameter is used there."""

    program: Program
    uses: tuple[ParameterUses, ...]


class Point(eqx.Module):
    r"""A model at its parameters on a batch, after one forward pass.

    Holds the outputs $z_i = f(w, x_i)$ and what products with the Jacobian $J$ need, so that none of them repeats the
    forward pass. `pullback`, `diagonal`, `kfac`, `ekfac`, `gram`, `per_example` and `natural_gradient` accept a point
    in place of the model: all metrics of one point then cost one forward pass together. Made by `evaluate`.

    With sites, the inputs of every operation that a parameter takes part in were recorded, from which statistics of
    single examples are computed.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0], [2.0]])
    point = ng.evaluate(lambda w, x: x @ w, ng.Euclidean(), jnp.ones(1), x)
    assert jnp.allclose(point.z, jnp.array([1.0, 2.0]))
    assert jnp.allclose(point.push(jnp.ones(1)), jnp.array([1.0, 2.0]))
    assert jnp.allclose(ng.pullback(point).as_matrix(), ng.kfac(point).as_matrix())
    ```
    """

    map: OutputMap
    params: PyTree
    z: Output
    # Linear in a change of the parameters; with sites in their leaves and in what is added to the results of sites.
    tangent: Callable
    records: list[Array] | None = None
    # Which outputs are not the outputs of the batch; `None` where the program shows that there are none.
    are_coupled: Bool[Array, " N"] | None = None
    sites: Sites | None = eqx.field(default=None, static=True)
    is_reverse_only: bool = eqx.field(default=False, static=True)

    # The Jacobian -----------------------------------------------------------------------------------------

    def push(self, v: PyTree) -> Output:
        r"""The change $J v$ of the outputs along a vector."""
        if not self.is_reverse_only:
            return self.tangent_of_params(v)
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
        r"""The covector $J^\top u$, summed over examples."""
        return jax.linear_transpose(self.tangent_of_params, self.structure)(u)[0]

    def tangent_of_params(self, v: PyTree) -> Output:
        """The change of the outputs along a vector, by forward mode."""
        if self.sites is None:
            return self.tangent(v)
        leaves = self.tangent(jax.tree.leaves(v), self.program.taps())
        return jax.tree.unflatten(jax.tree.structure(self.program.outputs), leaves)

    # The metric of the outputs ----------------------------------------------------------------------------

    def metric_mv(self, u: Output) -> Output:
        r"""Products $G_z u$ with the metric of every output, weighed."""
        return self.weighed(self._of_examples(lambda geometry, z, u: geometry.metric_mv(z, u), self.weighed(u)))

    def columns(self, key: Key | None = None, num_samples: int = 1) -> Output:
        r"""Columns $s_{ic}$ with $\sum_c s_{ic} s_{ic}^\top = G_z(z_i)$, weighed, as `(C, N, ...)`: exact without a
        key, otherwise `num_samples` draws over the root of their number, for which this holds on average."""
        check_num_samples(num_samples)
        if key is None:
            return self.exact_columns()
        split = lambda key: jax.random.split(key, self.num_examples)
        return self.sampled_columns(jax.vmap(split)(jax.random.split(key, num_samples)))

    def exact_columns(self) -> Output:
        """The columns of `geometry.factor` at every output."""
        try:
            columns = self._of_examples(lambda geometry, z: geometry.factor(z), out_axes=1)
        except NotImplementedError as error:
            raise TypeError(
                f"`{self._geometry_name}` has no factor, so backward passes cannot be exact. Give it a `_factor`, or "
                "pass a `key`, with which cotangents are sampled instead."
            ) from error
        given, expected = ([leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (columns, self.z))
        if [shape[1:] for shape in given] != expected or len({shape[:1] for shape in given}) != 1:
            raise ValueError(
                f"`{self._geometry_name}.factor` needs to return columns like the output of an example, with their "
                f"axis in front, but for an output of shapes {[shape[1:] for shape in expected]} it returned shapes "
                f"{[(*shape[:1], *shape[2:]) for shape in given]}."
            )
        return self.weighed(columns, lead=1)

    def sampled_columns(self, keys: Key) -> Output:
        """Draws of `geometry.sample` over the root of their number, for keys in the order `(draws, examples)`."""

        def draw(keys):
            return self._of_examples(lambda geometry, z, key: geometry.sample(z, key), keys)

        return self.weighed(_tree.scale(keys.shape[0] ** -0.5, jax.vmap(draw)(keys)), lead=1)

    def weighed(self, tree: Output, lead: int = 0) -> Output:
        """Tangents or cotangents of outputs, with `lead` axes in front, times the roots of the weights."""
        weights = self.map.batch.relative_weights()
        if weights is None:
            return tree
        check_weights(weights, self.z)
        return weigh(jnp.sqrt(weights), tree, lead)

    def example_weights(self) -> Float[Array, " N"] | None:
        """Weights of examples with mean one."""
        batch = self.map.batch
        weights = batch.relative_weights()
        return None if weights is None else batch.with_weights(weights).example_weights

    # Single examples --------------------------------------------------------------------------------------

    def per_example(self, cotangents: Output, *, is_stacked: bool) -> PerExample:
        """The gradients of examples for cotangents like `z`, or with an axis of several in front. Needs sites."""
        program, z = self.program, jax.tree.leaves(self.z)
        shaped = [
            jnp.asarray(u).astype(z.dtype).reshape(-1, *z.shape)
            for u, z in zip(jax.tree.leaves(cotangents), z, strict=True)
        ]
        taps = program.taps()
        pull = jax.linear_transpose(self.tangent, jax.tree.leaves(self.structure), taps)
        at_sites = jax.vmap(lambda u: pull(u)[1], out_axes=1)(shaped)
        # Several cotangents share what is recorded, so their statistics are not formed one after the other.
        is_single = shaped[0].shape[0] == 1
        formed = [formed_in_backward(parameter, program.lengths) for parameter in self.uses if is_single]
        assert self.records is not None
        return PerExample(
            [jnp.asarray(leaf) for leaf in program.leaves(self.params, self.map.batch.x)],
            self.map.batch.x,
            shaped,
            self.records,
            at_sites,
            program,
            self.uses,
            tuple(use for use in formed if use is not None),
            self.map.budget,
            is_stacked,
        )

    def power_sum(self, columns: Output, power: int = 2) -> PyTree:
        """Sums of powers of gradients over examples and columns, as many columns at a time as the budget allows."""

        def sums(columns: Output) -> PyTree:
            # One column at a time keeps what rematerialisation saves.
            is_single = jax.tree.leaves(columns)[0].shape[0] == 1
            columns = _tree.take(columns, 0) if is_single else columns
            return self.per_example(columns, is_stacked=not is_single).power_sum(power)

        return summed(sums, columns, self.column_chunk(columns))

    def column_chunk(self, columns: Output) -> int:
        """How many columns to pull back at a time: each adds a cotangent for every site to memory."""
        program = self.program

        def steps(site):
            return program.num_examples * math.prod(program.lengths[loop] for loop in site.loops)

        size = sum(steps(site) * math.prod(a.shape) * a.dtype.itemsize for site in program.sites for a in site.avals)
        return self.map.budget.chunk(jax.tree.leaves(columns)[0].shape[0], size)

    # Shapes -----------------------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        assert self.sites is not None, "unreachable: whoever asks for statistics makes a point with sites"
        return self.sites.program

    @property
    def uses(self) -> tuple[ParameterUses, ...]:
        assert self.sites is not None
        return self.sites.uses

    @property
    def structure(self) -> PyTree:
        """The shapes and dtypes of the parameters."""
        return _tree.structure(self.params)

    @property
    def num_examples(self) -> int:
        return jax.tree.leaves(self.z)[0].shape[0]

    @property
    def total_weight(self) -> Any:
        """The sum of the weights of examples: without weights, their number."""
        return self.map.batch.total

    def refuse_coupled(self, values: PyTree) -> PyTree:
        """Values that raise while the program runs if the model couples examples."""
        if self.are_coupled is None:
            return values
        return eqx.error_if(values, jnp.any(self.are_coupled), coupling_message(self.program.coupling))

    def _of_examples(self, function: Callable, *trees: Any, out_axes: int = 0) -> Any:
        """`function(geometry, z, ...)` for every example."""
        geometry = self.map.geometry
        assert geometry is not None, "unreachable: `geometry_of` has refused a point without a geometry"
        if isinstance(geometry, LossGeometry):
            of_one = lambda z, y, *rest: function(geometry.at(y), z, *rest)
            return jax.vmap(of_one, out_axes=out_axes)(self.z, self.map.batch.y, *trees)
        return jax.vmap(lambda z, *rest: function(geometry, z, *rest), out_axes=out_axes)(self.z, *trees)

    @property
    def _geometry_name(self) -> str:
        return type(self.map.geometry).__name__


def check_num_samples(num_samples: int) -> None:
    if not isinstance(num_samples, int) or num_samples < 1:
        raise ValueError(f"{caller()} needs `num_samples` to be a whole number of at least 1, but got {num_samples}.")


def _is_reverse_only(tangent: Callable, *arguments: PyTree) -> bool:
    return compat.uses(jax.make_jaxpr(tangent)(*arguments).jaxpr, "custom_lin")
