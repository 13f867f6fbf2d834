"""Messages name the function that the user called, wherever inside it something is wrong."""

import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natgrad as ng
from natgrad._check import caller, public

X = np.ones((3, 2))


def model(params, x):
    return x @ params


def mixing(params, x):
    return (x - x.mean(axis=0, keepdims=True)) @ params


@public
def outer(fails=False):
    name = inner()
    if fails:
        raise RuntimeError(name)
    return name


@public
def inner():
    return caller()


class Thing:
    @public
    def __init__(self):
        self.made_by = caller()

    @public
    def method(self):
        return inner()


class Derived(Thing):
    pass


def test_the_outermost_name_stands_in_messages():
    assert (caller(), outer(), inner()) == ("natgrad", "`outer`", "`inner`")
    assert (Thing().made_by, Derived().made_by, Derived().method()) == ("`Thing`", "`Derived`", "`Derived.method`")


def test_a_name_is_forgotten_after_an_error_and_unknown_to_other_threads():
    with pytest.raises(RuntimeError, match="`outer`"):
        outer(fails=True)
    assert caller() == "natgrad"
    names = []

    @public
    def busy():
        thread = threading.Thread(target=lambda: names.append(caller()))
        thread.start()
        thread.join()

    busy()
    assert names == ["natgrad"]


def test_names_and_documentation_of_public_functions_are_kept():
    assert ng.pullback.__name__ == "pullback" and "matrix-free" in (ng.pullback.__doc__ or "")


NESTED = {
    "`natural_gradient`": lambda x: ng.natural_gradient(mixing, ng.Euclidean(), np.ones((2, 1)), x, np.ones((2, 1))),
    "`kfac`": lambda x: ng.kfac(mixing, ng.Euclidean(), np.ones((2, 1)), x),
    "`gram`": lambda x: ng.gram(mixing, ng.Euclidean(), np.ones((2, 1)), x),
    "`per_example`": lambda x: ng.per_example(mixing, np.ones((2, 1)), x, np.ones((3, 1))),
}


@pytest.mark.parametrize("name", NESTED)
def test_errors_of_what_a_function_calls_are_raised_in_its_name(name):
    with pytest.raises(ValueError, match=f"^{name}: the model couples examples"):
        NESTED[name](np.arange(6.0).reshape(3, 2))


def outside(params, x):
    return jnp.abs(x @ params)


