"""Errors for users. Each message says what was wrong, where, and what would be right."""


class CbexpError(Exception):
    """Base of all errors that are shown to the user as their message alone, without a traceback."""


class ConfigError(CbexpError):
    """A setting is unknown, of the wrong type, out of range, or impossible in its combination."""


class NotApplicableError(CbexpError):
    """The configuration is valid but cannot run on this machine (a CUDA graph on a CPU, for one)."""


class ModelError(CbexpError):
    """A model, tokenizer or adapter cannot be loaded or is not supported."""


class DatasetError(CbexpError):
    """A dataset is missing, unreachable, or lacks the rows or fields that were asked for."""


class ResultsError(CbexpError):
    """Results cannot be written: unwritable folder, full disk."""


class MemoryBudgetError(CbexpError):
    """The model and cache asked for do not fit, or memory ran out while running."""


class RescoringError(CbexpError):
    """Completions are not what the model's own forward makes of their prompts, beyond rounding."""


class RequestsFailedError(CbexpError):
    """Requests failed or went missing in a round, so its figures would not be of the whole workload."""
