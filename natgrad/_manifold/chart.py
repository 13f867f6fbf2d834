from collections.abc import Callable

from jaxtyping import PyTree

from natgrad._check import public


@public
def reparametrise(model: Callable, chart: Callable[[PyTree], PyTree]) -> Callable:
    r"""The same model in other coordinates: `model(chart(theta), x)` as a function of `theta` and `x`.

    Its pullback metric at `theta` is that of the model pulled back through the chart, so natural gradients of the
    two push forward to the same change of the outputs."""

    def reparametrised(theta: PyTree, *x: PyTree) -> PyTree:
        return model(chart(theta), *x)

    return reparametrised
