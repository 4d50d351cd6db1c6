"""What can go wrong on the way to a quantized folder."""


class QuantizeError(Exception):
    """A source that can't be quantized, a folder that isn't ours, settings that don't fit; one line that names what is meant."""
