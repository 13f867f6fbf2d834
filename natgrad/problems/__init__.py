"""Ready-made problems, and problems made from a file of data."""

from natgrad.problems._chars import chars as chars
from natgrad.problems._gallery import PROBLEMS as PROBLEMS
from natgrad.problems._gallery import Embedded as Embedded
from natgrad.problems._mnist import mnist_autoencoder as mnist_autoencoder
from natgrad.problems._poisson import poisson_pde as poisson_pde
from natgrad.problems._rosenbrock import rosenbrock as rosenbrock
from natgrad.problems._sklearn import diabetes as diabetes
from natgrad.problems._sklearn import digits as digits
from natgrad.problems._sklearn import digits_autoencoder as digits_autoencoder
from natgrad.problems.tables import from_file as from_file
