"""The command line of the installer: argparse, because typer costs more than this process may."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from pathlib import Path
from typing import NoReturn

from isolator import logs, mountpath
from isolator.address import split_address
from isolator.errors import UsageError
from isolator.libsync.agent import Agent, Options
from isolator.libsync.arguments import Parser, add_logging
from isolator.names import (
    DEFAULT_VGPU_MOUNT,
    ENV_ISOLATOR_POD_UID,
    ENV_NODE_NAME,
    LIBSYNC_PORT,
    PODS_DIRECTORY,
    PRELOAD_KEY,
)


def _address(text: str) -> tuple[str, int]:
    try:
        return split_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return value


def _mount(text: str) -> Path:
    # Not resolved: what is a link on the node is ours to refuse, not to follow.
    try:
        return Path(mountpath.check(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parser() -> Parser:
    """The options of the installer."""
    made = Parser(
        prog="isolator libsync",
        description="Keep this node installed: library, preload file, cache folders.",
        epilog="isolator libsync uninstall --help: take the installation off all nodes.",
    )
    add = made.add_argument
    add("--mount", type=_mount, default=Path(DEFAULT_VGPU_MOUNT), help="folder on the node (%(default)s)")
    add("--preload", type=Path, help=f"refuse unless this file says what <mount>/{PRELOAD_KEY} will")
    add("--library", default="auto", help="library to install; auto: the image's, of the node's architecture")
    add("--version-file", type=Path, help="file that says which version --library is; default: this one")
    add("--pods", type=Path, default=Path(PODS_DIRECTORY), help="the kubelet's folder of pods (%(default)s)")
    add("--group", type=int, help="numeric group that alone may look into the mount; default: anyone may")
    add("--interval", type=_seconds, default=30.0, help="seconds between two passes (%(default)s)")
    add("--listen", type=_address, default=("", LIBSYNC_PORT), help=f"probes: [host]:port (:{LIBSYNC_PORT})")
    add("--once", action="store_true", help="one pass; exit status 0: installed and verified, 1: a problem")
    add(
        "--remove",
        action="store_true",
        help="take the installation off where no injected pod is left; with --once ends after one pass",
    )
    add_logging(made)
    return made


def _stop(number: int, frame: object) -> NoReturn:
    # Anywhere in a pass: every step is whole or not done, as after a kill.
    raise SystemExit(0)


def main(arguments: list[str]) -> int:
    """Runs one verb; answers the exit status."""
    if arguments[:1] == ["uninstall"]:
        from isolator.libsync import uninstall

        return uninstall.main(arguments[1:])
    asked = parser().parse_args(arguments)
    logs.setup(asked.log_level, asked.log_json)
    agent = Agent(
        Options(
            mount=asked.mount,
            preload=asked.preload,
            library=asked.library,
            version_file=asked.version_file,
            pods=asked.pods,
            interval=asked.interval,
            node=os.environ.get(ENV_NODE_NAME) or platform.node(),
            own_pod=os.environ.get(ENV_ISOLATOR_POD_UID) or None,
            remove=asked.remove,
            group=asked.group,
        )
    )
    # PID 1 has no default action: without handlers the kubelet would wait and kill.
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, {*ends, signal.SIGHUP})
    for number in ends:
        signal.signal(number, _stop)
    if not asked.once:
        _serve(agent, asked.listen)
    # Blocked in the probes' thread, so that the main one is interrupted; SIGHUP is waited for instead.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
    if asked.once:
        return 0 if agent.run_once() else 1
    agent.loop()
    return 0


def _serve(agent: Agent, address: tuple[str, int]) -> None:
    from isolator.libsync.endpoint import Server

    try:
        Server(address, agent.ready, agent.healthy).start()
    except OSError as error:
        raise UsageError(f"cannot listen on {address[0]}:{address[1]}: {error.strerror}") from error


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        print(f"isolator libsync: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
