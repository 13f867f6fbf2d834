"""Blocks are dense matrices in disguise: every operation agrees with dense algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import normal

from natgrad._block import damped
from natgrad._block.eigen import EigenBlock
from natgrad._block.entries import AxisOrder, BlockEntries, EntryNumbers, leaf_entries
from natgrad._block.factor import second_moment
from natgrad._block.kronecker import KroneckerBlock
from natgrad._block.stacks import MAX_PADDED_ENTRIES, damped_inverses
from natgrad._block.stacks import eigen as eigen_of
from natgrad._block.unfactored import DenseBlock, DiagonalBlock


def factor(seed, groups, size, block):
    return second_moment(normal(seed, groups, 2 * size, size), block)


def eigen_block():
    bases = [eigen_of(factor(seed, 2, size, size)[:, 0]).vectors[:, None] for seed, size in ((1, 3), (2, 4))]
    return EigenBlock(*bases, normal(3, 2, 3, 4) ** 2)


BLOCKS = {
    "kronecker": lambda: KroneckerBlock(factor(1, 2, 3, 3), factor(2, 2, 4, 4)),
    "kronecker_diagonal_inputs": lambda: KroneckerBlock(factor(1, 2, 3, 1), factor(2, 2, 4, 4)),
    "kronecker_blocked_outputs": lambda: KroneckerBlock(factor(1, 1, 3, 3), factor(2, 1, 4, 2)),
    "kronecker_of_numbers": lambda: KroneckerBlock(factor(1, 3, 1, 1), factor(2, 3, 1, 1)),
    "eigen": eigen_block,
    "dense": lambda: DenseBlock(factor(1, 2, 3, 3)[:, 0]),
    "diagonal": lambda: DiagonalBlock(normal(1, 2, 3, 4) ** 2),
}
SHAPES = {"kronecker_blocked_outputs": (1, 3, 4), "kronecker_of_numbers": (3, 1, 1), "dense": (2, 3, 1)}


def eigen(block):
    return list(map(eigen_of, block.matrices()))


def flat(x):
    return np.asarray(x).reshape(len(x), -1)


@pytest.fixture(params=BLOCKS)
def case(request):
    return BLOCKS[request.param](), SHAPES.get(request.param, (2, 3, 4))


def test_products_and_diagonals(case):
    block, shape = case
    matrix, v = np.asarray(block.as_matrix()), normal(9, *shape)
    np.testing.assert_allclose(matrix, matrix.swapaxes(1, 2), atol=1e-14)
    np.testing.assert_allclose(flat(block.mv(v)), np.einsum("gnm,gm->gn", matrix, flat(v)), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(flat(block.diagonal()), np.diagonal(matrix, axis1=1, axis2=2), rtol=1e-12)


def test_functions_are_those_of_the_eigenvalues(case):
    block, _ = case
    matrix = np.asarray(block.as_matrix())
    values, vectors = np.linalg.eigh(matrix)
    found = np.sort(flat(block.eigenvalues(eigen(block))), axis=1)
    np.testing.assert_allclose(found, values, rtol=1e-10, atol=1e-12)
    f = lambda s: 1 / (s + 0.3)
    expected = (vectors * f(values)[:, None, :]) @ vectors.swapaxes(1, 2)
    np.testing.assert_allclose(block.function(eigen(block), f).as_matrix(), expected, rtol=1e-9, atol=1e-11)
    root = np.asarray(block.function(eigen(block), jnp.sqrt).as_matrix())
    np.testing.assert_allclose(root @ root, matrix, rtol=1e-9, atol=1e-11)


def test_inverses_of_damped_blocks(case):
    """In the form of the block; a Kronecker product is damped by its factors."""
    block, _ = case
    found = jax.jit(damped.invert)([block], jnp.array([0.3]))
    matrix = np.asarray(block.as_matrix())
    expected = matrix + 0.3 * np.eye(matrix.shape[-1])
    if isinstance(block, KroneckerBlock):
        A, G = (np.asarray(jax.vmap(lambda b: jax.scipy.linalg.block_diag(*b))(F)) for F in (block.A, block.B))
        ratio = np.sqrt(np.trace(A, axis1=1, axis2=2) / A.shape[-1] / (np.trace(G, axis1=1, axis2=2) / G.shape[-1]))
        added = [ratio[:, None, None] * np.sqrt(0.3) * np.eye(A.shape[-1])]
        added.append(np.sqrt(0.3) / ratio[:, None, None] * np.eye(G.shape[-1]))
        explicit = np.stack([np.kron(a, g) for a, g in zip(A + added[0], G + added[1], strict=True)])
        # More damping than asked for, never less.
        assert np.linalg.eigvalsh(explicit - expected).min() > -1e-12
        expected = explicit
    np.testing.assert_allclose(found.blocks[0].as_matrix(), np.linalg.inv(expected), rtol=1e-9, atol=1e-11)
    assert found.is_definite.tolist() == found.is_finite.tolist() == [True]


def test_blocks_have_damping_of_their_own_and_padding_changes_nothing():
    sizes = [(6, 5), (140, 3), (139, 2), (2, 1)]
    blocks = [KroneckerBlock(factor(k, 2, a, a), factor(k + 9, 2, b, b)) for k, (a, b) in enumerate(sizes)]
    damping = jnp.array([0.1, 0.2, 0.3, 0.4])
    for block, own, inverse in zip(blocks, damping, jax.jit(damped.invert)(blocks, damping).blocks, strict=True):
        A, G = (np.asarray(F[:, 0]) for F in (block.A, block.B))
        mean = lambda F: np.trace(F, axis1=1, axis2=2)[:, None, None] / F.shape[-1]
        ratio, root = np.sqrt(mean(A) / mean(G)), np.sqrt(own)
        np.testing.assert_allclose(inverse.A[:, 0], np.linalg.inv(A + ratio * root * np.eye(A.shape[-1])), rtol=1e-7)
        np.testing.assert_allclose(inverse.B[:, 0], np.linalg.inv(G + root / ratio * np.eye(G.shape[-1])), rtol=1e-7)


def test_a_zero_factor_leaves_the_damping_alone():
    """A dead layer has G = 0; the damped block is the damping times the identity, and finite."""
    block = KroneckerBlock(factor(1, 1, 3, 3), jnp.zeros((1, 1, 2, 2)))
    (inverse,) = jax.jit(damped.invert)([block], jnp.array([0.01])).blocks
    np.testing.assert_allclose(inverse.as_matrix()[0], 100 * np.eye(6), rtol=1e-12)


@pytest.mark.parametrize("lead", [(), (1,), (2, 3)], ids=str)
def test_eigenvectors_and_eigenvalues_give_the_matrices_back(lead):
    for size in (1, 4):
        x = normal(1, *lead, size, size + 2)
        stack = x @ x.mT
        values, vectors = eigen_of(stack)
        assert vectors.shape == stack.shape
        np.testing.assert_allclose((vectors * values[..., None, :]) @ vectors.mT, stack, rtol=1e-10, atol=1e-12)


def test_large_moments_are_put_together_from_halves(monkeypatch):
    x = normal(1, 1, 5, 15)
    count = lambda: str(jax.make_jaxpr(lambda x: second_moment(x, 15))(x)).count("dot_general")
    assert count() == 1
    monkeypatch.setattr("natgrad._block.factor.LARGE", 5 * 15**2)
    assert count() == 3
    np.testing.assert_allclose(second_moment(x, 15)[0, 0], x[0].T @ x[0], rtol=1e-12, atol=1e-13)


def test_an_inverse_beyond_rounding_is_found_all_the_same_and_said_so():
    """In single precision a matrix of rank one with tiny damping has no Cholesky factor."""
    v = np.linspace(1, 2, 40, dtype=np.float32)
    singular = jnp.asarray(np.stack([np.outer(v, v), np.eye(40, dtype=np.float32)]))
    traces = jnp.trace(singular, axis1=1, axis2=2)
    little = jnp.full_like(traces, 3e-5)
    (found,), is_definite, is_finite = damped_inverses([singular], traces, jnp.ones_like(traces), little)
    assert np.all(np.isfinite(found))
    assert is_definite.tolist() == [False, True] and is_finite.tolist() == [True, True]
    np.testing.assert_allclose(found[1], np.eye(40), rtol=1e-4)


@pytest.mark.parametrize("sizes", [((1024, 2), (3, 128)), ((2, 5), (3, 7), (1, 40)), ((4, 99), (2, 100), (3, 1))])
def test_inverses_of_matrices_of_many_sizes_agree_with_numpy_and_take_little_memory(sizes):
    """Small matrices are padded to larger ones only where that costs little."""
    stacks = [factor(k, count, size, size)[:, 0] for k, (count, size) in enumerate(sizes)]
    traces = jnp.concatenate([jnp.trace(stack, axis1=1, axis2=2) for stack in stacks])
    scale = jnp.linspace(0.5, 2.0, traces.size)
    damping = jnp.linspace(0.1, 1.0, traces.size)
    compiled = jax.jit(damped_inverses).lower(stacks, traces, scale, damping).compile()
    found, is_definite, is_finite = compiled(stacks, traces, scale, damping)
    assert jnp.all(is_definite) and jnp.all(is_finite)
    start = 0
    for stack, inverses in zip(stacks, found, strict=True):
        s, d = (np.asarray(numbers)[start : start + len(stack), None, None] for numbers in (scale, damping))
        np.testing.assert_allclose(
            inverses, np.linalg.inv(s * np.asarray(stack) + d * np.eye(stack.shape[-1])), rtol=1e-9, atol=1e-11
        )
        start += len(stack)
    entries = sum(stack.size for stack in stacks) + MAX_PADDED_ENTRIES
    assert compiled.memory_analysis().temp_size_in_bytes < 10 * 8 * entries


def test_places_take_entries_and_put_them_back():
    leaves = [normal(1, 2, 3, 4), normal(2, 4)]
    numbers = np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2).reshape(1, 6, 4)
    place = BlockEntries(
        (leaf_entries(0, (2, 3, 4), numbers), leaf_entries(1, (4,), np.arange(4).reshape(1, 1, 4)[..., ::-1]))
    )
    assert isinstance(place.parts[0].entries, AxisOrder) and isinstance(place.parts[1].entries, EntryNumbers)
    gathered = place.gather(leaves, float)
    np.testing.assert_array_equal(gathered[0, :6], leaves[0].transpose(1, 0, 2).reshape(6, 4))
    np.testing.assert_array_equal(gathered[0, 6], leaves[1][::-1])
    back = [jnp.zeros((2, 3, 4)), jnp.zeros(4)]
    place.scatter(gathered, back)
    for found, leaf in zip(back, leaves, strict=True):
        np.testing.assert_array_equal(found, leaf)
    again = BlockEntries(
        (leaf_entries(0, (2, 3, 4), numbers.copy()), leaf_entries(1, (4,), np.arange(4).reshape(1, 1, 4)[..., ::-1]))
    )
    assert again == place and hash(again) == hash(place)
