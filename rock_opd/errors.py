"""Every error a person can meet. One message each, picklable, so that it survives the way out of
an actor."""


class RockOPDError(Exception):
    """Base of all errors raised on purpose. Takes one string: what, where, expected, got, what to
    try."""


class ConfigError(RockOPDError):
    """A recipe or a command line that cannot run."""


class DataError(RockOPDError):
    """A prompt file, token list or checkpoint whose content cannot be used."""


class ModelError(RockOPDError):
    """A model folder, tokenizer or architecture that cannot serve its role."""


class PlacementError(RockOPDError):
    """The cluster cannot hold what the recipe asks for."""


class SyncError(RockOPDError):
    """Weights that did not arrive whole, or arrived as something else."""


class RoleTimeout(RockOPDError):
    """A role did not answer in time; the message names who, which phase and the limit."""


class RoleError(RockOPDError):
    """A role raised or died; the message names who, which phase, and carries the remote text."""


class RoleLost(RoleError):
    """An actor that is no more, or stands still for good: another one could take its place."""


class NumericsError(RockOPDError):
    """Numbers that must not be learned from (NaN, or a trainer and a rollout engine that
    disagree)."""


class StorageError(RockOPDError):
    """A disk that is full, read-only or gone; the message names what, where, needed and free."""


EXIT_BAD_INPUT = 2
"""Exit status of a command whose recipe, files or models are at fault."""
