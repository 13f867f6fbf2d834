"""Natural gradients for JAX: choose a geometry on the outputs, pull it back, step downhill in it."""

from importlib.metadata import version

# Exponential families
from natgrad._family.bernoulli import Bernoulli as Bernoulli
from natgrad._family.beta import Beta as Beta
from natgrad._family.categorical import Categorical as Categorical
from natgrad._family.categorical import MinimalCategorical as MinimalCategorical
from natgrad._family.dirichlet import Dirichlet as Dirichlet
from natgrad._family.exponential import Exponential as Exponential
from natgrad._family.gamma import Gamma as Gamma
from natgrad._family.gaussian import Gaussian as Gaussian
from natgrad._family.gaussian_mean import GaussianMean as GaussianMean
from natgrad._family.gaussian_precision import GaussianPrecision as GaussianPrecision
from natgrad._family.geometric import Geometric as Geometric
from natgrad._family.negative_binomial import NegativeBinomial as NegativeBinomial
from natgrad._family.poisson import Poisson as Poisson
from natgrad._family.product import Product as Product

# Geometries of one example's output
from natgrad._geometry.bregman import Bregman as Bregman
from natgrad._geometry.dissimilarity import Dissimilarity as Dissimilarity
from natgrad._geometry.euclidean import Euclidean as Euclidean
from natgrad._geometry.fisher import Fisher as Fisher
from natgrad._geometry.product import ProductGeometry as ProductGeometry

__version__ = version("natgrad")
