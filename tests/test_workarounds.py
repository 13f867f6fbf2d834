"""Why some code is not written the plain way: what JAX and XLA make of the plain way.

Every test reproduces one reason, and fails once it is gone, with the code that can then be simplified. Reasons that
only time shows have no test: the figures stand beside the code."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import output_on_two_devices
from models import normal

import natgrad as ng
from natgrad import _backend, _linalg
from natgrad._block import factor, stacks
from natgrad._point import factored_rows
from natgrad._point.records import summed

pytestmark = pytest.mark.slow

# Other tests compile without optimisation: see `conftest.py`.
OPTIMISED = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_use_fusion_emitters": True,
}


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile(compiler_options=OPTIMISED)


def flops(function, *arguments) -> float:
    return compiled(function, *arguments).cost_analysis().get("flops", 0.0)


def num_instructions(function, *arguments) -> int:
    return compiled(function, *arguments).as_text().count(" = ")


def is_refused(function) -> bool:
    try:
        function()
    except (NotImplementedError, TypeError, ValueError):
        return True
    return False


# Wrong numbers and programs that hang -------------------------------------------------------------------

STACKS = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("d",))
stacks = [jnp.broadcast_to(2.0 * jnp.eye(n), (8, n, n)) for n in range(30, 50)]
stacks = jax.device_put(stacks, NamedSharding(mesh, P()))
factorise = jax.jit(lambda stacks: [{cholesky}(stack) for stack in stacks])
for _ in range(200):
    jax.block_until_ready(factorise(stacks))
print("done")
"""


def test_factorisations_of_stacks_hang():
    is_broken = (0, 10, 1) <= jax.__version_info__ <= (0, 10, 2)
    found = output_on_two_devices(STACKS.replace("{cholesky}", "jnp.linalg.cholesky"), 15)
    assert found == ("hangs" if is_broken else "done"), "`_linalg.one_by_one` may no longer be needed"
    ours = "from natgrad import _linalg\n" + STACKS.replace("{cholesky}", "_linalg.cholesky")
    assert output_on_two_devices(ours, 60) == "done"


@pytest.mark.float32
def test_dividing_by_a_large_number_gives_zero():
    weights = jnp.array([3e38, 1e38])
    plain = compiled(lambda weights: weights / jnp.max(weights), weights)(weights)
    assert plain.tolist() == [0.0, 0.0], "`_point/batch._at_most_one` can divide by the largest weight"
    ours = ng.Batch(jnp.zeros((2, 1)), weights=weights).relative_weights()
    np.testing.assert_allclose(ours, [1.5, 0.5], rtol=1e-6)


@pytest.mark.float32
@pytest.mark.users_defaults
def test_fused_products_are_wrong():
    p, v = np.abs(normal(1, 200, 10)), normal(2, 20, 200, 10)
    p, v = (np.asarray(x, np.float32) for x in (p, v))
    operands = p, v, np.tile(p, (10, 1)), np.asarray(normal(3, 2, 2000, 10), np.float32)
    found = compiled(_backend._programs, *operands)(*operands)
    expected = _backend._programs(*(x.astype(np.float64) for x in operands))
    off = max(np.max(np.abs(a - b)) / np.max(np.abs(b)) for a, b in zip(found, expected, strict=True))
    is_broken = jax.__version_info__ == (0, 10, 2)
    assert (off > _backend.TOLERANCE) == is_broken, (
        f"JAX {jax.__version__} is off by {off:.1e}: correct the versions in `_backend.py` and `pyproject.toml`; "
        "once no version that is wrong can be installed, `_backend.py` can go"
    )


# What JAX cannot do -------------------------------------------------------------------------------------


def test_custom_vmap_has_no_gradient():
    @jax.custom_batching.custom_vmap
    def square(x):
        return x**2

    @square.def_vmap
    def _(axis_size, is_batched, x):
        return x**2, True

    assert is_refused(lambda: jax.grad(square)(1.0)), "derivatives in `_linalg` need not be written out"


def test_while_loops_have_no_gradient():
    double = lambda x: jax.lax.while_loop(lambda x: x < 1, lambda x: 2 * x, x)
    assert is_refused(lambda: jax.grad(double)(0.1)), "`_proximal/result.within_domain` can be a `while_loop`"


def test_methods_of_modules_with_arrays_have_no_hash():
    class Model(eqx.Module):
        weight: jax.Array

        def outputs(self, x):
            return self.weight * x

    assert is_refused(lambda: hash(Model(jnp.ones(2)).outputs)), "`_optimiser/method.py` can go"


