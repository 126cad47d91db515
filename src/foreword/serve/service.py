"""What all endpoints share: the engine, the options, who may enter, and the names of the model."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from foreword.serve.admission import Admission
from foreword.serve.errors import Refusal
from foreword.serve.metrics import Metrics
from foreword.serve.options import ServeOptions
from foreword.serve.trials import GrammarTrials
from foreword.version import __version__ as VERSION

if TYPE_CHECKING:
    from foreword.serve.async_llm import AsyncLLM


@dataclass(frozen=True)
class Service:
    """The parts of one server."""

    llm: AsyncLLM
    options: ServeOptions
    admission: Admission
    metrics: Metrics
    trials: GrammarTrials
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        return self.options.served_names or (self.llm.model,)

    @property
    def made_of(self) -> dict[str, str]:
        """What outputs depend on besides the request. In float32 and float64 not on the method, but it is part of this too:
        servers that are meant to be equal are seen to be."""
        return {"foreword": VERSION, **self.llm.fingerprint}

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: a short hash of `made_of`."""
        return fingerprint_of(self.made_of)

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model. A request that names none is for this one."""
        if name is not None and name not in self.names:
            message = f"this server has no model {name!r}; it has {', '.join(self.names)}"
            raise Refusal(404, message, param="model", code="model_not_found")

    def card(self) -> dict[str, Any]:
        """Return the model as /v1/models lists it, without its name."""
        about = {"method": self.llm.method, "slots": self.llm.slots}
        own = {"object": "model", "created": self.started, "owned_by": "foreword"}
        return {**own, "max_model_len": self.llm.limits.context, "foreword": about}


def fingerprint_of(made_of: dict[str, str]) -> str:
    return "fp_" + sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]
