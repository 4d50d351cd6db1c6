"""Keyed sums over stored words that attention holds in registers: the words of a tile times two sets of coefficients, modulo 2^32.

Words and coefficients are signed numbers of 16 bits; two lie in a register. `dp2a` multiplies both words of a register with two bytes and adds
the products up, so that a pair of coefficients, each `256 * high + low`, takes two of them, and nothing is unpacked. Separate
multiplications took more than twice as many instructions, and more registers than there are.

A tile must be of one page: what an element of a result holds is the sum over some words of the tile, whichever those are.
"""

import triton
import triton.language as tl

from kernels.gpu.launch import IS_INTERPRETED

WORDS_AT_ONCE = 8


def assembly(num_tiles: int) -> tuple[str, str]:
    """PTX and constraints for eight words of each of one or two tiles, and of both sets of coefficients.

    Registers: of each tile two results, eight elements each; then each tile's words; then the coefficients. The first element of a result
    is the sum, the others are zero.
    """
    pairs, num_results = WORDS_AT_ONCE // 2, 2 * num_tiles * WORDS_AT_ONCE
    coefficients = num_results + num_tiles * pairs
    sums = [(tile, lane) for tile in range(num_tiles) for lane in range(2)]
    lines = [f".reg .b32 bytes, {', '.join(f'low_{tile}_{lane}, high_{tile}_{lane}' for tile, lane in sums)};"]
    for pair in range(pairs):
        for lane in range(2):
            # From (low, high, low, high) to (low, low, high, high).
            lines.append(f"prmt.b32 bytes, ${coefficients + lane * pairs + pair}, 0, 0x3120;")
            for tile in range(num_tiles):
                high, low, words = f"high_{tile}_{lane}", f"low_{tile}_{lane}", f"${num_results + tile * pairs + pair}"
                lines.append(f"dp2a.hi.s32.s32 {high}, {words}, bytes, {high if pair else 0};")
                lines.append(f"dp2a.lo.s32.u32 {low}, {words}, bytes, {low if pair else 0};")
    for tile, lane in sums:
        result = (2 * tile + lane) * WORDS_AT_ONCE
        lines.append(f"mad.lo.s32 ${result}, high_{tile}_{lane}, 256, low_{tile}_{lane};")
        lines += [f"mov.b32 ${result + element}, 0;" for element in range(1, WORDS_AT_ONCE)]
    operands = ["=&r"] * num_results + ["r"] * (num_tiles + 2) * pairs
    return "{\n" + "\n".join(lines) + "\n}", ",".join(operands)


_ONE_TILE, _ONE_TILE_OPERANDS = map(tl.constexpr, assembly(1))
_TWO_TILES, _TWO_TILES_OPERANDS = map(tl.constexpr, assembly(2))
_PACK = tl.constexpr(WORDS_AT_ONCE)


@triton.jit
def _one_tile(words, a, b):
    """int32 tiles of the words' shape that add up to sum(words * a) and sum(words * b), modulo 2^32."""
    if IS_INTERPRETED:
        wide = words.to(tl.int32)
        by_a, by_b = wide * a.to(tl.int32), wide * b.to(tl.int32)
    else:
        by_a, by_b = tl.inline_asm_elementwise(
            _ONE_TILE, _ONE_TILE_OPERANDS, [words, a, b], dtype=(tl.int32, tl.int32), is_pure=True, pack=_PACK
        )
    return by_a, by_b


@triton.jit
def _two_tiles(x, y, a, b):
    """The same for two pages, x and y, whose words at a place have the same coefficients: x by a, x by b, y by a, y by b."""
    if IS_INTERPRETED:
        x_a, x_b = _one_tile(x, a, b)
        y_a, y_b = _one_tile(y, a, b)
    else:
        x_a, x_b, y_a, y_b = tl.inline_asm_elementwise(
            _TWO_TILES,
            _TWO_TILES_OPERANDS,
            [x, y, a, b],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=_PACK,
        )
    return x_a, x_b, y_a, y_b


@triton.jit
def tile_products(words, keys, first_slot, word, is_word, ROW: tl.constexpr, PAGE: tl.constexpr):
    """Words int16 [KEYS, W] of neighbouring tokens, of one page or of two whole ones, times their coefficients.

    keys int16 [2, PAGE * ROW] are those of a head's part of a page, ROW words a token; `word` int32 [W] says which of a token's. Returns
    int32 [tokens of a page, W, pages, 2], which add up over the first two dimensions to what each page has of either sum. A thread must
    hold eight of a page's words at least.
    """
    pages: tl.constexpr = 2 if words.shape[0] > PAGE else 1
    slots: tl.constexpr = words.shape[0] // pages
    place = (first_slot + tl.arange(0, slots))[:, None] * ROW + word[None, :]
    a = tl.load(keys + place, mask=is_word[None, :], other=0)
    b = tl.load(keys + PAGE * ROW + place, mask=is_word[None, :], other=0)
    if pages == 1:
        by_a, by_b = _one_tile(words, a, b)
        result = tl.reshape(tl.join(by_a, by_b), (slots, words.shape[1], 1, 2))
    else:
        x, y = tl.split(tl.permute(tl.reshape(words, (2, slots, words.shape[1])), (1, 2, 0)))
        x_a, x_b, y_a, y_b = _two_tiles(x, y, a, b)
        result = tl.join(tl.join(x_a, y_a), tl.join(x_b, y_b))
    return result
