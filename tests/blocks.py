"""The blocks of a metric as index sets, to compare them with those of a dense matrix."""

import jax
import numpy as np

as_matrix = jax.jit(lambda K: K.as_matrix())


def indices(K) -> list[np.ndarray]:
    """For every block and group, which rows of the dense matrix it covers."""
    return [group for rows in K.operator.rows() for group in np.asarray(rows)]


def relative_errors(K, exact) -> list[float]:
    """How far each block is from that of a dense matrix, in the Frobenius norm."""
    matrix, exact = np.asarray(as_matrix(K)), np.asarray(exact)
    parts = [(matrix[np.ix_(own, own)], exact[np.ix_(own, own)]) for own in indices(K)]
    return [float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-300)) for a, b in parts]


def distance(K, exact) -> float:
    """The distance from the blocks of a dense matrix, in the Frobenius norm."""
    matrix, exact = np.asarray(as_matrix(K)), np.asarray(exact)
    return float(np.sqrt(sum(np.sum((matrix - exact)[np.ix_(own, own)] ** 2) for own in indices(K))))
