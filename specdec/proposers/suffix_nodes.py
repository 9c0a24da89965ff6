"""The nodes of a suffix tree in flat arrays, and the loops over them, compiled.

Owns: inserting and removing suffixes, and following the likeliest tokens. Must not know: texts, or when arrays grow.
Read next: suffix_tree.py, which says what a node is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

COUNT, LABEL, LENGTH, TOKEN, PARENT, BEST, FIRST, NEXT, PREV = range(9)  # columns of Arrays.nodes
NUM_ROWS, FREE, LIVE = range(3)  # places in Arrays.state: rows of nodes ever used, head of the free list, nodes in use
STALE = -1  # in the best column: to be found again


def compiled(function: Any) -> Any:
    """Compile a loop, and keep the result between runs where there is a place for it."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return njit(nogil=True)(function)


class Arrays(NamedTuple):
    """One tree, all int32 but for state. tokens [T]: ring, T a power of two; a position lies at position & (T - 1).

    nodes [M, 9], one row a node: count, label (position of its edge's first token), length (of the edge), token (its first),
    parent, best (most frequent child, the newest of equals), and the children's list as first, next, prev. Node 0 is the root
    and doubles as "no node". table [2M]: open addressing of (parent, token) -> child.
    """

    tokens: Any
    nodes: Any
    table: Any
    state: Any


@compiled
def _slot(table, parent, token):  # type: ignore[no-untyped-def]
    mixed = parent * 2654435761 + token * 2246822519
    return (mixed ^ (mixed >> 17)) & (len(table) - 1)


@compiled
def _find(a, parent, token):  # type: ignore[no-untyped-def]
    """The child of `parent` whose edge begins with `token`, or 0."""
    slot = _slot(a.table, parent, token)
    while a.table[slot] != 0:
        node = a.table[slot]
        if a.nodes[node, PARENT] == parent and a.nodes[node, TOKEN] == token:
            return node
        slot = (slot + 1) & (len(a.table) - 1)
    return 0


@compiled
def _enter(a, node):  # type: ignore[no-untyped-def]
    """Put a node into the child table and at the head of its parent's list."""
    parent = a.nodes[node, PARENT]
    slot = _slot(a.table, parent, a.nodes[node, TOKEN])
    while a.table[slot] != 0:
        slot = (slot + 1) & (len(a.table) - 1)
    a.table[slot] = node
    head = a.nodes[parent, FIRST]
    a.nodes[node, NEXT], a.nodes[node, PREV] = head, 0
    if head != 0:
        a.nodes[head, PREV] = node
    a.nodes[parent, FIRST] = node


@compiled
def _leave(a, node):  # type: ignore[no-untyped-def]
    """Take a node out of table and list. Later entries of its run move up, so that no search ends early at the gap."""
    mask = len(a.table) - 1
    gap = _slot(a.table, a.nodes[node, PARENT], a.nodes[node, TOKEN])
    while a.table[gap] != node:
        gap = (gap + 1) & mask
    slot = (gap + 1) & mask
    while a.table[slot] != 0:
        home = _slot(a.table, a.nodes[a.table[slot], PARENT], a.nodes[a.table[slot], TOKEN])
        if ((slot - home) & mask) >= ((slot - gap) & mask):
            a.table[gap] = a.table[slot]
            gap = slot
        slot = (slot + 1) & mask
    a.table[gap] = 0
    if a.nodes[node, PREV] != 0:
        a.nodes[a.nodes[node, PREV], NEXT] = a.nodes[node, NEXT]
    else:
        a.nodes[a.nodes[node, PARENT], FIRST] = a.nodes[node, NEXT]
    if a.nodes[node, NEXT] != 0:
        a.nodes[a.nodes[node, NEXT], PREV] = a.nodes[node, PREV]


@compiled
def fill_table(a):  # type: ignore[no-untyped-def]
    """Enter all nodes into an empty child table."""
    for node in range(1, a.state[NUM_ROWS]):
        if a.nodes[node, COUNT] > 0:
            slot = _slot(a.table, a.nodes[node, PARENT], a.nodes[node, TOKEN])
            while a.table[slot] != 0:
                slot = (slot + 1) & (len(a.table) - 1)
            a.table[slot] = node


@compiled
def _new_node(a, parent, label, length, count):  # type: ignore[no-untyped-def]
    node = a.state[FREE]
    if node != 0:
        a.state[FREE] = a.nodes[node, NEXT]
    else:
        node = a.state[NUM_ROWS]
        a.state[NUM_ROWS] += 1
    a.state[LIVE] += 1
    a.nodes[node, PARENT], a.nodes[node, LABEL], a.nodes[node, LENGTH], a.nodes[node, COUNT] = parent, label, length, count
    a.nodes[node, TOKEN] = a.tokens[label & (len(a.tokens) - 1)]
    a.nodes[node, BEST] = a.nodes[node, FIRST] = 0
    _enter(a, node)
    return node


