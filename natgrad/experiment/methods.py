"""What is compared: structures of the metric with nothing to tune, and first-order methods with a rate to sweep."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import optax
from jaxtyping import PyTree

from natgrad._optimiser.natural_gradient import NaturalGradient
from natgrad._optimiser.problem import Term, Terms
from natgrad._optimiser.step.cross_validated import CrossValidated
from natgrad._optimiser.structure.base import AbstractStructure
from natgrad._optimiser.structure.diagonal import Diagonal
from natgrad._optimiser.structure.ekfac import EKFAC
from natgrad._optimiser.structure.exact import Exact
from natgrad._optimiser.structure.kfac import KFAC
from natgrad._problem import Problem
from natgrad._solve.solve import DENSE

Settings = dict[str, Any]


@dataclass(frozen=True)
class AbstractMethod(ABC):
    """A way to train, with the settings that are to be tried."""

    name: str
    kind: ClassVar[str]

    @property
    @abstractmethod
    def sweep(self) -> tuple[Settings, ...]:
        """One or more settings, each of which gets a run of its own."""

    @abstractmethod
    def settings(self, problem: Problem, tried: Settings) -> Settings:
        """What a report says about a run."""

    @abstractmethod
    def init(self, problem: Problem, tried: Settings, *, check: bool = False) -> PyTree:
        """The first state; with `check`, after a test that the model treats examples independently."""

    @abstractmethod
    def step(self, problem: Problem, params: PyTree, state: PyTree, batch: Any, key: Any) -> tuple[PyTree, PyTree, Any]:
        """New parameters, the new state and what happened, traced once for all settings."""

    @abstractmethod
    def code(self, problem: Problem, tried: Settings) -> str:
        """How to define `opt` and to take `{steps}` steps from `{seed}`, for people to copy."""

    def beyond(self, tried: Settings, *, above: bool) -> Settings | None:
        """The settings next to those at an end of the sweep, if that can go on."""
        del tried, above
        return None

    def refusal(self, problem: Problem) -> str | None:
        """Why a problem is too large for the method, if it is."""
        del problem
        return None


@dataclass(frozen=True)
class Natural(AbstractMethod):
    """The natural gradient with some structure of the metric and otherwise its defaults for batches of this kind."""

    make: Callable[[], AbstractStructure]
    kind = "natural"

    @property
    def structure(self) -> AbstractStructure:
        return self.make()

    @property
    def sweep(self):
        return ({},)

    def settings(self, problem, tried):
        del tried
        written = {"structure": f"{type(self.structure).__name__}()"}
        return written | ({} if problem.batch_size is None else {"step": "CrossValidated()"})

    def optimiser(self, problem: Problem, *, check: bool = True) -> NaturalGradient:
        rule = None if problem.batch_size is None else CrossValidated()
        return NaturalGradient(cost_of(problem, check=check), structure=self.structure, step=rule)

    def init(self, problem, tried, *, check=False):
        del tried
        return self.optimiser(problem, check=check).init(problem.params, problem.batch(0))

    def step(self, problem, params, state, batch, key):
        return self.optimiser(problem).step(params, state, batch, key)

    def code(self, problem, tried):
        trained = "problem.model, problem.objective"
        arguments = [f"ng.Term({trained}, has_aux=True)" if problem.has_aux else trained]
        arguments += [f"{name}=ng.{value}" for name, value in self.settings(problem, tried).items()]
        return (
            f"opt = ng.NaturalGradient({', '.join(arguments)})\n"
            "params = problem.params\n"
            "state = opt.init(params, problem.batch(0))\n"
            "step = jax.jit(opt.step)\n"
            "for number in range({steps}):\n"
            "    key = jax.random.fold_in(jax.random.key({seed}), number)\n"
            "    params, state, info = step(params, state, problem.batch(number, {seed}), key)\n"
        )

    def refusal(self, problem):
        if not isinstance(self.structure, Exact):
            return None
        rows = (problem.batch_size or problem.num_examples) * num_outputs(problem)
        if min(rows, problem.num_params) <= DENSE:
            return None
        return (
            f"{problem.num_params:,} parameters and {rows:,} outputs a batch are both more than {DENSE:,}, above which "
            "an exact solve takes more than a second."
        )


@dataclass(frozen=True)
class FirstOrder(AbstractMethod):
    """A method of optax that needs a learning rate."""

    make: Callable
    rates: tuple[float, ...]
    written: str
    kind = "first-order"

    @property
    def sweep(self):
        return tuple({"learning_rate": rate} for rate in self.rates)

    def settings(self, problem, tried):
        del problem
        return dict(tried)

    def init(self, problem, tried, *, check=False):
        del check
        return self._transform(tried["learning_rate"]).init(problem.params)

    def step(self, problem, params, state, batch, key):
        del key
        loss, gradient = jax.value_and_grad(problem.loss)(params, batch)
        # The rate is part of the state, so that the whole sweep is one program.
        updates, state = self._transform(self.rates[0]).update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    def code(self, problem, tried):
        return (
            f"opt = {self.written.format(rate=tried['learning_rate'])}\n"
            "params = problem.params\n"
            "state = opt.init(params)\n\n\n"
            "@jax.jit\n"
            "def step(params, state, batch):\n"
            "    updates, state = opt.update(jax.grad(problem.loss)(params, batch), state, params)\n"
            "    return optax.apply_updates(params, updates), state\n\n\n"
            "for number in range({steps}):\n"
            "    params, state = step(params, state, problem.batch(number, {seed}))\n"
        )

    def beyond(self, tried, *, above):
        halves = round(2 * math.log10(tried["learning_rate"])) + (1 if above else -1)
        return {"learning_rate": (3.0 if halves % 2 else 1.0) * 10.0 ** (halves // 2)}

    def _transform(self, rate: float) -> Any:
        return optax.inject_hyperparams(self.make)(learning_rate=rate)


def momentum(learning_rate: Any) -> Any:
    return optax.sgd(learning_rate, momentum=0.9)


NATURAL = {
    "kfac": Natural("K-FAC", KFAC),
    "ekfac": Natural("EKFAC", EKFAC),
    "exact": Natural("exact", Exact),
    "diagonal": Natural("diagonal", Diagonal),
}
FIRST_ORDER = {
    "adam": FirstOrder("Adam", optax.adam, (1e-3, 3e-3, 1e-2, 3e-2, 0.1), "optax.adam({rate:g})"),
    "sgd": FirstOrder(
        "SGD, momentum", momentum, (1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0), "optax.sgd({rate:g}, momentum=0.9)"
    ),
    "adadelta": FirstOrder("Adadelta", optax.adadelta, (0.3, 1.0, 3.0, 10.0, 30.0), "optax.adadelta({rate:g})"),
}
METHODS: dict[str, AbstractMethod] = {**NATURAL, **FIRST_ORDER}


def cost_of(problem: Problem, *, check: bool = True) -> Term | Terms:
    """What is minimised, with or without a test that models treat examples independently."""
    make = lambda term: Term(term.model, term.objective, term.weight, has_aux=term.has_aux, check=check)
    terms = {name: make(term) for name, term in problem.terms.items()}
    return terms[None] if None in terms else Terms(**{str(name): term for name, term in terms.items()})


def num_outputs(problem: Problem) -> int:
    """How many numbers the model gives for one example, of `Terms` on average."""
    total = 0
    for name, term in problem.terms.items():
        x = (problem.data if name is None else problem.data[name])[0]
        z = jax.eval_shape(term.outputs, problem.params, *([] if x is None else [x]))
        total += sum(leaf.size for leaf in jax.tree.leaves(z))
    return -(-total // problem.num_examples)


def with_warnings(function: Callable[[], Any]) -> tuple[Any, str]:
    """What a function returns, and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = function()
    return found, " ".join(dict.fromkeys(str(each.message) for each in caught))
