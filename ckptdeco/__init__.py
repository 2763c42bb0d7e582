"""Activation checkpointing for any PyTorch model: decorate layers, choose a policy around the training step.

>>> import ckptdeco
>>> ckptdeco.policy(segment=3)
policy(segment=3)
"""

from ckptdeco.decorator import checkpointable
from ckptdeco.dropin import checkpoint
from ckptdeco.engine.running import is_recomputing
from ckptdeco.errors import (
    BudgetError,
    CheckpointError,
    GroupOverlapError,
    InputModifiedError,
    ModifiedTensorError,
    ParameterModifiedError,
    PolicyError,
    RandomnessError,
    RecomputeError,
    SavedTensorMismatch,
    StaleGraphError,
    UncheckpointableError,
    ValueMismatch,
)
from ckptdeco.integrations.modules import DecoratedLayers, decorate, undecorate
from ckptdeco.planning.explain import Explanation, explain
from ckptdeco.planning.measure import measure
from ckptdeco.planning.measurement import Measurement
from ckptdeco.policy import Policy, Site, policy
from ckptdeco.save import any_of, checkpoint_name
from ckptdeco.schedule.actions import Action

__version__ = "0.1.0"

__all__ = [
    "Action",
    "BudgetError",
    "CheckpointError",
    "DecoratedLayers",
    "Explanation",
    "GroupOverlapError",
    "InputModifiedError",
    "Measurement",
    "ModifiedTensorError",
    "ParameterModifiedError",
    "Policy",
    "PolicyError",
    "RandomnessError",
    "RecomputeError",
    "SavedTensorMismatch",
    "Site",
    "StaleGraphError",
    "UncheckpointableError",
    "ValueMismatch",
    "any_of",
    "checkpoint",
    "checkpoint_name",
    "checkpointable",
    "decorate",
    "explain",
    "is_recomputing",
    "measure",
    "policy",
    "undecorate",
]