def test_axes_may_be_numpy_integers():
    def equations(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn
            for value in eqn.params.values():
                yield from equations(value.jaxpr) if hasattr(value, "jaxpr") else ()

    program = jax.make_jaxpr(lambda x: jnp.roll(x, 1, axis=1))(jnp.zeros((2, 3)))
    axes = [eqn.params["dimension"] for eqn in equations(program.jaxpr) if eqn.primitive.name == "concatenate"]
    assert any(isinstance(axis, np.integer) for axis in axes), "`_program/slices.along_an_axis` can test for `int`"


# Programs that are traced or compiled more often than they need be ---------------------------------------


def test_loops_outside_jit_are_traced_at_every_call():
    traces = []

    def halve(x):
        traces.append(x)
        return x / 2

    for _ in range(3):
        jax.lax.while_loop(lambda x: x > 1, lambda x: halve(x), 8.0)
    assert len(traces) >= 3, "`_family/newton._solve_all` need not be compiled by itself"


def test_every_shape_outside_jit_is_compiled(caplog):
    def num_compilations(function):
        caplog.clear()
        with jax.log_compiles():
            function()
        return sum("Compiling" in record.message for record in caplog.records)

    assert num_compilations(lambda: jax.device_put(np.zeros((3, 5, 7)))) == 0
    assert num_compilations(lambda: jnp.zeros((3, 5, 7))) > 0, "`NaturalGradient.init` can use `jnp.zeros`"
    x = jnp.asarray(np.zeros((5, 7, 3)))
    assert num_compilations(lambda: jax.lax.transpose(x, (2, 0, 1))) > 0, "`compat.rearrange` needs no NumPy"


def test_a_map_in_batches_is_compiled_twice():
    x = jnp.ones((10, 3))
    count = lambda size: jax.jit(lambda x: jax.lax.map(jnp.tanh, x, batch_size=size)).lower(x).as_text().count(".tanh")
    assert count(5) == 1
    assert count(4) == 2, "`AbstractMetric._by_rows` can be a `jax.lax.map` with a `batch_size`"


# Programs that are larger or do more than they need -------------------------------------------------------


def test_inverses_are_padded_to_common_sizes():
    sizes = [41, 30, 31, 20, 21, 30, 31, 10]
    matrices = [normal(k, 1, size, 2 * size) for k, size in enumerate(sizes)]
    matrices = [x @ x.mT for x in matrices]
    numbers = jnp.ones(len(sizes))
    plain = num_instructions(lambda *matrices: [_linalg.inverse(matrix) for matrix in matrices], *matrices)
    ours = num_instructions(lambda *matrices: stacks.damped_inverses(matrices, numbers, numbers, numbers)[0], *matrices)
    assert plain > 1.5 * ours, f"`_block/stacks` need not pad matrices: {plain} instructions, {ours} padded"


def test_symmetric_products_are_put_together_from_halves(monkeypatch):
    x = normal(1, 1, 1, 64, 128)
    plain = flops(factor._gram, x)
    monkeypatch.setattr(factor, "LARGE", 0)
    ours = flops(lambda x: factor._gram(x), x)
    assert plain > 1.3 * ours, f"`_block/factor._gram` can be one product: {plain} operations, {ours} from halves"


def test_diagonals_are_strided_slices():
    x = normal(1, 2, 30, 30)
    size = lambda function: len(jax.jit(function).lower(x).as_text().splitlines())
    plain, ours = size(lambda x: jnp.diagonal(x, axis1=-2, axis2=-1)), size(factor.diagonals)
    assert plain > ours, f"`_block/factor.diagonals` can be `jnp.diagonal`: {plain} lines, {ours} of ours"


def test_products_are_written_to_memory_before_they_are_reduced():
    a, h = normal(1, 64, 8, 50), normal(2, 64, 8, 50)
    squares = lambda data: jnp.sum(jnp.einsum("ntd,nto->ndo", *data) ** 2, axis=0)
    temporary = lambda function: compiled(function, (a, h)).memory_analysis().temp_size_in_bytes
    plain, ours = temporary(squares), temporary(lambda data: summed(squares, data, 4))
    assert plain >= 64 * 50 * 50 * a.dtype.itemsize, "`MemoryBudget.chunk` needs no `formed`"
    assert ours < plain / 2


def test_products_of_matrices_compile_to_fewer_instructions(monkeypatch):
    params = {"w": normal(1, 5, 4), "b": normal(2, 4), "v": normal(3, 4, 3), "c": normal(4, 3)}
    model = lambda p, x: jnp.tanh(x @ p["w"] + p["b"][None]) @ p["v"] + p["c"][None]
    x = normal(5, 8, 5)
    count = lambda: num_instructions(lambda params, x: ng.gram(model, ng.Euclidean(), params, x), params, x)
    ours = count()
    monkeypatch.setattr(factored_rows, "products", lambda a, b: jnp.einsum("ncp,mep->ncme", a, b))
    plain = count()
    assert plain > ours, f"`_point/records.products` can be an `einsum`: {plain} instructions, {ours} of ours"


def test_patches_are_a_product_with_an_identity():
    x = normal(1, 4, 10, 10, 3)
    axes = ("NHWC", "HWIO", "NHWC")
    plain = flops(lambda x: jax.lax.conv_general_dilated_patches(x, (3, 3), (1, 1), "VALID", dimension_numbers=axes), x)
    assert plain > 0, "`_uses/normal_form.patches` can be `jax.lax.conv_general_dilated_patches`"
