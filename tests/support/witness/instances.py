"""Observes registrations: which ranks an instance has, and which namespace it is in."""

from __future__ import annotations

from kvass import messages as m
from kvass.types import RankLayout
from tests.support.witness.records import BrokenLawError, Instance, Namespace, contradicts
from tests.support.witness.state import ObservedState


class InstanceWitness:
    """Checks every registration."""

    def __init__(self, state: ObservedState) -> None:
        self.state = state

    def register(self, connection: int, msg: m.Register, reply: m.Registered) -> None:
        """A rank or a scheduler has registered."""
        if not (1 <= msg.ranks <= 128 and -1 <= msg.rank < msg.ranks):
            raise BrokenLawError(f"law 2: registered rank {msg.rank} of {msg.ranks}")
        instance = self.state.instances.setdefault(msg.instance, Instance(msg.instance, msg))
        if instance.connections.get(msg.rank, connection) != connection:
            raise BrokenLawError(f"two live connections of {msg.instance} rank {msg.rank}")
        instance.connections[msg.rank] = connection
        self.state.roles[connection] = (instance, msg.rank)
        if msg.rank >= 0:
            instance.workers[msg.rank] = msg
        elif msg.generation != instance.generation:
            self._new_generation(instance, msg.generation)
        missing = tuple(r for r in range(msg.ranks) if r not in instance.workers)
        if bool(reply.namespace) == bool(missing):
            raise BrokenLawError(f"{msg.instance} lacks {missing}, yet the reply is {reply}")
        if missing:
            return
        namespace = instance.namespace = self._namespace(instance)
        if self.state.by_digest.setdefault(reply.namespace, namespace) is not namespace:
            raise BrokenLawError("law 10: two layouts or identities in one namespace")

    def refused(self, msg: m.Register, error: m.Error) -> None:
        """A registration was refused: it must contradict another rank's, if that is the reason."""
        if error.code == "contradiction":
            instance = self.state.instances.get(msg.instance)
            if instance is None or not contradicts(msg, instance):
                raise BrokenLawError(f"law 2: {msg.rank} contradicts nothing, yet: {error}")

    def _new_generation(self, instance: Instance, generation: bytes) -> None:
        """Weights were replaced in place. Rows being written may mix old and new weights; rows of
        the old generation are of no use to anybody else."""
        state = self.state
        for w in state.reservations.values():
            w.failed = w.failed or (bool(w.owing) and w.instance.name == instance.name)
        left, instance.namespace, instance.generation = instance.namespace, None, generation
        in_use = any(x.namespace is left for x in state.instances.values())
        if left is not None and left.private and not in_use:
            for row in [row for row in state.ready if row[0] is left]:
                del state.ready[row]

    def _namespace(self, instance: Instance) -> Namespace:
        first = instance.first
        workers = [instance.workers[r] for r in range(first.ranks)]
        shards: list[RankLayout] = [
            next(w.layout for w in workers if w.shard == s and w.layout is not None)
            for s in range(first.world_size)
        ]
        key: tuple[object, ...] = (
            tuple(sorted(first.identity.items())),
            first.chunk_tokens,
            tuple((w.shard, w.writer, w.layout) for w in workers),
        )
        if instance.generation:
            key += (instance.generation,)
        sizes = tuple(
            tuple(layout.groups[g].shard_bytes(first.chunk_tokens) for layout in shards)
            for g in range(len(shards[0].groups))
        )
        private = bool(instance.generation)
        made = Namespace(key, sizes, shards[0].groups, first.chunk_tokens, private)
        made.floor = self.state.archive.floor.get(key, 0)
        return self.state.namespaces.setdefault(key, made)

    def lost(self, instance: Instance, rank: int) -> None:
        """The connection of a rank ended."""
        del instance.connections[rank]
        self.without(instance, rank)
        if not instance.connections:
            del self.state.instances[instance.name]

    def without(self, instance: Instance, rank: int) -> None:
        """A rank is gone, so nothing may be asked until it is back."""
        if instance.workers.pop(rank, None) is not None:
            instance.namespace = None
