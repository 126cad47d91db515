"""Ask a server's /health every 50 ms, in a process of its own, so that a busy client delays no answer that it times.

`python health.py HOST PORT`: prints the milliseconds of all answers as a JSON list when its stdin is closed. An answer that
is late delays no question, so that a stall counts as often as it was felt. An answer other than 200 counts as infinite.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time

EVERY_S = 0.05
REQUEST = b"GET /health HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"


async def asked(host: str, port: int) -> float:
    """Return the milliseconds of one answer."""
    since = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(REQUEST)
        answer = await reader.read()
        writer.close()
    except OSError:
        return math.inf
    return (time.perf_counter() - since) * 1e3 if b" 200 OK" in answer[:20] else math.inf


async def main(host: str, port: int) -> list[float]:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    tasks = []
    while not ended.is_set():
        tasks.append(asyncio.create_task(asked(host, port)))
        await asyncio.sleep(EVERY_S)
    return await asyncio.gather(*tasks)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], int(sys.argv[2])))))
