"""The assembly that sums up words, executed by what PTX's manual says of its instructions: the interpreter of Triton can't."""

import re

import pytest
import torch

from kernels.gpu.word_sums import WORDS_AT_ONCE, assembly


def signed(number: int, bits: int) -> int:
    """The lowest bits as a signed number."""
    number &= (1 << bits) - 1
    return number - (number >> (bits - 1) << bits)


def execute(text: str, registers: dict[str, int]) -> None:
    """Run PTX over registers of 32 bits. Only what the assembly uses is known."""
    for line in text.strip("{}\n").splitlines():
        name, *operands = re.findall(r"[\w.$]+", line.removesuffix(";"))
        if name == ".reg":
            continue
        target, *sources = operands
        a, *others = (registers[source] if source in registers else int(source, 0) for source in sources)
        if name == "mov.b32":
            result = a
        elif name == "prmt.b32":
            pool = a | others[0] << 32
            result = sum((pool >> 8 * (others[1] >> 4 * i & 15) & 255) << 8 * i for i in range(4))
        elif name == "mad.lo.s32":
            result = a * others[0] + others[1]
        else:
            _, half, _, kind = name.split(".")
            octets = [others[0] >> 8 * (i + 2 * (half == "hi")) & 255 for i in range(2)]
            if kind == "s32":
                octets = [signed(octet, 8) for octet in octets]
            result = others[1] + sum(signed(a >> 16 * i, 16) * octets[i] for i in range(2))
        registers[target] = result & 0xFFFFFFFF


@pytest.mark.parametrize("num_tiles", [1, 2])
def test_sums_of_products(num_tiles):
    """Of any words with any coefficients, extreme ones among them, each result's elements add up to the sum of products modulo 2^32."""
    text, constraints = assembly(num_tiles)
    num_results = 2 * num_tiles * WORDS_AT_ONCE
    num_operands = (num_tiles + 2) * WORDS_AT_ONCE // 2
    assert ",".join(["=&r"] * num_results + ["r"] * num_operands) == constraints
    for trial in range(50):
        numbers = torch.randint(-(2**15), 2**15, (num_tiles + 2, WORDS_AT_ONCE))
        if trial < 8:
            numbers = torch.tensor([-(2**15), 2**15 - 1, -1, 255, 256, 0])[torch.randint(6, numbers.shape)]
        packed = (numbers[:, 0::2] & 0xFFFF | (numbers[:, 1::2] & 0xFFFF) << 16).flatten().tolist()
        registers = {f"${num_results + place}": number for place, number in enumerate(packed)}
        execute(text, registers)
        for tile in range(num_tiles):
            for lane in range(2):
                first = (2 * tile + lane) * WORDS_AT_ONCE
                result = sum(registers[f"${first + element}"] for element in range(WORDS_AT_ONCE))
                exact = int((numbers[tile] * numbers[num_tiles + lane]).sum())
                assert exact % 2**32 == result % 2**32
