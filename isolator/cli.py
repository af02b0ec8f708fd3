"""The command line: one verb a function, its work imported only when it runs."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from isolator import __version__, output
from isolator.doctor import Scope
from isolator.errors import IsolatorError

app = typer.Typer(
    name="isolator",
    help="GPU-memory quotas for containers that share a GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Gpu(StrEnum):
    """Which GPU the demo runs on."""

    SIM = "sim"
    REAL = "real"


def _show_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """GPU-memory quotas for containers that share a GPU."""


@app.command()
def libpath(
    arch: Annotated[
        str | None,
        typer.Option(help="x86_64 (amd64) or aarch64 (arm64); this machine's by default."),
    ] = None,
) -> None:
    """Print the path of libvgpu.so."""
    from isolator.libpath import library

    with output.printing():
        print(library(arch))


@app.command()
def demo(
    gpu: Annotated[Gpu, typer.Option(help="The simulated GPU, or a real one.")] = Gpu.SIM,
    limit: Annotated[str, typer.Option(help="Quota of each tenant (simulated: 512m to 9g).")] = "4147m",
) -> None:
    """Run two tenants on one GPU and show that each is held to its quota."""
    from isolator.demo import run

    raise typer.Exit(run(gpu.value, limit))


@app.command()
def webhook() -> None:
    """Serve the mutating webhook (settings: environment, ISOLATOR_WEBHOOK_*)."""
    from isolator.webhook.server import run

    raise typer.Exit(run())


@app.command()
def monitor() -> None:
    """Serve this node's tenants as Prometheus metrics (settings: environment, ISOLATOR_MONITOR_*)."""
    from isolator.monitor.server import run

    raise typer.Exit(run())


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the status document and end.")] = False,
    interval: Annotated[
        float | None, typer.Option(min=0.2, max=3600, help="Seconds between two looks. [default: 2]")
    ] = None,
    url: Annotated[str | None, typer.Option(help="URL of a monitor; this node's by default.")] = None,
    mount: Annotated[
        Path | None,
        typer.Option(parser=Path, metavar="PATH", help="Read this folder instead of asking a monitor."),
    ] = None,
) -> None:
    """Show what this node's tenants hold of their GPU memory, like nvidia-smi."""
    from isolator.top.run import run

    raise typer.Exit(run(once, json, interval, url, mount))


@app.command()
def doctor(
    scope: Annotated[Scope, typer.Argument(help="pod, node or cluster; found out by default.")] = Scope.AUTO,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    pid: Annotated[int | None, typer.Option(min=1, help="pod: a process of the container.")] = None,
    # A parser of its own: the usual one looks at the path, and that may hang.
    mount: Annotated[
        Path | None,
        typer.Option(parser=Path, metavar="PATH", help="pod, node: paths.containerVgpuMount."),
    ] = None,
    monitor: Annotated[str | None, typer.Option(help="node: URL of the node's monitor.")] = None,
    label: Annotated[str | None, typer.Option(help="node: text of label nvidia.com/gpu.memory.")] = None,
    kubeconfig: Annotated[Path | None, typer.Option(help="cluster: kubeconfig file.")] = None,
    context: Annotated[str | None, typer.Option(help="cluster: context of the kubeconfig.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="cluster: of the pod.")] = None,
    pod: Annotated[str | None, typer.Option(help="cluster: one pod, NAME or NAMESPACE/NAME.")] = None,
    patience: Annotated[
        float | None,
        typer.Option(min=0.1, max=60, help="Seconds to look at most. [default: 0.8; cluster: 5]"),
    ] = None,
) -> None:
    """Say what is wrong in this container, on this node or in this cluster; a cause has an exit status."""
    from isolator.doctor.scope import Options, examine

    options = Options(pid, mount, monitor, label, kubeconfig, context, namespace, pod, patience)
    report = examine(scope, options)
    with output.printing():
        print(report.json() if json else "\n".join(report.lines()))
    raise typer.Exit(report.exit_status)


@app.command(
    add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def libsync(context: typer.Context) -> None:
    """Keep this node installed: library, preload file, cache folders (--help lists its options)."""
    # The installer idles on every node: a process of its own carries none of these libraries.
    os.execv(sys.executable, [sys.executable, "-m", "isolator.libsync", *context.args])


def _fail(message: object, status: int) -> NoReturn:
    if str(message):  # help shown in place of a missing verb carries none
        print(f"isolator: {output.plain(str(message))}", file=sys.stderr)
    sys.exit(status)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line; an error is one line on standard error and an exit status."""
    output.prepare()
    try:
        status = app(arguments, standalone_mode=False)
    except IsolatorError as error:
        _fail(error, error.exit_status)
    except typer.Abort:
        _fail("interrupted", 130)
    except Exception as error:
        show = getattr(error, "format_message", None)
        if show is None:
            raise
        _fail(show().replace("Value error, ", ""), getattr(error, "exit_code", 2))
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
