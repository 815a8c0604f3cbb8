"""Every error that molt_sdk raises on purpose. Each message names the value, the place and the next step.

MoltError
├── DefinitionError          a policy, environment, tool or reward is written in a way that cannot work
├── ConfigError              a keyword, flag or config field is wrong or contradicts another
├── ModelPathError           the model directory is missing or incomplete
├── TemplateError            the chat template cannot express the request
├── RequestError             one call of a Model is malformed (messages, sampling, tool results)
│   ├── ContextLengthError   the prompt leaves no room for a single new token
│   └── ModelClosedError     a call after the trajectory of this Model ended
├── RewardError              a reward is not one finite number
├── EngineError              inference failed; the trajectory becomes an ``infra_error``
│   └── EngineReplyError     the engine's reply is malformed (missing or NaN logprobs, wrong lengths)
├── StoreError               a run directory cannot be used as asked
├── TrainingError            the trainer cannot go on
│   └── TrainingMemoryError  a training step does not fit into memory
└── RunFailedError           every rollout failed; carries the first root error
"""

from __future__ import annotations


class MoltError(Exception):
    """Base class of all errors raised by molt_sdk."""


class DefinitionError(MoltError):
    """A policy, environment, tool or reward is written in a way that cannot work."""


class ConfigError(MoltError):
    """A keyword, flag or config field is wrong or contradicts another."""


class ModelPathError(MoltError):
    """The model directory is missing or incomplete."""


class TemplateError(MoltError):
    """The chat template cannot express the request."""


class RequestError(MoltError):
    """One call of a Model is malformed."""


class ContextLengthError(RequestError):
    """The prompt leaves no room for a single new token. Uncaught, the trajectory ends as ``truncated``."""


class ModelClosedError(RequestError):
    """The trajectory of this Model has ended; nothing was recorded."""


class RewardError(MoltError):
    """A reward is not one finite number."""


class EngineError(MoltError):
    """Inference failed; an uncaught one makes the trajectory an ``infra_error``."""


class EngineReplyError(EngineError):
    """The engine's reply is malformed: lengths differ, or a logprob is missing, NaN or positive."""


class StoreError(MoltError):
    """A run directory cannot be used as asked."""


class TrainingError(MoltError):
    """The trainer cannot go on."""


class TrainingMemoryError(TrainingError):
    """A training step does not fit into memory."""


class RunFailedError(MoltError):
    """Every rollout of several groups in a row failed; the first root error is the cause."""