@compiled
def _drop_node(a, node):  # type: ignore[no-untyped-def]
    _leave(a, node)
    a.nodes[node, COUNT] = 0
    a.nodes[node, NEXT] = a.state[FREE]
    a.state[FREE] = node
    a.state[LIVE] -= 1


@compiled
def _split(a, child, length):  # type: ignore[no-untyped-def]
    """Put a node after the first `length` tokens of an edge; it takes the place of `child`, which becomes its only child."""
    parent = a.nodes[child, PARENT]
    was_best = a.nodes[parent, BEST] == child
    _leave(a, child)
    middle = _new_node(a, parent, a.nodes[child, LABEL], length, a.nodes[child, COUNT])
    if was_best:
        a.nodes[parent, BEST] = middle
    a.nodes[child, PARENT] = middle
    a.nodes[child, LABEL] += length
    a.nodes[child, LENGTH] -= length
    a.nodes[child, TOKEN] = a.tokens[a.nodes[child, LABEL] & (len(a.tokens) - 1)]
    _enter(a, child)
    a.nodes[middle, BEST] = child
    return middle


@compiled
def insert_suffixes(a, first, last, stop, depth):  # type: ignore[no-untyped-def]
    """Insert the suffixes that start at first to last - 1 of a text that ends at `stop`, each cut at `depth` tokens."""
    mask = len(a.tokens) - 1
    for position in range(first, last):
        length = min(depth, stop - position)
        node, done = 0, 0
        while done < length:
            child = _find(a, node, a.tokens[(position + done) & mask])
            if child == 0:
                child = _new_node(a, node, position + done, length - done, 0)
                matched = length - done
            else:
                matched = 1
                while (
                    matched < a.nodes[child, LENGTH]
                    and done + matched < length
                    and a.tokens[(a.nodes[child, LABEL] + matched) & mask] == a.tokens[(position + done + matched) & mask]
                ):
                    matched += 1
                if matched < a.nodes[child, LENGTH]:
                    child = _split(a, child, matched)
            a.nodes[child, COUNT] += 1
            a.nodes[child, LABEL] = position + done
            best = a.nodes[node, BEST]
            if best == 0 or (best > 0 and a.nodes[child, COUNT] >= a.nodes[best, COUNT]):
                a.nodes[node, BEST] = child
            node = child
            done += matched


@compiled
def remove_suffixes(a, start, stop, depth):  # type: ignore[no-untyped-def]
    """Undo insert_suffixes of the oldest text. What remains carries labels of newer texts, because labels are the newest."""
    mask = len(a.tokens) - 1
    for position in range(start, stop):
        length = min(depth, stop - position)
        node, done, kept, doomed = 0, 0, 0, 0
        while done < length:
            child = _find(a, node, a.tokens[(position + done) & mask])
            done += a.nodes[child, LENGTH]
            a.nodes[child, COUNT] -= 1
            if a.nodes[child, COUNT] > 0:
                kept = child
                if a.nodes[node, BEST] == child:
                    a.nodes[node, BEST] = STALE
            elif doomed == 0:
                doomed = child  # nobody else came by, so all below is a single line of nodes
            node = child
        if doomed != 0:
            if a.nodes[kept, BEST] == doomed:
                a.nodes[kept, BEST] = STALE
            _drop_chain(a, doomed)
        _merge_single(a, kept)


@compiled
def _drop_chain(a, node):  # type: ignore[no-untyped-def]
    while node != 0:
        below = a.nodes[node, FIRST]
        _drop_node(a, node)
        node = below


@compiled
def _best_child(a, node):  # type: ignore[no-untyped-def]
    """The most frequent child, the newest of equals, or 0. Removals leave it open; whoever asks next looks through the list."""
    if a.nodes[node, BEST] == STALE:
        best, child = 0, a.nodes[node, FIRST]
        while child != 0:
            more = a.nodes[child, COUNT] - a.nodes[best, COUNT]
            if best == 0 or more > 0 or (more == 0 and a.nodes[child, LABEL] > a.nodes[best, LABEL]):
                best = child
            child = a.nodes[child, NEXT]
        a.nodes[node, BEST] = best
    return a.nodes[node, BEST]


@compiled
def _merge_single(a, node):  # type: ignore[no-untyped-def]
    """Join a node with its only child where no text ends between them."""
    child = a.nodes[node, FIRST]
    if node == 0 or child == 0 or a.nodes[child, NEXT] != 0 or a.nodes[child, COUNT] != a.nodes[node, COUNT]:
        return
    parent, length = a.nodes[node, PARENT], a.nodes[node, LENGTH]
    was_best = a.nodes[parent, BEST] == node
    _leave(a, child)
    _drop_node(a, node)
    a.nodes[child, PARENT] = parent
    a.nodes[child, LABEL] -= length
    a.nodes[child, LENGTH] += length
    a.nodes[child, TOKEN] = a.tokens[a.nodes[child, LABEL] & (len(a.tokens) - 1)]
    _enter(a, child)
    if was_best:
        a.nodes[parent, BEST] = child


