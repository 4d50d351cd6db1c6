"""What the engine hands to the publisher."""

from dataclasses import dataclass

from protocol.ids import GatewayId
from protocol.replies import Done, Failed, ReplyEnvelope


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A reply, the gateway that waits for it, the line of its job, and how many prompt tokens have cost something so far."""

    gateway_id: GatewayId
    line: str
    envelope: ReplyEnvelope
    num_prompt: int = 0

    @property
    def is_terminal(self) -> bool:
        """Whether the request ends with this reply."""
        return isinstance(self.envelope.reply, (Done, Failed))
