"""A command that is one rank of a job which another launcher started, until the ranks have met."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weft.cli.output import err
from weft.comm.address import RankAddress
from weft.config.errors import STOPPED, ConfigError, ConfigErrors
from weft.elastic.signals import interrupted_once
from weft.train.run_folder import RunFolder
from weft.train.stop import own_stop


def stoppable(address: RankAddress, work: Callable[[], int]) -> int:
    """The exit code of ``work``, or that of what was asked to stop before the ranks had met."""
    stop = own_stop()
    with interrupted_once():
        stop.ends_at_once = True
        try:
            return work()
        except KeyboardInterrupt:
            if not stop.ends_at_once:
                raise
            if address.local_rank == 0:
                err.print("stopped before training began")
            return STOPPED
        finally:
            stop.ends_at_once = False


@contextmanager
def refusals_on_the_terminal() -> Iterator[None]:
    """A rank prints into its log; but every machine says on its terminal why it was refused."""
    terminal = os.dup(2)
    try:
        yield
    except (ConfigError, ConfigErrors, KeyboardInterrupt):
        os.dup2(terminal, 2)
        raise
    finally:
        os.close(terminal)


@contextmanager
def no_new_logs(folder: RunFolder) -> Iterator[None]:
    """A job that never began leaves none."""
    try:
        yield
    except (ConfigError, ConfigErrors):
        folder.drop_new_logs()
        raise
    except KeyboardInterrupt:
        if own_stop().ends_at_once:
            folder.drop_new_logs()
        raise
