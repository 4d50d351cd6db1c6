"""What the engine hands to the publisher."""

from dataclasses import dataclass

from protocol.ids import GatewayId
from protocol.replies import Done, Failed, ReplyEnvelope


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A reply, the gateway that waits for it, and the job's place on its stream."""

    gateway_id: GatewayId
    entry_id: bytes
    envelope: ReplyEnvelope

    @property
    def is_terminal(self) -> bool:
        """Whether the request ends with this reply."""
        return isinstance(self.envelope.reply, (Done, Failed))
