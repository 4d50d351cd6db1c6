"""From tokens to text.

Reading order: `stream` (what may be shown, and when), `stop` (where a stop string is or may become), `utf8`
(characters and the bytes they came from).
"""

from worker.text.stream import Released, TextStream

__all__ = ["Released", "TextStream"]
