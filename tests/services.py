"""A reward service on loopback that answers by its path, rightly or in one of the ways in which services fail."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import numpy as np


class RewardService(BaseHTTPRequestHandler):
    """`/good` rewards long texts and bright clips; `/flaky` fails the first two times."""

    calls: ClassVar[list[str]] = []
    requests: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])), parse_constant=_refuse_constant)
        RewardService.calls.append(self.path)
        RewardService.requests.append(request)
        rows = len(request["prompts"])
        if self.path == "/slow":
            time.sleep(1.0)
        if self.path == "/broken" or (self.path == "/flaky" and RewardService.calls.count("/flaky") < 3):
            self.send_error(500)
            return
        answers = {
            "/nonsense": b"<html>",
            "/endless": b" " * (5 << 20),
            "/full": b'{"error": "CUDA out of memory"}',
            "/fussy": json.dumps({"rewards": [0.5] * (1 if rows == 1 else 9)}).encode(),
            "/words": json.dumps({"rewards": ["good"] * rows}).encode(),
            "/short": json.dumps({"rewards": [1.0]}).encode(),
            "/null": json.dumps({"rewards": [None] + [0.5] * (rows - 1)}).encode(),
            "/nan": json.dumps({"rewards": [float("nan")] + [0.5] * (rows - 1)}).encode(),
        }
        rewards = [_size(completion) for completion in request["completions"]]
        content = answers.get(self.path, json.dumps({"rewards": rewards}).encode())
        try:
            self.send_response(200)
            self.end_headers()
            for part in [content[index : index + 1] for index in range(40)] if self.path == "/trickle" else [content]:
                self.wfile.write(part)
                time.sleep(0.1 if self.path == "/trickle" else 0)
        except (BrokenPipeError, ConnectionResetError):  # the caller has stopped waiting
            pass

    def log_message(self, *_: object) -> None:
        pass


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _size(completion: Any) -> float:
    if isinstance(completion, dict):
        raw = np.frombuffer(base64.b64decode(completion["base64"]), dtype=completion["dtype"])
        return float(raw.mean() / 127.5 - 1)
    return float(len(completion if isinstance(completion, str) else completion[0]["content"]))


@contextmanager
def reward_service() -> Iterator[str]:
    """The address of a service that runs within."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), RewardService)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def raw_service(answers: list[bytes | float]) -> Iterator[str]:
    """The address of a server that answers each request with these bytes, whatever they are, and pauses for numbers."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                for part in answers:
                    if isinstance(part, float):
                        time.sleep(part)
                    else:
                        connection.sendall(part)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
