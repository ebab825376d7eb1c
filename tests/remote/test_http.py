"""The HTTP server under `serve` and the OTLP port, where the process may open few files."""

import subprocess
import sys

SERVER = """
import asyncio, resource, socket, sys
from starlette.responses import PlainTextResponse
from specscope.remote.http import Application, HttpServer, Limits, bind

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

async def app(scope, receive, send):
    await PlainTextResponse("here")(scope, receive, send)

async def serve():
    bound = bind("127.0.0.1", 0)
    refuse = lambda refusal: PlainTextResponse(refusal.message, refusal.status)
    server = HttpServer(Application(app, "127.0.0.1", refuse, Limits(header_seconds=2.0)), bound)
    await server.start()
    print(bound.getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await server.close()

asyncio.run(serve())
"""
CLIENTS = """
import socket, sys, urllib.request
port = int(sys.argv[1])
silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
for connection in silent:
    connection.recv(100)  # a refusal, or that the headers came too late
print(urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30).read().decode())
"""


def test_silent_connections_leave_files_to_the_server():
    """300 of them where 256 files may be open: it refuses some, says nothing, and answers when they are gone."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER], **pipes) as server:
        port = server.stdout.readline().strip()
        clients = subprocess.run([sys.executable, "-c", CLIENTS, port], capture_output=True, text=True, timeout=60)
        _, told = server.communicate("end\n", timeout=30)
    assert (clients.stdout.strip(), told) == ("here", "")
