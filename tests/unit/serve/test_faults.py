"""Faults of requests and clients against a real server, those of studies/serve_faults.py that take less than a second."""

import os
import socket

import pytest

import serve_faults
from foreword.serve.frames import FrameSocket
from foreword.serve.messages import LENGTH
from real_server import RealServer
from serve_faults import FAULTS, Fault

QUICK = [fault for fault in FAULTS if fault.is_quick]


def test_there_are_faults_of_both_kinds() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(QUICK) > 50 and len(FAULTS) - len(QUICK) > 15 and len({*names}) == len(names)


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.name)
def test_a_fault_is_survived(real_server: RealServer, fault: Fault) -> None:
    """The answer is what is expected. Afterwards the engine is the same, all slots are free, and requests are served."""
    engine = real_server.engine
    fault.probe(real_server)
    serve_faults.still_serves(real_server, engine)


def test_clients_that_leave_are_no_failures(real_server: RealServer) -> None:
    real_server.connect().sendall(b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: 9\r\n\r\n{")
    assert real_server.ask(serve_faults.SHORT).status == 200
    assert not real_server.wrote("Traceback"), real_server.lines


def test_an_engine_reads_from_any_descriptor() -> None:
    """A server with a thousand clients that starts its engine again gives it a descriptor above them."""
    ours, theirs = socket.socketpair()
    with ours, serve_faults.many_files():
        high = socket.socket(fileno=os.dup2(theirs.detach(), 1500))
        with high:
            ours.sendall(LENGTH.pack(3) + b"abc")
            frames = FrameSocket(high)
            assert frames.received(wait=5.0) == [b"abc"] and frames.received(wait=0.01) == []