@compiled
def _locate(a, pattern, first):  # type: ignore[no-untyped-def]
    """(node, tokens of its edge that are used) of the string pattern[first:], or (0, 0) where it does not occur."""
    mask = len(a.tokens) - 1
    node, used = 0, 0
    for index in range(first, len(pattern)):
        if node != 0 and used < a.nodes[node, LENGTH]:
            if a.tokens[(a.nodes[node, LABEL] + used) & mask] != pattern[index]:
                return 0, 0
            used += 1
        else:
            node = _find(a, node, pattern[index])
            if node == 0:
                return 0, 0
            used = 1
    return node, used


@compiled
def _step(a, node, used, token):  # type: ignore[no-untyped-def]
    """The place one token on, or (0, 0)."""
    if node == 0:
        return 0, 0
    if used < a.nodes[node, LENGTH]:
        if a.tokens[(a.nodes[node, LABEL] + used) & (len(a.tokens) - 1)] == token:
            return node, used + 1
        return 0, 0
    child = _find(a, node, token)
    return child, min(child, 1)


@compiled
def _likeliest(a, node, used, ends, num_ends, stop):  # type: ignore[no-untyped-def]
    """(token, count) of the most frequent continuation over tree and tail, the one seen last of equals; count 0: none."""
    mask = len(a.tokens) - 1
    token, count, seen = 0, 0, -1
    if node != 0 and used < a.nodes[node, LENGTH]:
        seen = a.nodes[node, LABEL] + used
        token, count = a.tokens[seen & mask], a.nodes[node, COUNT]
    elif node != 0 and _best_child(a, node) != 0:
        child = _best_child(a, node)
        token, count, seen = a.nodes[child, TOKEN], a.nodes[child, COUNT], a.nodes[child, LABEL]
    for index in range(num_ends):
        if ends[index] >= stop:
            continue
        other = a.tokens[ends[index] & mask]
        below, _ = _step(a, node, used, other)
        times = a.nodes[below, COUNT] if below != 0 else 0
        for again in range(num_ends):
            if ends[again] < stop and a.tokens[ends[again] & mask] == other:
                times += 1
        if times > count or (times == count and ends[index] > seen):
            token, count, seen = other, times, ends[index]
    return token, count


@compiled
def _follow(a, node, used, ends, num_ends, stop, room, limit, min_chance, ids, paths):  # type: ignore[no-untyped-def]
    """Walk along the likeliest tokens; returns (how many, their summed path probabilities)."""
    mask = len(a.tokens) - 1
    chance, score, num = 1.0, 0.0, 0
    while num < limit and num < room:
        total = num_ends + (a.nodes[node, COUNT] if node != 0 else 0)
        token, count = _likeliest(a, node, used, ends, num_ends, stop)
        if count == 0:
            break
        chance *= count / total
        if chance < min_chance:
            break
        ids[num], paths[num] = token, chance
        score += chance
        num += 1
        node, used = _step(a, node, used, token)
        left = 0
        for index in range(num_ends):
            if ends[index] < stop and a.tokens[ends[index] & mask] == token:
                ends[left] = ends[index] + 1
                left += 1
        num_ends = left
    return num, score


@compiled
def search(a, pattern, depth, limit, factor, min_chance, tail, stop, out_ids, out_paths):  # type: ignore[no-untyped-def]
    """The best continuation over match lengths; tail to stop - 1 are the starts of suffixes that are not in the tree.

    Returns (tokens written to out_ids and out_paths, score, match length).
    """
    mask = len(a.tokens) - 1
    ends = np.empty(depth, np.int64)  # where occurrences in the tail end
    num_ends = 0
    for end in range(tail + 1, stop + 1):
        if a.tokens[(end - 1) & mask] == pattern[len(pattern) - 1]:
            ends[num_ends] = end
            num_ends += 1
    work, ids, paths = np.empty(depth, np.int64), np.empty(depth, np.int32), np.empty(depth, np.float64)
    best_num, best_score, best_match = 0, 0.0, 0
    for match in range(1, len(pattern)):
        node, used = _locate(a, pattern, len(pattern) - match)
        if match > 1:
            left = 0
            for index in range(num_ends):
                start = ends[index] - match
                if start >= tail and a.tokens[start & mask] == pattern[len(pattern) - match]:
                    ends[left] = ends[index]
                    left += 1
            num_ends = left
        if node == 0 and num_ends == 0:
            break
        work[:num_ends] = ends[:num_ends]
        allowed = min(limit, int(np.floor(match * factor + 1e-6)))
        num, score = _follow(a, node, used, work, num_ends, stop, depth - match, allowed, min_chance, ids, paths)
        if num > 0 and score >= best_score:
            best_num, best_score, best_match = num, score, match
            out_ids[:num] = ids[:num]
            out_paths[:num] = paths[:num]
    return best_num, best_score, best_match
