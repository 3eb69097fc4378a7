# SPDX-License-Identifier: Apache-2.0
"""TCP to a server through wires that tests cut and heal.

Each `Wire` has an address of its own, which stays the same when the server is started again on another port, so a
server can always listen on port 0.
"""

import asyncio
import socket
import struct
import threading

CHUNK = 1 << 16


class Wire:
    """One way to the server. Made by `Wires`, whose thread moves its bytes."""

    def __init__(self, wires):
        self.wires, self.ends, self.ports = wires, set(), set()
        self.flowing = asyncio.Event()
        self.flowing.set()

    async def open(self):
        self.listener = await asyncio.start_server(self.connect, "127.0.0.1", 0)
        self.address = "127.0.0.1:%d" % self.listener.sockets[0].getsockname()[1]
        return self

    async def connect(self, reader, writer):
        try:
            await self.flowing.wait()
            host, port = self.wires.target.rsplit(":", 1)
            to_reader, to_writer = await asyncio.open_connection(host, int(port))
        except (OSError, AttributeError):  # there is no server at the moment
            writer.transport.abort()
            return
        port = to_writer.get_extra_info("sockname")[1]
        self.ports.add(port)
        ends = {writer, to_writer}
        self.ends |= ends
        for end in ends:
            end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.wait(
            [asyncio.ensure_future(self.pump(reader, to_writer)), asyncio.ensure_future(self.pump(to_reader, writer))],
            return_when=asyncio.FIRST_COMPLETED,
        )
        await self.flowing.wait()  # over a wire that is cut, neither end hears that the other one is gone
        for end in ends:
            end.transport.abort()
        self.ends -= ends
        self.ports.discard(port)

    async def pump(self, reader, writer):
        try:
            while content := await reader.read(CHUNK):
                await self.flowing.wait()
                writer.write(content)
                await writer.drain()
        except OSError:
            pass

    def serves(self, peer):
        """Whether the server knows this wire by this address."""
        return peer.startswith("127.0.0.1:") and int(peer.rsplit(":", 1)[1]) in set(self.ports)

    def cut(self):
        """From now on, bytes stay where they are, and nobody is told."""
        self.wires.call(self.flowing.clear)

    def heal(self, reset):
        """Bytes flow again; with `reset`, on new connections only: both ends of the old ones are reset."""

        def mend():
            for end in self.ends if reset else ():
                linger = struct.pack("ii", 1, 0)
                end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                end.transport.abort()
            self.flowing.set()

        self.wires.call(mend)

    def close(self):
        def close():
            self.listener.close()
            for end in self.ends:
                end.transport.abort()
            self.flowing.set()

        self.wires.call(close)


class Wires:
    """The thread of all wires. `target` is the server's address, or None while there is no server."""

    def __init__(self):
        self.target, self.loop = None, asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def make(self):
        async def make():
            return await Wire(self).open()

        return asyncio.run_coroutine_threadsafe(make(), self.loop).result()

    def call(self, action):
        async def act():
            action()

        asyncio.run_coroutine_threadsafe(act(), self.loop).result()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        async def finish():
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(finish(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
