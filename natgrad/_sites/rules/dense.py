"""Products with a weight: `x @ W`, `W @ x`, `einsum` of any kind."""

from natgrad._sites import compat
from natgrad._sites.rules.layout import Layout, arrange, shifted
from natgrad._sites.uses import Use


def layout(use: Use) -> Layout | None:
    parts = compat.dot(use.site.eqn) if use.site.eqn is not None else None
    if parts is None:
        return None
    mine, other = use.operand, 1 - use.operand
    ranks = [len(operand.aval.shape) for operand in use.site.operands]
    free = [parts.free(k, ranks[k]) for k in (0, 1)]
    # Results have the mapped axes first, then the free ones of the left operand, then those of the right.
    num_mapped = len(parts.mapped[0])
    left = range(num_mapped, num_mapped + len(free[0]))
    right = range(num_mapped + len(free[0]), num_mapped + len(free[0]) + len(free[1]))
    outputs, positions = (left, right) if mine == 0 else (right, left)
    groups, shared = use.loop_axes
    loops, own = len(use.site.loops), len(use.value.loops)
    at = lambda axes: shifted(axes, loops)
    at_own = lambda axes: shifted(axes, own)

    return Layout(
        other,
        lambda x: arrange(x, groups + at(parts.mapped[other]), shared + at(free[other]), at(parts.contracted[other])),
        lambda h: arrange(h, groups + at(range(num_mapped)), shared + at(positions), at(outputs)),
        lambda w: arrange(
            w, (*range(own), *at_own(parts.mapped[mine])), at_own(parts.contracted[mine]), at_own(free[mine])
        ),
        tuple(use.site.operands[other].aval.shape[axis] for axis in free[other]),
    )
