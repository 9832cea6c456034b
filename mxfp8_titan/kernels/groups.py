"""Device functions that find a tile's group of tokens.

A grouped buffer gives each group a whole number of tiles of 128 tokens (format.GROUP_TILE). Programs are numbered by
the tiles of that buffer, so each belongs to one group, reads only its tokens, and fills its own padding.
"""

import triton
import triton.language as tl

from mxfp8_titan.format import GROUP_TILE as _GROUP_TILE

GROUP_TILE = tl.constexpr(_GROUP_TILE)

_NO_GROUP = tl.constexpr(2**31 - 1)


@triton.jit
def find_group(tile, group_ends_ptr, num_groups, tokens, total_tiles, GROUPS: tl.constexpr):
    """(first, end, base, tiles, owned) of the group that owns `tile`, by comparing it with every group's last tile.

    first   the tile's first token
    end     end of the group's tokens; past the last group, `tokens`
    base    number of the group's first tile
    tiles   how many tiles the group has; past the last group, those that are left
    owned   False past the last group: nothing may be read there, everything must be written

    GROUPS: power of two >= num_groups
    """
    group = tl.arange(0, GROUPS)
    exists = group < num_groups
    ends = tl.load(group_ends_ptr + group, mask=exists, other=0)
    starts = tl.load(group_ends_ptr + group - 1, mask=exists & (group > 0), other=0)
    last_tile = tl.cumsum((ends - starts + GROUP_TILE - 1) // GROUP_TILE, 0)
    before = exists & (last_tile <= tile)
    after = exists & (last_tile > tile)
    base = tl.max(tl.where(before, last_tile, 0), 0)
    start = tl.max(tl.where(before, ends, 0), 0)
    end = tl.min(tl.where(after, ends, _NO_GROUP), 0)
    end_tile = tl.min(tl.where(after, last_tile, _NO_GROUP), 0)
    owned = end != _NO_GROUP
    first = start + (tile - base) * GROUP_TILE
    return first, tl.minimum(end, tokens), base, tl.minimum(end_tile, total_tiles) - base, owned
