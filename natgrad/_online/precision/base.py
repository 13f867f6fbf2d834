"""What is known about parameters so far: a Gaussian, by its covariance or its precision."""

from abc import abstractmethod
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from natgrad._types import Matrix

Vector = Float[Array, " P"]
Rows = Float[Array, "rows P"]


class AbstractPrecision(eqx.Module):
    r"""A way to keep the precision $\Lambda$ of a Gaussian over the parameters while examples come in: first the past
    fades, $\Lambda^{-1} \leftarrow \Lambda^{-1} / f + q I$, then it grows by what examples tell,
    $\Lambda \leftarrow \Lambda + A^\top A$, and steps are $\Lambda^{-1}g$."""

    @abstractmethod
    def init(self, precision: Vector) -> PyTree:
        """The state for a diagonal precision."""

    @abstractmethod
    def faded(self, state: PyTree, forget: Any, noise: Any) -> PyTree: ...

    @abstractmethod
    def grown(self, state: PyTree, rows: Rows) -> PyTree: ...

    @abstractmethod
    def solve(self, state: PyTree, covector: Vector) -> Vector: ...

    @abstractmethod
    def covariance(self, state: PyTree) -> Matrix:
        """The dense covariance, for those who can afford to look."""
