"""molt_sdk: train LLM agents that are ordinary async Python functions.

Decorate a function with ``@policy``, call ``fit``. Every model call is recorded token for token, and only what the
model sampled is trained.
"""

from molt_sdk.check import acheck, check
from molt_sdk.config import RolloutConfig
from molt_sdk.decorators import environment, policy, reward, tool
from molt_sdk.errors import (
    ConfigError,
    ContextLengthError,
    DefinitionError,
    EngineError,
    EngineReplyError,
    ModelClosedError,
    ModelPathError,
    MoltError,
    RequestError,
    RewardError,
    RunFailedError,
    StoreError,
    TemplateError,
    TrainingError,
    TrainingMemoryError,
)
from molt_sdk.evaluate import Evaluation, aevaluate, arollout, evaluate, rollout
from molt_sdk.explain import Explanation, Segment
from molt_sdk.fit import afit, fit
from molt_sdk.fit_config import FitConfig
from molt_sdk.model import Model, Reject, Reply, Stop
from molt_sdk.report import Finding, Report
from molt_sdk.run import Run, open_run
from molt_sdk.types import (
    Certificate,
    Message,
    Sample,
    SamplingParams,
    Task,
    ToolCall,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from trainer_backend.config import TrainerConfig

__all__ = [
    "Certificate",
    "ConfigError",
    "ContextLengthError",
    "DefinitionError",
    "EngineError",
    "EngineReplyError",
    "Evaluation",
    "Explanation",
    "Finding",
    "FitConfig",
    "Message",
    "Model",
    "ModelClosedError",
    "ModelPathError",
    "MoltError",
    "Reject",
    "Reply",
    "Report",
    "RequestError",
    "RewardError",
    "RolloutConfig",
    "Run",
    "RunFailedError",
    "Sample",
    "SamplingParams",
    "Segment",
    "Stop",
    "StoreError",
    "Task",
    "TemplateError",
    "ToolCall",
    "TrainerConfig",
    "TrainingError",
    "TrainingMemoryError",
    "Trajectory",
    "TrajectoryGroup",
    "Turn",
    "acheck",
    "aevaluate",
    "afit",
    "arollout",
    "check",
    "environment",
    "evaluate",
    "fit",
    "open_run",
    "policy",
    "reward",
    "rollout",
    "tool",
]
