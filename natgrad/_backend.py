"""A test of the compiler, run once before the first result: does it get programs like ours right?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

# Wrong programs are off by their own size; the exponentials of some accelerators by a thousandth.
TOLERANCE = 1e-2


class CompilerError(RuntimeError):
    """The installed JAX computes wrong numbers."""


def require_sound() -> None:
    """Raise if this version of JAX computes wrong numbers on the default backend. Costs a tenth of a second, once."""
    error = error_of(jax.default_backend())
    if not error <= TOLERANCE:
        backend = jax.default_backend()
        flag = (
            ", or set `XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=invalid` before Python starts"
            if backend == "cpu"
            else ""
        )
        raise CompilerError(
            f"JAX {jax.__version__} computes wrong numbers on {backend}: small test programs in single precision are "
            f"off by {100 * error:.0f} %, and so would be the results of natgrad. Install another version, such as "
            f"with `pip install 'jax!={jax.__version__}' 'jaxlib!={jax.__version__}'`{flag}."
        )


@functools.cache
def error_of(backend: str) -> float:
    """How far compiled programs are from the truth, relative to its largest entry.

    JAX 0.10.2 for CPUs miscompiles products with a broadcast array that are summed over their last axis, broadcast
    back and multiplied again, from 32,768 entries on: its library of fused kernels (YNN) is at fault. That is the
    metric of a softmax for several tangents at once. Versions from 0.8.0 to 0.10.1, 0.11.2 and 0.12.0 are right.
    Reproduced by `test_fused_products_are_wrong`."""
    del backend
    numbers = np.random.default_rng(0)
    weights = np.abs(numbers.normal(size=(200, 10)))
    weights /= weights.sum(axis=-1, keepdims=True)
    few, many = numbers.normal(size=(20, 200, 10)), numbers.normal(size=(2, 2000, 10))
    operands = weights, few, np.tile(weights, (10, 1)), many
    # The first result may be asked for inside `jit`, which would trace this test instead of running it.
    with jax.ensure_compile_time_eval():
        single = [jnp.asarray(operand, jnp.float32) for operand in operands]
        found = [np.asarray(result, np.float64) for result in jax.jit(_programs)(*single)]
    expected = _programs(*operands)
    off = [np.max(np.abs(a - b)) / np.max(np.abs(b)) for a, b in zip(found, expected, strict=True)]
    return float(np.max(off))


def _programs(p, u, q, v):
    """The same for NumPy and for JAX."""

    def centred(p, v):
        return p * (v - (p * v).sum(axis=-1, keepdims=True))

    def scaled(p, v):
        return p * v / (1 + (p * v * v).sum(axis=-1, keepdims=True))

    return centred(p[None], u), centred(q[None], v), scaled(p[None], u)
