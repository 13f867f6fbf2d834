"""Methods to compare: natural gradients with nothing to tune, and first-order methods with a learning-rate sweep."""

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
from natgrad._optimiser.step.cross_validated import CrossValidated
from natgrad._optimiser.structure.base import AbstractStructure
from natgrad._optimiser.structure.diagonal import Diagonal
from natgrad._optimiser.structure.ekfac import EKFAC
from natgrad._optimiser.structure.exact import Exact
from natgrad._optimiser.structure.kfac import KFAC
from natgrad._optimiser.term import Term, Terms
from natgrad._problem import Problem
from natgrad._solve.solve import DENSE

Settings = dict[str, Any]


@dataclass(frozen=True)
class AbstractMethod(ABC):
    """A method of training, with the settings to try."""

    name: str
    kind: ClassVar[str]

    @property
    @abstractmethod
    def sweep(self) -> tuple[Settings, ...]:
        """The settings to try; there is one run for each."""

    @abstractmethod
    def describe(self, problem: Problem, settings: Settings) -> Settings:
        """The settings of a run as a report shows them."""

    @abstractmethod
    def init(self, problem: Problem, settings: Settings, *, check: bool = False) -> PyTree:
        """The state before the first step; with `check`, test that the model treats examples independently."""

    @abstractmethod
    def optimiser(self, problem: Problem) -> PyTree:
        """The optimiser, as a tree of the numbers that may change from step to step without a new compilation."""

    @abstractmethod
    def step(
        self, problem: Problem, optimiser: PyTree, params: PyTree, state: PyTree, batch: Any, key: Any
    ) -> tuple[PyTree, PyTree, Any]:
        """New parameters, new state and information about the step. Traced once for all settings, and for all numbers
        of the optimiser."""

    @abstractmethod
    def code(self, problem: Problem, settings: Settings) -> str:
        """Code to copy: define `opt` and take `{steps}` steps with the random seed `{seed}`."""

    def beyond(self, settings: Settings, *, above: bool) -> Settings | None:
        """The next settings above or below, if the sweep can be extended beyond these."""
        del settings, above
        return None

    def refusal(self, problem: Problem) -> str | None:
        """The reason why a problem is too large for the method, if it is."""
        del problem
        return None


@dataclass(frozen=True)
class Natural(AbstractMethod):
    """`NaturalGradient` with a structure and otherwise its defaults, except `CrossValidated` steps on small batches."""

    make: Callable[[], AbstractStructure]
    kind = "natural"

    @property
    def structure(self) -> AbstractStructure:
        return self.make()

    @property
    def sweep(self):
        return ({},)

    def describe(self, problem, settings):
        del settings
        written = {"structure": f"{type(self.structure).__name__}()"}
        return written | ({} if problem.batch_size is None else {"step": "CrossValidated()"})

    def optimiser(self, problem: Problem, *, check: bool = True) -> NaturalGradient:
        rule = None if problem.batch_size is None else CrossValidated()
        return NaturalGradient(cost_of(problem, check=check), structure=self.structure, step=rule)

    def init(self, problem, settings, *, check=False):
        del settings
        return self.optimiser(problem, check=check).init(problem.params, problem.batch(0))

    def step(self, problem, optimiser, params, state, batch, key):
        del problem
        return optimiser.step(params, state, batch, key)

    def code(self, problem, settings):
        arguments = ["problem.model", "problem.objective"]
        arguments += [f"{name}=ng.{value}" for name, value in self.describe(problem, settings).items()]
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
        # The smaller of the two systems is solved: in sample space it has a row for every output of the batch.
        rows = (problem.batch_size or problem.num_examples) * num_outputs(problem)
        if min(rows, problem.num_params) <= DENSE:
            return None
        return (
            f"{problem.num_params:,} parameters and {rows:,} outputs a batch are both more than {DENSE:,}: an exact "
            "solve would take more than a second a step."
        )


@dataclass(frozen=True)
class FirstOrder(AbstractMethod):
    """A method of optax with a learning rate to sweep. `template` is its code, with `{rate}` for the learning rate."""

    make: Callable
    rates: tuple[float, ...]
    template: str
    kind = "first-order"

    @property
    def sweep(self):
        return tuple({"learning_rate": rate} for rate in self.rates)

    def describe(self, problem, settings):
        del problem
        return dict(settings)

    def init(self, problem, settings, *, check=False):
        del check
        return self._transform(settings["learning_rate"]).init(problem.params)

    def optimiser(self, problem):
        # Nothing: the learning rate is part of the state.
        del problem

    def step(self, problem, optimiser, params, state, batch, key):
        del optimiser, key
        loss, gradient = jax.value_and_grad(problem.loss)(params, batch)
        # The learning rate is part of the state, so the whole sweep shares one compiled program.
        updates, state = self._transform(self.rates[0]).update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    def code(self, problem, settings):
        return (
            f"opt = {self.template.format(rate=settings['learning_rate'])}\n"
            "params = problem.params\n"
            "state = opt.init(params)\n\n\n"
            "@jax.jit\n"
            "def step(params, state, batch):\n"
            "    updates, state = opt.update(jax.grad(problem.loss)(params, batch), state, params)\n"
            "    return optax.apply_updates(params, updates), state\n\n\n"
            "for number in range({steps}):\n"
            "    params, state = step(params, state, problem.batch(number, {seed}))\n"
        )

    def beyond(self, settings, *, above):
        # Half powers of ten, written 1 and 3: 0.01, 0.03, 0.1, 0.3, 1.
        halves = round(2 * math.log10(settings["learning_rate"])) + (1 if above else -1)
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
    terms = {
        name: Term(term.model, term.objective, term.weight, has_aux=term.has_aux, check=check)
        for name, term in problem.terms.items()
    }
    return terms[None] if None in terms else Terms(**{str(name): term for name, term in terms.items()})


def num_outputs(problem: Problem) -> int:
    """How many numbers the model returns for one example, with `Terms` on average over all examples."""
    total = 0
    for name, term in problem.terms.items():
        x = (problem.data if name is None else problem.data[name])[0]
        z = jax.eval_shape(term.outputs, problem.params, *([] if x is None else [x]))
        total += sum(leaf.size for leaf in jax.tree.leaves(z))
    return -(-total // problem.num_examples)


def with_warnings(function: Callable[[], Any]) -> tuple[Any, str]:
    """Call a function, and return its value and the text of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = function()
    return value, " ".join(dict.fromkeys(str(warning.message) for warning in caught))
