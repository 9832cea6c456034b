"""Device functions that place a tile: which expert or group of tokens it belongs to, what it reads and writes.

A grouped buffer gives each group a whole number of tiles. Programs are numbered by the tiles of that buffer, so each
belongs to one group, reads only its tokens, and fills its own padding.
"""

import triton
import triton.language as tl

_NO_GROUP = tl.constexpr(2**31 - 1)


@triton.jit
def find_group(tile, group_ends_ptr, num_groups, total_tiles, TILE, GROUPS: tl.constexpr):
    """(group, first, end, base, tiles) of the group that owns `tile`, by comparing it with all groups' last tiles.

    group   its number; past the last group, num_groups
    first   the tile's first token
    end     end of the group's tokens; past the last group, 2**31 - 1
    base    number of the group's first tile
    tiles   how many tiles the group has; past the last group, those that are left of total_tiles

    TILE: tokens per tile, constant or not.  GROUPS: power of two >= num_groups
    """
    number = tl.arange(0, GROUPS)
    exists = number < num_groups
    ends = tl.load(group_ends_ptr + number, mask=exists, other=0)
    starts = tl.load(group_ends_ptr + number - 1, mask=exists & (number > 0), other=0)
    last_tile = tl.cumsum((ends - starts + TILE - 1) // TILE, 0)
    before = exists & (last_tile <= tile)
    after = exists & (last_tile > tile)
    base = tl.max(tl.where(before, last_tile, 0), 0)
    first = tl.max(tl.where(before, ends, 0), 0) + (tile - base) * TILE
    end = tl.min(tl.where(after, ends, _NO_GROUP), 0)
    end_tile = tl.minimum(tl.min(tl.where(after, last_tile, _NO_GROUP), 0), total_tiles)
    return tl.sum(before.to(tl.int32), 0), first, end, base, end_tile - base


@triton.jit
def place_tile(
    tile, tiles_t, T, T_OUT, group_ends_ptr, num_groups,
    TILE, GROUPS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """(group, expert, first, read_end, write_end, base, tiles) of tile number `tile` along the tokens of all experts.

    Tokens of the tile below read_end are read, the others count as zero; those below write_end are written. Without
    GROUPS each expert's T rows are a group.
    base, tiles: number of the group's first tile, and how many tiles it has.

    tiles_t: tiles along T of one expert.  T_OUT: tokens to write, T or more
    PADDED: groups start at whole tiles; otherwise tiles are cut from T and only the last group's end matters
    """
    if GROUPS > 0 and PADDED:
        group, first, end, base, tiles = find_group(tile, group_ends_ptr, num_groups, tiles_t, TILE, GROUPS)
        end = tl.where(group < num_groups, tl.minimum(end, T_OUT), T_OUT)
        read_end = tl.where(group < num_groups, tl.minimum(end, T), 0)
        return group, tile * 0, first, read_end, end, base, tiles
    elif GROUPS > 0:  # noqa: RET505 - one branch is compiled
        read_end = tl.minimum(tl.load(group_ends_ptr + num_groups - 1), T)
        return tile * 0, tile * 0, tile * TILE, read_end, T_OUT, tile * 0, tiles_t
    else:
        expert = tile // tiles_t
        base = expert * tiles_t
        return expert, expert, (tile - base) * TILE, T, T_OUT, base, tiles_t
