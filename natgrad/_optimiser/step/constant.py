from typing import Any

from natgrad._check import check_number, public
from natgrad._optimiser.step.base import AbstractStep, Proposal, scheduled


class ConstantStep(AbstractStep):
    """A given multiple of the natural gradient: a number, or a schedule from optax."""

    learning_rate: Any = 1.0

    @public
    def __check_init__(self):
        check_number(self.learning_rate, "`learning_rate`", above=0, schedules=True)

    def propose(self, context):
        rate = scheduled(self.learning_rate, context.steps)
        return Proposal(context.update(rate, context.momentum), rate, context.momentum)

    @property
    def keeps_learning_rate(self):
        return True

    @property
    def keeps_damping(self):
        return True
