"""Metrics on parameters: symmetric operators on a pytree, and the algebra that keeps them so."""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, PyTree

from natgrad import _tree
from natgrad._check import Requirement, public, real_array, require
from natgrad._model import check_structure
from natgrad._types import Key, Matrix, Scalar
from natgrad._vector import Covector, Vector, untyped

# How many numbers of rows may be held at once while a dense quantity is put together.
MAX_ROW_ENTRIES = 2**25


class AbstractMetric(lx.AbstractLinearOperator):
    r"""A symmetric operator $G$ on the parameter pytree, positive semidefinite unless it is a Hessian.

    It takes a vector (a change of the parameters) to a covector.

    Metrics are lineax operators, so `lineax.linear_solve` accepts them. Sums, positive multiples and restrictions of
    metrics are metrics. Matrices and flat vectors follow `jax.flatten_util.ravel_pytree`.

    Most metrics have a *root*: a linear map $R$ to a space of samples (rows: columns of the output metric times
    examples) with $G = R^\top R$, stated by `root_size`, `root_mv` and `root_transpose_mv`. Exact diagonals, samples
    and sample-space solves need it. A sum stacks the rows of its terms, a multiple scales them, and a restriction
    slices them.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0, 0.0], [0.0, 2.0]])
    metric = ng.pullback(lambda w, x: x @ w, ng.Euclidean(), jnp.zeros(2), x)
    assert jnp.allclose(metric.mv(jnp.ones(2)), jnp.array([0.5, 2.0]))
    assert jnp.allclose((metric + 0.5 * ng.identity(jnp.zeros(2))).diagonal(), jnp.array([1.0, 2.5]))
    assert jnp.allclose(metric.norm(jnp.ones(2)) ** 2, 2.5)
    ```
    """

    # What a metric states ------------------------------------------------------------------------------

    @abstractmethod
    def _mv(self, v: PyTree) -> PyTree: ...

    @property
    def root_size(self) -> int | None:
        """The number of rows of the root; `None` for a metric that has none."""
        return None

    def root_mv(self, v: PyTree) -> Float[Array, " rows"]:
        r"""$R v$."""
        raise TypeError(f"`{type(self).__name__}` has no root: it is not a sum over samples.")

    def root_transpose_mv(self, u: Float[Array, " rows"]) -> PyTree:
        r"""$R^\top u$."""
        raise TypeError(f"`{type(self).__name__}` has no root: it is not a sum over samples.")

    @property
    def is_semidefinite(self) -> bool:
        """Whether the metric is positive semidefinite by construction."""
        return True

    @property
    def is_diagonal(self) -> bool:
        """Whether the metric is diagonal by construction."""
        return False

    @property
    def is_traceable(self) -> bool:
        """Whether products can be compiled into a larger program."""
        return True

    def _sample(self, key: Key) -> PyTree:
        if self.root_size is None:
            raise TypeError(f"`{type(self).__name__}` cannot be sampled: only a covariance can, which has a root.")
        return self.root_transpose_mv(jax.random.normal(key, (self.root_size,), self._dtype))

    # What follows --------------------------------------------------------------------------------------

    @public
    def mv(self, vector: PyTree) -> PyTree:
        r"""The product $G v$. A `Vector` gives a `Covector`."""
        tree, typed = untyped(vector, Vector)
        check_structure(self.in_structure(), tree, f"`{type(self).__name__}.mv`")
        product = self._mv(tree)
        return Covector(product) if typed else product

    @public
    def inner(self, u: PyTree, v: PyTree) -> Scalar:
        r"""$u^\top G v$."""
        return _tree.vdot(untyped(u, Vector)[0], self.mv(untyped(v, Vector)[0]))

    def norm(self, v: PyTree) -> Scalar:
        r"""$\sqrt{v^\top G v}$."""
        return jnp.sqrt(jnp.maximum(self.inner(v, v), 0.0))

    def as_matrix(self) -> Matrix:
        r"""The dense $P \times P$ matrix. Costs $P$ products, or as many as the root has rows if those are fewer."""
        if self.root_size is not None and self.root_size < self.in_size():
            rows = self.root_rows()
            return rows.T @ rows
        return self._by_columns(lambda column, index: column)

    def diagonal(self) -> PyTree:
        """The exact diagonal, as a tree like the parameters. Costs as much as `as_matrix`, without its memory."""
        if self.root_size is not None and self.root_size < self.in_size():
            flat = jnp.sum(self._by_rows(lambda rows: jnp.sum(rows**2, axis=0)), axis=0)
        else:
            flat = self._by_columns(lambda column, index: column[index])
        return self._unflatten(flat)

    def trace(self) -> Scalar:
        """The exact trace."""
        return jnp.sum(_tree.flatten(self.diagonal())[0])

    def sample(self, key: Key) -> PyTree:
        r"""A random covector with mean zero and covariance $G$ (a pseudo-gradient)."""
        return self._sample(key)

    def root_rows(self) -> Float[Array, "rows P"]:
        r"""$R$ as a matrix: row by row, unless there is a better way."""
        rows = self._by_rows(lambda rows: rows)
        return rows.reshape(-1, rows.shape[-1])[: self.root_size]

    def root_gram(self) -> Float[Array, "rows rows"]:
        r"""$R R^\top$, the metric in the space of samples: from all rows if they fit in memory, else by products."""
        size = self.root_size
        if size is None:
            raise TypeError(
                f"`{type(self).__name__}` has no sample space: it is not a sum over samples. Use `CG` or `Cholesky`."
            )
        if size * self.in_size() <= MAX_ROW_ENTRIES:
            rows = self.root_rows()
            return rows @ rows.T

        def row(index):
            basis = jnp.zeros(size, self._dtype).at[index].set(1.0)
            return self.root_mv(self.root_transpose_mv(basis))

        return jax.lax.map(row, jnp.arange(size), batch_size=chunk_size(max(size, self.in_size())))

    def restrict(self, filter_spec: PyTree) -> "AbstractMetric":
        """The metric on the parameters that `filter_spec` selects (`True` or a condition on leaves, as in
        `equinox.filter`), the others held fixed. Its vectors have `None` in their place."""
        return RestrictedMetric(self, filter_spec)

    def transpose(self) -> "AbstractMetric":
        return self

    def out_structure(self) -> PyTree:
        return self.in_structure()

    def __add__(self, other: Any) -> lx.AbstractLinearOperator:
        if not isinstance(other, AbstractMetric):
            return lx.AddLinearOperator(self, other)
        return SumMetric((self, other))

    def __mul__(self, scale: Any) -> "AbstractMetric":
        return ScaledMetric(self, scale)

    def __rmul__(self, scale: Any) -> "AbstractMetric":
        return ScaledMetric(self, scale)

    def __truediv__(self, divisor: Any) -> "AbstractMetric":
        return ScaledMetric(self, 1 / divisor)

    @property
    def _dtype(self):
        return _tree.flatten(self._zeros())[0].dtype

    def _zeros(self) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.in_structure())

    def _unflatten(self, flat: Array) -> PyTree:
        return _tree.flatten(self._zeros())[1](flat)

    def _by_columns(self, keep):
        """`keep(column, index)` for every column of the matrix, stacked."""
        size = self.in_size()

        def column(index):
            basis = jnp.zeros(size, self._dtype).at[index].set(1.0)
            return keep(_tree.flatten(self.mv(self._unflatten(basis)))[0], index)

        return jax.lax.map(column, jnp.arange(size), batch_size=chunk_size(size))

    def _by_rows(self, keep):
        """`keep(rows)` for chunks of rows of the root, stacked; zero rows fill the last chunk.

        Filled up, because `jax.lax.map` with a `batch_size` compiles the rest of the rows as a second program: rows of
        a network with two layers take 1.0 s to compile instead of 1.5 s (JAX 0.10.1, CPU). Reproduced by
        `test_a_map_in_batches_is_compiled_twice`."""
        count = self.root_size
        assert count is not None
        chunk = min(chunk_size(max(count, self.in_size())), count)

        def rows(start):
            indices = start + jnp.arange(chunk)
            basis = (indices[:, None] == jnp.arange(count)[None, :]).astype(self._dtype)
            return keep(jax.vmap(lambda u: _tree.flatten(self.root_transpose_mv(u))[0])(basis))

        return jax.lax.map(rows, chunk * jnp.arange(-(-count // chunk)))


class SumMetric(AbstractMetric):
    """A sum of metrics on the same parameters."""

    terms: tuple[AbstractMetric, ...]

    def __check_init__(self):
        for term in self.terms[1:]:
            check_structure(self.terms[0].in_structure(), term.in_structure(), "A sum of metrics")

    def _mv(self, v):
        return _tree.add(*(term._mv(v) for term in self.terms))

    @property
    def root_size(self):
        sizes = [term.root_size for term in self.terms]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def root_mv(self, v):
        return jnp.concatenate([term.root_mv(v) for term in self.terms])

    def root_transpose_mv(self, u):
        starts = [0]
        for term in self.terms:
            assert term.root_size is not None
            starts.append(starts[-1] + term.root_size)
        return _tree.add(
            *(t.root_transpose_mv(u[a:b]) for t, a, b in zip(self.terms, starts, starts[1:], strict=False))
        )

    def diagonal(self):
        return _tree.add(*(term.diagonal() for term in self.terms))

    def as_matrix(self):
        return _tree.sum_leaves([term.as_matrix().astype(self._dtype) for term in self.terms])

    def root_rows(self):
        return jnp.concatenate([term.root_rows().astype(self._dtype) for term in self.terms])

    @property
    def is_semidefinite(self):
        return all(term.is_semidefinite for term in self.terms)

    @property
    def is_diagonal(self):
        return all(term.is_diagonal for term in self.terms)

    @property
    def is_traceable(self):
        return all(term.is_traceable for term in self.terms)

    def _sample(self, key):
        keys = jax.random.split(key, len(self.terms))
        return _tree.add(*(term._sample(k) for term, k in zip(self.terms, keys, strict=True)))

    def in_structure(self):
        return self.terms[0].in_structure()


class AbstractDerivedMetric(AbstractMetric):
    """A metric made of another, with as many rows to its root and the same properties."""

    metric: eqx.AbstractVar[AbstractMetric]

    @property
    def root_size(self):
        return self.metric.root_size

    @property
    def is_semidefinite(self):
        return self.metric.is_semidefinite

    @property
    def is_diagonal(self):
        return self.metric.is_diagonal

    @property
    def is_traceable(self):
        return self.metric.is_traceable


class ScaledMetric(AbstractDerivedMetric):
    """A metric times a number that is not negative."""

    metric: AbstractMetric
    scale: Float[Array, ""]

    def __init__(self, metric: AbstractMetric, scale: Any):
        label = "A multiple of a metric"
        scale = real_array(scale, label)
        if scale.ndim:
            raise ValueError(f"{label} takes one number, but got an array of shape {scale.shape}.")
        allowed = Requirement(scale >= 0, "a number of at least 0", "Negate it as a `lineax` operator with `-metric`.")
        self.metric = metric
        self.scale = require(scale, [allowed], label, traced=False)

    def _mv(self, v):
        return _tree.scale(self.scale, self.metric._mv(v))

    def root_mv(self, v):
        return _tree.scale(jnp.sqrt(self.scale), self.metric.root_mv(v))

    def root_transpose_mv(self, u):
        return self.metric.root_transpose_mv(_tree.scale(jnp.sqrt(self.scale), u))

    def root_gram(self):
        return _tree.scale(self.scale, self.metric.root_gram())

    def as_matrix(self):
        return _tree.scale(self.scale, self.metric.as_matrix())

    def diagonal(self):
        return _tree.scale(self.scale, self.metric.diagonal())

    def root_rows(self):
        return _tree.scale(jnp.sqrt(self.scale), self.metric.root_rows())

    def _sample(self, key):
        return _tree.scale(jnp.sqrt(self.scale), self.metric._sample(key))

    def in_structure(self):
        return self.metric.in_structure()


class RestrictedMetric(AbstractDerivedMetric):
    """A metric on some of the parameters, the others held fixed."""

    metric: AbstractMetric
    filter_spec: PyTree = eqx.field(static=True)

    def __check_init__(self):
        if not jax.tree.leaves(self.in_structure()):
            raise ValueError("`restrict` selects no parameter. Its filter must be `True` for at least one leaf.")

    def _mv(self, v):
        return self._select(self.metric._mv(self._extend(v)))

    def root_mv(self, v):
        return self.metric.root_mv(self._extend(v))

    def root_transpose_mv(self, u):
        return self._select(self.metric.root_transpose_mv(u))

    def root_rows(self):
        rows = self.root_size
        if rows is None or rows * self.metric.in_size() > MAX_ROW_ENTRIES:
            return AbstractMetric.root_rows(self)
        return self.metric.root_rows()[:, self._selected()].astype(self._dtype)

    def diagonal(self):
        return self._select(self.metric.diagonal())

    def _sample(self, key):
        return self._select(self.metric._sample(key))

    def in_structure(self):
        return self._select(self.metric.in_structure())

    def _select(self, tree):
        return eqx.filter(tree, self.filter_spec)

    def _extend(self, v):
        return eqx.combine(v, self.metric._zeros())

    def _selected(self) -> np.ndarray:
        """The places of the selected parameters in a flat vector of all."""
        leaves, treedef = jax.tree.flatten(self.metric.in_structure())
        kept = treedef.flatten_up_to(self.in_structure())
        sizes = [_tree.size(leaf) for leaf in leaves]
        return np.flatnonzero(np.repeat([leaf is not None for leaf in kept], sizes))


def chunk_size(size: int) -> int:
    return max(1, min(256, MAX_ROW_ENTRIES // max(size, 1)))


# What lineax asks of an operator, answered once for all metrics.
lx.is_symmetric.register(AbstractMetric)(lambda metric: True)
lx.is_positive_semidefinite.register(AbstractMetric)(lambda metric: metric.is_semidefinite)
lx.is_negative_semidefinite.register(AbstractMetric)(lambda metric: False)
lx.is_diagonal.register(AbstractMetric)(lambda metric: metric.is_diagonal)
lx.is_tridiagonal.register(AbstractMetric)(lambda metric: False)
lx.is_lower_triangular.register(AbstractMetric)(lambda metric: False)
lx.is_upper_triangular.register(AbstractMetric)(lambda metric: False)
lx.has_unit_diagonal.register(AbstractMetric)(lambda metric: False)
lx.linearise.register(AbstractMetric)(lambda metric: metric)
lx.materialise.register(AbstractMetric)(lambda metric: metric)
lx.conj.register(AbstractMetric)(lambda metric: metric)
lx.diagonal.register(AbstractMetric)(lambda metric: _tree.flatten(metric.diagonal())[0])
