"""What came of a solve."""

import equinox as eqx
from jaxtyping import PyTree


class RESULTS(eqx.Enumeration):
    """Outcomes of a solve; the text of each explains itself."""

    successful = "The system was solved."
    max_steps_reached = (
        "The iteration stopped at `max_steps` before the residual fell below `rtol`. The value is the best so far: a "
        "descent direction for a positive definite metric, but not the solution. Allow more steps, raise the damping, "
        "or give a preconditioner."
    )
    not_positive_definite = (
        "The metric plus damping is not positive definite. Likely causes: (a) the damping is zero or too small for a "
        "metric with redundant parameters: raise it, or use `PseudoInverse`; (b) the operator is a Hessian with "
        "negative curvature: use `gauss_newton` or `pullback`; (c) single precision is too little for its condition "
        "number: use float64."
    )
    inaccurate = (
        "The solution leaves a residual far above rounding. Likely causes: (a) the damping is tiny next to the metric: "
        "raise it, or pass `SampleSpace(cotangents=...)`; (b) single precision is too little for the condition number: "
        "use float64."
    )
    not_finite = (
        "The solution is not finite. Likely causes: NaN or infinity in the covector, the parameters or the data, or an "
        "overflow in the model."
    )


class Solution(eqx.Module):
    """The answer of `natgrad.solve`.

    **Attributes:**

    - `value`: the solution, a tree like the parameters; a `Vector` if the right-hand side was a `Covector`.
    - `result`: a member of `natgrad.RESULTS`; its text says what happened.
    - `stats`: numbers about the solve: the relative `residual`, and steps, rank or rows.
    - `solver`: which solver did it, and why `Auto` picked it.
    """

    value: PyTree
    result: RESULTS
    stats: dict
    solver: str = eqx.field(static=True)
