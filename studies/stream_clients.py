"""Clients of a server, for http_cost.py: some streams at a time, read and counted. Prints chunks and seconds.

Nothing but the standard library is imported, so that it starts at once.
"""

import asyncio
import json
import sys
import time


async def chunks_of(port: int, tokens: int) -> int:
    """Stream one completion, and return how many chunks it has."""
    body = {"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    payload = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    # HTTP/1.0: the body ends with the connection, and is not in chunks.
    writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(payload) + payload)
    lines = [line async for line in reader if line.startswith(b"data: {")]
    writer.close()
    return len(lines)


async def all_chunks(port: int, streams: int, tokens: int) -> int:
    return sum(await asyncio.gather(*(chunks_of(port, tokens) for _ in range(streams))))


if __name__ == "__main__":
    since = time.perf_counter()
    print(asyncio.run(all_chunks(*map(int, sys.argv[1:]))), time.perf_counter() - since)
