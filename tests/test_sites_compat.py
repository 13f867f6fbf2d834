"""What is read from jaxprs, on every supported version of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from jax import lax
from models import normal
from zoo import ZOO, affine, integers, straight_through

import natgrad as ng
from natgrad._program import compat

pytestmark = pytest.mark.compat


def embedding_and_head():
    def model(params, tokens):
        x = jnp.tanh(params["table"][tokens] @ params["w"])
        return x @ params["table"].T

    return model, {"table": normal(1, 5, 3), "w": normal(2, 3, 3)}, integers(3, 0, 5, 4, 2)


def own_rule():
    """The rule is not the derivative of the function, so that it shows which of the two is used."""
    return lambda params, x: straight_through(x, params["w"]), {"w": normal(1, 4, 4)}, normal(2, 3, 4)


def captured():
    """Calls inside calls, which close over constants and over parameters."""
    shift, table = np.linspace(-1.0, 1.0, 3), np.arange(9.0).reshape(3, 3) / 9

    def model(params, x):
        @jax.jit
        def inner(x):
            return jnp.tanh(x @ params["w"] + shift[None]) @ jnp.asarray(table)

        outer = jax.jit(lambda x: inner(x) + inner(2 * x) * params["s"])
        return outer(x) @ jnp.asarray(table)

    return model, {"w": normal(1, 4, 3), "s": normal(2)}, normal(3, 3, 4)


def branches():
    """A branch of every example, kept as a branch by a loop over the batch; another one chosen by a parameter."""

    def model(params, x):
        def one(row):
            row = lax.cond(row[0] > 0, lambda r: jnp.tanh(r @ params["a"]), lambda r: r * params["b"], row)
            return lax.cond(params["b"][0] > 0, lambda r: r @ params["a"], lambda r: r + params["b"], row)

        return lax.map(one, x)

    return model, {"a": normal(1, 3, 3), "b": normal(2, 3)}, normal(3, 4, 3)


def remat():
    def model(params, x):
        block = jax.checkpoint(lambda p, x: jnp.tanh(affine(x, p["w"], p["b"])))
        return block(params, x) @ params["v"]

    return model, {"w": normal(1, 4, 5), "b": normal(2, 5), "v": normal(3, 5, 2)}, normal(4, 3, 4)


def from_zoo(name: str):
    def build():
        model, params, x, _ = ZOO[name]()
        return model, params, x

    return build


CASES = {
    "embedding_and_head": embedding_and_head,
    "own_rule": own_rule,
    "captured": captured,
    "branches": branches,
    "remat": remat,
    **{name: from_zoo(name) for name in ("mlp", "convnet", "scan_layers_remat_reverse", "lstm_scan", "fori_layers")},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_statistics_are_those_of_the_gradients(name):
    model, params, x = CASES[name]()
    z = jax.eval_shape(model, params, x)
    u = jax.tree.map(lambda leaf: normal(50, *leaf.shape), z)
    weights = normal(51, jax.tree.leaves(z)[0].shape[0])

    @jax.jit
    def actual(params):
        rows = ng.per_example(model, params, x, u)
        return rows.squared_sum(), rows.gram(), rows.rmatvec(weights)

    @jax.jit
    def expected(params):
        def one(x, u):
            x, u = jax.tree.map(lambda leaf: leaf[None], (x, u))
            return jax.vjp(lambda p: model(p, x), params)[1](u)[0]

        rows = jax.vmap(one)(x, u)
        flat = jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(rows)], axis=1)
        square = jax.tree.map(lambda leaf: jnp.sum(leaf**2, axis=0), rows)
        return square, flat @ flat.T, jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, 1), rows)

    assert_close(actual(params), expected(params), 1e-9, 1e-11)


def equations(function, *args):
    """The equations of a program by name, the first of each, with calls inlined."""
    found = {}

    def walk(program):
        for eqn in program.jaxpr.eqns:
            inner = compat.call(eqn)
            if inner is not None:
                walk(inner)
            found.setdefault(compat.name(eqn), eqn)

    walk(compat.closed_jaxpr(jax.make_jaxpr(function)(*args)))
    return found


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(reverse):
    """Two constants, two carried values and one that is scanned over."""
    a, b = np.float64(2.0), np.linspace(0.0, 1.0, 3)

    def function(x, xs, a, b):
        step = lambda carry, row: ((carry[0] * a + row, carry[1] + 1), jnp.sum(carry[0] * b))
        return lax.scan(step, (x, 0), xs, reverse=reverse)

    eqn = equations(function, np.ones(3), np.ones((4, 3)), a, b)["scan"]
    parts = compat.scan(eqn)
    assert (parts.num_constants, parts.num_carried, parts.length, parts.reverse) == (2, 2, 4, reverse)
    assert len(parts.body.jaxpr.invars) == len(eqn.invars) == 5
    assert len(parts.body.jaxpr.outvars) == len(eqn.outvars) == 3
    assert [var.aval.shape for var in eqn.invars[4:]] == [(4, 3)]
    assert [var.aval.shape for var in parts.body.jaxpr.invars[4:]] == [(3,)]


def test_loop_with_a_known_number_of_steps_is_a_scan():
    w = normal(1, 3, 4, 4)
    eqn = equations(lambda w, x: lax.fori_loop(0, 3, lambda i, x: x @ w[i], x), w, np.ones(4))["scan"]
    parts = compat.scan(eqn)
    assert (parts.num_constants, parts.num_carried, parts.length) == (1, 2, 3)


def test_branches():
    """As many as there are, in the order of the index; the index is the first operand."""
    function = lambda i, x: lax.switch(i, [jnp.sin, lambda x: x @ x, jnp.tanh], x)
    eqn = equations(lambda i, x: function(i, jnp.sum(x) * x[0]), 0, np.ones((3, 3, 3)))["cond"]
    programs = compat.branches(eqn)
    names = [{compat.name(e) for e in program.jaxpr.eqns} for program in programs]
    assert len(names) == 3
    assert ["sin" in n for n in names] == [True, False, False]
    assert ["tanh" in n for n in names] == [False, False, True]
    assert jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.integer)
    assert all(len(program.jaxpr.invars) == len(eqn.invars) - 1 for program in programs)


def test_true_is_the_second_branch():
    eqn = equations(lambda c, x: lax.cond(c, jnp.sin, jnp.cos, x), True, 1.0)["cond"]
    first, second = compat.branches(eqn)
    assert [compat.name(program.jaxpr.eqns[0]) for program in (first, second)] == ["cos", "sin"]


def test_rematerialised():
    policy = jax.checkpoint_policies.dots_saveable
    part = jax.checkpoint(lambda x: jnp.sin(x), policy=policy, prevent_cse=False)
    found = equations(part, 1.0)
    (eqn,) = (eqn for eqn in found.values() if compat.name(eqn) in compat.REMATERIALISED)
    program, options = compat.rematerialised(eqn)
    assert [compat.name(inner) for inner in program.jaxpr.eqns] == ["sin"]
    assert options == {"policy": policy, "prevent_cse": False}
    again = jax.checkpoint(jnp.sin, **options)
    assert_close(jax.grad(again)(1.0), np.cos(1.0))


def test_dot():
    function = lambda a, b: jnp.einsum("gtd,gdo->gto", a, b)
    eqn = equations(function, np.ones((2, 3, 4)), np.ones((2, 4, 5)))["dot_general"]
    parts = compat.dot(eqn)
    sizes = [var.aval.shape for var in eqn.invars]
    taken = lambda axes, k: [sizes[k][axis] for axis in axes]
    assert taken(parts.contracted[0], 0) == taken(parts.contracted[1], 1) == [4]
    assert taken(parts.mapped[0], 0) == taken(parts.mapped[1], 1) == [2]
    assert sorted(taken(parts.free(0, 3), 0) + taken(parts.free(1, 3), 1)) == [3, 5]


def test_convolution():
    x, kernel = np.ones((2, 8, 9, 4)), np.ones((3, 2, 2, 6))

    def function(x, kernel):
        return lax.conv_general_dilated(
            x,
            kernel,
            (1, 2),
            [(1, 0), (2, 3)],
            lhs_dilation=(2, 1),
            rhs_dilation=(1, 3),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=2,
        )

    parts = compat.convolution(equations(function, x, kernel)["conv_general_dilated"])
    assert (parts.input_axes, parts.kernel_axes, parts.output_axes) == ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
    assert (parts.strides, parts.padding) == ((1, 2), ((1, 0), (2, 3)))
    assert (parts.input_dilation, parts.kernel_dilation) == ((2, 1), (1, 3))
    assert (parts.feature_groups, parts.batch_groups) == (2, 1)


TABLE = np.arange(20.0).reshape(5, 4)
LOOKUPS = {
    # name: (function of table and index, index, axes of a row, does an index outside read nothing?)
    "rows": (lambda t, i: t[i], np.array([[1, 2, 3]]), (2,), None),
    "filled": (lambda t, i: t.at[i].get(mode="fill", fill_value=0), np.array([1, 7]), (1,), True),
    "clipped": (lambda t, i: t.at[i].get(mode="clip"), np.array([1, 7]), (1,), False),
    "one_row": (lambda t, i: lax.dynamic_index_in_dim(t, i), np.array(2), (1,), False),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookup(name):
    function, index, row_axes, drops_outside = LOOKUPS[name]
    found = equations(function, TABLE, index)
    parts = compat.lookup(found["gather"] if "gather" in found else found["dynamic_slice"])
    assert parts.row_axes == row_axes
    assert parts.component in (0, None)
    assert drops_outside is None or parts.drops_outside is drops_outside


def test_what_is_not_a_lookup():
    """Columns, parts of rows, and single entries are not whole rows."""
    for function in (lambda t, i: t[:, i], lambda t, i: t[i, i], lambda t, i: lax.dynamic_slice(t, (i[0], 0), (1, 2))):
        found = equations(function, TABLE, np.array([1, 2]))
        assert compat.lookup(found["gather"] if "gather" in found else found["dynamic_slice"]) is None


def test_other_equations_have_no_parts():
    eqn = equations(jnp.sin, 1.0)["sin"]
    readers = (compat.call, compat.scan, compat.branches, compat.rematerialised, compat.dot, compat.convolution)
    assert [read(eqn) for read in (*readers, compat.lookup)] == [None] * 7


def test_calls_are_found_with_their_constants():
    constant = np.linspace(0.0, 1.0, 5)
    program = compat.closed_jaxpr(jax.make_jaxpr(jax.jit(lambda x: x + constant))(constant))
    (eqn,) = program.jaxpr.eqns
    inner = compat.call(eqn)
    assert [compat.name(e) for e in inner.jaxpr.eqns] == ["add"]
    assert len(inner.constants) == len(inner.jaxpr.constvars)


def test_evaluate():
    """An operand that is repeated has a slot for each time, and literals have theirs."""
    square = equations(lambda x: x * x, 3.0)["mul"]
    assert_close(compat.evaluate(square, [2.0, 5.0]), [10.0])
    shifted = equations(lambda x: x + 1.0, 3.0)["add"]
    assert_close(compat.evaluate(shifted, [2.0, 1.0]), [3.0])
    gradients = jax.grad(lambda a, b: compat.evaluate(square, [a, b])[0], (0, 1))(2.0, 5.0)
    assert_close(gradients, (5.0, 2.0))


def test_evaluate_gives_all_results_and_takes_other_dtypes():
    found = equations(lambda x: lax.top_k(x, 2), np.array([3.0, 1.0, 2.0]))["top_k"]
    values, places = compat.evaluate(found, [jnp.array([1.0, 5.0, 4.0])])
    assert_close((values, places), (np.array([5.0, 4.0]), np.array([1, 2])))
    moved = equations(lambda x: x.reshape(3, 2), np.ones((2, 3)))["reshape"]
    (numbers,) = compat.evaluate(moved, [jnp.arange(6).reshape(2, 3)])
    assert jnp.issubdtype(numbers.dtype, jnp.integer)
    assert_close(numbers, np.arange(6).reshape(3, 2))
