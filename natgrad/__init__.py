"""Natural gradients for JAX: choose a geometry on the outputs, pull it back, step downhill in it."""

from importlib.metadata import version

# Metrics on the parameters
from natgrad._blocks.report import BlockReport as BlockReport
from natgrad._blocks.report import StructureReport as StructureReport

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
from natgrad._geometry.dual_fisher import DualFisher as DualFisher
from natgrad._geometry.euclidean import Euclidean as Euclidean
from natgrad._geometry.fisher import Fisher as Fisher
from natgrad._geometry.product import ProductGeometry as ProductGeometry

# Geometry you can check
from natgrad._manifold.chart import reparametrise as reparametrise
from natgrad._manifold.constraint import BackProjection as BackProjection
from natgrad._manifold.constraint import Backtracking as Backtracking
from natgrad._manifold.constraint import Clipping as Clipping
from natgrad._manifold.constraint import Penalty as Penalty
from natgrad._manifold.constraint import PositiveDefinite as PositiveDefinite
from natgrad._manifold.constraint import Simplex as Simplex
from natgrad._manifold.constraint import constrained_step as constrained_step
from natgrad._manifold.invariance import Task as Task
from natgrad._manifold.invariance import check_invariance as check_invariance
from natgrad._manifold.invariance import check_projection as check_projection
from natgrad._manifold.musical import flat as flat
from natgrad._manifold.musical import pullback_covector as pullback_covector
from natgrad._manifold.musical import pushforward as pushforward
from natgrad._manifold.musical import sharp as sharp
from natgrad._manifold.rank import null_space as null_space
from natgrad._manifold.rank import rank as rank
from natgrad._metric.blocks import BlockInverse as BlockInverse
from natgrad._metric.blocks import BlockMetric as BlockMetric
from natgrad._metric.diagonal import DiagonalMetric as DiagonalMetric
from natgrad._metric.diagonal import diagonal as diagonal
from natgrad._metric.distance import function_distance as function_distance
from natgrad._metric.ekfac import ekfac as ekfac
from natgrad._metric.estimate import Estimate as Estimate
from natgrad._metric.estimate import diagonal_estimate as diagonal_estimate
from natgrad._metric.estimate import trace_estimate as trace_estimate
from natgrad._metric.gram import gram as gram
from natgrad._metric.hessian import hessian as hessian
from natgrad._metric.identity import identity as identity
from natgrad._metric.kfac import kfac as kfac
from natgrad._metric.loader import accumulate as accumulate
from natgrad._metric.moments import empirical_fisher as empirical_fisher
from natgrad._metric.moments import gradient_covariance as gradient_covariance
from natgrad._metric.pullback import gauss_newton as gauss_newton
from natgrad._metric.pullback import pullback as pullback
from natgrad._metric.running import RunningAverage as RunningAverage

# Learning from streams
from natgrad._online.maximum_likelihood import OnlineMaximumLikelihood as OnlineMaximumLikelihood
from natgrad._online.maximum_likelihood import OnlineState as OnlineState
from natgrad._online.natural_gradient import OnlineGradientState as OnlineGradientState
from natgrad._online.natural_gradient import OnlineInfo as OnlineInfo
from natgrad._online.natural_gradient import OnlineNaturalGradient as OnlineNaturalGradient
from natgrad._online.precision.dense import DensePrecision as DensePrecision
from natgrad._online.precision.diagonal import DiagonalPrecision as DiagonalPrecision
from natgrad._online.precision.low_rank import LowRankPrecision as LowRankPrecision

# Optimisers
from natgrad._optimiser.checkpoint import Checkpoints as Checkpoints
from natgrad._optimiser.checkpoint import load_checkpoint as load_checkpoint
from natgrad._optimiser.checkpoint import save_checkpoint as save_checkpoint
from natgrad._optimiser.conclusion import State as State
from natgrad._optimiser.damping.constant import ConstantDamping as ConstantDamping
from natgrad._optimiser.damping.levenberg_marquardt import LevenbergMarquardt as LevenbergMarquardt
from natgrad._optimiser.info import STEP_RESULTS as STEP_RESULTS
from natgrad._optimiser.info import Info as Info
from natgrad._optimiser.info import Quantity as Quantity
from natgrad._optimiser.momentum import HeavyBall as HeavyBall
from natgrad._optimiser.momentum import NoMomentum as NoMomentum
from natgrad._optimiser.momentum import Spring as Spring
from natgrad._optimiser.natural_gradient import NaturalGradient as NaturalGradient
from natgrad._optimiser.objective import LeastSquares as LeastSquares
from natgrad._optimiser.objective import Likelihood as Likelihood
from natgrad._optimiser.objective import Objective as Objective
from natgrad._optimiser.optax import as_optax as as_optax
from natgrad._optimiser.optax import scale_by_natural_gradient as scale_by_natural_gradient
from natgrad._optimiser.problem import Term as Term
from natgrad._optimiser.problem import Terms as Terms
from natgrad._optimiser.step.constant import ConstantStep as ConstantStep
from natgrad._optimiser.step.cross_validated import CrossValidated as CrossValidated
from natgrad._optimiser.step.kl_clip import KLClip as KLClip
from natgrad._optimiser.step.line_search import ArmijoLineSearch as ArmijoLineSearch
from natgrad._optimiser.step.line_search import GridLineSearch as GridLineSearch
from natgrad._optimiser.step.quadratic_model import QuadraticModel as QuadraticModel
from natgrad._optimiser.step.trust_region import TrustRegion as TrustRegion
from natgrad._optimiser.structure.diagonal import Diagonal as Diagonal
from natgrad._optimiser.structure.ekfac import EKFAC as EKFAC
from natgrad._optimiser.structure.exact import Exact as Exact
from natgrad._optimiser.structure.inner_solve import InnerSolve as InnerSolve
from natgrad._optimiser.structure.kfac import KFAC as KFAC

# Gradients of single examples
from natgrad._per_example.explain import Explanation as Explanation
from natgrad._per_example.operator import PerExample as PerExample
from natgrad._per_example.per_example import per_example as per_example

# A problem whole
from natgrad._problem import Problem as Problem

# The proximal family
from natgrad._proximal.expectation import expectation_gradient as expectation_gradient
from natgrad._proximal.mirror import mirror_step as mirror_step
from natgrad._proximal.natural import natural_step as natural_step
from natgrad._proximal.newton import damped_newton_step as damped_newton_step
from natgrad._proximal.problem import FunctionSpace as FunctionSpace
from natgrad._proximal.problem import ProximalProblem as ProximalProblem
from natgrad._proximal.proximal_point import proximal_point as proximal_point
from natgrad._proximal.step import PROXIMAL_RESULTS as PROXIMAL_RESULTS
from natgrad._proximal.step import ProximalStep as ProximalStep
from natgrad._proximal.trust_region import trust_region_step as trust_region_step

# Solving
from natgrad._solve.auto import Auto as Auto
from natgrad._solve.cg import CG as CG
from natgrad._solve.cholesky import Cholesky as Cholesky
from natgrad._solve.pseudo_inverse import PseudoInverse as PseudoInverse
from natgrad._solve.result import RESULTS as RESULTS
from natgrad._solve.result import Solution as Solution
from natgrad._solve.sample_space import SampleSpace as SampleSpace
from natgrad._solve.solve import natural_gradient as natural_gradient
from natgrad._solve.solve import solve as solve

# Tangent vectors and covectors
from natgrad._vector import Covector as Covector
from natgrad._vector import Vector as Vector

__version__ = version("natgrad")
