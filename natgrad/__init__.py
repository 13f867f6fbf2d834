"""Second-order optimisers (K-FAC, EKFAC, exact natural gradient) and curvature tools for any JAX model."""

from importlib.metadata import version

# Metrics on the parameters
from natgrad._block.rules import BlockRules as BlockRules
from natgrad._block.structure_report import BlockReport as BlockReport
from natgrad._block.structure_report import StructureReport as StructureReport
from natgrad._check import Requirement as Requirement
from natgrad._constraint import BackProjection as BackProjection
from natgrad._constraint import Backtracking as Backtracking
from natgrad._constraint import Clipping as Clipping
from natgrad._constraint import Penalty as Penalty
from natgrad._constraint import PositiveDefinite as PositiveDefinite
from natgrad._constraint import Simplex as Simplex
from natgrad._constraint import constrained_step as constrained_step

# Exponential families
from natgrad._family.base import AbstractFamily as AbstractFamily
from natgrad._family.bernoulli import Bernoulli as Bernoulli
from natgrad._family.categorical import Categorical as Categorical
from natgrad._family.categorical import MinimalCategorical as MinimalCategorical
from natgrad._family.dirichlet import Beta as Beta
from natgrad._family.dirichlet import Dirichlet as Dirichlet

# The proximal family
from natgrad._family.expectation import expectation_gradient as expectation_gradient
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
from natgrad._geometry.base import AbstractGeometry as AbstractGeometry
from natgrad._geometry.bregman import Bregman as Bregman
from natgrad._geometry.dissimilarity import Dissimilarity as Dissimilarity
from natgrad._geometry.euclidean import Euclidean as Euclidean
from natgrad._geometry.fisher import DualFisher as DualFisher
from natgrad._geometry.fisher import Fisher as Fisher
from natgrad._geometry.product import ProductGeometry as ProductGeometry
from natgrad._manifold.invariance import Task as Task
from natgrad._manifold.invariance import check_invariance as check_invariance
from natgrad._manifold.invariance import check_projection as check_projection
from natgrad._manifold.musical import flat as flat
from natgrad._manifold.musical import pullback_covector as pullback_covector
from natgrad._manifold.musical import pushforward as pushforward

# Geometry you can check
from natgrad._manifold.musical import reparametrise as reparametrise
from natgrad._manifold.musical import sharp as sharp
from natgrad._manifold.rank import null_space as null_space
from natgrad._manifold.rank import rank as rank
from natgrad._metric.accumulate import accumulate as accumulate
from natgrad._metric.base import AbstractMetric as AbstractMetric
from natgrad._metric.block_metric import BlockInverse as BlockInverse
from natgrad._metric.block_metric import BlockMetric as BlockMetric
from natgrad._metric.diagonal import DiagonalMetric as DiagonalMetric
from natgrad._metric.diagonal import diagonal as diagonal
from natgrad._metric.diagonal import identity as identity
from natgrad._metric.gram import gram as gram
from natgrad._metric.hessian import hessian as hessian
from natgrad._metric.hutchinson import diagonal_estimate as diagonal_estimate
from natgrad._metric.hutchinson import trace_estimate as trace_estimate
from natgrad._metric.kfac import ekfac as ekfac
from natgrad._metric.kfac import kfac as kfac
from natgrad._metric.pullback import empirical_fisher as empirical_fisher
from natgrad._metric.pullback import function_distance as function_distance
from natgrad._metric.pullback import gauss_newton as gauss_newton
from natgrad._metric.pullback import gradient_covariance as gradient_covariance
from natgrad._metric.pullback import pullback as pullback
from natgrad._metric.running import RunningAverage as RunningAverage
from natgrad._online.kalman import OnlineGradientState as OnlineGradientState
from natgrad._online.kalman import OnlineInfo as OnlineInfo
from natgrad._online.kalman import OnlineNaturalGradient as OnlineNaturalGradient

# Learning from streams
from natgrad._online.maximum_likelihood import OnlineMaximumLikelihood as OnlineMaximumLikelihood
from natgrad._online.maximum_likelihood import OnlineState as OnlineState
from natgrad._online.precision import DensePrecision as DensePrecision
from natgrad._online.precision import DiagonalPrecision as DiagonalPrecision
from natgrad._online.precision import LowRankPrecision as LowRankPrecision

