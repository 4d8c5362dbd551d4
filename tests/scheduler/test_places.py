"""Waiting in front of a full queue: in the order of coming, whatever happens to the others."""

import asyncio
from collections.abc import Sequence

from kvloom.scheduler.places import QueuePlaces


class Queue:
    """`room` places; those who come in take one."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.entered: list[str] = []
        self.places = QueuePlaces(lambda: self.room == 0)

    async def come(self, name: str) -> None:
        await self.places.wait()
        assert self.room > 0
        self.room -= 1
        self.entered.append(name)

    async def coming(self, names: Sequence[str]) -> dict[str, asyncio.Task[None]]:
        tasks = {}
        for name in names:
            tasks[name] = asyncio.create_task(self.come(name))
            await asyncio.sleep(0)
        return tasks

    async def free(self, count: int) -> None:
        self.room += count
        self.places.grant(self.room)
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_at_once_while_there_is_room() -> None:
    queue = Queue(2)
    await queue.coming("ab")
    assert (queue.entered, len(queue.places)) == (["a", "b"], 0)


async def test_in_the_order_of_coming() -> None:
    queue = Queue(0)
    tasks = await queue.coming("abcde")
    assert len(queue.places) == 5
    for count in (1, 2, 5):
        await queue.free(count)
    assert "".join(queue.entered) == "abcde"
    assert all(task.done() for task in tasks.values())


async def test_those_who_come_later_do_not_pass_those_who_are_on_their_way() -> None:
    queue = Queue(0)
    await queue.coming("ab")
    late = asyncio.create_task(queue.come("late"))
    queue.room = 1
    queue.places.grant(1)  # a is told, but has not run when the late one asks
    await settle()
    assert queue.entered == ["a"]
    await queue.free(2)
    assert queue.entered == ["a", "b", "late"]
    assert late.done()


async def test_places_that_are_taken_away_change_no_order() -> None:
    """Somebody who would not wait took both: a and b wait again, in their old order, before c."""
    queue = Queue(0)
    tasks = await queue.coming("abc")
    queue.places.grant(2)
    await settle()
    assert (queue.entered, len(queue.places)) == ([], 3)
    await queue.free(3)
    assert queue.entered == ["a", "b", "c"]
    assert all(task.done() for task in tasks.values())


async def test_who_gives_up_leaves_the_line() -> None:
    queue = Queue(0)
    tasks = await queue.coming("abc")
    tasks["b"].cancel()
    await settle()
    assert len(queue.places) == 2
    queue.room = 1
    queue.places.grant(1)
    tasks["a"].cancel()  # at the very moment that it is let in: the place is the next one's
    await settle()
    assert queue.entered == ["c"]


async def test_a_grant_to_nobody() -> None:
    queue = Queue(1)
    queue.places.grant(3)
    await queue.come("a")
    assert queue.entered == ["a"]
