"""One stream: what the loop writes, one reader reads, and nothing is lost on the way."""

import asyncio

import pytest

from kvloom.scheduler import Finished, FinishReason, SchedulerError, Timings, TokenStream, Usage
from tests.scheduler.engines import read

DONE = Finished("r", FinishReason.LENGTH, Usage(1, 1), Timings(0.0, 1.0))


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_each_token_wakes_a_reader_that_waits() -> None:
    stream, heard = TokenStream("r"), list[list[int]]()

    async def listen() -> None:
        async for delta in stream:
            heard.append(delta.token_ids)

    reader = asyncio.create_task(listen())
    for token in (1, 2, 3):
        await settle()
        stream.push(token)
    await settle()
    stream.finish(DONE)
    await reader
    assert heard == [[1], [2], [3]]
    assert stream.final is DONE


async def test_what_a_slow_reader_missed_comes_as_one() -> None:
    stream = TokenStream("r")
    for token in (1, 2, 3):
        stream.push(token)
    assert (await anext(stream)).token_ids == [1, 2, 3]
    stream.push(4)
    stream.finish(DONE)
    assert (await anext(stream)).token_ids == [4], "what is buffered at the end can still be read"
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_tokens_and_end_while_the_reader_is_on_its_way() -> None:
    stream = TokenStream("r")
    reader = asyncio.create_task(read(stream))
    await settle()
    stream.push(1)
    stream.push(2)
    stream.finish(DONE)
    assert await reader == [1, 2]


async def test_an_end_without_a_token_wakes_the_reader() -> None:
    stream = TokenStream("r")
    reader = asyncio.create_task(read(stream))
    await settle()
    stream.finish(DONE)
    assert await reader == []


@pytest.mark.parametrize("after_the_token", [False, True])
async def test_a_reader_that_is_cancelled_takes_nothing_with_it(after_the_token: bool) -> None:
    stream = TokenStream("r")
    reader = asyncio.ensure_future(anext(stream))
    await settle()
    if after_the_token:
        stream.push(1)  # it is woken, and cancelled before it runs
    reader.cancel()
    if not after_the_token:
        stream.push(1)
    with pytest.raises(asyncio.CancelledError):
        await reader
    stream.push(2)
    assert (await anext(stream)).token_ids == [1, 2]


async def test_a_read_that_timed_out_can_be_tried_again() -> None:
    stream = TokenStream("r")
    for token in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.001)
        stream.push(token)
        assert (await anext(stream)).token_ids == [token]


async def test_two_readers_at_once_are_refused() -> None:
    stream = TokenStream("r")
    first = asyncio.create_task(read(stream))
    await settle()
    with pytest.raises(SchedulerError, match="two tasks read the stream of request 'r'"):
        await anext(stream)
    stream.push(1)
    stream.finish(DONE)
    assert await first == [1], "the first is not disturbed"


async def test_a_second_reader_that_slips_in_leaves_nobody_waiting_for_ever() -> None:
    """It takes the token that woke the first, and waits for the next before the first has run: one is refused."""
    stream = TokenStream("r")
    first = asyncio.ensure_future(read(stream))
    await settle()
    second = asyncio.ensure_future(read(stream))
    stream.push(1)
    await settle()
    stream.push(2)
    stream.finish(DONE)
    await settle()
    ends = await asyncio.gather(first, second, return_exceptions=True)
    assert [1, 2] in ends
    assert sum(isinstance(end, SchedulerError) for end in ends) == 1


async def test_one_after_the_other_is_fine() -> None:
    stream = TokenStream("r")
    stream.push(1)
    assert (await anext(stream)).token_ids == [1]
    stream.push(2)
    stream.finish(DONE)
    assert await asyncio.create_task(read(stream)) == [2]
