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
import os
import shlex
import sys
import time
from pathlib import Path

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
        command = f"cd {shlex.quote(os.getcwd())} && {command}"
    env = yaml.safe_load(runtime_env.read_text()) if runtime_env else None
    try:
        client = JobSubmissionClient(address)
        job = client.submit_job(
            entrypoint=command,
            submission_id=submission_id,
            runtime_env=job_environment(env or {}, upload),
        )
    except AuthenticationError as error:
        raise click.ClickException(
            f"not submitted, the token is not the cluster's: {error}"
        ) from None
    except (ConnectionError, RuntimeError) as error:
        raise click.ClickException(f"not submitted: {error}") from None
    click.echo(f"job {job}\n  ray job logs -f {job}\n  ray job stop {job}", err=True)
    if no_wait:
        return
    try:
        sys.exit(follow(client, job))
    except KeyboardInterrupt:
        click.echo(f"\nthe job goes on; to stop it: ray job stop {job}", err=True)
        sys.exit(STOPPED)


def job_environment(own: dict, upload: Path | None) -> dict:
    """The user's runtime environment, with room to save when the job is stopped."""
    env_vars = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **(own.get("env_vars") or {})}
    made = {**own, "env_vars": env_vars}
    if upload is not None:
        made.setdefault("working_dir", str(upload))
    return json.loads(json.dumps(made))


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