# Optimisers
from natgrad._optimiser.checkpoint import Checkpoints as Checkpoints
from natgrad._optimiser.checkpoint import load_checkpoint as load_checkpoint
from natgrad._optimiser.checkpoint import save_checkpoint as save_checkpoint
from natgrad._optimiser.damping import AbstractDamping as AbstractDamping
from natgrad._optimiser.damping import ConstantDamping as ConstantDamping
from natgrad._optimiser.damping import DampingMatrix as DampingMatrix
from natgrad._optimiser.damping import LevenbergMarquardt as LevenbergMarquardt
from natgrad._optimiser.damping import NoDamping as NoDamping
from natgrad._optimiser.damping import Reduction as Reduction
from natgrad._optimiser.guard import AbstractGuard as AbstractGuard
from natgrad._optimiser.guard import Conclusion as Conclusion
from natgrad._optimiser.guard import NoGuard as NoGuard
from natgrad._optimiser.guard import Rollback as Rollback
from natgrad._optimiser.guard import Soundness as Soundness
from natgrad._optimiser.guard import Trial as Trial
from natgrad._optimiser.info import STEP_RESULTS as STEP_RESULTS
from natgrad._optimiser.info import Info as Info
from natgrad._optimiser.info import Quantity as Quantity
from natgrad._optimiser.momentum import AbstractMomentum as AbstractMomentum
from natgrad._optimiser.momentum import HeavyBall as HeavyBall
from natgrad._optimiser.momentum import NoMomentum as NoMomentum
from natgrad._optimiser.momentum import Spring as Spring
from natgrad._optimiser.natural_gradient import NaturalGradient as NaturalGradient
from natgrad._optimiser.objective import LeastSquares as LeastSquares
from natgrad._optimiser.objective import Likelihood as Likelihood
from natgrad._optimiser.objective import Objective as Objective
from natgrad._optimiser.optax import as_optax as as_optax
from natgrad._optimiser.optax import scale_by_natural_gradient as scale_by_natural_gradient
from natgrad._optimiser.penalty import L2 as L2
from natgrad._optimiser.penalty import WeightDecay as WeightDecay
from natgrad._optimiser.state import State as State
from natgrad._optimiser.step.base import AbstractStep as AbstractStep
from natgrad._optimiser.step.base import Expansion as Expansion
from natgrad._optimiser.step.base import Proposal as Proposal
from natgrad._optimiser.step.base import Search as Search
from natgrad._optimiser.step.cross_validated import CrossValidated as CrossValidated
from natgrad._optimiser.step.fixed import ConstantStep as ConstantStep
from natgrad._optimiser.step.fixed import KLClip as KLClip
from natgrad._optimiser.step.quadratic_model import QuadraticModel as QuadraticModel
from natgrad._optimiser.step.search import ArmijoLineSearch as ArmijoLineSearch
from natgrad._optimiser.step.search import GridLineSearch as GridLineSearch
from natgrad._optimiser.step.search import TrustRegion as TrustRegion
from natgrad._optimiser.structure.base import AbstractStructure as AbstractStructure
from natgrad._optimiser.structure.base import Direction as Direction
from natgrad._optimiser.structure.base import Schedule as Schedule
from natgrad._optimiser.structure.diagonal import Diagonal as Diagonal
from natgrad._optimiser.structure.ekfac import EKFAC as EKFAC
from natgrad._optimiser.structure.exact import Exact as Exact
from natgrad._optimiser.structure.inner_solve import InnerSolve as InnerSolve
from natgrad._optimiser.structure.kfac import KFAC as KFAC
from natgrad._optimiser.term import Term as Term
from natgrad._optimiser.term import Terms as Terms

# A model at a point, gradients of single examples
from natgrad._point.batch import Batch as Batch
from natgrad._point.evaluate import evaluate as evaluate
from natgrad._point.evaluate import per_example as per_example
from natgrad._point.explain import Explanation as Explanation
from natgrad._point.per_example import PerExample as PerExample
from natgrad._point.point import Point as Point

# A problem whole
from natgrad._problem import Problem as Problem
from natgrad._proximal.result import PROXIMAL_RESULTS as PROXIMAL_RESULTS
from natgrad._proximal.result import ProximalStep as ProximalStep
from natgrad._proximal.spaces import FunctionSpace as FunctionSpace
from natgrad._proximal.spaces import ProximalProblem as ProximalProblem
from natgrad._proximal.steps import damped_newton_step as damped_newton_step
from natgrad._proximal.steps import mirror_step as mirror_step
from natgrad._proximal.steps import natural_step as natural_step
from natgrad._proximal.steps import proximal_point as proximal_point
from natgrad._proximal.trust_region import trust_region_step as trust_region_step
from natgrad._solve.base import RESULTS as RESULTS
from natgrad._solve.base import DampedMetric as DampedMetric
from natgrad._solve.base import Solution as Solution
from natgrad._solve.cg import CG as CG
from natgrad._solve.direct import Cholesky as Cholesky
from natgrad._solve.direct import PseudoInverse as PseudoInverse
from natgrad._solve.sample_space import SampleSpace as SampleSpace

# Solving
from natgrad._solve.solve import Auto as Auto
from natgrad._solve.solve import natural_gradient as natural_gradient
from natgrad._solve.solve import solve as solve
from natgrad._types import Estimate as Estimate

# Tangent vectors and covectors
from natgrad._vector import Covector as Covector
from natgrad._vector import Vector as Vector

__version__ = version("natgrad")
