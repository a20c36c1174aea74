#!/usr/bin/env python
"""Submits a run to a Ray cluster, shows its log, and exits with the run's own status.

    launch/submit.py [OPTIONS] RECIPE [KEY=VALUE]...

`ray job submit` does the same but for three things: it exits with 1 whatever the run's status was
(and with 0 when the job was stopped), it uploads the folder it is told to, models included, and
`ray job stop` gives a run 3 seconds, too few to save.

Ctrl-C leaves the job running. Nothing here trains.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import click
import yaml

STOP_WAIT_S = 120
STOPPED = 130


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--address", help="Of the dashboard; otherwise RAY_API_SERVER_ADDRESS, RAY_ADDRESS.")
@click.option(
    "--upload",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder to send along and to start in. Without it the job starts in the folder this is "
    "typed in, which the head node must see.",
)
@click.option(
    "--runtime-env",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="YAML or JSON file of your own runtime environment; what it says wins.",
)
@click.option("--submission-id", help="Name of the job.")
@click.option("--no-wait", is_flag=True, help="Do not follow the log.")
def submit(
    recipe: str,
    overrides: tuple[str, ...],
    address: str | None,
    upload: Path | None,
    runtime_env: Path | None,
    submission_id: str | None,
    no_wait: bool,
) -> None:
    """Run RECIPE on the cluster: `rock-opd train RECIPE [KEY=VALUE]...` as a Ray job."""
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    command = "exec " + shlex.join(["rock-opd", "train", recipe, *overrides])
    if upload is None:
        command = f"cd {shlex.quote(working_directory())} && {command}"
    env = job_environment(own_environment(runtime_env), upload)
    if address and address != "auto":
        use_address(address)
    logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.WARNING)
    to = f" to {address}" if address else ""
    try:
        client = JobSubmissionClient(address)
        job = client.submit_job(entrypoint=command, submission_id=submission_id, runtime_env=env)
    except AuthenticationError as error:
        raise click.ClickException(
            f"not submitted, the token is not the cluster's: {one_line(error)}"
        ) from None
    except Exception as error:  # Ray raises a dozen kinds for addresses and environments
        raise click.ClickException(f"not submitted{to}: {one_line(error)}") from None
    ray_job = f"RAY_API_SERVER_ADDRESS={shlex.quote(address)} ray job" if address else "ray job"
    click.echo(f"job {job}\n  {ray_job} logs -f {job}\n  {ray_job} stop {job}", err=True)
    if no_wait:
        return
    try:
        sys.exit(follow(client, job))
    except KeyboardInterrupt:
        click.echo(f"\nthe job goes on; to stop it: {ray_job} stop {job}", err=True)
        sys.exit(STOPPED)
    except Exception as error:  # the network's, aiohttp's and Ray's own kinds
        raise click.ClickException(
            f"the log of job {job} cannot be followed any more, the job may go on: "
            f"{one_line(error)}; {ray_job} status {job}"
        ) from None


class BadInput(click.ClickException):
    """What is wrong with what was typed, or with the files it names."""

    exit_code = 2


def use_address(address: str) -> None:
    """Makes this process ask that cluster and no other.

    Ray 2.60 lets RAY_API_SERVER_ADDRESS and RAY_ADDRESS win over the address its job client is
    given. Can go when the argument wins there.
    """
    os.environ["RAY_API_SERVER_ADDRESS"] = address
    os.environ.pop("RAY_ADDRESS", None)


def working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise BadInput("the folder this is typed in was removed; change to another one") from None


def own_environment(file: Path | None) -> dict[str, Any]:
    """What the user's file says, as far as it can be known to be wrong before Ray reads it."""
    if file is None:
        return {}
    try:
        own = yaml.safe_load(file.read_text(encoding="utf-8"))
        own = json.loads(json.dumps({} if own is None else own, allow_nan=False))
    except (yaml.YAMLError, ValueError, TypeError, OSError, RecursionError) as error:
        raise BadInput(f"--runtime-env {file}: {one_line(error)}") from None
    if not isinstance(own, dict):
        raise BadInput(
            f"--runtime-env {file}: expected a mapping such as {{env_vars: ...}}, got {own!r:.60}"
        )
    env_vars = own.get("env_vars")
    if env_vars is not None and not isinstance(env_vars, dict):
        raise BadInput(
            f"--runtime-env {file}: env_vars must be a mapping of names to strings, got "
            f"{env_vars!r:.60}"
        )
    for name, value in (env_vars or {}).items():
        if not isinstance(value, str):  # not shown: it may be a secret
            raise BadInput(
                f"--runtime-env {file}: env_vars: the value of {name} is no string; write it in "
                "quotes"
            )
    return own


def job_environment(own: dict[str, Any], upload: Path | None) -> dict[str, Any]:
    """The user's runtime environment, with room to save when the job is stopped."""
    env_vars = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **(own.get("env_vars") or {})}
    made = {**own, "env_vars": env_vars}
    if upload is not None:
        if upload.resolve() == Path(upload.resolve().anchor):
            raise BadInput("--upload /: would send this whole machine; name the run's folder")
        made.setdefault("working_dir", str(upload))
    return made


def one_line(error: Exception) -> str:
    """An error's words on one line, cut."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 500 else text[:500] + " ..."


def follow(client, job: str) -> int:
    """Shows the log until the job is over; the status to exit with."""

    async def show() -> int:
        shown = 0
        async for text in client.tail_job_logs(job):
            click.echo(text, nl=False)
            shown += len(text)
        return shown

    shown = asyncio.run(show())
    while not (status := client.get_job_status(job)).is_terminal():
        time.sleep(0.5)
    # Ray 2.60 ends the stream at the status, not at the log's end.
    click.echo(client.get_job_logs(job)[shown:], nl=False)
    if status == "SUCCEEDED":
        return 0
    if status == "STOPPED":
        click.echo(f"job {job} was stopped", err=True)
        return STOPPED
    info = client.get_job_info(job)
    if info.driver_exit_code is None:
        click.echo(f"job {job} failed: {info.message}", err=True)
    return info.driver_exit_code or 1


if __name__ == "__main__":
    submit()
