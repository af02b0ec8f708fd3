"""Questions to the simulated GPU: a piece of client code runs in a process of its own and says JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

HEAD = """
from simclient import *
import json, os, signal, socket, subprocess, sys, threading, time
me = os.getpid()
def say(*what): print(json.dumps(what[0] if len(what) == 1 else what), flush=True)
def used(mib=True): return sim_process_used(me) >> (20 if mib else 0)
def grow(call, *more):
    "The MiB that a call makes this process's footprint grow by; the call must succeed."
    before = used(); ok(call(*more)); return used() - before
def grown(call, *more):
    "(MiB, value)"
    before = used(); value = ok(call(*more)); return used() - before, value
"""


def source(code: str) -> str:
    """The program that a piece of client code becomes."""
    return HEAD + textwrap.dedent(code)


def ask(env: Mapping[str, str], code: str, *arguments: str, check: bool = True) -> Any:
    """Runs the code; what it said first, or the list of all that it said."""
    command = [sys.executable, "-c", source(code), *arguments]
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=90)
    if check and done.returncode:
        raise AssertionError(f"client ended with {done.returncode}\n{done.stdout}{done.stderr}")
    said = [json.loads(line) for line in done.stdout.splitlines()]
    return said[0] if len(said) == 1 else said


class Client:
    """A client that stays, to be asked one question after another: `client("ok(alloc(4096))")`."""

    def __init__(self, env: Mapping[str, str], start: str = "init()", **options: Any) -> None:
        loop = """
say("ready")
for line in sys.stdin:
    try: say(eval(line))
    except Exception as e: say(repr(e))
"""
        self.process = subprocess.Popen(
            [sys.executable, "-c", source(start) + loop],
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        assert self.process.stdout and self.process.stdout.readline() == '"ready"\n'

    def __call__(self, expression: str) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the client died at {expression!r}"
        return json.loads(line)

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
