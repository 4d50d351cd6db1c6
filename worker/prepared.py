"""What a worker serves: an engine and the card that describes its model, whichever kind of engine it is."""

from dataclasses import dataclass, field
from typing import Any

from protocol.model_card import ModelCard
from worker.engine import Engine


@dataclass(frozen=True, slots=True)
class Prepared:
    """Ready to serve. `facts` go to the log."""

    card: ModelCard
    engine: Engine
    facts: dict[str, Any] = field(default_factory=dict)
