"""When the storages of a recorded graph are live if it runs as eager runs it on the CPU. An analysis for `reshard`.

    live = live_as_eager(program.graph)       a `Liveness`, in another order and with more aliases than the graph has

    n = lerp(m, g, 0.1)                       recorded as `lerp_`: `n` is on the memory of `m`
    w = wait(all_gather(shard))               runs right before the first reader of the parameters
    g = wait(reduce_scatter(grads))           is waited for where it starts

`reinplace` and `schedule_memory` bring a program there, at many times the cost: the peak of what they make was within
1.5 % of this one in transformers of 4 and 16 layers; where they do more than eager, it is lower. On a GPU a gather and
a reduction more are in flight.
Invariant: the graph is not changed. Linear in nodes and edges.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx

from functionalize.analysis.aliases import Aliases, storage_key
from functionalize.analysis.inplace_forms import writes_of
from functionalize.cost.liveness import Liveness
from functionalize.discharge.rules.mutations import is_mutating
from functionalize.passes.constraints import is_wait
from functionalize.passes.patterns import Gather, gathers, is_collective
from functionalize.passes.periods import nodes_of


def live_as_eager(graph: fx.Graph) -> Liveness:
    """The lifetimes of the storages that eager makes."""
    return Liveness(graph, _order(graph), _aliases(graph))


def _aliases(graph: fx.Graph) -> Aliases:
    """The aliases of a graph whose ops write in place what they wrote when they were recorded."""
    aliases = Aliases(graph)
    for node in graph.nodes:
        recorded = node.meta.get("original_aten")
        if recorded is None or not hasattr(recorded, "_schema") or not is_mutating(recorded):
            continue
        for write in writes_of(node) or ():
            aliases.put_on(storage_key(write.value), write.old)
    return aliases


def _order(graph: fx.Graph) -> list[fx.Node]:
    """The nodes with each gather before its first reader, and each other collective waited for where it starts."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    before: dict[fx.Node, list[fx.Node]] = {}  # a reader -> the nodes of gathers that run before it
    moved: set[fx.Node] = set()
    for first, gather in _by_first_reader(graph, place):
        chain = [node for node in _movable(gather) if node not in moved]
        before.setdefault(first, []).extend(sorted(chain, key=place.__getitem__))
        moved.update(chain)
    found: list[fx.Node] = []
    for node in graph.nodes:
        found += before.get(node, ())
        if node not in moved:
            found.append(node)
            waits = list(_waits(node)) if is_collective(node) else []
            found += waits
            moved.update(waits)
    return found


def _by_first_reader(graph: fx.Graph, place: dict[fx.Node, int]) -> list[tuple[fx.Node, Gather]]:
    """The gathers whose parameters are read, each with the first reader, in the order of these."""
    found = []
    for gather in gathers(graph):
        made = {*gather.waits, *gather.unpack}
        readers = [user for node in made for user in node.users if user not in made]
        if readers:
            found.append((min(readers, key=place.__getitem__), gather))
    return sorted(found, key=lambda each: place[each[0]])


def _movable(gather: Gather) -> Iterator[fx.Node]:
    """The nodes of a gather that nothing outside of it needs earlier: two gathers may share a cast of a shard."""
    inside, made = set(nodes_of(gather)), {*gather.waits, *gather.unpack}
    stay: set[fx.Node] = set()
    for node in reversed(nodes_of(gather)):
        needed = node not in made and any(u not in inside or u in stay for u in node.users)
        if needed or node.op != "call_function":
            stay.add(node)
        else:
            yield node


def _waits(started: fx.Node) -> Iterator[fx.Node]:
    """The waits of a collective, each after the node that takes its result out of a list."""
    for user in started.users:
        if is_wait(user):
            yield user
        elif user.target is operator.getitem:
            yield user
            yield from filter(is_wait, user.users)