FISHER = ng.Fisher(ng.Exponential())
OUTSIDE = {
    "pullback": lambda: ng.pullback(outside, FISHER, np.ones((2, 1)), X),
    "diagonal": lambda: ng.diagonal(outside, FISHER, np.ones((2, 1)), X),
    "gram": lambda: ng.gram(outside, FISHER, np.ones((2, 1)), X),
    "kfac": lambda: ng.kfac(outside, FISHER, np.ones((2, 1)), X),
    "ekfac": lambda: ng.ekfac(outside, FISHER, np.ones((2, 1)), X),
    "evaluate": lambda: ng.evaluate(outside, FISHER, np.ones((2, 1)), X),
    "natural_gradient": lambda: ng.natural_gradient(outside, FISHER, np.ones((2, 1)), X, np.ones((2, 1))),
    "Fisher.factor": lambda: FISHER.factor(np.ones(1)),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_outputs_at_which_a_geometry_is_not_defined_are_refused_in_its_name(name):
    with pytest.raises(ValueError, match=f"^`{name}`: natural parameter `z` of `Exponential` needs negative numbers"):
        OUTSIDE[name]()


@pytest.mark.parametrize("function", [ng.pullback, ng.diagonal, ng.gram, ng.kfac, ng.ekfac, ng.evaluate])
def test_every_output_is_looked_at(function):
    x = np.array([[-1.0, -1.0], [-2.0, -1.0], [1.0, 1.0]])
    refused = f"^`{function.__name__}`: example 2: natural parameter `z` of `Exponential` needs negative"
    with pytest.raises(ValueError, match=refused):
        function(model, FISHER, np.ones((2, 1)), x)


def test_errors_while_a_compiled_program_runs_have_the_name_too():
    statistic = jax.jit(lambda x: ng.per_example(mixing, jnp.ones((2, 1)), x, jnp.ones((3, 1))).norms())
    with pytest.raises(Exception, match="`per_example`: the model couples examples"):
        jax.block_until_ready(statistic(np.arange(6.0).reshape(3, 2)))


def test_steps_and_starts_of_an_optimiser_are_told_apart():
    opt = ng.NaturalGradient(model, ng.LeastSquares())
    params, batch = jnp.ones((2, 1)), (X, np.ones((3, 1)))
    bad = (X, np.full((3, 1), np.nan))
    with pytest.raises(ValueError, match="^`NaturalGradient.init`: the target of example 0"):
        opt.init(params, bad)
    state = opt.init(params, batch)
    with pytest.raises(ValueError, match="^`NaturalGradient.step`: the target of example 0"):
        opt.step(params, state, bad)
    with pytest.raises(ValueError, match="^`NaturalGradient.update`: the target of example 0"):
        opt.update(params, state, params, bad)


def exported():
    """Every exported function, and every public method of an exported class, by its name."""
    for name, value in vars(ng).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            yield name, value
        if inspect.isclass(value):
            methods = {key: method for key, method in inspect.getmembers(value) if callable(method)}
            for key, method in methods.items():
                if not key.startswith("_") or key in ("__init__", "__check_init__", "__call__"):
                    # Equinox wraps methods once more; the code of both wrappers is that of the function inside.
                    yield f"{name}.{key}", getattr(method, "method", method)


def reads_caller(function) -> bool:
    """Whether a function itself, not one that it calls, asks in whose name to complain."""
    return "caller" in getattr(getattr(function, "__code__", None), "co_names", ())


def test_whatever_is_exported_and_names_its_caller_is_a_caller():
    functions = dict(exported())
    assert len(functions) > 300 and reads_caller(inner.__wrapped__) and not reads_caller(inner)
    assert not {name for name, function in functions.items() if reads_caller(function)}


def straight(w, x):
    return x @ w


def erratic(w, x):
    """A model that forgets the axis of examples, unless there are three of them."""
    return x @ w if len(x) == 3 else w[0]


def problem():
    return ng.Problem(erratic, ng.LeastSquares(), np.ones((2, 1)), (X, np.ones((3, 1))))


TWO = (np.ones((2, 2)), np.ones((2, 1)))


def online():
    return ng.OnlineMaximumLikelihood(ng.Poisson())


NAMED = {
    "`Problem`": lambda: ng.Problem(erratic, ng.LeastSquares(), np.ones((2, 1)), TWO),
    "`Problem.loss`": lambda: problem().loss(np.ones((2, 1)), TWO),
    "`Problem.score`": lambda: problem().score(np.ones((2, 1)), TWO, None),
    "`OnlineMaximumLikelihood`": lambda: ng.OnlineMaximumLikelihood("poisson"),
    "`OnlineMaximumLikelihood.init`": lambda: online().init(np.array(1j)),
    "`OnlineMaximumLikelihood.update`": lambda: online().update(online().init(np.array(1.0)), np.array(-1.0)),
    "`OnlineMaximumLikelihood.update_many`": lambda: online().update_many(online().init(np.array(1.0)), np.array(1.0)),
    "`OnlineMaximumLikelihood.update_all`": lambda: online().update_all(online().init(np.array(1.0)), [np.array(1.0)]),
    "`OnlineMaximumLikelihood.natural`": lambda: online().natural(online().init(np.array(1.0))),
    "`OnlineNaturalGradient.init`": lambda: ng.OnlineNaturalGradient(
        straight, ng.LeastSquares(), prior_precision={"params[0]": 1.0}
    ).init([jnp.ones(2), jnp.ones(2)]),
    "`LowRankPrecision`": lambda: ng.LowRankPrecision(0),
    "`FunctionSpace`": lambda: ng.FunctionSpace(straight, "Euclidean"),
    "`constrained_step`": lambda: ng.constrained_step(ng.Simplex(), np.ones(2) / 2, np.ones(3)),
    "`check_invariance`": lambda: ng.check_invariance(
        ng.Task(straight, ng.Euclidean(), lambda z, y: z, X, X), jnp.ones(2), lambda w: 2 * w, jnp.ones(2)
    ),
    "`Poisson.log_prob`": lambda: ng.Poisson().log_prob(np.array(0.0), np.array(-1.0)),
    "`Gaussian.from_mean`": lambda: ng.Gaussian(1).from_mean(np.zeros(1), -np.eye(1)),
    "`expectation_gradient`": lambda: ng.expectation_gradient(
        ng.Gaussian(1), (np.zeros(1), -np.eye(1)), lambda x: x.sum(), jax.random.key(0)
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_errors_begin_with_the_method_that_was_called(name):
    with pytest.raises((ValueError, TypeError), match=f"^{name}[: ]"):
        NAMED[name]()
