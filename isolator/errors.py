"""What can go wrong, by meaning; every message says in one line what to do."""


class IsolatorError(Exception):
    """Base of all errors this package raises on purpose."""

    exit_status = 1


class UsageError(IsolatorError):
    """The caller asked for something that does not exist or cannot be understood."""

    exit_status = 2


class NotBuiltError(IsolatorError):
    """A part of the package is not there: the build or the installation is incomplete."""


class ContractError(IsolatorError):
    """A file, an annotation or a variable of the contract is malformed or of a version we cannot share."""


class UnavailableError(IsolatorError):
    """The machine lacks something that is needed: a driver, a right, a file system."""
