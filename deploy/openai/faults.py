"""Errors as the OpenAI API writes them, and back.

Knows: which status, type and code each error of `cluster.errors` has.
Refuses to know: who raised it and who reads it; routes write with this table, clients read with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.errors import (
    BrokenInvariant,
    CapacityError,
    EngineStopped,
    OutriderError,
    Overloaded,
    PeerLost,
    PromptTooLong,
    RequestError,
    UnknownModel,
)

#: Seconds after which a caller refused for load or a lost engine should come back.
RETRY_S = 2


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of error over HTTP."""

    kind: type[OutriderError]
    status: int
    type: str
    code: str | None
    retry_s: int | None = None

    def body(self, error: BaseException) -> dict[str, Any]:
        detail = {"message": str(error), "type": self.type, "param": getattr(error, "param", None), "code": self.code}
        return {"error": detail}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}


#: First match wins: most special first.
FAULTS = (
    Fault(PromptTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    Fault(UnknownModel, 404, "invalid_request_error", "model_not_found"),
    Fault(RequestError, 400, "invalid_request_error", "invalid_request"),
    Fault(Overloaded, 429, "rate_limit_error", "overloaded", RETRY_S),
    Fault(EngineStopped, 503, "server_error", "engine_stopped", RETRY_S),
    Fault(PeerLost, 503, "server_error", "peer_lost", RETRY_S),
    Fault(CapacityError, 503, "server_error", "no_capacity", RETRY_S),
    Fault(BrokenInvariant, 500, "server_error", "broken_invariant"),
    Fault(OutriderError, 500, "server_error", "internal_error"),
)


def fault_of(error: BaseException) -> Fault:
    """How to tell of `error`; anything not raised on purpose is an internal error."""
    return next((fault for fault in FAULTS if isinstance(error, fault.kind)), FAULTS[-1])


def restore(status: int, body: Any) -> OutriderError:
    """The error that a response of `status` with `body` tells of."""
    detail = body.get("error") if isinstance(body, dict) else None
    if not isinstance(detail, dict):
        return _by_status(status)(f"the server answered with status {status}: {str(body)[:200]}")
    message, code = str(detail.get("message")), detail.get("code")
    kind = next((fault.kind for fault in FAULTS if fault.code == code), None) or _by_status(status)
    return kind(message, detail.get("param")) if issubclass(kind, RequestError) else kind(message)


def _by_status(status: int) -> type[OutriderError]:
    known = {429: Overloaded, 503: PeerLost, 408: PeerLost, 502: PeerLost, 504: PeerLost}
    return known.get(status, RequestError if 400 <= status < 500 else OutriderError)
