"""List other users who are connected to this process."""

from __future__ import annotations

import socket
import time

import pytest
from other_user import needs_root, start_as_other_user

from megarl.launch import exit_status
from megarl.processes.node import list_connected_users

pytestmark = pytest.mark.alone


def test_ignores_connections_of_the_same_user() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, _ = server.accept()
        with connection:
            client.sendall(b"x")
            assert list_connected_users() == []


@needs_root
def test_names_other_users_also_when_a_rank_is_lost() -> None:
    code = """
to = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("connected", flush=True)
sys.stdin.read()
"""
    error = ConnectionError("rank 1 disconnected: closed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = start_as_other_user(code, str(server.getsockname()[1]))
        try:
            connection, _ = server.accept()
            with connection:
                assert process.stdout is not None and process.stdout.readline() == "connected\n"
                assert list_connected_users() == [65534]
                _, _, line = exit_status.classify_error(error)
                assert (
                    "; user 65534 of this machine is connected to its ports (SECURITY.md, What is not closed)" in line
                )
                process.communicate("")
                time.sleep(0.1)
                assert list_connected_users() == []
                assert "65534" not in exit_status.classify_error(error)[2]
        finally:
            process.kill()
