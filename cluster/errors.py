"""Every error Outrider raises on purpose, in one tree.

Knows: what can go wrong and what the person who meets it should change.
Refuses to know: HTTP, Ray, or who catches what; `deploy` maps these to status codes.

    OutriderError
    |-- ConfigError          the configuration cannot be used
    |-- ModelError           a model cannot be loaded
    |   |-- ModelNotFound
    |   |-- ModelCorrupt
    |   |-- ModelUnsupported
    |   `-- TokenizerMismatch
    |-- CapacityError        this machine or this cache is too small for what was asked
    |-- RequestError         one request is wrong; `param` names the field
    |   |-- PromptTooLong
    |   `-- UnknownModel
    |-- Overloaded           the queue is full; try again later
    |-- EngineStopped        the engine is gone or shutting down
    |-- PeerLost             another process died or did not answer in time
    |-- WireError            what a peer sent is no message of this release
    `-- BrokenInvariant      a bug in Outrider
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of everything raised on purpose."""


class ConfigError(OutriderError):
    """The configuration cannot be used; the message says which path to change."""


class ModelError(OutriderError):
    """A model cannot be loaded."""


class ModelNotFound(ModelError):
    """Nothing usable lies where the model was said to be."""


class ModelCorrupt(ModelError):
    """A file of the model is truncated or fails its checksum."""


class ModelUnsupported(ModelError):
    """The architecture needs something the engine does not implement."""


class TokenizerMismatch(ModelError):
    """Tokenizer and model (or target and draft) disagree about the vocabulary."""


class CapacityError(OutriderError):
    """Memory or cache blocks do not suffice; the message gives both numbers."""


class RequestError(OutriderError):
    """One request is wrong.

    `param` is the name of the offending field as the caller wrote it, or None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str | None]]:
        # Without this, unpickling (Ray carries errors between processes) would drop `param`.
        return type(self), (str(self), self.param)


class PromptTooLong(RequestError):
    """The prompt leaves no room for an answer in the model's context or in the cache."""


class UnknownModel(RequestError):
    """The request names a model that is not served here."""


class Overloaded(OutriderError):
    """The waiting queue is full."""


class EngineStopped(OutriderError):
    """The engine has stopped or is stopping; the request was not finished."""


class PeerLost(OutriderError):
    """Another process died or did not answer before its deadline."""


class WireError(OutriderError):
    """Bytes from a peer that are no message: torn, foreign, or of another release."""


class BrokenInvariant(OutriderError):
    """A law of the design does not hold: a bug in Outrider, never the caller's fault."""
