"""What a step says about itself."""

from typing import NamedTuple

from jaxtyping import Array, Bool, PyTree

from natgrad._solve.result import RESULTS
from natgrad._types import Scalar


class STEP_RESULTS(RESULTS):  # pyright: ignore[reportGeneralTypeIssues]
    """Outcomes of a step: those of its solve, and these."""

    restored = (
        "The loss or its gradient was not finite, or the last step raised the loss far above its usual values, so the "
        "step went back to the parameters before the last one, with more damping where that is adaptive. Look for NaN "
        "in the batch, or lower the learning rate."
    )
    rejected = (
        "The step would not have lowered the loss, so the parameters stay as they were. With adaptive damping the next "
        "step is shorter; otherwise lower the learning rate or raise the damping."
    )
    too_many_rejections = (
        "More steps in a row were rejected than `max_rejections` allows. Likely causes: (a) NaN in the data; (b) a "
        "loss that is at its minimum up to rounding; (c) a gradient that is not that of the loss (a custom rule); (d) "
        "a learning rate or a damping that cannot work."
    )
    inner_diverged = (
        "The optimiser of `InnerSolve` did not lower the loss of the linearised model, so the step was not taken. "
        "Lower its learning rate."
    )
    kept_inverse = (
        "Some factor could not be inverted when that was last due, and the inverse before it is still in use. Raise "
        "the damping, or use float64."
    )


class Info(NamedTuple):
    r"""What happened in a step. Quantities that the chosen parts do not compute are NaN.

    - `loss`: before the step, over the whole batch, penalties included; `loss_after` it.
    - `damping`: the strength that was used.
    - `step_size`: how much of the natural gradient was taken, and `momentum` how much of the last update.
    - `predicted_decrease` of the loss by the quadratic model with the exact metric, and `actual_decrease`.
    - `divergence`: how far the outputs moved, in the geometry, and `predicted_divergence` by its quadratic model.
    - `cosine`: $-g(d)\,/\,|d|_{G+D}\,|g|$, with the exact metric $G$ and $|g|$ by the inverse that the structure stands
      for: one for a step along the natural gradient if that is exact.
    - `accepted`: whether the step was taken.
    - `result`: a member of `STEP_RESULTS`, whose text says what happened.
    - `failures`: how often an inverse of a block was not finite, so far, and the one before it was kept. Damping that
      is rounding next to a factor is raised until it is not, and is not counted here.
    - `aux`: what the model returned besides its outputs.
    """

    loss: Scalar
    loss_after: Scalar
    damping: Scalar
    step_size: Scalar
    momentum: Scalar
    predicted_decrease: Scalar
    actual_decrease: Scalar
    divergence: Scalar
    predicted_divergence: Scalar
    cosine: Scalar
    accepted: Bool[Array, ""]
    result: STEP_RESULTS
    failures: Array
    aux: PyTree
