"""Figures of the theory, from the library's own computations. Each function returns a figure of matplotlib, for the
theme `"light"` or `"dark"`."""

from natgrad.plots._bregman import bregman as bregman
from natgrad.plots._contours import contours as contours
from natgrad.plots._function_space import function_space as function_space
from natgrad.plots._gallery import FIGURES as FIGURES
from natgrad.plots._gallery import save_figures as save_figures
from natgrad.plots._gaussians import fisher_ellipses as fisher_ellipses
from natgrad.plots._gaussians import steepest_descent as steepest_descent
from natgrad.plots._matrices import matrix_map as matrix_map
from natgrad.plots._overparametrised import overparametrised as overparametrised
from natgrad.plots._pullback import pullback as pullback
from natgrad.plots._rosenbrock import rosenbrock as rosenbrock
from natgrad.plots._rosenbrock import rosenbrock_steps as rosenbrock_steps
