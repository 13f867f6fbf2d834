"""What `per_example` refuses, and in which words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import normal

import natgrad as ng

X = np.linspace(-1.0, 1.0, 15).reshape(5, 3)
W = np.ones((3, 2))
U = np.ones((5, 2))
linear = lambda w, x: x @ w


def refused(model=linear, params=W, x=X, cotangents=U, **options):
    return lambda: ng.per_example(model, params, x, cotangents, **options)


def operator(cotangents=U):
    return ng.per_example(linear, jnp.asarray(W), X, cotangents)


def centred(w, x):
    z = x @ w
    return z - jnp.mean(z, axis=0, keepdims=True)


REFUSED = {
    # Cotangents.
    "cotangents_of_another_shape": (
        refused(cotangents=np.ones((5, 3))),
        ValueError,
        r"`per_example` needs `cotangents` like the outputs.*\(5, 2\), perhaps with one more axis.*got \(5, 3\)",
    ),
    "cotangents_of_a_scalar": (refused(cotangents=1.0), ValueError, r"`cotangents` like the outputs.*got \(\)"),
    "cotangents_of_another_tree": (
        refused(cotangents={"z": U}),
        ValueError,
        r"`cotangents` like the outputs.*\(5, 2\).*got \{'z': \(5, 2\)\}",
    ),
    "cotangents_with_two_more_axes": (
        refused(cotangents=np.ones((2, 3, 5, 2))),
        ValueError,
        r"one more axis in front.*got \(2, 3, 5, 2\)",
    ),
    "cotangents_stacked_behind": (refused(cotangents=np.ones((5, 2, 3))), ValueError, r"got \(5, 2, 3\)"),
    "cotangents_stacked_to_zero": (refused(cotangents=np.ones((0, 5, 2))), ValueError, r"got \(0, 5, 2\)"),
    "cotangents_stacked_unequally": (
        refused(lambda w, x: (x @ w, x @ w), cotangents=(np.ones((2, 5, 2)), np.ones((3, 5, 2)))),
        ValueError,
        r"like the outputs.*got \(\(2, 5, 2\), \(3, 5, 2\)\)",
    ),
    "cotangents_stacked_in_part": (
        refused(lambda w, x: (x @ w, x @ w), cotangents=(np.ones((2, 5, 2)), U)),
        ValueError,
        r"got \(\(2, 5, 2\), \(5, 2\)\)",
    ),
    "cotangents_with_a_batch_that_is_not_there": (
        refused(lambda w: w.sum(axis=0), x=None, cotangents=np.ones((1, 1, 2))),
        ValueError,
        r"of shape \(2,\).*got \(1, 1, 2\)",
    ),
    # Parameters.
    "integer_parameters": (
        refused(lambda p, x: x * p["scale"], {"scale": jnp.arange(3)}),
        TypeError,
        r"`per_example` needs parameters that are real floating-point.*`params\['scale'\]` is `int.*Close over it",
    ),
    "complex_parameters": (refused(params=1j * W), TypeError, "`params` is `complex128`"),
    "python_parameters": (refused(lambda p, x: p * x, 2.0), TypeError, "`params` is `float`"),
    "no_parameters": (refused(lambda p, x: x, {}), ValueError, "`per_example` got `params` without any array"),
    # Data.
    "empty_batch": (refused(x=X[:0], cotangents=U[:0]), ValueError, "`per_example` got an empty batch"),
    "ragged_batch": (
        refused(lambda w, x: x[0] @ w, x=(X, X[:2])),
        ValueError,
        r"the same leading axis of examples, but got shapes \[\(5, 3\), \(2, 3\)\]",
    ),
    "number_in_the_batch": (
        refused(lambda w, x: x[0] @ w, x=(X, np.ones(()))),
        ValueError,
        r"same leading axis.*\[\(5, 3\), \(\)\]",
    ),
    "all_shared": (refused(x=ng.Batch(X, in_axes=None)), ValueError, r"the same axis \(`in_axes=None`\) of examples"),
    "axis_out_of_range": (
        refused(x=ng.Batch(X, in_axes=2)),
        ValueError,
        r"the same axis \(`in_axes=2`\).*\[\(5, 3\)\]",
    ),
    "axes_of_another_tree": (
        lambda: ng.Batch((X, X), in_axes=(0, None, 0)),
        ValueError,
        r"`Batch` needs `in_axes` to be an axis, `None`, or a tree of these that begins like `x`, but got "
        r"`\(0, None, 0\)`",
    ),
    # The model.
    "integer_outputs": (
        refused(lambda w, x: jnp.argmax(x @ w, axis=-1)),
        TypeError,
        "output of the model must be real floating-point, but it is `int",
    ),
    "sum_over_the_batch": (
        refused(lambda w, x: jnp.sum(x @ w, axis=0)),
        ValueError,
        r"5 examples of `x` along its leading axis, but its shape is \(2,\).*missing `jax.vmap`",
    ),
    "number_as_output": (refused(lambda w, x: jnp.sum(x @ w)), ValueError, r"5 examples.*its shape is \(\)"),
    "nan_in_data": (
        refused(x=np.where(X > 0.9, np.nan, X)),
        ValueError,
        "`per_example`: the output of the model needs finite numbers.*Look for NaN",
    ),
    "infinite_outputs": (
        refused(lambda w, x: jnp.exp(1e3 * (x @ w))),
        ValueError,
        "needs finite numbers.*an overflow inside the model",
    ),
    "coupled_examples": (
        lambda: refused(centred, x=normal(1, 5, 3))(),
        ValueError,
        r"`per_example`: the model couples examples \(through `reduce_sum`\): for 5 examples, such as number 0.*batch "
        "normalisation.*one random mask.*Use inference mode.*check=False",
    ),
    "hard_coded_batch": (
        refused(lambda w, x: x.reshape(5, -1) @ w),
        ValueError,
        r"works on the whole batch but fails on a batch of one.*hard-coded batch size.*`x.shape\[0\]` in its place",
    ),
    "squeeze": (
        refused(lambda w, x: (x @ w).squeeze(), params=np.ones((3, 1)), cotangents=np.ones(5)),
        ValueError,
        r"for a batch of one example the output of the model has shape \(\) instead of \(1,\).*`squeeze` without its "
        r"`axis`",
    ),
    # Options.
    "no_budget": (refused(budget=0), ValueError, "`per_example` needs a `budget` of at least one byte, but got 0"),
    "negative_budget": (refused(budget=-1), ValueError, "at least one byte, but got -1"),
    # Products and powers.
    "odd_power": (lambda: operator().power_sum(3), ValueError, "`PerExample.power_sum` needs an even power.*got 3"),
    "power_zero": (lambda: operator().power_sum(0), ValueError, "2 or more, but got 0"),
    "weights_of_another_shape": (
        lambda: operator().rmatvec(jnp.ones(4)),
        ValueError,
        r"`PerExample.rmatvec` needs one weight a row, of shape \(5,\), but got \(4,\)",
    ),
    "weights_without_the_cotangents": (
        lambda: operator(np.ones((2, 5, 2))).rmatvec(jnp.ones(5)),
        ValueError,
        r"of shape \(2, 5\), but got \(5,\)",
    ),
    "vector_of_another_shape": (
        lambda: operator().matvec(W.T),
        ValueError,
        r"`PerExample.matvec` needs a tree with the structure and shapes of the parameters, \(3, 2\), but got \(2, 3\)",
    ),
    "vector_of_another_tree": (
        lambda: operator().matvec({"w": W}),
        ValueError,
        r"shapes of the parameters, \(3, 2\), but got \{'w': \(3, 2\)\}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_reason_and_remedy(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=f"(?s){message}"):
        call()


@pytest.mark.parametrize(
    "name", ["hard_coded_batch", "squeeze", "cotangents_of_another_shape", "sum_over_the_batch", "integer_outputs"]
)
def test_refused_while_tracing(name):
    """What is wrong with shapes is said when a program is traced, before anything runs."""
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=f"(?s){message}"):
        jax.eval_shape(jax.jit(lambda: call().norms()))


def test_products_are_refused_while_tracing():
    for method, argument in (("matvec", W.T), ("rmatvec", jnp.ones(4))):
        with pytest.raises(ValueError, match=f"`PerExample.{method}` needs"):
            jax.jit(lambda w, m=method, a=argument: getattr(ng.per_example(linear, w, X, U), m)(a))(W)


def test_coupled_examples_pass_if_told_so():
    """Without the check, the gradients are those of a batch of one."""
    rows = ng.per_example(centred, jnp.asarray(W), X, U, check=False).rows()
    np.testing.assert_array_equal(rows, 0)
    np.testing.assert_array_equal(jax.jit(lambda w: ng.per_example(centred, w, X, U, check=False).norms())(W), 0)


def test_errors_name_the_first_line_of_what_failed():
    """The reason is the model's own, without pages of a traceback."""

    def model(w, x):
        if x.shape[0] == 1:
            raise RuntimeError("the sampler needs two rows\nand more about it")
        return x @ w

    with pytest.raises(ValueError, match=r"fails on a batch of one example \(the sampler needs two rows\)") as caught:
        ng.per_example(model, W, X, U)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.float32
@pytest.mark.users_defaults
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_gradients_of_any_size_pass(scale):
    """Their squares are no single-precision numbers."""
    model = lambda w, x: scale * jnp.sin(x @ w)
    ng.per_example(model, jnp.ones((3, 2)), jnp.arange(12.0).reshape(4, 3), jnp.ones((4, 2)))


def test_a_forgotten_has_aux_is_suggested():
    model = lambda w, x: (x @ w, jnp.sum(x))
    with pytest.raises(ValueError, match="returns `\\(z, aux\\)` needs `has_aux=True`"):
        ng.pullback(model, ng.Euclidean(), jnp.ones((3, 2)), jnp.ones((4, 3)))
