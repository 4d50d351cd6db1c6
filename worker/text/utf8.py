"""Characters and the bytes that they came from, invalid ones included."""

REPLACEMENT = "\ufffd"


def num_bytes(raw: bytes, num_characters: int) -> int:
    """How many bytes of `raw` the first `num_characters` of its text, decoded with replacement, stand for.

    A replacement character stands for one to three bytes that are no character, or for its own encoding.
    """
    position = 0
    while num_characters > 0:
        try:
            run, num_invalid = raw[position:].decode("utf-8"), 0
        except UnicodeDecodeError as error:
            run, num_invalid = raw[position : position + error.start].decode("utf-8"), error.end - error.start
        if len(run) >= num_characters:
            return position + len(run[:num_characters].encode("utf-8"))
        assert num_invalid, "the text has more characters than the bytes"
        position += len(run.encode("utf-8")) + num_invalid
        num_characters -= len(run) + 1
    return position
