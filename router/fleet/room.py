"""What a decode pool has to give, and what a request takes of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """Places for sequences, and blocks for their KV: what there is, or what a request takes."""

    seats: float = 0
    blocks: float = 0

    def __add__(self, other: "Room") -> "Room":
        return Room(self.seats + other.seats, self.blocks + other.blocks)

    def __sub__(self, other: "Room") -> "Room":
        return Room(self.seats - other.seats, self.blocks - other.blocks)

    def within(self, room: "Room", factor: float) -> bool:
        return self.seats <= factor * room.seats and self.blocks <= factor * room.blocks
