"""Factorisations of stacks of matrices: the values and derivatives of JAX's own, and no program that hangs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import output_on_two_devices
from models import normal

from natgrad import _linalg

# Functions of a symmetric matrix and a right-hand side: ours, and JAX's.
PAIRS = {
    "cholesky": (lambda a, b: _linalg.cholesky(a), lambda a, b: jnp.linalg.cholesky(a)),
    "inverse": (lambda a, b: _linalg.inverse(a), lambda a, b: jnp.linalg.inv(a)),
    "cholesky_solve": (
        lambda a, b: _linalg.cholesky_solve(_linalg.cholesky(a), b),
        lambda a, b: jnp.linalg.solve(a, b),
    ),
    "forward": (
        lambda a, b: _linalg.triangular_solve(jnp.tril(a), b),
        lambda a, b: jnp.linalg.solve(jnp.tril(a), b),
    ),
    "backward": (
        lambda a, b: _linalg.triangular_solve(jnp.tril(a), b, transposed=True),
        lambda a, b: jnp.linalg.solve(jnp.tril(a).mT, b),
    ),
    "eigh": (
        lambda a, b: _projections(_linalg.eigh(a)),
        lambda a, b: _projections(jnp.linalg.eigh(a)),
    ),
    "eigvalsh": (lambda a, b: _linalg.eigvalsh(a), lambda a, b: jnp.linalg.eigvalsh(a)),
    "svd": (lambda a, b: _linalg.svd(b)[1], lambda a, b: jnp.linalg.svd(b, full_matrices=False)[1]),
}


def _projections(found):
    """What the signs of eigenvectors do not change."""
    values, vectors = found
    return values, vectors[..., :, None, :] * vectors[..., None, :, :]


def stacks(*lead: int):
    a = normal(1, *lead, 4, 4)
    return a @ a.mT + jnp.broadcast_to(jnp.eye(4), a.shape), normal(2, *lead, 4, 3)


@pytest.mark.sample(2)
@pytest.mark.compat
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_values_and_derivatives_are_those_of_jax(name, lead):
    """Of both orders and in both modes, for one matrix, for stacks, and mapped over them."""
    symmetric = lambda function: lambda a, b: function((a + a.mT) / 2, b)
    number = lambda function: lambda a, b: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(function(a, b)))

    def everything(function):
        function = symmetric(function)
        first = jax.grad(number(function), argnums=(0, 1))
        answers = [function, first, jax.jacfwd(number(function)), lambda a, b: jax.jvp(first, (a, b), (a, b))[1]]
        if lead:
            answers += [jax.vmap(function), jax.vmap(first)]
        return jax.jit(lambda a, b: [answer(a, b) for answer in answers])

    ours, theirs = (everything(function)(*stacks(*lead)) for function in PAIRS[name])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), ours, theirs)


def test_a_right_hand_side_may_be_shared():
    a, _ = stacks(3)
    found = _linalg.triangular_solve(_linalg.cholesky(a), jnp.eye(4))
    np.testing.assert_allclose(found @ _linalg.cholesky(a), np.broadcast_to(np.eye(4), (3, 4, 4)), atol=1e-12)
    found = jax.vmap(_linalg.least_squares, (None, 0))(a[0], a)
    np.testing.assert_allclose(found, jnp.linalg.solve(jnp.broadcast_to(a[0], a.shape), a), atol=1e-10)


def test_matrices_that_are_not_definite_give_nan():
    a = jnp.stack([jnp.eye(3), -jnp.eye(3)])
    for function in (_linalg.cholesky, _linalg.inverse):
        found = function(a)
        assert np.isfinite(found[0]).all() and np.isnan(found[1]).any()


STEPS = """
import jax, jax.numpy as jnp, numpy as np
import natgrad as ng
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("examples",))
random = np.random.default_rng(0)
sizes = [20, 50, 50, 50, 10]
params = [jnp.asarray(random.normal(size=(a, b)) / a**0.5, jnp.float32) for a, b in zip(sizes, sizes[1:])]

def model(params, x):
    for w in params[:-1]:
        x = jnp.tanh(x @ w)
    return x @ params[-1]

batch = random.normal(size=(64, 20)).astype(np.float32), random.integers(0, 10, 64)
opt = ng.NaturalGradient(model, ng.Categorical(), ng.{structure}(refresh_every=2))
state = opt.init(params, batch)
params, state = jax.device_put((params, state), NamedSharding(mesh, P()))
batch = jax.device_put(batch, NamedSharding(mesh, P("examples")))
step = jax.jit(opt.step)
for number in range(6):
    params, state, info = step(params, state, batch, jax.random.key(number))
print(len(jax.devices()), float(info.loss) < 1.0)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("structure", ["KFAC", "EKFAC"])
def test_steps_on_two_devices_do_not_hang(structure):
    assert output_on_two_devices(STEPS.replace("{structure}", structure), 240) == "2 True"
